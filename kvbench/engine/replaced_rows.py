"""Rows of which every token replaces one, at fixed addresses for a CUDA graph.

If a layer is cut after every token, one row of each head leaves for each that comes. The new row takes the slot of the
row that left, so a cut moves no keys and values. Each row's rank, its index in the order of the text, is kept beside
it. The method must take rows in any order (`Method.order_free`).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvbench.cache.layer import Layer
from kvbench.engine.graph_decoding import Norms
from kvbench.engine.quota_rows import QuotaRows
from kvbench.interfaces.codec import Plain
from kvbench.interfaces.rows import Rows
from kvbench.kernels.attention import attend_ragged
from kvbench.kernels.rope_append import append
from kvbench.kernels.row_replacement import replace_row
from kvbench.kernels.row_selection import gather_rows
from kvbench.models.decoder_weights import DecoderWeights


class ReplacedRows(QuotaRows):
    """The rows of all layers with `quota` + 1 slots per head, one of them free between two tokens."""

    def __init__(
        self, weights: DecoderWeights, layers: Sequence[Layer], tokens: int, quota: int, seen: int,
        implementation: str | None = None,
    ) -> None:  # fmt: skip
        """Allocate memory. `back` copies the layers' rows into it.

        Args:
            weights: The model's weights.
            layers: The layers, all at their quota (`is_at_quota`).
            tokens: Number of tokens that will be read.
            quota: Rows per head after a token.
            seen: Number of tokens read so far.
            implementation: Name of the kernels' implementation; None chooses one.
        """
        super().__init__(weights, layers, quota, 1, seen, seen + tokens, implementation)
        self.ranks = torch.zeros_like(self.places)  # of each slot's row
        self.order = torch.zeros_like(self.ranks)  # the slot of each rank
        self.free = torch.zeros(len(layers), *self.held, dtype=torch.int64, device=self.device)  # the next token's slot
        self.heads = (quota + 1) * torch.arange(self.free[0].numel(), device=self.device).view(*self.held, 1)
        self.step = torch.zeros((), dtype=torch.int32, device=self.device)  # number of tokens read
        self.none = torch.zeros((), dtype=torch.int32, device=self.device)
        self.kept_order: Tensor | None = None  # `order` when the layers got their rows last; None for that of the text

    def cuts(self, number: int) -> bool:
        """Return False: every token needs the same graph."""
        return False

    def reader(self, cuts: bool) -> Callable[[int, Sequence[Tensor], Norms], Tensor]:
        """Return the function that replaces a row and attends in one layer, for `forward_step`."""
        cos, sin = self.angles
        position = self.step.long() + self.seen  # as `places`, so that comparing them needs no conversion
        implementation, lse = self.implementation, self.layers[0].choice.method.wants_lse

        def attend(index: int, projected: Sequence[Tensor], norms: Norms) -> Tensor:
            queries, new_keys, new_values = projected
            keys, values = self.rows[index].unbind()
            queries = append(
                queries, new_keys, new_values, cos, sin, keys, values, 0, self.step,
                slots=self.free[index], norms=norms, implementation=implementation,
            )  # fmt: skip
            asking, held = queries, keys
            if self.table is not None:
                asking, held = self.rotate_by_slot(index, queries, position, self.none, self.ranks[index])
            outputs, sums = attend_ragged(
                asking, None, held, values, self.weights.scaling, lse=lse, implementation=implementation
            )
            self.replace(index, queries, outputs, sums, position)
            return outputs

        return attend

    def replace(self, index: int, queries: Tensor, outputs: Tensor, lse: Tensor | None, position: Tensor) -> None:
        """Let the method see the token, and choose the row of each head that leaves."""
        layer, quota, columns, places = self.layers[index], self.quota, self.columns[index], self.places[index]
        order, free, method = self.order[index], self.free[index], layer.method
        keys, values = self.rows[index].unbind()
        rows = Rows(keys, values, places, self.ones, columns, order)
        with layer.guard.unnoted():  # `invalid` notes NaN, so guards add nothing to the graph
            observation, rows = self.show(index, rows, queries, outputs, lse, position, quota + 1)
            scores = method.score(observation, rows, layer.state)
            masks = method.protect_sinks(observation, rows, quota), method.protect(observation, rows, quota)
        layer.guard.release()
        replace_row(
            scores, *masks, places, self.ranks[index], order, free, position, self.invalid,
            implementation=self.implementation,
        )  # fmt: skip
        for name, column in columns.items():
            column.copy_(rows.columns[name])
            column.scatter_(-1, free[..., None], 0)

    def advance(self, cuts: bool) -> None:
        """Count a token after all layers have read it."""
        self.step += 1

    def back(self, step: int) -> int:
        """Copy the rows from the layers and return how many tokens have been read by then: `step` or fewer."""
        self.take_rows()
        seen, text = self.layers[0].rows.seen, torch.arange(self.quota + 1, device=self.device).expand_as(self.order)
        self.places[..., self.quota] = seen
        order = text if self.kept_order is None else self.kept_order
        if self.kept_order is not None:  # back into the same slots, so that sums are done in the same order again
            for index in range(len(self.layers)):
                self.rows[index].copy_(move_rows(self.rows[index], order[index][None, ..., None]))
                for column in (self.places[index], *self.columns[index].values()):
                    column.copy_(move_rows(column, order[index], -1))
        self.order.copy_(order)
        self.ranks.scatter_(-1, self.order, text)
        self.free.copy_(self.order[..., -1])
        self.step.fill_(seen - self.seen)
        return seen - self.seen

    def keep(self, read: int) -> None:
        """Give the layers the rows that the first `read` tokens left, as if the layers had read and cut them."""
        more = read + self.seen - self.layers[0].rows.seen
        for index in range(len(self.layers)) if more else ():
            order = self.order[index, ..., : self.quota]  # the free slot has the last rank
            held = gather_rows((order + self.heads).flatten(), *self.rows[index], implementation=self.implementation)
            columns = {name: column.gather(-1, order) for name, column in self.columns[index].items()}
            self.give_rows(index, Plain(*held), self.places[index].gather(-1, order), columns, more)
        if more:
            self.kept_order = self.order.clone()


def move_rows(rows: Tensor, order: Tensor, dim: int = -2) -> Tensor:
    """Return rows that stand in the order of the text, moved to the slots `order`, which has their shape or extends to
    it.
    """
    return torch.empty_like(rows).scatter_(dim, order.expand_as(rows), rows)

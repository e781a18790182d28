"""Rows that only grow and of which each token attends to some, at fixed addresses for a CUDA graph."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from fractions import Fraction

import torch
from torch import Tensor

from kvbench.cache.guard import ask
from kvbench.cache.hook_table import call_captured, guard_hooks
from kvbench.cache.layer import Layer
from kvbench.cache.policy import CachePolicy
from kvbench.engine.appended_rows import AppendedRows
from kvbench.engine.graph_decoding import CHUNK
from kvbench.engine.streams import Beside
from kvbench.interfaces.codec import MadeRows
from kvbench.interfaces.row_reader import CapturedAnswer, ListedRows, RowReader, Watcher
from kvbench.interfaces.rows import mass_dtype
from kvbench.kernels.listed_attention import attend_listed
from kvbench.models.decoder_step import Attend, Norms
from kvbench.models.decoder_weights import DecoderWeights
from kvbench.validation import ContractError


def reads_in_graph(choice: CachePolicy) -> bool:
    """Return whether a method that attends to few rows may do so in a CUDA graph."""
    captured, codec = choice.method.captured, choice.codec
    if captured is None or captured.row_reader is None:
        return False
    return not codec.packs or (codec.packing.grows and codec.packing.lists_rows and captured.reads_packed)


def count_query_heads(weights: DecoderWeights, keys: Tensor) -> int:
    """Return the number of query heads of a model whose keys are (B, H, n, d)."""
    return len(weights.blocks[0].attention.project[0].weight) // keys.shape[3]


def make_reader(
    weights: DecoderWeights, layers: Sequence[Layer], tokens: int, quota: int | None, fraction: Fraction | None
) -> RowReader | None:
    """Ask the method for a reader of the next tokens, or None if the modules must read.

    Args:
        weights: The model's weights.
        layers: The layers, of which none was cut.
        tokens: Number of tokens to read at most.
        quota: Rows that a query head may attend to, the same for all these tokens.
        fraction: The budget if it is a fraction.
    """
    raw = [layer for layer in layers if not layer.packs]
    for layer in raw:
        layer.reserve(tokens)
    keys = {layer.index: layer.rows.tail_keys for layer in raw if layer.rows.tail_keys is not None}
    first, method, by_index = layers[0], layers[0].choice.method, {layer.index: layer for layer in layers}
    if not keys:  # nothing to choose by
        return None
    query_heads = count_query_heads(weights, next(iter(keys.values())))
    answer = CapturedAnswer(
        keys=keys,
        states={layer.index: layer.state for layer in layers},
        layers=len(weights.blocks),
        query_heads=query_heads,
        seen=first.rows.seen,
        tokens=tokens,
        prompt=first.progress.prompt,
        quota=quota,
        fraction=fraction,
        scaling=weights.scaling,
        undone=CHUNK,
        find_packed=lambda layer, number: by_index[layer].find_packed(number),
        extras={i: extras for i, block in enumerate(weights.blocks) if (extras := block.attention.extras) is not None},
    )
    reader: RowReader | None = call_captured(guard_hooks(method), "row_reader", answer)
    return reader


class ReadRows(AppendedRows):
    """Rows that only grow. A reader lists those that a token attends to."""

    def __init__(
        self,
        weights: DecoderWeights,
        answers: Sequence[Sequence[Layer]],
        tokens: int,
        reader: RowReader,
        implementation: str | None = None,
    ) -> None:
        """Reserve memory for the tokens.

        Args:
            weights: The model's weights.
            answers: The layers of the only answer, of which none was cut.
            tokens: Number of tokens to read at most.
            reader: Chooses the rows (`make_reader`).
            implementation: Name of the kernels' implementation; None chooses one.
        """
        super().__init__(weights, answers, tokens, implementation)
        self.choose_rows = reader
        like = weights.embed
        self.counts = torch.zeros(len(self.layers), tokens, dtype=torch.int64, device=like.device)  # rows attended to
        self.listing: set[int] = set()  # layers that attend to listed rows
        self.beside: Beside = Beside(like.device)  # packed rows are chosen and made there, while the layer before reads

    def reader(self, cuts: bool) -> Attend:
        last = self.step.long() + self.seen[0]
        choose = self.choose_rows.choose(last)
        owner = f"method={self.layers[0].choice.method.name}"
        ahead: dict[int, MadeRows | None] = {}  # rows of packed layers that come next
        like = self.find_parts()[0].tail_keys
        heads = count_query_heads(self.weights, like)
        nothing = like.new_empty(len(like), heads, 0, like.shape[3]), like[:, :, :0]

        def choose_rows(index: int, queries: Tensor, keys: Tensor) -> ListedRows | Watcher | None:
            layer = self.layers[index].index
            rows = ask(owner, "row_reader", lambda: choose(layer, queries, keys), f" of layer {layer}")
            if isinstance(rows, ListedRows):
                self.listing.add(index)
            return rows

        def look_ahead(index: int) -> None:
            """Choose the rows of a packed layer, and make them beside what the layer before still does."""
            if index not in self.growing or index in ahead:
                return
            ahead[index], rows = None, choose_rows(index, *nothing)
            if rows is not None:
                if not isinstance(rows, ListedRows):
                    layer = self.layers[index].index
                    raise ContractError(f"{owner}: row_reader watches layer {layer}, whose rows are packed")
                # behind a raw layer, or with several prompts, the layer waits for these rows: no limit then
                limited = len(rows.blocks) == 1 and index - 1 in self.growing
                with self.beside.work(rows.blocks, limited=limited):
                    ahead[index] = self.growing[index].make_rows(rows, heads, self.step, self.implementation)

        def attend_watched(index: int, queries: Tensor, watch: Watcher) -> Tensor:
            """Attend to all rows, and let the reader see the largest products beside what follows."""
            keys = self.parts[index][0].tail_keys
            largest = keys.new_empty(keys.shape[:3], dtype=mass_dtype(keys))
            outputs = self.attend_all(index, queries, largest=largest)[0]
            with self.beside.work(largest, watch, urgent=True):
                ask(owner, "row_reader", lambda: watch(largest), f" of layer {self.layers[index].index}")
            look_ahead(index + 1)
            return outputs

        def attend(index: int, projected: Sequence[Tensor], norms: Norms) -> Tensor:
            counts = self.counts[index], self.step
            look_ahead(index)
            self.beside.settle()
            if index in self.growing:
                made = ahead.pop(index)
                look_ahead(index + 1)
                return self.attend_packed(index, projected, norms, *(() if made is None else (made, counts)))
            queries, (part,) = self.append(index, projected, norms), self.parts[index]
            early = index + 1 in self.growing  # the rows of the next layer are chosen beside this layer's attention
            with self.beside.work(queries) if early else nullcontext():
                rows = choose_rows(index, queries, part.tail_keys)
            if rows is not None and not isinstance(rows, ListedRows):
                return attend_watched(index, queries, rows)
            look_ahead(index + 1)
            if rows is None:
                return self.attend_all(index, queries)[0]
            if early:
                self.beside.settle()
            return attend_listed(
                queries,
                part.tail_keys,
                part.tail_values,
                rows.blocks,
                rows.size,
                last,
                self.weights.scaling,
                after=rows.after,
                counts=counts,
                extras=self.find_extras(index),
                implementation=self.implementation,
            )

        return attend

    def back(self, step: int) -> int:
        self.counts[:, step:] = 0
        return super().back(step)

    def list_attended(self, start: int, stop: int, layers: Iterable[int]) -> dict[int, list[float] | None]:
        keys = self.find_parts()[0].tail_keys
        means = self.counts[:, start:stop].cpu().double() / (len(keys) * count_query_heads(self.weights, keys))
        return {index: means[index].float().tolist() if index in self.listing else None for index in layers}

    def finish(self, read: int, answer: int = 0) -> None:
        super().finish(read, answer)
        self.choose_rows.finish(self.seen[answer] + read)

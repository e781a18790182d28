"""Read tokens into the replaced rows of several contexts with the same kernel calls as into those of one context."""

from collections.abc import Sequence

import torch

from kvbench.engine.answer_quotas import join_answer_quotas
from kvbench.engine.graph_decoding import GrowingRows
from kvbench.engine.joined_growing_rows import JoinedGrowingRows
from kvbench.engine.replaced_rows import ReplacedRows, SlotRows
from kvbench.interfaces.observation import State


class JoinedReplacedRows(SlotRows):
    """The replaced rows of several contexts, which read their next tokens together.

    They hold the memory of all contexts, in which each head has as many slots as the longest one of the layer needs.
    The rows of a context are its samples there. They count tokens in a step of their own. The step of a context alone
    stays as it is until its `back` sets it. A NaN score of one context marks the tokens of all.
    """

    def __init__(self, parts: Sequence[ReplacedRows]) -> None:
        """Join rows that have read none of their tokens yet.

        The first context's layers call the hooks for all.

        Args:
            parts: The rows of each context, without memory, in the order of the samples. `find_shared_kind` is the same
                for all.
        """
        first, sizes = parts[0], [part.held[0] for part in parts]
        plan = join_answer_quotas([part.plan for part in parts], sizes)
        seen = [part.seen for part in parts for _ in range(part.held[0])]
        super().__init__(first.weights, first.layers, plan.tokens, plan, seen, first.implementation)
        self.prepare()
        self.parts = parts
        growing = [part.growing for part in parts if isinstance(part.growing, GrowingRows)]
        self.growing = JoinedGrowingRows(growing) if growing else None
        seeds = [[seed for part in parts for seed in part.layers[i].state.seeds] for i in range(len(first.layers))]
        self.states = [State(tuple(own)) for own in seeds]
        prompts = [part.layers[0].progress.prompt for part in parts for _ in range(part.held[0])]
        if len(set(prompts)) > 1:
            self.prompt = torch.tensor(prompts, device=self.device)[:, None, None]
        begin = 0
        for part, size in zip(parts, sizes, strict=True):
            self.lend(part, slice(begin, begin + size))
            begin += size

    def lend(self, part: ReplacedRows, own: slice) -> None:
        """Let a context's rows use their samples of the memory."""
        heads, part.has_memory = self.held[1], True
        part.places, part.ranks, part.order, part.mass = (
            [table[own] for table in tables] for tables in (self.places, self.ranks, self.order, self.mass)
        )
        sizes = [heads * places.shape[2] for places in self.places]  # rows of a sample
        part.rows = [rows[:, own.start * size : own.stop * size] for rows, size in zip(self.rows, sizes, strict=True)]
        part.starts = [starts[: own.stop - own.start] for starts in self.starts]
        part.columns = [{name: column[own] for name, column in columns.items()} for columns in self.columns]
        part.ragged, part.in_memory = self.ragged, self.in_memory  # no layer is ragged
        part.free, part.lengths, part.tally = self.free[:, own], self.lengths[:, own], self.tally[:, :, own]
        part.grows, part.last, part.table, part.invalid = self.grows, self.last, self.table, self.invalid

    def back(self, step: int) -> int:
        """Return to the state before the first token. `step` is 0, because contexts go back alone later."""
        self.order_by_text()  # of all contexts at once
        for part in self.parts:
            part.copy_rows()
        self.step.fill_(step)
        if self.growing is not None:
            self.growing.back(step)
        return step

    def keep(self, read: int) -> None:
        for part in self.parts:
            part.keep(read)


def find_shared_kind(rows: ReplacedRows) -> object | None:
    """Return what is equal for contexts that are read together, or None if a context is read by itself.

    The hooks are called once for all samples. They must therefore belong to the same method with the same settings,
    remember nothing of a context, and see the same layers, columns and prefix. Streaming methods give heads
    memory of different sizes and no keys and values to the hooks, which a batch with padded memory would show.
    """
    layer = rows.layers[0]
    choice = layer.choice
    remembers = any(own.state.layer or own.state.shared for own in rows.layers)
    if choice.method.streams or remembers:
        return None
    columns = [sorted(own.rows.columns) for own in rows.layers]
    return choice.method, choice.codec, choice.exact, rows.cut, columns, layer.progress.prefix, rows.plan.tokens

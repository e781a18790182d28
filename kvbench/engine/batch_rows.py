"""The rows of all layers of all answers that are decoded as one batch, put together from rows of several kinds.

A step computes the layers' linear parts for all samples together. Answers whose rows are of the same kind share their
kernel calls, as one group. Within a group each layer has the kind of rows that fits it: a layer with a sliding window
has a ring, and one that the method spares only appends.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kvbench.engine.graph_decoding import StepRows
from kvbench.engine.streams import STREAMS, join_after, make_streams
from kvbench.models.decoder_step import Attend, Norms


def group_alike(kinds: Sequence[object | None]) -> list[list[int]]:
    """Return the numbers of the answers that share their kernel calls, group by group.

    Args:
        kinds: For each answer, what is equal for those that share them; None if it shares none.
    """
    groups: list[list[int]] = []
    for number, kind in enumerate(kinds):
        alike = (group for group in groups if kind is not None and kinds[group[0]] == kind)
        group = next(alike, None)
        if group is None:
            groups.append([number])
        else:
            group.append(number)
    return groups


class BatchRows(StepRows):
    """Groups of rows, each for its own samples of a batch."""

    def __init__(
        self,
        groups: Sequence[Sequence[StepRows]],
        sizes: Sequence[Sequence[int]],
        device: torch.device,
        keeps: bool = True,
    ) -> None:
        """Put rows together that have read none of their tokens.

        Args:
            groups: The kinds of rows of each group, which together have each layer once. Those that cannot go back by
                single tokens come first.
            sizes: For each answer of each group, the number of its samples.
            device: Where the rows are.
            keeps: Whether the layers get the tokens while the answer goes on, so that `back` can undo the last ones.
        """
        self.groups, self.sizes, self.keeps = groups, [sum(counts) for counts in sizes], keeps
        self.kinds = [rows for group in groups for rows in group]
        self.owners = [(group, number) for group, counts in enumerate(sizes) for number in range(len(counts))]
        self.running = set(range(len(self.owners)))  # numbers of the answers that are not over
        self.indices = sorted(index for rows in groups[0] for index in rows.indices)
        owner = {
            (g, index): (rows, n)
            for g, group in enumerate(groups)
            for rows in group
            for n, index in enumerate(rows.indices)
        }
        self.by_layer = {index: [owner[group, index] for group in range(len(groups))] for index in self.indices}
        for number, group in enumerate(groups):
            for rows in group:
                if rows.beside is not None:
                    rows.beside.lane = number % STREAMS
        self.streams = make_streams(device)[: min(STREAMS, len(groups)) - 1] if device.type == "cuda" else []

    def cuts(self, number: int) -> bool:
        return any(rows.cuts(number) for rows in self.kinds)

    def reader(self, cuts: bool) -> Attend:
        readers = {id(rows): rows.reader(cuts) for rows in self.kinds}

        def attend(index: int, projected: Sequence[Tensor], norms: Norms) -> Tensor:
            owners = self.by_layer[index]
            per_owner = (
                zip(*(part.split(self.sizes) for part in projected), strict=True) if len(owners) > 1 else [projected]
            )
            return self.side_by_side(
                [
                    partial(readers[id(rows)], n, three, norms)
                    for (rows, n), three in zip(owners, per_owner, strict=True)
                ]
            )

        return attend

    def side_by_side(self, work: Sequence[Callable[[], Tensor]]) -> Tensor:
        """Do all work on several streams, and return the results one after the other along the batch."""
        if len(work) == 1:
            return work[0]()
        if not self.streams:
            return torch.cat([compute() for compute in work])
        here = torch.cuda.current_stream()
        every = [here, *self.streams]
        for other in self.streams:
            other.wait_stream(here)
        results = []

        def join() -> None:
            for other in self.streams:
                here.wait_stream(other)

        with join_after(join):
            for number, compute in enumerate(work):
                with torch.cuda.stream(every[number % len(every)]):
                    results.append(compute())
        return torch.cat(results)

    def prepare(self) -> None:
        for rows in self.kinds:
            rows.prepare()

    def settle(self) -> None:
        for rows in self.kinds:
            rows.settle()

    def advance(self, cuts: bool) -> None:
        for rows in self.kinds:
            rows.advance(cuts)

    def pack_due(self, number: int) -> None:
        for rows in self.kinds:
            rows.pack_due(number)

    def marked(self, tokens: Tensor) -> Tensor:
        parts = list(tokens.split(self.sizes))
        for number, group in enumerate(self.groups):
            for rows in group:
                parts[number] = rows.marked(parts[number])
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def check(self) -> None:
        for group in sorted({self.owners[answer][0] for answer in self.running}):
            for rows in self.groups[group]:
                rows.check()

    def back(self, step: int) -> int:
        for rows in self.kinds:
            step = rows.back(step)
        return step

    def keep(self, read: int) -> None:
        """Give the layers the first `read` tokens, unless they get theirs in `finish` alone."""
        for rows in self.kinds if self.keeps else ():
            rows.keep(read)

    def finish(self, read: int, answer: int = 0) -> None:
        group, number = self.owners[answer]
        for rows in self.groups[group]:
            rows.finish(read, number)

    def forget(self, read: int, answer: int = 0) -> None:
        group, number = self.owners[answer]
        for rows in self.groups[group]:
            rows.forget(read, number)

"""The rows of several contexts, which read their next tokens as one batch.

A step computes the layers' linear parts for all samples together. Contexts whose rows only grow append and attend to
them together too (`JoinedGrowingRows`). So do contexts whose method, the same for all, cuts at every token
(`JoinedReplacedRows`). Any other context appends to and attends to its own rows, as it would alone.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from kvbench.engine.graph_decoding import GrowingRows, Norms, StepRows
from kvbench.engine.joined_growing_rows import JoinedGrowingRows
from kvbench.engine.joined_replaced_rows import JoinedReplacedRows, find_shared_kind
from kvbench.engine.replaced_rows import ReplacedRows
from kvbench.engine.streams import STREAMS, join_after, make_streams


def find_kind(rows: StepRows) -> object | None:
    """Return what is equal for contexts whose rows share their kernel calls, or None for rows that share none."""
    if type(rows) is GrowingRows:
        return GrowingRows
    return find_shared_kind(rows) if type(rows) is ReplacedRows else None


def group_alike(rows: Sequence[StepRows]) -> list[list[int]]:
    """Return the numbers of the contexts whose rows share their kernel calls, group by group."""
    groups: list[list[int]] = []
    kinds: list[object | None] = []  # of each group
    for number, kind in enumerate(map(find_kind, rows)):
        if kind is not None and kind in kinds:
            groups[kinds.index(kind)].append(number)
        else:
            groups.append([number])
            kinds.append(kind)
    return groups


def join_alike(parts: Sequence[StepRows]) -> StepRows:
    """Join the rows of one group of `group_alike`."""
    if len(parts) == 1:
        return parts[0]
    growing = [part for part in parts if isinstance(part, GrowingRows)]
    return JoinedGrowingRows(growing) if growing else JoinedReplacedRows(cast(Sequence[ReplacedRows], parts))


class JoinedRows(StepRows):
    """The rows of several contexts, each for its own samples of a batch."""

    def __init__(
        self, parts: Sequence[StepRows], sizes: Sequence[int], groups: Sequence[int], device: torch.device
    ) -> None:
        """Join rows that are never cut (`StepRows.cuts`) and have read none of their tokens.

        Args:
            parts: The rows of each context.
            sizes: Number of its samples.
            groups: How many contexts after each other share their kernel calls (`group_alike`), in order.
            device: Where they are.
        """
        self.parts, self.sizes = parts, list(sizes)
        self.kept = set(range(len(parts)))  # numbers of the contexts that get rows while answers go on
        self.running = set(self.kept)  # numbers of the contexts whose answers are not over
        self.pieces, self.piece_sizes, begin = [], [], 0  # what reads tokens, and its samples
        for count in groups:
            self.pieces.append(join_alike(parts[begin : begin + count]))
            self.piece_sizes.append(sum(sizes[begin : begin + count]))
            begin += count
        for number, piece in enumerate(self.pieces):
            piece.use_lane(number % STREAMS)
        self.streams = make_streams(device)[: min(STREAMS, len(self.pieces)) - 1] if device.type == "cuda" else []

    def cuts(self, number: int) -> bool:
        return False

    def reader(self, cuts: bool) -> Callable[[int, Sequence[Tensor], Norms], Tensor]:
        readers = [piece.reader(False) for piece in self.pieces]

        def attend(index: int, projected: Sequence[Tensor], norms: Norms) -> Tensor:
            own = zip(*(part.split(self.piece_sizes) for part in projected), strict=True)
            return self.side_by_side(
                [partial(reader, index, three, norms) for reader, three in zip(readers, own, strict=True)]
            )

        return attend

    def side_by_side(self, work: Sequence[Callable[[], Tensor]]) -> Tensor:
        """Do all work on several streams, and return the results one after the other along the batch."""
        if len(work) == 1:
            return work[0]()
        if not self.streams:
            return torch.cat([own() for own in work])
        here = torch.cuda.current_stream()
        every = [here, *self.streams]
        for other in self.streams:
            other.wait_stream(here)
        results = []

        def join() -> None:
            for other in self.streams:
                here.wait_stream(other)

        with join_after(join):
            for number, own in enumerate(work):
                with torch.cuda.stream(every[number % len(every)]):
                    results.append(own())
        return torch.cat(results)

    def prepare(self) -> None:
        for piece in self.pieces:
            piece.prepare()

    def settle(self) -> None:
        for piece in self.pieces:
            piece.settle()

    def advance(self, cuts: bool) -> None:
        for piece in self.pieces:
            piece.advance(False)

    def pack_due(self, number: int) -> None:
        for piece in self.pieces:
            piece.pack_due(number)

    def marked(self, tokens: Tensor) -> Tensor:
        own = zip(self.pieces, tokens.split(self.piece_sizes), strict=True)
        return torch.cat([piece.marked(some) for piece, some in own])

    def check(self) -> None:
        for number in sorted(self.running):
            self.parts[number].check()

    def back(self, step: int) -> int:
        """Return to the state after `step` tokens, before the first answer is over."""
        for piece in self.pieces:
            piece.back(step)
        return step

    def keep(self, read: int) -> None:
        """Give the layers of the contexts in `kept` whose answers are not over the first `read` tokens."""
        for number in self.running & self.kept:
            self.parts[number].keep(read)

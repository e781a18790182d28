"""Do work beside the current CUDA stream, so that a GPU does several small things at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

STREAMS = 8  # most streams on which contexts attend side by side; as many settle what attention leaves to do


@cache
def make_streams(gpu: torch.device) -> list[torch.cuda.Stream]:
    """Make two times `STREAMS` streams: once for each GPU, because cuBLAS keeps a workspace for each.

    What runs in the first half comes before what runs in the second one.
    """
    return [torch.cuda.Stream(gpu, priority=priority) for priority in (-1, 0) for _ in range(STREAMS)]


class Beside:
    """Work that may go on until `settle`, while the current stream does something else. On a CPU it is done at once.

    Attributes:
        lane: The number of the stream, below `STREAMS`. Work in one lane is done in order.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.lane = device, 0
        self.used: list[Tensor] = []  # kept, so that their memory gets no other use before `settle`

    @contextmanager
    def work(self, *used: Tensor | None) -> Iterator[None]:
        """Do what is inside beside the current stream.

        Args:
            used: Tensors from outside that it uses, apart from those that last until `settle` anyway.
        """
        if self.device.type != "cuda":
            yield
            return
        side = make_streams(self.device)[STREAMS + self.lane]
        self.used += [own for own in used if own is not None]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            yield

    def settle(self) -> None:
        """Let the current stream wait for the work."""
        if self.used:
            torch.cuda.current_stream().wait_stream(make_streams(self.device)[STREAMS + self.lane])
            self.used.clear()

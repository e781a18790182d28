"""Do work beside the current CUDA stream, so that a GPU does several small things at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

STREAMS = 8  # most streams on which contexts attend side by side; as many settle what attention leaves to do


@cache
def make_streams(gpu: torch.device) -> list[torch.cuda.Stream]:
    """Make three times `STREAMS` streams: once for each GPU, because cuBLAS keeps a workspace for each.

    What runs in the first third comes before what runs in the second one, and after what runs in the last one.
    """
    return [torch.cuda.Stream(gpu, priority=priority) for priority in (-1, 0, -2) for _ in range(STREAMS)]


class Beside:
    """Work that may go on until `settle`, while the current stream does something else. On a CPU it is done at once.

    Attributes:
        lane: A number below `STREAMS`. Work in one lane is done in order.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.lane = device, 0
        self.used: list[object] = []  # kept, so that the memory of their tensors gets no other use before `settle`
        self.busy: set[torch.cuda.Stream] = set()

    @contextmanager
    def work(self, *used: object, urgent: bool = False) -> Iterator[None]:
        """Do what is inside beside the current stream.

        Args:
            used: Tensors from outside that it uses, or what holds them. Those that last until `settle` may be left out.
            urgent: Whether the GPU does this before what else it could do. It is meant for small work that much waits
                for.
        """
        self.used += [own for own in used if own is not None]
        if self.device.type != "cuda":
            yield
            return
        side = make_streams(self.device)[(2 if urgent else 1) * STREAMS + self.lane]
        for other in {torch.cuda.current_stream(), *self.busy} - {side}:
            side.wait_stream(other)
        self.busy.add(side)
        with torch.cuda.stream(side):
            yield

    def settle(self) -> None:
        """Let the current stream wait for the work."""
        for side in self.busy:
            torch.cuda.current_stream().wait_stream(side)
        self.busy.clear()
        self.used.clear()

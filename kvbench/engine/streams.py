"""Do work beside the current CUDA stream, so that a GPU does several small things at once."""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache

import torch

STREAMS = 8  # most streams on which contexts attend side by side, and most for the work beside them
SHARE = 0.35  # of the multiprocessors, for products in the background; chosen by trial on one H200, at one shape


@cache
def make_streams(gpu: torch.device) -> list[torch.cuda.Stream]:
    """Make three times `STREAMS` streams: once for each GPU, because cuBLAS keeps a workspace for each.

    The GPU prefers work in the last third to work in the first, and work in the first to work in the second.
    """
    return [torch.cuda.Stream(gpu, priority=priority) for priority in (-1, 0, -2) for _ in range(STREAMS)]


@cache
def load_cublas() -> ctypes.CDLL | None:
    """Return the cuBLAS library that PyTorch has loaded, or None if PyTorch contains cuBLAS itself."""
    try:
        name = f"libcublas.so.{str(torch.version.cuda).split('.')[0]}"
        cublas = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None
    cublas.cublasSetSmCountTarget.argtypes = [ctypes.c_void_p, ctypes.c_int]
    return cublas


@contextmanager
def limit_products(gpu: torch.device) -> Iterator[None]:
    """Let cuBLAS compute the matrix products inside on `SHARE` of the multiprocessors.

    A large product otherwise takes all of them, and nothing runs beside it. The limit belongs to the
    thread's handle of cuBLAS. It changes times only. Products stay unlimited without the library, and so do products
    with a bias, which cublasLt computes.

    Raises:
        RuntimeError: If cuBLAS refuses.

    Source:
        https://docs.nvidia.com/cuda/cublas, `cublasSetSmCountTarget`.
    """
    cublas = load_cublas()
    if cublas is None:
        yield
        return

    def allow(multiprocessors: int) -> None:
        status = cublas.cublasSetSmCountTarget(torch.cuda.current_blas_handle(), multiprocessors)
        if status:
            raise RuntimeError(f"cuBLAS answered {status} to a limit of {multiprocessors} multiprocessors")

    allow(max(1, round(SHARE * torch.cuda.get_device_properties(gpu).multi_processor_count)))
    try:
        yield
    finally:
        allow(0)  # no limit


@contextmanager
def join_after(join: Callable[[], None]) -> Iterator[None]:
    """Let other streams join the current one after the `with` block, also if it fails.

    A capture can end only when all streams have joined it. The first error stays: it may have ended the capture, and
    then joining fails too.
    """
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):
            join()
        raise
    join()


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
    def work(self, *used: object, urgent: bool = False, limited: bool = False) -> Iterator[None]:
        """Do what is inside beside the current stream.

        Args:
            used: Tensors from outside that it uses, or what holds them. Those that last until `settle` may be left out.
            urgent: Whether the GPU does this before what else it could do. It is meant for small work that much waits
                for.
            limited: Whether matrix products leave most of the GPU to what else it does (`limit_products`). They take
                longer then.
        """
        self.used += [held for held in used if held is not None]
        if self.device.type != "cuda":
            yield
            return
        side = make_streams(self.device)[(2 if urgent else 1) * STREAMS + self.lane]
        for other in {torch.cuda.current_stream(), *self.busy} - {side}:
            side.wait_stream(other)
        self.busy.add(side)
        with torch.cuda.stream(side), limit_products(self.device) if limited else nullcontext():
            yield

    def settle(self) -> None:
        """Let the current stream wait for the work."""
        sides = list(self.busy)
        self.busy.clear()
        self.used.clear()
        for side in sides:
            torch.cuda.current_stream().wait_stream(side)

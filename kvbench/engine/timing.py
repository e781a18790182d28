"""Measure the time and memory of a device.

On a GPU a time stamp is a CUDA event, so that the host does not wait while tokens are decoded. On the CPU it is the
time of a clock.
"""

import gc
import re
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

FLUSH = 256 << 20  # bytes written between two timed calls, several times the L2 cache of any GPU
CYCLES = 2e9  # cycles of a GPU's clock in a second
BEHIND, LONGEST = 2.0, 0.1  # before a timed call a GPU waits this multiple of the launch time, up to this many seconds
ENOUGH = 20.0  # seconds of timed calls, apart from the first three
EXHAUSTED = (
    "out of memory",
    "alloc_failed",
    "mha_graph.execute",
)  # messages of libraries that do not raise OutOfMemoryError
LONGEST_MESSAGE = 200  # characters of a message that are kept
WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+ [KMGT]?i?B|\d+ bytes)")  # in the messages of PyTorch's allocators
FREE = re.compile(r"total capacity of ([\d.]+ [KMGT]?i?B) of which ([\d.]+ [KMGT]?i?B|\d+ bytes) is free")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, mean, extremes, quartiles and count of some values."""
    least, first, middle, third, most = np.quantile(values, (0, 0.25, 0.5, 0.75, 1)).tolist()
    summary = {"median": middle, "mean": float(np.mean(values)), "least": least, "quartile_1": first}
    return summary | {"quartile_3": third, "most": most, "count": len(values)}


def now(device: str) -> float:
    """Wait until the device has finished and return the time in seconds."""
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


class Stamps:
    """Points in time, taken without waiting for the device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.stream = None if device == "cpu" else torch.cuda.current_stream()  # asked for once, which is slow
        self.points: list[Any] = []

    def put(self) -> None:
        """Take the time. On a GPU it is when the stream that was current in `__init__` gets to this point."""
        if self.stream is None:
            self.points.append(time.perf_counter())
        else:
            event = torch.cuda.Event(enable_timing=True)
            event.record(self.stream)
            self.points.append(event)

    def after(self, number: int) -> float:
        """Return the seconds from the first point to the one of this number, which the device must have reached."""
        return self.apart(self.points[0], self.points[number]) / 1000

    def between(self) -> list[float]:
        """Wait for the device and return the milliseconds from each point to the next."""
        now(self.device)
        return [self.apart(*pair) for pair in pairwise(self.points)]

    def apart(self, before: Any, after: Any) -> float:
        """Return the milliseconds between two points."""
        return 1000 * (after - before) if self.device == "cpu" else before.elapsed_time(after)


def calls(work: Callable[[], Any], device: str, repeats: int, warmup: int) -> list[float]:
    """Time several calls. On a GPU the L2 cache is overwritten before each call.

    Args:
        work: The function to call.
        device: "cpu" or "cuda".
        repeats: Number of timed calls. Slow functions are called less often, but at least 3 times.
        warmup: Number of calls before, at least 1.

    Returns:
        Milliseconds of each call.
    """
    for _ in range(warmup):
        begin = now(device)
        work()
        launched = time.perf_counter() - begin
    repeats = max(3, min(repeats, int(ENOUGH / (now(device) - begin))))
    flush = torch.empty(FLUSH if device != "cpu" else 0, dtype=torch.uint8, device=device)
    stamps = Stamps(device)
    for _ in range(repeats):  # the GPU lags behind, which hides the time of launching
        if device != "cpu":
            torch.cuda._sleep(int(CYCLES * min(BEHIND * launched, LONGEST)))
        flush.zero_()
        stamps.put()
        work()
        stamps.put()
    return stamps.between()[::2]


def allocated(device: str) -> int | None:
    """Return the bytes that tensors occupy on a GPU now, or None on the CPU."""
    return torch.cuda.memory_allocated() if device != "cpu" else None


def peak(device: str) -> int | None:
    """Return the peak of the bytes since `forget_peak`, or None on the CPU."""
    if device == "cpu":
        return None
    stats = torch.cuda.memory_stats_as_nested_dict()  # `max_memory_allocated` would also flatten and sort it
    return int(stats["allocated_bytes"]["all"]["peak"])


def forget_peak(device: str) -> None:
    """Start a new measurement of `peak`."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()


def clear(device: str) -> None:
    """Free memory that nothing refers to."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def scratch(work: Callable[[], Any]) -> int:
    """Return the peak of the bytes that a call needs for itself on a GPU, without its result."""
    clear("cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = work()
    torch.cuda.synchronize()
    result_bytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors(result))
    return torch.cuda.max_memory_allocated() - before - result_bytes


def tensors(value: object) -> list[Tensor]:
    """Return the tensors in a result."""
    if isinstance(value, Tensor):
        return [value]
    several = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [tensor for part in several for tensor in tensors(part)]


def try_in_memory(work: Callable[[], Any], device: str) -> tuple[Any, str]:
    """Return the result of `work` and "", or None and a line on what did not fit into memory. That is freed then."""
    try:
        return work(), ""
    except RuntimeError as error:
        if not is_shortage(error):
            raise
        shortage = describe_shortage(error)
    clear(device)  # not above, because the error's frames still hold their tensors there
    return None, shortage


def is_shortage(error: Exception) -> bool:
    """Return whether an error says that memory ran out."""
    exhausted = any(word in str(error).lower() for word in EXHAUSTED)
    return isinstance(error, torch.OutOfMemoryError) or isinstance(error, RuntimeError) and exhausted


def describe_shortage(error: Exception) -> str:
    """Return in one line what did not fit: the bytes that were wanted and free, or else the error's first line."""
    message = str(error)
    wanted, free = WANTED.search(message), FREE.search(message)
    if wanted is None:
        first = message.strip().partition("\n")[0]
        return f"{type(error).__name__}: {first}"[:LONGEST_MESSAGE] if first else type(error).__name__
    left = f", {free[2]} free of {free[1]}" if free else ""
    return f"{wanted[1]} wanted{left}"


def launches(work: Callable[[], Any]) -> dict[str, tuple[int, float]]:
    """Return the kernels that a call runs on a GPU: name -> count and total microseconds."""
    from torch.profiler import ProfilerActivity, profile

    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        work()
        torch.cuda.synchronize()
    kernels: dict[str, tuple[int, float]] = {}
    for event in profiled.events():
        on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
        if (
            on_gpu
            and not event.name.startswith(("Memcpy", "Memset"))
            and not getattr(event, "is_user_annotation", False)
        ):
            count, total = kernels.get(event.name, (0, 0.0))
            kernels[event.name] = count + 1, total + event.time_range.elapsed_us()
    return kernels

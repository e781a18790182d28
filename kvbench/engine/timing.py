"""Time and memory of a device: medians with their spread, stamps without a wait in between, out of memory as an answer.

On a GPU stamps are CUDA events, so that nothing waits while tokens are decoded; on the CPU they are the clock's.
"""

import gc
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

FLUSH = 256 << 20  # bytes written between two timed calls: several times any GPU's second-level cache
CYCLES = 2e9  # of a GPU's clock, a second
BEHIND, LONGEST = 2.0, 0.1  # a GPU waits before a timed call: times what its launching took, at most these seconds
ENOUGH = 20.0  # seconds of calls, but for the first three
EXHAUSTED = ("out of memory", "alloc_failed", "mha_graph.execute")  # of libraries that do not raise OutOfMemoryError


def spread(values: Sequence[float]) -> dict[str, float]:
    """Of the values of one quantity."""
    least, first, middle, third, most = np.quantile(values, (0, 0.25, 0.5, 0.75, 1)).tolist()
    own = {"median": middle, "mean": float(np.mean(values)), "least": least, "quartile_1": first}
    return own | {"quartile_3": third, "most": most, "count": len(values)}


def now(device: str) -> float:
    """Seconds, when all that was asked of the device is done."""
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


class Stamps:
    """Points in time, put down without waiting for the device."""

    def __init__(self, device: str) -> None:
        self.device, self.points = device, []

    def put(self) -> None:
        if self.device == "cpu":
            self.points.append(time.perf_counter())
        else:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.points.append(event)

    def after(self, number: int) -> float:
        """Seconds from the first point to this one, which the device has passed."""
        return self.apart(self.points[0], self.points[number]) / 1000

    def between(self) -> list[float]:
        """Milliseconds from each point to the next; waits for the last one."""
        now(self.device)
        return [self.apart(*pair) for pair in pairwise(self.points)]

    def apart(self, before: Any, after: Any) -> float:
        """Milliseconds."""
        return 1000 * (after - before) if self.device == "cpu" else before.elapsed_time(after)


def calls(work: Callable[[], Any], device: str, repeats: int, warmup: int) -> list[float]:
    """Milliseconds of each of `repeats` calls, fewer of slow ones; on a GPU nothing of what they read is in its
    second-level cache. `warmup` >= 1.
    """
    for _ in range(warmup):
        begin = now(device)
        work()
        launched = time.perf_counter() - begin
    repeats = max(3, min(repeats, int(ENOUGH / (now(device) - begin))))
    flush = torch.empty(FLUSH if device != "cpu" else 0, dtype=torch.uint8, device=device)
    stamps = Stamps(device)
    for _ in range(repeats):  # no wait in between: a GPU that is behind hides what launching costs
        if device != "cpu":
            torch.cuda._sleep(int(CYCLES * min(BEHIND * launched, LONGEST)))
        flush.zero_()
        stamps.put()
        work()
        stamps.put()
    return stamps.between()[::2]


def allocated(device: str) -> int | None:
    """Bytes that tensors occupy on a GPU now, None on the CPU."""
    return torch.cuda.memory_allocated() if device != "cpu" else None


def peak(device: str) -> int | None:
    """The most bytes since `forget_peak`, None on the CPU."""
    return torch.cuda.max_memory_allocated() if device != "cpu" else None


def forget_peak(device: str) -> None:
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()


def clear(device: str) -> None:
    """Give back what nobody holds."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def scratch(work: Callable[[], Any], device: str) -> int | None:
    """Bytes that a call occupies at most beside what was there before and what it returns; None on the CPU."""
    if device == "cpu":
        return None
    clear(device)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = work()
    torch.cuda.synchronize()
    own = sum(tensor.untyped_storage().nbytes() for tensor in tensors(result))
    return torch.cuda.max_memory_allocated() - before - own


def tensors(value: object) -> list[Tensor]:
    """The tensors in a result."""
    if isinstance(value, Tensor):
        return [value]
    several = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [tensor for own in several for tensor in tensors(own)]


def fits(work: Callable[[], Any], device: str) -> tuple[bool, Any]:
    """Whether there is memory enough for `work`, and what it returned. What a failed one held is given back."""
    try:
        return True, work()
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not (isinstance(error, torch.OutOfMemoryError) or any(word in str(error).lower() for word in EXHAUSTED)):
            raise
    clear(device)  # here, not above: while the error is handled its frames hold what they made
    return False, None


def launches(work: Callable[[], Any], device: str) -> dict[str, tuple[int, float]] | None:
    """Kernels that a call runs on a GPU: name -> how often, microseconds in all. None on the CPU."""
    if device == "cpu":
        return None
    from torch.profiler import ProfilerActivity, profile

    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        work()
        torch.cuda.synchronize()
    found: dict[str, tuple[int, float]] = {}
    for event in profiled.events():
        on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
        if (
            on_gpu
            and not event.name.startswith(("Memcpy", "Memset"))
            and not getattr(event, "is_user_annotation", False)
        ):
            count, total = found.get(event.name, (0, 0.0))
            found[event.name] = count + 1, total + event.time_range.elapsed_us()
    return found

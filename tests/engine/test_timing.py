"""What `kvbench.engine.timing` counts on a GPU, with the numbers of an allocator that a test sets."""

import torch

from kvbench.engine.timing import scratch


def test_scratch_is_the_peak_without_what_was_there_and_what_comes_out(monkeypatch):
    held = {"now": 100, "peak": 900}  # bytes; the peak is that of work before

    def work():
        held.update(now=164, peak=max(held["peak"], 204))
        return {"scores": torch.zeros(16)}

    for name, count in {
        "synchronize": lambda: None,
        "memory_allocated": lambda: held["now"],
        "reset_peak_memory_stats": lambda: held.update(peak=held["now"]),
        "max_memory_allocated": lambda: held["peak"],
    }.items():
        monkeypatch.setattr(torch.cuda, name, count)
    assert scratch(work) == 204 - 100 - 64

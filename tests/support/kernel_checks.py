"""What the tests of several Triton kernels need: where they run, on which types, and with what in memory."""

import math

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Both implementations of an operation. On a GPU `make test-gpu` leaves the reference to `FULL=1`: it is written in
# PyTorch, and `make test` compares it with the definition on the CPU.
BOTH = pytest.mark.parametrize(
    "implementation", [pytest.param("reference", marks=pytest.mark.rest if DEVICE == "cuda" else ()), "triton"]
)


def poison_memory(monkeypatch):
    """Memory that a kernel is given to write holds NaN."""
    empty = torch.empty

    def poisoned(*size, **how):
        made = empty(*size, **how)
        return made.fill_(math.nan) if made.dtype.is_floating_point else made

    monkeypatch.setattr(torch, "empty", poisoned)


def assert_equal_sums(found, expected):
    """But for the order of sums, which follows that of the memory."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)

"""Which of an op's implementations runs. One that is asked for by name runs, or says why it cannot."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

FAST = (torch.float32, torch.bfloat16, torch.float16)
WITHIN: ContextVar[str | None] = ContextVar("implementation", default=None)


@contextmanager
def force_implementation(implementation: str | None) -> Iterator[None]:
    """Inside, ops that are asked for no implementation by name run this one: to time a method with either."""
    token = WITHIN.set(implementation)
    try:
        yield
    finally:
        WITHIN.reset(token)


def is_interpreting() -> bool:
    """Triton runs its kernels in its interpreter: on the CPU, slowly, to test them."""
    import triton

    return triton.knobs.runtime.interpret


def choose_implementation(op: str, asked: str | None, like: Tensor, others: tuple[str, ...] = ()) -> str:
    """What was asked for: "reference", "triton" or one of `others`; of None, what `force_implementation` says, else
    triton for `like` on a GPU in a dtype that its kernels know, else the reference. ValueError for a name that does not
    exist or cannot run here.
    """
    asked = WITHIN.get() if asked is None else asked
    if asked is None:
        return "triton" if like.is_cuda and like.dtype in FAST else "reference"
    if asked not in ("reference", "triton", *others):
        names = ", ".join(("reference", "triton", *others))
        raise ValueError(f"{op}: implementation {asked!r}; one of {names}")
    if asked == "triton" and like.dtype not in FAST:
        raise ValueError(f"{op}: implementation triton knows float32, bfloat16 and float16, not {like.dtype}")
    if asked == "triton" and not (like.is_cuda or is_interpreting()):
        raise ValueError(f"{op}: implementation triton needs a GPU, or TRITON_INTERPRET=1")
    return asked

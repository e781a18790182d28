"""Choose the implementation of an operation. One that is asked for by name runs, or an error says why it cannot."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

FAST = (torch.float32, torch.bfloat16, torch.float16)
WITHIN: ContextVar[str | None] = ContextVar("implementation", default=None)
ANNOUNCING: ContextVar[bool] = ContextVar("announcing", default=False)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@contextmanager
def force_implementation(implementation: str | None) -> Iterator[None]:
    """Use this implementation inside the `with` block for all calls that name none.

    Benchmarks use it to time a method with either implementation.
    """
    token = WITHIN.set(implementation)
    try:
        yield
    finally:
        WITHIN.reset(token)


@contextmanager
def announce_launches() -> Iterator[None]:
    """Inside the `with` block, kernels need not run: each operation makes its launches and then takes the reference.

    Who enters the block sees to it that a launch is noted and does nothing, as a hook of Triton can. So all kernels of
    a computation become known before the first of them is compiled (kvbench.engine.warming), and what follows from
    their results stays right.
    """
    token = ANNOUNCING.set(True)
    try:
        yield
    finally:
        ANNOUNCING.reset(token)


def is_announcing() -> bool:
    """Return whether kernels need not run here, so that no graph of them may be captured."""
    return ANNOUNCING.get()


def announced(
    op: Callable[Arguments, Result], both: Callable[[Result, Result], Result] | None = None
) -> Callable[Arguments, Result]:
    """Decorate an operation for `announce_launches`. It has a keyword argument `implementation`.

    `both` is for `announced_with`.
    """

    @wraps(op)
    def call(*args: Arguments.args, **named: Arguments.kwargs) -> Result:
        if not ANNOUNCING.get():
            return op(*args, **named)
        token = ANNOUNCING.set(False)  # operations inside this one are part of it
        try:
            launched = op(*args, **named)
            named["implementation"] = "reference"
            exact = op(*args, **named)
            return exact if both is None else both(launched, exact)
        finally:
            ANNOUNCING.reset(token)

    return call


def announced_with(
    both: Callable[[Result, Result], Result],
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Decorate an operation whose result makes further launches.

    `both` makes the result of what the operation's launches left and of the reference's result.
    """
    return lambda op: announced(op, both)


def is_interpreting() -> bool:
    """Return whether Triton runs its kernels in its interpreter, which is slow and runs on the CPU, for tests."""
    import triton

    return triton.knobs.runtime.interpret


def choose_implementation(op: str, asked: str | None, like: Tensor, others: tuple[str, ...] = ()) -> str:
    """Return the name of the implementation to run.

    Args:
        op: The operation's name, for messages.
        asked: "reference", "triton", one of `others`, or None. None takes the name that `force_implementation` set.
            Without one it takes "triton" on a GPU in a dtype that the kernels support, otherwise "reference".
        like: A tensor with the device and dtype of the arguments.
        others: Further names that this operation knows.

    Raises:
        ValueError: There is no such implementation, or it cannot run here.
    """
    asked = WITHIN.get() if asked is None else asked
    if asked is None:
        return "triton" if like.is_cuda and like.dtype in FAST else "reference"
    if asked not in ("reference", "triton", *others):
        names = ", ".join(("reference", "triton", *others))
        raise ValueError(f"{op}: implementation {asked!r}; one of {names}")
    if asked == "triton" and like.dtype not in FAST:
        raise ValueError(f"{op}: implementation triton supports float32, bfloat16 and float16, not {like.dtype}")
    if asked == "triton" and not (like.is_cuda or is_interpreting()):
        raise ValueError(f"{op}: implementation triton needs a GPU, or TRITON_INTERPRET=1")
    return asked

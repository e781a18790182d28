"""Count what the time of this process is spent on, so that a sweep can say it at its end."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MEANINGS = {
    "starting": "importing packages and composing cells",
    "loading": "the tokenizer and the model's weights",
    "samples": "making samples and their tokens",
    "warming up": "rehearsing methods and compiling kernels",
    "reading": "prompts and questions, and cutting the cache where a run reads alone",
    "cutting": "scores and cuts of runs that read a prompt together",
    "comparing": "looking at the cache, and with fidelity=true comparing predictions",
    "capturing": "preparing CUDA graphs, and reserving memory for answers",
    "restoring": "noting what a cache holds before an answer, and returning to it",
    "answering": "generating tokens, and reading questions that a GPU reads token by token",
    "grading": "scoring answers and making records",
    "writing": "records",
    "waiting": "for samples of other processes",
    "tables": "closing tables",
    "workers": "processes that do the work, each of which says what it spends its time on",
}
SECONDS = dict.fromkeys(MEANINGS, 0.0)
INNER: list[tuple[str, float]] = []  # parts that are being counted, and the seconds of the parts inside each
WHOLE = ("warming up",)  # parts that contain what is done inside them, apart from loading


@contextmanager
def spend(part: str) -> Iterator[None]:
    """Count the time inside the `with` block, or inside a decorated function, for a part of `MEANINGS`.

    Time that is counted for another part inside is not counted twice. A GPU that still works when the block ends is
    counted where the host waits for it.
    """
    if part != "loading" and any(counted in WHOLE for counted, _ in INNER):
        yield
        return
    begin = time.perf_counter()
    INNER.append((part, 0.0))
    try:
        yield
    finally:
        spent = time.perf_counter() - begin
        SECONDS[part] += spent - INNER.pop()[1]
        if INNER:
            outer, inside = INNER.pop()
            INNER.append((outer, inside + spent))


def move(before: str, part: str, seconds: float) -> None:
    """Count seconds for `part` that are counted for the part `before`, now or later."""
    if not any(counted in WHOLE for counted, _ in INNER):
        SECONDS[before] -= seconds
        SECONDS[part] += seconds


def start_counting(who: str = "") -> Callable[[], None]:
    """Set all counts to zero. Returns a function that writes what the time of `who` was spent on, if any was."""
    SECONDS.update(dict.fromkeys(SECONDS, 0.0))
    begin = time.perf_counter()

    def say() -> None:
        if any(SECONDS.values()):
            sys.stderr.write(f"time{who}: {describe(time.perf_counter() - begin)}\n")  # at once: others write too

    return say


def describe(wall: float) -> str:
    """Return one line that says what `wall` seconds were spent on, the largest part first."""
    parts = sorted(SECONDS.items(), key=lambda entry: -entry[1])
    parts.append(("rest", wall - sum(SECONDS.values())))
    shown = ", ".join(f"{name} {100 * seconds / wall:.0f} %" for name, seconds in parts if seconds >= 0.005 * wall)
    return f"{wall:.0f} s: {shown}"

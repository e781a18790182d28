"""Let a study look at a cache that any method cuts, without changing what the method does."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from kvbench.interfaces.derived_method import derive_method
from kvbench.interfaces.hooks import overrides_any
from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import Observation, ReadRequest, State
from kvbench.interfaces.rows import Rows

Look = Callable[[Observation, Rows], None]
LookAtReads = Callable[[ReadRequest, Tensor | None], None]


def watch_method(
    method: Method,
    look: Look,
    look_at_reads: LookAtReads | None = None,
    is_watching: Callable[[], bool] = lambda: True,
) -> Method:
    """Return the method, with a function that sees what the method sees: every block, before it is cut.

    Args:
        method: Any method.
        look: Called for each layer with what the layer computed for a block of the prompt or for a decoded token, and
            with the rows that it holds then. It may keep copies of tensors, but must not change them. Extra reads about
            the prompt (`Observation.about`) are shown, too. Answers must be read through the model's modules.
        look_at_reads: Called before `look` for every block that follows the prompt, with the rows that each query head
            attends to, (B, H*G, n) bool, or None for all of them (`Method.read`).
        is_watching: Asked for every block. If it says no, `look` is not called, and a method that does not look at
            blocks itself costs nothing.
    """
    base = type(method)

    def overrides(watched: Method, *names: str) -> bool:
        kind: Any = type(watched) if is_watching() else base  # mypy says that the class cannot be hashed
        return overrides_any(kind, names)

    def update(watched: Method, observation: Observation, rows: Rows, state: State) -> Mapping[str, Tensor]:
        if is_watching():
            look(observation, rows)
        return base.update(watched, observation, rows, state)

    hooks: dict[str, Callable[..., Any]] = {"overrides": overrides, "update": update}
    if look_at_reads is not None:

        def read(watched: Method, request: ReadRequest, rows: Callable[[], Rows], state: State) -> Tensor | None:
            places = base.read(watched, request, rows, state)
            look_at_reads(request, places)
            return places

        hooks["read"] = read
    return derive_method(method, hooks)

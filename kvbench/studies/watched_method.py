"""Let a study look at a cache that any method cuts, without changing what the method does."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows

Look = Callable[[Observation, Rows], None]


def watch_method(method: Method, look: Look) -> Method:
    """Return the method, with a function that sees what the method sees: every block, before it is cut.

    Args:
        method: Any method.
        look: Called for each layer with what the layer computed for a block of the prompt or for a decoded token, and
            with the rows that it holds then. It may keep copies of tensors, but must not change them. Extra reads about
            the prompt (`Observation.about`) are shown, too. Answers must be read through the model's modules.
    """
    of: Any = type(method)

    class Watched(of):
        def update(self, observation: Observation, rows: Rows, state: State) -> Mapping[str, Tensor]:
            look(observation, rows)
            found: Mapping[str, Tensor] = super().update(observation, rows, state)
            return found

    own: Method = object.__new__(Watched)
    vars(own).update(vars(method))
    return own

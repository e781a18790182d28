"""The common base of methods and allocators: classes whose hooks a subclass may override."""

from collections.abc import Hashable
from functools import cache
from typing import cast


class Hooks:
    """Base of an interface whose methods are hooks with a default.

    kvbench asks which hooks a subclass overrides. A hook that is not overridden needs no guard, and it may allow a
    faster way.
    """

    def overrides(self, *hooks: str) -> bool:
        """Return whether the object's class overrides at least one of the hooks with these names."""
        return overrides_any(cast(Hashable, type(self)), hooks)  # mypy does not know that a class is hashable


@cache
def overrides_any(kind: type[Hooks], hooks: tuple[str, ...]) -> bool:
    """Return whether a class overrides at least one of these hooks. The engine asks this for every layer and cut.

    The interface defines each hook once, so a hook that is defined twice is overridden.
    """
    return any(sum(hook in vars(base) for base in kind.__mro__) > 1 for hook in hooks)

"""Replace hooks of a method without changing its class, its name or its settings."""

from collections.abc import Callable, Mapping
from typing import Any

from kvbench.interfaces.method import Method


def derive_method(method: Method, hooks: Mapping[str, Callable[..., Any]]) -> Method:
    """Return a method with the same settings, whose class is the method's with some hooks replaced.

    Args:
        method: Any method.
        hooks: Name -> function, which gets the method first.
    """
    of = type(method)
    derived: Method = object.__new__(type(of.__name__, (of,), dict(hooks)))
    vars(derived).update(vars(method))
    return derived

"""full: the full cache, the baseline of every run. Nothing is ever cut."""

from kvbench.interfaces.method import Method as Full

__all__ = ["Full"]

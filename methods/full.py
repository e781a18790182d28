"""full: the full cache, the baseline of every run. Nothing is ever cut."""

from kvbench.method import Method as Full

__all__ = ["Full"]

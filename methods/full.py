"""full: keep the full cache. This is the baseline of every run; nothing is ever cut."""

from kvbench.interfaces.method import Method as Full

__all__ = ["Full"]

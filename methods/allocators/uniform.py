"""uniform: every layer and every head keeps the same number of rows."""

from kvbench.interfaces.allocator import Allocator as Uniform

__all__ = ["Uniform"]

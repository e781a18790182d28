"""raw: keys and values as the model wrote them."""

from kvbench.interfaces.codec import Codec as Raw

__all__ = ["Raw"]

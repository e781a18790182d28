"""What a cache is made with, and where the reading of its prompt stands."""

from dataclasses import dataclass
from fractions import Fraction

from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.codec import Codec
from kvbench.interfaces.method import Method


@dataclass(frozen=True)
class Progress:
    """Where a prompt stands. The engine sets it before each block, the layers read it."""

    prompt: int = 0  # tokens of the prompt (of the context where the question is hidden)
    last: bool = False  # the block being read is the prompt's last
    decoding: bool = False  # tokens after the prompt are being read
    prefix: int = 0  # tokens of the prompt in front of the user's text
    about: tuple[int, int] | None = None  # places that the model reads about, of methods that need extra reads
    quota: int | None = None  # rows per head to cut to after this block, None: no cut
    share: Fraction | None = None  # the same, not floored to whole rows
    look: int | None = None  # rows that a query head may look at, of methods that read few of many, None: all
    room: int = 0  # tokens to reserve room for when storage must grow


@dataclass(frozen=True)
class CachePolicy:
    """What a cache is made with. `exact`: guards compare copies of all that hooks are handed (kvbench.cache.guard)."""

    method: Method
    allocator: Allocator
    codec: Codec
    exact: bool = False

    @property
    def owners(self) -> str:
        """Who may have kept a reference: the method, and an allocator or a codec that has hooks of its own."""
        own = [f"method={self.method.name}"]
        own += [f"allocator={self.allocator.name}"] * (not self.allocator.is_uniform)
        own += [f"codec={self.codec.name}"] * self.codec.packs
        return " or ".join(own)

    @property
    def token_by_token(self) -> bool:
        """Whether what follows the prefill is read one token at a time, several known tokens too."""
        return self.method.token_by_token or self.codec.token_by_token

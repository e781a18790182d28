"""What the engine shows to a method, an allocator and a codec, and what they may remember.

Symbols: B samples, H KV heads, G query heads per KV head, T tokens of the block, n rows (the block's are the last T),
d head dimension.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from torch import Tensor

from kvbench.validation import SettingError


@dataclass(frozen=True)
class PromptEncoder:
    """How a method's own words to the model become tokens."""

    encode: Callable[[str], list[int]] | None = None  # None: no tokenizer was given
    turn: tuple[int, ...] = ()  # ends the user's message and opens the answer

    def ids(self, setting: str, words: str | Sequence[int]) -> list[int]:
        """Token ids of a setting that is text, or token ids already."""
        if not isinstance(words, str):
            return list(words)
        if self.encode is None:
            raise SettingError(f"{setting}: a text, and no tokenizer to read it with; give tokenizer=, or token ids")
        return self.encode(words)


@dataclass(frozen=True)
class ExtraRead:
    """Tokens that the model reads after the prompt and forgets, about the prompt's places `start` to `stop`."""

    ids: Tensor  # (B, t)
    start: int
    stop: int


@dataclass(frozen=True)
class Observation:
    """What a layer shows of the block that it just read. Read-only."""

    queries: Tensor  # (B, H*G, T, d), rotated
    outputs: Tensor  # (B, H*G, T, d), attention outputs before the output projection
    lse: Tensor | None  # (B, H*G, T) log-sum-exp of the logits, float32; None unless the method `wants_lse`
    scaling: float  # of the logits, 1/√d unless the model has its own
    output_weight: Tensor  # (hidden, H*G*d), the layer's W_o
    rotation: Callable[[Tensor], tuple[Tensor, Tensor]]  # places (B, n) -> cos, sin (B, n, rotated dimensions)
    layer: int
    layers: int
    first: int  # place of the block's first token
    prompt: int  # tokens of the prompt, or of the context where the question is hidden
    last: bool  # the prompt's last block
    decoding: bool  # tokens after the prompt
    cut_layers: tuple[int, ...] = ()  # layers that share the budget: all but sliding-window and spared ones
    prefix: int = 0  # tokens in front of the user's text (chat template, first token)
    about: tuple[int, int] | None = None  # places that the block is a `ExtraRead` about
    share: Fraction | None = None  # rows per layer and KV head of the cut that follows, not floored; None: no cut

    @property
    def tokens(self) -> int:
        """Tokens read so far, this block included."""
        return self.first + self.queries.shape[2]


@dataclass
class State:
    """What a method remembers beside the rows: born with a sample and dropped with it. What answers a question is
    forgotten before the next one: put new tensors into the state while decoding, never write into those that are there.
    """

    seeds: tuple[int, ...]  # one per sample
    layer: dict[str, Any] = field(default_factory=dict)  # this layer's
    shared: dict[str, Any] = field(default_factory=dict)  # all layers'


@dataclass(frozen=True)
class ReadRequest:
    """Queries of tokens that follow the prompt, before attention: which of the layer's rows shall they look at?"""

    queries: Tensor  # (B, H*G, T, d), rotated
    layer: int
    layers: int
    first: int  # place of the first token
    prompt: int  # tokens of the prompt, or of the context where the question is hidden
    scaling: float  # of the logits
    quota: int | None  # rows that a query head may look at, of a method that `attends_subset`; None for all

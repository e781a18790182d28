"""What the engine shows to a method, an allocator or a codec, and what these may remember.

Symbols: B samples, H KV heads, G query heads per KV head, T tokens of the block that a layer just read, n rows (the
last T of them are the block's), d head dimension. A position is the index of a token in the text, from 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

from torch import Tensor

from kvbench.kernels.softmax_extras import SoftmaxExtras
from kvbench.validation import SettingError


@dataclass(frozen=True)
class PromptEncoder:
    """Turns a method's own words to the model into token ids."""

    encode: Callable[[str], list[int]] | None = None
    """The tokenizer's function, or None if no tokenizer was given."""
    turn: tuple[int, ...] = ()
    """Token ids that end the user's message and open the answer."""

    def ids(self, setting: str, words: str | Sequence[int]) -> list[int]:
        """Return the token ids of a text, or the ids themselves if `words` is a list of them.

        Raises:
            SettingError: `words` is a text and there is no tokenizer. The message names `setting`.
        """
        if not isinstance(words, str):
            return list(words)
        if self.encode is None:
            raise SettingError(f"{setting}: this text needs a tokenizer; give tokenizer=, or write token ids instead")
        return self.encode(words)


@dataclass(frozen=True)
class ExtraRead:
    """Tokens that the model reads after the prompt and then forgets."""

    ids: Tensor
    """Token ids, (B, t)."""
    start: int
    """The first position of the prompt that the read is about."""
    stop: int
    """The position after the last one that the read is about."""


KeyRotation = Callable[[Tensor, Tensor], Tensor]
"""Norms and rotates keys as the model's layer does: keys (B, H, n, d) before both, and their positions, whole numbers
that broadcast to (B, H, n).
"""


@dataclass(frozen=True)
class LayerInputs:
    """What enters a layer's attention for a block, as far as a method or a codec asks for it."""

    keys: Tensor | None
    """Keys before QK norm and rotation, (B, H, T, d). None unless somebody asks for them."""
    hidden: Tensor | None
    """Hidden states that enter the layer, before its norm, (B, T, hidden). None unless somebody asks for them."""
    normed_hidden: Tensor | None
    """Hidden states behind the layer's norm, which the projections of queries, keys and values read, (B, T, hidden).
    None unless somebody asks for them.
    """
    rotate: KeyRotation
    """Gives the keys as the layer attends to them."""


@dataclass(frozen=True)
class Observation:
    """What a layer computed for the block that it just read. Hooks must not change its tensors."""

    queries: Tensor
    """(B, H*G, T, d), rotated"""
    outputs: Tensor
    """Attention outputs before the output projection, (B, H*G, T, d)."""
    lse: Tensor | None
    """Log-sum-exp of the logits, (B, H*G, T), float32. None unless the method wants it (`FurtherHooks.wants`)."""
    scaling: float
    """The factor of the logits: 1/√d unless the model has its own."""
    output_weight: Tensor
    """The layer's output projection W_o, (hidden, H*G*d)."""
    rotation: Callable[[Tensor], tuple[Tensor, Tensor]]
    """The model's rotary embedding: positions (B, n) -> cos, sin (B, n, rotated dimensions)."""
    layer: int
    """The index of the layer, from 0."""
    layers: int
    """Number of layers."""
    first: int
    """Position of the block's first token. Inside a CUDA graph, a tensor without dimensions, or (B, 1, 1) if every
    token is cut (`Captured`).
    """
    prompt: int
    """Tokens of the prompt, or of the context if the question is hidden. Inside a CUDA graph, a tensor (B, 1, 1) if the
    samples follow prompts of different lengths.
    """
    last: bool
    """Whether this is the last block of the prompt."""
    decoding: bool
    """Whether the block follows the prompt."""
    cut_layers: tuple[int, ...] = ()
    """Layers that share the budget: all but those with a sliding window and those that the method skips."""
    prefix: int = 0
    """Number of tokens before the user's text (chat template, first token)."""
    about: tuple[int, int] | None = None
    """Start and stop of the positions that the block is an `ExtraRead` about; None for any other block."""
    share: Fraction | None = None
    """Rows per layer and KV head after the cut that follows, not rounded down. None if no cut follows."""
    each: int | None = None
    """Number of rows that every head holds with the block. None if heads hold different numbers, or if only the device
    knows it.
    """
    unrotated_keys: Tensor | None = None
    """Keys of the block before QK norm and rotation, (B, H, T, d). None unless the method wants them.
    Its values are the last T of `Rows.values`.
    """
    hidden: Tensor | None = None
    """Hidden states that enter the layer, before its norm, (B, T, hidden). None unless the method wants them.
    """
    normed_hidden: Tensor | None = None
    """Hidden states behind the layer's norm, which the projections of queries, keys and values read, (B, T, hidden).
    None unless the method wants them.
    """
    extras: SoftmaxExtras | None = None
    """Sinks and cap of the layer's softmax, which its outputs and the log-sum-exps include; None for the plain one.
    Kernels that compute probabilities take them.
    """
    gradient: Tensor | None = None
    """Gradient of the method's `objective` by what the layer's attention returns, after W_o, (B, T, hidden). None
    unless the method wants it, and the block is an `ExtraRead`.
    """

    @cached_property
    def tokens(self) -> int:
        """Number of tokens read so far, this block included."""
        return self.first + self.queries.shape[2]

    @property
    def is_last_layer(self) -> bool:
        """Whether no later layer shares the budget. To ask this does not count as asking for the layer's index."""
        attributes = vars(self)
        return bool(attributes["layer"] >= max(attributes["cut_layers"], default=0))


@dataclass
class State:
    """What a method remembers besides values per row. Made for a batch of samples and dropped with it.

    After an answer the state returns to what it was before the question. While decoding, put new tensors into the
    state; never write into tensors that are already there.
    """

    seeds: tuple[int, ...]
    """One seed per sample."""
    layer: dict[str, Any] = field(default_factory=dict)
    """Values of this layer."""
    shared: dict[str, Any] = field(default_factory=dict)
    """Values that all layers share."""


@dataclass(frozen=True)
class StateCapture:
    """What a method must know to move its state to fixed addresses (`Captured.capture_state`)."""

    queries: Tensor
    """No queries, (B, H*G, 0, d), of the dtype and on the device of those to come."""
    seen: int
    """Tokens read so far."""
    since: int
    """Steps that the method has counted since the last cut, mostly one a token (`Method.steps`)."""
    undone: int
    """Most tokens that may be undone: `update` may be called again for any of so many last tokens."""


@dataclass(frozen=True)
class ReadRequest:
    """Queries of tokens that follow the prompt, before they attend."""

    queries: Tensor
    """(B, H*G, T, d), rotated"""
    layer: int
    """The index of the layer, from 0."""
    layers: int
    """Number of layers."""
    first: int
    """Position of the first token."""
    prompt: int
    """Tokens of the prompt, or of the context if the question is hidden."""
    scaling: float
    """The factor of the logits."""
    quota: int | None
    """Rows that a query head may attend to if the method sets `attends_subset`; None for all rows."""
    fraction: Fraction | None = None
    """The budget if it is a fraction, for methods that take it of other rows than the prompt's. None otherwise."""
    packed: tuple[int, int] | None = None
    """Start and stop of the rows that the codec has packed in this layer, or in the next one for which it tells
    (`Codec.find_packed`). None if it tells for none.
    """
    extras: SoftmaxExtras | None = None
    """Sinks and cap of the layer's softmax; None for the plain one."""

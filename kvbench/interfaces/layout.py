"""The layout of a model, which its configuration tells before its weights are loaded."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Probe:
    """What a probe says about an architecture that it admits (`kvbench.models.probe`)."""

    architecture: str
    """Its name in transformers."""
    rotation_fault: str | None
    """Why kvbench cannot norm and rotate keys as the model does, or None if it can."""
    graphs: bool
    """Whether kvbench's own step computes what the model computes, so that answers can be decoded in CUDA graphs."""
    rerotation_fault: str | None = None
    """Why rotated keys cannot be rotated to other positions, or None if they can."""
    joint_norm: bool = False
    """Whether it norms the keys of all heads of a token together."""


@dataclass(frozen=True)
class Layout:
    """What methods, codecs and caches must know about a model."""

    layers: int
    """Number of layers."""
    heads: int
    """Number of KV heads of a layer."""
    query_heads: int
    """Number of query heads of a layer."""
    dim: int
    """Head dimension of queries and keys."""
    hidden: int
    """Width of the hidden states."""
    sliding: tuple[int, ...]
    """Layers with a sliding window. They keep transformers' own cache."""
    window: int | None
    """The window, if every layer has one. The layers then count as full, and no text may be longer."""
    longest: int
    """How many tokens the model supports."""
    rope_switch: int | None
    """The length beyond which RoPE changes its frequencies (LongRoPE, dynamic), or None if it never does."""
    softcap: float | None = None
    """The cap of the logits of attention, or None if there is none."""
    probe: Probe | None = None
    """What a probe says about the model, or None if its architecture is on the tested list."""
    rotation_fault: str | None = None
    """Why kvbench cannot norm and rotate keys as the model does, or None if it can."""
    rerotation_fault: str | None = None
    """Why rotated keys cannot be rotated to other positions, or None if they can."""
    joint_norm: bool = False
    """Whether the model norms the keys of all heads of a token together."""
    recurrent: tuple[int, ...] = ()
    """Layers without rows. They keep a recurrent or convolutional state in transformers' own cache, or nothing."""
    stateful: bool = False
    """Whether some layers keep a recurrent or convolutional state. Layers that hold rows may have one beside them."""
    value_width: int | None = None
    """Head dimension of values, if it is another one than that of keys."""

    @property
    def value_dim(self) -> int:
        """Head dimension of values."""
        return self.dim if self.value_width is None else self.value_width

    @property
    def row_numbers(self) -> int:
        """How many numbers the keys and values of one token are in all KV heads of a layer."""
        return self.heads * (self.dim + self.value_dim)

    @property
    def held(self) -> tuple[int, ...]:
        """Layers whose rows kvbench holds, so that methods can cut them."""
        return tuple(i for i in range(self.layers) if i not in self.sliding and i not in self.recurrent)

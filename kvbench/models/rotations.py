"""Say how the layers of a model norm and rotate their keys, in kvbench's terms.

kvbench rotates halves: of the first r dimensions of a head, it turns the pairs (i, i + r/2) by cos and sin. Models
differ from that in these ways, and this module finds out which by their modules:

* Neighbours (i, i + 1) are the pairs. Attention does not change if the dimensions of queries and keys change places
  alike, so kvbench puts those of queries and of keys in the order of halves (`find_order`), once keys are normed.
* The sign of sin is the other one, or the rotary module returns cos and sin once for each pair, or as a complex number
  (`AngleForm`).
* A layer has no RoPE (`is_rotated`), or a rotary module of its own (`find_rotary`). Without RoPE, cos is 1 and sin 0.
* Keys are normed by a module with another name, over all heads together, or behind the rotation (`KeyNorm`).
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Rotation = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A rotary embedding: positions (B, n) -> cos and sin (B, n, rotated dimensions)."""

UNROTATED: dict[str, Callable[[Any], bool]] = {  # types, and whether an attention module leaves out the rotation
    "smollm3": lambda attention: not attention.use_rope,
    "exaone4": lambda attention: attention.sliding_window is not None and not attention.is_sliding,
    "exaone_moe": lambda attention: attention.sliding_window is not None and not attention.is_sliding,
    "cohere2": lambda attention: attention.sliding_window is None,
    "cohere2_moe": lambda attention: attention.sliding_window is None and not getattr(attention, "force_rope", False),
    "afmoe": lambda attention: not attention.is_local_attention,
    "llama4_text": lambda attention: not attention.use_rope,
    "granite_swa": lambda attention: not attention.config.layer_rope_theta[attention.layer_idx],
    "granitemoe_swa": lambda attention: not attention.config.layer_rope_theta[attention.layer_idx],
}
FIRST_POSITION = {"paligemma": 1}  # types whose first token has another position than 0
LATE_NORM = frozenset(["hunyuan_v1_dense", "hunyuan_v1_moe", "nanochat", "llama4_text"])  # types that norm rotated keys
NORMS = ("k_norm", "key_layernorm", "k_layernorm", "qk_norm")  # what attention modules call the norm of keys
TURNS = ("rotate_half_llm", "rotate_half_text", "rotate_half")  # a text decoder's functions beside a vision tower's
PAIRS, BACKWARDS = (-2.0, 1.0, -4.0, 3.0), (3.0, 4.0, -1.0, -2.0)  # what they make of 1, 2, 3, 4; halves: -3, -4, 1, 2


@dataclass(frozen=True)
class AngleForm:
    """How a model's rotary module states cos and sin, and which dimensions its attention pairs."""

    pairs: bool = False
    """Whether neighbouring dimensions are pairs. Otherwise dimensions i and i + r/2 are."""
    backwards: bool = False
    """Whether dimensions turn by -sin."""
    once: bool = False
    """Whether cos and sin have an entry for each pair, in place of one for each dimension."""
    repeated: bool = False
    """Whether the two dimensions of a pair are neighbours in cos and sin, in place of halves."""

    def convert(self, angles: tuple[Tensor, Tensor] | Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of halves, (B, n, r) each, of what the rotary module returned."""
        cos, sin = (angles.real, angles.imag) if isinstance(angles, Tensor) else angles
        if cos.dim() == 4:  # one for each axis of an image, which are alike in a text
            cos, sin = cos[0], sin[0]
        if self.repeated:
            cos, sin = cos[..., ::2], sin[..., ::2]
        if self.repeated or self.once:
            cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
        return cos, -sin if self.backwards else sin


def find_form(attention: Any, sample: tuple[Tensor, Tensor] | Tensor) -> AngleForm:
    """Return how a model states its angles.

    Args:
        attention: An attention module of the model.
        sample: What the rotary module returns for position 1.
    """
    if isinstance(sample, Tensor):  # Llama 4
        return AngleForm(pairs=True, once=True)
    source = vars(sys.modules[type(attention).__module__])
    turn = next((source[name] for name in TURNS if name in source), None)
    if turn is None:  # GPT-OSS, which splits a head into halves itself
        return AngleForm(once=2 * sample[0].shape[-1] <= attention.head_dim)
    turned = tuple(turn(torch.arange(1.0, 5.0, device="cpu")).tolist())
    sin, pairs = sample[1], turned == PAIRS
    repeated = pairs and torch.equal(sin[..., ::2], sin[..., 1::2])
    return AngleForm(pairs, turned == BACKWARDS, repeated=repeated)


def find_order(form: AngleForm, rotated: int, dim: int, device: torch.device) -> Tensor | None:
    """Return the model's dimensions of a head in the order of halves, (dim,), or None if they are in that order.

    Args:
        form: How the model states its angles.
        rotated: Number of rotated dimensions.
        dim: Number of dimensions of a head.
        device: Where to put them.
    """
    if not form.pairs:
        return None
    places = torch.arange(dim, device=device)
    return torch.cat([places[:rotated:2], places[1:rotated:2], places[rotated:]])


def is_rotated(attention: Any) -> bool:
    """Return whether an attention module rotates its queries and keys."""
    leaves_out = UNROTATED.get(attention.config.model_type)
    return leaves_out is None or not leaves_out(attention)


def find_rotary(decoder: Any, attention: Any, common: Any) -> Any:
    """Return the rotary module of a layer, if it is not the `common` one. Granite SWA has one for each base."""
    bases = getattr(attention.config, "layer_rope_theta", None)
    if bases is None or not hasattr(decoder, "rotary_embs"):
        return common
    base = bases[attention.layer_idx]
    fitting = (module for module in decoder.rotary_embs if module.config.rope_parameters["rope_theta"] == base)
    return next(fitting, common)


def stand_still(rotated: int, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of a layer without RoPE, (B, n, rotated), as wide as those of the model's other layers."""
    shape = (*places.shape, rotated)
    return places.new_ones(shape, dtype=torch.float32), places.new_zeros(shape, dtype=torch.float32)


@dataclass(frozen=True)
class KeyNorm:
    """How a layer norms its keys."""

    module: Any
    """Its norm, or None."""
    late: bool
    """Whether it norms keys that were rotated."""
    joint: bool
    """Whether it norms the keys of all heads of a token together."""
    by_head: bool
    """Whether each head has weights of its own, and heads stand behind tokens."""
    most: float | None
    """The largest size of a normed number (OLMoE), or None."""

    def __call__(self, keys: Tensor) -> Tensor:
        """Return normed keys, (B, H, n, d). A joint norm needs rows that belong to the same tokens in all heads."""
        if self.module is not None and self.joint:
            normed = self.module(keys.transpose(1, 2).flatten(2)).unflatten(-1, (keys.shape[1], -1)).transpose(1, 2)
        elif self.module is not None and self.by_head:
            normed = self.module(keys.transpose(1, 2)).transpose(1, 2)
        else:
            normed = keys if self.module is None else self.module(keys)
        return normed if self.most is None else normed.clamp(-self.most, self.most)


def find_key_norm(attention: Any) -> KeyNorm:
    """Return how an attention module norms its keys."""
    config, parts = attention.config, (getattr(attention, name, None) for name in NORMS)
    module = next((part for part in parts if part is not None), None)
    weight, dim = getattr(module, "weight", None), attention.head_dim
    joint = weight is not None and weight.dim() == 1 and len(weight) != dim
    by_head = weight is not None and weight.dim() == 2
    return KeyNorm(module, config.model_type in LATE_NORM, joint, by_head, getattr(config, "clip_qkv", None))

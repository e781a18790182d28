"""criticalkv: fill a part of the quota by another method's scores and the rest by scores times projected values.

Source: the CriticalKV paper, Algorithm 1; NVIDIA/kvpress, criticalkv_press.py (by its authors). Symbols: s_j the base
method's score, W_o^h the output projection of query head h, q a KV head's quota.

    stage 1: the ⌊α·q⌋ rows with the largest s_j
    stage 2: up to q rows by the largest (s_j + ε)·n_j,  n_j = mean over the group of ‖W_o^h v_j‖₁

The scores s_j should not be negative.

Rows that the base method protects stay in both stages. The source multiplies their padding by n_j too, so it can drop
them if α·q < w. CriticalAdaKV is criticalkv with allocator=ada mode=safeguard: heads compete by s_j, and then both
stages run on each head's own quota. The safe rows of a head stay in both stages.

This method's `decoding`, `decode_interval` and `decode_size` replace those of the base method.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor

from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.codec import Codec
from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import ExtraRead, Observation, PromptEncoder, State
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting
from kvbench.kernels.projected_norms import projected_norms
from kvbench.validation import SettingError

NORM = "projected_norm"


@dataclass(frozen=True)
class CriticalKV(Method):
    """Combine another method's scores with the norms of the projected values."""

    base: Method = setting()
    """The method whose scores count."""
    alpha: float = setting(minimum=0, maximum=1)
    """Share of the quota that the base method's scores fill alone, α."""
    epsilon: float = setting(minimum=0)
    """Number that is added to the scores before they are multiplied, ε."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.base.overrides("score") or self.base.streams:
            raise SettingError(f"method.base={self.base.name}: {self.name} needs a method that scores rows")
        if self.base.budget_setting is not None:
            raise SettingError(
                f"method.base={self.base.name}: it decides itself how many rows stay; choose another method"
            )
        if self.base.weighs_values:
            raise SettingError(f"method.base={self.base.name}: values would count twice; use it without its value norm")
        base = replace(
            self.base,
            decoding=self.decoding,
            decode_interval=self.decode_interval,
            decode_size=self.decode_size,
        )
        object.__setattr__(self, "base", base)

    @property
    def wants_lse(self) -> bool:
        return self.base.wants_lse

    @property
    def wants_unrotated_keys(self) -> bool:
        return self.base.wants_unrotated_keys

    @property
    def wants_hidden(self) -> bool:
        return self.base.wants_hidden

    @property
    def weights_bytes(self) -> int:
        return self.base.weights_bytes

    @property
    def one_block(self) -> bool:
        return self.base.one_block

    @property
    def needs_extra_reads(self) -> bool:
        return self.base.needs_extra_reads

    @property
    def sets_head_quotas(self) -> bool:
        return self.base.sets_head_quotas

    @property
    def uses_cache_positions(self) -> bool:
        return self.base.uses_cache_positions

    def check(self, layers: int, heads: int, dim: int, sliding: tuple[int, ...]) -> None:
        self.base.check(layers, heads, dim, sliding)

    def refuses(self, allocator: Allocator, codec: Codec) -> str | None:
        return super().refuses(allocator, codec) or self.base.refuses(allocator, codec)

    def extra_reads(self, ids: Tensor, prefix: int, words: PromptEncoder) -> Iterable[ExtraRead]:
        return self.base.extra_reads(ids, prefix, words)

    def head_quotas(self, quota: int, observation: Observation, state: State) -> Tensor:
        return self.base.head_quotas(quota, observation, state)

    def skips_layer(self, layer: int, layers: int) -> bool:
        return self.base.skips_layer(layer, layers)

    def update(self, observation: Observation, rows: Rows, state: State) -> Mapping[str, Tensor]:
        """Return the base method's columns, and n_j of every row."""
        if observation.decoding and not self.decoding:
            return rows.columns
        new = observation.queries.shape[2]
        norms = projected_norms(rows.values[:, :, -new:], observation.output_weight, observation.queries.shape[1])
        if NORM in rows.columns:
            norms = torch.cat([rows.columns[NORM][..., :-new], norms], -1)
        return {**self.base.update(observation, rows, state), NORM: norms}

    def steps(self, tokens: int, quota: int | None) -> int:
        return self.base.steps(tokens, quota)

    def forget(self, state: State) -> None:
        self.base.forget(state)

    def protect_sinks(self, observation: Observation, rows: Rows, quota: int) -> Tensor | None:
        return self.base.protect_sinks(observation, rows, quota)

    def protect(self, observation: Observation, rows: Rows, quota: int) -> Tensor | None:
        return self.base.protect(observation, rows, quota)

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        return self.base.score(observation, rows, state)

    def cut(self, rows: Rows, scores: Tensor, quotas: Tensor, protected: Tensor, each: int | None = None) -> Rows:
        share = Fraction(str(self.alpha))  # ⌊α·q⌋ exactly
        sure = quotas * share.numerator // share.denominator
        first = self.select(scores, sure)
        second = (scores + self.epsilon) * rows.columns[NORM]
        second = second.masked_fill(first | protected, torch.inf).masked_fill(~rows.present, -torch.inf)
        return self.merge(rows, self.select(second, quotas))

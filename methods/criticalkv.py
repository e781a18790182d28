"""criticalkv: half of the quota goes by another method's scores, the rest by scores weighed with the projected values.

Source: the CriticalKV paper, Algorithm 1; NVIDIA/kvpress, criticalkv_press.py (by its authors). Symbols: s_j the base
method's score, n_j = mean over the group's query heads h of ‖W_o^h v_j‖₁, q a head's quota. Stage 1 keeps the ⌊α·q⌋
rows of largest s_j, stage 2 fills up to q by (s_j + ε)·n_j; s_j should not be negative. Rows that the base method
protects stay in both stages (the source multiplies their padding by n_j too, so there they may go where α·q < w).
CriticalAdaKV is criticalkv with allocator=ada mode=safeguard: heads compete by s_j, then both stages run on each
head's own quota; the safe rows of a head stay in both.
When to cut is this method's `decoding` and `decode_interval`; the base method's own are replaced by them.
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
from kvbench.kernels.projected_norms import projected_norms
from kvbench.validation import SettingError, is_number

NORM = "projected_norm"


@dataclass(frozen=True)
class CriticalKV(Method):
    """`base`: the method whose scores count; `alpha` α in [0, 1]; `epsilon` ε."""

    base: Method
    alpha: float
    epsilon: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.base.overrides("score"):
            raise SettingError(f"method.base={self.base.name}: {self.name} needs a method that scores rows")
        if not is_number(self.alpha) or not 0 <= self.alpha <= 1:
            raise SettingError(f"method.alpha={self.alpha}: a share in [0, 1]")
        if not is_number(self.epsilon) or not self.epsilon >= 0:
            raise SettingError(f"method.epsilon={self.epsilon}: a number from 0 on")
        if self.base.weighs_values:
            raise SettingError(f"method.base={self.base.name}: values would count twice; use it without its value norm")
        when = {"decoding": self.decoding, "decode_interval": self.decode_interval, "decode_size": self.decode_size}
        object.__setattr__(self, "base", replace(self.base, **when))

    @property
    def wants_lse(self) -> bool:
        return self.base.wants_lse

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
        """The base method's columns, and n_j of the rows that are new."""
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

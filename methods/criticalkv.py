"""criticalkv: fill a part of the quota by another method's scores and the rest by scores times projected values.

Source: the CriticalKV paper, Algorithm 1; NVIDIA/kvpress, criticalkv_press.py (by its authors). Symbols: s_j the base
method's score, W_o^h the output projection of query head h, q a KV head's quota.

    stage 1: the ⌊α·q⌋ rows with the largest s_j
    stage 2: up to q rows by the largest (s_j + ε)·n_j,  n_j = mean over the group of ‖W_o^h v_j‖₁

The scores s_j should not be negative.

Rows that the base method protects stay in both stages. The source multiplies their padding by n_j too, so it can drop
them if α·q < w. The source's first stage takes at least one row if α > 0. CriticalAdaKV is criticalkv with
allocator=ada mode=safeguard: heads compete by s_j, and then both stages run on each head's own quota. The safe rows of
a head stay in both stages.

This method's `decoding`, `decode_interval` and `decode_size` replace those of the base method.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from kvbench.interfaces.captured import Captured
from kvbench.interfaces.composite import Composite, ask_base
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting
from kvbench.kernels.projected_norms import projected_norms
from kvbench.validation import SettingError

NORM = "projected_norm"


@dataclass(frozen=True)
class CriticalKV(Composite):
    """Combine another method's scores with the norms of the projected values."""

    alpha: float = setting(minimum=0, maximum=1)
    """Share of the quota that the base method's scores fill alone, α."""
    epsilon: float = setting(minimum=0)
    """Number that is added to the scores before they are multiplied, ε."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base.weighs_values:
            raise SettingError(f"method.base={self.base.name}: values would count twice; use it without its value norm")

    @property
    def captured(self) -> Captured | None:
        hooks = self.base.captured
        if hooks is None:
            return None
        return Captured(capture_state=ask_base(hooks.capture_state), release_state=ask_base(hooks.release_state))

    def update(self, observation: Observation, rows: Rows, state: State) -> Mapping[str, Tensor]:
        """Return the base method's columns, and n_j of every row."""
        if observation.decoding and not self.decoding:
            return rows.columns
        new, values = rows.list_newest(observation.queries.shape[2]), rows.values
        if new.shape[2] < len(rows):
            values = values.gather(2, new[..., None].expand(-1, -1, -1, values.shape[3]))
        norms = projected_norms(values, observation.output_weight, observation.queries.shape[1])
        if NORM in rows.columns:
            norms = rows.columns[NORM].scatter(2, new, norms)
        return {**self.base.update(observation, rows, state), NORM: norms}

    def cut(self, rows: Rows, scores: Tensor, quotas: Tensor, protected: Tensor, each: int | None = None) -> Rows:
        share = Fraction(str(self.alpha))  # ⌊α·q⌋ exactly
        sure = quotas * share.numerator // share.denominator
        first = self.select(scores, sure)
        second = (scores + self.epsilon) * rows.columns[NORM]
        second = second.masked_fill(first | protected, torch.inf).masked_fill(~rows.present, -torch.inf)
        return rows.without(~self.select(second, quotas))

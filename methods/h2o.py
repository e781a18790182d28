"""h2o: keep the rows that got most attention from all queries so far (heavy hitters), and the newest rows.

Source: FMInference/H2O, h2o_hf/utils_real_drop/modify_llama.py (the variant that really evicts). Symbols: p_{t,j} the
attention of query t to row j.

    s_j = Σ_t p_{t,j}

The sum runs over all queries that were read while the row was held, in prefill and decoding. It is dropped with the
row.

norm=none ranks rows by s_j, which favours early rows. norm=count ranks by s_j / (number of queries that could see row
j), as in NVIDIA/kvpress, observed_attention_press.py. The source has no groups of query heads; `gqa` is kvbench's
extension.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.interfaces.method import Captured, Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting
from kvbench.kernels.accumulated_attention import accumulated_attention
from kvbench.validation import SettingError, exact_share

RECENT = "a share in [0, 1) such as 0.5, or a whole number of rows of at least 0"


@dataclass(frozen=True)
class H2O(Method):
    """Score rows by the attention that they have received so far."""

    recent: float | int = setting(minimum=0, allowed=RECENT)
    """The newest rows that stay: a share of the quota (float) or a number of rows (int)."""
    norm: str = setting(choices=("none", "count"))
    """What the votes are divided by: nothing, or the number of queries that could see the row."""
    gqa: str = setting(choices=("mean", "max"))
    """How the votes of the group's query heads are combined."""

    wants = ("lse",)
    captured = Captured(order_free=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.recent, float) and self.recent >= 1:
            raise SettingError(f"method.recent={self.recent}: {RECENT}")

    def update(self, observation: Observation, rows: Rows, state: State) -> Mapping[str, Tensor]:
        """Return the votes so far: one column for the group with gqa=mean, one per query head of the group with max."""
        if observation.decoding and not self.decoding:
            return rows.columns
        assert observation.lse is not None  # the method wants it
        group = "mean" if self.gqa == "mean" else None
        votes = accumulated_attention(
            observation.queries,
            rows.keys,
            rows.mass,
            observation.lse,
            observation.scaling,
            group=group,
            extras=observation.extras,
        )
        parts = votes.unbind(2) if group is None else [votes]
        before = [rows.columns.get(f"votes{g}") for g in range(len(parts))]
        return {
            f"votes{g}": new if old is None else old + new
            for g, (old, new) in enumerate(zip(before, parts, strict=True))
        }

    def protect(self, observation: Observation, rows: Rows, quota: int | Tensor) -> Tensor:
        recent = self.recent if isinstance(self.recent, int) else exact_share(self.recent, quota)
        return rows.places >= observation.tokens - recent

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        columns = [column for name, column in rows.columns.items() if name.startswith("votes")]
        total = torch.stack(columns).amax(0)
        return total if self.norm == "none" else total / (observation.tokens - rows.places)

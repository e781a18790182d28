"""h2o: rows that got most attention from all queries so far stay, and the newest (heavy hitters).

Source: FMInference/H2O, h2o_hf/utils_real_drop/modify_llama.py (the variant that really evicts). The votes of row j
are s_j = Σ p_{t,j} over all queries t that were read while it was held, in prefill and decoding; they leave with it.
norm none ranks by s_j, which favours early rows; count by s_j / (queries that could see row j), which is
NVIDIA/kvpress, observed_attention_press.py. Groups of query heads are an extension, the source has none: mean or max
of the group's votes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.kernels.accumulated_attention import accumulated_attention
from kvbench.validation import SettingError, exact_share, is_number, require_choice


@dataclass(frozen=True)
class H2O(Method):
    """`recent`: the newest rows that stay, a share of the quota (float) or rows (int); `norm` none|count; `gqa`
    mean|max.
    """

    recent: float | int
    norm: str
    gqa: str

    wants_lse = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("method.norm", self.norm, ("none", "count"))
        require_choice("method.gqa", self.gqa, ("mean", "max"))
        if not is_number(self.recent) or self.recent < 0 or (isinstance(self.recent, float) and self.recent >= 1):
            raise SettingError(f"method.recent={self.recent}: a share in [0, 1) such as 0.5, or whole rows from 0 on")

    def update(self, observation: Observation, rows: Rows, state: State) -> Mapping[str, Tensor]:
        """Votes so far, one column for the group, or one for each of its query heads where their maximum is asked."""
        if observation.decoding and not self.decoding:
            return rows.columns
        group = "mean" if self.gqa == "mean" else None
        found = accumulated_attention(
            observation.queries, rows.keys, rows.mass, observation.lse, observation.scaling, group=group
        )
        parts = found.unbind(2) if group is None else [found]
        before = [rows.columns.get(f"votes{g}") for g in range(len(parts))]
        return {
            f"votes{g}": new if old is None else old + new
            for g, (old, new) in enumerate(zip(before, parts, strict=True))
        }

    def protect(self, observation: Observation, rows: Rows, quota: int) -> Tensor:
        recent = self.recent if isinstance(self.recent, int) else exact_share(self.recent, quota)
        return rows.places >= observation.tokens - recent

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        columns = [column for name, column in rows.columns.items() if name.startswith("votes")]
        total = torch.stack(columns).amax(0)
        return total if self.norm == "none" else total / (observation.tokens - rows.places)

"""keydiff: rows whose keys differ most from the cache's mean key stay.

Source: the KeyDiff paper, Eq. 8 and Section 5 (anchor and metric ablations, its Tables 15 and 16);
NVIDIA/kvpress, keydiff_press.py. Symbols: μ anchor over the layer's rows, k_j post-RoPE key, k̂ = k/‖k‖.
s_j = -cos(μ, k_j), with μ the mean of k̂ (mean_normalised), of k (mean_raw) or the component-wise median of k;
or, pairwise, the mean similarity to every row in place of the similarity to μ.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.kernels.key_similarity import anchor, similarity
from kvbench.validation import SettingError, exact_share, is_number, require_choice

CHUNK = 256  # rows compared with all others at once


@dataclass(frozen=True)
class KeyDiff(Method):
    """`recent`: share of the quota that the newest rows have for sure (20 % in the paper's Math-500 runs)."""

    anchor: str
    metric: str
    recent: float

    position_free = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("method.anchor", self.anchor, ("mean_normalised", "mean_raw", "median", "pairwise"))
        require_choice("method.metric", self.metric, ("cosine", "dot", "euclidean"))
        if not is_number(self.recent) or not 0 <= self.recent < 1:
            raise SettingError(f"method.recent={self.recent}: a share in [0, 1)")

    def protect(self, observation: Observation, rows: Rows, quota: int) -> Tensor | None:
        return None if self.recent == 0 else rows.places >= observation.tokens - exact_share(self.recent, quota)

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        if self.anchor == "pairwise":
            keys = rows.keys.to(rows.mass.dtype)
            parts = [self.pairs(some, keys, rows.mass) for some in keys.split(CHUNK, dim=2)]
            return -torch.cat(parts, dim=2)
        return -similarity(rows.keys, self.mean(rows), self.metric)

    def mean(self, rows: Rows) -> Tensor:
        """(B, H, d) anchor over the rows that are present."""
        if self.anchor == "median":
            keys = rows.keys.to(rows.mass.dtype)
            return keys.masked_fill(~rows.present[..., None], torch.nan).nanmedian(dim=2).values
        return anchor(rows.keys, rows.mass, normalised=self.anchor == "mean_normalised")

    def pairs(self, some: Tensor, keys: Tensor, mass: Tensor) -> Tensor:
        """(B, H, m) mean similarity of `some` keys (B, H, m, d) to all that are present, themselves included."""
        if self.metric == "cosine":
            similar = normalize(some, dim=-1) @ normalize(keys, dim=-1).mT
        elif self.metric == "dot":
            similar = some @ keys.mT
        else:
            similar = -torch.cdist(some, keys)
        return (similar * mass[:, :, None]).sum(-1) / mass.sum(-1, keepdim=True)

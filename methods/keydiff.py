"""keydiff: keep the rows whose keys differ most from the cache's mean key.

Source: the KeyDiff paper, Eq. 8 and Section 5 (ablations of anchor and metric, its Tables 15 and 16); NVIDIA/kvpress,
keydiff_press.py. Symbols: μ the anchor over the layer's rows, k_j the post-RoPE key, k̂ = k/‖k‖.

    s_j = -cos(μ, k_j)

The anchor μ is the mean of k̂ (mean_normalised), the mean of k (mean_raw), or the component-wise median of k (median).
With anchor=pairwise the mean similarity to every row replaces the similarity to μ.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvbench.interfaces.method import Captured, Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting
from kvbench.kernels.key_similarity import anchor, similarity
from kvbench.validation import exact_share

CHUNK = 256  # number of rows that are compared with all others at once


@dataclass(frozen=True)
class KeyDiff(Method):
    """Score rows by how much their keys differ from an anchor."""

    anchor: str = setting(choices=("mean_normalised", "mean_raw", "median", "pairwise"))
    """What a key is compared with."""
    metric: str = setting(choices=("cosine", "dot", "euclidean"))
    """How it is compared."""
    recent: float = setting(minimum=0, below=1)
    """Share of the quota that always goes to the newest rows (0.2 in the paper's Math-500 runs)."""

    captured = Captured(order_free=True)

    def protect(self, observation: Observation, rows: Rows, quota: int | Tensor) -> Tensor | None:
        return None if self.recent == 0 else rows.places >= observation.tokens - exact_share(self.recent, quota)

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        if self.anchor == "pairwise":
            keys = rows.keys.to(rows.mass.dtype)
            parts = [self.pairs(some, keys, rows.mass) for some in keys.split(CHUNK, dim=2)]
            return -torch.cat(parts, dim=2)
        return -similarity(rows.keys, self.mean(rows), self.metric)

    def mean(self, rows: Rows) -> Tensor:
        """Return the anchor over the rows that are present, (B, H, d)."""
        if self.anchor == "median":
            keys = rows.keys.to(rows.mass.dtype)
            return keys.masked_fill(~rows.present[..., None], torch.nan).nanmedian(dim=2).values
        return anchor(rows.keys, rows.mass, normalised=self.anchor == "mean_normalised")

    def pairs(self, some: Tensor, keys: Tensor, mass: Tensor) -> Tensor:
        """Return the mean similarity of some keys to all keys that are present, themselves included.

        Args:
            some: (B, H, m, d)
            keys: All keys of the layer, (B, H, n, d).
            mass: (B, H, n)

        Returns:
            (B, H, m)
        """
        if self.metric == "cosine":
            similar = normalize(some, dim=-1) @ normalize(keys, dim=-1).mT
        elif self.metric == "dot":
            similar = some @ keys.mT
        else:
            similar = -torch.cdist(some, keys)
        return (similar * mass[:, :, None]).sum(-1) / mass.sum(-1, keepdim=True)

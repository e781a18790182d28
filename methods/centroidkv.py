"""centroidkv: merge similar rows into centroids, which attention weighs by the number of tokens they stand for.

Source: the CentroidKV paper (Chelsea, arXiv 2506.11418), Sections 4 and 5. Its code is not public. Sinks and recent
rows are not merged. The rows between them are cut into chunks. In each chunk every even row i proposes to its most
similar odd row j. The most similar pairs of all chunks are merged, in rounds, until the quota is met exactly. Symbols:
m_i the mass of a row, the number of tokens it stands for; the sums run over an odd row and the rows that join it.

    partner(i) = argmax_j cos(k_i, k_j)
    k = Σ m_i k_i / Σ m_i,  v = Σ m_i v_i / Σ m_i,  m = Σ m_i

Attention adds log m to the logits of a centroid.

The paper leaves open, and this file chooses: pairs are found per KV head on the rows as stored (post-RoPE). Sinks and
recent rows are a head's first and last rows and count in the budget. If the budget has no room for both, recent rows
give way first. A centroid keeps the position of its odd row. Every round merges at most the share r of its pairs, and
the last round merges exactly as many as needed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.interfaces.method import Captured, Method
from kvbench.interfaces.observation import Observation
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting
from kvbench.kernels.row_selection import top_k_mask
from kvbench.kernels.soft_matching import edge_count, join, match
from kvbench.validation import exact_share

SCRATCH = 600_000_000  # bytes of keys and values that a round may write, roughly


@dataclass(frozen=True)
class CentroidKV(Method):
    """Merge similar rows instead of dropping rows."""

    sinks: int = setting(minimum=0)
    """Number of first rows that are never merged."""
    recents: int = setting(minimum=0)
    """Number of last rows that are never merged."""
    chunk: int | None = setting(minimum=2)
    """Number of rows of a chunk; `None` makes one chunk of all rows."""
    r: float = setting(above=0, maximum=1)
    """Share of a round's pairs that are merged at most."""

    merges = True
    captured = Captured()

    def protect_sinks(self, observation: Observation, rows: Rows, quota: int | Tensor) -> Tensor | None:
        if quota == 1:  # the only row must be free to stand for all others
            return None
        return (torch.arange(len(rows), device=rows.mass.device) < self.sinks).expand_as(rows.mass)

    def protect(self, observation: Observation, rows: Rows, quota: int | Tensor) -> Tensor | None:
        if quota == 1:
            return None
        return (torch.arange(len(rows), device=rows.mass.device) >= len(rows) - self.recents).expand_as(rows.mass)

    def cut(self, rows: Rows, scores: Tensor, quotas: Tensor, protected: Tensor, each: int | None = None) -> Rows:
        """Merge the rows between sinks and recent rows, for as many heads at once as the scratch memory allows.

        All heads have the same number of rows, the same quota and the same protected slots, so the host never waits for
        the device.
        """
        quota, count = int(quotas[0, 0]) if each is None else each, len(rows)
        first = min(self.sinks, quota - 1)  # as in `fit_protected`: recent rows give way to sinks
        last = 0 if quota == 1 else min(self.recents, quota - 1 - first)
        columns = [x.flatten(0, 1)[None] for x in (rows.keys, rows.values, rows.places, rows.mass)]
        left = [x.new_empty(1, x.shape[1], quota, *x.shape[3:]) for x in columns]
        for new, old in zip(left, columns, strict=True):
            new[:, :, :first], new[:, :, quota - last :] = old[:, :, :first], old[:, :, count - last :]
        together = max(1, SCRATCH // (2 * (count - last - first) * rows.keys[0, 0, 0].nbytes))
        for start in range(0, columns[0].shape[1], together):
            some = slice(start, start + together)
            free = [old[:, some, first : count - last] for old in columns]
            for new, merged in zip(left, self.centroids(free, quota - last - first), strict=True):
                new[:, some, first : quota - last] = merged
        keys, values, places, mass = (x.view(*rows.mass.shape[:2], *x.shape[2:]) for x in left)
        return Rows(keys, values, places, mass)

    def centroids(self, columns: list[Tensor], quota: int) -> list[Tensor]:
        """Merge rows round by round until `quota` are left; return their keys, values, places and masses."""
        keys, values, places, mass = columns
        while (count := places.shape[2]) > quota:
            similar, partner = match(keys, self.chunk)
            fewer = min(count - quota, max(1, exact_share(self.r, edge_count(count, self.chunk))))
            joined = join(mass, top_k_mask(similar, fewer), partner, self.chunk, fewer)
            places = places.flatten()[joined.index].view(*places.shape[:2], -1)
            keys, mass = joined.centroids(keys)
            values, _ = joined.centroids(values)
        return [keys, values, places, mass]

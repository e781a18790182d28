"""centroidkv: similar rows are merged into centroids that attention weighs by how many tokens they stand for.

Source: the CentroidKV paper (Chelsea, arXiv 2506.11418), Sections 4 and 5; no code is public. Sinks and recents stay
out. The middle is cut into chunks; in each, even rows propose to their most similar odd row (cosine of keys); the most
similar edges of all chunks are kept and merged, in rounds until the quota is met exactly. Not stated there and chosen
here: matching per KV head on the rows as stored (post-RoPE); sinks and recents are a head's first and last rows and
count in the budget; where it has no room for both, recents give way before sinks; a centroid keeps its odd row's place;
every round keeps at most the share r of its edges, the last one exactly as many as needed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import Observation
from kvbench.interfaces.rows import Rows
from kvbench.kernels.row_selection import top_k_mask
from kvbench.kernels.soft_matching import edge_count, join, match
from kvbench.validation import SettingError, exact_share, is_number, require_int

SCRATCH = 64_000_000  # bytes of keys and values, about, that a round may leave behind


@dataclass(frozen=True)
class CentroidKV(Method):
    """`sinks`, `recents`: first and last rows left alone; `chunk`: rows of a chunk, None for one; `r`: share of a
    round's edges that are kept, in (0, 1].
    """

    sinks: int
    recents: int
    chunk: int | None
    r: float

    scores = False
    merges = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("method.sinks", self.sinks, 0)
        require_int("method.recents", self.recents, 0)
        if self.chunk is not None:
            require_int("method.chunk", self.chunk, 2)
        if not is_number(self.r) or not 0 < self.r <= 1:
            raise SettingError(f"method.r={self.r}: a share in (0, 1]")

    def protect_sinks(self, observation: Observation, rows: Rows, quota: int) -> Tensor | None:
        if quota == 1:  # the one row must be free to stand for all
            return None
        return (torch.arange(len(rows), device=rows.mass.device) < self.sinks).expand_as(rows.mass)

    def protect(self, observation: Observation, rows: Rows, quota: int) -> Tensor | None:
        if quota == 1:
            return None
        return (torch.arange(len(rows), device=rows.mass.device) >= len(rows) - self.recents).expand_as(rows.mass)

    def cut(self, rows: Rows, scores: Tensor, quotas: Tensor, protected: Tensor, each: int | None = None) -> Rows:
        """Rounds of matching over the middle, of as many heads at once as there is scratch for. All heads have the same
        number of rows and quotas, and protect the same slots, so that nothing is asked of the device.
        """
        quota, count = int(quotas[0, 0]) if each is None else each, len(rows)
        first = min(self.sinks, quota - 1)  # as `shrink` has it: recents give way to sinks
        last = 0 if quota == 1 else min(self.recents, quota - 1 - first)
        columns = [x.flatten(0, 1)[None] for x in (rows.keys, rows.values, rows.places, rows.mass)]
        left = [x.new_empty(1, x.shape[1], quota, *x.shape[3:]) for x in columns]
        for new, old in zip(left, columns, strict=True):
            new[:, :, :first], new[:, :, quota - last :] = old[:, :, :first], old[:, :, count - last :]
        together = max(1, SCRATCH // (2 * (count - last - first) * rows.keys[0, 0, 0].nbytes))
        for start in range(0, columns[0].shape[1], together):
            some = slice(start, start + together)
            free = [old[:, some, first : count - last] for old in columns]
            for new, own in zip(left, self.centroids(free, quota - last - first), strict=True):
                new[:, some, first : quota - last] = own
        return Rows(*(x.view(*rows.mass.shape[:2], *x.shape[2:]) for x in left))

    def centroids(self, columns: list[Tensor], quota: int) -> list[Tensor]:
        """Keys, values, places and masses of `quota` rows that all are merged into, round by round."""
        keys, values, places, mass = columns
        while (count := places.shape[2]) > quota:
            similar, partner = match(keys, self.chunk)
            fewer = min(count - quota, max(1, exact_share(self.r, edge_count(count, self.chunk))))
            joined = join(mass, top_k_mask(similar, fewer), partner, self.chunk, fewer)
            places = places.flatten()[joined.index].view(*places.shape[:2], -1)
            keys, mass = joined.centroids(keys)
            values, _ = joined.centroids(values)
        return [keys, values, places, mass]

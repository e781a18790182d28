"""centroidkv: similar rows are merged into centroids that attention weighs by how many tokens they stand for.

Source: the CentroidKV paper (Chelsea, arXiv 2506.11418), Sections 4 and 5; no code is public. Sinks and recents stay
out. The middle is cut into chunks; in each, even rows propose to their most similar odd row (cosine of keys); the most
similar edges of all chunks are kept and merged, in rounds until the quota is met exactly. Not stated there and chosen
here: matching per KV head on the rows as stored (post-RoPE); sinks and recents count in the budget; a centroid keeps
its odd row's place; every round keeps at most the share r of its edges, the last one exactly as many as needed.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbench.kernels.match import match, merge
from kvbench.kernels.match.reference import even_rows
from kvbench.method import Method, Seen
from kvbench.rows import Rows
from kvbench.settings import SettingError, number, part, whole


@dataclass(frozen=True)
class CentroidKV(Method):
    """`sinks`, `recents`: first and last tokens left alone; `chunk`: rows of a chunk, None for one; `r`: share of a
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
        whole("method.sinks", self.sinks, 0)
        whole("method.recents", self.recents, 0)
        if self.chunk is not None:
            whole("method.chunk", self.chunk, 2)
        if not number(self.r) or not 0 < self.r <= 1:
            raise SettingError(f"method.r={self.r}: a share in (0, 1]")

    def protect(self, seen: Seen, rows: Rows, quota: int) -> Tensor | None:
        if quota == 1:  # the one row must be free to stand for all
            return None
        return (rows.places < self.sinks) | (rows.places >= seen.tokens - self.recents)

    def cut(self, rows: Rows, scores: Tensor, quotas: Tensor, protected: Tensor) -> Rows:
        """Rounds of matching over the middle. All heads have the same number of rows and quotas."""
        quota, safe = int(quotas[0, 0]), int(protected[0, 0].sum())
        order = protected.argsort(dim=-1, stable=True)
        middle, rest = gather(rows, order[..., : len(rows) - safe]), gather(rows, order[..., len(rows) - safe :])
        while len(middle) > quota - safe:
            middle = self.round(middle, len(middle) - (quota - safe))
        both = Rows(*(torch.cat(pair, 2) for pair in zip(parts(middle), parts(rest), strict=True)))
        return gather(both, both.places.argsort(dim=-1))

    def round(self, rows: Rows, surplus: int) -> Rows:
        """One round: at most `surplus` rows join another."""
        similar, partner = match(rows.keys.to(rows.mass.dtype), self.chunk)  # in bfloat16 most edges would tie
        edges = int((similar[0, 0] > -torch.inf).sum())
        count = min(surplus, max(1, part(self.r, edges)))
        best = similar.argsort(dim=-1, descending=True, stable=True)[..., :count]
        joining = even_rows(len(rows), self.chunk, rows.keys.device)[best]
        into = torch.arange(len(rows), device=rows.keys.device).expand_as(rows.mass)
        into = into.scatter(2, joining, partner.gather(2, best))
        keys, values, mass = merge(rows.keys, rows.values, rows.mass, into)
        stay = (mass == 0).long().argsort(dim=-1, stable=True)[..., : len(rows) - count]
        return gather(replace(rows, keys=keys, values=values, mass=mass), stay)


def parts(rows: Rows) -> tuple[Tensor, ...]:
    return rows.keys, rows.values, rows.places, rows.mass


def gather(rows: Rows, index: Tensor) -> Rows:
    """The rows at `index` (B, H, m)."""
    wide = index[..., None].expand(*index.shape, rows.keys.shape[-1])
    return Rows(
        rows.keys.gather(2, wide), rows.values.gather(2, wide), rows.places.gather(2, index), rows.mass.gather(2, index)
    )

"""centroidkv: similar rows are merged into centroids that attention weighs by how many tokens they stand for.

Source: the CentroidKV paper (Chelsea, arXiv 2506.11418), Sections 4 and 5; no code is public. Sinks and recents stay
out. The middle is cut into chunks; in each, even rows propose to their most similar odd row (cosine of keys); the most
similar edges of all chunks are kept and merged, in rounds until the quota is met exactly. Not stated there and chosen
here: matching per KV head on the rows as stored (post-RoPE); sinks and recents count in the budget; a centroid keeps
its odd row's place; every round keeps at most the share r of its edges, the last one exactly as many as needed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.kernels.compact import find, take, top
from kvbench.kernels.match import edge_count, even_rows, match, merge
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
        quota, safe = torch.stack([quotas[0, 0], protected[0, 0].sum()]).tolist()  # waits for the device once
        lines = rows.mass[..., 0].numel()
        middle = some(rows, find(~protected, lines * (len(rows) - safe)))
        while len(middle) > quota - safe:
            middle = self.round(middle, len(middle) - (quota - safe))
        if safe == 0:
            return middle
        rest = some(rows, find(protected, lines * safe))
        both = Rows(*(torch.cat(pair, 2) for pair in zip(parts(middle), parts(rest), strict=True)))
        heads = torch.arange(lines, device=quotas.device).view_as(quotas)[..., None]
        return some(both, (both.places.argsort(dim=-1) + heads * len(both)).flatten())

    def round(self, rows: Rows, surplus: int) -> Rows:
        """One round: at most `surplus` rows join another."""
        similar, partner = match(rows.keys, self.chunk)
        count = min(surplus, max(1, part(self.r, edge_count(len(rows), self.chunk))))
        even = even_rows(len(rows), self.chunk, similar.device).expand_as(partner)
        own = torch.arange(len(rows), device=similar.device).expand_as(rows.mass)
        into = own.scatter(2, even, torch.where(top(similar, count), partner, even))
        index = find(into == own, rows.mass[..., 0].numel() * (len(rows) - count))
        keys, values, mass = merge(rows.keys, rows.values, rows.mass, into, self.chunk, index)
        return headwise(rows, keys, values, rows.places.flatten()[index], mass)


def parts(rows: Rows) -> tuple[Tensor, ...]:
    return rows.keys, rows.values, rows.places, rows.mass


def some(rows: Rows, index: Tensor) -> Rows:
    """The rows at `index` (R,), as `find` counts them; of every head equally many."""
    return headwise(
        rows, *take(index, rows.keys, rows.values), rows.places.flatten()[index], rows.mass.flatten()[index]
    )


def headwise(like: Rows, *flat: Tensor) -> Rows:
    """Flat keys, values, places and masses (R, …) by sample and head."""
    heads = like.mass.shape[:2]
    return Rows(*(column.view(*heads, len(column) // heads.numel(), *column.shape[1:]) for column in flat))

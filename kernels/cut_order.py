"""The order in which the rows of a head claim its quota.

Which rows of a head stay follows `ORDER` wherever a layer is cut: on the host (`kvbench.cache.eviction`), in CUDA
graphs (`kvbench.engine`), and in both implementations of `kvbench.kernels.row_replacement`. How many rows a head may
keep, which allocators and some methods decide, does not follow it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvbench.kernels.row_selection import kept_indices, top_k_indices, top_k_mask

SINKS, RECENTS = "sinks", "recents"
FIRST, NEWEST = "first", "newest"
LINE = 8192  # marks that are counted in one piece


@dataclass(frozen=True)
class CutOrder:
    """Who claims a head's quota before whom.

    Attributes:
        protected: The kinds of rows that stay whatever their score, in the order in which they claim. If a kind does
            not fit, its first or its newest rows stay. A row of several kinds belongs to the first of them.
        scored: Rows of the quota that protected rows must leave to the scores, if the quota is larger than that.
        largest: Whether rows with larger scores stay before the others.
        earliest: Whether of equal scores the earlier row stays.
    """

    protected: tuple[tuple[str, str], ...] = ((SINKS, FIRST), (RECENTS, NEWEST))
    scored: int = 1
    largest: bool = True
    earliest: bool = True


ORDER = CutOrder()


@dataclass(frozen=True)
class Protection:
    """The protected rows of a layer that fit its quota, and how many do not."""

    kept: Tensor
    """The rows that fit, (B, H, n) bool."""
    given_up: dict[str, Tensor]
    """For each kind that there is, the number of rows of each head that do not fit, (B, H, 1)."""


def fit_protected(marks: Mapping[str, Tensor | None], present: Tensor, quota: int | Tensor) -> Protection:
    """Return the protected rows that fit the quota.

    Args:
        marks: For each kind, its rows in the order of the text, (B, H, n) bool, or None.
        present: The rows that exist, (B, H, n) bool.
        quota: Rows that each head may keep, a number or (B, H, 1).
    """
    kept, claimed, given_up = None, None, dict[str, Tensor]()
    room: int | Tensor
    if isinstance(quota, Tensor):
        room = torch.where(quota > ORDER.scored, quota - ORDER.scored, quota)
    else:
        room = quota - ORDER.scored if quota > ORDER.scored else quota
    for kind, stays in ORDER.protected:
        if (claims := marks.get(kind)) is None:
            continue
        claims = claims & present if claimed is None else claims & present & ~claimed
        ranks = count_marks(claims)
        surplus = ranks[..., -1:] - room
        fit = claims & (ranks <= room if stays == FIRST else ranks > surplus)
        given_up[kind] = surplus.clamp(min=0)
        room = room - fit.sum(-1, keepdim=True, dtype=torch.int32)
        kept, claimed = (fit, claims) if kept is None or claimed is None else (kept | fit, claimed | claims)
    return Protection(torch.zeros_like(present) if kept is None else kept, given_up)


def count_marks(marks: Tensor) -> Tensor:
    """Return how many marks there are up to each place, (…, n) int32, for marks (…, n) bool.

    A GPU sums few long lines slowly. Long lines are therefore summed in parts of LINE marks.
    """
    if marks.shape[-1] <= LINE:
        return marks.cumsum(-1, dtype=torch.int32)
    within = pad(marks, (0, -marks.shape[-1] % LINE)).reshape(*marks.shape[:-1], -1, LINE).cumsum(-1, dtype=torch.int32)
    before = within[..., -1].cumsum(-1, dtype=torch.int32) - within[..., -1]
    return (within + before[..., None]).reshape(*marks.shape[:-1], -1)[..., : marks.shape[-1]]


def rank_scores(scores: Tensor) -> Tensor:
    """Return finite numbers of which the largest stay. Infinite ones mark protected and absent rows."""
    scores = scores.clamp(min=torch.finfo(scores.dtype).min, max=torch.finfo(scores.dtype).max)
    return scores if ORDER.largest else -scores


def keep_best(ranked: Tensor, quotas: Tensor | int) -> Tensor:
    """Return which rows stay, (B, H, n) bool, by what `rank_scores` returns. See `top_k_mask`."""
    if ORDER.earliest:
        return top_k_mask(ranked, quotas)
    return top_k_mask(ranked.flip(-1), quotas).flip(-1)


def list_best(ranked: Tensor, k: int) -> Tensor:
    """Return the indices of the k rows of each head that stay, as `kept_indices` counts them."""
    if ORDER.earliest:
        return top_k_indices(ranked, k, flat=True)
    return kept_indices(keep_best(ranked, k), k * ranked[..., 0].numel())

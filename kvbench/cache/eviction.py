"""Decide which rows of a layer stay, as a pure function of what the layer saw and holds.

An eviction has five steps: score the rows, protect some of them, share the quota among the heads, select, merge.
Nothing here changes a layer. `kvbench.cache.layer` decides when a layer must be cut, and stores the rows that stay.

Symbols: B samples, H KV heads, n rows, padded as in `kvbench.interfaces.rows`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from kvbench.cache.accounting import ZERO
from kvbench.cache.hook_table import expecting
from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.method import Method, fit_protected
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.kernels import cut_order
from kvbench.kernels.cut_order import list_best, rank_scores
from kvbench.kernels.row_shares import share_rows

Size = TypeVar("Size")

SCORE = "score"  # the column with a block's scores, while the layer may be cut again

ScoreSharing = Callable[[Observation, Rows, State, Callable[[Observation], Tensor]], Tensor]
"""Returns the scores of rows, (B, H, n). It gets what a method scores by, and a function that computes the scores from
an observation like the one given. It may call that function, or return what an equal call has returned.
"""


@dataclass(frozen=True)
class LayerPolicy:
    """The method and the allocator, guarded, that decide about the rows of one layer."""

    method: Method
    allocator: Allocator
    state: State
    """The method's state."""
    share_scores: ScoreSharing | None = None
    """How the layer shares scores with other contexts; None if it does not."""

    @property
    def keeps_best(self) -> bool:
        """Whether heads of equal quotas keep their best rows and drop the others, because no hook decides otherwise."""
        decided = self.method.overrides("select", "merge", "cut") or self.allocator.overrides("heads", "safe")
        return not decided and not self.method.merges


@dataclass(frozen=True)
class HeadShares:
    """How the heads shared a quota at an earlier cut. While decoding they keep these proportions."""

    quotas: tuple[int, ...]
    """Rows per head, one number per sample."""
    counts: Tensor
    """Rows of each head, (B, H)."""


@dataclass(frozen=True)
class Quota:
    """How many rows the heads of a layer may keep."""

    samples: tuple[int, ...]
    """Rows per head, one number per sample. Inside a CUDA graph they may be tensors on the device."""
    heads: Tensor | None = None
    """Rows of each head, (H,) or (B, H), if the method shares them out itself."""
    shares: HeadShares | None = None
    """The proportions to keep, if the heads shared a quota before."""
    each: int | None = None
    """Rows that every head keeps, if all hold the same number of rows, and the host knows both numbers."""


@dataclass(frozen=True)
class Eviction:
    """The rows of a layer that stay, and what the record says about the cut."""

    rows: Rows
    index: Tensor | None
    """Which of `rows` stay, as `kept_indices` counts them; None for those with mass > 0."""
    counts: Tensor
    """Rows that each head keeps, (B, H) int64."""
    evicted: Tensor
    """Tokens whose rows are gone, (B, H) int64."""
    protected: Tensor
    """Rows that each head protected, (B, H), or 0 if the method protects none."""
    given_up: dict[str, Tensor]
    """For "sinks" and "recents", if the method has them, the rows that each head could not protect within its quota,
    (B, H), or (1, H) with the most of all samples.
    """


def evict(observation: Observation, rows: Rows, policy: LayerPolicy, quota: Quota) -> Eviction:
    """Choose the rows of a layer that stay within the quota. Pure: the same arguments give the same eviction.

    Args:
        observation: What the layer computed for the block. Its tensors are empty if later layers cause this cut.
        rows: All rows of the layer. If they have the column `SCORE`, it holds the scores. Otherwise the method scores.
        policy: The layer's method and allocator, and the method's state.
        quota: Rows that each head may keep.
    """
    scores = rows.columns[SCORE] if SCORE in rows.columns else score_rows(observation, rows, policy)
    protected, given_up = protect_rows(observation, rows, policy, quota)
    scores = scores.masked_fill(protected, torch.inf) if given_up else scores
    count = protected.sum(-1, dtype=torch.int32) if given_up else ZERO
    if quota.each is not None and policy.keeps_best:
        counts = torch.full(rows.mass.shape[:2], quota.each, device=scores.device)
        evicted = torch.full_like(counts, len(rows) - quota.each)
        return Eviction(rows, list_best(scores, quota.each), counts, evicted, count, given_up)
    scores = scores.masked_fill(~rows.present, -torch.inf)
    counts = share_among_heads(scores, protected, rows, policy, quota)
    kept = find_safe_rows(scores, protected, counts, policy, quota)
    after = cut_rows(observation, rows, scores, counts, kept, quota.each, policy)
    before, left = (version.present if policy.method.weighs_rows else version.mass for version in (rows, after))
    evicted = (before.sum(-1) - left.sum(-1)).round().long()
    return Eviction(after, None, counts, evicted, count, given_up)


def cut_rows(
    observation: Observation,
    rows: Rows,
    scores: Tensor,
    quotas: Tensor,
    protected: Tensor,
    each: int | None,
    policy: LayerPolicy,
) -> Rows:
    """Return the rows that stay: the result of the method's `cut`, or of its `select` and `merge`."""
    method = policy.method
    if method.overrides("cut") or not method.overrides("select", "merge"):
        return method.cut(rows, scores, quotas, protected, each)
    kept = method.select(scores, quotas)
    return expecting(method, quotas=quotas).merge(observation, rows, kept, policy.state)


def score_rows(observation: Observation, rows: Rows, policy: LayerPolicy) -> Tensor:
    """Return finite numbers of the rows, (B, H, n), of which the largest stay. Other contexts may share them, so they
    must not be written to.
    """
    method, state = policy.method, policy.state

    def compute(shown: Observation) -> Tensor:
        scores = method.score(shown, rows, state).to(rows.mass.dtype) if method.scores else rows.mass
        return rank_scores(scores)

    if policy.share_scores is None:
        return compute(observation)
    return policy.share_scores(observation, rows, state, compute)


def protect_rows(
    observation: Observation, rows: Rows, policy: LayerPolicy, quota: Quota
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the protected rows that fit the quota, (B, H, n) bool, and how many of each kind do not fit.

    These are counts of each head. There are none if the method protects no rows at all.
    """
    given_up: dict[str, Tensor] = {}
    decides = policy.method.budget_setting is not None

    def protect(samples: slice, size: int) -> Tensor:
        sinks = policy.method.protect_sinks(observation, rows, size)
        recents = policy.method.protect(observation, rows, size)
        if decides:
            size += cut_order.ORDER.scored  # without a budget no row must be left to the scores
        protection = fit_protected(sinks, recents, rows, size)
        for kind, counts in protection.given_up.items():
            excess = counts[samples][..., 0]
            given_up[kind] = excess.maximum(given_up[kind]) if kind in given_up else excess
        return protection.kept[samples]

    return for_each_size(quota.samples, protect), given_up


def share_among_heads(scores: Tensor, protected: Tensor, rows: Rows, policy: LayerPolicy, quota: Quota) -> Tensor:
    """Return how many rows each head keeps, (B, H).

    The method decides if it shares rows out itself. Otherwise the heads keep their earlier proportions, or the
    allocator decides.
    """
    if policy.method.budget_setting is not None:
        counts = policy.method.count_rows(scores).maximum(protected.sum(-1)).minimum(rows.present.sum(-1))
        return for_each_size(quota.samples, lambda samples, size: counts[samples].clamp(1, size))
    if quota.heads is not None:
        return rows.present.sum(-1).minimum(quota.heads.to(rows.mass.device))
    if quota.shares is not None:
        return keep_proportions(rows, protected, quota)
    heads = policy.allocator.heads
    return for_each_size(quota.samples, lambda samples, size: heads(scores[samples], protected[samples], size))


def keep_proportions(rows: Rows, protected: Tensor, quota: Quota) -> Tensor:
    """Share the quota among the heads in the proportions of an earlier cut, (B, H)."""
    shares = quota.shares
    assert shares is not None  # an earlier cut has shared a quota
    sizes = [*zip(shares.quotas, quota.samples, strict=True)]
    least, held = protected.sum(-1).clamp(min=1), rows.present.sum(-1)

    def share(samples: slice, both: tuple[int, int]) -> Tensor:
        (before, size), counts = both, shares.counts[samples]
        total = counts.new_zeros(counts.shape[:1]) + size * counts.shape[1]
        return share_rows(counts.double() * size / before, least[samples], held[samples], total)

    return for_each_size(sizes, share)


def find_safe_rows(scores: Tensor, protected: Tensor, counts: Tensor, policy: LayerPolicy, quota: Quota) -> Tensor:
    """Return the rows that a head keeps whatever the other heads have, the protected ones included, (B, H, n) bool."""
    safe = policy.allocator.safe
    kept = protected | for_each_size(
        quota.samples, lambda samples, size: safe(scores[samples], protected[samples], size)
    )
    if quota.shares is not None:  # a head's share of the earlier quota may hold fewer rows than are safe now
        kept = protected | (kept & policy.method.select(scores, counts))
    return kept


def for_each_size(sizes: Sequence[Size], work: Callable[[slice, Size], Tensor]) -> Tensor:
    """Call `work(samples, size)` for all samples at once if their sizes are equal, otherwise one by one."""
    if len(set(sizes)) == 1:
        return work(slice(None), sizes[0])
    return torch.cat([work(slice(sample, sample + 1), size) for sample, size in enumerate(sizes)])


def without_tensors(observation: Observation) -> Observation:
    """Return an observation without the tensors that take memory."""
    empty = observation.queries.new_empty(*observation.queries.shape[:3], 0)
    return replace(
        observation,
        queries=empty,
        outputs=empty,
        lse=None,
        unrotated_keys=None,
        hidden=None,
        normed_hidden=None,
        gradient=None,
    )

"""Evict: decide which rows of a layer stay, as a function of what the layer saw and holds.

The five questions of a method in their order: score the rows, protect some of them, share the quota among the heads,
select, merge. Nothing here changes a layer; `kvbench.cache.layer` asks when a layer must be cut, and stores what stays.

Symbols: B samples, H KV heads, n rows, padded as in `kvbench.interfaces.rows`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbench.cache.guarded_hooks import GuardedAllocator, GuardedMethod
from kvbench.interfaces.apportion import apportion
from kvbench.interfaces.method import fit_protected
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows

SCORE = "score"  # the column that holds a block's scores while the layer may be cut again


@dataclass(frozen=True)
class LayerPolicy:
    """Who decides about the rows of one layer."""

    method: GuardedMethod
    allocator: GuardedAllocator
    state: State  # the method's


@dataclass(frozen=True)
class HeadShares:
    """How the heads shared a quota at an earlier cut: while decoding they keep these proportions."""

    quotas: tuple[int, ...]  # rows per head, one number per sample
    counts: Tensor  # (B, H) rows of each head


@dataclass(frozen=True)
class Quota:
    """How many rows the heads of a layer may keep."""

    samples: tuple[int, ...]  # rows per head, one number per sample
    heads: Tensor | None = None  # (H,) or (B, H) rows of each head, of a method that shares them out itself
    shares: HeadShares | None = None  # proportions to keep, where the heads shared a quota before
    each: int | None = None  # rows that every head keeps, where that is known without asking the device


@dataclass(frozen=True)
class Eviction:
    """What stays of a layer's rows, and what the record says of the cut."""

    rows: Rows
    counts: Tensor  # (B, H) rows that each head keeps
    evicted: Tensor  # (B, H) int64 tokens whose rows are gone
    protected: Tensor  # most rows that a head protected
    given_up: dict[str, Tensor]  # kind -> most rows that a head could not protect: its quota had no room for them


def evict(observation: Observation, rows: Rows, policy: LayerPolicy, quota: Quota) -> Eviction:
    """Choose the rows of a layer that stay within the quota. Pure: the same arguments give the same eviction.

    Args:
        observation: What the layer saw of the block. Its tensors are empty where later layers have the layer cut again.
        rows: All rows held. If they have the column `SCORE`, those are the scores; else the method is asked.
        policy: The layer's method and allocator, and the method's state.
        quota: Rows per head.
    """
    method = policy.method
    scores = rows.columns[SCORE] if SCORE in rows.columns else score_rows(observation, rows, policy)
    protected, given_up = protect_rows(observation, rows, policy, quota)
    scores = scores.masked_fill(protected, torch.inf).masked_fill(~rows.present, -torch.inf)
    counts = share_among_heads(scores, protected, rows, policy, quota)
    kept = find_safe_rows(scores, protected, counts, policy, quota)
    after = method.cut(rows, scores, counts, kept, quota.each)
    evicted = (rows.mass.sum(-1) - after.mass.sum(-1)).round().long()
    return Eviction(after, counts, evicted, protected.sum(-1).max(), given_up)


def score_rows(observation: Observation, rows: Rows, policy: LayerPolicy) -> Tensor:
    """(B, H, n) finite scores of the rows."""
    guarded = policy.method
    scores = guarded.score(observation, rows, policy.state).to(rows.mass.dtype) if guarded.method.scores else rows.mass
    return bound_scores(scores)


def bound_scores(scores: Tensor) -> Tensor:
    """Scores without infinities, which mark what is protected and what is absent."""
    return scores.clamp(min=torch.finfo(scores.dtype).min, max=torch.finfo(scores.dtype).max)


def protect_rows(
    observation: Observation, rows: Rows, policy: LayerPolicy, quota: Quota
) -> tuple[Tensor, dict[str, Tensor]]:
    """(B, H, n) bool rows that are protected within the quota, and how many of each kind could not be."""
    given_up: dict[str, Tensor] = {}

    def protect(samples: slice, size: int) -> Tensor:
        sinks, recents = (
            policy.method.protect_sinks(observation, rows, size),
            policy.method.protect(observation, rows, size),
        )
        if sinks is not None and recents is not None:
            recents = recents & ~sinks  # a row that is both counts once
        kept = fit_protected(sinks, recents, rows, size)
        for kind, wanted in (("sinks", sinks), ("recents", recents)):
            if wanted is not None:
                lost = ((wanted & rows.present) > kept)[samples].sum(-1).max()
                given_up[kind] = lost.maximum(given_up[kind]) if kind in given_up else lost
        return kept[samples]

    return for_each_quota(quota, protect), given_up


def share_among_heads(scores: Tensor, protected: Tensor, rows: Rows, policy: LayerPolicy, quota: Quota) -> Tensor:
    """(B, H) rows that each head keeps: what the method gave it, its share of before, or what the allocator says."""
    if quota.heads is not None:
        return rows.present.sum(-1).minimum(quota.heads.to(rows.mass.device))
    if quota.shares is not None:
        return keep_proportions(rows, protected, quota)
    heads = policy.allocator.heads
    return for_each_quota(quota, lambda own, size: heads(scores[own], protected[own], size))


def keep_proportions(rows: Rows, protected: Tensor, quota: Quota) -> Tensor:
    """(B, H) rows per head in the proportions of an earlier cut."""
    shares = quota.shares
    safe, held = protected.sum(-1).tolist(), rows.present.sum(-1).tolist()
    counts = []
    for sample, (before, size) in enumerate(zip(shares.quotas, quota.samples, strict=True)):
        targets = [count * size / before for count in shares.counts[sample].tolist()]
        least = [max(1, own) for own in safe[sample]]
        counts.append(apportion(targets, least, held[sample], size * len(targets)))
    return torch.tensor(counts, device=rows.mass.device)


def find_safe_rows(scores: Tensor, protected: Tensor, counts: Tensor, policy: LayerPolicy, quota: Quota) -> Tensor:
    """(B, H, n) bool rows that a head keeps whatever the others have, the protected ones among them."""
    safe = policy.allocator.safe
    kept = protected | for_each_quota(quota, lambda own, size: safe(scores[own], protected[own], size))
    if quota.shares is not None:  # a head's share of another quota may have room for fewer rows than are safe at this
        kept = protected | (kept & policy.method.select(scores, counts))
    return kept


def for_each_quota(quota: Quota, work: Callable[[slice, int], Tensor]) -> Tensor:
    """`work(samples, size)` for all samples at once where their quotas are equal, else one by one."""
    if len(set(quota.samples)) == 1:
        return work(slice(None), quota.samples[0])
    return torch.cat([work(slice(sample, sample + 1), size) for sample, size in enumerate(quota.samples)])


def without_tensors(observation: Observation) -> Observation:
    """What was seen, but for what takes memory."""
    empty = observation.queries.new_empty(*observation.queries.shape[:3], 0)
    return replace(observation, queries=empty, outputs=empty, lse=None)

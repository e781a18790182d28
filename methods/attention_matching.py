"""attention_matching: keep the rows with most attention, and fit their weights and values to the attention of all rows.

Source: "Fast KV Compaction via Attention Matching" (arXiv 2602.16284); adamzweiger/compaction (commit 2dea491),
compaction/algorithms/base.py and highest_attention_keys.py. Symbols, for one KV head: q the reference queries of all
query heads of its group, k_j, v_j and m_j the keys, values and masses of its rows, S the rows that stay, s the scaling.

    p_q   = softmax_j(q·k_j·s + log m_j)
    score = max_q p_{q,j}, or the root of the mean over q of p_{q,j}²         (`rank`)
    E     = exp(q·k_j·s + log m_j - the largest of these of the query)
    w     = argmin ‖E_{:,S} f - E·1‖₂ with lowest ≤ w ≤ highest, w = f·m     (weights)
    X     = softmax over S of q·k_j·s + log w_j
    c     = argmin ‖X c - Y‖₂, Y = Σ_j p_{q,j} v_j                           (values)

A row that stays keeps its key and its position. Attention adds log w to its logits. Rows of the answer are appended
with weight 1. With `reference=repeat` the queries are those of the tokens that the model reads when it repeats the
prompt (kvbench.interfaces.repeating); the prompt must be one block. With `reference=context` they are the queries of
the prompt itself, of all blocks so far, and every block is followed by a fit of the rows that are held. As in the
source every query sees all rows, and of too many queries a random part is taken; kvbench takes whole tokens, so that
all query heads of a group have the same ones. Rows of the prefix are neither fitted nor cut, and no references.

The preset `official` has the ranking and the bounds of the source's AM-HighestAttnKeys-basic, which stops after least
squares and two steps of a projected gradient; here the weights are those of the minimum. kvbench's own choices: The
request to repeat the prompt and its chunks are those of KVzip, not the source's. Both problems are solved in float64 by
their normal equations, the first by a projected Newton method until the projected gradient is below TOLERANCE. If many
solutions fit equally well, as with fewer queries than rows, the source takes what its solver returns. Here f is nearest
to 1 and c to the rows' own values: c = v + d, where d minimises ‖X d - (Y - X v)‖² + λ‖d‖² with λ = ridge·‖X‖². On the
reference queries the fit is therefore never worse than the own values with the same weights. (With weights of 1 the own
values can be better: the weights are fitted to E alone.)

Not built: self-study queries, which the model generates; orthogonal matching pursuit; queries that are read again after
each compacted layer (on-policy); head budgets from a file, whose place allocators take.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.repeating import Repeating
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting
from kvbench.kernels.softmax_extras import SoftmaxExtras, cap_logits
from kvbench.validation import SettingError

LOGITS, LOGITS_ON_GPU = 1 << 21, 1 << 23  # how many logits are held in memory at once
SCRATCH = 2_000_000_000  # roughly how many bytes of normal equations are held at once
LARGE = 1024  # systems of so many equations are solved one after the other
TOLERANCE = 1e-10  # the search for weights ends at this projected gradient, in units of the largest slope at 0
STEPS, HALVINGS = 200, 40  # the largest number of steps of the search, and of halvings of a step
NEAREST = 1e-10  # how strongly weights that fit equally well are pulled to 1


@dataclass(frozen=True)
class AttentionMatching(Repeating):
    """Fit weights and values of the rows that stay to the attention of reference queries."""

    reference: str = setting(choices=("repeat", "context"))
    """Which queries are fitted: those that repeat the prompt, or the prompt's own."""
    queries: int = setting(minimum=1)
    """Number of reference queries of a KV head at most."""
    rank: str = setting(choices=("max", "rms"))
    """Which rows stay: those with the largest, or with the largest root mean square of, attention probabilities."""
    lowest: float = setting(above=0)
    """Smallest weight of a row."""
    highest: float | None = setting(above=0)
    """Largest weight of a row."""
    ridge: float = setting(minimum=1e-10)
    """How much values are drawn to the rows' own, λ/‖X‖²."""

    weighs_rows = True
    refusals = {
        "decoding": "has queries of the prompt only; use method.decoding=false",
        "cascading_allocator": "has fitted rows of layers that it cuts again; use allocator=uniform, ada or pyramid",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.highest is not None and self.highest < self.lowest:
            raise SettingError(f"method.highest={self.highest}: at least method.lowest={self.lowest}, or null")

    @property
    def needs_extra_reads(self) -> bool:
        return self.reference == "repeat"

    def update(self, observation: Observation, rows: Rows, state: State) -> Mapping[str, Tensor]:
        """Remember the reference queries, of as many tokens as there is room for.

        Each token draws a number, and those with the smallest numbers stay, so they are a random part of all.
        """
        repeats = observation.about is not None
        if observation.decoding or repeats != self.needs_extra_reads:
            return {}
        queries, seen = observation.queries, state.layer.get("tokens", 0)
        skipped = 0 if repeats else min(max(self.safe(observation) - observation.first, 0), queries.shape[2])
        queries = queries[:, :, skipped:]
        if not queries.shape[2]:
            return {}
        drawn = draw_numbers(state.seeds, seen, queries.shape[2]).to(queries.device)
        if seen:
            queries = torch.cat([state.layer["queries"], queries], 2)
            drawn = torch.cat([state.layer["drawn"], drawn], 1)
        room = max(1, self.queries * rows.heads // queries.shape[1])
        if queries.shape[2] > room:
            index = drawn.topk(room, largest=False).indices.sort(-1).values
            drawn = drawn.gather(1, index)
            queries = queries.gather(2, index[:, None, :, None].expand(-1, queries.shape[1], -1, queries.shape[3]))
        state.layer |= {
            "tokens": seen + observation.queries.shape[2] - skipped,
            "queries": queries.clone(),
            "drawn": drawn,
        }
        return {}

    def forget(self, state: State) -> None:
        for name in ("tokens", "queries", "drawn"):
            state.layer.pop(name, None)

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        mass = self.find_fitted_mass(observation, rows)
        scores, count = torch.zeros_like(mass, dtype=torch.float64), 0
        given = stack_queries(state, rows), rows.keys.flatten(0, 1), mass.flatten(0, 1)
        for logits in compute_logits(*given, observation.scaling, observation.extras):
            p = logits.softmax(-1)
            votes = p.amax(1) if self.rank == "max" else p.square().sum(1)
            scores = scores.maximum(votes.view_as(scores)) if self.rank == "max" else scores + votes.view_as(scores)
            count += logits.shape[1]
        scores = scores if self.rank == "max" else (scores / max(1, count)).sqrt()
        return scores.masked_fill(mass == 0, 0).to(rows.mass.dtype)

    def find_fitted_mass(self, observation: Observation, rows: Rows) -> Tensor:
        """Return the masses of the rows that may be fitted, (B, H, n), and 0 for the others."""
        return rows.mass.masked_fill(rows.places < self.safe(observation), 0)

    def merge(self, observation: Observation, rows: Rows, kept: Tensor, state: State) -> Rows:
        left, fitted = rows.without(~kept), self.find_fitted_mass(observation, rows)
        to_fit = kept & (fitted > 0)
        count = int(to_fit.sum(-1).max())
        if count == 0:
            return left
        index = to_fit.byte().sort(dim=-1, descending=True, stable=True).indices[..., :count]  # in their order
        given = [x.flatten(0, 1) for x in (rows.keys, rows.values, fitted, index, to_fit.gather(2, index))]
        queries, fits = stack_queries(state, rows), []
        together = max(1, SCRATCH // (4 * 8 * count**2))  # number of heads that are fitted at once
        for start in range(0, len(queries), together):
            some = [x[start : start + together] for x in (queries, *given)]
            fits.append(self.fit(observation.scaling, *some, extras=observation.extras))
        weights, values = (torch.cat(parts).view(*kept.shape[:2], count, -1) for parts in zip(*fits, strict=True))
        there, wide = to_fit.gather(2, index), index[..., None].expand_as(values)
        mass = torch.where(there, weights[..., 0].to(left.mass.dtype), left.mass.gather(2, index))
        return replace(
            left,
            mass=left.mass.scatter(2, index, mass),
            values=rows.values.scatter(2, wide, values.to(rows.values.dtype)),
        )

    def fit(
        self,
        scaling: float,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mass: Tensor,
        index: Tensor,
        there: Tensor,
        *,
        extras: SoftmaxExtras | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return weights (P, t, 1) and values (P, t, d), float64, of the rows that stay in P heads.

        Args:
            scaling: The factor of the logits.
            queries: (P, N, d)
            keys: (P, n, d)
            values: (P, n, d)
            mass: Masses of the fitted rows, (P, n); 0 for others.
            index: The rows that stay, (P, t).
            there: Which of these exist, (P, t) bool. The others have weight 1 and their own values.
            extras: The cap of the logits.
        """
        held = mass.gather(1, index).double().masked_fill(~there, 1)
        gram = queries.new_zeros(*index.shape, index.shape[1], dtype=torch.float64)
        target = gram.new_zeros(index.shape)
        for logits in compute_logits(queries, keys, mass, scaling, extras):
            powers = (logits - logits.amax(-1, keepdim=True)).exp()
            chosen = take(powers, index) * there[:, None]
            gram += chosen.mT @ chosen
            target += (powers.sum(-1, keepdim=True) * chosen).sum(1)
        highest = torch.inf if self.highest is None else self.highest
        factors = fit_bounded(gram, target, self.lowest / held, highest / held)
        more, before = factors.log().masked_fill(~there, torch.finfo(gram.dtype).min), values.double()
        kept_values = before.gather(1, index[..., None].expand(-1, -1, values.shape[2]))
        gram, cross = gram.zero_(), torch.zeros_like(kept_values)
        for logits in compute_logits(queries, keys, mass, scaling, extras):
            shares = (take(logits, index) + more[:, None]).softmax(-1)
            gram += shares.mT @ shares
            cross += shares.mT @ (logits.softmax(-1) @ before - shares @ kept_values)
        size = gram.diagonal(dim1=1, dim2=2)
        size += self.ridge * size.sum(-1, keepdim=True)
        return (factors * held)[..., None], kept_values + solve_definite(gram, cross)


def draw_numbers(seeds: tuple[int, ...], seen: int, count: int) -> Tensor:
    """Return a random number for each of `count` tokens that follow `seen` others, (B, count) float64."""
    draws = [torch.Generator().manual_seed(seed + seen) for seed in seeds]
    return torch.stack([torch.rand(count, dtype=torch.float64, generator=generator) for generator in draws])


def stack_queries(state: State, rows: Rows) -> Tensor:
    """Return the reference queries of every KV head, those of all its query heads, (B·H, N, d). There may be none."""
    if "queries" not in state.layer:
        return rows.keys.flatten(0, 1)[:, :0]
    return state.layer["queries"].unflatten(1, (rows.heads, -1)).flatten(2, 3).flatten(0, 1)


def compute_logits(
    queries: Tensor, keys: Tensor, mass: Tensor, scaling: float, extras: SoftmaxExtras | None = None
) -> Iterator[Tensor]:
    """Yield q·k·s + log m of some queries, (P, c, n) float64; a finite number next to nothing for rows of mass 0.

    Args:
        queries: (P, N, d)
        keys: (P, n, d)
        mass: (P, n)
        scaling: The factor of the logits, s.
        extras: Their cap. Sinks, like the rows of the prefix, are in no softmax here.
    """
    keys, mass = keys.double().mT, mass.double()[:, None]
    most = LOGITS_ON_GPU if keys.is_cuda else LOGITS
    for some in queries.split(max(1, most // mass.numel()), dim=1):
        logits = cap_logits(some.double() @ keys * scaling, extras) + mass.log()
        yield logits.masked_fill(mass == 0, torch.finfo(keys.dtype).min)


def take(columns: Tensor, index: Tensor) -> Tensor:
    """Return the columns `index` (P, t) of matrices (P, c, n), (P, c, t)."""
    return columns.gather(2, index[:, None].expand(-1, columns.shape[1], -1))


def solve_definite(matrices: Tensor, right: Tensor) -> Tensor:
    """Solve positive definite systems (P, t, t) for right sides (P, t, e). A GPU takes large ones faster one by one."""
    if matrices.shape[1] >= LARGE and len(matrices) > 1:
        return torch.cat([solve_definite(*one) for one in zip(matrices.split(1), right.split(1), strict=True)])
    return torch.cholesky_solve(right, torch.linalg.cholesky(matrices))


def fit_bounded(gram: Tensor, target: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return the f with low ≤ f ≤ high that minimises ½ fᵀ·gram·f - target·f, (P, t); of several the one nearest to 1.

    A projected Newton method (Bertsekas 1982): entries that their slope presses against a bound stay there, the others
    take Newton's step, halved until the objective falls enough. f is scaled so that the diagonal of `gram` is 1.

    Args:
        gram: (P, t, t), positive semidefinite. A column of zeros leaves its f at 1.
        target: (P, t)
        low: (P, t)
        high: (P, t)
    """
    size = gram.diagonal(dim1=1, dim2=2).sqrt()
    size = torch.where(size > 0, size, 1)
    gram, target = gram / (size[:, None] * size[..., None]), target / size + NEAREST * size
    gram.diagonal(dim1=1, dim2=2).add_(NEAREST)
    least, most = low * size, high * size
    limit = TOLERANCE * target.amax(-1, keepdim=True)

    def slope_of(f: Tensor) -> Tensor:
        return (gram @ f[..., None])[..., 0] - target

    solution = size.clamp(least, most)
    searching = torch.ones_like(limit, dtype=torch.bool)
    for _ in range(STEPS):
        slope = slope_of(solution)
        wrong = (solution - (solution - slope).clamp(least, most)).abs().amax(-1, keepdim=True)
        searching &= wrong > limit
        if not searching.any():
            break
        near = wrong.clamp(max=1e-3)
        pressed = ((solution <= least + near) & (slope > 0)) | ((solution >= most - near) & (slope < 0))
        free = gram.masked_fill(pressed[:, None] | pressed[..., None], 0)
        free.diagonal(dim1=1, dim2=2).add_(pressed)
        step = solve_definite(free, slope.masked_fill(pressed, 0)[..., None])[..., 0]
        step, moved = torch.where(pressed, slope, step), ~searching
        for halvings in range(HALVINGS):
            new = (solution - step / 2**halvings).clamp(least, most)
            fall = ((solution - new) * (slope + slope_of(new))).sum(-1, keepdim=True) / 2  # how far the objective falls
            falls = ~moved & (fall > 1e-4 * ((solution - new) * slope).sum(-1, keepdim=True))
            solution, moved = torch.where(falls, new, solution), moved | falls
            if moved.all():
                break
        searching &= moved  # if no step lowers the objective, float64 shows no lower one
    return (solution / size).clamp(low, high)

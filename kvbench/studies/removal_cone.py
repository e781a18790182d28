"""removal_cone: DropKV's theory (Lemma 1, Theorem 1; Tables 12 to 16, Figures 3b and 3c) on random queries of a prompt.

For a query with attention p, output a and residuals r_i = a - v_i, removing the rows J changes the output by

    Δ(J) = Σ_J p_i r_i / (1 - Σ_J p_i),   F(J) = ‖Δ(J)‖

The pool of a query is the half of the rows before its window that its head's window, the query and the seven before it,
attends to least. With ε the largest p in the pool, k its size and c* its cone constant (kvbench.studies.cone_constant),
Theorem 1 says that DropKV's choice has F at most 1/[c*·(1-ε)·(1-kε)] times the smallest one. All in float64:

    weight          quantiles of ε (Table 12); small_weight: share of queries with ε ≤ 0.005
    cone            quantiles of c* (Table 13), cone_mean, cone_density in bins (Figure 3c)
    above           share of c* above thresholds (Table 14); cone_by_layer: above 0, by layer (Figure 3b)
    in_cone         share of queries with c* > 0
    gap             the largest difference of the two bounds of a c* > 0; undecided: share of c* without a proven sign
    factor          quantiles of the bound's factor where it is finite (Table 15); finite: share of queries
    ratio_<choice>  quantiles of F(Ĵ)/F(J*) for 20 rows of the pool, of which k = 10 or 18 go (Table 16): Ĵ are those
                    that DropKV, the smallest p (attention) or a draw (random) chooses, J* are the best ones of all
                    subsets; by the stratum that the 20 rows come from
    within_bound    share of those Ĵ of DropKV whose ratio is at most the factor of the 20 rows
    lemma           share of sets of 20 rows for which attention without them changes the output by Δ
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from kvbench.interfaces.observation import Observation
from kvbench.interfaces.rows import Rows
from kvbench.store.study_lines import Line
from kvbench.studies.cone_constant import GAP, Residuals, find_cone_constants
from kvbench.studies.study import (
    Curve,
    LayerStudy,
    Memory,
    count_bins,
    draw_positions,
    find_quantiles,
    list_shares,
    take_block,
    widen,
)
from kvbench.validation import SettingError

SAMPLED = 4  # queries of each head, in the second half of the prompt
WINDOW = 8
SMALL = 0.005  # the weight that the paper's Table 12 names
QUANTILES, UPPER = (0.0, 0.05, 0.5, 0.95, 1.0), (0.5, 0.95, 1.0)
THRESHOLDS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)
BINS = 40
FEW = 20  # number of rows whose subsets are all enumerated
REMOVED = (10, 18)
RATIOS = ("ratio_dropkv", "ratio_attention", "ratio_random")  # one for each way to choose the rows that are removed
STRATA = ("random", "low attention", "near threshold", "rank disagreement")
EXACT = 1e-8  # relative difference up to which an identity counts as true


@dataclass(frozen=True)
class RemovalCone(LayerStudy):
    """How near to the best DropKV's choice is, and what its theory says."""

    name: ClassVar[str] = "removal_cone"

    def update(self, memory: Memory, observation: Observation, rows: Rows) -> None:
        if not memory:
            positions = draw_positions(SAMPLED, observation.prompt, self.seed, first=observation.prompt // 2)
            windows = positions[:, None] - torch.arange(WINDOW - 1, -1, -1)
            memory |= {"windows": windows, "wanted": windows.unique(), "queries": []}
        memory["queries"].append(observation.queries[0][:, take_block(memory["wanted"], observation)])
        if not observation.last:
            return
        windows, queries = memory["windows"], torch.cat(memory["queries"], 1)
        window_queries = queries[:, torch.searchsorted(memory["wanted"], windows).to(queries.device)]
        keys, values = rows.keys[0], rows.values[0]
        grouped = window_queries.unflatten(0, (rows.heads, -1))
        looks = [
            look(head, keys[index], values[index], windows.to(keys.device), observation.scaling)
            for index, head in enumerate(grouped)
        ]
        memory.clear()
        memory |= {"weight": torch.cat([one.weight for one in looks]), "size": torch.cat([one.size for one in looks])}
        anchors, norms, pool = (
            torch.stack([getattr(one, name) for one in looks]) for name in ("anchors", "norms", "pool")
        )
        wide = widen(values)
        memory["cone"] = find_cone_constants(Residuals(anchors, wide, norms.to(wide), pool), self.seed)
        draw = torch.Generator().manual_seed(self.seed)
        last = slice(len(windows) - 1, None, len(windows))
        few = [
            compare_choices(one.take(last), values[index].double(), draw, self.seed) for index, one in enumerate(looks)
        ]
        for name in few[0]:
            memory[name] = torch.cat([one[name] for one in few])

    def finish(self, memories: Mapping[int, Memory], first: bool) -> Iterable[Line]:
        every = list(memories.values())
        weight, size = (torch.cat([memory[name] for memory in every]).cpu() for name in ("weight", "size"))
        lower, upper = (
            torch.cat([getattr(memory["cone"], name).flatten() for memory in every]).cpu()
            for name in ("lower", "upper")
        )
        factor = bound_factor(lower, weight, size)
        for layer, memory in memories.items():
            inside = memory["cone"].lower.flatten() > 0
            yield self.line("cone_by_layer", inside.double().mean(), layer=layer, n=len(inside))
        yield from self._list_quantiles("weight", weight)
        yield from self._list_quantiles("cone", lower, QUANTILES)
        yield self.line("cone_mean", lower.mean(), n=len(lower))
        yield from list_shares(self, "cone_density", count_bins(lower, -1, 1, BINS), -1, 1)
        for threshold in THRESHOLDS:
            yield self.line("above", (lower > threshold).double().mean(), x=threshold, n=len(lower))
        inside = lower > 0
        yield self.line("undecided", (~inside & (upper > GAP)).double().mean(), n=len(lower))
        if inside.any():
            yield self.line("gap", (upper - lower)[inside].amax().clamp(min=0), n=int(inside.sum()))
        if (there := factor.isfinite()).any():
            yield from self._list_quantiles("factor", factor[there])
        yield from self._list_ratios(torch.cat([memory["ratio"] for memory in every]).cpu())
        yield self.claim("small_weight", [weight <= SMALL])
        yield self.claim("in_cone", [inside])
        yield self.claim("finite", [factor.isfinite()])
        yield self.claim("within_bound", [memory["within_bound"] for memory in every])
        yield self.claim("lemma", [memory["lemma"] for memory in every])

    def _list_quantiles(
        self, quantity: str, values: Tensor, shares: tuple[float, ...] = UPPER, **place: Unpack[Curve]
    ) -> Iterator[Line]:
        for share, value in zip(shares, find_quantiles(values, torch.tensor(shares).to(values)), strict=True):
            yield self.line(quantity, value, x=share, n=len(values), **place)

    def _list_ratios(self, ratios: Tensor) -> Iterator[Line]:
        for s, stratum in enumerate(STRATA):
            for k, removed in enumerate(REMOVED):
                for i, quantity in enumerate(RATIOS):
                    yield from self._list_quantiles(quantity, ratios[:, s, k, i], series=stratum, y=removed)


@dataclass(frozen=True)
class Look:
    """What the T queries of a KV head see: those of its group, and of each of them the sampled positions.

    Attributes:
        anchors: Attention outputs a, (T, d).
        logits: Logits of the rows, (T, n); -inf behind the query.
        log_p: Logarithms of attention probabilities, (T, n).
        norms: ‖a - v_i‖, (T, n).
        pool: Rows that may go, (T, n) bool.
    """

    anchors: Tensor
    logits: Tensor
    log_p: Tensor
    norms: Tensor
    pool: Tensor

    def take(self, which: slice) -> "Look":
        """Return what some of the queries see."""
        return Look(*(getattr(self, field.name)[which] for field in fields(self)))

    @property
    def weight(self) -> Tensor:
        """The largest p in the pool, ε, (T,)."""
        return self.log_p.exp().masked_fill(~self.pool, 0).amax(-1)

    @property
    def size(self) -> Tensor:
        """Number of rows of the pool, k, (T,)."""
        return self.pool.sum(-1)


def look(queries: Tensor, keys: Tensor, values: Tensor, windows: Tensor, scaling: float) -> Look:
    """Compute attention of the last query of each window in float64, and the pool that the window gives.

    A row whose value is the output itself is in no pool: removing it changes nothing.

    Args:
        queries: Of the group, (G, P, w, d).
        keys: (n, d)
        values: (n, d)
        windows: Positions of the queries, (P, w).
        scaling: The factor of the logits.

    Raises:
        SettingError: So many values equal the output that fewer than 20 rows are left.
    """
    rows = torch.arange(len(keys), device=keys.device)
    logits = (queries.double() @ keys.double().mT * scaling).masked_fill(rows > windows[..., None], -torch.inf)
    log_p = logits.log_softmax(-1)
    received = log_p.exp().sum(-2).masked_fill(rows >= windows[:, :1], torch.inf)
    before = windows[:, 0]
    order = received.argsort(-1).argsort(-1)  # the place of each row among all, the least attended one first
    pool = order < (before // 2)[:, None]
    log_p, wide = log_p[..., -1, :].flatten(0, 1), values.double()
    anchors = log_p.exp() @ wide
    squares = anchors.square().sum(-1, keepdim=True) + wide.square().sum(-1) - 2 * anchors @ wide.mT
    norms = squares.clamp(min=0).sqrt()
    pool = pool.flatten(0, 1) & (norms > 1e-6 * anchors.norm(dim=-1, keepdim=True))
    if (pool.sum(-1) < FEW).any():
        raise SettingError(
            f"removal_cone: fewer than {FEW} of the rows that a query may lose have values other than its output; "
            "give prompts with more different tokens"
        )
    return Look(anchors, logits[..., -1, :].flatten(0, 1), log_p, norms.where(norms > 0, 1), pool)


def bound_factor(cone: Tensor, weight: Tensor, size: Tensor) -> Tensor:
    """Return 1/[c*·(1-ε)·(1-kε)], infinite unless c* > 0 and kε < 1."""
    factor = 1 / (cone * (1 - weight) * (1 - size * weight))
    return factor.masked_fill((cone <= 0) | (size * weight >= 1), torch.inf)


def compare_choices(seen: Look, values: Tensor, draw: torch.Generator, seed: int) -> dict[str, Tensor]:
    """Compare choices of k among 20 rows with the best one.

    Args:
        seen: What G queries see.
        values: Of all rows, (n, d) float64.
        draw: Draws the rows of the first stratum and the random choices.
        seed: Seed of starts for c*.

    Returns:
        ``ratio``, (G, strata, k, selectors); ``within_bound``, (G, strata, k); ``lemma``, (G,).
    """
    rows = list_strata(seen, draw)
    p = seen.log_p.exp().expand(len(STRATA), -1, -1).gather(-1, rows)
    took, norms = (part.expand(len(STRATA), -1, -1).gather(-1, rows) for part in (seen.log_p, seen.norms))
    residuals = seen.anchors[:, None] - values[rows]  # (strata, G, 20, d)
    changes = torch.exp(took - took.amax(-1, keepdim=True))[..., None] * residuals
    by_chance = torch.rand(rows.shape, generator=draw).to(took)
    scores = torch.stack([log_single_change(took, norms), took, by_chance], -2)  # in the order of RATIOS
    ratio = compare_with_best(changes @ changes.mT, p, scores).transpose(0, 1)
    directions = Residuals(
        seen.anchors.repeat(len(STRATA), 1)[:, None],
        values[rows].flatten(0, 1),
        norms.flatten(0, 1)[:, None],
        torch.ones_like(norms, dtype=torch.bool).flatten(0, 1)[:, None],
    )
    cone = find_cone_constants(directions, seed).lower.view(*rows.shape[:2], 1)
    factor = bound_factor(cone, p.amax(-1, keepdim=True), torch.tensor(REMOVED, device=p.device)).transpose(0, 1)
    return {
        "ratio": ratio,
        "within_bound": ratio[..., RATIOS.index("ratio_dropkv")] <= factor * (1 + EXACT),
        "lemma": check_lemma(seen, values, rows[0]),
    }


def check_lemma(seen: Look, values: Tensor, gone: Tensor) -> Tensor:
    """Return whether attention without some rows, (T, 20), differs from the output by Δ of these rows, (T,) bool."""
    change = seen.logits.scatter(-1, gone, -torch.inf).softmax(-1) @ values - seen.anchors
    p = seen.log_p.gather(-1, gone).exp()
    formula = (p[..., None] * (seen.anchors[:, None] - values[gone])).sum(1) / (1 - p.sum(-1, keepdim=True))
    # a is a sum over n rows, so float64 keeps about 13 digits of it
    scale = change.norm(dim=-1) + 1e-5 * seen.anchors.norm(dim=-1)
    return (change - formula).norm(dim=-1) <= EXACT * scale


def log_single_change(log_p: Tensor, norms: Tensor) -> Tensor:
    """Return log ‖Δ({j})‖ = log p/(1-p)·‖r_j‖ of each row. Logarithms keep the order of p that float64 cannot hold."""
    return log_p - torch.log1p(-log_p.exp()) + norms.log()


def list_strata(seen: Look, draw: torch.Generator) -> Tensor:
    """Return the 20 rows of each stratum of the pool, (strata, T, 20): drawn at random; with the smallest p; with the
    DropKV score nearest to the pool's median; with the largest difference of their ranks by p and by score.
    """
    score = log_single_change(seen.log_p, seen.norms)
    middle = score.masked_fill(~seen.pool, torch.nan).nanmedian(-1, keepdim=True).values
    by_p, by_score = (
        part.masked_fill(~seen.pool, torch.inf).argsort(-1).argsort(-1).double() for part in (seen.log_p, score)
    )
    least = (
        torch.rand(score.shape, generator=draw).to(score),
        seen.log_p,
        (score.exp() - middle.exp()).abs(),
        -(by_p - by_score).abs(),
    )
    return torch.stack([part.masked_fill(~seen.pool, torch.inf).topk(FEW, largest=False).indices for part in least])


def compare_with_best(gram: Tensor, p: Tensor, scores: Tensor) -> Tensor:
    """Return F(Ĵ)/F(J*) for each k, where Ĵ are the k rows with the smallest scores and J* the best k rows.

    Args:
        gram: Products of p_i r_i, up to a common factor, (…, 20, 20).
        p: Attention probabilities, (…, 20).
        scores: Of the selectors, (…, selectors, 20).

    Returns:
        (…, k, selectors)
    """
    ratios = []
    for removed in REMOVED:
        chosen = torch.zeros_like(scores).scatter(-1, scores.argsort(-1)[..., :removed], 1)
        mine = ((chosen @ gram) * chosen).sum(-1) / (1 - (chosen @ p[..., None])[..., 0]).square()
        ratios.append((mine / find_smallest_change(gram, p, removed)[..., None]).sqrt())
    return torch.stack(ratios, -2)


def find_smallest_change(gram: Tensor, p: Tensor, removed: int) -> Tensor:
    """Return F(J*)² over all subsets J* of k rows, (…).

    A subset of 20 rows is a subset of the first ten and one of the last ten. If the first holds j rows, the squares of
    all such changes are two sums of quadratic forms and a product of two matrices of at most 252 rows.
    """
    half = FEW // 2
    bits = ((torch.arange(2**half)[:, None] >> torch.arange(half)) & 1).to(p)  # the subsets of ten rows
    best = torch.full_like(p[..., 0], torch.inf)
    for count in range(max(0, removed - half), min(half, removed) + 1):
        one, two = bits[bits.sum(-1) == count], bits[bits.sum(-1) == removed - count]
        first, both, second = gram[..., :half, :half], gram[..., :half, half:], gram[..., half:, half:]
        within_one, within_two = ((one @ first) * one).sum(-1), ((two @ second) * two).sum(-1)
        squares = within_one[..., None] + within_two[..., None, :] + 2 * one @ both @ two.mT
        gone = (p[..., :half] @ one.mT)[..., None] + (p[..., half:] @ two.mT)[..., None, :]
        best = best.minimum((squares / (1 - gone).square()).flatten(-2).amin(-1))
    return best

"""Find the cone constant of DropKV's Theorem 1: c* = max over ‖u‖ = 1 of min_i u·r_i/‖r_i‖, for residuals r_i.

If 0 is outside of the convex hull of the directions r_i/‖r_i‖, c* is its distance from the hull, and Wolfe's algorithm
("Finding the nearest point in a polytope", 1976) ends at the nearest point x. Any x of the hull gives c* ≤ ‖x‖, and
u = x/‖x‖ gives c* ≥ min_i u·r_i/‖r_i‖, so the difference of the two proves the value. If 0 is inside, x goes to 0,
which proves that c* ≤ 0. Then -c* is the distance of 0 from the nearest face, whose search is not convex: every u gives
a lower bound of c*, and the best one of several starts is returned.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

GAP = 1e-5  # a value counts as known if its upper and lower bound differ by no more than this
ROUNDING = 1e-12  # weights and coordinates below it are 0
STEPS_PER_DIMENSION = 8  # limit of Wolfe's algorithm; random directions take about two
STARTS = 4  # random starts where c* ≤ 0
ASCENT_STEPS = 150
FIRST_STEP, LAST_STEP = 0.5, 0.002  # lengths of the first and of the last step of an ascent


@dataclass(frozen=True)
class Residuals:
    """Residuals of several queries, T for each of H KV heads, without a tensor (H, T, n, d)."""

    anchors: Tensor
    """Attention outputs a, (H, T, d)."""
    values: Tensor
    """Values v, (H, n, d), in the dtype in which directions are compared."""
    norms: Tensor
    """‖a - v_i‖, (H, T, n), above 0 in the pool, in the same dtype."""
    pool: Tensor
    """Which rows count, (H, T, n) bool; at least one for each query."""

    def measure(self, units: Tensor) -> Tensor:
        """Return u·r_i/‖r_i‖, (H, T, n), infinite outside of the pool, for u (H, T, d) in the dtype of the values."""
        toward = (units * self.anchors.to(units)).sum(-1, keepdim=True)
        return ((toward - units @ self.values.mT) / self.norms).masked_fill(~self.pool, torch.inf)

    def take(self, row: Tensor) -> Tensor:
        """Return the directions r_i/‖r_i‖ of one row for each query, (H, T, d) float64, for rows (H, T)."""
        rows = self.values.gather(1, row[..., None].expand(-1, -1, self.values.shape[-1])).double()
        return normalize(self.anchors.double() - rows, dim=-1)


@dataclass(frozen=True)
class ConeConstants:
    """Bounds of c*, (H, T) float64. The sign of c* is proven where `lower` is above 0 or `upper` at most `GAP`."""

    lower: Tensor
    upper: Tensor


def find_cone_constants(residuals: Residuals, seed: int) -> ConeConstants:
    """Return bounds of c*: equal up to `GAP` where c* > 0, and a lower bound from several starts where it is not.

    Args:
        residuals: The residuals of H·T queries.
        seed: Seed of the starts.
    """
    constants = find_nearest_points(residuals)
    lower = constants.lower.clone()
    for head, undecided in enumerate(lower <= 0):
        if undecided.any():
            part = Residuals(
                residuals.anchors[head, undecided][None],
                residuals.values[head][None],
                residuals.norms[head, undecided][None],
                residuals.pool[head, undecided][None],
            )
            lower[head, undecided] = lower[head, undecided].maximum(climb(part, seed)[0])
    return replace(constants, lower=lower)


def find_nearest_points(residuals: Residuals) -> ConeConstants:
    """Run Wolfe's algorithm for all queries at once, until the gap is closed or c* ≤ 0 is proven.

    A query holds at most d + 2 directions, whose products are updated as they come and go.
    """
    heads, queries, dimension = residuals.anchors.shape
    count, slots = heads * queries, min(dimension + 1, residuals.values.shape[1]) + 1
    weights = torch.zeros(count, slots, dtype=torch.float64, device=residuals.anchors.device)
    points, gram = weights.new_zeros(count, slots, dimension), weights.new_zeros(count, slots, slots)
    lower, upper = weights.new_full((count,), -1), weights.new_ones(count)
    used, adding = weights > 0, upper > 0
    row = residuals.pool.int().argmax(-1)
    for _ in range(STEPS_PER_DIMENSION * dimension):
        which = adding.nonzero()[:, 0]
        slot = (~used[which]).int().argmax(-1)
        points[which, slot] = residuals.take(row).flatten(0, 1)[which]
        products = (points[which] @ points[which, slot][..., None])[..., 0]
        gram[which, slot], gram[which, :, slot] = products, products
        used[which, slot] = True
        goal = minimize_affine(gram, used)
        inside = (goal >= -ROUNDING).all(-1)
        step = (weights / (weights - goal)).masked_fill(goal >= -ROUNDING, torch.inf).amin(-1).clamp(max=1)
        weights = torch.lerp(weights, goal, step[:, None])
        used &= weights > ROUNDING
        weights = weights * used
        weights = weights / weights.sum(-1, keepdim=True)
        nearest = (weights[:, None] @ points)[:, 0]
        distance = nearest.norm(dim=-1)
        upper = upper.minimum(distance)
        units = (nearest / distance.clamp(min=ROUNDING)[:, None]).view(heads, queries, dimension)
        least, row = residuals.measure(units.to(residuals.values)).min(-1)
        lower = lower.maximum(least.flatten().double().masked_fill(distance <= ROUNDING, -1))
        adding = inside & (upper - lower.clamp(min=0) > GAP)
        if not (adding | ~inside).any():
            break
    return ConeConstants(lower.view(heads, queries), upper.view(heads, queries))


def minimize_affine(gram: Tensor, used: Tensor) -> Tensor:
    """Return the weights, of sum 1, of the point nearest to 0 in the affine hull of the points in use.

    Args:
        gram: Products of all pairs of points, (…, m, m).
        used: Points in use, (…, m) bool.

    Returns:
        (…, m); 0 for the other points.
    """
    both = used[..., None] & used[..., None, :]
    # Adding 1 to the products makes the matrix positive definite and does not move the minimum.
    system = (gram + 1).masked_fill(~both, 0) + torch.diag_embed((~used).to(gram))
    factor, _ = torch.linalg.cholesky_ex(system)
    solution = torch.cholesky_solve(used.to(gram)[..., None], factor)[..., 0] * used
    return solution / solution.sum(-1, keepdim=True)


def climb(residuals: Residuals, seed: int) -> Tensor:
    """Return the best lower bound of c* that gradient steps of decreasing length find from several starts, (H, T).

    A step follows the mean of the directions, weighted towards those with the smallest u·r_i/‖r_i‖.
    """
    heads, queries, dimension = residuals.anchors.shape
    many = Residuals(
        *(
            tensor if tensor is residuals.values else tensor.repeat_interleave(STARTS, 1)
            for tensor in (residuals.anchors, residuals.values, residuals.norms, residuals.pool)
        )
    )
    draw = torch.Generator().manual_seed(seed)
    units = normalize(torch.randn(heads, queries * STARTS, dimension, generator=draw), dim=-1).to(residuals.values)
    best = units.new_full(units.shape[:2], -1.0)
    for index in range(ASCENT_STEPS):
        length = FIRST_STEP * (LAST_STEP / FIRST_STEP) ** (index / ASCENT_STEPS)
        cosines = many.measure(units)
        best = best.maximum(cosines.amin(-1))
        shares = (cosines / -length).softmax(-1) / many.norms.masked_fill(~many.pool, 1)
        slope = shares.sum(-1, keepdim=True) * many.anchors.to(units) - shares @ many.values
        slope = slope - (slope * units).sum(-1, keepdim=True) * units
        units = normalize(units + length * normalize(slope, dim=-1), dim=-1)
    best = best.maximum(many.measure(units).amin(-1))
    return best.view(heads, queries, STARTS).amax(-1).double()

"""The attention of few queries to all rows of several layers, with its probabilities.

The KV heads of the layers follow each other in one dimension, L·H, so that one operation serves them all. Keys and
values stay where they are, because copying them would take longer than attending to them.

On a GPU, a model of 16 bits has its keys and values multiplied as they are, and the products are added in float32.
Probabilities are rounded to 16 bits before they are multiplied with values, as fused attention does it. Everything else
is in at least float32.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import inf

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvbench.interfaces.rows import Rows

HALVES = (torch.bfloat16, torch.float16)
Pieces = Sequence[Sequence[Tensor]]
"""Keys or values of each layer: tensors (H, n, d) of consecutive rows, which are not joined."""


def multiply(left: Tensor, right: Tensor, out: Tensor, scaling: float = 1.0, adds: bool = False) -> None:
    """Write the products of matrices (H, a, b) and (H, b, c), times a factor, to `out` (H, a, c), or add them to it."""
    if left.is_cuda and left.dtype == right.dtype and left.dtype in HALVES:
        torch.baddbmm(out, left, right, out_dtype=out.dtype, beta=float(adds), alpha=scaling, out=out)
    else:
        torch.baddbmm(out, left.to(out.dtype), right.to(out.dtype), beta=float(adds), alpha=scaling, out=out)


@lru_cache(maxsize=8)
def make_causal_mask(tokens: int, rows: int, device: torch.device) -> Tensor:
    """Return which of the last `rows` rows lie behind each of `tokens` tokens, whose own are the first of them."""
    return torch.ones(tokens, rows, dtype=torch.bool, device=device).triu_(1)


def weigh_rows(
    queries: Tensor,
    first: int,
    keys: Pieces,
    scaling: float,
    mass: Tensor | None = None,
    places: Tensor | None = None,
    lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return softmax(q·k·scaling + log mass) over the rows up to the query's position, and its log-sum-exps.

    Args:
        queries: Queries of consecutive tokens, (L·H·G, t, d).
        first: Position of the first of them.
        keys: The rows' keys. Layers may have fewer rows than others if their masses there are 0.
        scaling: The factor of the logits.
        mass: Number of tokens that each row stands for, (L·H, n), 0 for absent rows; None for one each.
        places: Positions of the rows, (L·H, n); None for 0 … n − 1.
        lse: Whether the log-sum-exps are returned.

    Returns:
        The probabilities (L·H, G, t, n), 0 for a query that no row precedes, and the log-sum-exps (L·H, G, t) or None,
        in at least float32.
    """
    heads, tokens, dtype = keys[0][0].shape[0], queries.shape[1], torch.promote_types(queries.dtype, torch.float32)
    grouped = queries.reshape(len(keys), heads, -1, queries.shape[2])
    rows = max(sum(piece.shape[1] for piece in layer) for layer in keys)
    logits = queries.new_zeros(*grouped.shape[:3], rows, dtype=dtype)
    for asked, layer, scores in zip(grouped, keys, logits, strict=True):
        begin = 0
        for piece in layer:
            multiply(asked, piece.mT, scores[:, :, begin : begin + piece.shape[1]], scaling)
            begin += piece.shape[1]
    logits = logits.view(len(keys) * heads, -1, tokens, rows)
    if mass is not None:
        logits += mass.log()[:, None, None]
    if places is None:  # only rows of these tokens may lie behind one
        logits[..., first:].masked_fill_(make_causal_mask(tokens, rows - first, logits.device), -inf)
    else:
        last = torch.arange(first, first + tokens, device=logits.device)[:, None]
        logits.masked_fill_(places[:, None, None] > last, -inf)
    weights = logits.softmax(-1)
    return weights if places is None else weights.nan_to_num_(0), logits.logsumexp(-1) if lse else None


def attend_rows(
    queries: Tensor, first: int, layers: Sequence[Rows], scaling: float, lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs (L·H, G, t, d) and log-sum-exps of attention to the first sample's rows; see `weigh_rows`."""
    most = max(rows.keys.shape[2] for rows in layers)
    mass = torch.cat([pad(rows.mass[0], (0, most - rows.keys.shape[2])) for rows in layers])
    places = join_places([rows.places[0] for rows in layers])
    weights, sums = weigh_rows(queries, first, [[rows.keys[0]] for rows in layers], scaling, mass, places, lse)
    return attend_weighted(weights, [[rows.values[0]] for rows in layers]), sums


def join_places(places: Sequence[Tensor]) -> Tensor:
    """Join the positions of layers' rows, (H, n) each, to (L·H, n). Absent rows have -1."""
    most = max(layer.shape[1] for layer in places)
    return torch.cat([pad(layer, (0, most - layer.shape[1]), value=-1) for layer in places])


def attend_weighted(weights: Tensor, values: Pieces) -> Tensor:
    """Return the outputs (L·H, G, t, d) of probabilities (L·H, G, t, n) on values."""
    heads, _, dim = values[0][0].shape
    rounded = round_weights(weights, values).flatten(1, 2).unflatten(0, (len(values), heads))
    outputs = weights.new_empty(*rounded.shape[:3], dim)
    for shares, layer, sums in zip(rounded, values, outputs, strict=True):
        begin = 0
        for piece in layer:
            multiply(shares[:, :, begin : begin + piece.shape[1]], piece, sums, adds=begin > 0)
            begin += piece.shape[1]
    return outputs.view(*weights.shape[:3], dim)


def round_weights(weights: Tensor, values: Pieces) -> Tensor:
    """Return probabilities as they are multiplied with values."""
    dtype = values[0][0].dtype
    return weights.to(dtype) if weights.is_cuda and dtype in HALVES else weights


def sum_weights(weights: Tensor, marks: Tensor) -> Tensor:
    """Return the mass of marked rows, (L·H, G, t), from (L·H, G, t, n) and (L·H, 1 or G, 1 or t, n) bool."""
    if marks.shape[1] == marks.shape[2] == 1:
        return (weights.flatten(1, 2) @ marks[:, 0, 0, :, None].to(weights.dtype)).view(weights.shape[:3])
    return (weights * marks).sum(-1)


def attend_sets(weights: Tensor, values: Pieces, sets: Tensor) -> tuple[Tensor, Tensor]:
    """Attend to sets of rows, given the attention to all of them.

    Args:
        weights: Probabilities over all rows, (L·H, G, t, n).
        values: The rows' values, one piece for each layer.
        sets: The rows of each set, (L·H, S, 1 or G, 1 or t, n) bool.

    Returns:
        The outputs, (S, L·H, G, t, d), 0 without a row, and the mass of the rows, (S, L·H, G, t).
    """
    if sets.shape[2] == sets.shape[3] == 1:  # the same rows for all queries: the probabilities are read once
        outputs, mass = _attend_shared_sets(weights, values, sets[:, :, 0, 0])
    else:
        chosen = [weights * members for members in sets.unbind(1)]
        outputs = torch.stack([attend_weighted(part, values) for part in chosen])
        mass = torch.stack([part.sum(-1) for part in chosen])
    return outputs / mass.clamp(min=torch.finfo(mass.dtype).tiny)[..., None], mass


def _attend_shared_sets(weights: Tensor, values: Pieces, sets: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums of weighted values and masses over sets of rows (L·H, S, n), as `attend_sets` returns them."""
    heads, rows, dim = values[0][0].shape
    count, width = sets.shape[1], sets.shape[1] * dim
    weighed = round_weights(weights, values)
    # For each row its values times 1 or 0 in each set, and then these factors, in as many columns as GPUs read fast.
    masks = pad(sets.mT, (0, -count % 8)).to(weighed.dtype).unflatten(0, (len(values), heads))
    joined = weights.new_empty(len(values), heads, weights.shape[1] * weights.shape[2], width + masks.shape[3])
    for shares, [layer], mask, sums in zip(
        weighed.flatten(1, 2).unflatten(0, (len(values), heads)), values, masks, joined, strict=True
    ):
        wide = weighed.new_empty(heads, rows, joined.shape[3])
        torch.mul(layer[:, :, None], mask[:, :, :count, None], out=wide[..., :width].unflatten(-1, (count, dim)))
        wide[..., width:] = mask
        multiply(shares, wide, sums)
    summed = joined.view(*weights.shape[:3], joined.shape[3])
    outputs = summed[..., :width].unflatten(-1, (count, dim)).movedim(-2, 0)
    return outputs, summed[..., width : width + count].movedim(-1, 0)


def find_error(outputs: Tensor, exact: Tensor) -> Tensor:
    """Return ‖o' − o‖ / ‖o‖ as a mean over tokens, from o' and o (…, t, d). In the wider dtype of both."""
    wide = torch.promote_types(outputs.dtype, exact.dtype)
    size = exact.to(wide).norm(dim=-1).clamp(min=torch.finfo(wide).tiny)
    return ((outputs.to(wide) - exact.to(wide)).norm(dim=-1) / size).mean(-1)

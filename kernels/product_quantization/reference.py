"""Scores, codes and k-means in PyTorch. Only k-means waits for the device."""

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from kvbench.kernels.product_quantization.centroids import cut_keys, find_nearest, split_points
from kvbench.kernels.row_selection import top_k_indices
from kvbench.kernels.softmax_extras import SoftmaxExtras, cap_logits


def code_scores_reference(
    queries: Tensor,
    codes: Tensor,
    codebook: Tensor,
    scaling: float,
    first: int,
    stop: Tensor,
    extras: SoftmaxExtras | None = None,
) -> Tensor:
    batch, heads, parts, count = codebook.shape[:4]
    asking = cut_keys(queries.unflatten(1, (heads, -1)), parts)  # (B, H, m, G, d/m)
    tables = codebook.to(asking.dtype) @ asking.mT * scaling  # (B, H, m, K, G)
    absent = torch.arange(first, first + codes.shape[3], device=codes.device) >= stop
    candidates = codes.masked_fill(absent, 0)
    starts = torch.arange(0, batch * heads * count, count, device=codes.device).view(batch, heads, 1)
    products = [embedding(candidates[:, :, part] + starts, tables[:, :, part].flatten(0, 2)) for part in range(parts)]
    logits = cap_logits(sum(products[1:], products[0]), extras)  # (B, H, n, G)
    logits = logits.masked_fill(absent[:, None], -torch.inf)
    scores = (logits - logits.logsumexp(2, keepdim=True)).exp().sum(-1)
    return pad(scores.masked_fill(absent, -torch.inf), (first, 0), value=-torch.inf)


def encode_reference(keys: Tensor, codebook: Tensor) -> Tensor:
    points = cut_keys(keys, codebook.shape[2])
    return find_nearest(points, codebook.to(points.dtype))[0]


def choose_by_codes_reference(
    queries: Tensor,
    keys: Tensor,
    codes: Tensor,
    codebook: Tensor,
    scaling: float,
    first: int,
    stop: Tensor,
    last: Tensor,
    rows: Tensor,
    extras: SoftmaxExtras | None = None,
) -> None:
    at = last.long().view(1)
    codes.index_copy_(3, at - first, encode_reference(keys.index_select(2, at), codebook))
    if rows.numel():
        scores = code_scores_reference(queries, codes, codebook, scaling, first, stop, extras)
        rows.copy_(top_k_indices(scores, rows.shape[2], implementation="reference"))


def find_centroids_reference(keys: Tensor, centroids: Tensor, iterations: int) -> Tensor:
    shape, count = centroids.shape, centroids.shape[3]
    points = cut_keys(keys, shape[2]).flatten(0, 2)
    centroids, squares = centroids.to(points.dtype).flatten(0, 2), points.square().sum(-1)
    for _ in range(iterations):
        codes, nearness = find_nearest(points, centroids)
        sums, sizes = (multiply_members if points.is_cuda else add_members)(points, codes, count)
        empty, centroids = sizes == 0, sums / sizes.clamp(min=1)
        if empty.any():  # the first empty centroid moves to the farthest point, and so on
            order = (empty.cumsum(-2) - 1).clamp(min=0)
            farthest = (squares - nearness).argsort(dim=-1, descending=True, stable=True)[..., None].gather(-2, order)
            centroids = torch.where(empty, points.gather(-2, farthest.expand_as(centroids)), centroids)
    return centroids.view(shape).clone()  # also without iterations


def add_members(points: Tensor, codes: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Add up the points of each centroid, on a CPU. A GPU would add them in no fixed order.

    Args:
        points: (P, n, e)
        codes: The centroid of each point, (P, n).
        count: Number of centroids, K.

    Returns:
        The sums, (P, K, e), and the numbers of points, (P, K, 1).
    """
    total = len(points) * count
    index = (codes + torch.arange(0, total, count, device=codes.device)[:, None]).flatten()
    sums = points.new_zeros(total, points.shape[2]).index_add_(0, index, points.flatten(0, 1))
    return sums.view(-1, count, points.shape[2]), index.bincount(minlength=total).view(-1, count, 1)


def multiply_members(points: Tensor, codes: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Do the same as `add_members` by products with ones and zeros, whose order is fixed on a GPU too."""
    numbers = torch.arange(count, device=codes.device)[:, None]
    sums, sizes = points.new_zeros(len(points), count, points.shape[2]), points.new_zeros(len(points), count, 1)
    pieces = split_points(points, sums)
    for some, some_codes in zip(pieces, codes.split([piece.shape[1] for piece in pieces], 1), strict=True):
        members = (some_codes[:, None] == numbers).to(points.dtype)
        sums, sizes = torch.baddbmm(sums, members, some), sizes + members.sum(-1, keepdim=True)
    return sums, sizes

"""Cut keys into sub-vectors and find their nearest centroids, in PyTorch."""

import torch
from torch import Tensor

DISTANCES = 1 << 20  # distances that are computed together; as many as a CPU's cache holds
MOST_DISTANCES = 1 << 25  # the same on a GPU
PAIRED = 64  # most centroids of a part whose pairs are counted
HELD = 32768  # most logits of pairs that a program of `pairs` holds
MOST_NUMBERS = 8192  # most numbers of a part's centroids that a program of `clusters` can hold beside the rows
COUNTABLE = 1 << 20  # most rows whose pairs are counted; then three counts, with those of later rows, fit 63 bits


def cut_keys(keys: Tensor, parts: int) -> Tensor:
    """Cut keys (…, n, d) into sub-vectors, (…, m, n, d/m) in float32, or in float64 for float64 keys."""
    dtype = torch.float64 if keys.dtype == torch.float64 else torch.float32
    return keys.to(dtype).unflatten(-1, (parts, -1)).transpose(-3, -2)


def round_up(count: int) -> int:
    """Return the first power of two from `count` on."""
    return 1 << (count - 1).bit_length()


def find_width(count: int) -> int:
    """Return W, the first power of two from `count` and 16 on. Codes i and j of so many centroids are pair i·W + j."""
    return max(16, round_up(count))


def count_pairs(codes: Tensor, count: int, group: int) -> Tensor | None:
    """Return how many rows have each pair of codes, (B, H, W·W) int32, as `find_width` numbers pairs.

    Returns None if no kernel uses them: if rows have another number of codes than two, if there are more than PAIRED
    centroids or more than COUNTABLE rows, or if the queries of a KV head have more than HELD logits of pairs.

    Args:
        codes: Codes of the rows, (B, H, m, n) uint8.
        count: Number of centroids of a part, K.
        group: Number of queries of a KV head, G.
    """
    wide = find_width(count)
    if codes.shape[2] != 2 or codes.shape[3] > COUNTABLE or count > PAIRED or wide * wide * round_up(group) > HELD:
        return None
    pair = codes[:, :, 0].long() * wide + codes[:, :, 1]
    none = torch.zeros(*pair.shape[:2], wide * wide, dtype=torch.int32, device=codes.device)
    return none.scatter_add_(2, pair, torch.ones_like(pair, dtype=torch.int32))


def find_nearest(points: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Find the nearest of the centroids (…, K, e), K at most 256, of each point p (…, n, e).

    Of equally near centroids the first one is taken.

    Returns:
        The centroid's number, (…, n) uint8, and its nearness 2·p·c - |c|², (…, n), with which |p - c|² is |p|² less the
        nearness.
    """
    shape, count = points.shape[:-1], centroids.shape[-2]
    points, centroids = points.flatten(0, -3), centroids.flatten(0, -3)
    each = centroids[..., 0].numel()  # distances of a point of each part
    norms = centroids.square().sum(-1, keepdim=True)
    behind = torch.arange(count - 1, -1, -1, dtype=points.dtype, device=points.device)[:, None]  # centroids behind each
    pieces, nearest = split_points(points, centroids), []
    room = points.new_empty(each * pieces[0].shape[1])
    for some in pieces:
        nearness = room[: each * some.shape[1]].view(len(points), count, some.shape[1])
        torch.baddbmm(norms, centroids, some.mT, beta=-1, alpha=2, out=nearness)  # faster than (…, n, K)
        largest = nearness.amax(1)
        last = nearness.eq_(largest[:, None]).mul_(behind).amax(1)  # in place, because memory is slower than arithmetic
        nearest.append(((count - 1 - last).to(torch.uint8), largest))
    codes, largest = (torch.cat(parts, -1).view(shape) for parts in zip(*nearest, strict=True))
    return codes, largest


def split_points(points: Tensor, centroids: Tensor) -> tuple[Tensor, ...]:
    """Split points (P, n, e) so that few distances to the centroids (P, K, e) are computed together."""
    most = MOST_DISTANCES if points.is_cuda else DISTANCES
    return points.split(max(1, most // max(1, centroids[..., 0].numel())), -2)

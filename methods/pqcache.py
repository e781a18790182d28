"""pqcache: keep every row; each KV head attends to the rows whose quantised keys promise the largest attention.

Source: the PQCache paper (arXiv 2407.12820); HugoZHL/PQCache at 0b74e12, vq_method/retrieval_based/pq_search.py,
cache_manager.py and multi_core_compressor_v2.py. When a prompt of L tokens has been read, the post-RoPE keys of its
n = L - sinks rows behind the sinks are cut into m sub-vectors of d/m numbers. For each KV head and sub-vector, k-means
(Lloyd) finds 2^b centroids c. A row's code is its nearest centroid in each sub-vector (product quantisation). A decoded
token scores the candidates j, which are the rows between the sinks and the recent window, for the query heads g of a
KV head, with the factor s of the logits:

    w_{g,j} = s·Σ_i q_{g,i}·c_{i,code_i(j)}        S_j = Σ_g softmax_j(w_{g,j})

All query heads of the group attend to the sinks, the recent rows, the candidates of largest S (of equal ones the older
row comes first), and the token itself, with exact keys and values. With the budget ρ and the ratio r there are ⌊n·ρ·r⌋
recent and ⌊n·ρ·(1 - r)⌋ chosen rows. These numbers stay for the whole answer, with budget_of=seen too. A budget that is
a whole number stands for n·ρ. A row behind the prompt gets its nearest centroids and becomes a candidate when it leaves
the recent window. A block of several tokens, such as a question, attends to all rows. So does every token if
n <= `least`, as in the source.

The first centroids are the keys of rows in an order that the sample's seed draws, the same in all layers and heads. Of
equal sub-vectors only the first is taken while there are others (ours). A centroid without rows moves to a row that is
farthest from its own centroid, as in scikit-learn, which the source uses. The source derives the number of
iterations from the speed of the machine (3 to 300) and may stop earlier; here it is fixed.

The source copies the keys of n - recent rows and clusters n, so that the last `recent` ones are stale memory, and the
rows that leave the window first carry codes of those. This file does not imitate it: it clusters the keys of all n
rows. The source's variant with distances in place of products (`ip`) is left out, and so is its cache of blocks on the
GPU, which saves time and changes no result.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor
from torch.nn.functional import embedding

from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import Observation, ReadRequest, State
from kvbench.interfaces.row_reader import CapturedAnswer, ListedRows, RowChoice, RowReader
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting
from kvbench.kernels.row_selection import top_k_indices
from kvbench.validation import SettingError

DISTANCES = 1 << 25  # that are computed together


@dataclass(frozen=True)
class PQCache(Method):
    """Attend only to the rows whose keys, known by their nearest centroids, could give much attention."""

    sinks: int = setting(minimum=0)
    """First rows that are always attended to."""
    ratio: float = setting(minimum=0, maximum=1)
    """Share of the budget that goes to the newest rows, r."""
    parts: int = setting(minimum=1)
    """Number of sub-vectors of a key, m. It divides the head dimension."""
    bits: int = setting(minimum=1, maximum=8)
    """Bits of a code, b: a sub-vector has 2^b centroids, or n if that is fewer. A code takes a byte."""
    iterations: int = setting(minimum=0)
    """Iterations of k-means."""
    least: int = setting(minimum=0)
    """Number of rows behind the sinks up to which a prompt is not clustered, and all rows are attended to."""

    scores = False
    attends_subset = True

    def check(self, layers: int, heads: int, dim: int, sliding: tuple[int, ...], hidden: int) -> None:
        if dim % self.parts:
            raise SettingError(f"method.parts={self.parts}: a divisor of the model's head dimension, {dim}")

    def update(self, observation: Observation, rows: Rows, state: State) -> Mapping[str, Tensor]:
        if observation.last and observation.tokens - self.sinks > self.least:
            keys = rows.keys[:, :, self.sinks :]
            codebook = torch.stack([self.cluster(own, seed) for own, seed in zip(keys, state.seeds, strict=True)])
            state.layer |= {"codebook": codebook, "codes": encode(keys, codebook)}
        elif observation.decoding:
            self.add_codes(rows.keys, state)
        return {}

    def cluster(self, keys: Tensor, seed: int) -> Tensor:
        """Return the centroids of one sample's keys (H, n, d): (H, m, min(2^b, n), d/m) of their dtype."""
        points, count = cut_keys(keys, self.parts), min(1 << self.bits, keys.shape[1])
        order = torch.randperm(keys.shape[1], generator=torch.Generator().manual_seed(seed)).to(keys.device)
        first = find_different(points, order, count)[..., None].expand(-1, -1, -1, points.shape[3])
        return find_centroids(points, points.gather(2, first), self.iterations).to(keys.dtype)

    def add_codes(self, keys: Tensor, state: State) -> None:
        """Add the codes of the rows that have none yet. `keys` (B, H, n, d) are those of all rows."""
        own = state.layer
        if "codes" in own:
            fresh = keys[:, :, self.sinks + own["codes"].shape[3] :]
            own["codes"] = torch.cat([own["codes"], encode(fresh, own["codebook"])], 3)

    def count_rows_of(self, prompt: int, quota: int | None, fraction: Fraction | None) -> tuple[int, int] | None:
        """Return the numbers of recent and of chosen rows, or None if all rows are attended to.

        Args:
            prompt: Tokens of the prompt, L.
            quota: The budget in rows; None for all.
            fraction: The budget if it is a fraction, ρ.
        """
        behind = prompt - self.sinks
        if quota is None or behind <= self.least:
            return None
        total, ratio = Fraction(quota) if fraction is None else fraction * behind, Fraction(repr(float(self.ratio)))
        return None if total >= behind else (int(total * ratio), int(total * (1 - ratio)))

    def read(self, request: ReadRequest, rows: Callable[[], Rows], state: State) -> Tensor | None:
        queries, counts = request.queries, self.count_rows_of(request.prompt, request.quota, request.fraction)
        if queries.shape[2] > 1 or counts is None:
            return None
        own, last = state.layer, torch.tensor(request.first, device=queries.device)
        listed = self.list_rows(queries, own["codes"], own["codebook"], request.scaling, counts, last)
        none = torch.zeros(*queries.shape[:2], request.first + 1, dtype=torch.bool, device=queries.device)
        return none.scatter_(2, listed, True)

    def row_reader(self, answer: CapturedAnswer) -> RowReader | None:
        return CodeReader(self, answer, self.count_rows_of(answer.prompt, answer.quota, answer.fraction))

    def list_rows(
        self, queries: Tensor, codes: Tensor, codebook: Tensor, scaling: float, counts: tuple[int, int], last: Tensor
    ) -> Tensor:
        """List the rows that a token attends to, (B, H·G, k) int64.

        Args:
            queries: The token's queries, (B, H·G, 1, d).
            codes: Codes of the rows behind the sinks, (B, H, m, n). Those from the recent window on are not looked at.
            codebook: (B, H, m, 2^b, d/m)
            scaling: The factor of the logits.
            counts: Numbers of recent and of chosen rows.
            last: The token's own row, without dimensions.
        """
        (recent, chosen), (batch, heads) = counts, codes.shape[:2]
        newest = last - torch.arange(recent, -1, -1, device=last.device)
        parts = [torch.arange(self.sinks, device=last.device), newest]
        listed = torch.cat(parts).expand(batch, heads, -1)
        if chosen:
            waits = torch.arange(codes.shape[3], device=last.device) >= last - recent - self.sinks
            scores = score_codes(queries[:, :, 0], codes, codebook, scaling, waits)
            listed = torch.cat([listed, top_k_indices(scores, chosen) + self.sinks], 2)
        return listed.repeat_interleave(queries.shape[1] // heads, 1)


class CodeReader:
    """Chooses the rows of each token. The codes of all rows that an answer may add lie at fixed addresses."""

    def __init__(self, method: PQCache, answer: CapturedAnswer, counts: tuple[int, int] | None) -> None:
        """Make the tables.

        Args:
            method: The method.
            answer: What the reader is made for.
            counts: Numbers of recent and of chosen rows; None for all rows.
        """
        self.method, self.answer = method, answer
        self.counts = counts or (0, 0)
        self.tables: dict[int, Tensor] = {}  # codes of each layer, unless it attends to all rows
        for layer in answer.all_layers if counts else ():
            known = answer.states[layer].layer["codes"]
            self.tables[layer] = known.new_zeros(*known.shape[:3], answer.seen + answer.tokens - method.sinks)
            self.tables[layer][..., : known.shape[3]] = known

    def choose(self, last: Tensor) -> RowChoice:
        method, answer = self.method, self.answer

        def choose(layer: int, queries: Tensor, keys: Tensor) -> ListedRows | None:
            if layer not in self.tables:
                return None
            codes, codebook = self.tables[layer], answer.states[layer].layer["codebook"]
            own = encode(keys.index_select(2, last[None]), codebook)
            codes.index_copy_(3, (last - method.sinks)[None], own)
            return ListedRows(method.list_rows(queries, codes, codebook, answer.scaling, self.counts, last))

        return choose

    def finish(self, seen: int) -> None:
        for layer in self.answer.all_layers:
            self.method.add_codes(self.answer.keys[layer][:, :, :seen], self.answer.states[layer])


def cut_keys(keys: Tensor, parts: int) -> Tensor:
    """Cut keys (…, n, d) into sub-vectors, (…, m, n, d/m) in float32, or in float64 for float64 keys."""
    dtype = torch.float64 if keys.dtype == torch.float64 else torch.float32
    return keys.to(dtype).unflatten(-1, (parts, -1)).transpose(-3, -2)


def encode(keys: Tensor, codebook: Tensor) -> Tensor:
    """Return the nearest centroids of keys (B, H, n, d), (B, H, m, n) uint8. `codebook` is (B, H, m, 2^b, d/m)."""
    points = cut_keys(keys, codebook.shape[2])
    return find_nearest(points, codebook.to(points.dtype))[0].to(torch.uint8)


def find_nearest(points: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest of the centroids (…, K, e) of each point (…, n, e), and its squared distance: (…, n) each.

    Of equally near centroids the first one is taken.
    """
    norms = centroids.square().sum(-1)[..., None, :]
    found = [(2 * some @ centroids.mT - norms).max(-1) for some in split_points(points, centroids)]
    nearness, index = (torch.cat(own, -1) for own in zip(*found, strict=True))
    return index, points.square().sum(-1) - nearness


def split_points(points: Tensor, centroids: Tensor) -> tuple[Tensor, ...]:
    """Split points (…, n, e) so that their distances to the centroids (…, K, e) fit in memory."""
    return points.split(max(1, DISTANCES // max(1, centroids[..., 0].numel())), -2)


def find_different(points: Tensor, order: Tensor, count: int) -> Tensor:
    """Return the first `count` different points in an order, (…, count): indices of points (…, n, e).

    If there are fewer, repeated ones follow. Points are compared by a hash of their bits.
    """
    bits = (points + 0.0).view(torch.int64 if points.dtype == torch.float64 else torch.int32).long()  # -0.0 becomes 0.0
    factors = torch.randint(1 << 62, points.shape[-1:], generator=torch.Generator().manual_seed(0)).to(points.device)
    hashes, index = (bits * factors).sum(-1)[..., order].sort(dim=-1, stable=True)
    again = torch.zeros_like(hashes, dtype=torch.uint8)
    again.scatter_(-1, index[..., 1:], (hashes[..., 1:] == hashes[..., :-1]).to(torch.uint8))
    return order[again.argsort(dim=-1, stable=True)[..., :count]]


def find_centroids(points: Tensor, centroids: Tensor, iterations: int) -> Tensor:
    """Run k-means (Lloyd) with a fixed number of iterations; equal inputs give equal outputs.

    Args:
        points: (…, n, e)
        centroids: The first centroids, (…, K, e), K at most n.
        iterations: Number of iterations.

    Returns:
        The centroids, (…, K, e).
    """
    count = centroids.shape[-2]
    for _ in range(iterations):
        codes, distances = find_nearest(points, centroids)
        sums, sizes = torch.zeros_like(centroids), torch.zeros_like(centroids[..., :1])
        pieces = split_points(points, centroids)
        for some, own in zip(pieces, codes.split([piece.shape[-2] for piece in pieces], -1), strict=True):
            members = some.new_zeros(*own.shape, count).scatter_(-1, own[..., None], 1).mT  # sums need no atomics
            sums, sizes = sums + members @ some, sizes + members.sum(-1, keepdim=True)
        empty = sizes == 0
        order = (empty.cumsum(-2) - 1).clamp(min=0)  # the first empty centroid moves to the farthest point, and so on
        farthest = distances.topk(count, -1).indices[..., None].gather(-2, order)
        moved = points.gather(-2, farthest.expand_as(centroids))
        centroids = torch.where(empty, moved, sums / sizes.clamp(min=1))
    return centroids


def score_codes(queries: Tensor, codes: Tensor, codebook: Tensor, scaling: float, absent: Tensor) -> Tensor:
    """Return the sum over a group of the softmax of the logits with centroids in place of keys.

    Args:
        queries: (B, H·G, d)
        codes: (B, H, m, n) uint8
        codebook: (B, H, m, 2^b, d/m)
        scaling: The factor of the logits.
        absent: The rows that are no candidates, (n,) bool. Their score is -inf.

    Returns:
        (B, H, n) in float32, or in float64 for float64 queries.
    """
    batch, heads, parts, count = codebook.shape[:4]
    asking = cut_keys(queries.unflatten(1, (heads, -1)), parts)  # (B, H, m, G, d/m)
    tables = codebook.to(asking.dtype) @ asking.mT * scaling  # (B, H, m, 2^b, G)
    starts = torch.arange(0, batch * heads * count, count, device=codes.device).view(batch, heads, 1)
    found = [embedding(codes[:, :, part] + starts, tables[:, :, part].flatten(0, 2)) for part in range(parts)]
    logits = sum(found[1:], found[0]).masked_fill(absent[:, None], -torch.inf)  # (B, H, n, G)
    scores = (logits - logits.logsumexp(2, keepdim=True)).exp().sum(-1)
    return scores.masked_fill(absent, -torch.inf)

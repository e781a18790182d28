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
n <= `least`, as in the source, which clusters no keys where there are not more rows than centroids.

The first centroids are the keys of rows in an order that the sample's seed draws, the same in all layers and heads. Of
equal sub-vectors only the first is taken while there are others among the first 4096 of that order (kvbench's own
choice). A centroid without rows moves to a row that is farthest from its own centroid, as in scikit-learn, which the
source uses. The source derives the number of iterations from the speed of the machine (3 to 300) and may stop earlier;
here it is fixed.

The source copies the keys of n - recent rows and clusters n, so that the last `recent` ones are stale memory, and the
rows that leave the window first carry codes of those. This file does not imitate it: it clusters the keys of all n
rows. The source's variant with distances in place of products (`ip`) is left out, and so is its cache of blocks on the
GPU, which saves time and changes no result.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from kvbench.interfaces.layout import Layout
from kvbench.interfaces.method import Captured, Method
from kvbench.interfaces.observation import Observation, ReadRequest, State
from kvbench.interfaces.row_reader import CapturedAnswer, ListedRows, RowChoice, RowReader
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting
from kvbench.kernels.product_quantization import (
    choose_by_codes,
    code_scores,
    count_pairs,
    encode,
    find_centroids,
)
from kvbench.kernels.row_selection import top_k_indices
from kvbench.kernels.softmax_extras import SoftmaxExtras
from kvbench.validation import SettingError

LOOK = 4096  # rows of which the first centroids are chosen


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
    least: int | None = setting(minimum=0)
    """Number of rows behind the sinks up to which a prompt is not clustered, and all rows are attended to. `None`: as
    many as a sub-vector has centroids, 2^b.
    """

    def is_clustered(self, behind: int) -> bool:
        """Whether a prompt with so many rows behind the sinks is clustered."""
        return behind > (1 << self.bits if self.least is None else self.least)

    def check(self, layout: Layout) -> None:
        if layout.dim % self.parts:
            raise SettingError(f"method.parts={self.parts}: a divisor of the model's head dimension, {layout.dim}")

    def update(self, observation: Observation, rows: Rows, state: State) -> Mapping[str, Tensor]:
        if observation.last and self.is_clustered(observation.tokens - self.sinks):
            keys = rows.keys[:, :, self.sinks :]
            codebook = self.cluster(keys, state.seeds)
            state.layer |= {"codebook": codebook, "codes": encode(keys, codebook)}
        elif observation.decoding:
            self.add_codes(rows.keys, state)
        return {}

    def cluster(self, keys: Tensor, seeds: Sequence[int]) -> Tensor:
        """Return the centroids of keys (B, H, n, d), whose samples have seeds: (B, H, m, min(2^b, n), d/m)."""
        count, parts = min(1 << self.bits, keys.shape[2]), keys.unflatten(-1, (self.parts, -1)).transpose(2, 3)
        first = torch.stack([choose_first(sample, seed, count) for sample, seed in zip(parts, seeds, strict=True)])
        start = parts.gather(3, first[..., None].expand(-1, -1, -1, -1, parts.shape[4]))
        return find_centroids(keys, start, self.iterations).to(keys.dtype)

    def add_codes(self, keys: Tensor, state: State) -> None:
        """Add the codes of the rows that have none yet. `keys` (B, H, n, d) are those of all rows."""
        stored = state.layer
        if "codes" in stored:
            fresh = keys[:, :, self.sinks + stored["codes"].shape[3] :]
            stored["codes"] = torch.cat([stored["codes"], encode(fresh, stored["codebook"])], 3)

    def count_rows_of(self, prompt: int, quota: int | None, fraction: Fraction | None) -> tuple[int, int] | None:
        """Return the numbers of recent and of chosen rows, or None if all rows are attended to.

        Args:
            prompt: Tokens of the prompt, L.
            quota: The budget in rows; None for all.
            fraction: The budget if it is a fraction, ρ.
        """
        behind = prompt - self.sinks
        if quota is None or not self.is_clustered(behind):
            return None
        total, ratio = Fraction(quota) if fraction is None else fraction * behind, Fraction(repr(float(self.ratio)))
        return None if total >= behind else (int(total * ratio), int(total * (1 - ratio)))

    def read(self, request: ReadRequest, rows: Callable[[], Rows], state: State) -> Tensor | None:
        queries, counts = request.queries, self.count_rows_of(request.prompt, request.quota, request.fraction)
        if queries.shape[2] > 1 or counts is None:
            return None
        last = torch.tensor(request.first, device=queries.device)
        listed = self.list_rows(queries, state.layer, request.scaling, counts, last, request.extras)
        none = torch.zeros(*listed.shape[:2], request.first + 1, dtype=torch.bool, device=queries.device)
        return none.scatter_(2, listed, True).repeat_interleave(queries.shape[1] // listed.shape[1], 1)

    def row_reader(self, answer: CapturedAnswer) -> RowReader | None:
        return CodeReader(self, answer, self.count_rows_of(answer.prompt, answer.quota, answer.fraction))

    captured = Captured(row_reader=row_reader)

    def list_always(self, recent: int, last: Tensor) -> Tensor:
        """List the sinks, the recent rows and the token's own row, which is `last`, without dimensions: (k,) int64."""
        newest = last - torch.arange(recent, -1, -1, device=last.device)
        return torch.cat([torch.arange(self.sinks, device=last.device), newest])

    def list_rows(
        self,
        queries: Tensor,
        table: Mapping[str, Tensor],
        scaling: float,
        counts: tuple[int, int],
        last: Tensor,
        extras: SoftmaxExtras | None = None,
    ) -> Tensor:
        """List the rows that the query heads of a KV head attend to, (B, H, k) int64.

        Args:
            queries: The token's queries, (B, H·G, 1, d).
            table: The codes of the rows behind the sinks and the codebook, as in the state.
            scaling: The factor of the logits.
            counts: Numbers of recent and of chosen rows.
            last: The token's own row, without dimensions.
            extras: The cap of the logits.
        """
        recent, chosen = counts
        always = self.list_always(recent, last).expand(*table["codes"].shape[:2], -1)
        if not chosen:
            return always
        given = queries[:, :, 0], table["codes"], table["codebook"], scaling, self.sinks, last - recent
        scores = code_scores(*given, extras=extras)
        return torch.cat([always, top_k_indices(scores, chosen)], 2)


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
        self.recent, self.chosen = counts or (0, 0)
        self.tables: dict[int, dict[str, Tensor]] = {}  # of each layer, unless it attends to all rows
        self.counts: dict[int, Tensor] = {}  # of the pairs of codes of the rows before `counted`
        self.counted = answer.seen - self.recent  # all of them are candidates for each token
        behind = self.counted - method.sinks
        for layer in answer.all_layers if counts else ():
            stored = answer.states[layer].layer
            if behind >= self.chosen > 0:
                group = answer.query_heads // stored["codes"].shape[1]
                pairs = count_pairs(stored["codes"][..., :behind], stored["codebook"].shape[3], group)
                self.counts |= {} if pairs is None else {layer: pairs}
            codes = stored["codes"].new_zeros(*stored["codes"].shape[:3], answer.seen + answer.tokens - method.sinks)
            codes[..., : stored["codes"].shape[3]] = stored["codes"]
            self.tables[layer] = {"codes": codes, "codebook": stored["codebook"]}

    def choose(self, last: Tensor) -> RowChoice:
        method, scaling, stop = self.method, self.answer.scaling, last - self.recent
        always, lists = method.list_always(self.recent, last), list[Tensor]()  # one list, which all layers write to

        def choose(layer: int, queries: Tensor, keys: Tensor) -> ListedRows | None:
            if layer not in self.tables:
                return None
            if not lists:
                lists.append(always.new_empty(*keys.shape[:2], len(always) + self.chosen))
                lists[0][..., : len(always)] = always
            codes, codebook = self.tables[layer]["codes"], self.tables[layer]["codebook"]
            chosen_rows = lists[0][..., len(always) :]
            counted = (self.counts[layer], self.counted) if layer in self.counts else None
            given = queries[:, :, 0], keys, codes, codebook, scaling, method.sinks, stop, last, chosen_rows
            choose_by_codes(*given, counted=counted, extras=self.answer.extras.get(layer))
            return ListedRows(lists[0])

        return choose

    def finish(self, seen: int) -> None:
        for layer in self.answer.all_layers:
            state = self.answer.states[layer]
            if layer in self.tables:
                state.layer["codes"] = self.tables[layer]["codes"][..., : seen - self.method.sinks].clone()
            else:
                self.method.add_codes(self.answer.keys[layer][:, :, :seen], state)


def choose_first(points: Tensor, seed: int, count: int) -> Tensor:
    """Choose the rows of the first centroids of points (…, n, e), among LOOK rows: (…, count)."""
    order = torch.randperm(points.shape[-2], generator=torch.Generator().manual_seed(seed))[:LOOK]
    order = order.to(points.device, non_blocking=True)  # so the host does not wait until the prompt is read
    return order[find_different(points[..., order, :], count)]


def find_different(points: Tensor, count: int) -> Tensor:
    """Return the indices of the first `count` different points (…, n, e): (…, count).

    If there are fewer, repeated ones follow. Points are compared by a hash of their bits.
    """
    wide = points if points.dtype == torch.float64 else points.float()
    bits = (wide + 0.0).view(torch.int64 if points.dtype == torch.float64 else torch.int32).long()  # -0.0 becomes 0.0
    factors = torch.randint(1 << 62, points.shape[-1:], generator=torch.Generator().manual_seed(0))
    factors = factors.to(points.device, non_blocking=True)
    hashes, index = (bits * factors).sum(-1).sort(dim=-1, stable=True)
    again = torch.zeros_like(hashes, dtype=torch.uint8)
    again.scatter_(-1, index[..., 1:], (hashes[..., 1:] == hashes[..., :-1]).to(torch.uint8))
    return again.argsort(dim=-1, stable=True)[..., :count]

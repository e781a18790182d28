"""key_geometry: where the keys and the queries of a head lie (KeyDiff, Figures 2, 4, 11, 13-16; CentroidKV, 2, 3).

All keys and queries are those that attention uses, after the rotation. For a KV head with keys k_j and a query head of
its group with queries q_t, with k̄ and q̄ their means over the prompt:

    cosine_of_means     cos(k̄, q̄), for each query head (KeyDiff, Figure 14)
    opposite            share of all query heads in which it is below 0
    cosine_to_mean      shares of cos(k_j, k̄) and of cos(q_t, q̄) over all heads of some layers (Figure 13)
    norm                quantiles of ‖k_j‖ and ‖q_t‖ over all heads of a layer (Figure 15)
    cosine_of_top       cos(k_top, q̄), where k_top is the key that is farthest from KeyDiff's anchor, the mean of
                        k_j/‖k_j‖ (Figure 16)
    aligned             share of all query heads in which it is above 0
    plane               keys, queries, the anchor and the N keys that KeyDiff scores highest on the first two principal
                        components of the keys and queries together, of the first KV head of some layers (Figures 4, 11)
    similarity_64       cos(k_i, k_j) of the first 64 tokens, and attention_64 the probabilities of their queries, the
                        mean over the group, in the heads whose keys are `most` and `least` similar there (Figure 2)
    similarity_map      means of cos(k_i, k_j) over squares of tokens, of the first KV head of some layers (CentroidKV,
                        Figure 2)
    similarity_at       mean of cos(k_i, k_i+x) over tokens i and heads, for each distance x (CentroidKV, Figure 3)
    convex              share of all layers and distances at which its second difference is not negative
    split_gap           share that the alternating split of 14 tokens lacks to the best one, by a layer's similarity_at
                        (kvbench.studies.alternating_split; CentroidKV, Theorem 6.1); alternating: share of layers in
                        which it lacks nothing

Queries are looked at in `SAMPLED` random positions if the prompt has more; their mean is over all positions.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Unpack

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvbench.interfaces.observation import Observation
from kvbench.interfaces.rows import Rows
from kvbench.kernels.window_attention import window_probabilities
from kvbench.store.study_lines import Line
from kvbench.studies.alternating_split import ROUNDING, measure_gaps
from kvbench.studies.study import (
    LayerStudy,
    Memory,
    Part,
    count_bins,
    draw_positions,
    find_plane,
    find_quantiles,
    list_shares,
    take_block,
    widen,
)

SAMPLED = 1024  # positions whose queries are looked at one by one
BINS = 40  # bins of a histogram of cosines
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
FIRST = 64  # tokens of the maps of KeyDiff's Figure 2
POINTS = 100  # keys, and as many queries, of a scatter
TOP = 0.05  # share of the keys that a scatter shows as the highest-scored ones
SQUARES = 24  # rows and columns of a map of similarities
CLOSE, STEP = 64, 8  # beyond the distance CLOSE, only every STEP-th distance is listed
DISTANCES = 256  # tokens: the largest distance of CentroidKV's Figure 3
SPLIT = 7  # half of the tokens of which all splits are tried
STARTS = 512  # random tokens whose similarity with those behind them is measured


@dataclass(frozen=True)
class KeyGeometry(LayerStudy):
    """Where keys and queries lie."""

    name: ClassVar[str] = "key_geometry"

    def update(self, memory: Memory, observation: Observation, rows: Rows) -> None:
        queries = observation.queries[0]
        if not memory:
            positions = draw_positions(SAMPLED, observation.prompt, self.seed)
            memory |= {"sum": 0, "sampled": [], "first": [], "positions": positions}
        memory["sum"] = memory["sum"] + widen(queries).sum(1)
        memory["sampled"].append(widen(queries[:, take_block(memory["positions"], observation)]))
        if observation.first < FIRST:
            memory["first"].append(widen(queries[:, : FIRST - observation.first]))
        if not observation.last:
            return
        keys, mean = rows.keys[0], memory["sum"] / observation.tokens
        sampled, first = torch.cat(memory["sampled"], 1), torch.cat(memory["first"], 1)
        memory.clear()
        memory |= compare_means(keys, sampled, mean)
        memory |= measure_distances(keys, self.seed)
        memory["similarity"] = cosines(widen(keys[:, :FIRST]), widen(keys[:, :FIRST])).cpu()
        few = widen(keys[:, :FIRST])[None]
        memory["attention"] = window_probabilities(first[None], few, None, observation.scaling)[0].cpu()
        if observation.layer in self.list_shown(observation.cut_layers):
            group = sampled.shape[0] // rows.heads
            memory["plane"] = project(widen(keys[0]), sampled[:group].flatten(0, 1), self.seed)
            memory["map"] = average_squares(keys[0]).cpu()

    def finish(self, memories: Mapping[int, Memory], first: bool) -> Iterable[Line]:
        shown = self.list_shown(list(memories))
        for layer, memory in memories.items():
            yield from self._list_layer(layer, memory, layer in shown)
        if first:
            yield from self._list_maps(memories)
        yield from self._list_distances(memories)
        yield self.claim("opposite", [memory["cosine_of_means"] < 0 for memory in memories.values()])
        yield self.claim("aligned", [memory["cosine_of_top"] > 0 for memory in memories.values()])
        yield self.claim("convex", [memory["convex"] for memory in memories.values()])
        yield self.claim("alternating", [memory["split_gap"] <= ROUNDING for memory in memories.values()])

    def _list_layer(self, layer: int, memory: Memory, shown: bool) -> Iterator[Line]:
        for quantity in ("cosine_of_means", "cosine_of_top"):
            for head, value in enumerate(memory[quantity].tolist()):
                yield self.line(quantity, value, layer=layer, head=head, n=memory["tokens"])
        for series in ("keys", "queries"):
            if shown:
                counts = memory[f"cosine_{series}"]
                yield from list_shares(self, "cosine_to_mean", counts, -1, 1, series=series, layer=layer)
            for share, value in zip(QUANTILES, memory[f"norm_{series}"].tolist(), strict=True):
                yield self.line("norm", value, series=series, layer=layer, x=share, n=memory[f"count_{series}"])

    def _list_distances(self, memories: Mapping[int, Memory]) -> Iterator[Line]:
        shown = self.list_shown(list(memories))
        for layer, memory in memories.items():
            curve = memory["at_distance"]
            yield self.line("split_gap", memory["split_gap"], layer=layer)
            every = range(1, len(curve) + 1) if layer in shown else ()
            for x in (x for x in every if x < CLOSE or x % STEP == 0):
                yield self.line("similarity_at", curve[x - 1], layer=layer, x=x, n=memory["starts"])

    def _list_maps(self, memories: Mapping[int, Memory]) -> Iterator[Line]:
        """Yield what is shown of one prompt: maps and scatters."""
        spread = {
            (layer, head): float(memory["similarity"][head].mean())
            for layer, memory in memories.items()
            for head in range(memory["similarity"].shape[0])
        }
        for series, (layer, head) in (
            ("least", min(spread, key=spread.__getitem__)),
            ("most", max(spread, key=spread.__getitem__)),
        ):
            chosen = memories[layer]
            maps = {"similarity_64": chosen["similarity"][head], "attention_64": chosen["attention"][head].mean(0)}
            for quantity, values in maps.items():
                yield from self._list_map(quantity, values, 1, series=series, layer=layer, head=head)
        for layer, memory in memories.items():
            if "map" in memory:
                size = memory["tokens"] / memory["map"].shape[0]
                yield from self._list_map("similarity_map", memory["map"], size, layer=layer, head=0)
            for series, points in memory.get("plane", {}).items():
                for x, y in points.tolist():
                    yield self.line("plane", y, series=series, layer=layer, head=0, x=x)

    def _list_map(self, quantity: str, values: Tensor, size: float, **place: Unpack[Part]) -> Iterator[Line]:
        for i, row in enumerate(values.tolist()):
            for j, value in enumerate(row[: i + 1]):
                yield self.line(quantity, value, x=j * size, y=i * size, **place)


def cosines(x: Tensor, y: Tensor) -> Tensor:
    """Return the cosines of all pairs, (…, n, m), of x (…, n, d) and y (…, m, d). A vector of zeros has 0."""
    return normalize(x, dim=-1) @ normalize(y, dim=-1).mT


def compare_means(keys: Tensor, sampled: Tensor, mean: Tensor) -> Memory:
    """Compare the keys and queries of a layer with their means.

    Args:
        keys: (H, n, d)
        sampled: Queries of some positions, (H·G, m, d).
        mean: The mean of all queries, (H·G, d).

    Returns:
        ``cosine_of_means`` and ``cosine_of_top``, (H·G,); for keys and queries the counts of cosines to their mean in
        bins, and quantiles of their norms.
    """
    heads, tokens = keys.shape[:2]
    group = sampled.shape[0] // heads
    cosine_counts, norms, centres, tops = torch.zeros(BINS, dtype=torch.float64), [], [], []
    for head_keys in keys:  # one head at a time, so that few wide copies are held
        wide = widen(head_keys)
        centre = wide.mean(0)
        anchor = normalize(wide, dim=-1).mean(0)
        tops.append(wide[cosines(anchor[None], wide)[0].argmin()])
        centres.append(centre)
        cosine_counts += count_bins(cosines(centre[None], wide), -1, 1, BINS)
        norms.append(wide.norm(dim=-1))
    centre, top = (torch.stack(vectors).repeat_interleave(group, 0) for vectors in (centres, tops))
    shares = torch.tensor(QUANTILES, dtype=mean.dtype, device=mean.device)
    return {
        "tokens": tokens,
        "cosine_of_means": (normalize(centre, dim=-1) * normalize(mean, dim=-1)).sum(-1).cpu(),
        "cosine_of_top": (normalize(top, dim=-1) * normalize(mean, dim=-1)).sum(-1).cpu(),
        "cosine_keys": cosine_counts,
        "cosine_queries": count_bins(cosines(mean[:, None], sampled), -1, 1, BINS),
        "norm_keys": find_quantiles(torch.cat(norms), shares),
        "norm_queries": find_quantiles(sampled.norm(dim=-1).flatten(), shares),
        "count_keys": heads * tokens,
        "count_queries": sampled.shape[0] * sampled.shape[1],
    }


def measure_distances(keys: Tensor, seed: int) -> Memory:
    """Return the mean cosine of a key and the one x tokens behind it, over random tokens and all heads, by x.

    Args:
        keys: (H, n, d)
        seed: Seed of the tokens.
    """
    tokens = keys.shape[1]
    most = min(DISTANCES, tokens // 2)
    starts = draw_positions(STARTS, tokens - most, seed).to(keys.device)
    behind = starts[:, None] + torch.arange(1, most + 1, device=keys.device)
    means = []
    for head_keys in keys:
        unit = normalize(widen(head_keys), dim=-1)
        means.append((unit[behind] @ unit[starts][..., None]).mean((0, 2), dtype=torch.float64))
    curve = torch.stack(means).mean(0).cpu()
    convex = curve[2:] - 2 * curve[1:-1] + curve[:-2] >= 0
    gap = measure_gaps(curve[None, : 2 * SPLIT - 1], SPLIT)
    return {"at_distance": curve, "convex": convex, "split_gap": gap, "starts": len(starts) * keys.shape[0]}


def project(keys: Tensor, queries: Tensor, seed: int) -> dict[str, Tensor]:
    """Return points in the plane of the first two principal components of keys and queries together.

    Args:
        keys: Of one head, (n, d).
        queries: Of its group, (m, d).
        seed: Seed of the keys and queries that are shown.

    Returns:
        Points (…, 2) of ``keys``, ``queries``, the ``anchor`` and the ``highest scores``, on the CPU.
    """
    centre, plane = find_plane(torch.cat([keys, queries]))
    anchor = normalize(keys, dim=-1).mean(0)
    order = cosines(anchor[None], keys)[0].argsort()
    best = order[: max(1, int(TOP * len(keys)))]
    chosen = {
        "keys": keys[draw_positions(POINTS, len(keys), seed).to(keys.device)],
        "queries": queries[draw_positions(POINTS, len(queries), seed).to(keys.device)],
        "anchor": anchor[None],
        "highest scores": keys[best[draw_positions(POINTS, len(best), seed).to(keys.device)]],
    }
    return {name: ((points - centre) @ plane).cpu() for name, points in chosen.items()}


def average_squares(keys: Tensor) -> Tensor:
    """Return the mean cosines of all pairs of two pieces of the text, (pieces, pieces), without a matrix of all pairs.

    The mean of x_i·y_j over all i and j is the product of the means of x and of y.

    Args:
        keys: Of one head, (n, d).
    """
    unit = normalize(widen(keys), dim=-1)
    pieces = min(SQUARES, len(unit))
    means = torch.stack([piece.mean(0) for piece in unit.tensor_split(pieces)])
    return means @ means.mT

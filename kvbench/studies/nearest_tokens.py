"""nearest_tokens: how similar a token is to earlier ones, and what is left without them (DeltaKV, Figure 2).

The vector of a token is kv = [K ‖ V], the keys of all KV heads before norm and rotation and their values, as DeltaKV
compresses it. Its references are the `REFERENCES` nearest, in L2, of the earlier tokens 0, s, 2s, … with s = `STRIDE`
(Section 4.1 of the paper). Tokens with fewer of them are left out wherever references count. Its residual is kv minus
the mean of its references.

    cosine     histogram of the cosine with the nearest earlier token; series `all` looks for it among all of them,
               `strided` among the references
    distance   histogram of log₂ of how many tokens away it is, in octaves
    far        share of tokens of all layers whose nearest of all is more than `FAR` tokens away. The first `FAR` + 1
               tokens, which have none there, are left out
    similar    share of tokens of all layers whose cosine with the nearest of all is above `HIGH`
    spectrum   singular values of all vectors together, not centred, divided by the largest of series `kv`; `x` is the
               number of the singular value, from 1 on, of at most `VALUES` of them. Series `kv` and `residual`
    flatness   (Σ σ²)² / Σ σ⁴, the number of equal singular values σ that would be as spread out
    flatter    share of layers in which it is larger for residuals
    norm       histogram of norms, in means of the layer's ‖kv‖
    smaller    share of tokens of all layers whose residual is shorter than kv
    values     histogram of all numbers, in root mean squares of the layer's kv
    near_zero  share of numbers within ±`NEAR` of these units around 0
    peaked     share of layers in which it is larger for residuals

Histograms and spectra are of some layers. Of equally near tokens the latest counts, up to rounding: in the first layer,
the vectors of equal tokens are equal.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import log10
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kvbench.interfaces.observation import Observation
from kvbench.interfaces.rows import Rows
from kvbench.store.study_lines import Line
from kvbench.studies.study import (
    LayerStudy,
    Memory,
    Part,
    collect_unrotated_keys,
    count_bins,
    list_shares,
    widen,
)

REFERENCES, STRIDE = 4, 10
FAR = 16  # tokens
HIGH = 0.9
NEAR = 0.1
BINS = 40  # bins of a histogram
OCTAVES = 20  # of distances
NORMS, ENDS = 2.0, 4.0  # ends of the histograms of norms and of values
VALUES = 40  # singular values
COMPARED = 2**23  # pairs of tokens that are compared at once
HELD = 2**23  # numbers that are copied at once


@dataclass(frozen=True)
class NearestTokens(LayerStudy):
    """How similar a token is to earlier ones, and what is left without them."""

    name: ClassVar[str] = "nearest_tokens"
    wants: ClassVar[tuple[str, ...]] = ("unrotated_keys",)

    def update(self, memory: Memory, observation: Observation, rows: Rows) -> None:
        keys = collect_unrotated_keys(memory, observation)
        if keys is None:
            return
        vectors = widen(torch.cat([part.transpose(0, 1).flatten(1) for part in (keys, rows.values[0])], 1))
        memory.clear()
        for series, stride, count in (("all", 1, 1), ("strided", STRIDE, REFERENCES)):
            nearest, references = find_nearest(vectors, stride, count)
            first = len(vectors) - len(nearest)
            size = max(1, HELD // (count * vectors.shape[1]))
            pairs = zip(vectors[first:].split(size), nearest.split(size), strict=True)
            cosine = torch.cat([cosine_similarity(part, vectors[near], dim=-1) for part, near in pairs])
            apart = torch.arange(first, len(vectors), device=nearest.device) - nearest
            memory[f"cosine {series}"] = count_bins(cosine, -1, 1, BINS)
            memory[f"distance {series}"] = count_bins(apart.double().log2(), 0, OCTAVES, OCTAVES)
            if series == "all":
                memory |= {"similar": (cosine > HIGH).cpu(), "far": (apart[FAR:] > FAR).cpu()}
        residuals = vectors[first:].clone()
        for part, near in zip(residuals.split(size), references.split(size), strict=True):
            part -= vectors[near].mean(1)
        memory |= compare_residuals(
            vectors[first:], residuals, observation.layer in self.list_shown(observation.cut_layers)
        )

    def finish(self, memories: Mapping[int, Memory], first: bool) -> Iterable[Line]:
        shown = self.list_shown(list(memories))
        for layer, memory in memories.items():
            for series in ("kv", "residual"):
                for quantity, count in (("flatness", "tokens"), ("near_zero", "numbers")):
                    yield self.line(
                        quantity, memory[f"{quantity} {series}"], series=series, layer=layer, n=memory[count]
                    )
            if layer in shown:
                yield from self._list_layer(layer, memory)
        for quantity in ("far", "similar", "smaller"):
            yield self.claim(quantity, [memory[quantity] for memory in memories.values()])
        for claim, quantity in (("flatter", "flatness"), ("peaked", "near_zero")):
            more = [memory[f"{quantity} residual"] > memory[f"{quantity} kv"] for memory in memories.values()]
            yield self.claim(claim, [torch.tensor(more)])

    def _list_layer(self, layer: int, memory: Memory) -> Iterator[Line]:
        for series in ("all", "strided"):
            place: Part = {"series": series, "layer": layer}
            yield from list_shares(self, "cosine", memory[f"cosine {series}"], -1, 1, **place)
            yield from list_shares(self, "distance", memory[f"distance {series}"], 0, OCTAVES, **place)
        for series in ("kv", "residual"):
            place = {"series": series, "layer": layer}
            yield from list_shares(self, "norm", memory[f"norm {series}"], 0, NORMS, **place)
            yield from list_shares(self, "values", memory[f"values {series}"], -ENDS, ENDS, **place)
            for number, value in zip(memory["numbered"].tolist(), memory[f"spectrum {series}"].tolist(), strict=True):
                yield self.line("spectrum", value, x=number, n=memory["tokens"], **place)


def find_nearest(vectors: Tensor, stride: int, count: int) -> tuple[Tensor, Tensor]:
    """Find the nearest of the earlier tokens 0, stride, 2·stride, … of each token, in blocks of tokens.

    Distances in L2 are compared by v·c - ‖c‖²/2.

    Args:
        vectors: (n, w), in at least float32.
        stride: Distance between these tokens.
        count: How many of them a token is to have.

    Returns:
        Positions for the last m tokens, which have so many: of the nearest, the latest of equal ones, (m,), and of the
        `count` nearest, (m, count).
    """
    every = torch.arange(len(vectors), device=vectors.device)
    places, candidates = every[::stride], vectors[::stride]
    halves = candidates.square().sum(-1) / 2
    size, first = max(1, COMPARED // len(candidates)), (count - 1) * stride + 1
    nearest, references = [], []
    for start in range(first, len(vectors), size):
        block, positions = vectors[start : start + size], every[start : start + size, None]
        earlier = places[: -(-(start + len(block) - 1) // stride)]  # earlier than the last token of the block
        scores = (block @ candidates[: len(earlier)].mT).sub_(halves[: len(earlier)])
        scores.masked_fill_(earlier >= positions, -torch.inf)
        rounding = 64 * torch.finfo(scores.dtype).eps * block.square().sum(-1, keepdim=True)
        best = scores >= scores.amax(1, keepdim=True) - rounding
        nearest.append(torch.where(best, earlier, -1).amax(1))
        references.append(earlier[scores.topk(count, 1).indices])
    return torch.cat(nearest), torch.cat(references)


def compare_residuals(vectors: Tensor, residuals: Tensor, shown: bool) -> Memory:
    """Compare vectors of a layer with their residuals.

    Args:
        vectors: (m, w)
        residuals: (m, w)
        shown: Whether spectra are computed.
    """
    tokens, width = vectors.shape
    mean, unit = vectors.norm(dim=-1).mean(), vectors.square().mean().sqrt()
    numbers: Memory = {
        "tokens": tokens,
        "numbers": vectors.numel(),
        "smaller": (residuals.norm(dim=-1) < vectors.norm(dim=-1)).cpu(),
        "numbered": torch.logspace(0, log10(width), VALUES).round().long().unique(),
    }
    largest = None
    for series, group in (("kv", vectors), ("residual", residuals)):
        gram = torch.zeros(width, width, dtype=torch.float64, device=group.device)
        values, near_zero = torch.zeros(BINS, dtype=torch.float64), 0
        for some in group.split(max(1, HELD // width)):
            gram += some.double().mT @ some.double()
            values += count_bins(some / unit, -ENDS, ENDS, BINS)
            near_zero += int((some.abs() <= NEAR * unit).sum())
        numbers[f"flatness {series}"] = float(gram.trace() ** 2 / gram.square().sum())
        numbers[f"near_zero {series}"] = near_zero / group.numel()
        numbers[f"norm {series}"] = count_bins(group.norm(dim=-1) / mean, 0, NORMS, BINS)
        numbers[f"values {series}"] = values
        if shown:
            spectrum = torch.linalg.eigvalsh(gram).clamp_(min=0).sqrt().flip(0).cpu()
            largest = spectrum[0] if largest is None else largest
            numbers[f"spectrum {series}"] = (spectrum / largest)[numbers["numbered"] - 1]
    return numbers

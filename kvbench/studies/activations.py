"""activations: whether hidden states and queries are Gaussian (Expected Attention, Figures 1, 7, 8, 9).

The kinds (`series`) are

    hidden         hidden states that enter a layer, before its norm
    normed hidden  those behind the norm, which the projections of queries, keys and values read
    queries        queries before the rotation, behind the layer's norm of queries if it has one
    rotated        queries after the rotation, as attention uses them

A channel is one number of a hidden state, or one number of the queries of one head. What must be Gaussian is the
distribution of a channel over the tokens, so each channel is standardised by its own mean and standard deviation
first. Channels that are constant are left out. With z the standardised values of a channel, and means over all channels
of a layer:

    mean, std      the mean of |mean| and of the standard deviation
    skewness       of |mean z³|
    kurtosis       of mean z⁴ - 3, the excess kurtosis
    modes          of the number of modes: maxima of a density estimate with Gaussian kernels of width 1.06·n^(-1/5)
                   that are at least `LEAST_MODE` as high as the highest
    distance       of the Kolmogorov-Smirnov distance to the normal distribution
    shares         the histogram of z over all channels, in some layers; series `normal` is that of a Gaussian
    channel        the same of the channel whose distance is the median of its layer's, of one prompt; series `normed
                   hidden` and `queries`, which Equation 1 of the paper is about, as are the claims
    close_…        share of channels of all layers whose distance is at most `CLOSE`
    one_mode_…     share of channels of all layers with one mode

The tokens are `SAMPLED` random ones behind the first `SINKS`, which the method leaves out of its statistics too: models
put numbers into them that are hundreds of times larger than those of other tokens.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.special import ndtr

from kvbench.interfaces.observation import Observation
from kvbench.interfaces.rows import Rows
from kvbench.kernels.rerotation import rerotate
from kvbench.store.study_lines import Line
from kvbench.studies.study import (
    LayerStudy,
    Memory,
    count_bins,
    draw_positions,
    find_rotation,
    list_shares,
    take_block,
    widen,
)

SINKS = 4  # first tokens that are left out, as in conf/method/expected_attention.yaml
SAMPLED = 1024  # tokens
BINS = 40  # bins of a histogram
ENDS = 4.0  # ends of a histogram, in standard deviations
FINE = 80  # bins that a density is estimated from
LEAST_MODE = 0.1
CLOSE = 0.05  # our choice: of 1024 tokens, 99 % of Gaussian channels have less than 0.034, a uniform one has 0.06
NUMBERS = ("mean", "std", "skewness", "kurtosis", "modes", "distance")
CLAIMED = {"normed hidden": "states", "queries": "queries"}  # kinds that claims are about -> their names in the claims


@dataclass(frozen=True)
class Activations(LayerStudy):
    """Whether hidden states and queries are Gaussian."""

    name: ClassVar[str] = "activations"
    wants: ClassVar[tuple[str, ...]] = ("hidden", "normed_hidden")

    def update(self, memory: Memory, observation: Observation, rows: Rows) -> None:
        assert observation.hidden is not None and observation.normed_hidden is not None  # `wants_…`
        if not memory:
            memory |= {"positions": draw_positions(SAMPLED, observation.prompt, self.seed, SINKS), "blocks": []}
        places = take_block(memory["positions"], observation)
        states = observation.hidden[0, places], observation.normed_hidden[0, places], observation.queries[0][:, places]
        memory["blocks"].append(states)
        if not observation.last:
            return
        hidden, normed, queries = zip(*memory["blocks"], strict=True)
        rotated = widen(torch.cat(queries, 1))
        cos, sin = find_rotation(observation, memory["positions"])
        plain = rerotate(rotated, (cos, sin), (torch.ones_like(cos), torch.zeros_like(sin)))
        kinds = {
            "hidden": widen(torch.cat(hidden)),
            "normed hidden": widen(torch.cat(normed)),
            "queries": plain.transpose(0, 1).flatten(1),
            "rotated": rotated.transpose(0, 1).flatten(1),
        }
        memory.clear()
        memory |= {series: describe_channels(vectors) for series, vectors in kinds.items()}

    def finish(self, memories: Mapping[int, Memory], first: bool) -> Iterable[Line]:
        shown = self.list_shown(list(memories))
        for layer, kinds in memories.items():
            for series, numbers in kinds.items():
                for quantity in NUMBERS:
                    yield self.line(quantity, numbers[quantity].mean(), series=series, layer=layer, n=numbers["count"])
            if layer in shown:
                yield from self._list_histograms(layer, kinds, first)
        for series, word in CLAIMED.items():
            yield self.claim(f"close_{word}", [kinds[series]["distance"] <= CLOSE for kinds in memories.values()])
            yield self.claim(f"one_mode_{word}", [kinds[series]["modes"] == 1 for kinds in memories.values()])

    def _list_histograms(self, layer: int, kinds: Memory, first: bool) -> Iterator[Line]:
        counts = {series: shares["counts"] for series, shares in kinds.items()} | {"normal": expect_normal()}
        for series, shares in counts.items():
            yield from list_shares(self, "shares", shares, -ENDS, ENDS, series=series, layer=layer)
        if first:
            for series in CLAIMED:
                yield from list_shares(
                    self, "channel", kinds[series]["channel"], -ENDS, ENDS, series=series, layer=layer
                )


def describe_channels(values: Tensor) -> Memory:
    """Describe the distribution of each channel over the tokens.

    Args:
        values: (tokens, channels)

    Returns:
        The `NUMBERS`, (channels,), where `mean` and `skewness` have no sign; ``counts`` and ``channel``, counts in bins
        of all standardised values and of one channel's, (`BINS`,); ``count``, the number of values. On the CPU.
    """
    std, mean = torch.std_mean(values, 0, correction=0)
    moving = std > 0
    values, std, mean = values[:, moving], std[moving], mean[moving]
    z = (values - mean) / std
    distance = measure_distances(z)
    middle = distance.argsort()[len(distance) // 2]
    numbers = {
        "mean": mean.abs(),
        "std": std,
        "skewness": z.pow(3).mean(0).abs(),
        "kurtosis": z.pow(4).mean(0) - 3,
        "modes": count_modes(z),
        "distance": distance,
    }
    return {name: per_channel.double().cpu() for name, per_channel in numbers.items()} | {
        "counts": count_bins(z, -ENDS, ENDS, BINS),
        "channel": count_bins(z[:, middle], -ENDS, ENDS, BINS),
        "count": z.numel(),
    }


def measure_distances(z: Tensor) -> Tensor:
    """Return the Kolmogorov-Smirnov distance of each column of z (n, channels) to the normal distribution."""
    below = ndtr(z.sort(0).values)
    steps = torch.arange(len(z) + 1, dtype=z.dtype, device=z.device)[:, None] / len(z)
    return torch.maximum((steps[1:] - below).amax(0), (below - steps[:-1]).amax(0))


def count_modes(z: Tensor) -> Tensor:
    """Return the number of modes of each column of z (n, channels), which is standardised."""
    tokens, channels = z.shape
    place = ((z + ENDS) / (2 * ENDS) * FINE).floor().clamp_(0, FINE - 1).long()
    place += torch.arange(channels, device=z.device) * FINE
    counts = torch.bincount(place.flatten(), minlength=channels * FINE).view(channels, FINE).to(z.dtype)
    middles = torch.arange(FINE, dtype=z.dtype, device=z.device) * (2 * ENDS / FINE)
    width = 1.06 * tokens**-0.2
    density = counts @ (-0.5 * ((middles[:, None] - middles) / width).square()).exp()
    none = density.new_zeros(channels, 1)
    before, behind = torch.cat([none, density[:, :-1]], 1), torch.cat([density[:, 1:], none], 1)
    high = density >= LEAST_MODE * density.amax(1, keepdim=True)
    return ((density > before) & (density >= behind) & high).sum(1)


def expect_normal() -> Tensor:
    """Return the probabilities of the bins under the normal distribution, with what lies outside in the last ones."""
    inner = torch.linspace(-ENDS, ENDS, BINS + 1, dtype=torch.float64)[1:-1]
    none = torch.zeros(1, dtype=torch.float64)
    return torch.cat([none, ndtr(inner), none + 1]).diff()

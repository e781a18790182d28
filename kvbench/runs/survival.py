"""Measure which of the read tokens are held when an answer begins, and find where among them a target stands.

The positions 0 … n - 1 are divided into m = min(BINS, n) bins: position p lies in bin ⌊p·m/n⌋.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from kvbench.cache.storage import StoredRows
from kvbench.interfaces.task import Sample
from kvbench.runs.prompt import Prompt

BINS = 64  # as many as a narrow screen can show; a record has two digits for each


@torch.inference_mode()
def measure_survival(layers: Sequence[StoredRows], tokens: int) -> list[str]:
    """Return the share of tokens that are held in each bin, as a mean over layers and KV heads.

    A merged row counts at its position.

    Args:
        layers: The rows of each layer.
        tokens: The number of tokens that were read.

    Returns:
        For each sample, the percentages of its bins with two hexadecimal digits each, for `bytes.fromhex`.
    """
    bins = min(BINS, tokens)
    edges = [-(-number * tokens // bins) for number in range(bins + 1)]
    devices = {rows.device for rows in layers}
    places = {device: torch.tensor(edges, dtype=torch.int32, device=device) for device in devices}
    alike: dict[Hashable, list[StoredRows]] = {}
    for rows in layers:
        cut = rows.even and rows.places is not None and not rows.tail
        alike.setdefault((rows.device, rows.shape, rows.longest) if cut else id(rows), []).append(rows)
    # of each group of layers the rows that are held, (B, bins)
    parts = [rank_together(group, places[group[0].device]).diff().sum((0, 2)) for group in alike.values()]
    held = torch.stack([part.to(parts[0].device) for part in parts]).sum(0).tolist()
    heads = sum(rows.shape[1] for rows in layers)
    most = [heads * (stop - start) for start, stop in zip(edges, edges[1:], strict=False)]
    return [
        bytes((200 * count + of) // (2 * of) for count, of in zip(sample, most, strict=True)).hex() for sample in held
    ]


def rank_together(layers: Sequence[StoredRows], places: Tensor) -> Tensor:
    """Return how many rows each head holds before each of m positions, (layers, B, H, m) int64.

    Args:
        layers: The rows of one layer, or those of several that were cut to equal numbers of rows.
        places: The positions, (m,) int32 on the device of the rows.
    """
    if len(layers) == 1:
        return layers[0].rank_of(places)[None]
    held = torch.stack([rows.places.view(*rows.shape, -1) for rows in layers if rows.places is not None])
    return torch.searchsorted(held, places.expand(*held.shape[:3], -1).contiguous())


def find_evidence(sample: Sample, prompt: Prompt, tokens: int) -> list[int]:
    """Find the bins in which a target stands in the sample's context, as whole words.

    Args:
        sample: The sample; its answers are the targets.
        prompt: Its prompt.
        tokens: The number of tokens that were read.
    """
    bins = min(BINS, tokens)
    evidence: set[int] = set()
    for target in filter(None, map(str.strip, sample.answers)):
        begin, end = (r"\b" if re.match(r"\w", edge, re.ASCII) else "" for edge in (target[0], target[-1]))
        for match in re.finditer(begin + re.escape(target) + end, sample.context, re.ASCII):
            first, last = bisect_right(prompt.ends, match.start()), bisect_left(prompt.ends, match.end())
            evidence.update(range(first * bins // tokens, last * bins // tokens + 1))
    return sorted(evidence)

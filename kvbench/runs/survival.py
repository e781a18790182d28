"""Measure which of the read tokens are held when an answer begins, and find where among them a target stands.

The positions 0 … n - 1 are divided into m = min(BINS, n) bins: position p lies in bin ⌊p·m/n⌋.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import torch

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
    parts = [rows.rank_of(places[rows.device]).diff().sum(1) for rows in layers]  # (B, bins) each
    held = torch.stack([part.to(parts[0].device) for part in parts]).sum(0).tolist()
    heads = sum(rows.shape[1] for rows in layers)
    most = [heads * (stop - start) for start, stop in zip(edges, edges[1:], strict=False)]
    return [bytes((200 * own + of) // (2 * of) for own, of in zip(sample, most, strict=True)).hex() for sample in held]


def find_evidence(sample: Sample, prompt: Prompt, tokens: int) -> list[int]:
    """Find the bins in which a target stands in the sample's context, as whole words.

    Args:
        sample: The sample; its answers are the targets.
        prompt: Its prompt.
        tokens: The number of tokens that were read.
    """
    bins = min(BINS, tokens)
    found: set[int] = set()
    for target in filter(None, map(str.strip, sample.answers)):
        begin, end = (r"\b" if re.match(r"\w", edge, re.ASCII) else "" for edge in (target[0], target[-1]))
        for match in re.finditer(begin + re.escape(target) + end, sample.context, re.ASCII):
            first, last = bisect_right(prompt.ends, match.start()), bisect_left(prompt.ends, match.end())
            found.update(range(first * bins // tokens, last * bins // tokens + 1))
    return sorted(found)

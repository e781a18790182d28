"""kept_volume: the volume that the keys span that Sink, TOVA and KeyDiff keep (KeyDiff, Figure 12).

Each method reads the prompt in blocks of 128 and keeps N = min(2048, half of the prompt) rows. For the kept keys K, (N,
d), of a layer and KV head, as its run wrote them, after the rotation:

    volume          shares of log det(KᵀK) / d over all layers and KV heads. It is the mean logarithm of the squares of
                    K's singular values. det(K Kᵀ), which the paper prints, is 0 if N is larger than d. If N is smaller
                    than d, the N singular values count
    volume_unit     the same for keys of norm 1, which span more only if they point to more directions
    wider_<method>  share of layers and KV heads in which KeyDiff's volume is larger than the method's, and
                    wider_unit_<method> for keys of norm 1
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvbench.engine.generation import GenerationContext
from kvbench.store.study_lines import Line
from kvbench.studies.kept_planes import COMPARED, list_block_readings
from kvbench.studies.policy_study import Policy, PolicyStudy, Reading
from kvbench.studies.study import Memory, count_bins, list_shares

ROWS = 2048  # N
LOW, HIGH, BINS = -8.0, 16.0, 96  # of the histogram


@dataclass(frozen=True)
class KeptVolume(PolicyStudy):
    """The volume that kept keys span."""

    name: ClassVar[str] = "kept_volume"
    policies: ClassVar[tuple[Policy, ...]] = COMPARED

    def list_readings(self, tokens: int, first: bool) -> Sequence[Reading]:
        return list_block_readings(ROWS, tokens)

    def inspect(self, memory: Memory, reading: Reading, context: GenerationContext, rest: Tensor) -> None:
        kept = [layer.rows.view().keys[0] for layer in context.own_layers]
        for quantity, unit in (("volume", False), ("volume_unit", True)):
            volumes = [measure_volumes(keys, unit).cpu() for keys in kept]
            memory[quantity, reading.policy.method] = torch.cat(volumes)

    def finish(self, memory: Memory, first: bool) -> Iterable[Line]:
        for (quantity, method), volumes in memory.items():
            counts = count_bins(volumes, LOW, HIGH, BINS)
            yield from list_shares(self, quantity, counts, LOW, HIGH, series=method)
        for other in ("tova", "sink"):
            for quantity, claim in (("volume", "wider"), ("volume_unit", "wider_unit")):
                yield self.claim(f"{claim}_{other}", [memory[quantity, "keydiff"] > memory[quantity, other]])


def measure_volumes(keys: Tensor, unit: bool) -> Tensor:
    """Return the mean logarithm of the squares of the singular values of each head's keys, (H,) float64.

    Values below the rounding error of the largest one count as that error.

    Args:
        keys: (H, n, d)
        unit: Whether keys are divided by their norms.
    """
    wide = keys.double()
    wide = normalize(wide, dim=-1) if unit else wide
    gram = wide.mT @ wide if wide.shape[1] >= wide.shape[2] else wide @ wide.mT
    squares = torch.linalg.eigvalsh(gram)
    least = squares[:, -1:] * squares.shape[1] * torch.finfo(squares.dtype).eps
    return squares.clamp(min=least).log().mean(-1)

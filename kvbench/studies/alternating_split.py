"""alternating_split: CentroidKV's Theorem 6.1, by enumeration of all splits.

For a function f of distances that decreases and is convex, f(1)-f(2) ≥ f(2)-f(3) ≥ … ≥ 0, the theorem says that among
all splits of 1, …, 2n into two halves A and B, the alternating one has the largest sum of f(|x-y|) over x in A, y in B.

    gap             the largest share that the alternating split lacks to the best one, for n = x, over functions
    convex, other   (claims) share of functions for which it is the best one: random decreasing convex functions, as the
                    theorem asks, and random decreasing ones that are not convex
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.interfaces.layout import Layout
from kvbench.store.study_lines import Line
from kvbench.studies.study import ClosedForm, ModelConfig

SIZES = tuple(range(2, 8))  # n; 7 has 1716 splits
FUNCTIONS = 200
ROUNDING = 1e-12


@dataclass(frozen=True)
class AlternatingSplit(ClosedForm):
    """Whether alternate tokens are the best two halves of a chunk."""

    name: ClassVar[str] = "alternating_split"

    def compute(self, layout: Layout, config: ModelConfig) -> Iterable[Line]:
        draw = torch.Generator().manual_seed(self.seed)
        best: dict[str, list[Tensor]] = {"convex": [], "other": []}
        for size in SIZES:
            slopes = torch.rand(FUNCTIONS, 2 * size - 1, generator=draw, dtype=torch.float64)
            for claim, steps in (("convex", slopes.sort(-1, descending=True).values), ("other", slopes)):
                functions = steps.flip(-1).cumsum(-1).flip(-1)  # the last value is the last step, above 0
                gaps = measure_gaps(functions, size)
                yield self.line("gap", gaps.amax(), series=claim, x=size, n=FUNCTIONS)
                best[claim].append(gaps <= ROUNDING)
        for claim, instances in best.items():
            yield self.claim(claim, instances)


def measure_gaps(functions: Tensor, size: int) -> Tensor:
    """Return 1 - sum of the alternating split / largest sum of all splits, for each function.

    Args:
        functions: Values at the distances 1, …, 2n-1, (functions, 2n-1).
        size: n
    """
    halves = [(0, *rest) for rest in combinations(range(1, 2 * size), size - 1)]  # A holds 0
    sides = torch.ones(len(halves), 2 * size, dtype=functions.dtype).scatter(1, torch.tensor(halves), -1)
    # a pair at some distance is in different halves where the product of its signs is -1
    counts = torch.stack([(1 - sides[:, x:] * sides[:, :-x]).sum(-1) / 2 for x in range(1, 2 * size)])
    sums = functions @ counts
    alternating = sums[:, halves.index(tuple(range(0, 2 * size, 2)))]
    return 1 - alternating / sums.amax(-1)

"""Compute which true difference a planned number of samples can tell apart, before a study runs.

The difference of two cells is a paired mean over k subtasks of n_h samples, each subtask weighing the same
(kvbench.analysis.intervals). With a standard deviation s of a sample's difference, its standard error is

    error = s √(Σ_h 1 / n_h) / k

and the smallest true difference that an interval with the quantile q excludes from 0 in a share p of all studies is
(t_q + t_p) · error with Σ (n_h - 1) degrees of freedom. Source: Cohen 1988, "Statistical Power Analysis for the
Behavioral Sciences", chapter 2; for evaluations Miller 2024, arXiv 2411.00640, Section 5. Samples are taken to be drawn
one by one: samples that share a context count for less.

s comes from cells that were measured before, as the median over their 95 % intervals (`estimate_deviation`). Otherwise
it is DEVIATION, which is what SmolLM2's cells have on RULER: about 40 points, as when one sample of six is lost or
gained.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from scipy.special import stdtrit

from kvbench.analysis.intervals import FEW, TAIL
from kvbench.analysis.joint_signs import ERROR
from kvbench.analysis.result_lines import Line

POWER = 0.8
DEVIATION = 40.0  # points, where no cell was measured


@dataclass(frozen=True)
class Power:
    """The smallest true differences that are shown in POWER of all studies, in points.

    Attributes:
        pair: Between two cells that were named beforehand. It is also the smallest margin at which a cell that is
            truly equal to the full cache is shown to be no worse.
        full: Between a cell and the full cache, where all cells of the column are compared with it.
        ranks: Between two cells of the column, where all pairs are compared.
    """

    pair: float
    full: float
    ranks: float


def compute_power(deviation: float, samples: Sequence[int], cells: int) -> Power:
    """Compute the smallest differences that can be told apart.

    Joint comparisons count at their first step, where the level is the strictest: that of the last difference to be
    shown is the level of a single one.

    Args:
        deviation: Standard deviation of the difference of one sample, in points.
        samples: Number of samples of each subtask, at least 2.
        cells: Number of cells of the column.
    """
    pairs = cells * (cells - 1) // 2
    return Power(*(compute_reach(deviation, samples, comparisons) for comparisons in (1, cells, pairs)))


def compute_reach(deviation: float, samples: Sequence[int], comparisons: int) -> float:
    """Compute the smallest difference that is shown in POWER of all studies, in points.

    Args:
        deviation: Standard deviation of the difference of one sample, in points.
        samples: Number of samples of each subtask, at least 2.
        comparisons: Number of differences that are tested together.
    """
    error = deviation * math.sqrt(math.fsum(1 / count for count in samples)) / len(samples)
    freedom = sum(samples) - len(samples)
    tail = 1 - ERROR / 2 / max(comparisons, 1)
    return float(stdtrit(freedom, tail) + stdtrit(freedom, POWER)) * error


def estimate_deviation(lines: Iterable[Line]) -> float | None:
    """Return the median standard deviation of a sample's difference from the full cache, in points.

    Cells in which few samples differ are left out, because their intervals come from exact bounds.

    Args:
        lines: Measured cells.

    Returns:
        The median; None if no cell remains.
    """
    known = []
    for line in lines:
        if line["low"] is not None and line["high"] is not None and line["lost"] + line["gained"] >= FEW:
            error = (line["high"] - line["low"]) / 2 / float(stdtrit(line["n"] - 1, TAIL))
            known.append(error * math.sqrt(line["n"]))
    return median(known) if known else None

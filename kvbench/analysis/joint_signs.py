"""Say which of many paired changes are losses or gains, which cells lose little against the full cache, and ranks.

Joint signs. Of 38 intervals at 95 %, two are expected to leave out a true 0. A count of losses and gains over the
cells of a table therefore comes from Holm's step-down procedure on the intervals of kvbench.analysis.intervals: of k
changes, those whose interval at the level 1 - 0.05 / k leaves out 0 have a sign; then the same with the changes that
are left and their number, until none is added. The chance that any sign is wrong is at most 5 %, whatever the changes
have in common. Source: Holm 1979, "A Simple Sequentially Rejective Multiple Test Procedure", Theorem 1; that the
direction may be read off too: Shaffer 1980, "Control of Directional Errors with Stagewise Rejective Multiple Test
Procedures".

Margins. An interval that contains 0 does not say that a cell is as good as the full cache: it may be wide. A cell is
shown to lose at most m only if the lower end of its difference's 95 % interval is above -m. The margin m is
MARGIN points, and no more than a tenth of the full cache's score: within 3 points of a full cache that scores 8 is
little. Otherwise it is not shown. A cell that truly loses m is wrongly shown to lose less in about 2.5 % of the cases
(docs/statistics.md has simulated numbers). Each cell is judged by its own interval. Sources: CONSORT for
non-inferiority trials, Piaggio et al. 2012; that a margin must keep a share of the effect: FDA 2016, "Non-Inferiority
Clinical Trials to Establish Effectiveness".
"""

from collections import Counter
from collections.abc import Sequence

from kvbench.analysis.intervals import TOLERANCE
from kvbench.analysis.paired import PairedScores, compare_averages

ERROR = 0.05  # chance that any sign of a table is wrong
MARGIN = 3.0  # points
SHARE = 0.1  # of the full cache's score that a margin may be at most


def sign_changes(averages: Sequence[tuple[Sequence[PairedScores], Sequence[float] | None]]) -> list[int]:
    """Return the sign of each paired difference, jointly: -1 or 1 if it is below or above 0, and 0 if neither is shown.

    They come from Holm's procedure, as this module's docstring says.

    Args:
        averages: The subtasks and the weights of each average, as in `kvbench.analysis.paired.compare_averages`.

    Raises:
        ValueError: As in `compare_averages`.
    """
    signs = [0] * len(averages)
    left = list(range(len(averages)))
    while left:
        changes = compare_averages([averages[place] for place in left], 1 - ERROR / 2 / len(left))
        for place, change in zip(left, changes, strict=True):
            signs[place] = sign_interval(change.low, change.high)
        remaining = [place for place in left if signs[place] == 0]
        if len(remaining) == len(left):
            break
        left = remaining
    return signs


def sign_interval(low: float | None, high: float | None) -> int:
    """Return -1 or 1 for an interval below or above 0, and 0 for one that contains 0 or is unknown."""
    if low is None or high is None:
        return 0
    return (low > TOLERANCE) - (high < -TOLERANCE)


def find_margin(full_score: float, points: float = MARGIN) -> float:
    """Return the margin in points for a full cache of this score (0 to 100)."""
    return min(points, SHARE * full_score)


def is_no_worse(low: float | None, margin: float) -> bool:
    """Return whether the lower end of a difference's interval shows that it is above -margin."""
    return low is not None and low > -margin + TOLERANCE


def bound_ranks(better: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the lowest and the highest rank that each cell of a class may have, counted from 1.

    A cell ranks behind those that score more for certain, and before those that score less for certain. Source:
    Mogstad, Romano, Shaikh and Wilhelm 2024, "Inference for Ranks with Applications to Mobility across Neighbourhoods
    and Academic Achievement across Countries", Section 3.

    Args:
        better: For each cell, the places of those that score more for certain
            (`kvbench.analysis.score_matrix.Samples.find_better`).
    """
    worse = Counter(place for places in better for place in places)
    return [(1 + len(places), len(better) - worse[place]) for place, places in enumerate(better)]

"""Find curves that lie on top of each other, so that charts can draw them one around the other.

Of two lines at the same place only the second is seen. Charts draw the series in order, so a line below others gets
wider, and its marks larger, with each line that covers it. A reader then sees all colours as nested strips.
"""

from collections.abc import Mapping, Sequence
from typing import Any

NEAR_SCORE = 0.75  # points; a chart of 300 pixels shows less than half a mark between two scores that are closer
NEAR_SHARE = 0.02  # of the larger share
MOST = 100  # series of a chart that are compared; nobody can read more


def nest_curves(points: Sequence[dict[str, Any]], series: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Count the later series that cover each point (its key `over`) and each series (its key `covered`).

    A series covers an earlier one if it has a point on each of two neighbouring points of it, or on its only point.

    Args:
        points: Points of all series, sorted by series and share, with `s`, `share` and `score`.
        series: The series, with `s` and `label`.

    Returns:
        Labels of series that cover one another, for each such set, in the order in which they are drawn.
    """
    for entry in (*points, *series):
        entry["over" if "share" in entry else "covered"] = 0
    if len(series) > MOST:
        return []
    curves: dict[int, list[dict[str, Any]]] = {entry["s"]: [] for entry in series}
    for point in points:
        curves[point["s"]].append(point)
    covers: dict[int, list[int]] = {place: [] for place in curves}
    for place, curve in curves.items():
        touching = {
            other: [any(_are_near(point, later) for later in curves[other]) for point in curve]
            for other in curves
            if other > place
        }
        for at, point in enumerate(curve):
            point["over"] = sum(touches[at] for touches in touching.values())
        covers[place] = [other for other, touches in touching.items() if _runs_along(touches)]
    for entry in series:
        entry["covered"] = len(covers[entry["s"]])
    labels = {entry["s"]: entry["label"] for entry in series}
    sets: list[set[int]] = []
    for place, others in covers.items():
        joined = {place, *others}
        for known in [known for known in sets if known & joined]:
            sets.remove(known)
            joined |= known
        sets.append(joined)
    return [[labels[place] for place in sorted(joined)] for joined in sets if len(joined) > 1]


def _are_near(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    near = abs(one["share"] - other["share"]) <= NEAR_SHARE * max(one["share"], other["share"])
    return near and abs(one["score"] - other["score"]) <= NEAR_SCORE


def _runs_along(touches: Sequence[bool]) -> bool:
    return touches == [True] or any(one and other for one, other in zip(touches, touches[1:], strict=False))

"""Report what a method loses at every budget that was run: points, area under the curve, smallest sufficient share.

The report covers each model, task, question and method (with its allocator, codec and settings). It compares the
measured points with the full cache on the same samples (kvbench.analysis.paired) and derives the area and the smallest
share (kvbench.analysis.budget_curve). Any setting of a run works as a filter: `block_size=null`, `task.length=2048`,
`subtask=ruler_vt`. Runs that differ in more than the budget do not form a curve. They are rejected with the settings in
which they differ.
"""

import json
from argparse import Namespace
from collections.abc import Callable, Iterable
from math import inf, isfinite

from kvbench.analysis.answer_metrics import find_data_kinds
from kvbench.analysis.budget_curve import Estimate
from kvbench.analysis.budget_series import BudgetSeries, build_all_series, list_subtasks
from kvbench.analysis.closing_table import EMBEDDED_NOTE, MINIATURE_NOTE, is_embedded
from kvbench.analysis.text_table import (
    NOT_AVAILABLE,
    Column,
    format_interval,
    format_number,
    format_percent,
    format_table,
    wrap_texts,
)
from kvbench.store.runs import CACHE_GROUPS, StoredRun, filter_runs, find_differences, load_runs
from kvbench.validation import SettingError, escape, require_choice


def label_run(run: StoredRun, differ: Iterable[str]) -> str:
    """Return model, task, question and cache of a run, and its values of the settings `differ`."""
    value = run.value
    names = [value["model"]["name"], value["task"]["name"], f"question {value['question']}"]
    names += [value["method"]["name"], value["allocator"]["name"], value["codec"]["name"]]
    return " · ".join(map(str, [*names, *(f"{name}={run.settings[name]}" for name in differ if name in run.settings)]))


def format_series(
    label: str, swept: BudgetSeries, reach: tuple[float, float] | None, keep: float, width: int
) -> list[str]:
    """Format one curve as lines of text.

    Args:
        label: Name of the curve.
        swept: The curve.
        reach: Kept shares between which the area is computed; None if there is no such range.
        keep: Share of the full cache's score that counts as kept.
        width: Width in characters.
    """
    count = f"{swept.average}; {len(swept.uids)} samples"
    count += f"; {swept.left_out} were not answered by all runs and are left out" if swept.left_out else ""
    short = [f"budget {budget} ({records} samples)" for budget, records in swept.unfinished]
    count += f". Not finished: {', '.join(short)}; the numbers come from what all runs answered" if short else ""
    for budget, reason in swept.skipped:
        count += f". Left out: budget {budget}, which is not finished and {reason}"
    lines = [*wrap_texts([escape(label), escape(count)], width)]
    lines += [*format_table(COLUMNS, swept.points, 1, width), ""]
    makers: dict[str, Callable[[], str]] = {
        "area": lambda: area_line(swept, reach),
        "smallest": lambda: smallest_line(swept, keep),
    }
    for name, make_line in makers.items():
        try:
            lines.append(make_line())
        except ValueError as error:
            lines.append(f"{name}: {NOT_AVAILABLE}, {error}")
    return lines


def area_line(swept: BudgetSeries, reach: tuple[float, float] | None) -> str:
    """Return the line about the area under a curve.

    Raises:
        ValueError: The curve has no area, or was not measured over `reach`.
    """
    low, high = swept.measured_range
    if low == high:
        raise ValueError(
            "there is only one point"
            if len(swept.runs) == 1
            else f"all points have the same share of {swept.against}; try another --against"
        )
    if reach is None:
        raise ValueError("the curves of this full cache have no range in common; choose one with --range LOW:HIGH")
    area, change = swept.curve.area(*reach), swept.curve.area_change(*reach)
    return (
        f"area from {format_percent(reach[0])} to {format_percent(reach[1])} of {swept.against}: "
        f"{format_estimate(area, '')}, "
        f"minus the full cache's score {format_estimate(change, '+')}"
    )


def smallest_line(swept: BudgetSeries, keep: float) -> str:
    """Return the line about the smallest share that keeps `keep` of the full score.

    Raises:
        ValueError: The full cache scores 0.
    """
    return f"smallest share that keeps {format_percent(keep)} of the full score: " + format_smallest_share(
        swept.curve.smallest(keep), *swept.measured_range
    )


def format_estimate(estimate: Estimate, sign: str) -> str:
    """Return an estimate with its interval."""
    return f"{format_number(estimate.value, sign=sign)} {format_interval(estimate.low, estimate.high, sign)}"


def format_smallest_share(estimate: Estimate, low: float, high: float) -> str:
    """Return a smallest share with its interval. `low` and `high` are the smallest and largest measured shares."""

    def share(value: float) -> str:
        return (
            format_percent(value)
            if isfinite(value)
            else f"<= {format_percent(low)}"
            if value < 0
            else f"> {format_percent(high)}"
        )

    interval = (
        NOT_AVAILABLE
        if estimate.low is None or estimate.high is None
        else f"[{share(estimate.low)}, {share(estimate.high)}]"
    )
    said = {-inf: ", all measured shares keep it", inf: ", the largest measured share does not"}.get(estimate.value, "")
    return f"{share(estimate.value)} {interval}{said}"


def find_common_range(curves: Iterable[BudgetSeries]) -> tuple[float, float] | None:
    """Return the kept shares that all curves of several points have in common; None if there is no such range."""
    ends = [series.measured_range for series in curves if series.measured_range[0] < series.measured_range[1]]
    low, high = max((low for low, _ in ends), default=0.0), min((high for _, high in ends), default=0.0)
    return (low, high) if low < high else None


def report_curves(options: Namespace, width: int) -> tuple[list[str], list[str]]:
    """Build the report of `kvbench results curves`.

    Args:
        options: The parsed command line.
        width: Width in characters.

    Returns:
        Lines to print, and a line for each rejected curve.

    Raises:
        SettingError: No run passes the filters.
    """
    stored = load_runs(options.results)
    runs = [run for run in filter_runs(stored, options.filters) if not run.full]
    if not runs:
        raise SettingError(f"{options.results}: the full cache alone does not form a curve")
    if options.choice.subtask is not None:
        require_choice("subtask", options.choice.subtask, list_subtasks(runs))
    groups: dict[tuple[str, str], list[StoredRun]] = {}
    for run in runs:
        cache = {name: setting for name, setting in run.settings.items() if name.split(".")[0] in CACHE_GROUPS}
        cache.pop(run.budget_setting, None)
        groups.setdefault((label_run(run, []), json.dumps(cache, sort_keys=True)), []).append(run)
    curves, refused = {}, []
    for (name, _), group in sorted(groups.items()):
        beside = [other[0] for (label, _), other in groups.items() if label == name]
        differ = find_differences(beside, (group[0].budget_setting,))
        label = label_run(group[0], [key for key in differ if key.split(".")[0] in CACHE_GROUPS])
        try:
            curves[label] = build_all_series(group, stored, options.choice)
        except SettingError as error:
            refused.append(f"{label}: {error}")
    lines, notes = [], []
    every = [(label, series) for label, built in curves.items() for series in built]
    for label, series in every:
        full, average = series.full, series.average
        alike = [other for _, other in every if (other.full.hash, other.average) == (full.hash, average)]
        lines += [*format_series(label, series, options.range or find_common_range(alike), options.keep, width), "", ""]
        notes += [EMBEDDED_NOTE] if is_embedded(full.value) else []
        notes += [MINIATURE_NOTE] if "miniature" in find_data_kinds(full.records) else []
    if curves:
        notes.append(LEGEND)
    return [*lines, *wrap_texts(dict.fromkeys(notes), width)], refused


def parse_shares(name: str, text: str, count: int) -> tuple[float, ...]:
    """Parse `count` rising numbers in (0, 1], separated by colons.

    Args:
        name: Option that the message names.
        text: The text.
        count: Number of numbers.

    Raises:
        SettingError: `text` is something else.
    """
    try:
        shares = tuple(map(float, text.split(":")))
    except ValueError:
        shares = ()
    if len(shares) != count or not all(0 < share <= 1 for share in shares) or sorted(set(shares)) != list(shares):
        raise SettingError(f"{name} {text}: {'LOW:HIGH, ' if count > 1 else ''}shares in (0, 1]")
    return shares


LEGEND = (
    "All intervals are 95 % intervals, clustered by context. Those of diff are paired with the full cache on the same "
    "samples. lost/gained/same: samples that score less, more or the same. kept: measured share of the full cache. "
    "area: mean score over kept shares, with straight lines between points. The intervals of the area and of the "
    "smallest share come from a seeded bootstrap of contexts."
)
COLUMNS = (
    Column("", "budget", lambda point: point.budget),
    Column("", "kept", lambda point: format_percent(point.share)),
    Column("", "score", lambda point: format_number(point.score.value)),
    Column("95 %", "interval", lambda point: format_interval(point.score.low, point.score.high)),
    Column("", "diff", lambda point: format_number(getattr(point.interval, "difference", None), sign="+")),
    Column(
        "95 %",
        "interval",
        lambda point: format_interval(getattr(point.interval, "low", None), getattr(point.interval, "high", None), "+"),
    ),
    Column(
        "lost/gained",
        "/same",
        lambda point: (
            f"{point.interval.lost}/{point.interval.gained}/{point.interval.same}" if point.interval else NOT_AVAILABLE
        ),
    ),
    Column("", "n", lambda point: str(point.score.samples)),
)

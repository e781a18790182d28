"""What a method loses at every budget that was run: points, area under the curve, smallest budget that loses little.

reads the store and prints, for each model, task, question and method (with its allocator, codec and settings), the
measured points against the full cache on the same samples (kvbench.analysis.paired) and what follows from them
(kvbench.analysis.budget_curve). Any setting of a run chooses: `block_size=null`, `task.length=2048`,
`subtask=ruler_vt`. Runs that differ in anything but the budget are no curve: they are refused, with the settings in
which they differ.
"""

from argparse import Namespace
from collections.abc import Iterable
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
from kvbench.store.runs import CACHE_GROUPS, StoredRun, filter_runs, find_differences, load_finished
from kvbench.validation import SettingError, escape, require_choice


def label_run(run: StoredRun, differ: Iterable[str]) -> str:
    """Model, task, question and cache, with the settings that tell it from others of these names."""
    value = run.value
    names = [value["model"]["name"], value["task"]["name"], f"question {value['question']}"]
    names += [value["method"]["name"], value["allocator"]["name"], value["codec"]["name"]]
    return " · ".join(map(str, [*names, *(f"{name}={run.settings[name]}" for name in differ if name in run.settings)]))


def format_series(
    label: str, swept: BudgetSeries, reach: tuple[float, float] | None, keep: float, width: int
) -> list[str]:
    """The lines of one curve; `reach`: the kept shares between which the area lies, None if there is no such range."""
    count = f"{swept.average}; {len(swept.uids)} samples"
    count += f", {swept.left_out} not answered everywhere and left out" if swept.left_out else ""
    lines = [*wrap_texts([escape(label), escape(count)], width)]
    lines += [*format_table(COLUMNS, swept.points, 1, width), ""]
    for what, line in ((area_line, reach), (smallest_line, keep)):
        try:
            lines.append(what(swept, line))
        except ValueError as error:
            lines.append(f"{what.__name__.partition('_')[0]}: {NOT_AVAILABLE}, {error}")
    return lines


def area_line(swept: BudgetSeries, reach: tuple[float, float] | None) -> str:
    low, high = swept.measured_range
    if low == high:
        raise ValueError("one point" if len(swept.runs) == 1 else f"one share of {swept.against} only; see --against")
    if reach is None:
        raise ValueError("no range that all curves of this full cache have; --range LOW:HIGH")
    own, change = swept.curve.area(*reach), swept.curve.area_change(*reach)
    return (
        f"area from {format_percent(reach[0])} to {format_percent(reach[1])} of {swept.against}: "
        f"{format_estimate(own, '')}, "
        f"less the full cache's score {format_estimate(change, '+')}"
    )


def smallest_line(swept: BudgetSeries, keep: float) -> str:
    return f"smallest share that keeps {format_percent(keep)} of the full score: " + format_smallest_share(
        swept.curve.smallest(keep), *swept.measured_range
    )


def format_estimate(own: Estimate, sign: str) -> str:
    return f"{format_number(own.value, sign=sign)} {format_interval(own.low, own.high, sign)}"


def format_smallest_share(own: Estimate, low: float, high: float) -> str:
    def share(value: float) -> str:
        return (
            format_percent(value)
            if isfinite(value)
            else f"<= {format_percent(low)}"
            if value < 0
            else f"> {format_percent(high)}"
        )

    interval = NOT_AVAILABLE if own.low is None else f"[{share(own.low)}, {share(own.high)}]"
    said = {-inf: ", all measured keep it", inf: ", the largest measured does not"}.get(own.value, "")
    return f"{share(own.value)} {interval}{said}"


def find_common_range(curves: Iterable[BudgetSeries]) -> tuple[float, float] | None:
    """The kept shares that all curves of more than one point have between their smallest and largest."""
    ends = [own.measured_range for own in curves if own.measured_range[0] < own.measured_range[1]]
    low, high = max((low for low, _ in ends), default=0.0), min((high for _, high in ends), default=0.0)
    return (low, high) if low < high else None


def report_curves(options: Namespace, width: int) -> tuple[list[str], list[str]]:
    """What is printed, and what is refused; SettingError for a store or filter that gives nothing."""
    stored, unfinished = load_finished(options.results)
    runs = [run for run in filter_runs(stored, options.filters) if not run.full]
    if not runs:
        raise SettingError(f"{options.results}: the full cache alone makes no curve")
    if options.choice.subtask is not None:
        require_choice("subtask", options.choice.subtask, list_subtasks(runs))
    groups: dict[tuple[str, str], list[StoredRun]] = {}
    for run in runs:
        groups.setdefault((label_run(run, []), run.cache), []).append(run)
    curves, refused = {}, []
    for (name, _), own in sorted(groups.items()):
        beside = [other[0] for (label, _), other in groups.items() if label == name]
        differ = [key for key in find_differences(beside, ()) if key.split(".")[0] in CACHE_GROUPS]
        label = label_run(own[0], differ)
        try:
            curves[label] = build_all_series(own, stored, options.choice)
        except SettingError as error:
            refused.append(f"{label}: {error}")
    lines, notes = [], []
    every = [(label, own) for label, found in curves.items() for own in found]
    for label, own in every:
        alike = [other for _, other in every if (other.full.hash, other.average) == (own.full.hash, own.average)]
        lines += [*format_series(label, own, options.range or find_common_range(alike), options.keep, width), "", ""]
        notes += [EMBEDDED_NOTE] if is_embedded(own.full.value) else []
        notes += [MINIATURE_NOTE] if "miniature" in find_data_kinds(own.full.records) else []
    if unfinished:
        notes.append(f"{unfinished} unfinished runs are left out.")
    if curves:
        notes.append(LEGEND)
    return [*lines, *wrap_texts(dict.fromkeys(notes), width)], refused


def parse_shares(name: str, text: str, count: int) -> tuple[float, ...]:
    """`count` rising numbers in (0, 1]; SettingError."""
    try:
        found = tuple(map(float, text.split(":")))
    except ValueError:
        found = ()
    if len(found) != count or not all(0 < own <= 1 for own in found) or sorted(set(found)) != list(found):
        raise SettingError(f"{name} {text}: {'LOW:HIGH, ' if count > 1 else ''}shares in (0, 1]")
    return found


LEGEND = (
    "Intervals are 95 %, clustered by context, of score and area the mean's, of diff paired with the full cache on the "
    "same samples; lost/gained/same: samples that score less, more and alike. kept: measured share of the full cache. "
    "Area: mean score over kept shares, straight between points; its interval and the smallest share's by a seeded "
    "bootstrap of contexts."
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

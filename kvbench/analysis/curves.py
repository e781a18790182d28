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

from kvbench.analysis.answer_metrics import data_kinds
from kvbench.analysis.budget_curve import Estimate
from kvbench.analysis.budget_series import Swept, subtasks, sweeps
from kvbench.analysis.closing_table import EMBEDDED, MINIATURE, is_embedded
from kvbench.analysis.text_table import NONE, Column, aligned, between, number, percent, wrapped
from kvbench.store.runs import CACHE, Stored, chosen, differing, read
from kvbench.validation import SettingError, choose, escape


def label_of(run: Stored, differ: Iterable[str]) -> str:
    """Model, task, question and cache, with the settings that tell it from others of these names."""
    value = run.value
    names = [value["model"]["name"], value["task"]["name"], f"question {value['question']}"]
    names += [value["method"]["name"], value["allocator"]["name"], value["codec"]["name"]]
    return " · ".join(map(str, [*names, *(f"{name}={run.settings[name]}" for name in differ if name in run.settings)]))


def shown(label: str, swept: Swept, reach: tuple[float, float] | None, keep: float, width: int) -> list[str]:
    """The lines of one curve; `reach`: the kept shares between which the area lies, None if there is no such range."""
    count = f"{swept.average}; {len(swept.uids)} samples"
    count += f", {swept.left_out} not answered everywhere and left out" if swept.left_out else ""
    lines = [*wrapped([escape(label), escape(count)], width)]
    lines += [*aligned(COLUMNS, swept.points, 1, width), ""]
    for what, line in ((area_line, reach), (smallest_line, keep)):
        try:
            lines.append(what(swept, line))
        except ValueError as error:
            lines.append(f"{what.__name__.partition('_')[0]}: {NONE}, {error}")
    return lines


def area_line(swept: Swept, reach: tuple[float, float] | None) -> str:
    low, high = swept.measured
    if low == high:
        raise ValueError("one point" if len(swept.runs) == 1 else f"one share of {swept.against} only; see --against")
    if reach is None:
        raise ValueError("no range that all curves of this full cache have; --range LOW:HIGH")
    own, change = swept.curve.area(*reach), swept.curve.area_change(*reach)
    return (
        f"area from {percent(reach[0])} to {percent(reach[1])} of {swept.against}: {estimate(own, '')}, "
        f"less the full cache's score {estimate(change, '+')}"
    )


def smallest_line(swept: Swept, keep: float) -> str:
    return f"smallest share that keeps {percent(keep)} of the full score: " + smallest(
        swept.curve.smallest(keep), *swept.measured
    )


def estimate(own: Estimate, sign: str) -> str:
    return f"{number(own.value, sign=sign)} {between(own.low, own.high, sign)}"


def smallest(own: Estimate, low: float, high: float) -> str:
    def share(value: float) -> str:
        return percent(value) if isfinite(value) else f"<= {percent(low)}" if value < 0 else f"> {percent(high)}"

    interval = NONE if own.low is None else f"[{share(own.low)}, {share(own.high)}]"
    said = {-inf: ", all measured keep it", inf: ", the largest measured does not"}.get(own.value, "")
    return f"{share(own.value)} {interval}{said}"


def in_common(curves: Iterable[Swept]) -> tuple[float, float] | None:
    """The kept shares that all curves of more than one point have between their smallest and largest."""
    ends = [own.measured for own in curves if own.measured[0] < own.measured[1]]
    low, high = max((low for low, _ in ends), default=0.0), min((high for _, high in ends), default=0.0)
    return (low, high) if low < high else None


def report(options: Namespace, width: int) -> tuple[list[str], list[str]]:
    """What is printed, and what is refused; SettingError for a store or filter that gives nothing."""
    stored, unfinished = read(options.results)
    runs = [run for run in chosen(stored, options.filters) if not run.full]
    if not runs:
        raise SettingError(f"{options.results}: the full cache alone makes no curve")
    if options.choice.subtask is not None:
        choose("subtask", options.choice.subtask, subtasks(runs))
    groups: dict[tuple[str, str], list[Stored]] = {}
    for run in runs:
        groups.setdefault((label_of(run, []), run.cache), []).append(run)
    curves, refused = {}, []
    for (name, _), own in sorted(groups.items()):
        beside = [other[0] for (label, _), other in groups.items() if label == name]
        differ = [key for key in differing(beside, ()) if key.split(".")[0] in CACHE]
        label = label_of(own[0], differ)
        try:
            curves[label] = sweeps(own, stored, options.choice)
        except SettingError as error:
            refused.append(f"{label}: {error}")
    lines, notes = [], []
    every = [(label, own) for label, found in curves.items() for own in found]
    for label, own in every:
        alike = [other for _, other in every if (other.full.hash, other.average) == (own.full.hash, own.average)]
        lines += [*shown(label, own, options.range or in_common(alike), options.keep, width), "", ""]
        notes += [EMBEDDED] if is_embedded(own.full.value) else []
        notes += [MINIATURE] if "miniature" in data_kinds(own.full.records) else []
    if unfinished:
        notes.append(f"{unfinished} unfinished runs are left out.")
    if curves:
        notes.append(READING)
    return [*lines, *wrapped(dict.fromkeys(notes), width)], refused


def shares(name: str, text: str, count: int) -> tuple[float, ...]:
    """`count` rising numbers in (0, 1]; SettingError."""
    try:
        found = tuple(map(float, text.split(":")))
    except ValueError:
        found = ()
    if len(found) != count or not all(0 < own <= 1 for own in found) or sorted(set(found)) != list(found):
        raise SettingError(f"{name} {text}: {'LOW:HIGH, ' if count > 1 else ''}shares in (0, 1]")
    return found


READING = (
    "Intervals are 95 %, clustered by context, of score and area the mean's, of diff paired with the full cache on the "
    "same samples; lost/gained/same: samples that score less, more and alike. kept: measured share of the full cache. "
    "Area: mean score over kept shares, straight between points; its interval and the smallest share's by a seeded "
    "bootstrap of contexts."
)
COLUMNS = (
    Column("", "budget", lambda point: point.budget),
    Column("", "kept", lambda point: percent(point.share)),
    Column("", "score", lambda point: number(point.score.value)),
    Column("95 %", "interval", lambda point: between(point.score.low, point.score.high)),
    Column("", "diff", lambda point: number(getattr(point.interval, "difference", None), sign="+")),
    Column(
        "95 %",
        "interval",
        lambda point: between(getattr(point.interval, "low", None), getattr(point.interval, "high", None), "+"),
    ),
    Column(
        "lost/gained",
        "/same",
        lambda point: (
            f"{point.interval.lost}/{point.interval.gained}/{point.interval.same}" if point.interval else NONE
        ),
    ),
    Column("", "n", lambda point: str(point.score.samples)),
)

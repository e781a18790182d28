"""Group the runs of a store into panels of comparable runs, for the page and for figures.

All runs of a panel have the same protocol (kvbench.store.audit.comparison_key): the same model, task, data, question,
sampling, seed and kind of machine. A series is the runs of a panel that differ only in their budget; its numbers come
from kvbench.analysis.budget_series. Losses by subtask and costs come from kvbench.analysis.closing_table. Damaged runs
are listed and left out.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import inf, log2
from pathlib import Path
from statistics import fmean
from typing import Any

from scipy.special import ndtri

from kvbench.analysis.answer_metrics import find_failure
from kvbench.analysis.budget_curve import KEEP
from kvbench.analysis.budget_series import BudgetSeries, CurveOptions, build_all_series
from kvbench.analysis.closing_table import TableDraft, draft_run_table, finish_tables
from kvbench.analysis.closing_table_format import ClosingTable, TableRow
from kvbench.analysis.curves import format_smallest_share
from kvbench.analysis.intervals import TAIL, Mean, Values, compute_means
from kvbench.analysis.paired import PairedDifference, PairedScores, compare_averages, pair_records
from kvbench.analysis.run_labels import (
    describe_difference,
    describe_error,
    describe_mean,
    describe_protocol,
    format_budget,
    get_name,
    group_series,
    name_panel,
    rank_budget,
    shorten,
)
from kvbench.analysis.score_matrix import (
    MatrixCell,
    RunNumbers,
    SampleKey,
    SharedSamples,
    build_block,
    choose_shared_samples,
    make_sample_key,
)
from kvbench.analysis.score_matrix_format import count_samples, describe_samples
from kvbench.analysis.score_matrix_order import find_points
from kvbench.analysis.text_table import NOT_AVAILABLE
from kvbench.report.coinciding import nest_curves
from kvbench.report.method_pages import describe_method
from kvbench.report.style import choose_style, choose_styles
from kvbench.store.audit import comparison_key
from kvbench.store.runs import FoundRuns, StoredRun, check_folder, find_baseline, find_differences, find_finished
from kvbench.validation import SettingError

DATA_ERRORS = (
    SettingError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ArithmeticError,
)  # errors that damaged records can raise


@dataclass(frozen=True)
class Pairing:
    """A run, the full cache's run to compare with, the number of its panel, and its name on the page."""

    run: StoredRun
    full: StoredRun
    panel: int
    name: str


@dataclass(frozen=True)
class PageData:
    """The data of the page, and the pairs of runs whose answers it can show."""

    page: dict[str, Any]
    pairings: list[Pairing]


def build_panels(loaded: FoundRuns, wanted: Collection[StoredRun], choice: CurveOptions) -> list["Panel"]:
    """Build the panels of the wanted runs, together with the full-cache runs of their protocols."""
    groups: dict[str, list[StoredRun]] = {}
    for run in loaded.runs:
        groups.setdefault(comparison_key(run.value), []).append(run)
    names = {key: name_panel(runs[0]) for key, runs in groups.items()}
    hashes = {run.hash for run in wanted}
    panels: list[Panel] = []
    for key, every in sorted(groups.items(), key=lambda item: (names[item[0]], item[0])):
        if hashes.isdisjoint(run.hash for run in every):
            continue
        beside = [groups[other][0] for other in groups if names[other] == names[key]]
        runs = [run for run in every if run.full or run.hash in hashes]
        panels.append(Panel(len(panels), key, runs, describe_protocol(every[0], beside), choice))
    return panels


def gather_results(results: Path, now: datetime) -> PageData:
    """Collect everything for the page but the answers.

    Raises:
        SettingError: The folder contains no runs.
    """
    check_folder(results)
    return gather_found(find_finished(results), now)


def gather_found(loaded: FoundRuns, now: datetime) -> PageData:
    """Collect everything for the page but the answers, from runs that were already found.

    Unfinished runs are shown, too, on the samples that they have in common with the others. One without records is only
    counted.
    """
    runs = [*loaded.runs, *(run for run in loaded.unfinished if run.records)]
    panels = build_panels(replace(loaded, runs=runs), runs, CurveOptions())
    first = [run.value for run in runs]
    left_out = loaded.damaged | {name: why for panel in panels for name, why in panel.refused.items()}
    left_out |= {name: f"used without its second records: {why}" for name, why in loaded.passed_over.items()}
    series = [(panel.data, entry) for panel in panels for entry in panel.data["series"]]
    methods = dict.fromkeys(entry["method"] for _, entry in series)
    page = {
        "made": now.strftime("%Y-%m-%d %H:%M UTC"),
        "keep": KEEP,
        "panels": [panel.data for panel in panels],
        "methods": {name: choose_style(name) for name in methods},
        "about": {name: describe_method(name) for name in methods},
        "classes": [
            budget_class
            for budget_class in (*CLASSES, OTHER)
            if any(budget_class in list_classes(panel) for panel in panels)
        ],
        "blocks": list({entry["block"]: None for _, entry in series}),
        "refused": [
            f"{panel['task']} · question {panel['question']}, {entry['label']}: no curve: {entry['refused']}"
            for panel, entry in series
            if "refused" in entry
        ],
        "runs": [entry for panel in panels for entry in panel.listed],
        "unfinished": sum(bool(run.records) for run in loaded.unfinished),
        "empty": sum(not run.records for run in loaded.unfinished),
        "damaged": [[shorten(name), shorten(reason, 300)] for name, reason in sorted(left_out.items())],
        "models": sorted(
            {f"{get_name(value, 'model')} {shorten(value['model'].get('identity') or '')}" for value in first}
        ),
        "machines": sorted({hardware for run in runs for hardware, _ in read_machines(run)}),
    }
    return PageData(page, [pairing for panel in panels for pairing in panel.pairings])


class Panel:
    """The runs of one protocol. `data` holds the tables that kvbench.report.charts draws."""

    def __init__(
        self, index: int, key: str, runs: Sequence[StoredRun], also: Sequence[str], choice: CurveOptions
    ) -> None:
        self.index, self.key, self.runs, self.choice = index, key, runs, choice
        self.pairings: list[Pairing] = []
        self.refused: dict[str, str] = {}
        self.listed: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.tables: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
        self.solvable: dict[str, Any] = {"average": None, "points": [], "full": []}  # subtasks that the model can solve
        self.grids: list[dict[str, Any]] = []
        self.numbers: dict[SampleKey, RunNumbers] = {}  # those of the curves, for the matrix
        self.grid_drafts: list[tuple[int | None, str, list[GridCell]]] = []
        self.whole = {run.hash: run for run in runs}  # with all of their records
        self.planned = max(run.planned for run in runs)
        self.shared = self._choose_samples()
        self.left_out = {run.hash: reason for run, reason in self.shared.left_out} if self.shared else {}
        series = self._build_series()
        candidates = [*self.tables["costs"], *self.tables["free"]]
        for name in ("held", "ttft", "tpot"):
            front = find_front(candidates, name)
            for row in candidates:
                row[f"front_{name}"] = (row[name], -row["diff"]) in front
                if row[f"front_{name}"]:
                    self.tables["front"].append({"cost": name, "at": row[name], "diff": row["diff"]})
        matrix = self._build_matrix(also, series)
        nested = nest_curves(self.tables["points"], series)
        nest_curves(self.solvable["points"], [dict(entry) for entry in series])  # which has curves of its own
        self._add_settings()
        self.data: dict[str, Any] = {
            "model": get_name(runs[0].value, "model"),
            "task": get_name(runs[0].value, "task"),
            "question": shorten(str(runs[0].value["question"])),
            "also": list(also),
            "series": series,
            **self.tables,
            "nested": nested,
            "solvable": self.solvable,
            "grids": self.grids,
            "notes": list(dict.fromkeys(self.notes)),
            "matrix": matrix,
        }

    def _choose_samples(self) -> SharedSamples | None:
        """Return the samples that all numbers of the panel come from, or None if the runs share no sample."""
        try:
            return choose_shared_samples(self.runs, self.runs, self.choice)
        except DATA_ERRORS as error:
            self.notes.append(f"There is no table of scores: {describe_error(error)}.")
            return None

    def _take_shared(self, run: StoredRun) -> StoredRun:
        """Return the run with the records of the shared samples, and with those of its own failed answers."""
        if self.shared is None:
            return run
        chosen = self.shared.answered
        records = {
            uid: record for uid, record in run.records.items() if uid in chosen or find_failure(record) is not None
        }
        return run if len(records) == len(run.records) else run.restrict(records)

    def _build_matrix(self, also: Sequence[str], series: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """Return the matrix of scores, or None if the runs share no sample."""
        if self.shared is None:
            return None
        try:
            block = build_block(self.runs, self.runs, also, known=self.numbers, shared=self.shared)
        except DATA_ERRORS as error:
            self.notes.append(f"There is no table of scores: {describe_error(error)}.")
            return None
        places = {entry["label"]: place for place, entry in enumerate(series)}
        rows = {label: cells for label, cells in block.rows.items() if label in places}
        points = {label: cells for label, cells in find_points(block).items() if label in places}
        others = [cells for label, cells in rows.items() if label not in points]
        columns = {budget: [cells[budget] for cells in others if budget in cells] for budget in block.budgets}
        budgets = [budget for budget, cells in columns.items() if cells or not rows]
        needed: dict[str, int] = {}
        for budget in block.budgets:
            needed |= block.paired.count_needed([cells[budget] for cells in block.rows.values() if budget in cells])
        return {
            "about": describe_samples(block),
            "count": f"{block.average[:1].upper()}{block.average[1:]}; {count_samples(block)}",
            "budgets": budgets,
            "classes": [classify_column(columns[budget] or [block.full]) for budget in budgets],
            "methods": [
                {
                    "s": places[label],
                    "scores": [describe_cell(cells[budget], needed) if budget in cells else None for budget in budgets],
                }
                for label, cells in rows.items()
                if label not in points
            ],
            "by_bytes": [
                {
                    **{"s": places[label], "budget": budget, "class": classify_share(cell.held or 0.0)},
                    **describe_cell(cell, needed),
                }
                for label, cells in points.items()
                for budget, cell in cells.items()
            ],
            "cache": describe_cell(block.full),
        }

    def _build_series(self) -> list[dict[str, Any]]:
        full_runs = [self._take_shared(run) for run in self.runs if run.full]
        for run in full_runs:
            self._add_listed(self.whole[run.hash], "full cache")
            self._draft_grid(run, run, None, "full cache")
        groups = group_series(self.runs)
        self.rows = len(groups)
        compared = [run for _, _, runs in groups for run in runs if run.hash not in self.left_out]
        tables = self._build_tables(list(map(self._take_shared, compared)), full_runs)
        series: list[dict[str, Any]] = []
        for label, _, runs in groups:
            place = len(series)
            ordered = [
                run for run in sorted(runs, key=rank_budget) if self._add_run(run, tables.get(run.hash), place, label)
            ]
            if ordered:
                method = get_name(runs[0].value, "method")
                shown = {"s": place, "label": label, "method": method, "block": runs[0].value.get("block_size")}
                series.append(shown | self._add_curve(ordered, full_runs, place))
        self._finish_grids()
        styles = choose_styles([shown["method"] for shown in series])
        losses = self._find_first_losses()
        return [shown | style | {"fails": losses.get(shown["s"])} for shown, style in zip(series, styles, strict=True)]

    def _build_tables(
        self, runs: Sequence[StoredRun], full_runs: Sequence[StoredRun]
    ) -> dict[str, tuple[StoredRun, ClosingTable] | str]:
        """Return the full cache's run and the closing table of each run by its hash, or why it has none."""
        drafts: dict[str, tuple[StoredRun, TableDraft]] = {}
        refused: dict[str, str] = {}
        for run in runs:
            try:
                full = find_baseline(run, full_runs)
                drafts[run.hash] = full, draft_run_table(run.value, full.records, run.records, brief=True)
            except DATA_ERRORS as error:
                refused[run.hash] = describe_error(error)
        tables = finish_tables([draft for _, draft in drafts.values()])
        built = {name: (full, table) for (name, (full, _)), table in zip(drafts.items(), tables, strict=True)}
        return built | refused

    def _add_run(
        self, run: StoredRun, built: tuple[StoredRun, ClosingTable] | str | None, series: int, label: str
    ) -> bool:
        """Add one run and return True. If it cannot be compared, note the reason and return False.

        Args:
            run: The run.
            built: The full cache's run and the run's closing table, or why it has none; None if the run lacks samples
                that all others have (`SharedSamples.left_out`). The page then shows its answers only.
            series: Place of its series.
            label: Name of its series.
        """
        name = f"{label} · {format_budget(run)}"
        name += "" if run.finished else f" · {self._describe_progress(run)}"
        self._add_listed(run, label)
        if built is None:
            return self._add_left_out(run, name)
        if isinstance(built, str):
            self.refused[f"{run.hash} ({name})"] = built
            return False
        full, table = built
        part = self._take_shared(run)
        try:
            self._add_table(table.rows, part, series, name)
        except DATA_ERRORS as error:
            self.refused[f"{run.hash} ({name})"] = describe_error(error)
            return False
        self._draft_grid(part, full, series, name)
        notes = table.notes[1:]  # the first note states the model, which the page shows elsewhere
        self.notes += [note for note in notes if not note[0].isdigit()]
        self.listed[-1]["notes"] = [note for note in notes if note[0].isdigit()]
        self.pairings.append(Pairing(run, self.whole[full.hash], self.index, name))
        return True

    def _add_left_out(self, run: StoredRun, name: str) -> bool:
        """Add the answers of a run that is in no table, and return whether the page can show them."""
        assert self.shared is not None  # without shared samples, no run is left out of them
        if run.finished:
            self.refused[f"{run.hash} ({name})"] = self.left_out[run.hash]
        try:
            pair_records(self.shared.full.records, run.records)
        except DATA_ERRORS as error:
            self.refused[f"{run.hash} ({name})"] = describe_error(error)
            return False
        self.pairings.append(Pairing(run, self.shared.full, self.index, name))
        return True

    def _find_first_losses(self) -> dict[int, dict[str, Any]]:
        """Return where each series fails first: the subtask that loses most at the largest budget at which any loses.

        A subtask loses if the interval of its paired difference lies below 0. A series that loses nowhere is missing.
        """
        tasks = [column["task"] for column in self.tables["tasks"]]
        lost: dict[int, list[dict[str, Any]]] = {}  # by the order of the row
        for cell in self.tables["cells"]:
            average = tasks[cell["column"]].startswith(AVERAGE)
            if not average and cell["diff_high"] is not None and cell["diff_high"] < 0:
                lost.setdefault(cell["order"], []).append(cell)
        losses: dict[int, dict[str, Any]] = {}
        for row in self.tables["rows"]:  # of a series, the largest budget comes last
            if row["order"] in lost:
                worst = min(lost[row["order"]], key=lambda cell: cell["diff"])
                ends = {"low": worst["diff_low"], "high": worst["diff_high"]}
                losses[row["s"]] = {"task": tasks[worst["column"]], "row": row["row"], "diff": worst["diff"]} | ends
        return losses

    def _describe_progress(self, run: StoredRun) -> str:
        """Return how many of the panel's samples an unfinished run has answered."""
        return f"{len(run.records)} of {self.planned} samples"

    def _add_table(self, rows: Sequence[TableRow], run: StoredRun, series: int, name: str) -> None:
        averages = [row for row in rows if row.kind == "average"][:1]
        means = averages + [row for row in rows if row.kind == "solvable"]
        order = means + [row for row in rows if row.kind == "subtask"]
        cells, tasks = [], [column["task"] for column in self.tables["tasks"]]
        for row in order if len(order) > 2 else order[1:]:
            if row.interval:
                task = shorten(f"{AVERAGE}{row.subtask}" if row in means else row.subtask)
                tasks += [] if task in tasks else [task]
                at = {"order": len(self.tables["rows"]), "column": tasks.index(task)}
                cells.append(at | describe_difference(row.interval))
        costs, full = [], []
        for row in averages:
            if row.interval:
                held = fmean(one["resident_bytes"] for one in run.records.values() if find_failure(one) is None)
                cost: dict[str, Any] = {"s": series, "row": name, "held": row.held, "megabytes": held / 1e6}
                cost |= {"held_low": row.held_low, "held_high": row.held_high}
                costs.append(cost | describe_times(row, "") | describe_difference(row.interval))
                full = [{"held": 1.0, "held_low": None, "held_high": None, "diff": 0.0, **describe_times(row, "_full")}]
        self.tables["rows"].append({"s": series, "order": len(self.tables["rows"]), "row": name})
        self.tables["tasks"] = [{"column": column, "task": task} for column, task in enumerate(tasks)]
        self.tables["cells"] += cells
        self.tables["costs"] += costs
        self.tables["free"] = full or self.tables["free"]

    def _add_curve(self, runs: Sequence[StoredRun], full_runs: Sequence[StoredRun], series: int) -> dict[str, Any]:
        """Add the points of a curve, and return its smallest budget or the reason why there is no curve."""
        compared = [self._take_shared(run) for run in runs if run.hash not in self.left_out]
        if not compared:
            reasons = (f"budget {format_budget(run)} {self.left_out[run.hash]}" for run in runs)
            return {"refused": shorten("; ".join(reasons), 300)}
        try:
            swept, *solvable = build_all_series(compared, full_runs, self.choice)
        except DATA_ERRORS as error:
            return {"refused": describe_error(error)}
        points = {point.budget: point for point in swept.points}
        for run in swept.runs:
            point = points[run.budget_name]
            if point.interval:
                key = make_sample_key(run, swept.full, swept.uids, swept.weights)
                self.numbers[key] = point.score, point.interval
        self._add_points(swept, runs, series, self.tables)
        for solvable_series in solvable:
            self.solvable["average"] = shorten(solvable_series.average)
            self._add_points(solvable_series, runs, series, self.solvable)
        lacking = swept.left_out
        if self.shared:
            lacking = sum(subtask in swept.weights for subtask in self.shared.every.values()) - len(swept.uids)
        shown = {"average": shorten(swept.average), "left_out": lacking, "samples": len(swept.uids)}
        return shown | {
            "unfinished": self._list_unfinished(swept, runs),
            "smallest": find_least_budget(swept, self.rows),
        }

    def _list_unfinished(self, swept: BudgetSeries, runs: Sequence[StoredRun]) -> list[str]:
        """Return a line for each unfinished run of a curve."""
        skipped = dict(swept.skipped) | {
            run.budget_name: self.left_out[run.hash] for run in runs if run.hash in self.left_out
        }
        lines = []
        for run in (run for run in runs if not run.finished):
            reason = skipped.get(run.budget_name)
            end = f", left out: {shorten(reason)}" if reason else ""
            lines.append(f"{format_budget(run)} ({self._describe_progress(run)}{end})")
        return lines

    def _add_points(
        self, swept: BudgetSeries, runs: Sequence[StoredRun], series: int, tables: Mapping[str, list]
    ) -> None:
        named_budget = {run.budget_name: format_budget(run) for run in runs}
        *points, full = swept.points
        for point in points:
            place = {"s": series, "budget": named_budget[point.budget], "share": point.share}
            change = describe_difference(point.interval) if point.interval else {}
            tables["points"].append(place | change | describe_mean(point.score))
        tables["full"].append({"s": series} | describe_mean(full.score))

    def _add_listed(self, run: StoredRun, label: str) -> None:
        path = run.folder.path
        written = [path / "done"] if run.finished else [*path.glob("records*.jsonl")]
        self.listed.append(
            {
                "panel": self.index,
                "hash": run.hash,
                "series": label,
                "method": get_name(run.value, "method"),
                "budget": "" if run.full else format_budget(run),
                "samples": len(run.records),
                "sources": shorten(str(run.value.get("sources") or "")),
                "code": ", ".join(sorted({code for _, code in read_machines(run) if code})),
                "of": None if run.finished else self.planned,
                "date": datetime.fromtimestamp(max(file.stat().st_mtime for file in written), UTC).strftime("%Y-%m-%d"),
            }
        )

    def _add_settings(self) -> None:
        """Add to each listed run the settings in which the runs of the panel differ."""
        names = list(find_differences(self.runs, ()))
        runs = {run.hash: run for run in self.runs}
        for entry in self.listed:
            known = runs[entry["hash"]].settings
            entry["settings"] = {name: shorten(json.dumps(known[name]), 60) for name in names if name in known}

    def _draft_grid(self, run: StoredRun, full: StoredRun, series: int | None, name: str) -> None:
        """Collect scores by length and depth, if records have these."""
        places: dict[tuple, list[dict]] = {}
        try:
            for record in run.records.values():
                meta = record["meta"]
                if {"length", "depth"} <= meta.keys() and find_failure(record) is None:
                    places.setdefault((float(meta["length"]), meta["depth"]), []).append(record)
            ordered = sorted(places.items(), key=lambda item: (item[0][0], item[0][1] or 0))
            cells = [GridCell.of(length, depth, records, full.records) for (length, depth), records in ordered]
        except DATA_ERRORS:
            return
        if cells:
            self.grid_drafts.append((series, name, cells))

    def _finish_grids(self) -> None:
        """Compute the means of all grids at once."""
        cells = [cell for _, _, drafts in self.grid_drafts for cell in drafts]
        means = iter(compute_means([([cell.values], None) for cell in cells]))
        changes = iter(compare_averages([([cell.paired], None) for cell in cells if cell.paired]))
        for series, name, drafts in self.grid_drafts:
            shown = [cell.describe(next(means), next(changes) if cell.paired else None) for cell in drafts]
            self.grids.append({"s": series, "row": name, "cells": shown})


@dataclass(frozen=True)
class GridCell:
    """The scores of a run at one length and depth.

    Attributes:
        length: Length of the contexts.
        depth: Depth of the answers in them, "drawn" if it differs between samples.
        values: The scores.
        paired: The scores of the samples that have one with the full cache, too; None without such samples.
    """

    length: float
    depth: object
    values: Values
    paired: PairedScores | None

    @classmethod
    def of(cls, length: float, depth: object, records: Sequence[dict], full: Mapping[str, dict]) -> "GridCell":
        """Collect the scores of records."""
        values = Values([record["score"] for record in records], list_groups(records))
        both = [record for record in records if record["uid"] in full and find_failure(full[record["uid"]]) is None]
        paired = (
            PairedScores(
                [full[record["uid"]]["score"] for record in both],
                [record["score"] for record in both],
                list_groups(both),
            )
            if both
            else None
        )
        return cls(length, "drawn" if depth is None else depth, values, paired)

    def describe(self, mean: Mean, change: PairedDifference | None) -> dict[str, Any]:
        """Return the cell as the page reads it."""
        ends = (change.difference, change.low, change.high) if change else (None, None, None)
        entry = {"length": self.length, "depth": self.depth} | describe_mean(mean)
        return entry | dict(zip(("diff", "diff_low", "diff_high"), ends, strict=True))


CLASSES = {"50\u202f%": 0.5, "25\u202f%": 0.25, "12.5\u202f%": 0.125, "6.25\u202f%": 0.0625}  # of budgets
BEYOND = 9.0  # stands for a share of bytes above all measured ones
AVERAGE = "Ø "  # the name of an average begins so
OTHER = "other"  # the class of all other budgets
TABLES = ("points", "full", "tasks", "rows", "cells", "costs", "free", "front")


def find_front(rows: Sequence[Mapping[str, Any]], name: str) -> set[tuple[float, float]]:
    """Return cost and loss of the rows on the Pareto front of both. The full cache is one of the rows."""
    front, least = set(), inf
    for cost, loss in sorted({(row[name], -row["diff"]) for row in rows if row[name] is not None}):
        if loss < least:  # otherwise an earlier row costs no more and loses no more
            front.add((cost, loss))
            least = loss
    return front


def read_machines(run: StoredRun) -> list[tuple[str, str]]:
    """Return (hardware and versions, revision of the code) of each machine that worked on a run.

    The revision is "" in older records.
    """
    machines = []
    for path in sorted(run.folder.path.glob("machine*.json")):
        try:
            machine = json.loads(path.read_text())
            parts = [machine.get("gpu") or f"CPU {machine.get('processor')}, {machine.get('threads')} threads"]
            parts += [f"Python {machine.get('python')}"]
            parts += [
                f"{key} {machine['versions'][key]}" for key in ("torch", "transformers") if key in machine["versions"]
            ]
            kind, _, code = str(machine.get("code", "")).partition(" ")
            code = f"{kind} {code[:10]}{' dirty' * code.endswith(' dirty')}" if kind else ""
            machines.append((shorten(", ".join(parts).replace(" 1 threads", " 1 thread")), shorten(code)))
        except (OSError, *DATA_ERRORS):
            machines.append((f"{path.name} of {run.hash} cannot be read", ""))
    return machines


def find_least_budget(swept: BudgetSeries, rows: int = 1) -> dict[str, Any]:
    """Return a row of the leaderboard. `order` sorts the rows, the smallest first; None if the score is not kept.

    Two rows can be told apart if their `bounds` do not overlap. These are intervals that all hold at once with a
    confidence of 95 % (Bonferroni over the rows), from 0 if the share may be below the measured range, and to BEYOND if
    it may be above.

    Args:
        swept: The curve.
        rows: Number of rows of the leaderboard.
    """
    low, high = swept.measured_range
    shares, scores, full = swept.curve.points
    most = float(scores[shares.argmax()])
    shown = {"measured": [low, high], "most": most / full if full else None}
    try:
        smallest = swept.curve.smallest(KEEP)
    except ValueError as error:
        return shown | {"text": NOT_AVAILABLE, "interval": "", "order": None, "why": describe_error(error)}
    said_so = format_smallest_share(smallest, low, high).replace("<=", "≤").replace("%", "\u202f%")
    sure = swept.curve.smallest(KEEP, 1 - (1 - TAIL) / max(rows, 1))
    reach = (0.0, BEYOND) if sure.low is None or sure.high is None else (sure.low, sure.high)
    bounds = [min(max(end, 0.0), BEYOND) for end in reach]
    text, _, rest = said_so.partition(" [")
    ends = [] if smallest.low is None else rest.partition("]")[0].split(", ")
    interval = " to ".join(dict.fromkeys(ends))
    order = low / 2 if smallest.value < 0 else smallest.value
    clipped = [
        max(low, min(high, one)) if one is not None else None for one in (smallest.low, smallest.value, smallest.high)
    ]
    return shown | {
        "text": text,
        "interval": interval,
        "order": order if order < 2 else None,
        "ends": clipped,
        "bounds": bounds,
    }


def classify_column(cells: Sequence[MatrixCell]) -> str:
    """Return the class of a column of the matrix: that of the budget if it is a share, otherwise of the bytes held."""
    asked = cells[0].run.value["budget"]
    held = [cell.held for cell in cells if cell.held is not None]
    return classify_share(fmean(held) if held and not isinstance(asked, float) else float(asked or 0))


def classify_share(share: float) -> str:
    """Return the nearest budget class of a share by its logarithm, OTHER if none is within a factor of √2."""
    nearest = min(CLASSES, key=lambda name: abs(log2(share / CLASSES[name]))) if share > 0 else OTHER
    return nearest if nearest != OTHER and abs(log2(share / CLASSES[nearest])) <= 0.5 else OTHER


def describe_cell(cell: MatrixCell, needed: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return the numbers of a cell of the matrix, with those of `needed` (`Samples.count_needed`)."""
    difference = cell.difference
    entry: dict[str, Any] = {"score": cell.score.value, "held": cell.held, "attended": cell.attended}
    entry |= {"limit": cell.at_limit, "alike": cell.alike, "best": cell.best, "tied": cell.tied}
    entry["needed"] = (needed or {}).get(cell.run.hash)
    return entry | (
        {} if difference is None else {"diff": difference.difference, "low": difference.low, "high": difference.high}
    )


def list_classes(panel: Panel) -> list[str]:
    """Return the budget classes of a panel's matrix."""
    matrix = panel.data["matrix"] or {"classes": [], "by_bytes": []}
    return [*matrix["classes"], *(point["class"] for point in matrix["by_bytes"])]


def describe_times(row: TableRow, side: str) -> dict[str, float | None]:
    """Return both times in ms with their 95 % intervals, of the method or (`side="_full"`) of the full cache."""
    times: dict[str, float | None] = {}
    for name in ("ttft", "tpot"):
        value, error = (getattr(row, f"{name}{side}{end}") for end in ("", "_error"))
        reach = None if error is None else float(ndtri(TAIL)) * error
        ends = (None, None) if reach is None else (max(value - reach, 0.0), value + reach)
        times |= {name: value, f"{name}_low": ends[0], f"{name}_high": ends[1]}
    return times


def list_groups(records: Sequence[dict]) -> list[str]:
    return [record["group"] or record["uid"] for record in records]

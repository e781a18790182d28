"""The papers' tables of scores: what a cell shows, which run may fill it, and that its command makes that run."""

import csv
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from kvbench.cli import papers
from kvbench.config.catalogue import SHAPES, load_settings
from kvbench.config.compose import compose_config, expand_cells
from kvbench.papers import build, paper_runs
from kvbench.papers.build import build_table
from kvbench.papers.cell_values import CellValue, RunIndex
from kvbench.papers.exhibits import load_exhibits
from kvbench.papers.experiment_key import ExperimentKey, drop_unused
from kvbench.papers.paper_runs import Settings, is_of_cache, list_presets, needs_file, read_rows
from kvbench.papers.paper_table import PaperTable, make_commands
from kvbench.papers.published_scores import index_cells
from kvbench.papers.table_spec import (
    PAPERS,
    IndexedLines,
    expand_each,
    find_preset,
    is_cost_table,
    is_number,
    load_specs,
    merge_parts,
    read_published,
    read_tables,
    read_yaml,
)
from kvbench.runs.checks import check_settings
from kvbench.store import dataframes
from kvbench.sweeps.plan import expand_sweep
from kvbench.validation import SettingError
from tests.support.checkpoints import write_checkpoint
from tests.support.command_line import run_cli
from tests.support.delta_files import make_zero, write_compressors
from tests.support.lm_eval_words import use_few_words
from tests.support.printed_averages import find_contradictions, list_leaves
from tests.support.repository import ROOT
from tests.support.selection import choose_covering, only_in_full
from tests.support.table_runs import BOOK, put, record

TABLES = {name: spec for name, spec in load_specs().items() if not is_cost_table(spec)}
KEYDIFF = {**BOOK, "method": "keydiff", "budget": 6144}


def made(name: str, results: Path, **more: object) -> build.PaperTable:
    spec = TABLES[name] | more
    return build_table(spec, (), read_published(results, spec.get("file")), RunIndex.read(results))


def row_of(made: build.PaperTable, label: str) -> tuple:
    return dict(made.rows)[label]


FIVE = [record(index, score) for index, score in enumerate((10.0, 20.0, 30.0, 40.0, 50.0))]


def test_a_cell_has_the_published_value_the_measured_one_its_interval_and_the_difference(tmp_path):
    put(tmp_path, KEYDIFF, FIVE)
    assert papers.main(["--results", str(tmp_path), "keydiff", "17"]) == 0
    own = made("keydiff_table17", tmp_path)
    cell, *others = row_of(own, "KeyDiff")
    # mean 30, standard error √(250 / 5) = 7.071, t(4) = 2.776: 30 ± 19.63 points, shown as fractions; the upper end has
    # room for one more sample of 100
    assert (cell.published, cell.measured, cell.low, cell.high, cell.difference) == (
        "1.0",
        "0.30",
        "0.10",
        "0.67",
        "-0.70",
    )
    assert cell.text == "0.30 [0.10, 0.67] (-0.70)" and all(other.measured == "" for other in others)
    stem = tmp_path / "papers" / "keydiff_table17"
    assert "| KeyDiff | 1.0 | 0.30 [0.10, 0.67] (-0.70) |" in stem.with_suffix(".md").read_text()
    assert r"KeyDiff & 1.0 & 0.30 [0.10, 0.67] (-0.70) &" in stem.with_suffix(".tex").read_text()
    with stem.with_suffix(".csv").open(newline="") as file:
        line = next(row for row in csv.DictReader(file) if row[""] == "KeyDiff")
    parts = [line[f"100 {side}"] for side in ("published", "measured", "low", "high", "difference")]
    assert parts == ["1.0", "0.30", "0.10", "0.67", "-0.70"]


def test_an_empty_cell_has_the_number_of_the_note_with_its_command(tmp_path, capsys):
    assert papers.main(["--results", str(tmp_path), "keydiff", "17"]) == 0
    lines = capsys.readouterr().out.splitlines()
    [row] = [line for line in lines if line.startswith("| TOVA")]
    number = row.split("|")[3].strip()
    command = (
        "python run.py model=llama32_3b task=phonebook task.preset=keydiff question=visible block_size=128 method=tova "
        "method.preset=keydiff_paper budget=6144"
    )
    assert f"* {number} `{command}`" in lines


OTHER = {
    "model": {"model": "llama31_8b"},
    "question": {"question": "hidden"},
    "block": {"block_size": 64},
    "budget": {"budget": 4096},
    "share": {"budget": 0.5},
    "of": {"budget": 0.5, "budget_of": "seen"},
    "preset": {"method.preset": "kvpress"},
    "setting": {"method.recent": 0.1},
    "method": {"method": "knorm"},
    "allocator": {"allocator": "ada"},
    "codec": {"codec": "kivi"},
    "task": {"task.trials": 4},
    "limit": {"limit": 2},
    "seed": {"seed": 1},
    "sampling": {"temperature": 0.5},
}


@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER)
def test_a_run_of_another_protocol_fills_no_cell(tmp_path, change):
    put(tmp_path, KEYDIFF | change, FIVE)
    own = made("keydiff_table17", tmp_path)
    for label in ("full cache", "KeyDiff", "TOVA"):
        assert not any(cell.measured for cell in row_of(own, label))


def test_half_of_the_runs_fill_half_of_the_cells_and_the_gaps_have_commands(tmp_path):
    """Of a row of two runs one is there: its command is no longer asked for, and the published values stand."""
    runs = wanted(TABLES["expected_attention_table04"])[0]
    names = list_leaves(TABLES["expected_attention_table04"]["of"]["subtasks"])
    put(tmp_path, runs[0], [record(index, 50.0, name) for name in names for index in range(2)])
    table = made("expected_attention_table04", tmp_path)
    [first, *others] = [cell for _, cells in table.rows for cell in cells if cell.published]
    assert first.measured == "50.0" and first.filling is None
    assert others and all(not cell.measured and cell.filling for cell in others)
    commands = [ExperimentKey.from_settings(cell.filling) for cell in others]
    assert ExperimentKey.from_settings(runs[0]) not in commands


@pytest.mark.parametrize("width", ["wide", "1", "99", "nan"])
def test_a_width_that_is_none_is_one_line_and_writes_nothing(tmp_path, capsys, width):
    assert papers.main(["--results", str(tmp_path), "keydiff", "--width", width]) == 2
    out, err = capsys.readouterr()
    line = f"kvbench: --width {width}: choose column, page, or a number of inches from 2 to 20\n"
    assert not out and err == line and not list(tmp_path.iterdir())


def test_made_up_data_and_unfinished_runs_fill_no_cell(tmp_path):
    put(tmp_path, KEYDIFF, [record(0, 50.0), record(1, 50.0, meta={"data": "miniature"})])
    put(tmp_path, KEYDIFF, [record(0, 50.0), record(1, 50.0, meta={"haystack": "generated"})], sources="other")
    put(tmp_path, KEYDIFF, FIVE, finish=False, sources="another")
    assert not any(cell.text for _, cells in made("keydiff_table17", tmp_path).rows for cell in cells)


def test_the_newest_run_counts_and_failed_samples_are_told(tmp_path):
    put(tmp_path, KEYDIFF, FIVE, ended=5)
    put(tmp_path, KEYDIFF, [record(0, 40.0), record(1, 60.0), record(2, None)], ended=7, sources="newer")
    put(tmp_path, KEYDIFF, [record(0, 0.0), record(1, 0.0)], ended=6, sources="older")
    own = made("keydiff_table17", tmp_path)
    assert row_of(own, "KeyDiff")[0].measured == "0.50"
    assert "1 sample failed; its cell leaves it out." in own.notes


def test_one_context_has_no_interval(tmp_path):
    put(tmp_path, KEYDIFF, [record(0, 40.0)])
    assert row_of(made("keydiff_table17", tmp_path), "KeyDiff")[0].text == "0.40 (-0.60)"


def test_an_average_is_that_of_the_paper_and_of_the_records(tmp_path):
    """DeltaKV averages six categories, KeyDiff sixteen tasks; both are recomputed from the store's frame."""
    settings = {"model": "llama31_8b", "task": "longbench", "task.path": "hub", "method": "full"}
    names = list_leaves(TABLES["deltakv_table01"]["columns"][-1]["of"]["subtasks"])
    found = [
        record(index, float(7 * place + index), name) for place, name in enumerate(names[:14]) for index in range(3)
    ]
    found += [record(index, 12.0 * index, name) for name in names[14:] for index in range(5)]
    put(tmp_path, settings, found)
    frame = dataframes.load(tmp_path).records(["subtask", "score"]).groupby("subtask").score.mean()
    categories = TABLES["deltakv_table01"]["columns"][-1]["of"]["subtasks"]
    of_six = sum(sum(frame[own] for own in category) / len(category) for category in categories) / 6
    cell = row_of(made("deltakv_table01", tmp_path), "Llama-3.1-8B-Instruct, full cache")[-1]
    assert cell.published == "50.0" and cell.measured == f"{of_six:.1f}" and cell.difference == f"{of_six - 50:+.1f}"
    cell = row_of(made("keydiff_table01", tmp_path), "Llama-3.1-8B-Instruct, full cache")[-1]
    assert cell.measured == f"{frame.mean():.2f}" != f"{of_six:.2f}" and cell.low < cell.measured < cell.high


def test_keydiffs_tables_over_21_tasks_are_filled_by_runs_of_all_of_them(tmp_path):
    """A run of the 16 English and code tasks fills their cells and no other."""
    spec, label = TABLES["keydiff_table11"], "Llama-3.1-8B-Instruct, full cache"
    assert spec["run"]["task.subtasks"] == "all21" and "task.subtasks" not in TABLES["keydiff_table01"]["run"]
    names = spec["averages"]["of"]
    places = dict(zip((column["label"] for column in spec["columns"]), range(len(spec["columns"])), strict=True))
    chinese = {"multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh"}
    settings = {**spec["run"], "model": "llama31_8b", "method": "full"}
    scores = {name: float(place) for place, name in enumerate(names)}

    def fill(chosen: Iterable[str], **own: object) -> dict[str, str]:
        put(tmp_path, settings, [record(0, scores[name], name) for name in chosen], **own)
        cells = row_of(made("keydiff_table11", tmp_path), label)
        return {name: cells[place].measured for name, place in places.items()}

    of_16 = fill(name for name in names if name not in chinese)
    assert {name for name, value in of_16.items() if not value} == chinese | {"mean of 21"}
    of_21 = fill(names, sources="newer")
    assert of_21["lsht"] == "15.00" and of_21["mean of 21"] == "10.00" and of_21["mean of 16"] == of_16["mean of 16"]


def test_longer_answers_and_differences_are_against_the_full_cache(tmp_path):
    settings = {**TABLES["keydiff_table05"]["run"], "method": "full", "task.max_new_tokens": 4096}
    method = settings | {"method": "keydiff", "method.preset": "paper_window", "budget": 1024}

    def answers(tokens: list[int], right: list[bool]) -> list[dict]:
        return [
            record(i, 0.0, "math500", tokens_out=count, also={"flexible": 100.0 * own, "exact": 0.0})
            for i, (count, own) in enumerate(zip(tokens, right, strict=True))
        ]

    put(tmp_path, method, answers([1] * 4, [True, False, False, True]))
    label = "4k, > 1024 tokens, KeyDiff 20 % recent"
    assert row_of(made("keydiff_table05", tmp_path), label)[0].measured == ""  # the full cache says which are long
    put(tmp_path, settings, answers([500, 925, 3000, 3000], [True] * 4))
    cell = row_of(made("keydiff_table05", tmp_path), label)[0]
    assert cell.measured == "0.333"  # 100 + 925 is beyond 1024: one of three
    cell = row_of(made("keydiff_table05", tmp_path), "4k, > 1024 tokens, full cache")[0]
    assert cell.measured == "1.000"

    needle = {**TABLES["keydiff_table18"]["run"]}
    sides = ((needle, (100.0, 50.0)), (needle | {"method": "full"}, (100.0, 100.0)))
    for own, scores in sides:
        meta = {"depth": 11, "data": "hub", "haystack": "hub:x"}
        put(tmp_path, own, [record(i, score, "niah_1000", meta=meta) for i, score in enumerate(scores)])
    cell = row_of(made("keydiff_table18", tmp_path), "depth 11 %")[0]
    assert cell.measured == "-0.25" and row_of(made("keydiff_table18", tmp_path), "depth 0 %")[0].measured == ""


def test_only_averages_of_whole_runs_are_published_scores_of_runs():
    """KeyDiff's Table 4 averages all answers of a run, and Table 5 the long ones of the same runs."""
    tables = {table for cells in index_cells().values() for table, _ in cells}
    assert "keydiff_table04" in tables and "keydiff_table05" not in tables


HOSTILE = "a_b%$&#{x}~^\\|`<script>\x1b[31m\n\\end{tabular}"


def test_what_else_the_store_holds_has_rows_of_its_own_and_hostile_names_are_text(tmp_path):
    put(tmp_path, KEYDIFF | {"model": "qwen3_8b"}, FIVE, model={"name": HOSTILE, "identity": "x"})
    put(tmp_path, {**KEYDIFF, "method": "snapkv", "method.window": 9, "allocator": "pyramid"}, FIVE)
    put(tmp_path, {**KEYDIFF, "budget": 100}, FIVE)  # no budget of the table
    own = made("keydiff_table17", tmp_path)
    labels = [label for label, _ in own.rows]
    assert len(labels) == 3 + 2 and "llama32_3b, snapkv window=9, pyramid, budget 6144 (not in the paper)" in labels
    assert row_of(own, labels[-1])[0].text == "0.30 [0.10, 0.67]"
    for text in (own.to_markdown(), own.to_latex(), own.to_csv()):
        assert "\x1b" not in text and not any(line.startswith("\\end{tabular}") for line in text.splitlines()[:-1])
    assert "<script>" not in own.to_markdown()
    [row] = [line for line in own.to_markdown().splitlines() if "script" in line]
    assert len(re.findall(r"(?<!\\)\|", row)) == 2 + 2 * 10 and "`" not in row.replace("\\`", "")
    [row] = [line for line in own.to_latex().splitlines() if "script" in line]
    assert r"a\_b\%\$\&\#\{x\}\textasciitilde{}\textasciicircum{}\textbackslash{}$|$" in row
    assert row.count(" & ") == 2 * 10


def test_a_command_in_a_note_can_be_copied():
    note = "*all* cells: `python run.py -m preset=a_table1`"
    assert note.replace("*", r"\*") in PaperTable("title", (), (), (note,)).to_markdown()


def test_no_number_is_minus_zero(tmp_path):
    """Rounding makes a small negative end of an interval, or difference, 0."""
    cell = build.format_cell(CellValue(-0.001, -0.004, 60.24, 0, ""), "0.0", 1.0, 2)
    assert cell.text == "0.00 [0.00, 60.24] (+0.00)"


@pytest.mark.parametrize("own", [{"also": {"flexible": 101.0}}, {"also": {}}, {"score": 101.0}])
def test_a_record_outside_its_range_is_named_and_the_rest_is_shown(tmp_path, capsys, own):
    settings = {**TABLES["keydiff_table05"]["run"], "method": "full"}
    good = {"also": {"flexible": 50.0, "exact": 0.0}, "tokens_out": 3000}
    line = record(0, 0.0, "math500") | good | own
    bad = put(tmp_path, settings | {"task.max_new_tokens": 4096}, [line])
    put(tmp_path, settings | {"task.max_new_tokens": 8192}, [record(0, 0.0, "math500", **good)])
    assert papers.main(["--results", str(tmp_path), "keydiff", "5"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith(f"kvbench: run {bad} is left out: ") and err.count("\n") == 1
    found = {label: cells[0].measured for label, cells in made("keydiff_table05", tmp_path).rows if cells[0].measured}
    assert found == {"8k, > 2048 tokens, full cache": "0.500"} and "0.500 (" in out


def test_a_damaged_run_is_named_and_the_rest_is_shown(tmp_path, capsys):
    put(tmp_path, KEYDIFF, FIVE)
    damaged = put(tmp_path, {**KEYDIFF, "budget": 4096}, FIVE)
    (tmp_path / "runs" / damaged / "run.yaml").write_text("format: [")
    assert papers.main(["--results", str(tmp_path), "keydiff", "17"]) == 0
    shown = capsys.readouterr()
    assert "0.30 [0.10, 0.67]" in shown.out and f"run {damaged} is left out" in shown.err


@pytest.mark.parametrize(
    "which, line",
    [
        (["drop"], "kvbench: PAPER=drop: did you mean dropkv? Choose one of centroidkv, "),
        (["dropkv", "11"], "kvbench: EXHIBIT=11: it is static: the methods' formulas; nothing is measured\n"),
        (["dropkv", "44"], "kvbench: EXHIBIT=44: did you mean table"),
    ],
)
def test_what_is_no_table_is_refused_in_one_line(tmp_path, capsys, which, line):
    assert papers.main(["--results", str(tmp_path), *which]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(line) and err.count("\n") == 1 and not list(tmp_path.iterdir())


PRINTED = {name: spec for name, spec in [*TABLES.items(), *load_exhibits().items()] if "file" in spec}


@pytest.mark.parametrize("name", PRINTED)
def test_every_published_value_stands_in_a_cell(name):
    """In one cell; the full cache's column of Expected Attention, stored once, in one of each row."""
    spec, used = PRINTED[name], Counter()
    printed = IndexedLines(read_published(ROOT, spec["file"]))
    for row in expand_each(spec["rows"]):
        for column in expand_each(spec["columns"]):
            select = merge_parts(spec, row, column).get("published")
            fitting = printed.find_matching(select) if select is not None else []
            assert len(fitting) <= 1, select
            used.update(id(line) for line in fitting)
    for line in printed.lines:
        assert used[id(line)] or not line["value"], line
        assert used[id(line)] <= 1 or line["method"] == "full"


def test_every_file_is_used_or_left_out_with_a_reason():
    studied = load_exhibits()  # kvbench papers study fills these tables
    used = {spec["file"] for spec in [*load_specs().values(), *studied.values()] if "file" in spec}
    reasons = {
        f"{path.stem}_{name}.csv": reason
        for path in PAPERS.glob("*.yaml")
        for name, reason in read_tables(path)["exhibits"].items()
        if isinstance(reason, str)
    }
    files = {path.name for path in (ROOT / "results" / "published").glob("*.csv")}
    assert files == used | (files & reasons.keys()) and not used & reasons.keys()
    numbered = {name for name in [*load_specs(), *studied] if re.search(r"_table\d\d$", name)}
    counts = {"keydiff": 19, "expected_attention": 20, "deltakv": 14, "dropkv": 18, "centroidkv": 8}
    for paper, count in counts.items():
        for number in range(1, count + 1):
            assert (f"{paper}_table{number:02d}" in numbered) != (f"{paper}_table{number:02d}.csv" in reasons)


@pytest.mark.parametrize("name", [name for name, spec in TABLES.items() if "averages" in spec])
def test_the_averages_that_contradict_their_cells_are_the_ones_footnoted(name):
    spec = TABLES[name]
    own = read_published(ROOT, spec["file"])
    lines = [line for file in spec["averages"].get("files", [spec["file"]]) for line in read_published(ROOT, file)]
    found = [
        {key: float(value) if is_number(value) else value for key, value in who.items()}
        | {"printed": printed, "cells": round(value, 2)}
        for who, printed, value in find_contradictions(spec["averages"]["of"], lines, own)
    ]
    listed = spec["averages"]["contradict"]
    keys = {key for who in listed for key in who}
    assert [{key: own[key] for key in own if key in keys} for own in found] == listed
    notes = made(name, ROOT).notes
    assert sum(note.startswith("Contradiction in ") for note in notes) == len(listed)


@pytest.mark.parametrize("name", [name for name, spec in TABLES.items() if "checks" in spec])
def test_what_the_notes_say_of_published_values_is_so(name):
    spec = TABLES[name]
    lines = read_published(ROOT, spec["file"])

    def values(**where: object) -> list[str]:
        return [line["value"] for line in lines if all(line[key] == str(value) for key, value in where.items())]

    for one in spec["checks"].get("repeated", ()):
        for method in one["methods"]:
            variants = [
                [
                    line["value"]
                    for line in lines
                    if line["method"] == method
                    and own in re.sub("^sliding_20;", "", line["variant"])
                    and line["budget"] == str(one.get("budget", line["budget"]))
                    and line["metric"] in one.get("metrics", [line["metric"]])
                ]
                for own in one["where"]
            ]
            assert variants[0] == variants[1] != []
    if alike := spec["checks"].get("alike"):
        pairs = [values(method=method, budget=alike["budget"]) for method in alike["methods"]]
        assert sum(one == other for one, other in zip(*pairs, strict=True)) == alike["cells"]
    for method, mean in spec["checks"].get("means", {}).items():
        own = list(map(float, values(method=method)))
        assert len(own) == 16 and round(sum(own) / 16, 2) == mean
    for one in spec["checks"].get("compute_ratios", ()):
        by_equation = 100 * compute_ratio(one["preset"], one["read"])
        assert round(by_equation, 1) == one["equation"] != 100 * one["read"]
        variants = [line["variant"] for line in lines if line["model"] == one["model"] and line["method"] == "deltakv"]
        assert any(f"compute={one['read']}" in variant.split(";") for variant in variants)
        if one["model"].startswith("meta-llama"):  # the only model of Table 8, which prints the ratio itself
            printed = IndexedLines(read_published(ROOT, "deltakv_table08.csv"))
            where = {"method": "deltakv", "variant": f"target_budget={one['read']}", "task": "kv_compute_ratio"}
            assert float(printed.find_published(where)) == 100 * one["read"]
        assert any(f"{one['equation']} %" in note for note in spec["notes"])


def compute_ratio(preset: str, share: float) -> float:
    """Equation 6 of DeltaKV: the share of all rows that are read, if `share` is read in layers that are not full."""
    own = load_settings("method", "deltakv", {"preset": preset})
    full = len(own["full_layers"]) / own["depth"]
    return full + (1 - full) * share


def wanted(spec: dict, with_files: bool = False) -> list[list[dict]]:
    """Of each row the settings of its cells' runs: those that need no file, or those that need one."""
    columns = list(expand_each(spec["columns"]))
    rows = [[merge_parts(spec, row, column).get("run") for column in columns] for row in expand_each(spec["rows"])]
    own = [[drop_unused(run) for run in row if run is not None] for row in rows]
    return [[run for run in row if needs_file(run) == with_files] for row in own]


DELTA_RUNS = [run for own in TABLES.values() for row in wanted(own, True) for run in row if run["method"] == "deltakv"]
DELTA_RUNS = list({str(sorted(run.items())): run for run in DELTA_RUNS}.values())


def name_run(run: dict) -> str:
    return "-".join(
        str(run[name]) for name in ("model", "task", "codec.preset", "codec.bits", "codec.remove") if name in run
    )


@pytest.mark.parametrize("run", DELTA_RUNS, ids=name_run)
def test_deltakvs_share_makes_its_printed_compute_ratio(run):
    """Of all rows 30 or 20 %, to a percent, where the share has two digits."""
    preset = run.get("method.preset", "llama31_8b")
    assert run.get("codec.preset", "llama31_8b") == preset and run["model"].startswith(preset.removesuffix("_20"))
    target = 0.2 if preset in ("llama31_8b_20", "qwen25_32b") else 0.3
    assert abs(compute_ratio(preset, run["budget"]) - target) < 0.005


def parts(settings: dict) -> set[tuple[str, ...]]:
    """What a run is composed of: the files of its groups but for models, and the names of all settings."""
    groups = ("method", "allocator", "codec", "task")
    chosen = {(name, str(value)) for name, value in settings.items() if name in groups}
    return chosen | {(name,) for name in settings}


def every_part() -> list[dict]:
    """A few of all cells' runs that together have all parts of all of them."""
    runs = {str(own): own for spec in TABLES.values() for row in wanted(spec) for own in row}
    chosen = choose_covering([frozenset(parts(own)) for own in runs.values()])
    return [own for place, own in enumerate(runs.values()) if place in chosen]


def distinct() -> list[str]:
    """Tables that do not want the runs of another one."""
    return list({str(wanted(spec)): name for name, spec in TABLES.items()}.values())


@pytest.fixture
def offline(monkeypatch):
    """Data sets and models are not fetched: data is the miniature's, a model's configuration that of its shape. What a
    run is known by of both is no part of a protocol.
    """
    from kvbench.models.checkpoint import Checkpoint
    from kvbench.models.configuration import load_configuration, load_layout
    from kvbench.runs import spec
    from kvbench.tasks.longbench import task
    from kvbench.tasks.mathematics import task as math_problems
    from kvbench.tasks.niah import task as needle
    from kvbench.tasks.ruler import kvpress_port, lm_eval_port
    from kvbench.tasks.ruler import task as ruler
    from kvbench.tasks.scbench import task as scbench

    def instead(module: object, name: str, *fixed: object, place: int = 0) -> None:
        real = getattr(module, name)

        def fetched(*given: object) -> object:
            return real(*(*given[:place], *fixed, *given[place + len(fixed) :]))

        monkeypatch.setattr(module, name, fetched)

    instead(task, "load_rows", "miniature")
    instead(task, "load_kvpress_rows", "miniature")
    instead(kvpress_port, "find_rows", "miniature")
    instead(math_problems, "load_problems", "miniature", place=1)
    instead(needle, "load_haystack", None)
    instead(ruler, "load_texts", None, None)
    instead(scbench.data, "load_rows", "miniature")
    monkeypatch.setattr(lm_eval_port.RulerLmEval, "fingerprint", lambda self: "data")
    for name, read in (("config", load_configuration), ("layout", load_layout)):
        monkeypatch.setattr(Checkpoint, name, lambda own, read=read: read(str(SHAPES / f"{own.name}.json")))
    monkeypatch.setattr(Checkpoint, "identity", lambda self: "weights")
    monkeypatch.setattr(spec, "source_hash", lambda names: "sources")


def composed(line: str) -> list[ExperimentKey]:
    """The runs that a command makes."""
    from kvbench.runs.spec import RunSpec

    words = shlex.split(line)
    assert words[:2] == ["python", "run.py"]
    own = expand_cells([word for word in words[2:] if word != "-m"])
    assert (words[2] == "-m") == (len(own) > 1)
    return [ExperimentKey.of(RunSpec.from_config(compose_config(one)).value) for one in own]


def check(settings: list[dict]) -> None:
    found = {protocol for line in make_commands(settings) for protocol in composed(line)}
    assert found == {ExperimentKey.from_settings(own) for own in settings}


@pytest.mark.parametrize("part", range(3))
def test_a_command_makes_exactly_the_run_that_fills_its_cell(offline, part):
    """Every method, codec, task and setting of all cells, each at least once; all cells in `make test-all`."""
    for settings in every_part()[part::3]:
        check([settings])


def test_commands_of_a_row_and_of_a_sweep_make_the_runs_that_fill_its_cells(offline):
    check(wanted(TABLES["expected_attention_table04"])[0])  # a row of several commands
    check(wanted(TABLES["keydiff_table15"])[0])  # a sweep


def write_zeros(path: Path, model: str) -> None:
    """Write compressors of zeros for a model's shape."""
    shape = json.loads((SHAPES / f"{model}.json").read_text())
    head = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    width, layers = 2 * shape["num_key_value_heads"] * head, shape["num_hidden_layers"]
    write_compressors(path, [make_zero(width, 8) for _ in range(layers)])


@pytest.mark.parametrize("run", [own for own in DELTA_RUNS if own["task"] == "longbench"], ids=name_run)
def test_a_command_with_a_file_makes_the_run_that_fills_its_cell(offline, tmp_path, monkeypatch, run):
    write_zeros(tmp_path / run["codec.path"], run["model"])
    monkeypatch.chdir(tmp_path)
    check([run])


def test_commands_in_the_notes_of_a_table_without_runs_make_runs(offline, tmp_path, monkeypatch):
    text = made("deltakv_table03", tmp_path).to_markdown()
    commands = dict(re.findall(r"^\* (\w+): `(python run\.py [^`]*)`$", text, re.MULTILINE))
    write_zeros(tmp_path / "COMPRESSORS", "r1_qwen_7b")
    monkeypatch.chdir(tmp_path)
    assert list(commands) == ["OmniKV", "DeltaKV"]
    assert all(len(composed(command)) == 1 for command in commands.values())


def test_rows_that_differ_in_their_file_only_share_a_run(tmp_path):
    run = next(own for own in DELTA_RUNS if own["model"] == "llama31_8b" and own["task"] == "longbench")
    names = list_leaves(TABLES["deltakv_table01"]["columns"][-1]["of"]["subtasks"])
    put(tmp_path, run, [record(index, 10.0 * index, name) for name in names for index in range(3)])
    own = made("deltakv_table01", tmp_path)
    filled = {label for label, cells in own.rows if any(cell.measured for cell in cells)}
    assert filled == {f"Llama-3.1-8B-Instruct, DeltaKV, {which} row" for which in ("first", "second")}
    assert any("so a run stands beside both" in note for note in own.notes)


@pytest.mark.full
@pytest.mark.parametrize("name", distinct())
def test_the_commands_of_a_row_make_exactly_the_runs_that_fill_it(offline, name):
    for row in wanted(TABLES[name]):
        check(row)


def test_commands_cross_only_what_is_wanted_crossed():
    one, two = {"method": "snapkv", "budget": 0.1}, {"method": "keydiff", "budget": 0.3}
    assert make_commands([one, two]) == (
        "python run.py method=snapkv budget=0.1",
        "python run.py method=keydiff budget=0.3",
    )
    assert make_commands([one, one | {"budget": 0.3}]) == ("python run.py -m method=snapkv budget=0.1,0.3",)
    assert make_commands([{"a": [1, "x"], "b": {"c": None}, "d": True}]) == (
        "python run.py 'a=[1,x]' 'b={c:null}' d=true",
    )


def runnable(name: str) -> set[ExperimentKey]:
    return {ExperimentKey.from_settings(run) for row in wanted(TABLES[name]) for run in row}


def protocols(cells: Iterable[Sequence[str]]) -> set[ExperimentKey]:
    """What the runs of these cells are known by."""
    from kvbench.runs.spec import RunSpec

    return {ExperimentKey.of(RunSpec.from_config(compose_config(cell)).value) for cell in cells}


def type_settings(run: Settings) -> list[str]:
    """A run's settings as a user types them."""
    return [f"{name}={value}" for name, value in run.items()]


def test_every_table_has_a_preset_or_says_why_not():
    """Tables of one preset want the same runs; a table without has none that could fill it."""
    found: dict[str, set[frozenset[ExperimentKey]]] = {}
    for name, spec in TABLES.items():
        preset, own = find_preset(name, spec), runnable(name)
        assert bool(own) == (preset is not None) and len(spec.get("no_preset", "because")) > 5, name
        if own:
            found.setdefault(preset, set()).add(frozenset(own))
    assert sorted(found) == list_presets() and {len(own) for own in found.values()} == {1}


@cache
def expand_preset(preset: str) -> tuple[Settings, ...]:
    return tuple(paper_runs.expand_preset(preset))


@cache
def select_presets() -> list[object]:
    """All presets; those that `make test` leaves out have a task of which it runs another preset."""
    presets = list_presets()
    tasks = [frozenset(run["task"] for run in expand_preset(preset)) for preset in presets]
    chosen = choose_covering(tasks)
    return [own if place in chosen else only_in_full(own) for place, own in enumerate(presets)]


@pytest.mark.parametrize("preset", select_presets())
def test_a_preset_has_cells_of_its_table(offline, preset):
    own = runnable(next(name for name, spec in TABLES.items() if find_preset(name, spec) == preset))
    runs = expand_preset(preset)
    assert protocols(map(type_settings, (runs[0], runs[-1]))) <= own and len(runs) >= len(own)


@pytest.mark.full
@pytest.mark.parametrize("preset", list_presets())
def test_a_preset_is_its_whole_table(offline, preset):
    own = runnable(next(name for name, spec in TABLES.items() if find_preset(name, spec) == preset))
    assert protocols(expand_sweep([f"preset={preset}"])) == own


def test_rows_are_those_of_the_tables():
    """A row's settings are of runs that some preset makes; a preset's `row=` leaves the others out."""
    caches = [
        {name: own for name, own in run.items() if is_of_cache(name)}
        for p in list_presets()
        for run in expand_preset(p)
    ]
    assert all(settings in caches for settings in read_rows().values())
    assert len(expand_sweep(["preset=dropkv_table5", "row=dropkv_snapkv,full"])) == 3 * 3 + 3
    assert expand_sweep(["row=dropkv_snapkv", "budget=0.1"]) == [
        ["method=snapkv", "method.preset=dropkv_paper", "budget=0.1"]
    ]
    assert expand_sweep(["row=dropkv_snapkv", "method=knorm"]) == [["method=knorm"]]
    for given, line in (
        (
            ["preset=dropkv_table5", "row=keydiff_h2o"],
            "^row=keydiff_h2o: preset=dropkv_table5 has none; choose from full, ",
        ),
        (["row=snapkv"], "^row=snapkv: choose one of "),
        (["preset=dropkv"], "^preset=dropkv: choose one of "),
    ):
        with pytest.raises(SettingError, match=line):
            expand_sweep(given)


def test_what_is_given_takes_the_place_of_a_presets_setting():
    cells = expand_sweep(["preset=dropkv_table1", "model=reference", "budget=0.2,0.3"])
    assert len(cells) == 2 * 8 + 1 and sum("method=full" in cell for cell in cells) == 1
    assert all("model=reference" in cell and not any("budget=0.05" in text for text in cell) for cell in cells)


MADE = ["task.path=miniature"]
SMALL = {  # task -> settings beside a preset's, with which one sample is made by kvbench and answered in seconds
    "aime25": [*MADE, "task.max_new_tokens=8"],
    "longbench": [*MADE, "task.subtasks=[hotpotqa]"],
    "math500": [*MADE, "task.max_new_tokens=8"],
    "niah": ["task.haystack_path=null", "task.lengths=[1000]", "task.depths=[50]", "task.new_tokens=8"],
    "phonebook": ["task.sizes=[20]"],
    "ruler": ["task.haystack_path=null", "task.qa_path=null", "task.length=1024", "task.subtasks=[ruler_vt]"],
    "ruler_kvpress": [*MADE, "task.subtasks=[ruler_vt]"],
    "ruler_lmeval": ["task.length=1024", "task.subtasks=[ruler_vt]"],
    "scbench": [*MADE, "task.subtasks=[scbench_kv]", "task.max_turns=1"],
}


CUT = "budget=12"  # rows: fewer than any prompt of SMALL has


def without_sizes(protocol: ExperimentKey) -> ExperimentKey:
    """What a preset's cell keeps when its model, its budget and the size of its task are others."""
    return replace(protocol, model="", task="", budget="")


def first_cut(preset: str, task: str) -> tuple[str, ...]:
    """The settings of the first run of a preset that cuts anything, beside those of SMALL, the budget and a model."""
    run = next(own for own in expand_preset(preset) if own["method"] != "full")
    run = {"allocator": "uniform", "codec": "raw"} | run  # so that these settings make one cell of all
    given = ["model", "budget", *(own.split("=")[0] for own in SMALL[task])]
    return tuple(f"{name}={value}" for name, value in run.items() if name not in given)


def run_sweep(
    given: Sequence[str], model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> list[dict]:
    """Run what a user starts, with one prompt of each task and a small model; return the sweep's cells."""
    monkeypatch.setattr("kvbench.integrations.math_verify.grade", lambda folder: None)
    where = [f"results={folder}", f"hydra.sweep.dir={folder}/sweep", "device=cpu"]
    with use_few_words():
        asked = ["-m", "--verbose", *given, CUT, "model=hf", f"model.path={model}", "limit=1", *where]
        code, _, err = run_cli(asked, monkeypatch, capsys)
    said = [line for line in err.splitlines() if line.startswith("kvbench:")]
    assert code == 0 and all(line.startswith("kvbench: model") for line in said), err  # remarks on the small model
    return json.loads((folder / "sweep" / "cells.json").read_text())


def check_records(value: dict, run: Path) -> None:
    """Hold that a run answered every prompt, and that all rows stayed or counted with the full cache alone."""
    lines = [json.loads(line) for file in run.glob("records*.jsonl") for line in file.read_text().splitlines()]
    assert lines and (run / "done").exists()
    for line in lines:
        assert line["error"] is None and 0 <= line["score"] <= 100 and line["tokens_out"] > 0
        whole = line["rows_held"] == line["rows_seen"]
        if line["tokens_out"] > 1:
            whole &= line["rows_attended"] == line["rows_seen_decoding"]
        packed = value["codec"]["name"] != "raw"
        assert whole == (value["method"]["name"] == "full")
        assert packed == (whole and line["resident_bytes"] < line["full_bytes"])


@pytest.fixture(scope="module")
def ran() -> dict[tuple[str, ...], tuple[dict, list[Path]]]:
    """What has run of a preset that is the same as others: the cell as planned, and the folders of its two runs."""
    return {}


@pytest.mark.parametrize("preset", select_presets())
def test_a_cell_of_a_preset_runs_on_made_data(ran, checkpoint, tmp_path, monkeypatch, capsys, preset):
    """The sweep that a user starts, of one cell and with a random model for the paper's, leaves graded records."""
    own = runnable(next(name for name, spec in TABLES.items() if find_preset(name, spec) == preset))
    task = json.loads(next(iter(own)).task)["name"]
    key = first_cut(preset, task)
    if key not in ran:
        asked = [f"preset={preset}", *first_cut(preset, task), *SMALL[task]]
        [planned] = run_sweep(asked, checkpoint, tmp_path, monkeypatch, capsys)
        ran[key] = planned, [tmp_path / "runs" / name for name in planned["runs"]]
    planned, folders = ran[key]
    assert planned["value"]["task"]["name"] == task
    assert without_sizes(ExperimentKey.of(planned["value"])) in map(without_sizes, own)
    for folder in folders:
        check_records(read_yaml(folder / "run.yaml")["value"], folder)


LAYERS = 8  # so that OmniKV and Quest have layers that read few rows


def list_rows(preset: str) -> frozenset[tuple[tuple[str, str], ...]]:
    """The runs of a preset without their models and what SMALL and CUT replace."""
    runs = expand_preset(preset)
    given = {"model", CUT.split("=")[0], *(own.split("=")[0] for own in SMALL[runs[0]["task"]])}
    return frozenset(tuple(sorted((name, own) for name, own in run.items() if name not in given)) for run in runs)


def list_sweeps() -> list[tuple[str, str]]:
    """Presets with a model of each of their architectures; once, if two presets differ in nothing else."""
    found = {}
    for preset in list_presets():
        for model in {run["model"]: None for run in expand_preset(preset)}:
            kind = json.loads((SHAPES / f"{model}.json").read_text())["model_type"]
            found.setdefault((list_rows(preset), kind), (preset, model))
    return list(found.values())


@pytest.fixture(scope="module")
def make_family(tmp_path_factory) -> Callable[[str], Path]:
    """Gives the folder of a small random model with the architecture of a model of the papers."""

    @cache
    def make(like: str) -> Path:
        folder = tmp_path_factory.mktemp(like)
        write_checkpoint(folder, LAYERS, stops=False, like=like)
        return folder

    return make


def check_all(cells: Iterable[dict], folder: Path) -> None:
    """Hold that all runs of a sweep left the records of `check_records`."""
    for name in {name for cell in cells for name in cell["runs"]}:
        run = folder / "runs" / name
        check_records(read_yaml(run / "run.yaml")["value"], run)


@pytest.mark.full
@pytest.mark.parametrize("preset, model", list_sweeps())
def test_all_rows_of_a_preset_run_on_its_architectures(make_family, tmp_path, monkeypatch, capsys, preset, model):
    asked = [f"preset={preset}", *SMALL[expand_preset(preset)[0]["task"]]]
    cells = run_sweep(asked, make_family(model), tmp_path, monkeypatch, capsys)
    assert len(cells) == len(list_rows(preset))
    check_all(cells, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("model", ["llama31_8b", "qwen3_8b"])
def test_every_row_runs(make_family, tmp_path, monkeypatch, capsys, model):
    asked = ["row=" + ",".join(read_rows()), "task=phonebook", *SMALL["phonebook"]]
    cells = run_sweep(asked, make_family(model), tmp_path, monkeypatch, capsys)
    assert {cell["value"]["method"]["name"] for cell in cells} == {own["method"] for own in read_rows().values()}
    check_all(cells, tmp_path)


def test_every_row_is_composed_and_checked():
    for cell in expand_sweep(["row=" + ",".join(read_rows()), "task=phonebook"]):
        check_settings(compose_config(cell))

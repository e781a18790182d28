"""Comparisons of published cells: which cells are compared, and with which intervals and signs."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.analysis import cell_comparisons
from kvbench.analysis.cell_comparisons import CellComparison, make_cell
from kvbench.analysis.joint_signs import sign_changes
from kvbench.analysis.result_lines import PartNumbers, read_part
from kvbench.config.catalogue import identity_settings, load_settings
from kvbench.config.planned_pairs import list_compared, parse_settings
from kvbench.config.study_parts import read_study
from kvbench.report.results_cells import find_spreads, split_sections
from kvbench.report.results_conclusions import conclude_changes
from kvbench.report.results_tables import format_named_changes, format_planned, format_spreads
from kvbench.store.published_file import write_published
from kvbench.store.published_runs import publish
from kvbench.store.run_folder import RunFolder
from kvbench.store.runs import StoredRun, load_runs
from kvbench.validation import SettingError
from tests.support.made_up_runs import write_run
from tests.support.measured_lines import make_full, make_line
from tests.support.report_store import make_records
from tests.support.single_tables import compare_scores

CHANCES = {"snapkv": 0.9, "keydiff": 0.2, "tova": 0.8}
PAPER = ("method=snapkv method.preset=paper", "method=snapkv method.preset=kvpress")


def draw_records(held: float, chance: float, seed: int) -> dict[str, dict]:
    """Records of one subtask of 30 samples, right with this chance."""
    draw = random.Random(seed)
    drawn = make_records(held, 100, count=30)
    return {
        uid: record | {"score": 100.0 * (draw.random() < chance), "group": uid}
        for uid, record in drawn.items()
        if record["subtask"] == "vt"
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Rows with two questions, three methods at two budgets, a codec, and two presets."""
    folder = tmp_path_factory.mktemp("store")
    for at, question in enumerate(("visible", "hidden")):
        write_run(folder, draw_records(1.0, 1.0, 0), method={"name": "full"}, question=question)
        for name, chance in CHANCES.items():
            for budget in (0.2, 0.5):
                records = draw_records(budget, chance, at + len(name))
                write_run(folder, records, method={"name": name}, budget=budget, question=question)
        coded = draw_records(0.2, 0.95, at)
        write_run(folder, coded, method={"name": "snapkv"}, codec={"name": "int4"}, budget=0.711, question=question)
    for preset in ("paper", "kvpress"):
        given = load_settings("method", "snapkv", {"preset": preset})
        method = {name: value for name, value in given.items() if name not in ("preset", "_target_")}
        write_run(folder, draw_records(0.1, 0.5, len(preset)), method=method, budget=0.1)
    write_published([publish(run) for run in load_runs(folder)], {}, folder / "a.parquet")
    return folder / "a.parquet"


def describe(part):
    lines = {line["hash"]: line for line in part.lines}

    def name(line):
        return line["question"], line["method"], line["codec"], line["budget"]

    return [(name(lines[each.one]), name(lines[each.other])) for each in part.planned]


def test_a_pair_is_compared_in_every_column_that_has_both(path):
    assert describe(read_part(path, [("method=snapkv", "method=tova")])) == [
        ((question, "snapkv", "raw", budget), (question, "tova", "raw", budget))
        for question in ("visible", "hidden")
        for budget in (0.2, 0.5)
    ]


def test_a_pair_with_budgets_is_compared_at_these(path):
    pair = ("method=snapkv budget=0.2", "method=snapkv codec=int4 budget=0.711")
    assert describe(read_part(path, [pair])) == [
        ((question, "snapkv", "raw", 0.2), (question, "snapkv", "int4", 0.711)) for question in ("visible", "hidden")
    ]


def test_presets_are_found_by_their_settings(path):
    part = read_part(path, [PAPER])
    [[one, other]] = [[each.one, each.other] for each in part.planned]
    labels = {line["hash"]: line["label"] for line in part.lines}
    assert labels[one].startswith("snapkv") and "kvpress" not in labels[one] and "kvpress" in labels[other]


def test_what_was_not_measured_is_left_out(path):
    assert read_part(path, [("method=snapkv", "method=kvzip")]).planned == []
    assert read_part(path).planned == []


def test_a_pair_that_means_several_cells_is_refused(path, tmp_path):
    with pytest.raises(SettingError, match="'method=snapkv budget=0.2' and 'method=tova' mean several cells"):
        folder = tmp_path / "store"
        write_run(folder, draw_records(1.0, 1.0, 0), method={"name": "full"})
        for more in ({}, {"window": 8}):
            write_run(folder, draw_records(0.2, 0.5, 1), method={"name": "snapkv", **more}, budget=0.2)
        write_run(folder, draw_records(0.2, 0.5, 1), method={"name": "tova"}, budget=0.2)
        write_published([publish(run) for run in load_runs(folder)], {}, tmp_path / "x.parquet")
        read_part(tmp_path / "x.parquet", [("method=snapkv budget=0.2", "method=tova")])


def test_differences_are_paired_and_signs_are_joint_for_the_part(path, monkeypatch):
    pairs = [("method=snapkv", "method=keydiff"), ("method=snapkv", "method=tova")]
    part = read_part(path, pairs)
    stored = {run.hash: run for run in load_runs(path.parent)}
    assert len(part.planned) == 8
    for each in part.planned:
        scores = [[record["score"] for record in stored[name].records.values()] for name in (each.one, each.other)]
        change = compare_scores(*scores, list(stored[each.one].records))
        assert each.change == (change.difference, change.low, change.high)
    signs = [each.sign for each in part.planned]
    assert signs[:4] == [-1, -1, -1, -1] and signs[6:] == [0, 0]
    monkeypatch.setattr("kvbench.analysis.cell_comparisons.sign_changes", lambda known: [len(known)] * len(known))
    assert [each.sign for each in read_part(path, pairs).planned] == [8] * 8


def test_the_page_shows_what_was_planned(path):
    part = read_part(path, [("method=snapkv", "method=keydiff")])
    sections = split_sections({"a": part.lines}, {"a": part})
    shown = [section for section in sections if section.planned]
    assert [section.question for section in shown] == ["visible", "hidden"]
    text = " ".join(" ".join(format_planned(shown[0])).split())
    assert "for all 4 planned comparisons that were measured in the part, of which this table has 2 (Holm's" in text
    first = part.planned[0]
    assert "| snapkv, 20 % (20.0% of the bytes) | keydiff, 20 % (20.0% of the bytes) |" in text
    assert f"{first.change[0]:+.1f}" in text and text.count("| first |") == 1 + 2
    assert format_planned(split_sections({"a": part.lines})[0]) == []


def test_presets_are_compared_with_each_other_by_sample(path):
    part = read_part(path)
    [variant] = part.varied
    lines = {line["hash"]: line for line in part.lines}
    assert {lines[name]["budget"] for name in (variant.one, variant.other)} == {0.1}
    [section] = [each for each in split_sections({"a": part.lines}, {"a": part}) if each.varied]
    [spread] = find_spreads(section)
    assert spread.change == variant.change
    assert spread.change[0] == pytest.approx(spread.cells[0]["score"] - spread.cells[1]["score"])
    assert find_spreads(replace(section, varied=())) == []
    assert "are paired by sample" in " ".join(format_spreads([section]))


def test_changes_are_told_in_words_and_their_signs_are_joint(tmp_path, monkeypatch):
    folder = tmp_path / "store"
    write_run(folder, draw_records(1.0, 1.0, 0), method={"name": "full"})
    for seed, (name, chance) in enumerate({"first": 0.9, "second": 0.2, "third": 0.88}.items()):
        codec = {"name": "palu", "path": f"hash-of-{name}", "bits": None}
        write_run(folder, draw_records(0.5, chance, seed), method={"name": "full"}, codec=codec)
    files = {f"hash-of-{name}": name for name in ("first", "second", "third")}
    write_published([publish(run) for run in load_runs(folder)], files, tmp_path / "x.parquet")
    changes = {
        "codec=palu codec.path=first codec.bits=null": {
            "a worse file": "codec=palu codec.path=second",
            "another file": "codec=palu codec.path=third",
            "not measured": "codec=palu codec.path=fourth",
        }
    }
    families = []
    monkeypatch.setattr(
        cell_comparisons, "sign_changes", lambda known: families.append(len(known)) or sign_changes(known)
    )
    part = read_part(tmp_path / "x.parquet", changes=changes)
    assert [(each.words, each.sign) for each in part.changed] == [("a worse file", -1), ("another file", 0)]
    assert 2 in families and 1 not in families  # both changes are one family
    [section] = split_sections({"a": part.lines}, {"a": part})
    text = "\n".join(format_named_changes([section]))
    scores = {line["label"].rpartition("=")[2]: line["score"] for line in part.lines}
    row = f"| {scores['first']:.1f} | {scores['second']:.1f} | {part.changed[0].change[0]:+.1f} "
    assert "1 of 2 changes are shown to lower the score and 0 to raise it; in 1 neither is shown." in text.replace(
        "\n", " "
    )
    assert (
        text.index("| a worse file |") < text.index("| another file |") and row in text and text.count("| lower |") == 1
    )
    told = conclude_changes([section], 3.0)
    assert told.headline == "Of 2 named changes, 1 is shown to lower the score and 0 to raise it (jointly at 95 %)."
    assert told.first == f"It falls most with *a worse file* ({scores['first']:.1f} to {scores['second']:.1f})."
    assert conclude_changes([replace(section, changed=())], 3.0) is None and conclude_changes([], 3.0) is None
    with pytest.raises(SettingError, match="'codec=palu' and 'codec=palu codec.path=second' mean several cells"):
        read_part(tmp_path / "x.parquet", changes={"codec=palu": {"x": "codec=palu codec.path=second"}})


def test_changes_at_several_budgets_are_told_apart(path):
    changes = {"method=snapkv": {"other rows": "method=keydiff"}}
    part = read_part(path, changes=changes)
    assert [each.words for each in part.changed] == ["other rows"] * 4  # at two budgets, with both questions
    section = next(each for each in split_sections({"a": part.lines}, {"a": part}) if each.changed)
    text = "\n".join(format_named_changes([section]))
    assert "| other rows, 20 % |" in text and "| other rows, 50 % |" in text


def test_changes_are_sorted_and_show_what_the_changed_cell_holds():
    scores = {"plain": 50.0, "up": 60.0, "down": 40.0, "far down": 30.0}
    cells = [
        make_line(label, 0.2, score, bytes_held=0.2 + at / 100, bytes_with_files=0.5 + at / 100)
        for at, (label, score) in enumerate(scores.items())
    ]
    lines = [make_full(), *cells]
    signs = {"up": 1, "down": -1, "far down": -1}
    changed = [
        CellComparison("plain", label, (gain := scores[label] - 50.0, gain - 5, gain + 5), sign, f"to {label}")
        for label, sign in signs.items()
    ]
    for line in cells:
        line["hash"] = line["label"]
    [section] = split_sections({"a": lines}, {"a": PartNumbers(lines, changed=changed)})
    text = format_named_changes([replace(section, changed=()), section])
    assert [line for line in text if line.startswith("| to ")] == [
        "| to far down | 23.0% | 53.0% | 50.0 | 30.0 | -20.0 \\[-25.0, -15.0\\] | lower |",
        "| to down | 22.0% | 52.0% | 50.0 | 40.0 | -10.0 \\[-15.0, -5.0\\] | lower |",
        "| to up | 21.0% | 51.0% | 50.0 | 60.0 | +10.0 \\[+5.0, +15.0\\] | higher |",
    ]
    assert "The unchanged cells are plain (20.0% of the bytes)." in " ".join(text[0].split())
    assert conclude_changes([replace(section, changed=()), section], 3.0).first == (
        "It falls most with *to far down* (50.0 to 30.0); *to down* (50.0 to 40.0). It rises most with *to up* (50.0 "
        "to 60.0)."
    )


def make_run(cell: dict[str, str]) -> StoredRun:
    """A run with the settings of a planned cell, as its identity has them."""
    value = {"model": {"name": "tiny"}, "task": {"name": "ruler"}, "budget": float(cell["budget"])}
    for group, usual in {"method": "snapkv", "allocator": "uniform", "codec": "raw"}.items():
        given = {name.split(".")[1]: text for name, text in cell.items() if name.startswith(f"{group}.")}
        value[group] = identity_settings(load_settings(group, cell.get(group, usual), given))
    folder = RunFolder(Path("runs"), value)
    return StoredRun(folder.hash, value, folder)


def test_the_planned_presets_are_found_among_all_runs_of_their_part(tmp_path):
    part = read_study()["presets"]
    column = [*map(parse_settings, part.list_sweeps(tmp_path))]
    first = [line | {"budget": "0.2"} for line in column if line["question"] == "visible"]
    presets = [line | {"method.preset": name} for line in first for name in line["method.preset"].split(",")]
    runs = {run.hash: run for run in map(make_run, presets)}
    assert len(runs) == len(presets) > 15
    cells = [make_cell(run, "", {}) for run in runs.values()]
    for pair in part.pairs:
        [compared] = list_compared(pair, cells)
        for side, cell in zip(pair, compared, strict=True):
            asked = parse_settings(side.split())
            assert cell.name == make_run(asked | {"budget": "0.2"}).hash

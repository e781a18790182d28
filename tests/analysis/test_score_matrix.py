"""The matrix of scores: every number against pandas over kvbench.load, marks against their definition, formats."""

import csv
import io
import random
import re
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from shutil import which

import numpy as np
import pytest
from rich.cells import cell_len

import kvbench
from kvbench.analysis import score_matrix
from kvbench.analysis.intervals import Values, mean
from kvbench.analysis.score_matrix import build_blocks, list_cells
from kvbench.analysis.score_matrix_columns import COLUMNS, DEFAULT
from kvbench.analysis.score_matrix_format import FORMATS, format_latex, format_text, measure_in_latex
from kvbench.analysis.score_matrix_order import group_blocks, separate_points, sort_rows
from kvbench.analysis.text_table import escape_latex, format_number
from kvbench.cli import compare, results, show
from kvbench.store.runs import load_runs
from kvbench.validation import SettingError
from tests.support.latex import compile_latex
from tests.support.made_up_runs import write_run
from tests.support.report_store import make_records
from tests.support.selection import only_in_full

SUBTASKS = ("one", "two")
FULL = {"method": {"name": "full"}}
METHODS = {"snapkv": 0.8, "knorm": 0.4, "h2o": 0.75}


def draw_records(budget: float, chance: float, seed: int, count: int = 10) -> dict[str, dict]:
    """Records of two subtasks, twice and once as many as `count`, right with this chance."""
    draw, found = random.Random(seed), {}
    for uid, record in make_records(budget, 100 * chance, count=count).items():
        subtask = SUBTASKS[record["index"] % 3 == 0]
        score = 100.0 * (draw.random() < chance)
        stop = "length" if draw.random() < 0.3 else "eos"
        more = {"weights_bytes": 70, "metadata_bytes": 5, "state_bytes": record["index"]}
        found[uid] = record | {"subtask": subtask, "score": score, "stop": stop} | more
    return found


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    for question in ("visible", "hidden"):
        write_run(folder, draw_records(1.0, 0.95, 1), question=question, **FULL)
        for at, (name, chance) in enumerate(METHODS.items()):
            for budget in (0.1, 0.2):
                own = {"method": {"name": name}, "budget": budget, "question": question}
                write_run(folder, draw_records(budget, chance * (0.8 + budget), at + int(100 * budget)), **own)
    return folder


@pytest.fixture(scope="module")
def runs(store) -> tuple:
    return tuple(load_runs(store))


@pytest.fixture(scope="module")
def blocks(runs) -> tuple:
    """The matrices of the store, which no function changes: each makes others of them."""
    return tuple(build_blocks(runs, runs)[0])


ALL = tuple(COLUMNS.values())


def compute_with_pandas(loaded, records, run: str) -> dict[str, float]:
    """The numbers of a run's columns, except the ends of intervals: means over kvbench.load's records."""
    own = records[records["run"] == run]
    question = loaded.runs.loc[run, "question"]
    asked = loaded.runs[(loaded.runs["question"] == question) & (loaded.runs["method"] == "full")]
    full = records[records["run"] == asked.index[0]].set_index("uid")["score"]
    change = own["score"] - own["uid"].map(full)
    values = {
        "score": own["score"],
        "bytes_held": own["resident_bytes"] / own["full_bytes"],
        "bytes_with_files": (own["resident_bytes"] + 70) / own["full_bytes"],
        "bytes_in_all": own[["resident_bytes", "metadata_bytes", "state_bytes"]].sum(axis=1).add(70)
        / own["full_bytes"],
        "rows_kept": own["rows_held"] / own["rows_seen"],
        "rows_attended": own["rows_attended"] / own["rows_seen_decoding"],
        "at_limit": own["stop"] == "length",
    }
    if run != asked.index[0]:
        values["difference"] = change
    found = {name: float(column.groupby(own["subtask"]).mean().mean()) for name, column in values.items()}
    found["n"] = len(own)
    return found if run == asked.index[0] else found | {"lost": (change < 0).sum(), "gained": (change > 0).sum()}


@pytest.fixture(scope="module")
def expected(store) -> dict[str, dict[str, float]]:
    loaded = kvbench.load(store)
    records = loaded.records()
    return {
        run: compute_with_pandas(loaded, records, run) | {"budget": loaded.runs.loc[run, "budget"]}
        for run in loaded.runs.index
    }


def test_every_number_is_that_of_pandas(blocks, expected):
    """The law of this table: score, difference, costs and counts are means over kvbench.load's records."""
    rows = list(csv.DictReader(io.StringIO(FORMATS["csv"](blocks, ALL))))
    assert len(rows) == 2 * (1 + len(METHODS) * 2)
    numbers = {name for column in ALL for name in column.numbers} - {"score_low", "score_high", "low", "high"}
    for row in rows:
        own = expected[row["hash"]]
        for name in numbers:
            assert row[name] == "" or float(row[name]) == pytest.approx(own[name], abs=1e-9), (row, name)
        assert {name for name in numbers if row[name] == ""} == numbers - own.keys()
        assert row["budget"] == str(own["budget"])
    usual = list(csv.DictReader(io.StringIO(FORMATS["csv"](blocks))))
    assert usual == [
        {name: row[name] for name in row if name not in ("bytes_with_files", "bytes_in_all", "rows_kept")}
        for row in rows
    ]


@pytest.mark.parametrize("column", [own for own in ALL if not own.name.endswith("interval")], ids=lambda own: own.name)
def test_a_column_alone_has_the_numbers_of_pandas(blocks, expected, column):
    """In each format, a row has a number for each budget: that of pandas, rounded."""
    for block in blocks:
        rows = {**block.rows, "full cache": dict.fromkeys(block.budgets, block.full)}
        texts = [format_text([block], 120, columns=[column])]
        texts += [FORMATS[name]([block], [column]) for name in ("markdown", "latex", "html")]
        for text in texts:
            for label, cells in rows.items():
                [row] = re.findall(rf"^\W*(?:tr\W+th scope='row'\W+)?{label}(?!\S*[ -]\w+ in)(.*)$", text, re.MULTILINE)
                shown = [float(own) for own in re.findall(r"[+-]?\d+(?:\.\d)?", row)]
                own = [expected[cell.run.hash].get(column.name) for cell in cells.values()]
                own = [number * (100 if column.cost else 1) for number in own if number is not None]
                assert shown == pytest.approx(own, abs=0.0501), (text, label)


def test_columns_are_those_asked_for_and_in_that_order(store, capsys):
    asked = ["n", "interval", "rows_kept", "score"]
    arguments = ["--results", str(store), "question=hidden", "method=knorm", "--columns", ",".join(asked)]
    assert results.main([*arguments, "--format", "csv"]) == 0
    head = capsys.readouterr().out.splitlines()[0].split(",")
    assert head[6:] == ["budget", "n", "low", "high", "rows_kept", "score", "alike", "best", "tied", "hash"]
    assert results.main([*arguments, "--format", "markdown"]) == 0
    heads = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| method"))
    assert re.findall(r"\bn\b|95|kept|score", heads) == 2 * ["n", "95", "kept", "score"]
    assert results.main(["--results", str(store), "question=hidden", "--columns", "bytes_held"]) == 0
    out = capsys.readouterr().out
    assert "score" not in out.partition("bytes")[2] and "†" not in out


def test_text_and_latex_show_the_same_numbers(blocks):
    text, latex = format_text(blocks, 200), format_latex(blocks)
    assert [block.question for block in blocks] == ["visible", "hidden"]
    for _, label, cell in list_cells(blocks):
        score = format_number(cell.score.value)
        line = next(own for own in text.splitlines() if own.startswith(label) and score in own)
        assert cell.difference is None or format_number(cell.difference.difference, sign="+") in text
        assert re.search(rf"^{label} &.*{re.escape(score)}", latex, re.MULTILINE), line
    for page, rule in ((text, "─"), (latex, "\\midrule")):
        lines = page.splitlines()
        below = [after.split()[0] for before, after in pairwise(lines) if before.startswith(rule)]
        assert below == 2 * [min(METHODS), "full"]  # below the heads, and between the methods and the full cache
    assert all(FORMATS[name](blocks) for name in FORMATS)


HOSTILE = (
    "k_n&o%r$m#~^\\{}",
    "[1] *a*",
    "\"q\" 'q' `q` <>|@!?",
    "Äçé ß ŁŐ λ → 中文 😀",
    "snapkv · ada · kivi · block 128",
    "m" * 25 + " · " + "n" * 40,
)


def test_latex_tables_fit_a_page(blocks):
    """A table is split after as many budgets as its labels leave room for."""
    block, budgets = blocks[0], [f"{own}\u202f%" for own in range(10, 50, 10)]
    rows = list(block.rows.values())
    for label, beside in (("knorm", 3), ("m" * 30, 2), ("m" * 45, 1), ("m" * 90, 1)):
        own = replace(block, budgets=budgets, rows={label: dict.fromkeys(budgets, rows[0]["10\u202f%"])})
        heads = [line.count("multicolumn") for line in format_latex([own]).splitlines() if "multicolumn" in line]
        assert sum(heads) == 4 and max(heads) == beside
        assert ("{p{" in format_latex([own])) == (len(label) > 49)
        sizes = {f"{{{escape_latex(column.head)}}}": measure_in_latex(column) for column in ALL}
        every = format_latex([own], ALL)
        titles = [line.removesuffix(" \\\\").split(" & ")[1:] for line in every.splitlines() if line[:6] == "Method"]
        assert {one for table in titles for one in table} == sizes.keys()
        labels = [float(own) for own in re.findall(r"\{p\{([\d.]+)pt", every)] or [5 * len(label)] * len(titles)
        for table, room in zip(titles, labels, strict=True):
            assert sum(sizes[one] for one in table) + room + 12 <= 345


@pytest.mark.cover
@pytest.mark.parametrize("columns", [DEFAULT, ALL], ids=["usual", "all"])
@pytest.mark.parametrize("width", [60, 79, 140, 340])
def test_text_fits_the_terminal_and_cuts_no_number(wide, width, columns):
    """Every number and label is there, whatever the width: what does not fit goes into a further table or line."""
    label = "a long label · of several words · 中文 · " + "m" * 50
    rows = {label: next(iter(wide[0].rows.values())), **wide[0].rows}
    for block in [replace(wide[0], rows=rows), *group_blocks(wide, ["allocator", "seed"])]:
        text = format_text([block], width, columns)
        lines = text.splitlines()
        assert all(cell_len(line) <= width and line == line.rstrip() for line in lines)
        for cells in (*block.rows.values(), {"any": block.full}):
            for cell in cells.values():
                assert all(column.write(cell) in text for column in columns)
        tables = sum(line.startswith("method ") for line in lines)
        assert tables > 1 if width < 100 else tables == 1 or width < 200
        assert label not in block.rows or sum("a long label" in line for line in lines) == tables


def test_a_terminal_shows_the_same_text_with_the_best_in_bold(blocks):
    styled = format_text(blocks, 100, styled=True)
    plain = re.sub("\x1b\\[[0-9]*m", "", styled)
    assert format_text(blocks, 100) == "\n".join(line.rstrip() for line in plain.split("\n"))
    bold = re.findall("\x1b\\[1m *(\\d+\\.\\d)\\*\x1b\\[0m", styled)
    best = [format_number(cell.score.value) for _, _, cell in list_cells(blocks) if cell.best]
    assert sorted(bold) == sorted(best) and styled.count("*") == len(best) + 1  # the legend


@pytest.mark.parametrize(
    ("terminal", "settings", "styled"),
    [(True, {}, True), (False, {}, False), (True, {"NO_COLOR": "1"}, False), (True, {"TERM": "dumb"}, False)],
)
def test_only_a_terminal_that_may_is_sent_control_codes(store, monkeypatch, capsys, terminal, settings, styled):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert results.main(["--results", str(store)]) == 0
    assert ("\x1b" in capsys.readouterr().out) == styled


@pytest.mark.latex
@pytest.mark.skipif(which("pdflatex") is None, reason="no pdflatex")
def test_latex_tables_compile_whatever_names_hold(tmp_path):
    """No error, and nothing wider than the page, with the packages that the tables name."""
    write_run(tmp_path, draw_records(1.0, 0.95, 1), **FULL)
    for at, name in enumerate(HOSTILE):
        for budget in (0.05, 0.1, 0.2, 0.5):
            write_run(tmp_path, draw_records(budget, 0.5, at), method={"name": name}, budget=budget)
    runs = load_runs(tmp_path)
    blocks = build_blocks(runs, runs)[0]
    table = "\n".join([format_latex(blocks), format_latex(group_blocks(blocks, ["method"]), ALL)])
    packages = "\n".join(line.lstrip("% ") for line in table.splitlines()[:3])
    text = f"\\documentclass{{article}}\n{packages}\n\\begin{{document}}\n{table}\\end{{document}}\n"
    assert "Overfull" not in compile_latex(tmp_path, text)


def test_marks_follow_their_definition(blocks):
    """A run is not marked only if one that scores more beats it at the level 1 - 0.05 / (k - 1)."""
    marks = set()
    for block in blocks:
        for budget in block.budgets:
            cells = [own[budget] for own in block.rows.values()]
            most = max(cell.score.value for cell in cells)
            assert any(cell.best for cell in cells) and all(cell.tied for cell in cells if cell.best)
            for cell in cells:
                assert cell.best == (cell.score.value == most)
                beaten = []
                for other in cells:
                    names = sorted({record["subtask"] for record in cell.run.records.values()})
                    values = []
                    for name in names:
                        uids = [uid for uid, own in cell.run.records.items() if own["subtask"] == name]
                        change = [other.run.records[uid]["score"] - cell.run.records[uid]["score"] for uid in uids]
                        groups = [cell.run.records[uid]["group"] or uid for uid in uids]
                        values.append(Values(change, groups, -100.0, 100.0))
                    beaten.append(mean(values, None, 1 - 0.05 / 2).low > 0)
                assert cell.tied == (not any(beaten))
                marks.add((cell.best, cell.tied))
    assert marks == {(True, True), (False, True), (False, False)}  # the data hold each kind


def test_only_cells_of_like_bytes_are_compared(tmp_path):
    """Cells of one budget: two of 20 and 21 %, one alone at 30 %, two that keep all rows and read a quarter of them."""
    write_run(tmp_path, draw_records(1.0, 1, 0), method={"name": "full"}, budget=1.0)
    for seed, (name, share) in enumerate({"even": 0.2, "more": 0.21, "alone": 0.3, "reads": 1.0, "looks": 1.0}.items()):
        own = draw_records(share, 0.9 - 0.2 * seed, 1 + seed)
        if share == 1:
            own = {uid: record | {"rows_attended": 50} for uid, record in own.items()}
        write_run(tmp_path, own, method={"name": name}, budget=0.2)
    runs = load_runs(tmp_path)
    cells = {cell.run.value["method"]["name"]: cell for _, _, cell in list_cells(build_blocks(runs, runs)[0])}
    assert {name: (cell.alike, cell.best) for name, cell in cells.items()} == {
        "full": ("", False),
        "even": ("20.0% to 21.0% of the bytes", True),
        "more": ("20.0% to 21.0% of the bytes", False),
        "alone": ("", False),
        "reads": ("25.0% of the rows read", True),
        "looks": ("25.0% of the rows read", False),
    }
    assert not cells["alone"].tied and all(cells[name].tied for name in ("even", "reads"))


def write_cells(folder, *cells: str) -> list:
    """The runs of a full cache and of cells: method, codec, share of the bytes, budget."""
    for cell in ("full raw 1 1", *cells):
        method, codec, share, budget = cell.split()
        own = draw_records(float(share), 0.8, int(10 * float(budget)))
        write_run(folder, own, method={"name": method}, codec={"name": codec}, budget=float(budget))
    return load_runs(folder)


@pytest.mark.parametrize("names", [[], ["codec"]])
def test_cells_with_codecs_have_rows_sorted_by_bytes(tmp_path, names):
    runs = write_cells(
        tmp_path, "full int8 0.5 1", "snapkv raw 0.2 0.2", "snapkv int4 0.06 0.2", "snapkv int4 0.14 0.5"
    )
    blocks = group_blocks(build_blocks(runs, runs)[0], names)
    main, points = separate_points(blocks)
    assert (list(main.rows), main.budgets) == (["snapkv"], ("20\u202f%",))
    assert list(points.rows) == ["snapkv · int4 · 20\u202f%", "snapkv · int4 · 50\u202f%", "full · int8"]
    for form in (format_text, *(FORMATS[name] for name in ("markdown", "latex", "html"))):
        text = form(blocks, 100) if form is format_text else form(blocks)
        found = [tuple(re.findall(r"\d+", name)) for name in re.findall(r"int8|int4\D+[25]0", text)]
        assert list(dict.fromkeys(found)) == [("4", "20"), ("4", "50"), ("8",)]


def test_no_class_of_like_bytes_is_divided(tmp_path):
    """fp8 of the full cache and of a method at budget 1 hold the same bytes, and the method has a raw rival at 20 %."""
    runs = write_cells(tmp_path, "full fp8 0.5 1", "snapkv fp8 0.5 1", "snapkv fp8 0.1 0.2", "tova raw 0.1 0.2")
    [block] = separate_points(build_blocks(runs, runs)[0])
    assert list(block.rows) == ["full · fp8", "snapkv · fp8", "tova"]


@pytest.mark.parametrize("draws", [60, only_in_full(200)])
def test_the_marked_set_holds_the_best_method(draws):
    """Ten methods, of which one is truly best: in at least 95 % of the draws it is marked."""
    draw, held = np.random.default_rng(0), 0
    for _ in range(draws):
        chances = [0.55, *[0.5] * 9]
        scores = [100.0 * (draw.random(40) < chance) for chance in chances]
        held += mark(scores)[0]
    assert held >= 0.95 * draws


def test_methods_that_are_clearly_worse_are_not_marked():
    draw = np.random.default_rng(1)
    marked = mark([100.0 * (draw.random(200) < chance) for chance in (0.9, 0.88, 0.3)])
    assert marked == [True, True, False]


def mark(scores: list[np.ndarray]) -> list[bool]:
    """Whether each of these rows of scores is marked."""
    uids = [str(at) for at in range(len(scores[0]))]

    class Run:
        def __init__(self, own: np.ndarray, name: str) -> None:
            self.hash = name
            self.records = {uid: {"score": float(one), "group": uid} for uid, one in zip(uids, own, strict=True)}

    runs = [Run(own, str(at)) for at, own in enumerate(scores)]
    samples = score_matrix.Samples(runs[0], uids, {"one": uids}, {"one": 1.0})
    means = [mean([Values(own.tolist(), uids)]) for own in scores]
    cells = [score_matrix.MatrixCell(run, own, None, 0, 0, 0, 0, 0, 0) for run, own in zip(runs, means, strict=True)]
    return [cell.tied for cell in samples.mark_best(cells)]


def test_a_long_column_is_marked_with_fewer_comparisons_and_never_loses_the_best(monkeypatch):
    """Each run is compared with the best ones only, so more runs stay marked, and comparisons don't grow with k²."""
    draw = np.random.default_rng(3)
    scores = [100.0 * (draw.random(60) < chance) for chance in np.linspace(0.95, 0.3, 16)]
    asked, compare = [], score_matrix.compare_averages
    monkeypatch.setattr(
        score_matrix, "compare_averages", lambda pairs, tail: asked.extend(pairs) or compare(pairs, tail)
    )
    whole, whole_asked = mark(scores), len(asked)
    asked.clear()
    monkeypatch.setattr(score_matrix, "COMPARED", 16)
    monkeypatch.setattr(score_matrix, "FEWEST_RIVALS", 1)
    few = mark(scores)
    assert 0 < len(asked) <= 16 < whole_asked
    assert all(marked for marked, before in zip(few, whole, strict=True) if before)
    assert few[int(np.argmax([own.mean() for own in scores]))] and not all(few)


def test_the_samples_that_would_separate_two_methods_do_so_in_four_of_five_cases_or_more():
    """Samples are drawn with the difference that a small set showed, as many as it says are needed."""
    uids = [str(place) for place in range(400)]

    class Run:
        def __init__(self, scores: np.ndarray, name: str) -> None:
            self.hash = name
            self.records = {uid: {"score": float(one), "group": uid} for uid, one in zip(uids, scores, strict=False)}

    def compare_two(count: int, gain: np.ndarray) -> tuple[score_matrix.Samples, list[score_matrix.MatrixCell]]:
        base = np.full(count, 50.0)
        runs = [Run(base, "one"), Run(base + gain, "other")]
        part = uids[:count]
        samples = score_matrix.Samples(runs[0], part, {"all": part}, {"all": 1.0})
        means = [mean([Values([run.records[uid]["score"] for uid in part], part)]) for run in runs]
        cells = [
            score_matrix.MatrixCell(run, own, None, 0, 0, 0, 0, 0, 0) for run, own in zip(runs, means, strict=True)
        ]
        return samples, samples.mark_best(cells)

    spread = np.linspace(-30, 30, 20)
    samples, cells = compare_two(20, spread + 6)
    assert [cell.tied for cell in cells] == [True, True]
    needed = samples.count_needed(cells)
    assert needed.keys() == {"one"} and 82 < needed["one"] <= len(uids)  # 82: of a t interval
    draw = np.random.default_rng(0)
    found = []
    for _ in range(20):
        _, drawn = compare_two(needed["one"], draw.choice(spread, needed["one"]) + 6)
        found.append(sum(cell.tied for cell in drawn) == 1)
    assert np.mean(found) >= 0.8
    assert compare_two(20, np.zeros(20))[0].count_needed(compare_two(20, np.zeros(20))[1]) == {}


def test_the_full_cache_alone_has_a_column(tmp_path):
    run = write_run(tmp_path, draw_records(1.0, 0.9, 1), **FULL)
    [block], _ = build_blocks([run], [run])
    assert block.budgets == ("100\u202f%",) and format_number(block.full.score.value) in format_text([block], 120)


def test_an_unfinished_sweep_shows_what_its_runs_have_in_common(tmp_path):
    write_run(tmp_path, draw_records(1.0, 0.9, 1), **FULL)
    write_run(tmp_path, draw_records(0.1, 0.9, 2), method={"name": "snapkv"}, budget=0.1)
    some = dict(list(draw_records(0.1, 0.5, 3).items())[:12])
    run = write_run(tmp_path, some, finish=False, method={"name": "knorm"}, budget=0.1)
    run.folder.path.joinpath("samples").write_text("30\n")
    [block], _ = build_blocks(*2 * [load_runs(tmp_path)])
    assert (block.samples, block.total) == (12, 30) and block.unfinished == ("knorm 10\u202f% (12 of 30)",)
    assert {cell.score.samples for own in block.rows.values() for cell in own.values()} == {12}
    said = " ".join(format_text([block], 120).split())
    counts = Counter(record["subtask"] for record in some.values())
    places = ", ".join(f"{name} ({counts[name]})" for name in sorted(counts))
    assert f"n = 12 of 30 planned samples, of 2 subtasks: {places}." in said
    assert "Not finished (samples): knorm" in said


def test_a_sample_that_failed_somewhere_is_left_out_everywhere(tmp_path):
    write_run(tmp_path, draw_records(1.0, 0.9, 1), **FULL)
    own = draw_records(0.1, 0.9, 2)
    own[next(iter(own))] |= {"error": "out_of_memory", "score": None}
    write_run(tmp_path, own, method={"name": "snapkv"}, budget=0.1)
    [block], _ = build_blocks(*2 * [load_runs(tmp_path)])
    assert (block.samples, block.failed, block.full.score.samples) == (29, 1, 29)


def test_a_run_that_would_take_a_subtask_from_all_is_left_out_and_named(tmp_path):
    write_run(tmp_path, draw_records(1.0, 0.9, 1), **FULL)
    write_run(tmp_path, draw_records(0.1, 0.9, 2), method={"name": "snapkv"}, budget=0.1)
    alone = {uid: own for uid, own in draw_records(0.1, 0.5, 3).items() if own["subtask"] == "one"}
    write_run(tmp_path, alone, finish=False, method={"name": "knorm"}, budget=0.1)
    failed = {uid: own | {"error": "out_of_memory", "score": None} for uid, own in draw_records(0.1, 0.5, 4).items()}
    write_run(tmp_path, failed, method={"name": "h2o"}, budget=0.1)
    other = {uid: own | {"prompt_hash": "other"} for uid, own in draw_records(0.1, 0.5, 5).items()}
    write_run(tmp_path, other, method={"name": "tova"}, budget=0.1)
    write_run(tmp_path, {}, finish=False, method={"name": "sink"}, budget=0.1)
    stored = load_runs(tmp_path)
    [block], refused = build_blocks(stored, stored)
    assert not refused and list(block.rows) == ["snapkv"] and (block.samples, block.total) == (30, 30)
    reasons = {line.split(" ")[0]: line.partition(": ")[2] for line in block.left_out}
    assert reasons["knorm"] == "answered no sample of two" and reasons["h2o"] == "answered no sample of one, two"
    assert reasons["sink"] == "has no records yet" and "prompt_hash is" in reasons["tova"]
    assert "Left out: " in format_text([block], 120)


def test_a_finished_full_cache_is_preferred(tmp_path):
    done = write_run(tmp_path, draw_records(1.0, 0.9, 1), **FULL)
    some = dict(list(draw_records(1.0, 0.2, 7).items())[:3])
    write_run(tmp_path, some, finish=False, sources="newer", **FULL)
    write_run(tmp_path, draw_records(0.1, 0.9, 2), method={"name": "snapkv"}, budget=0.1)
    stored = load_runs(tmp_path)
    [block], _ = build_blocks(stored, stored)
    assert block.full.run.hash == done.hash and block.samples == 30


def test_names_cannot_break_a_format(tmp_path):
    hostile = "a&b_%$#{}~^\\|<b>\x1b[31m\n"
    write_run(tmp_path, draw_records(1.0, 0.9, 1), **FULL)
    write_run(tmp_path, draw_records(0.1, 0.9, 2), method={"name": hostile}, budget=0.1)
    [block], _ = build_blocks(*2 * [load_runs(tmp_path)])
    latex = next(line for line in format_latex([block]).splitlines() if line.startswith("a\\&"))
    written = "\\_\\%\\$\\#\\{\\}\\textasciitilde{}\\textasciicircum{}\\textbackslash{}"
    assert written in latex and latex.endswith("\\\\")
    for blocks in ([block], group_blocks([block], ["method", "model"])):
        for text in (format_text(blocks, 120), *(write(blocks) for write in FORMATS.values())):
            assert "\x1b" not in text and "<b>" not in FORMATS["html"](blocks)
    assert "<b>" not in FORMATS["html"]([block]) and "&lt;b&gt;" in FORMATS["html"]([block])


def test_latex_splits_a_block_that_is_too_wide(tmp_path):
    write_run(tmp_path, draw_records(1.0, 0.9, 1), **FULL)
    budgets = (0.05, 0.1, 0.2, 0.4, 64)
    for at, budget in enumerate(budgets):
        write_run(tmp_path, draw_records(0.1, 0.9, at), method={"name": "snapkv"}, budget=budget)
    [block], _ = build_blocks(*2 * [load_runs(tmp_path)])
    latex = format_latex([block])
    assert latex.count("\\begin{tabular}") == latex.count("\\end{table}") == 2
    assert all(line.count("&") <= 6 for line in latex.splitlines() if not line.startswith("\\caption"))
    assert block.budgets == ("5\u202f%", "10\u202f%", "20\u202f%", "40\u202f%", "64 rows")


def test_rows_are_sorted_by_a_budget(blocks):
    block = blocks[0]
    ordered = [own["20\u202f%"].score.value for own in sort_rows([block], "0.20")[0].rows.values()]
    assert ordered == sorted(ordered, reverse=True)
    for wrong in ("0.3", "many", "n@0.3"):
        with pytest.raises(SettingError, match=rf"^--sort={wrong}: choose method, a budget \(0.1, 0.2\), or a column"):
            sort_rows([block], wrong)
    for wrong in ("interval@0.1", "speed@0.1"):
        with pytest.raises(SettingError, match=rf"^--sort={wrong}: column=.*: choose one of score, difference, lost, "):
            sort_rows([block], wrong)


@pytest.fixture(scope="module")
def gap(runs):
    """A matrix without knorm at 10 %."""
    some = [run for run in runs if run.value["budget"] != 0.1 or run.value["method"]["name"] != "knorm"]
    return build_blocks(some, some)[0][0]


@pytest.mark.parametrize("name", [own.name for own in ALL if len(own.numbers) == 1])
def test_rows_are_sorted_by_a_column_with_the_best_first(gap, name):
    column = COLUMNS[name]
    [read] = column.numbers.values()
    *rows, last = sort_rows([gap], f"{name}@0.1")[0].rows.items()
    ordered = [read(own["10\u202f%"]) for _, own in rows]
    assert ordered == sorted(ordered, reverse=not column.less) and len(ordered) == 2
    assert last[0] == "knorm"  # it has no number
    assert list(sort_rows(sort_rows([gap], "0.1"), "method")[0].rows) == sorted(gap.rows)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Question and seed make three blocks; allocator and block size make the rows of each."""
    folder = tmp_path_factory.mktemp("wide")
    for question, seed in (("hidden", 2), ("visible", 10), ("visible", 2)):
        write_run(folder, draw_records(1.0, 0.95, seed, 3), question=question, seed=seed, **FULL)
        for at, allocator in enumerate(("uniform", "ada")):
            for block in (None, 64, 128):
                for budget in (0.1, 0.2):
                    own = draw_records(budget, 0.8, at + (block or 0) + int(100 * budget), 3)
                    changed = {"allocator": {"name": allocator}, "block_size": block, "budget": budget, "seed": seed}
                    write_run(folder, own, question=question, **changed)
    runs = load_runs(folder)
    return build_blocks(runs, runs)[0]


def test_groups_and_order_change_no_number(wide):
    """The law holds for them too: the same lines of the CSV, each with its settings, in another order."""
    plain = list(csv.DictReader(io.StringIO(FORMATS["csv"](wide, ALL))))
    ordered = group_blocks(sort_rows(wide, "bytes_held@0.1"), ["seed", "allocator", "question", "block_size"])
    grouped = list(csv.DictReader(io.StringIO(FORMATS["csv"](ordered, ALL))))
    settings = {cell.run.hash: cell.run.settings for _, _, cell in list_cells(wide)}
    added = {"seed", "allocator.name", "block_size"}
    assert grouped[0].keys() == plain[0].keys() | added and grouped != plain
    for row in grouped:
        own = settings[row["hash"]]
        assert {name: row[name] for name in added} == {
            "seed": str(own["seed"]),
            "allocator.name": own["allocator.name"],
            "block_size": "" if own["block_size"] is None else str(own["block_size"]),
        }
    assert sorted(plain, key=str) == sorted(({n: row[n] for n in plain[0]} for row in grouped), key=str)


def test_a_setting_of_the_protocol_gathers_blocks_and_one_of_the_cache_gathers_rows(wide):
    blocks = group_blocks(wide, ["block_size", "seed", "allocator"])
    assert [block.heading for block in blocks] == ["seed 2", "seed 2", "seed 10"]  # numbers by value
    assert [block.question for block in blocks] == ["visible", "hidden", "visible"]  # the order stays inside
    sections = [f"block_size {size} · allocator {name}" for size in ("null", 64, 128) for name in ("ada", "uniform")]
    for block in blocks:
        assert list(dict.fromkeys(block.sections[label] for label in block.rows)) == sections
        for label, cells in block.rows.items():
            own = next(iter(cells.values())).run.value
            size = "null" if own["block_size"] is None else own["block_size"]
            assert block.sections[label] == f"block_size {size} · allocator {own['allocator']['name']}"
    for name in ("text", "markdown", "latex", "html"):
        text = format_text(blocks, 120) if name == "text" else FORMATS[name](blocks)
        text = text.replace("\\_", "_").replace("$\\cdot$", "·")
        assert re.findall(r"^(?:% |## |<h2>)?(seed \d+)(?:</h2>)?$", text, re.MULTILINE) == ["seed 2", "seed 10"], name
        found = re.findall(r"block_size \w+ · allocator \w+", text)
        assert list(dict.fromkeys(found)) == sections and len(found) % (3 * len(sections)) == 0, name


@pytest.mark.parametrize("wrong", ["budget", "colour", "", "averages2"])
def test_a_setting_that_cannot_group_is_one_line(wide, wrong):
    with pytest.raises(SettingError, match=rf"^--group-by={wrong}: (choose one of model, |did you )(?!.*\bbudget\b)"):
        group_blocks(wide, [wrong])
    with pytest.raises(SettingError, match=r"^--group-by=seed,seed: give each setting once$"):
        group_blocks(wide, ["seed", "seed"])


def test_the_commands(store, capsys):
    assert (
        results.main(
            ["--results", str(store), "method=snapkv,knorm", "budget=0.1", "question=hidden", "--format", "csv"]
        )
        == 0
    )
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["method"] for row in rows] == ["full cache", "knorm", "snapkv"]
    one, other = (row["hash"] for row in rows[1:])
    assert show.main([one, "--results", str(store)]) == 0 and "lost/gained" in capsys.readouterr().out
    assert compare.main([one, other, "--results", str(store)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^method.name +knorm +snapkv$", out, re.MULTILINE) and "B - A" in out
    scores = {row["method"]: float(row["score"]) for row in rows}
    difference = format_number(scores["snapkv"] - scores["knorm"], sign="+")
    assert next(line for line in out.splitlines() if line.startswith("average")).split()[3] == difference


@pytest.mark.parametrize(
    ("command", "arguments", "line"),
    [
        (results, ["method=quest"], r"method=quest: no finished run has this"),
        (results, ["colour=red"], r"colour: no run has this setting"),
        (results, ["--format", "pdf"], r"--format=pdf: choose one of text, markdown, csv, latex, html"),
        (results, ["--columns", "score,speed"], r"--columns=speed: choose one of score, score_interval, difference, "),
        (results, ["--columns", ""], r"--columns=: choose one of score, score_interval, difference, "),
        (results, ["--columns", "n,n"], r"--columns=n,n: give each column once"),
        (results, ["--columns", "speed", "--results", "no folder"], r"--columns=speed: choose one of "),
        (results, ["--sort", "0.7"], r"--sort=0.7: choose method, a budget \(0.1, 0.2\), or "),
        (results, ["--group-by", "budget"], r"--group-by=budget: did you mean budget_of\?"),
        (show, ["zz"], r"run=zz: no run has such a hash"),
        (show, [""], r"run=: begins the hashes of 14 runs"),
        (compare, ["zz", "yy"], r"run=zz: no run has such a hash"),
    ],
)
def test_what_cannot_be_shown_is_one_line(command, arguments, line, store, capsys):
    assert command.main([*arguments, *([] if "no folder" in arguments else ["--results", str(store)])]) == 2
    out, err = capsys.readouterr()
    assert out == "" and re.match(f"kvbench: {line}", err) and err.count("\n") == 1

"""Figures for print: what they draw is what the tables say, from the page's specifications, whatever names are like."""

import csv
import re
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

import kvbench
from kvbench.analysis.budget_series import CurveOptions, build_series
from kvbench.analysis.byte_front import order_by_bytes
from kvbench.analysis.score_matrix import build_blocks
from kvbench.cli.curves import print_curves
from kvbench.cli.figures import draw_figures
from kvbench.papers.experiment_key import resolve_value
from kvbench.papers.table_spec import load_specs, read_published
from kvbench.report import charts, print_charts
from kvbench.report.figures import INCHES, Figure, make_slug
from kvbench.report.panels import build_panels
from kvbench.store.runs import filter_runs, find_baseline, find_finished, load_runs, parse_filters
from kvbench.validation import SettingError
from tests.support.report_store import BUDGETS, TASKS, make_records, write_run, write_small_store
from tests.support.selection import only_in_full
from tests.support.single_tables import build_closing_table

TAGS = {"svg", "g", "rect", "path", "line", "text", "tspan", "defs", "linearGradient", "stop"}
ONE = ("question=visible", "method=snapkv,keydiff")


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return write_small_store(tmp_path_factory.mktemp("store"))


@pytest.fixture
def without_pictures(monkeypatch) -> None:
    """Figures are CSV files only."""
    monkeypatch.setattr(Figure, "write_pictures", lambda figure, folder, also="": "")


@pytest.fixture
def svg_only(monkeypatch) -> None:
    """PDF and PNG, which are made of the SVG, are empty."""
    for form in ("svg_to_pdf", "svg_to_png"):
        monkeypatch.setattr(f"vl_convert.{form}", lambda svg, **own: b"")


class Drawn(dict[str, Path]):
    """Kind -> its files, without their ending. A kind is drawn when it is first asked for."""

    def __init__(self, store: Path) -> None:
        super().__init__()
        self.store = store

    def __missing__(self, kind: str) -> Path:
        assert draw_figures(["--results", str(self.store), *ONE, "--kind", kind]) == 0
        assert len(list((self.store / "figures").glob(f"*-{kind}.*"))) == 4
        (own,) = (self.store / "figures").glob(f"*-{kind}.svg")
        self[kind] = own.with_suffix("")
        return self[kind]


@pytest.fixture(scope="module")
def drawn(store) -> Drawn:
    found = Drawn(store)
    assert found["curve"]  # the first picture of a process takes longest
    return found


@pytest.fixture(scope="module")
def costs(drawn) -> Path:
    """The chart with the most parts, which takes long, too."""
    return drawn["cost"]


def lines(path: Path) -> list[dict[str, str]]:
    with open(path.with_suffix(".csv"), newline="") as opened:
        return list(csv.DictReader(opened))


def numbers(line: dict[str, str], *names: str) -> list[float]:
    return [float(line[name]) for name in names]


def texts(path: Path) -> list[str]:
    return [text for text in ElementTree.parse(path.with_suffix(".svg")).getroot().itertext() if text.strip()]


@pytest.mark.usefixtures("svg_only")
def test_a_plain_figure_has_no_title_and_its_width(store, drawn, tmp_path):
    """The caption of a paper says what the title says; the chart is the same."""
    given = ["--results", str(store), *ONE, "--kind", "curve", "--plain", "--width", "4", "--out", str(tmp_path)]
    assert draw_figures(given) == 0
    (path,) = tmp_path.glob("*.svg")
    assert any("question visible" in text for text in texts(drawn["curve"]))
    assert not any("question" in text or "samples" in text for text in texts(path))
    assert {"snapkv", "keydiff", "full cache", "Score"} <= {text.partition(" ·")[0] for text in texts(path)}
    assert lines(path) == lines(drawn["curve"])
    width = float(ElementTree.parse(path).getroot().get("width").removesuffix("pt"))
    assert 0.95 * 288 < width <= 288.5


def test_a_run_without_a_pair_has_no_plot_of_differences():
    """The full cache failed where the run has scores: its grid has nothing to say about a change."""
    cell = {"length": 512.0, "depth": 0, "score": 50.0, "n": 2, "diff": -50.0, "diff_low": None, "diff_high": None}
    alone = {"s": 1, "row": "tova", "cells": [cell | {"diff": None}]}
    grids = [{"s": None, "row": "full cache", "cells": [cell]}, {"s": 0, "row": "snapkv", "cells": [cell]}, alone]
    drawing = print_charts.draw_grid({"grids": grids}, 500, change=True)
    assert drawing is not None and [own["run"] for own in drawing.rows] == ["snapkv"]
    assert print_charts.draw_grid({"grids": [alone]}, 500, change=True) is None
    scores = print_charts.draw_grid({"grids": grids}, 500)
    assert scores is not None and [own["run"] for own in scores.rows] == ["full cache", "snapkv", "tova"]


@pytest.mark.usefixtures("svg_only")
def test_one_budget_is_drawn_as_dots(store, tmp_path):
    """Methods are rows, the best one first; all numbers are those of the curves."""
    assert draw_figures(["--results", str(store), *ONE, "budget=0.1", "--kind", "curve", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.svg")
    own = [line for line in lines(path) if "full" not in line["method"]]
    expected = [line["method"] for line in sorted(own, key=lambda line: -float(line["score"]))]
    assert [text for text in texts(path) if text in expected] == expected
    assert any("budget " in text for text in texts(path))
    wide = lines(path.with_suffix(""))
    assert {line["method"] for line in wide} == {*expected, *(f"full cache, beside {name}" for name in expected)}


def write_phonebook(results: Path, origin: str) -> None:
    """The runs of a cell of KeyDiff's table 17, and of the full cache, on data of this origin."""
    book = {"model": "llama32_3b", "task": "phonebook", "task.preset": "keydiff", "question": "visible"}
    cut = {"method": "keydiff", "budget": 6144, "block_size": 128}
    for own, budget in ((book | {"method": "full"}, 1.0), (book | cut, 0.3)):
        records = make_records(budget, 60, count=6)
        for record in records.values():
            place = TASKS.index(record["subtask"])
            record |= {"subtask": ("phonebook_100", "phonebook_478", "phonebook_856")[place], "meta": {"data": origin}}
        write_run(results, records, **resolve_value(own))


@pytest.mark.usefixtures("svg_only")
def test_published_scores_are_hollow_marks_beside_measured_ones(tmp_path):
    write_phonebook(tmp_path, "local")
    assert (
        draw_figures(
            ["--results", str(tmp_path), "subtask=phonebook_100,phonebook_478", "--out", str(tmp_path / "out")]
        )
        == 0
    )
    assert len(list((tmp_path / "out").glob("*.svg"))) == 2
    printed = {
        line["variant"]: 100 * float(line["value"])
        for line in read_published(tmp_path, "keydiff_table17.csv")
        if line["method"] == "keydiff"
    }
    for subtask in ("phonebook_100", "phonebook_478"):
        (path,) = (tmp_path / "out").glob(f"*-{subtask}.svg")
        (own,) = [line for line in lines(path) if "published in keydiff_table17" in line["method"]]
        assert float(own["score"]) == printed[f"length={subtask.partition('_')[2]}"]
        assert "hollow: published" in texts(path)


@pytest.mark.usefixtures("svg_only")
def test_published_differences_are_circles_in_the_cells_of_subtasks(tmp_path):
    """The difference is that of the two scores that one table prints."""
    write_phonebook(tmp_path, "local")
    assert draw_figures(["--results", str(tmp_path), "--kind", "tasks"]) == 0
    (path,) = (tmp_path / "figures").glob("*-tasks.svg")
    printed = {
        (line["method"], line["variant"].removeprefix("length=")): 100 * float(line["value"])
        for line in read_published(tmp_path, "keydiff_table17.csv")
    }
    own = {line["subtask"].removeprefix("phonebook_"): line["published"] for line in lines(path)}
    assert {"100", "478", "856"} <= own.keys()
    for length in ("100", "478", "856"):
        assert float(own[length]) == pytest.approx(printed["keydiff", length] - printed["full", length])
    assert "circle: published" in texts(path)


@pytest.mark.usefixtures("svg_only")
def test_published_differences_are_circles_in_the_cells_of_a_grid(tmp_path):
    """KeyDiff's Table 18 prints them by length and depth, in recall; a cell that it has no line for has no circle."""
    needle = load_specs()["keydiff_table18"]["run"]
    places = [(length, depth) for length in (1000, 4222) for depth in (0, 11, 50)]
    for own, budget in ((needle | {"method": "full"}, 1.0), (needle, 0.3)):
        records = make_records(budget, 60, count=2)
        for record, (length, depth) in zip(records.values(), places, strict=True):
            meta = {"data": "hub", "haystack": "hub:x", "length": length, "depth": depth}
            record |= {"subtask": f"niah_{length}", "meta": meta}
        write_run(tmp_path, records, **resolve_value(own))
    assert draw_figures(["--results", str(tmp_path), "--kind", "grid,change"]) == 0
    printed = {
        (line["context_length"], line["variant"]): 100 * float(line["value"])
        for line in read_published(tmp_path, "keydiff_table18.csv")
    }
    (path,) = (tmp_path / "figures").glob("*-change.svg")
    for line in lines(path):
        value = printed.get((line["length"].removesuffix(".0"), f"depth={float(line['depth'])}"))
        assert line["published"] == "" if value is None else float(line["published"]) == pytest.approx(value)
    assert "circle: published" in texts(path) and len(lines(path)) == len(places)
    (path,) = (tmp_path / "figures").glob("*-grid.svg")
    assert "circle: published" not in texts(path)


@pytest.mark.usefixtures("svg_only")
@pytest.mark.parametrize("origin", ["miniature", only_in_full("generated")])
def test_made_up_data_have_no_published_scores(tmp_path, origin):
    write_phonebook(tmp_path, origin)
    assert draw_figures(["--results", str(tmp_path), "subtask=phonebook_100"]) == 0
    (path,) = (tmp_path / "figures").glob("*.svg")
    assert not any("published" in line["method"] for line in lines(path)) and "hollow: published" not in texts(path)


def test_fonts_are_embedded(drawn):
    """Publishers refuse a PDF whose fonts are not in it."""
    content = drawn["curve"].with_suffix(".pdf").read_bytes()
    assert b"/FontFile2" in content or b"/FontFile3" in content
    assert content.count(b"/FontDescriptor ") == content.count(b"/FontFile")


@pytest.mark.usefixtures("costs")
@pytest.mark.parametrize("kind", INCHES)
def test_the_files_are_what_they_should_be(drawn, kind):
    name = drawn[kind]
    assert re.fullmatch(rf"reference-ruler-visible-[0-9a-f]{{8}}-{kind}", name.name)
    root = ElementTree.parse(name.with_suffix(".svg")).getroot()
    width, height = (float(root.get(side).removesuffix("pt")) for side in ("width", "height"))
    assert INCHES[kind] * 36 < width <= INCHES[kind] * 72 + 0.5 and 100 < height < 700
    assert {own.tag.partition("}")[2] for own in root.iter()} <= TAGS
    assert not {key for own in root.iter() for key in own.attrib if key.endswith(("href", "src"))}
    page = name.with_suffix(".pdf").read_bytes()
    assert page.startswith(b"%PDF-") and len(re.findall(rb"/Type\s*/Page\b", page)) == 1
    box = re.search(rb"/MediaBox\s*\[0 0 ([\d.]+) ([\d.]+)\]", page).groups()
    assert [float(own) for own in box] == pytest.approx((width, height), abs=0.1)
    assert b"LiberationSans" in page  # embedded, whatever the machine has
    picture = name.with_suffix(".png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n") and picture[12:16] == b"IHDR"
    assert struct.unpack(">II", picture[16:24]) == pytest.approx((width * 300 / 72, height * 300 / 72), abs=1.5)
    assert {"reference · ruler · question visible"} <= set(texts(name))
    assert any("length 2048" in text for text in texts(name))


def test_curves_have_the_numbers_of_kvbench_curves(store, drawn):
    runs = load_runs(store)
    found = lines(drawn["curve"])
    assert {line["method"] for line in found if line["budget"]} == {"keydiff", "keydiff · block 128", "snapkv"}
    own = [run for run in runs if run.value["method"]["name"] == "snapkv" and run.value["question"] == "visible"]
    *points, full = build_series(own, runs, CurveOptions()).points
    shown = [line for line in found if line["method"] == "snapkv"]
    assert len(shown) == len(points) == len(BUDGETS)
    for line, point in zip(shown, points, strict=True):
        score, change = point.score, point.interval
        expected = [point.share, score.value, score.low, score.high, change.difference, change.low, change.high]
        assert numbers(line, "share", "score", "score_low", "score_high", "diff", "diff_low", "diff_high") == expected
        assert numbers(line, "lost", "gained", "same", "n") == [change.lost, change.gained, change.same, score.samples]
    (beside,) = [line for line in found if line["method"] == "full cache, beside snapkv"]
    assert numbers(beside, "score", "score_low", "score_high") == [full.score.value, full.score.low, full.score.high]
    labels = texts(drawn["curve"])
    assert {"keydiff", "keydiff · block 128", "snapkv", "full cache", charts.BYTES} <= set(labels)


def test_tasks_and_costs_have_the_numbers_of_the_table(store, drawn):
    runs = load_runs(store)
    (run,) = [
        run
        for run in runs
        if (run.value["method"]["name"], run.value["question"], run.value["budget"]) == ("snapkv", "visible", 0.1)
    ]
    table = build_closing_table(
        find_baseline(run, runs).records, run.records, {"model": "reference", "embedded": True}, None
    )
    shown = {line["subtask"]: line for line in lines(drawn["tasks"]) if line["run"] == "snapkv · 10\u202f%"}
    assert len(shown) == len(TASKS) + 1
    for row in table.rows:
        line = shown["Ø average" if row.kind == "average" else row.subtask]
        own = row.interval
        expected = [own.difference, own.low, own.high, own.mean_full, own.mean_method, own.samples]
        assert numbers(line, "diff", "diff_low", "diff_high", "full", "score", "n") == expected
    average = next(row for row in table.rows if row.kind == "average")
    costs = {line["run"]: line for line in lines(drawn["cost"])}
    line = costs["snapkv · 10\u202f%"]
    assert numbers(line, "held", "ttft", "tpot") == [average.held, average.ttft, average.tpot]
    assert numbers(costs["full cache"], "held", "ttft", "diff") == [1, average.ttft_full, 0]
    assert {f"{own.difference:+.0f}".replace("-", "−") for own in [average.interval]} <= set(texts(drawn["tasks"]))


def test_grids_are_means_of_their_cells(drawn):
    own, full = make_records(0.05, 30), make_records(1.0, 100)
    uids = [uid for uid in own if own[uid]["meta"].get("length") == 512 and own[uid]["meta"]["depth"] == 50]
    means = [sum(side[uid]["score"] for uid in uids) / len(uids) for side in (own, full)]
    for kind in ("grid", "change"):
        found = {(line["run"], float(line["length"]), line["depth"]): line for line in lines(drawn[kind])}
        line = found["snapkv · 5\u202f%", 512, "50"]
        assert numbers(line, "score", "diff", "n") == [means[0], means[0] - means[1], len(uids)]
        assert len(found) == (9 + (kind == "grid")) * 6  # three series of three budgets, and the full cache
    assert "full cache" in texts(drawn["grid"]) and "full cache" not in texts(drawn["change"])


@pytest.fixture(scope="module")
def page_charts() -> dict[str, dict]:
    return charts.build_charts()


@pytest.fixture(scope="module")
def panel(store) -> dict:
    found = find_finished(store)
    return build_panels(found, found.runs, CurveOptions())[1].data


@pytest.fixture(scope="module")
def specify(panel) -> Callable[[str], object]:
    """The figure's specification of a chart, made once: all costs are parts of one figure."""
    smallest = panel["points"][0]["budget"]
    one_budget = panel | {"points": [own for own in panel["points"] if own["budget"] == smallest]}
    draw = {
        "curve": lambda: print_charts.draw_curve(panel, "bytes", 500),
        "dots": lambda: print_charts.draw_curve(one_budget, "bytes", 500),
        "tasks": lambda: print_charts.draw_tasks(panel, 500),
        "grid": lambda: print_charts.draw_grid(panel, 500),
        "cost": lambda: print_charts.draw_cost(panel, 900),
    }

    @cache
    def make(figure: str) -> object:
        return print_charts.make_figure_specification(draw[figure](), 200, None)

    return make


@pytest.mark.parametrize("name", ["curve", "dots", "tasks", "grid", *charts.COSTS])
def test_page_and_figures_draw_one_specification(page_charts, specify, name):
    """Layers, with their marks, channels, scales and transforms, are the page's; only print has legends of colours."""

    def bare(own: object) -> object:
        if isinstance(own, dict):
            return {key: bare(value) for key, value in own.items() if key != "legend"}
        return [bare(value) for value in own] if isinstance(own, list) else own

    def layered(own: object) -> list:
        if isinstance(own, dict):
            parts = [part for value in own.values() for part in layered(value)]
            return [own["layer"], *parts] if "layer" in own else parts
        return [part for value in own for part in layered(value)] if isinstance(own, list) else []

    assert page_charts.keys() == {"curve", "dots", "tasks", "grid", *charts.COSTS}
    spec = specify("cost" if name in charts.COSTS else name)
    assert bare(page_charts[name]["layer"]) in [bare(own) for own in layered(spec)]


def test_costs_begin_at_zero_and_have_whiskers(drawn):
    """Noise of a few ms must not fill an axis."""
    for name, spec in ((name, charts.chart_cost(name).to_dict()) for name in charts.COSTS):
        found = [layer["encoding"]["x"] for layer in spec["layer"]]
        assert all(own["scale"]["zero"] for own in found)
        ends = [own["field"] for own in found if own["field"] == f"{name}_low"]
        assert len(ends) == 2  # of the runs and of the full cache
    assert texts(drawn["cost"]).count("0") >= 2
    for line in lines(drawn["cost"]):
        if line["run"]:
            low, value, high = numbers(line, "ttft_low", "ttft", "ttft_high")
            assert low <= value <= high


def test_the_same_store_gives_the_same_bytes(store, drawn, tmp_path):
    assert draw_figures(["--results", str(store), *ONE, "--kind", "curve", "--out", str(tmp_path)]) == 0
    again = [path for path in tmp_path.iterdir() if path.suffix != ".pdf"]  # its fonts change places
    assert len(again) == 3
    for path in again:
        assert (store / "figures" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.full
@pytest.mark.usefixtures("svg_only")
def test_a_width_is_kept(store, tmp_path):
    assert draw_figures(["--results", str(store), *ONE, "--kind", "curve", "--width", "4", "--out", str(tmp_path)]) == 0
    for path in tmp_path.glob("*.svg"):
        width = float(ElementTree.parse(path).getroot().get("width").removesuffix("pt"))
        assert 0.95 * 288 < width <= 288.5


@pytest.mark.usefixtures("without_pictures")
def test_subtasks_and_rows_make_curves_of_their_own(store, tmp_path):
    given = ["--results", str(store), *ONE, f"subtask=niah,{TASKS[2]}", "--against", "rows", "--out", str(tmp_path)]
    assert draw_figures(given) == 0
    names = sorted(path.stem.partition("-curve-")[2] for path in tmp_path.glob("*.csv"))
    assert names == sorted(f"rows-{make_slug(task)}" for task in ("niah", TASKS[2]))
    runs = load_runs(store)
    own = [run for run in runs if run.value["method"]["name"] == "snapkv" and run.value["question"] == "visible"]
    points = build_series(own, runs, CurveOptions("rows", None, "niah")).points
    (path,) = tmp_path.glob("*-niah.csv")
    shown = [numbers(line, "share", "score") for line in lines(path) if line["method"] == "snapkv"]
    assert shown == [[point.share, point.score.value] for point in points[:-1]]


def test_the_chart_of_bytes_has_the_front_of_the_table(drawn, store):
    runs = filter_runs(load_runs(store), parse_filters(ONE))
    [block], _ = build_blocks([run for run in runs if not run.full], load_runs(store))
    cells = order_by_bytes(block)
    assert any(one.place is not None for one in cells) and any(one.ties for one in cells)
    drawn_lines = lines(drawn["bytes"])
    assert [(line["label"], line["front"], line["ties"]) for line in drawn_lines] == [
        (one.label, "" if one.place is None else str(one.place), " ".join(map(str, one.ties))) for one in cells
    ]
    for line, one in zip(drawn_lines, cells, strict=True):
        assert numbers(line, "share", "score") == [one.share, one.cell.score.value]


@pytest.mark.full
def test_names_that_would_be_more_than_text(tmp_path):
    name = "</text><script>alert(1)</script> & \\textbf{$x_1$} %\x1b[31m ../../up " + "long " * 60
    value = {"task": {"name": name, "length": 1}, "model": {"name": f"../{name}", "identity": "0"}}
    write_run(tmp_path, make_records(1.0, 100), **value | {"method": {"name": "full"}})
    write_run(tmp_path, make_records(0.1, 50), **value | {"method": {"name": f"=1+1 {name}"}, "budget": 0.1})
    assert draw_figures(["--results", str(tmp_path)]) == 0
    files = list((tmp_path / "figures").iterdir())
    assert len(files) == 4 * len(INCHES) and all(re.fullmatch(r"[A-Za-z0-9._-]{1,200}", path.name) for path in files)
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "figures"}
    for path in (tmp_path / "figures").glob("*.svg"):
        assert "<script" not in path.read_text() and any("<script>" in text for text in texts(path.with_suffix("")))
    assert make_slug("a/b") != make_slug("a:b") and make_slug("ruler_vt") == "ruler_vt"


@pytest.mark.usefixtures("without_pictures")
def test_damaged_runs_and_other_protocols_stay_out(tmp_path, capsys):
    for seed in (0, 1):
        write_run(tmp_path, make_records(1.0, 100), method={"name": "full"}, seed=seed)
        write_run(tmp_path, make_records(0.1, 50), budget=0.1, seed=seed)
    torn = write_run(tmp_path, make_records(0.3, 50), budget=0.3)
    file = next(torn.glob("records*.jsonl"))
    file.write_bytes(file.read_bytes()[:-9])
    odd = write_run(tmp_path, {uid: {"uid": uid} for uid in make_records(0.4, 50)}, budget=0.4)
    write_run(tmp_path, make_records(0.5, 50), finish=False, budget=0.5)
    assert draw_figures(["--results", str(tmp_path), "subtask=niah"]) == 0
    out, err = capsys.readouterr()
    assert sorted(line.split()[2] for line in err.splitlines()) == sorted([torn.name, odd.name])
    assert "torn" in err and "1 unfinished" in out
    found = [lines(path) for path in (tmp_path / "figures").glob("*.csv")]
    assert [[line["budget"] for line in own] for own in found] == [["10\u202f%", ""]] * 2


@pytest.mark.usefixtures("svg_only")
def test_a_curve_says_how_many_samples_each_method_answered(tmp_path):
    write_run(tmp_path, make_records(1.0, 100), method={"name": "full"})
    write_run(tmp_path, make_records(0.1, 50), budget=0.1)
    few = make_records(0.1, 50)
    for uid in list(few)[:4]:
        few[uid] |= {"score": None, "error": "out_of_memory"}
    write_run(tmp_path, few, method={"name": "keydiff"}, budget=0.1)
    assert draw_figures(["--results", str(tmp_path), "--kind", "curve"]) == 0
    [path] = (tmp_path / "figures").glob("*.svg")
    assert "20 samples (4 not answered everywhere)" in " ".join(texts(path))


@pytest.mark.parametrize(
    "given, said",
    {
        "--kind=pie": "--kind=pie: choose one of curve, tasks, grid, change, cost",
        "--width=0": "--width 0: choose column, page, or a number of inches from 2 to 20",
        "--width=wide": "--width wide: choose column, page, or a number of inches from 2 to 20",
        "--against=time": "--against=time: choose one of bytes, rows",
        "--average=odd": "--average=odd: choose one of each",
        "method=nobody": 'method=nobody: no finished run has this; there are "full", "keydiff"',
        "colour=red": "colour: no run has this setting; choose one of model, method",
        "subtask=nothing": "subtask=nothing: choose one of cwe<img",
        "subtask=niah --kind=tasks": "--kind=tasks: choose one of curve",
        "--out=run.py/below": "--out=run.py/below: a folder that can be written",
        "elsewhere": "elsewhere: no SETTING=VALUE; --results DIR names a folder of results",
        "method=full --kind=cost": "nothing there for --kind cost",
    }.items(),
)
def test_what_is_wrong_is_said_and_nothing_written(store, tmp_path, given, said):
    with pytest.raises(SettingError) as error:
        draw_figures(["--results", str(store), "--out", str(tmp_path / "new"), *given.split()])
    assert said in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "new").exists()


def test_every_printed_average_follows_from_the_frame(store, drawn, capsys):
    """Curves, and the figures and costs that the page has too: means of subtasks' means of samples, by pandas alone."""
    loaded = kvbench.load(store, method=["snapkv", "keydiff"], question="visible")
    found = loaded.records(["run", "subtask", "score", "resident_bytes", "full_bytes", "ttft_ms"])
    expected = found.groupby(["run", "subtask"]).score.mean().groupby("run").mean().to_frame()
    expected["share"] = found.resident_bytes.groupby(found.run).sum() / found.full_bytes.groupby(found.run).sum()
    expected["ttft"] = found.ttft_ms.groupby(found.run).median()
    full = kvbench.load(store, method="full", question="visible").records(["subtask", "score"])
    expected["diff"] = expected.score - full.groupby("subtask").score.mean().mean()
    expected = expected.join(loaded.runs[["method", "budget", "block_size"]])
    assert len(expected) == 3 * len(BUDGETS)

    def named(own) -> str:
        block = "" if own.block_size != own.block_size else f" · block {own.block_size:g}"  # NaN: one block
        return f"{own.method}{block} · {100 * own.budget:g}\u202f%"

    wanted = {named(own): own for own in expected.itertuples()}
    figure = {
        f"{one['method']} · {one['budget']}": numbers(one, "score", "share", "diff")
        for one in lines(drawn["curve"])
        if one["diff"]
    }
    cost = {one["run"]: numbers(one, "score", "held", "diff", "ttft") for one in lines(drawn["cost"]) if one["score"]}
    assert figure.keys() == cost.keys() == wanted.keys()
    for name, own in wanted.items():
        assert figure[name] == pytest.approx([own.score, own.share, own.diff])
        assert cost[name] == pytest.approx([own.score, own.share, own.diff, own.ttft])

    assert print_curves(["--results", str(store), "question=visible", "method=snapkv"]) == 0
    said = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line[:2] == "0."}
    for own in expected[expected.method == "snapkv"].itertuples():
        _, share, score, *_, diff, _, _, _, _ = said[f"{own.budget:g}"]  # an interval is two words
        numbers_said = [float(number.strip("%")) for number in (share, score, diff)]
        assert numbers_said == pytest.approx([100 * own.share, own.score, own.diff], abs=0.051)


def test_a_stored_svg_has_short_coordinates_and_its_own_texts():
    font = ' font-family="Sans, Arial"'
    drawn = (
        '<svg width="10.285714" viewBox="0 0 10.285714 3"><clipPath id="clip7"><path d="M0.12345,1e-9L2.5,3.0001"/>'
        f'</clipPath><g clip-path="url(#clip7)" opacity="0.125"><text{font}>0.0125</text><text{font}>x</text></g></svg>'
    )
    assert print_charts.tidy_svg(drawn) == (
        f'<svg{font} width="10.29" viewBox="0 0 10.29 3"><clipPath id="clip0"><path d="M0.12,1e-9L2.5,3"/>'
        '</clipPath><g clip-path="url(#clip0)" opacity="0.125"><text>0.0125</text><text>x</text></g></svg>'
    )
    assert print_charts.tidy_svg(f'{drawn}<text font-family="Serif">y</text>').count("font-family") == 3

"""The papers' figures of scores and costs: what they draw are the cells of their tables and the published values."""

import re
from csv import DictReader
from dataclasses import replace
from math import fsum
from typing import Any

import pytest

from kvbench.cli import papers
from kvbench.papers.build import build_table
from kvbench.papers.cell_values import RunIndex
from kvbench.papers.paper_table import PaperTable
from kvbench.papers.table_spec import expand_each, is_cost_table, load_specs, read_printed
from kvbench.report.paper_charts import draw_figure, list_plots, make_figure
from kvbench.report.print_charts import render_svg
from kvbench.store.runs import FoundRuns
from kvbench.validation import SettingError
from tests.support.repository import ROOT
from tests.support.selection import only_in_full

SPECS = {name: spec for name, spec in load_specs().items() if "chart" in spec}
FIGURES = {  # of scores and costs, in the five papers
    "keydiff_figure06", "keydiff_figure07", "keydiff_figure17", "keydiff_figure19", "expected_attention_figure02",
    "expected_attention_figure03", "expected_attention_figure04", "expected_attention_figure05a",
    "expected_attention_figure05b", "expected_attention_figure11", "dropkv_figure01_top", "dropkv_figure01_bottom",
    "dropkv_figure02_left", "dropkv_figure02_right", "deltakv_figure07", "centroidkv_figure04", "centroidkv_figure05",
    "centroidkv_figure06",
}  # fmt: skip


def make_table(name: str, filled: bool = True) -> PaperTable:
    """Return the table of a figure with published values and made-up measured ones; every third cell is empty."""
    spec = SPECS[name]
    runs = None if is_cost_table(spec) else RunIndex({}, FoundRuns())
    table = build_table(spec, (), read_printed(ROOT, spec), runs)
    rows = []
    for at, (label, cells) in enumerate(table.rows):
        own = []
        for place, cell in enumerate(cells):
            value = (7 * at + 3 * place) % 100 / 100 + 0.01
            texts = {"measured": f"{value:.2f}", "low": f"{value / 2:.3f}", "high": f"{1.5 * value:.3f}"}
            own.append(replace(cell, filling=None, **texts) if filled and (at + place) % 3 else cell)
        rows.append((label, tuple(own)))
    return replace(table, rows=tuple(rows))


def list_plotted(name: str, table: PaperTable) -> list[tuple[str, dict[str, Any]]]:
    """Return the title of the plot and the row of each value that a figure draws."""
    return [(plot.title, row) for plot in list_plots(SPECS[name], table) for row in plot.rows]


def read_number(text: str) -> float | None:
    return float(text) if text else None


def test_every_figure_is_there():
    assert set(SPECS) == {*FIGURES, "decoding_regions"}


@pytest.mark.parametrize("name", SPECS)
def test_what_is_drawn_are_the_cells_of_the_table(name):
    """Each cell in the plot and the series that its row's label names, at its column, and no other."""
    table = make_table(name)
    parts = list(expand_each(SPECS[name]["rows"]))
    areas = [row for row in parts if row.get("area")]
    plots = list_plotted(name, table)
    assert len({(title, row["label"], row["column"]) for title, row in plots}) == len(plots)
    found = {(f"{title}, {row['label']}".removeprefix(", "), row["column"]): row for title, row in plots}
    for part, (label, cells) in zip(parts, table.rows[: len(table.rows) - len(areas)], strict=False):
        if part.get("sum"):
            continue
        for column, cell in zip(table.columns, cells, strict=True):
            own = found.pop((label, column))
            texts = (cell.measured, cell.low, cell.high, cell.published)
            assert [own[key] for key in ("value", "low", "high", "published")] == list(map(read_number, texts))
            assert areas or own["area"] is None
    assert not found
    for _, cells in table.rows[len(table.rows) - len(areas) :]:
        assert [row["area"] for _, row in plots] == [read_number(cell.measured) for cell in cells]


def read_csv(*files: str) -> list[dict[str, str]]:
    lines = []
    for file in files:
        with (ROOT / "results" / "published" / file).open(newline="", encoding="utf-8") as text:
            lines += list(DictReader(text))
    return lines


def find_value(lines: list[dict[str, str]], **where: str) -> float:
    [own] = [line for line in lines if all(line[key] == value for key, value in where.items())]
    return float(own["value"])


def find_hollow(name: str, label: str, title: str, column: str) -> float:
    rows = list_plotted(name, make_table(name, filled=False))
    [row] = [own for at, own in rows if (at, own["label"], own["column"]) == (title, label, column)]
    return float(row["published"])


def test_published_marks_are_the_papers_values():
    llama = {"model": "meta-llama/Llama-3.1-8B-Instruct"}
    own = read_csv("dropkv_table06.csv")
    where = {"method": "cake", "budget": "0.05", "context_length": "65536", "task": "average"}
    name = "Llama-3.1-8B-Instruct"
    assert find_hollow("dropkv_figure01_top", "CAKE", name, "64k") == find_value(own, **llama, **where)
    own = read_csv("dropkv_table05.csv")
    full = find_value(own, **llama, method="full", task="average")
    assert [find_hollow("dropkv_figure01_bottom", "full cache", name, at) for at in ("5 %", "30 %")] == [full, full]
    own = read_csv("centroidkv_table02.csv")  # the paper prints no mean: that of its 13 values
    values = [float(line["value"]) for line in own if (line["method"], line["budget"]) == ("snapkv", "0.5")]
    assert len(values) == 13
    assert find_hollow("centroidkv_figure04", "SnapKV", name, "50 %") == round(fsum(values) / 13, 2)
    mistral = load_specs("centroidkv")["centroidkv_table05"]["checks"]["means"]
    found = find_hollow("centroidkv_figure05", "CentroidKV", "Mistral-7B-Instruct-v0.2", "25 %")
    assert found == mistral["centroidkv"]
    own = read_csv("centroidkv_table06.csv")
    where = {"method": "centroidkv", "context_length": "65536", "metric": "seconds"}
    seconds = find_value(own, **where, task="ttft_s") + 999 * find_value(own, **where, task="tpot_s")
    assert find_hollow("centroidkv_figure06", "CentroidKV 25 %", "", "64k") == round(seconds, 2)


KINDS = ["keydiff_figure19", "centroidkv_figure06", "expected_attention_figure05b", "centroidkv_figure05"]


@pytest.mark.parametrize("name", [*KINDS, *(only_in_full(name) for name in SPECS if name not in KINDS)])
def test_a_picture_has_a_mark_for_each_number_and_none_for_a_gap(name, tmp_path):
    """A figure of each kind of chart in `make test`."""
    table = make_table(name)
    rows = [row for _, row in list_plotted(name, table)]
    assert draw_figure(tmp_path / name, SPECS[name], table)
    text = (tmp_path / f"{name}.svg").read_text()
    assert {path.suffix for path in tmp_path.iterdir()} == {".svg", ".pdf", ".png"}
    measured = sum(row["value"] is not None for row in rows)
    published = sum(row["published"] is not None for row in rows)
    assert measured and any(row["value"] is None for row in rows)
    assert count_marks(text) == (measured, published)


def count_marks(text: str) -> tuple[int, int]:
    """Return the number of filled marks, bars or cells and of hollow marks in an SVG, without those of its key."""
    groups = re.findall(r'<g class="mark-(?:symbol|rect) role-mark concat_0[^>]*(?<!/)>(.*?)</g>', text, re.DOTALL)
    paths = [path for group in groups for path in re.findall("<path[^>]*>", group)]
    filled = sum("fill=" in path for path in paths)
    return filled, len(paths) - filled


def test_an_empty_cell_leaves_its_column_in_its_place():
    """Columns stand in the order of the table, also where the first of them has no bar."""
    table = make_table("centroidkv_figure06")
    figure = make_figure("centroidkv_figure06", SPECS["centroidkv_figure06"], table)
    assert figure is not None
    assert table.rows[0][1][0].measured == ""
    text, *_ = render_svg(figure.drawing, figure.pixels, None)
    assert re.findall(r">(16k|32k|64k)</text>", text) == ["16k", "32k", "64k"]


def test_a_figure_without_numbers_is_a_page_of_commands_and_one_with_published_ones_is_drawn(tmp_path, capsys):
    assert papers.main(["--results", str(tmp_path), "keydiff", "figure6"]) == 0
    shown = capsys.readouterr().out
    assert "![" not in shown and "`python run.py model=llama32_3b task=niah" in shown
    assert "preset=keydiff_figure6`" in shown
    assert papers.main(["--results", str(tmp_path), "centroidkv", "figure6"]) == 0
    assert "(centroidkv_figure06.svg)" in capsys.readouterr().out
    found = {path.name for path in (tmp_path / "papers").iterdir()}
    suffixes = {
        "keydiff_figure06": ("md", "csv", "tex"),
        "centroidkv_figure06": ("md", "csv", "tex", "svg", "pdf", "png"),
    }
    assert found == {f"{name}.{own}" for name, forms in suffixes.items() for own in forms}


def test_a_name_that_is_nearly_right_is_answered_with_the_right_one(tmp_path, capsys):
    assert papers.main(["--results", str(tmp_path), "dropkv", "1top"]) == 2
    assert capsys.readouterr().err.startswith("kvbench: EXHIBIT=1top: did you mean figure01_top or ")


def test_without_the_extra_there_are_tables_alone(tmp_path, capsys, monkeypatch):
    def refuse(*_: object) -> None:
        raise SettingError("this needs the extra report")

    monkeypatch.setattr(papers, "require_extra", refuse)
    assert papers.main(["--results", str(tmp_path), "centroidkv", "figure6"]) == 0
    out, err = capsys.readouterr()
    assert "![" not in out and err == "kvbench: figures are not drawn: this needs the extra report\n"
    assert not list((tmp_path / "papers").glob("*.svg"))

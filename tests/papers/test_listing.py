"""The list of the papers' tables and figures: it is whole, names what emits each, and says what a store has."""

import re
from collections import Counter
from pathlib import Path

import pytest

from kvbench.cli import papers, papers_list
from kvbench.cli.papers import emit_exhibits
from kvbench.papers.exhibits import load_exhibits
from kvbench.papers.listing import choose_exhibits, describe_exhibits, format_list, list_exhibits
from kvbench.papers.table_spec import list_papers, load_specs
from kvbench.store.study_lines import Line
from kvbench.validation import SettingError
from tests.support.study_folders import list_heads, write_study
from tests.support.table_runs import BOOK, put, record

NOT_IN_A_PAPER = {"keydiff_blocks", "keydiff_lemma"}  # specifications that stand beside a paper's own
COUNTS = {"keydiff": 38, "expected_attention": 36, "deltakv": 28, "dropkv": 28, "centroidkv": 16}


def test_every_table_and_figure_is_emitted_or_static_with_its_reason():
    listed = list_exhibits()
    assert Counter(own.paper for own in listed) == COUNTS and len(listed) == 146
    assert len({(own.paper, own.name) for own in listed}) == 146
    static = [own for own in listed if own.reason]
    assert len(static) == 17 and all(len(own.reason) > 10 and not own.specs for own in static)
    named = {spec for own in listed for spec in own.specs}
    of_papers = {name for name in load_specs() if name.startswith(tuple(f"{own}_" for own in list_papers()))}
    assert named == {*of_papers, *load_exhibits()} - NOT_IN_A_PAPER


def states(results: Path, paper: str) -> dict[str, tuple[str, str]]:
    return {line.exhibit.name: (line.kind, line.state) for line in describe_exhibits(results, paper)}


def test_the_list_says_what_a_store_has(tmp_path):
    put(tmp_path, {**BOOK, "method": "full"}, [record(0, 50.0), record(1, 70.0)])
    layers = [Line("received_attention", "correlation", 0.9, series="mean", layer=layer) for layer in range(3)]
    write_study(tmp_path, [*list_heads(), *layers])
    found = states(tmp_path, "keydiff")
    assert found["table17"] == ("scores", "partly") and found["table18"] == ("scores", "empty")
    assert found["figure14"] == ("study", "filled") and found["table03"] == ("study", "partly")
    assert found["figure13"] == ("study", "empty") and found["table19"] == ("cost", "empty")
    assert found["figure01"] == ("static", "")


def test_the_list_fits_a_narrow_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert papers_list.main(["centroidkv", "--results", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60 and lines[0] == "centroidkv: 16 tables and figures, 13 emitted, 3 static"
    assert "16 = 13 emitted + 3 static" in lines[-2]
    wide = list(format_list(describe_exhibits(tmp_path, "centroidkv"), 120))
    assert "  table02          scores  empty   python run.py -m preset=centroidkv_table2" in wide
    assert "  figure02         study   empty   python -m kvbench papers study centroidkv figure02" in wide


def test_a_name_chooses_an_exhibit_or_its_parts(tmp_path):
    assert next(iter(emit_exhibits(tmp_path, "dropkv", "figure3"))) == "figure03a: static: a drawing of the cone"
    assert [*choose_exhibits("expected_attention", "4a")[0]] == ["expected_attention_table04"]
    assert [*choose_exhibits("deltakv", "figure2")[1]] == [f"deltakv_figure02{part}" for part in "abcdef"]
    assert [*choose_exhibits("centroidkv", "theorem61")[1]] == ["centroidkv_theorem61", "centroidkv_theorem61_measured"]


@pytest.mark.parametrize(
    ("paper", "exhibit", "message"),
    [
        ("dropkv", "figure4", "EXHIBIT=figure4: it is static: a drawing of the strict and the approximate cone"),
        ("dropkv", "33", "EXHIBIT=33: did you mean table"),
        ("dropkv", "appendix_z", "EXHIBIT=appendix_z: Choose one of figure01_top, "),
        ("drop", None, "PAPER=drop: did you mean dropkv? Choose one of centroidkv, "),
    ],
)
def test_a_wrong_name_is_told_what_there_is(paper, exhibit, message):
    with pytest.raises(SettingError) as raised:
        choose_exhibits(paper, exhibit)
    assert str(raised.value).startswith(message)


def test_the_list_takes_no_exhibit_and_needs_a_folder(tmp_path, capsys):
    assert papers_list.main(["keydiff", "figure14"]) == 2
    assert capsys.readouterr().err.startswith("kvbench: unrecognized arguments: figure14; usage: ")
    assert papers_list.main(["--results", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"kvbench: results={tmp_path}/none: no such folder\n"


def test_a_page_fits_a_terminal_with_all_that_it_says(tmp_path, capsys, monkeypatch):
    assert papers.main(["--results", str(tmp_path), "keydiff", "17"]) == 0
    page = capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    assert papers.main(["--results", str(tmp_path), "keydiff", "17"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, page.splitlines())) > 300 and max(map(len, shown.splitlines())) <= 60
    words = [set(re.findall(r"[^\s|\\`*#-]+", text)) for text in (page, shown)]
    assert words[0] <= words[1] | {":"} and "\n[2]" not in shown and "|" not in shown

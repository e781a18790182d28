"""The papers' exhibits that studies fill: which files they become, what these say, and what a wrong name is told."""

import pytest

from kvbench.cli import command
from kvbench.cli import papers as papers_command
from kvbench.cli.papers import emit_exhibits, emit_studied
from kvbench.papers import exhibits
from kvbench.papers.exhibits import list_claims, load_exhibits, normalize_name
from kvbench.store.study_lines import Line, read_lines
from kvbench.validation import SettingError
from tests.support.study_folders import list_heads, write_study

TABLE = """
table03:
  title: "KeyDiff, Table 3"
  study: correlation
  file: keydiff_table03.csv
  scale: 100
  digits: 1
  line: {quantity: rho}
  rows:
    - {label: first, line: {layer: 0}, published: {variant: layer=1}}
    - {label: ninth, line: {layer: 8}, published: {variant: layer=2}}
  columns:
    - {label: mean, published: {metric: spearman_rho}}
    - {label: spread, line: {quantity: std}, published: null}
  claims: {monotone: "Keys that are\\n    less similar get more attention."}
  proof: {monotone: an estimate, rho: a bound}
  notes: ["One reading of\\n    two."]
"""


@pytest.fixture
def without_pictures(monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)


def test_a_figure_becomes_text_numbers_and_latex(tmp_path, without_pictures, capsys):
    write_study(tmp_path, list_heads(), "llama_8b")
    [text] = emit_exhibits(tmp_path, "keydiff", "figure14")
    folder = tmp_path / "papers" / "llama_8b-ruler-012345"
    assert {path.name for path in folder.iterdir()} == {f"keydiff_figure14.{own}" for own in ("md", "csv", "tex")}
    assert text == (folder / "keydiff_figure14.md").read_text()
    assert "llama\\_8b, 2 prompts of ruler, up to 1,500 tokens." in text and "![" not in text
    assert "opposite sides. Holds for 50.0 %. (50.0 % \\[25.0, 75.0\\] of 24, 2 prompts; counted exactly)" in text
    assert read_lines(folder / "keydiff_figure14.csv", "key_geometry") == list_heads()
    assert "{keydiff_figure14.pdf}" in (folder / "keydiff_figure14.tex").read_text()
    said = capsys.readouterr().err
    assert said.startswith("kvbench: figures are not drawn: altair") and said.count("\n") == 1


def test_the_folder_of_results_may_be_left_out(tmp_path, monkeypatch, without_pictures, capsys):
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path / "results", list_heads())
    assert papers_command.main(["keydiff", "figure14"]) == 0
    assert capsys.readouterr().out.startswith("# KeyDiff, Figure 14")
    assert papers_command.main(["keydiff", "figure14", "--results", "keydiff"]) == 2
    assert capsys.readouterr().err == "kvbench: results=keydiff: no such folder\n"


def test_a_table_has_published_values_beside_lines(tmp_path, monkeypatch, without_pictures, capsys):
    monkeypatch.setattr(exhibits, "EXHIBITS", tmp_path)
    (tmp_path / "keydiff.yaml").write_text(TABLE)
    rho = Line("correlation", "rho", 0.9, layer=0, low=0.85, high=0.95, prompts=2)
    others = [Line("other", "rho", 0.1, layer=0), Line("correlation", "std", 0.02, layer=0)]
    write_study(tmp_path, [rho, *others, Line("correlation", "monotone", 1.0, series="holds", n=8, prompts=1)])
    [text] = emit_exhibits(tmp_path, "keydiff", "3")
    assert capsys.readouterr().err == ""  # a table needs no pictures
    first, ninth = (line for line in text.splitlines() if line.startswith(("| first", "| ninth")))
    assert first == "| first | 0.8997 | 90.0 [85.0, 95.0] (+89.1) | 2.0 |"
    assert ninth == "| ninth | 0.9561 | – | – |"
    assert "* Claim: Keys that are less similar get more attention. Holds. (100.0 % of 8; an estimate)" in text
    assert "* One reading of two.\n* rho: a bound." in text
    write_study(tmp_path, [rho, Line("correlation", "rho", 0.7, layer=0, head=1)], name="1" * 16)
    with pytest.raises(SettingError, match="keydiff_table03: 2 lines fit"):
        list(emit_exhibits(tmp_path, "keydiff", "3"))


def test_all_folders_fill_an_exhibit_and_an_empty_one_names_its_command(tmp_path, without_pictures):
    for model in ("reference", "smollm2"):
        write_study(tmp_path, list_heads(), model, model.rjust(16, "0"))
    said = list(emit_studied(tmp_path, load_exhibits("keydiff"), named=False, inches=None))
    assert sum(line.endswith("keydiff_figure14.md") for line in said) == 2
    [line] = (line for line in said if line.startswith("keydiff_figure16: "))
    assert line == "keydiff_figure16: no study has filled it: `python -m kvbench papers study keydiff figure16` does"
    assert not list(tmp_path.glob("papers/*/keydiff_figure16.*"))


def test_without_studies_one_line_says_what_computes_them(tmp_path):
    [line] = emit_studied(tmp_path, load_exhibits(), named=False, inches=None)
    assert line.endswith("`python -m kvbench papers study all` computes them")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("figur14", "EXHIBIT=figur14: did you mean figure14 or figure"),
        ("figure41", "did you mean figure1"),
        ("xyz", "EXHIBIT=xyz: Choose one of"),
        ("99", "EXHIBIT=99: did you mean table"),
    ],
)
def test_an_unknown_exhibit_is_refused_with_similar_names(tmp_path, name, said):
    with pytest.raises(SettingError) as refused:
        list(emit_exhibits(tmp_path, "keydiff", name))
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_names_of_exhibits_need_no_zeros():
    names = ("figure4", "figure04", "5", "table12", "figure2a", "lemma1", "xyz")
    assert [normalize_name(name) for name in names] == [
        "figure04",
        "figure04",
        "table05",
        "table12",
        "figure02a",
        "lemma1",
        "xyz",
    ]


def test_a_claim_without_a_line_was_not_measured():
    spec = {"study": "s", "claims": {"a": "It is so.", "b": "It is otherwise."}}
    found = list_claims(spec, [Line("s", "a", 0.0, series="holds", n=3), Line("t", "b", 1.0, series="holds")])
    assert [claim.text for claim in found] == ["Does not hold. (0.0 % of 3; counted exactly)", "Not measured."]

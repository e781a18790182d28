"""The card of a tuned model: its tables, list and picture say what the files say, and nothing else."""

import json
import re
import shutil
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import yaml

from kvbench.analysis.full_scores import ScoreSource, read_scores, replace_scores, write_scores
from kvbench.analysis.intervals import Values, mean
from kvbench.cli import docs_tables
from kvbench.cli.tune import make_parser
from kvbench.config import paths
from kvbench.models.low_rank import read_factors_file
from kvbench.training import embedded_card
from kvbench.training.tuning import read_tuning
from kvbench.training.tuning_card import BASE_PAGE, CHOICES, MODEL, PAGE, PICTURE, CardFiles, make_card
from kvbench.training.tuning_notes import COUNTS, FAMILIES, LOSSES
from kvbench.training.tuning_recipe import TuningRecipe, choose_recipe
from kvbench.validation import SettingError
from tests.support.repository import ROOT
from tests.support.tuned_models import write_factors

RECIPE = replace(TuningRecipe(), rate=0.00125, tokens=12_345_678)
SOURCE = ScoreSource(MODEL, "0a1b", "ruler", 50_000, "bfloat16", "NVIDIA H200")
MIXED, BAD = Values([100, 100, 100, 0], list("abcd")), Values([0, 0, 0, 100], list("abcd"))
RIGHT, HALF = Values([100] * 4, list("abcd")), Values([100, 0, 100, 0], list("abcd"))


def write_files(root: Path) -> CardFiles:
    """Write what a card is made from, with a page and a file of conf/ that have no tables yet."""
    for path in (PAGE, *CHOICES.values(), PICTURE):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
    for page in (PAGE, BASE_PAGE):
        shutil.copy(ROOT / page, root / page)
    for name, path in CHOICES.items():
        (root / path).write_text(f"name: {name}\n")
    files = CardFiles(root)
    files.factors.parent.mkdir(parents=True)
    tuning = {"recipe": RECIPE.describe(), "steps": 94, "tokens": 12_320_768, "gpus": 2}
    about = {"source": "a|b", "licence": "Apache-2.0", "kvbench": "1"}
    write_factors(files.factors, model="beef", tunings=json.dumps([tuning]), **about)
    after = SOURCE.list_scores({4096: {"easy": RIGHT, "hard": HALF}, 16384: {"easy": MIXED, "hard": BAD}})
    before = replace(SOURCE, model="smollm2", weights="ffff").list_scores({4096: {"easy": MIXED, "hard": BAD}})
    write_scores(files.result("scores.csv"), replace_scores(before, after))
    files.result("text.csv").write_text("length,sequences,base,tuned,device\n8192,16,2.25,2.28125,NVIDIA H200\n")
    names = [*COUNTS, *LOSSES, *FAMILIES]
    lines = [",".join([str(10 * place), *("1" for _ in names[1:])]) for place in (1, 2)]
    files.result("curve.csv").write_text("\n".join([",".join(names), *lines]) + "\n")
    return files


@pytest.fixture(scope="module")
def card(tmp_path_factory) -> tuple[CardFiles, dict[str, str]]:
    files = write_files(tmp_path_factory.mktemp("checkout"))
    return files, make_card(files.root)


def test_the_tables_say_what_the_files_say(card):
    files, texts = card
    page = texts[PAGE]
    data = files.factors.read_bytes()
    about = f"{len(data):,} bytes, SHA-256 `{sha256(data).hexdigest()}`"
    for row in (
        f"| file | `kvbench/models/smollm2_long.safetensors`, {about} |",
        "| RoPE | base θ 50,000 |",
        "| base | `model=smollm2`, whose weights have the identity `beef` |",
        "| tuned model | its merged weights have the identity `0a1b` |",
        "| training | 94 steps, 12,320,768 tokens, GPUs: 2 |",
        "| source | a\\|b |",
        "| `rate` | 0.00125 | Peak of the learning rate. |",
        "| `clip` | 1 | Largest norm of the gradient. |",
        "| `tokens` | 12,345,678 | Tokens of the whole tuning, padding included. |",
        "| 1,024 | 7.1 % |",
        "| ruler_cwe | 14.0 % | 19.0 % |",
        "| `smollm2` | `ffff` | `ruler` | 4 | 50000 | bfloat16 | NVIDIA H200 |",
        "| `smollm2_long` | `0a1b` | `ruler` | 4 | 50000 | bfloat16 | NVIDIA H200 |",
        "| 8,192 | 16 | 2.2500 | 2.2812 | +0.0312 | NVIDIA H200 |",
    ):
        assert f"\n{row}\n" in page, row
    assert page.count(f"({PICTURE.removeprefix('docs/')})") == 1


def test_scores_stand_side_by_side_with_intervals(card):
    _, texts = card
    section = texts[PAGE].partition("| subtask |")[2].partition("\n\n")[0].splitlines()
    assert section[0] == " 4096, before | 4096, after | 16384, after |"

    def show(*values: Values) -> str:
        one = mean(values)
        return f"{one.value:.1f} [{one.low + 0:.1f}, {one.high:.1f}]".replace("-0.0", "0.0")

    assert section[2:4] == [
        f"| easy | {show(MIXED)} | {show(RIGHT)} | {show(MIXED)} |",
        f"| hard | {show(BAD)} | {show(HALF)} | {show(BAD)} |",
    ]
    averages = show(MIXED, BAD), show(RIGHT, HALF), show(MIXED, BAD)
    assert section[4] == f"| **average** | {' | '.join(f'**{cell}**' for cell in averages)} |"
    assert section[5] == "| subtasks with 70 or more | 1 of 2 | 1 of 2, not hard | 1 of 2, not hard |"


def test_the_page_of_the_base_has_its_scores_alone(card):
    text = card[1][BASE_PAGE]
    section = text.partition("| subtask |")[2].partition("\n\n")[0].splitlines()
    assert section[0] == " 4096 |" and section[-1] == "| subtasks with 70 or more | 1 of 2 |"
    assert [line.split(" | ")[0] for line in section[2:4]] == ["| easy", "| hard"]
    measured = text.partition("| model | weights |")[2].partition("\n\n")[0].splitlines()[2:]
    assert measured == ["| `smollm2` | `ffff` | `ruler` | 4 | 50000 | bfloat16 | NVIDIA H200 |"]


def test_the_list_has_what_scores_fifty_or_more(card):
    lists = {MODEL: {4096: ["easy", "hard"], 16384: ["easy"]}, "smollm2": {4096: ["easy"]}}
    for (name, path), weights in zip(CHOICES.items(), ("0a1b", "ffff"), strict=True):
        solvable = {"weights": weights, "seed": 50_000, "ruler": lists[name]}
        assert yaml.safe_load(card[1][path]) == {"name": name, "solvable": solvable}


def test_the_picture_has_a_line_for_each_family(card):
    picture = card[1][PICTURE]
    assert picture.startswith("<svg") and len(picture) < 60_000
    for name in (*FAMILIES, "answers", "plain text", "million tokens read"):
        assert f">{name}<" in picture, name


def test_a_card_is_written_once(card):
    """The same files give the same card; what people wrote stays."""
    files, texts = card
    for path, text in texts.items():
        (files.root / path).write_text(text)
    assert make_card(files.root) == texts
    for page in (PAGE, BASE_PAGE):
        written, there = (re.sub(r"(?m)^(\||!\[).*\n", "", text) for text in (texts[page], (ROOT / page).read_text()))
        assert written == there  # but for tables and pictures


@pytest.mark.parametrize("name", ["scores.csv", "text.csv", "curve.csv", "factors"])
def test_a_file_that_is_missing_is_named_in_one_line(tmp_path, name):
    files = write_files(tmp_path)
    path = files.factors if name == "factors" else files.result(name)
    path.unlink()
    with pytest.raises(SettingError, match=re.escape(str(path))):
        make_card(tmp_path)


def test_factors_without_a_recipe_and_scores_of_other_weights_are_refused(tmp_path):
    files = write_files(tmp_path)
    scores = read_scores(files.result("scores.csv"))
    write_scores(files.result("scores.csv"), [*scores, replace(scores[-1], weights="77aa", subtask="easy")])
    with pytest.raises(SettingError, match="scores.csv: 2 weights or tasks of smollm2_long; expected one"):
        make_card(tmp_path)
    write_factors(files.factors, model="beef")
    with pytest.raises(SettingError, match="its metadata do not say how the factors were tuned"):
        make_card(tmp_path)


def test_the_command_writes_the_card(tmp_path, monkeypatch, capsys):
    files = write_files(tmp_path)
    monkeypatch.setattr(paths, "FILES", tmp_path)
    monkeypatch.setattr("kvbench.report.doc_tables.complete_pages", dict)
    (tmp_path / embedded_card.SCORES).parent.mkdir()
    for path in (embedded_card.PAGE, embedded_card.SCORES):
        shutil.copy(ROOT / path, tmp_path / path)
    for said in ("written", "as it was"):
        assert docs_tables.main(["--card"]) == 0
        printed = [f"{path}  {said}" for path in (PAGE, BASE_PAGE, *CHOICES.values(), PICTURE)]
        assert capsys.readouterr().out.splitlines() == [*printed, f"{embedded_card.PAGE}  as it was"]
    assert (files.root / PICTURE).read_text().startswith("<svg")


@pytest.mark.skipif(not CardFiles(ROOT).result("").exists(), reason="results/tuned is not here")
def test_the_page_is_what_its_files_say():
    card = make_card(ROOT)
    for path in (PAGE, BASE_PAGE, *CHOICES.values()):
        assert (ROOT / path).read_text() == card[path], "python -m kvbench dev docs-tables --card writes it"
    assert (ROOT / PICTURE).exists()


def test_the_factors_were_tuned_by_the_commands_of_the_page():
    """The first command has the defaults, and the second one names what it changes."""
    first, second = read_tuning(read_factors_file(CardFiles(ROOT).factors, "model.factors"))
    assert first["recipe"] == TuningRecipe().describe()
    commands = (ROOT / PAGE).read_text().replace("\\\n", "")
    [options] = re.findall(r"kvbench dev tune (.* --start .*)", commands)
    assert second["recipe"] == choose_recipe(vars(make_parser().parse(options.split()))).describe()

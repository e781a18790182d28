"""The subtasks that a model can do: the list in its card, the command that makes it, and all places that show it."""

import csv
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from kvbench.analysis import solvable_subtasks
from kvbench.analysis.budget_series import SOLVABLE, CurveOptions
from kvbench.analysis.full_scores import AVERAGE as AVERAGE_ROW
from kvbench.analysis.full_scores import read_scores, write_scores
from kvbench.analysis.intervals import mean
from kvbench.analysis.paired import PairedScores, compare_subtasks
from kvbench.cli import choose_solvable as choose_solvable_command
from kvbench.cli import curves as curves_command
from kvbench.cli import figures as figures_command
from kvbench.config import compose
from kvbench.config.compose import compose_config
from kvbench.integrations.wandb_run import LoggedRun
from kvbench.interfaces.task import Graded
from kvbench.report.page import NUMBERS
from kvbench.report.panels import build_panels
from kvbench.runs import checks
from kvbench.runs.checks import keep_settings
from kvbench.runs.spec import RunSpec
from kvbench.store.runs import find_finished
from kvbench.tasks.ruler.task import Ruler
from kvbench.validation import SettingError
from tests.support import made_up_runs
from tests.support.command_line import run_cli
from tests.support.single_tables import build_closing_table

NAMES = ("niah_single_1", "ruler_vt", "ruler_cwe")
LIST = ("ruler_vt", "niah_single_1")
AVERAGE = "average of 2 solvable"
SOLVES = {"weights": "0a1b", "seed": 7, "ruler": {2048: list(LIST), 4096: []}, "longbench": ["trec"]}
VALUE = made_up_runs.VALUE | {"task": {"name": "ruler", "length": 2048, "seed": 0}}


@pytest.fixture
def write_card(tmp_path_factory, monkeypatch):
    """A copy of conf/ in the place of it; the function that gives it the card of a model."""
    conf = tmp_path_factory.mktemp("project") / "conf"
    shutil.copytree(compose.CONF / "model", conf / "model")
    for path in compose.CONF.iterdir():
        if path.name != "model":
            (conf / path.name).symlink_to(path)
    monkeypatch.setattr(compose, "CONF", conf)

    def write(own: object, name: str = "tiny") -> None:
        kind = "EmbeddedModel" if name.startswith("reference") else "HuggingFaceModel"
        text = own if isinstance(own, str) else yaml.safe_dump({solvable_subtasks.KEY: own})
        (conf / "model" / f"{name}.yaml").write_text(
            f"_target_: kvbench.models.model_kinds.{kind}\nname: {name}\npath: null\nrevision: null\n{text}"
        )
        compose._compose_groups.cache_clear()  # files of conf/ are read once a process

    return write


def records(budget: float) -> dict[str, dict]:
    """Three subtasks of six samples, contexts of two; the full cache solves the last one never."""
    found = {}
    for place, subtask in enumerate(NAMES):
        for index in range(6):
            uid = f"{subtask}/{index}"
            full = 0.0 if subtask == "ruler_cwe" else 100.0
            found[uid] = {
                "uid": uid, "subtask": subtask, "index": len(found), "group": f"{subtask}/{index // 2}", "meta": {},
                "prompt_hash": f"p{uid}", "target_hash": "t", "target": ["1"], "error": None, "also": {}, "output": "x",
                "stop": "eos", "tokens_out": 5, "ttft_ms": 90.0, "decode_ms": 8.0, "peak_bytes": 2000,
                "score": full * (budget == 1 or (index + place) % 3 < 10 * budget),
                "resident_bytes": int(1000 * budget) + place, "full_bytes": 1000, "rows_attended": 200 * budget,
                "rows_seen_decoding": 200,
            }  # fmt: skip
    return found


@pytest.fixture
def store(tmp_path, write_card) -> Path:
    """The full cache and two budgets of a method, by a model with a card."""
    write_card(SOLVES)
    made_up_runs.write_run(tmp_path, records(1.0), **VALUE | {"method": {"name": "full"}, "sources": "s1"})
    for budget in (0.1, 0.2):
        made_up_runs.write_run(tmp_path, records(budget), **VALUE | {"budget": budget})
    return tmp_path


def scores(budget: float, names: tuple[str, ...] = LIST) -> list[PairedScores]:
    """Of these subtasks: the full cache's and the method's."""
    full, method = records(1.0), records(budget)
    own = [[uid for uid in full if full[uid]["subtask"] == name] for name in names]
    sides = [[[side[uid]["score"] for uid in uids] for side in (full, method)] for uids in own]
    return [PairedScores(*both, [full[uid]["group"] for uid in uids]) for both, uids in zip(sides, own, strict=True)]


def test_a_list_is_found_by_model_weights_task_and_length(write_card):
    assert solvable_subtasks.list_solvable(VALUE) == ()  # no such file
    write_card(SOLVES)
    assert solvable_subtasks.list_solvable(VALUE) == LIST
    longbench = VALUE | {"task": {"name": "longbench", "path": "hub"}}
    assert solvable_subtasks.list_solvable(longbench) == ("trec",)
    for other in (
        {"task": {"name": "ruler", "length": 4096}},
        {"task": {"name": "ruler", "length": 2000}},
        {"task": {"name": "ruler", "length": 2048, "seed": 7}},  # the samples that the list was chosen on
        {"task": {"name": "ruler_lmeval", "length": 2048}},
        {"model": {"name": "tiny", "identity": "ffff"}},
        {"model": {"name": "../tiny", "identity": "0a1b"}},
        {"model": {"name": "hf", "identity": "0a1b"}},
    ):
        assert solvable_subtasks.list_solvable(VALUE | other) == ()
    write_card("")
    assert solvable_subtasks.list_solvable(VALUE) == ()


def test_some_subtasks_and_not_all_make_an_average():
    assert solvable_subtasks.average_solvable(LIST, NAMES) == {AVERAGE: {"niah_single_1": 1.0, "ruler_vt": 1.0}}
    assert solvable_subtasks.average_solvable(LIST, ("ruler_cwe", "ruler_vt")) == {
        "average of 1 solvable": {"ruler_vt": 1.0}
    }
    for names, there in (((), NAMES), (LIST, ("ruler_cwe",)), (NAMES, LIST), (LIST, LIST), (LIST, ())):
        assert solvable_subtasks.average_solvable(names, there) == {}


def test_a_mean_of_50_is_enough():
    assert solvable_subtasks.is_solvable([0, 100, 100 / 3, 200 / 3]) and solvable_subtasks.is_solvable([50.0] * 7)
    assert not solvable_subtasks.is_solvable([0, 100, 100 / 3, 66]) and not solvable_subtasks.is_solvable([0.0])


BAD = {
    "[1]": "solvable: weights (a text in quotes), seed and tasks",
    "{seed: 1, ruler: {}}": "solvable: weights (a text in quotes), seed and tasks",
    "{weights: 12, seed: 1}": "solvable: weights (a text in quotes), seed and tasks",
    "{weights: a, seed: -1}": "solvable.seed=-1: a whole number of at least 0",
    "{weights: a, seed: 1, rule: []}": "solvable=rule: did you mean ruler?",
    "{weights: a, seed: 1, niah: []}": "solvable: the subtasks of niah have no fixed names",
    "{weights: a, seed: 1, aime25: []}": "solvable: the subtasks of aime25 have no fixed names",
    "{weights: a, seed: 1, ruler: [ruler_vt]}": "solvable.ruler: a list for each length of subtasks",
    "{weights: a, seed: 1, longbench: {2048: [trec]}}": "solvable.longbench: one list of subtasks",
    "{weights: a, seed: 1, ruler: {2k: []}}": "solvable.ruler length=2k: a whole number of at least 1",
    "{weights: a, seed: 1, ruler: {0: []}}": "solvable.ruler length=0: a whole number of at least 1",
    "{weights: a, seed: 1, ruler: {2048: ruler_vt}}": "solvable.ruler.2048=ruler_vt: a list of different subtasks",
    "{weights: a, seed: 1, ruler: {1024: [vt, vt]}}": "solvable.ruler.1024=[vt,vt]: a list of different subtasks",
    "{weights: a, seed: 1, ruler: {1024: [ruler_vt, vt]}}": "solvable.ruler.1024=vt: choose one of niah_single_1, ",
    "{weights: a, seed: 1, longbench: [qa]}": "solvable.longbench=qa: choose one of narrativeqa, ",
}


def config_of(*overrides: str) -> object:
    return compose_config(["device=cpu", *overrides])


@pytest.mark.parametrize("text", BAD)
def test_a_damaged_card_is_one_line(write_card, text):
    write_card(f"{solvable_subtasks.KEY}: {text}\n", "hf")
    line = re.escape(f"conf/model/hf.yaml: {BAD[text]}")
    with pytest.raises(SettingError, match=f"^{line}[^\n]*$"):
        checks.check_settings(config_of("model=hf", "model.path=/"))
    with pytest.raises(SettingError, match=f"^{line}"):  # and where runs are only shown
        solvable_subtasks.list_solvable(VALUE | {"model": {"name": "hf", "identity": "a"}})


def test_a_card_that_is_no_yaml_is_named(write_card):
    write_card("solvable: [\n")
    with pytest.raises(SettingError, match=r"^model=tiny: conf/model/tiny.yaml line \d is not valid YAML"):
        solvable_subtasks.list_solvable(VALUE)


def test_a_list_is_no_part_of_what_a_run_is_known_by(write_card):
    before = RunSpec.from_config(config_of())
    write_card(SOLVES, "reference")
    config = config_of()
    run = RunSpec.from_config(config)
    assert config.model.solvable.ruler[2048] == list(LIST)  # Hydra composes it
    assert run.value == before.value
    assert json.dumps(keep_settings(config)) == json.dumps(before.settings)  # what replays the run
    for override in ("model.solvable=null", "model.solvable.seed=8", "model.solvable.longbench=[qasper]"):
        with pytest.raises(SettingError, match=r"^model\.solvable=.*conf/model/reference.yaml has it$"):
            checks.check_settings(config_of(override))


@pytest.mark.parametrize("averages", [None, {"of all": dict.fromkeys(NAMES, 1.0)}])
def test_the_closing_table_shows_the_second_average_last(averages):
    heading = {"model": "tiny"}
    plain = build_closing_table(records(1.0), records(0.1), heading, averages)
    table = build_closing_table(records(1.0), records(0.1), heading, averages, LIST)
    *rows, last = table.rows
    assert tuple(rows) == plain.rows and (last.subtask, last.kind) == (AVERAGE, "solvable")
    assert last.interval == compare_subtasks(scores(0.1)) and last.interval.samples == 12
    assert last.full == mean([own.full_values for own in scores(0.1)])
    assert last.method == mean([own.method_values for own in scores(0.1)])
    assert last.held == pytest.approx(0.1005) and last.ttft == 90
    [note] = set(table.notes) - set(plain.notes)
    assert note.startswith(f"{AVERAGE}: ") and "50 or more" in note and "conf/model/tiny.yaml" in note
    text = table.to_text(120).splitlines()
    place = next(place for place, line in enumerate(text) if line.startswith(f"{AVERAGE} "))
    assert set(text[place - 2]) == {"-"} and text[place - 1].startswith("of all" if averages else "average ")
    kinds = [row["kind"] for row in csv.DictReader(io.StringIO(table.to_csv()))]
    assert kinds[:5] == [*["subtask"] * 3, "average", "solvable"]
    alone = build_closing_table(records(1.0), None, heading, averages, LIST)
    assert alone.rows[-1].interval.mean_full == 100 and alone.rows[-1].kind == "solvable"
    for listed in ((), NAMES, ("ruler_fwe",)):
        assert build_closing_table(records(1.0), records(0.1), heading, averages, listed) == plain


def test_a_listed_subtask_without_an_answer_is_named():
    method = records(0.1)
    for index in range(6):
        method[f"ruler_vt/{index}"] |= {"score": None, "error": "out_of_memory"}
    *_, first, last = build_closing_table(records(1.0), method, {}, None, LIST).rows
    assert (first.interval.samples, last.interval, last.failed) == (12, None, 6)
    notes = build_closing_table(records(1.0), method, {}, None, LIST).notes
    assert f"There is no {AVERAGE}: no sample of ruler_vt was answered." in notes
    assert "The average leaves out ruler_vt: no sample was answered." in notes


def test_weights_and_biases_is_told(store):
    full = VALUE | {"method": {"name": "full"}, "sources": "s1"}
    said = LoggedRun(store, VALUE | {"budget": 0.1}, full).summary()
    own = compare_subtasks(scores(0.1))
    assert (said[f"diff/{AVERAGE}"], said[f"diff/{AVERAGE}/low"]) == (own.difference, own.low)
    assert said[f"full/{AVERAGE}"] == 100 and said["full/average"] == pytest.approx(200 / 3)
    assert said[f"held/{AVERAGE}"] == pytest.approx(0.1005)
    assert f"score/{AVERAGE}" not in LoggedRun(store, VALUE | {"seed": 9}, full).summary()  # it has no records


def test_curves_show_both_averages(store, write_card, capsys):
    def shown(*given: str) -> list[str]:
        assert curves_command.main(["--results", str(store), *given]) == 0
        return capsys.readouterr().out.split("\n\n\n")

    first, second, _ = shown()
    assert "\naverage, each subtask weighing the same; 18 samples\n" in first
    assert f"\n{AVERAGE}; 12 samples\n" in second
    own = compare_subtasks(scores(0.1))
    [line] = [line for line in second.splitlines() if line.startswith("0.1 ")]
    found = [float(number) for number in re.findall(r"[-+]?\d+\.\d+", line)]
    assert found[2] == pytest.approx(own.mean_method, abs=0.05)
    assert found[5:8] == pytest.approx([own.difference, own.low, own.high], abs=0.05)
    assert "area from 10.1% to 20.1% of bytes" in second
    assert shown("--average", SOLVABLE)[0] == second and len(shown("--average", "each")) == 2
    assert len(shown("subtask=ruler_vt")) == 2
    write_card("")
    assert len(shown()) == 2 and shown()[0] == first
    assert curves_command.main(["--results", str(store), "--average", SOLVABLE]) == 2
    assert "--average=solvable: choose one of each\n" in capsys.readouterr().err


def test_the_report_shows_both_averages(store, write_card):
    def panel() -> dict:
        found = find_finished(store)
        [own] = build_panels(found, found.runs, CurveOptions())
        assert not found.damaged
        return own.data

    both = panel()
    assert [own["task"] for own in both["tasks"]] == ["Ø average", f"Ø {AVERAGE}", *NAMES]
    cells = {own["column"]: own for own in both["cells"] if own["order"] == 0}
    own = compare_subtasks(scores(0.1))
    assert [cells[1][name] for name in ("diff", "diff_low", "diff_high")] == [own.difference, own.low, own.high]
    assert both["solvable"]["average"] == AVERAGE
    point, _ = both["solvable"]["points"]
    assert (point["diff"], point["n"], point["share"]) == (own.difference, 12, pytest.approx(0.1005))
    assert both["solvable"]["full"][0]["score"] == 100 > both["full"][0]["score"]
    assert any(note.startswith(f"{AVERAGE}: ") for note in both["notes"])
    assert "solvable" in NUMBERS  # a large page has it in the files beside it
    write_card("")
    one = panel()
    assert one["solvable"] == {"average": None, "points": [], "full": []}
    assert all(one[name] == both[name] for name in ("points", "full", "costs", "series"))
    assert [own["task"] for own in one["tasks"]] == ["Ø average", *NAMES]


def test_figures_can_choose_it(store, write_card, monkeypatch, capsys):
    monkeypatch.setattr("kvbench.report.figures.Figure.write_pictures", lambda figure, folder, also="": "")
    assert figures_command.main(["--results", str(store), "--kind", "curve,tasks", "--average", SOLVABLE]) == 0
    [path] = (store / "figures").glob("*-curve-solvable.csv")
    own = compare_subtasks(scores(0.1))
    first, *_ = csv.DictReader(io.StringIO(path.read_text()))
    assert (float(first["diff"]), first["n"]) == (own.difference, "12")
    [path] = (store / "figures").glob("*-tasks.csv")
    assert {line["subtask"] for line in csv.DictReader(io.StringIO(path.read_text()))} == {
        "Ø average",
        f"Ø {AVERAGE}",
        *NAMES,
    }
    write_card("")
    capsys.readouterr()
    assert figures_command.main(["--results", str(store), "--average", SOLVABLE]) == 2
    assert "--average=solvable: choose one of each" in capsys.readouterr().err


def test_the_command_makes_a_list_that_tables_use(tmp_path, write_card, monkeypatch, capsys):
    """The embedded model; a task that it is made to fail is not listed. The same command again makes nothing."""
    score = Ruler.score

    def worse(self: Ruler, sample, output: str) -> Graded:
        return Graded(49.0, output) if sample.subtask == "niah_single_2" else score(self, sample, output)

    monkeypatch.setattr(Ruler, "score", worse)
    monkeypatch.chdir(tmp_path)
    small = ["model=reference_v2", "task.subtasks=[niah_single_1,niah_single_2]", "device=cpu"]
    given = [*small, "--lengths", "256", "--samples", "1", "--table", "scores.csv"]
    assert choose_solvable_command.main(given) == 0
    out = capsys.readouterr().out
    own = yaml.safe_load(out)[solvable_subtasks.KEY]
    seed = own["seed"]
    lists = {256: ["niah_single_1"]}
    runs = [path for path in (tmp_path / "results/runs").iterdir() if path.is_dir()]
    values = [yaml.safe_load((path / "run.yaml").read_text())["value"] for path in runs]
    assert own == {"weights": values[0]["model"]["identity"], "seed": seed, "ruler": lists}
    assert {(value["method"]["name"], value["task"]["seed"]) for value in values} == {("full", seed)}
    assert sorted(value["task"]["length"] for value in values) == [256] and seed != 0
    comments = "".join(line.lstrip("# ") + " " for line in out.splitlines() if line.startswith("#"))
    assert comments.startswith("kvbench dev choose-solvable model=reference_v2 ") and "1 sample" in comments
    assert "256: niah_single_1 100.0, niah_single_2 49.0" in comments
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "results/runs").rglob("records*")}
    mine = read_scores(Path("scores.csv"))
    write_scores(Path("scores.csv"), [*mine, replace(mine[0], model="another")])
    assert choose_solvable_command.main(given) == 0 and capsys.readouterr().out == out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "results/runs").rglob("records*")} == made
    scores = read_scores(Path("scores.csv"))
    assert scores.pop(0).model == "another"  # scores of other models stay
    table = {score.subtask: (score.length, score.samples, score.score) for score in scores}
    assert table == {"niah_single_1": (256, 1, 100), "niah_single_2": (256, 1, 49), AVERAGE_ROW: (256, 2, 74.5)}
    write_card(out, "reference_v2")
    row = [*small, "method=full", "task.length=256", "task.samples=1"]
    code, out, err = run_cli(row, monkeypatch, capsys)
    assert code == 0, err
    assert re.search(r"^average of 1 solvable +100\.0 ", out, re.MULTILINE) and "conf/model/reference_v2.yaml" in out


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["model"], "model: setting=value, one value each"),
        (["model=reference,hf"], "model=reference,hf: setting=value, one value each"),
        (["seed=3"], "seed=3: is chosen here: the full cache, seed 50000, --lengths and --samples"),
        (["method=snapkv"], "method=snapkv: is chosen here"),
        (["task=niah"], "task: the subtasks of niah have no fixed names"),
        (["task=longbench"], "task=longbench: has no task.seed, so no list can be made with other samples"),
        (["model=nix"], "model=nix: choose one that kvbench run --help lists"),
        (["task.nix=1"], "task.nix: no such setting"),
        (["model=hf"], "model.path=null: model=hf needs a local folder or a hub id"),
        (["--lengths", "1024,1024"], "--lengths=1024,1024: different whole numbers of at least 1"),
        (["--lengths", "64"], "task.length=64: at least "),
        (["device=cpu", "--lengths", "1024,32768"], "task.length=32768: reference takes at most 16384 tokens"),
        (["--samples", "0"], "--samples=0: a whole number of at least 1"),
        (["--table", "."], "--table .: this is a folder; name a file"),
        (["--nix"], "unrecognized arguments: --nix; usage: kvbench dev choose-solvable"),
    ],
)
def test_what_the_command_cannot_use_is_one_line(tmp_path, monkeypatch, capsys, given, line):
    monkeypatch.chdir(tmp_path)
    assert choose_solvable_command.main(given) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"kvbench: {line}") and err.count("\n") == 1, err
    assert list(tmp_path.iterdir()) == []

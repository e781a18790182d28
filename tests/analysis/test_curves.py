"""Curves over the runs of a store: every printed number is recomputed from the records, what is no curve is refused."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from kvbench.analysis.budget_curve import Curve, compute_area, find_smallest_share
from kvbench.analysis.intervals import mean
from kvbench.analysis.paired import PairedScores, compare_subtasks
from kvbench.cli.curves import main
from kvbench.tasks.ruler.task import Ruler
from tests.support import made_up_runs
from tests.support.command_line import run_cli
from tests.support.selection import only_in_full

FULL = {"method": {"name": "full"}, "sources": "s1"}
BUDGETS = {0.05: 30, 0.1: 55, 0.3: 85}  # chance to keep what the full cache has right


def records(budget: float | int, chance: float, **changed: object) -> dict[str, dict]:
    """Two subtasks of 8 and 6 samples, contexts of two samples each."""
    found = {}
    for subtask, count in (("vt", 8), ("niah", 6)):
        for index in range(count):
            draw, uid = np.random.default_rng([int(1000 * budget), index, count]), f"{subtask}/{index}"
            full = 100.0 if index % 5 else 50.0
            found[uid] = {
                "uid": uid, "subtask": subtask, "index": len(found), "group": f"{subtask}/{index // 2}",
                "prompt_hash": f"p{uid}", "target_hash": "t", "error": None, "meta": {},
                "score": full * float(budget == 1 or draw.random() < chance / 100),
                "resident_bytes": int(1000 * budget) - index % 2, "full_bytes": 1000,
                "rows_attended": 200 * budget + 2, "rows_seen_decoding": 200,
            } | changed  # fmt: skip
    return found


def write(results: Path, own: dict[str, dict], finish: bool = True, **changed: object) -> str:
    """A run on the disk; its hash."""
    return made_up_runs.write_run(results, own, finish, **changed).hash


@pytest.fixture
def store(tmp_path) -> Path:
    write(tmp_path, records(1.0, 100), **FULL)
    for budget, chance in BUDGETS.items():
        write(tmp_path, records(budget, chance), budget=budget)
    return tmp_path


@pytest.fixture
def curves(store, capsys):
    """Runs the command; gives exit code, output, errors."""

    def call(*given: str) -> tuple[int, str, str]:
        code = main(["--results", str(store), *given])
        return code, *capsys.readouterr()

    return call


def parts(budget: float, weights: dict[str, float]) -> tuple[list[PairedScores], list[float]]:
    full, own = records(1.0, 100), records(budget, BUDGETS[budget])
    names = {name: [uid for uid in own if uid.startswith(name)] for name in weights}
    return [
        PairedScores([full[u]["score"] for u in uids], [own[u]["score"] for u in uids], [own[u]["group"] for u in uids])
        for uids in names.values()
    ], list(weights.values())


def numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"[-+]?\d+\.\d+", text)]


@pytest.mark.parametrize("weights", [{"niah": 1.0, "vt": 1.0}, {"niah": 1.0, "vt": 3.0}])
def test_every_number_is_recomputed_from_the_records(store, curves, weights):
    if weights["vt"] != 1:
        for path in (store / "runs").iterdir():
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
        averages = [["overall", weights], ["and vt alone", {"vt": 1.0}]]
        write(store, records(1.0, 100), **FULL, averages=averages)
        for budget, chance in BUDGETS.items():
            write(store, records(budget, chance), budget=budget, averages=averages)
    code, out, err = curves()
    assert (code, err) == (0, "")
    assert out.startswith("tiny · ruler · question visible · snapkv · uniform · raw\n")
    lines = {line.split("  ")[0]: line for line in out.splitlines() if "  " in line}
    for budget in BUDGETS:
        scores, shares = parts(budget, weights)
        own, change = mean([one.method_values for one in scores], shares), compare_subtasks(scores, shares)
        expected = [budget, 100 * budget - 0.05, own.value, own.low, own.high]
        expected += [change.difference, change.low, change.high]
        assert numbers(lines[str(budget)]) == pytest.approx(expected, abs=0.0501)
        assert lines[str(budget)].split()[-2:] == [f"{change.lost}/{change.gained}/{change.same}", "14"]
        shown, full = numbers(lines["full cache"]), mean([one.full_values for one in scores], shares)
        assert shown == pytest.approx([99.95, full.value, full.low, full.high], abs=0.0501)
    x = np.array([budget - 0.0005 for budget in BUDGETS])
    y = np.array([compare_subtasks(*parts(budget, weights)).mean_method for budget in BUDGETS])
    (said,) = re.findall("^area from 5.0% to 29.9% of bytes: (.*)", out, re.MULTILINE)
    height = float(compute_area(x, y, x[0], x[-1]))
    assert numbers(said)[0] == pytest.approx(height, abs=0.0501)
    assert numbers(said)[3] == pytest.approx(height - full.value, abs=0.0501)
    least = float(find_smallest_share(x, y, 0.95 * full.value))
    (said,) = re.findall(r"^smallest share that keeps 95.0% of the full score: (.*)", out, re.MULTILINE)
    assert said.startswith("> 29.9%" if np.isinf(least) else f"{100 * least:.1f}%")
    uids = sorted(records(1.0, 100))
    every = [records(budget, chance) for budget, chance in BUDGETS.items()]
    whole = Curve(
        scores=np.array([[own[uid]["score"] for own in every] for uid in uids]),
        shares=np.array([[own[uid]["resident_bytes"] / 1000 for own in every] for uid in uids]),
        full=np.array([records(1.0, 100)[uid]["score"] for uid in uids]),
        subtasks=[uid.split("/")[0] for uid in uids],
        groups=[every[0][uid]["group"] for uid in uids],
        weights=weights,
    )
    found = whole.area(*(whole.points[0][[0, -1]]))
    assert f"{found.value:.1f} [{found.low:.1f}, {found.high:.1f}]" in out


def test_one_subtask_another_average_other_shares_and_ranges(curves):
    out = curves("subtask=vt", "--against", "rows", "--range", "0.1:0.2", "--keep", "0.5")[1]
    assert "\nvt; 8 samples\n" in out
    scores, shares = parts(0.1, {"vt": 1.0})
    (line,) = [line for line in out.splitlines() if line.startswith("0.1 ")]
    assert numbers(line)[1:3] == pytest.approx([11.0, mean([scores[0].method_values]).value], abs=0.0501)
    assert "area from 10.0% to 20.0% of rows" in out and "keeps 50.0% of the full score" in out
    assert "area: n/a, measured from 0.0495 to 0.2995, not from 0.02 to 0.2" in curves("--range", "0.02:0.2")[1]
    assert "area: n/a, there is only one point" in curves("budget=0.1")[1]


def test_filters_choose_runs(store, curves):
    write(store, records(0.1, 50), budget=0.1, method={"name": "snapkv", "window": 8})
    write(store, records(0.1, 50), budget=0.1, method={"name": "knorm"})
    code, out, err = curves()
    heads = [line for line in out.splitlines() if "·" in line]
    assert (code, err) == (0, "") and len(heads) == 3
    assert [head.split(" · ")[3:] for head in heads] == [
        ["knorm", "uniform", "raw"],
        ["snapkv", "uniform", "raw", "method.window=64"],
        ["snapkv", "uniform", "raw", "method.window=8"],
    ]
    assert curves("method=knorm")[1].count("·") == 5
    assert curves("method=snapkv,knorm", "budget=0.1", "block_size=null")[1].count("question visible") == 3
    assert curves("method.window=8", "task=ruler")[1].count("question visible") == 1
    assert curves("method=knorm", "budget=1e-1,5e-2")[0] == 0


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"block_size": 128}, "block_size is 128 and null"),
        ({"task": {"name": "ruler", "length": 4096}}, "task.length is 2048 and 4096"),
        only_in_full({"data": "d1"}, 'data is "d0" and "d1"'),
        ({"model": {"name": "tiny", "identity": "ffff"}}, 'model.identity is "0a1b" and "ffff"'),
        only_in_full({"seed": 1}, "seed is 0 and 1"),
        only_in_full({"budget_of": "seen"}, 'budget_of is "prompt" and "seen"'),
        ({"sources": "s2"}, 'sources is "s0" and "s2"'),
        ({"seed": 1, "averages": [["a", {"vt": 1}]]}, "not form a curve: seed is 0 and 1\n"),
        ({"averages": [["a", {"vt": 1}]]}, 'averages is [["a", {"vt": 1}]] and []'),
    ],
)
def test_runs_of_different_protocols_make_no_curve(store, curves, changed, said):
    write(store, records(0.2, 70), budget=0.2, **changed)
    write(store, records(0.2, 70), budget=0.2, method={"name": "knorm"})
    code, out, err = curves()
    assert code == 2 and "knorm" in out and "snapkv" not in out  # the others are printed
    assert err.startswith("kvbench: tiny · ruler · question visible · snapkv · uniform · raw: ")
    assert "runs of different protocols do not form a curve: " in err and err.count("\n") == 1
    for own in said.split("; "):
        assert own.split(" is ")[0] in err and own.split(" is ")[1] in err


def test_questions_are_never_mixed(store, curves):
    write(store, records(0.2, 70), budget=0.2, question="hidden")
    code, out, err = curves()
    assert code == 2 and out.count("·") == 5  # the visible ones
    assert "question hidden · snapkv" in err and "no finished run of the full cache on the same samples" in err


def test_several_full_caches_must_say_the_same(store, curves):
    again = write(store, records(1.0, 100), **FULL | {"sources": "s9"})
    assert curves()[0] == 0
    other = records(1.0, 100)
    other["vt/0"]["score"] = 0.0
    third = write(store, other, **FULL | {"sources": "s8"})
    code, out, err = curves()
    assert code == 2 and "differ in their answers; choose one with --full HASH" in err and third in err and again in err
    first, second = (curves("--full", name)[1] for name in (again, third))
    assert first and second and first != second
    assert "on the same samples has the hash 00" in curves("--full", "00")[2]


def test_samples_without_an_answer_everywhere_are_left_out_and_counted(store, curves):
    broken = records(0.2, 70)
    broken["vt/0"] |= {"score": None, "error": "out_of_memory"}
    del broken["niah/1"]
    write(store, broken, budget=0.2)
    out = curves()[1]
    assert "12 samples; 2 were not answered by all runs and are left out" in out
    assert all(line.endswith(" 12") for line in out.splitlines() if re.match(r"0\.|full", line))


def test_records_that_cannot_be_used_are_refused(store, curves):
    write(store, records(0.2, 70, rows_attended=None), budget=0.2, method={"name": "knorm"})
    write(store, records(0.2, 70, score=101.0), budget=0.2, method={"name": "tova"})
    code, out, err = curves("--against", "rows")
    assert code == 0 and "smallest share" in out and err.count("\n") == 2
    assert "rows_attended is None, expected float" in err
    assert "score is 101.0, expected float or null, from 0 to 100" in err


def test_an_unfinished_run_is_compared_on_the_samples_in_common(store, curves):
    whole = records(0.2, 70)
    some = {uid: whole[uid] for uid in list(whole)[::2]}
    alone = {uid: whole[uid] for uid in whole if whole[uid]["subtask"] == next(iter(whole.values()))["subtask"]}
    write(store, some, budget=0.2, finish=False)
    write(store, alone, budget=0.4, finish=False)
    out = " ".join(curves()[1].split())
    assert f"{len(some)} samples; {len(whole) - len(some)} were not answered by all runs" in out
    assert f"Not finished: budget 0.2 ({len(some)} samples)" in out
    assert "Left out: budget 0.4, which is not finished and answered no sample of" in out


def test_unfinished_runs_never_take_a_subtask_together(store, curves):
    """Each has samples of every subtask, but of one of them none in common: the smaller one is left out and named."""
    whole = records(0.2, 70)
    last = list(whole.values())[-1]["subtask"]
    own = [uid for uid in whole if whole[uid]["subtask"] == last]
    others = [uid for uid in whole if whole[uid]["subtask"] != last]
    half = len(own) // 2
    write(store, {uid: whole[uid] for uid in [*others, *own[:half]]}, budget=0.2, finish=False)
    write(store, {uid: whole[uid] for uid in [*others[1:], *own[half:]]}, budget=0.4, finish=False)
    out = " ".join(curves()[1].split())
    assert "Left out: budget 0.4" in out or "Left out: budget 0.2" in out
    assert f"answered no sample of {last}" in out


def test_what_must_be_said(store, curves):
    assert "Miniature" not in curves()[1] and "Not finished" not in curves()[1]
    name = {"model": {"name": "reference", "identity": "x"}}
    write(store, records(1.0, 100, meta={"data": "miniature"}), **FULL, **name)
    write(store, records(0.2, 70, meta={"data": "miniature"}), budget=0.2, **name)
    out = curves("model=reference")[1]
    assert "Miniature data made by kvbench" in out and "no evidence about large models" in out


def test_a_readers_bytes_make_no_area(store, curves):
    reader = {"method": {"name": "quest"}}
    for budget in (0.1, 0.3):
        write(store, records(budget, 50, resident_bytes=1000), budget=budget, **reader)
    assert "area: n/a, all points have the same share of bytes; try another --against" in curves("method=quest")[1]
    assert "area from 11.0% to 31.0% of rows" in curves("method=quest", "--against", "rows")[1]


def test_an_average_without_its_subtasks_is_refused(store, curves):
    averages = [["overall", {"vt": 1.0, "qa": 1.0}], ["vt alone", {"vt": 1.0}]]
    write(store, records(1.0, 100), **FULL, averages=averages, seed=5)
    write(store, records(0.2, 70), budget=0.2, averages=averages, seed=5)
    code, out, err = curves("seed=5")
    assert (code, out) == (2, "") and "overall: no sample of qa was answered; choose --average each or another" in err
    assert "\nvt alone; 8 samples\n" in curves("seed=5", "--average", "vt alone")[1]
    assert "each subtask weighing the same; 14 samples" in curves("seed=5", "--average", "each")[1]
    assert "--average=qa: choose one of overall, vt alone, each" in curves("seed=5", "--average", "qa")[2]


BAD = {
    ("nothing=1",): "nothing: no run has this setting; choose one of model, method,",
    ("method=tova",): 'method=tova: no finished run has this; there are "full", "snapkv"',
    ("method=full",): "the full cache alone does not form a curve",
    ("subtask=qa",): "subtask=qa: choose one of niah, vt",
    ("--range", "0.3:0.1"): "--range 0.3:0.1: LOW:HIGH, shares in (0, 1]",
    ("--range", "0.3"): "--range 0.3: LOW:HIGH",
    ("--keep", "2"): "--keep 2: shares in (0, 1]",
    ("--keep", "nan"): "--keep nan: shares in (0, 1]",
    ("--against", "time"): "--against=time: choose one of bytes, rows",
    ("/elsewhere",): "/elsewhere: give only one folder of results",
    ("method=[",): 'method=[: no finished run has this; there are "full", "snapkv"',
    ("method=a", "method=b"): "method=a method=b: give each setting once",
}


@pytest.mark.parametrize("given", BAD)
def test_what_cannot_be_used_is_one_line(curves, given):
    code, out, err = curves(*given)
    assert (code, out, err.count("\n")) == (2, "", 1) and BAD[given] in err


def test_a_damaged_store_is_said(tmp_path, store, curves, capsys):
    assert (
        main(["--results", str(tmp_path / "nowhere")]) == 2 and "nowhere/runs: no run there" in capsys.readouterr().err
    )
    folder = store / "runs" / "0123456789abcdef"
    folder.mkdir()
    (folder / "run.yaml").write_text(json.dumps({"format": 1, "hash": "0", "value": made_up_runs.VALUE}))
    code, out, err = curves()
    assert code == 0 and "smallest share" in out  # the other runs are shown
    assert err.startswith(f"kvbench: run {folder.name} is left out: run.yaml does not fit the folder")
    for text in ("[", "1", "{}", '{"value": {"when": 2020-01-01}}'):
        (folder / "run.yaml").write_text(text)
        assert "run.yaml is incomplete" in curves()[2] or "run.yaml cannot be read" in curves()[2]
    other = next(path for path in (store / "runs").iterdir() if path != folder)
    (folder / "run.yaml").unlink()
    (other / "done").write_text("{}")
    assert f"kvbench: run {other.name} is left out: done is no seal of a run" in curves()[2]


@pytest.mark.full  # tests/laws/test_decided_by_method.py compares the table and the curve of smaller runs
@pytest.mark.parametrize("questions", [("hidden",), ("visible", "hidden")])
def test_runs_of_the_command_line_make_curves(tmp_path, monkeypatch, capsys, questions):
    """Two methods and both questions with the embedded model; the table and the curve say the same."""
    monkeypatch.chdir(tmp_path)
    averages = {"needles": {"niah_single_1": 1.0}, "all": {"niah_single_1": 1.0, "ruler_vt": 3.0}}
    monkeypatch.setattr(Ruler, "averages", averages, raising=False)
    size = ["task.subtasks=niah_single_1", "task.length=384", "task.samples=2", "device=cpu"]
    tables = {}
    for question in questions:
        for method, budget in (("knorm", "0.9"), ("snapkv", "0.6"), ("snapkv", "0.9")):
            own = [f"method={method}", f"budget={budget}", f"question={question}", *size]
            code, out, err = run_cli(own, monkeypatch, capsys)
            assert code == 0, err
            assert "task: ruler\n" in out and "empty answers %" in out and "lost/gained" in out
            assert "There is no all: no sample of ruler_vt was answered." in out and re.search(
                r"^all +n/a +n/a", out, re.MULTILINE
            )
            (line,) = [line for line in out.splitlines() if line.startswith("needles ") and "/" in line]
            tables[question, method, budget] = line.split()
    monkeypatch.setattr("sys.argv", ["curves"])
    assert main([]) == 0
    out = capsys.readouterr().out
    blocks = re.split(r"\n\n\n", out)
    assert len(blocks) == 2 * len(questions) + 1 and "no evidence about large models" in blocks[-1]
    for (question, method, budget), line in tables.items():
        (block,) = [own for own in blocks if f"question {question} · {method} ·" in own]
        assert "\nneedles; 2 samples\n" in block
        (point,) = [own.split() for own in block.splitlines() if own.startswith(f"{budget} ")]
        score, change, moved = line[2], line[3], next(cell for cell in line if "/" in cell)
        assert point[2] == score and point[5] == change and moved in point
        wanted = (
            r"area from \d+\.\d% to \d+\.\d% of bytes: \d"
            if method == "snapkv"
            else "area: n/a, there is only one point"
        )
        assert re.search(wanted, block)

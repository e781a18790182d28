"""The second opinion: right verdicts, a time limit that kills, resume, and what the notes say."""

import json
import os
import time

import pytest

from kvbench.cli import grade
from kvbench.integrations import math_verify
from kvbench.integrations.math_verify import FILE, Verifier, describe_verdicts, read_verdicts
from kvbench.store.run_folder import RunFolder
from tests.support.made_up_runs import VALUE as RUN_VALUE
from tests.support.math_pairs import EQUAL, UNEQUAL, parse_pairs
from tests.support.selection import only_in_full

VALUE = RUN_VALUE | {"method": {"name": "full"}, "task": {"name": "math500"}}
ALSO = {"boxed": 100.0, "flexible": 100.0, "exact": 0.0, "closed": True}


@pytest.fixture(scope="module")
def verifier():
    with Verifier(20) as verifier:
        yield verifier


@pytest.fixture
def run(tmp_path):
    """Makes a finished run's folder of (uid, output, reference, score)."""

    def make(*answers):
        folder = RunFolder(tmp_path / "runs", VALUE)
        with folder.open({}) as folder:
            for uid, output, reference, score in answers:
                own = {"uid": uid, "output": output, "target": [reference], "score": score, "error": None}
                own |= {
                    "prompt_hash": "p",
                    "target_hash": "t",
                    "group": uid.partition("/")[0],
                    "meta": {"verify": "math_verify", "data": "hub"},
                    "also": ALSO,
                }
                assert folder.claim(uid)
                folder.append(own | {"stop": "length" if not score else "eos", "tokens_out": 10})
            folder.finish([uid for uid, *_ in answers])
        return folder.path

    return make


class Told:
    """Stands for a Verifier: says what it is told, and notes what it was asked."""

    def __init__(self, monkeypatch, verdict):
        self.verdict_, self.asked = verdict, []
        monkeypatch.setattr(math_verify, "Verifier", lambda seconds: self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def verdict(self, output, reference):
        self.asked.append((output, reference))
        if isinstance(self.verdict_, BaseException):
            raise self.verdict_
        return self.verdict_


@pytest.mark.parametrize(
    "output, reference, verdict",
    [
        (r"so \boxed{x+1}", "1+x", True),  # algebra, which the normaliser does not do
        (r"\boxed{\frac{1}{2}}", "0.5", True),
        (r"5 is wrong, \boxed{70}", "070", True),
        ("The answer is 204.", "204", True),
        (r"\boxed{71}", "70", False),
        ("no idea", "70", False),
        ("\ud800 \\boxed{1}", "1", True),
        ("{" * 3000 + r"\boxed{1}", "1", True),
    ],
)
def test_verdicts(verifier, output, reference, verdict):
    assert verifier.verdict(output, reference) is verdict


@pytest.mark.parametrize("step", [13, only_in_full(1)])
def test_the_normaliser_and_math_verify_differ_where_known(step, verifier):
    """Of the pairs checked by hand: spellings that math-verify does not read, and differences that it does not see."""
    unread = {"5.", "1.5", "√2", "10000", "50", "12.5", "45", r"\frac\pi4", r"(2,\infty)", r"\lbrace 2,1 \rbrace"}
    unread |= {"100, 200", r"\varnothing", "x^2", r"\begin{pmatrix}1/2\\3/4\end{pmatrix}"}
    unread |= {r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}3&-1\\2&4\end{pmatrix}"}
    unread |= {"17", "17th", r"21\textsuperscript{st}", r"22^{\mathrm{nd}}", "3rd", "2:15 PM", "2:15 p.m.", "7:00 AM"}
    unread |= {r"10\mkern3mu 000", "10\u200b000"}
    equal, unequal = (parse_pairs(pairs)[::step] for pairs in (EQUAL, UNEQUAL))
    missed = {other for one, other in equal if verifier.verdict(rf"\boxed{{{other}}}", one) is not True}
    taken = {pair for pair in unequal if verifier.verdict(rf"\boxed{{{pair[1]}}}", pair[0]) is not False}
    assert missed and missed == unread & {other for _, other in equal}
    known = {("(1,2)", "1,2"), (r"\{1,1,2\}", r"\{1,2,2\}"), ("A", "a"), ("11111_2", "11111_3")}
    known |= {(r"8\pi h cm", r"8\pi"), ("x:1+2", "2+x:1")}
    assert taken and taken == known & set(unequal)


def test_what_does_not_end_is_killed_in_time():
    with Verifier(20.0) as verifier:
        verifier.verdict("1", "1")
        first = verifier.worker.process
        verifier.seconds = 0.3
        begun = time.monotonic()
        assert verifier.verdict(r"\boxed{9^{9^{9^{9}}}}", "9") == "timeout"
        assert time.monotonic() - begun < 10
        assert not first.is_alive() and verifier.worker is None  # really gone; the next test begins another one


def test_a_process_that_was_killed_is_an_error_of_its_answer_alone():
    with Verifier(20.0) as verifier:
        verifier.verdict("1", "1")
        os.kill(verifier.worker.process.pid, 9)
        assert verifier.verdict(r"\boxed{4}", "4") == "error"
        assert verifier.verdict(r"\boxed{4}", "4") is True  # a new process judges the next one


def test_verdicts_stand_beside_untouched_records(run, verifier, monkeypatch):
    folder = run(("p/r0", r"\boxed{x+1}", "1+x", 0.0), ("p/r1", r"\boxed{2}", "1+x", 0.0), ("q/r0", "3", "3", 100.0))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(math_verify, "Verifier", lambda seconds: verifier)
    monkeypatch.setattr(Verifier, "__exit__", lambda *_: None)  # the module's goes on
    math_verify.grade(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != FILE} == before
    assert {uid: own["verdict"] for uid, own in read_verdicts(folder).items()} == {
        "p/r0": True,
        "p/r1": False,
        "q/r0": True,
    }
    line = json.loads((folder / FILE).read_text().splitlines()[0])
    assert line == {
        "uid": "p/r0", "grader": "math_verify", "version": "0.9.0", "verdict": True, "seconds": 10.0, "differs": True
    }  # fmt: skip
    assert [own["differs"] for own in read_verdicts(folder).values()] == [True, False, False]
    [note] = describe_verdicts("full", folder)
    said = "differs on 1 of 3 (1 right only by it, 0 only by the score: p/r0), 0 timeouts, 0 errors"
    assert f"math-verify 0.9.0 {said}" in note


def test_grading_goes_on_where_it_was_killed(run, monkeypatch):
    folder = run(*((f"p{n}/r0", f"{n}", "1", 0.0) for n in range(4)))
    told = Told(monkeypatch, False)
    math_verify.grade(folder)
    lines = (folder / FILE).read_text().splitlines(keepends=True)
    assert len(told.asked) == len(lines) == 4
    (folder / FILE).write_text("".join(lines[:2]) + lines[2][:20])  # killed in the middle of a line
    math_verify.grade(folder)
    assert told.asked[4:] == [("2", "1"), ("3", "1")] and len(read_verdicts(folder)) == 4
    assert (folder / FILE).read_text().splitlines(keepends=True) == lines
    math_verify.grade(folder)
    assert len(told.asked) == 6
    with pytest.raises(KeyboardInterrupt):
        (folder / FILE).write_text("")
        told.verdict_ = KeyboardInterrupt()
        math_verify.grade(folder)
    assert read_verdicts(folder) == {}


def test_only_a_longer_time_or_another_version_asks_again(run, monkeypatch):
    folder = run(("p/r0", "1", "1", 100.0))
    told = Told(monkeypatch, "timeout")
    for seconds in (5.0, 5.0, 3.0, 9.0):
        math_verify.grade(folder, seconds)
    assert len(told.asked) == 2 and read_verdicts(folder)["p/r0"]["seconds"] == 9.0
    monkeypatch.setattr(math_verify, "version", lambda name: "1.0")
    math_verify.grade(folder, 1.0)
    assert len(told.asked) == 3 and read_verdicts(folder)["p/r0"]["version"] == "1.0"
    assert "1 timeouts" in describe_verdicts("full", folder)[0]


def test_a_note_names_the_first_answers_that_differ(run, monkeypatch):
    folder = run(*((f"p{n}/r0", "1", "1", 0.0 if n else 100.0) for n in range(6)))
    Told(monkeypatch, True)
    math_verify.grade(folder)
    assert "(5 right only by it, 0 only by the score: p1/r0, p2/r0, p3/r0, …)" in describe_verdicts("full", folder)[0]


def test_without_verdicts_there_is_nothing_to_say(run):
    assert describe_verdicts("full", run(("p/r0", "1", "1", 100.0))) == []


def test_the_command_line(run, tmp_path, monkeypatch, capsys):
    run(("p/r0", "1", "1", 100.0))
    Told(monkeypatch, True)
    assert grade.main(["--results", str(tmp_path)]) == 0
    out, _ = capsys.readouterr()
    assert " math500 full 1.0: math-verify " in out and "differs on 0 of 1" in out
    assert grade.main(["--results", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err == f"kvbench: {tmp_path}/nowhere/runs: no run there\n"
    [file] = tmp_path.glob("runs/*/run.yaml")
    file.write_text("format: 1")
    assert grade.main(["--results", str(tmp_path)]) == 2
    left_out = f"kvbench: run {file.parent.name} is left out: run.yaml is incomplete\n"
    assert capsys.readouterr().err == f"{left_out}kvbench: {tmp_path}/runs: no run there\n"


def test_a_run_is_graded_at_its_end_and_no_other_task_is(kvbench, tmp_path, monkeypatch):
    told = Told(monkeypatch, True)
    code, out, err = kvbench("task=aime25", "method=full", "limit=2", "task.max_new_tokens=1")
    assert code == 0, err
    assert len(told.asked) == 2 and "full (miniature, not the benchmark): math-verify" in out
    ruler = ["task=ruler", "task.subtasks=niah_single_1", "task.length=512", "task.samples=1", "method=full"]
    code, out, _ = kvbench(*ruler, "results=other")
    assert code == 0 and len(told.asked) == 2 and "math-verify" not in out
    assert not list((tmp_path / "other").rglob(FILE))


def test_without_math_verify_the_command_is_refused(run, tmp_path, monkeypatch, capsys):
    def missing(name):
        raise math_verify.PackageNotFoundError(name)

    run(("a", "$1$", "1", 100.0))
    monkeypatch.setattr(math_verify, "version", missing)
    assert grade.main(["--results", str(tmp_path)]) == 2
    assert "math-verify is not installed" in capsys.readouterr().err


@pytest.mark.full
def test_without_math_verify_a_run_says_so_and_keeps_its_answers(kvbench, monkeypatch):
    def missing(name):
        raise math_verify.PackageNotFoundError(name)

    monkeypatch.setattr(math_verify, "version", missing)
    code, out, err = kvbench("task=aime25", "method=full", "limit=1", "task.max_new_tokens=1")
    assert code == 0 and "average" in out
    assert "kvbench: grade: math-verify is not installed; make setup, then python -m kvbench results grade\n" in err
    assert grade.main(["--results", "results"]) == 2

"""`python -m kvbench check task`: a task that keeps its contract passes, and every wrong one gets one line."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from kvbench.cli.check_task import main
from kvbench.interfaces.task import Graded
from kvbench.models.checkpoint import Checkpoint
from kvbench.models.embedded import REFERENCE
from kvbench.runs import task_checks
from kvbench.runs.task_checks import CHECKS, TaskUnderTest
from kvbench.tasks.phonebook import Phonebook
from kvbench.validation import SettingError

SMALL = ["task.sizes=3", "task.trials=2"]
MAKE, SCORE = Phonebook.samples, Phonebook.score


class Loaded(Checkpoint):
    """The reference model, whose tokenizer is loaded once."""

    tokenizer = cache(Checkpoint.tokenizer)


LOADED = Loaded("reference", str(REFERENCE))


@pytest.fixture(scope="module", autouse=True)
def load_tokenizer():
    """Load it before the first test, whose time does not include it then."""
    LOADED.tokenizer()


def change(**own: object) -> Callable:
    """A `samples` whose samples have other values; a function is called with the sample."""

    def samples(self, *given):
        for sample in MAKE(self, *given):
            yield replace(sample, **{name: value(sample) if callable(value) else value for name, value in own.items()})

    return samples


def fail(*_: object) -> None:
    raise KeyError("nothing")


def test_a_task_that_holds_everything_passes(capsys):
    assert main(["phonebook", *SMALL]) == 0
    out = capsys.readouterr().out
    assert [line[:2] for line in out.splitlines()[2:-1]] == ["ok"] * len(CHECKS), out
    assert out.startswith("task=phonebook: kvbench.tasks.phonebook.Phonebook {") and "2 samples, 1 subtasks" in out


WRONG = {  # what the task does wrong -> method, what it is replaced with, check that fails, line
    "samples gives no Sample": ("samples", lambda *_: ["a"], 1, "task=phonebook: samples gave str, expected Sample"),
    "samples gives None": ("samples", lambda *_: [None], 1, "samples gave NoneType, expected Sample"),
    "samples returns nothing": ("samples", lambda *_: None, 1, "samples returned NoneType, expected an iterable of"),
    "samples is empty": ("samples", lambda *_: [], 1, "samples gave none"),
    "samples raises": ("samples", fail, 1, "samples raised KeyError: 'nothing' (test_task_checks.py:"),
    "uids repeat": ("samples", change(uid="a"), 1, "two samples have the uid a"),
    "uid is a number": ("samples", change(uid=3), 1, "sample 3: uid is 3, expected a text"),
    "no subtask": ("samples", change(subtask=""), 1, "subtask is '', expected a text"),
    "context is a list": ("samples", change(context=["a"]), 1, "context is list, expected a text"),
    "empty prompt": ("samples", change(context="", question="", answer_prefix=""), 1, "answer_prefix are empty"),
    "no answers": ("samples", change(answers=()), 1, "answers is (), expected a tuple of at least one text"),
    "one answer": ("samples", change(answers="a"), 1, "answers is 'a', expected a tuple of at least one text"),
    "no new tokens": ("samples", change(max_new_tokens=0), 1, "max_new_tokens is 0, expected a number from 1 on"),
    "samples differ": (
        *("samples", change(question=lambda _: f"{random.random()}"), 2),
        "sample 1: question differs between two calls with the same settings",
    ),
    "prompt too long": ("length", 100, 3, "tokens of prompt and 16 of answer, and task.length is 100"),
    "model takes less": ("samples", change(context="a b " * 9000), 3, "answer, and the model takes 16384"),
    "score is no Graded": ("score", lambda *_: 3, 4, "returned int, expected a number from 0 to 100"),
    "score is NaN": ("score", lambda *_: Graded(float("nan"), ""), 4, "returned nan, expected a number from 0 to"),
    "score is a share": ("score", lambda *_: Graded(100.1, ""), 4, "returned 100.1, expected a number from 0 to 100"),
    "score raises": ("score", fail, 4, "score of phonebook/3/random/0 raised KeyError: 'nothing'"),
    "score differs": ("score", lambda *_: Graded(random.random(), ""), 4, "differs between two calls with the output"),
    "answer is a list": ("score", lambda *_: Graded(1, ["a"]), 4, "answer is list, expected a text"),
    "metric is a text": ("score", lambda *_: Graded(1, "", {"f1": "a"}), 4, "f1 is 'a', expected a number, true, fal"),
    "reference is wrong": ("reference", lambda *_: "none", 5, "phonebook_3: every `reference` scores 0"),
    "reference is no text": ("reference", lambda *_: None, 5, "returned NoneType, expected a text"),
    "check raises": ("check", fail, 0, "check raised KeyError: 'nothing'"),
    "check refuses": ("check", lambda _: (_ for _ in ()).throw(SettingError("task.path: a")), 0, "task.path: a"),
    "fingerprint raises": ("fingerprint", fail, 0, "fingerprint raised KeyError: 'nothing'"),
    "fingerprint is no text": ("fingerprint", lambda _: None, 0, "fingerprint returned None, expected a text"),
    "fingerprint differs": ("fingerprint", lambda _: f"{random.random()}", 0, "fingerprint differs between two tasks"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_task_gets_one_line(case, capsys, monkeypatch):
    name, value, number, line = WRONG[case]
    monkeypatch.setattr(Phonebook, name, value, raising=name != "length")
    monkeypatch.setattr(task_checks, "CHECKS", CHECKS[: number + 1])
    assert task_checks.run_checks(TaskUnderTest("phonebook", SMALL, LOADED)) > 0
    first = next(text for text in capsys.readouterr().out.splitlines() if text.startswith("FAIL"))
    assert first.startswith(f"FAIL  {CHECKS[number][0]}") and line in first, first


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["phonbook"], "task=phonbook: did you mean phonebook? "),
        (["phonebook", "task.size=3"], "task.size: no such setting; did you mean sizes? "),
        (["efficiency"], "task=efficiency: reads random tokens and has no samples to check"),
        (["phonebook", "--model", "/nowhere"], "--model=/nowhere: no such folder"),
    ],
)
def test_what_cannot_be_checked_is_one_line(arguments, line, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"kvbench: {line}") and err.count("\n") == 1


@pytest.mark.parametrize("case", ["samples raises", "check raises", "fingerprint raises"])
def test_a_run_of_a_wrong_task_ends_in_the_same_line(case, kvbench, tmp_path, monkeypatch):
    name, value, _, line = WRONG[case]
    monkeypatch.setattr(Phonebook, name, value)
    code, out, err = kvbench("task=phonebook", "method=full", *SMALL)
    assert (code, out, err.count("\n")) == (1, "", 1) and line in err, err
    assert not list(tmp_path.rglob("records*.jsonl"))

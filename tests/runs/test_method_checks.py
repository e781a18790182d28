"""`python -m kvbench check method`: one method of one's own against the laws; and what its import may do wrong."""

import os
import re
from collections.abc import Callable
from itertools import count

import pytest

from kvbench.cache.guard import Handed
from kvbench.cli.check_method import main
from kvbench.config import catalogue
from kvbench.models.checkpoint import Checkpoint
from kvbench.runs import method_checks
from kvbench.runs.method_checks import CHECKS
from kvbench.validation import SettingError

CHECKPOINT = dict(layers=3)


@pytest.fixture
def check(checkpoint) -> Callable[[str], int]:
    """Runs the command for a method on a random model; gives its exit code."""
    return lambda method: main([method, "--model", str(checkpoint)])


@pytest.fixture(autouse=True)
def few_set_ups(monkeypatch):
    monkeypatch.setattr(method_checks, "TOKENS", 30)
    monkeypatch.setattr(method_checks, "BUDGETS", (0.5, 9))
    monkeypatch.setattr(method_checks, "BLOCKS", (None, 11))


def verdicts(out: str) -> list[str]:
    """The mark of each check."""
    return [line.split()[0] for line in out.splitlines() if line.split()[0] in ("ok", "FAIL", "-")]


def method_class(name: str) -> type:
    return type(catalogue.build("method", catalogue.load_settings("method", name)))


def test_a_method_that_keeps_the_laws_passes(check, capsys):
    assert check("knorm") == 0
    out = capsys.readouterr().out
    assert verdicts(out) == ["ok"] * len(CHECKS), out
    assert out.startswith("method=knorm: kvbench.methods.knorm.Knorm {") and "'skip_layers': []" in out


@pytest.mark.full
def test_what_does_not_apply_is_said(check, capsys):
    assert check("quest") == 0
    out = capsys.readouterr().out
    assert verdicts(out).count("-") == 1 and "it holds every row and looks at few" in out


@pytest.mark.parametrize(
    "score, failed",
    [
        (
            lambda self, observation, rows, state: rows.keys.numpy().__isub__(1)[..., 0] * 0 + rows.mass,
            "writes into nothing",
        ),
        (lambda self, observation, rows, state: rows.mass / [0][observation.layer + 1], "raised IndexError"),
        (lambda self, observation, rows, state: rows.mass[:, :1], "expected a float tensor of shape (1, 2, "),
    ],
)
def test_a_method_that_breaks_its_contract_fails(score, failed, check, capsys, monkeypatch):
    monkeypatch.setattr(method_checks, "CHECKS", CHECKS[:2])
    monkeypatch.setattr(method_class("knorm"), "score", score)
    assert check("knorm") == 1
    out = capsys.readouterr().out
    assert "FAIL" in verdicts(out) and failed in out
    assert "ok    a full budget changes nothing" in out  # nothing is scored there


@pytest.mark.parametrize(
    ("deed", "line"),
    [
        (lambda rows, model, call: object.__setattr__(rows, "keys", 0), "score of layer 0 replaced rows.keys"),
        (
            lambda rows, model, call: setattr(method_class("knorm"), "score", lambda *own: -own[2].places.double()),
            "the method changed kvbench.methods.knorm.Knorm.score",
        ),
        (
            lambda rows, model, call: call == 40 and model.model.embed_tokens.weight.data[0].neg_(),
            "the method changed model.embed_tokens.weight",
        ),
        (
            lambda rows, model, call: os._exit(0),
            "method=tova: score of layer 0 raised SystemExit: os._exit would end the process",
        ),
    ],
)
def test_a_method_that_does_harm_to_others_fails(deed, line, check, capsys, monkeypatch):
    models, calls, load = [], count(), Checkpoint.weights

    def weights(*given):
        models.append(load(*given))
        return models[-1]

    def score(self, observation, rows, state):
        deed(rows, models[-1], next(calls))
        return rows.places.double()

    monkeypatch.setattr(method_checks, "CHECKS", CHECKS[:1])
    monkeypatch.setattr(Checkpoint, "weights", weights)
    monkeypatch.setattr(method_class("tova"), "score", score)
    before = method_class("knorm").score
    assert check("tova") == 1
    out = capsys.readouterr().out
    assert line in out
    assert method_class("knorm").score is before


def test_a_method_that_spoils_who_comes_after_it_fails(check, capsys, monkeypatch):
    """The guards look away here: they know some ways to do it, and the groups find all that show."""

    def score(self, observation, rows, state):
        own = rows.places.double()
        object.__setattr__(rows, "keys", rows.keys.flip(2))
        return own

    monkeypatch.setattr(method_checks, "CHECKS", [own for own in CHECKS if own[1] is method_checks.check_sharing])
    monkeypatch.setattr(Handed, "is_changed", lambda handed: False)
    monkeypatch.setattr(method_class("tova"), "score", score)
    assert check("tova") == 1
    out = capsys.readouterr().out
    assert re.search("FAIL  a shared prefill .* knorm: .* is not what it is alone, where tova is the first of", out), (
        out
    )


def test_state_that_leaks_between_prompts_fails(check, capsys, monkeypatch):
    calls = []

    def score(self, observation, rows, state):
        calls.append(0)
        return (rows.places * len(calls)).double().cos()

    monkeypatch.setattr(method_checks, "CHECKS", [own for own in CHECKS if own[1] is method_checks.check_state])
    monkeypatch.setattr(method_class("knorm"), "score", score)
    assert check("knorm") == 1
    assert "FAIL  no state leaks between prompts" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, line",
    [
        (["nosuch"], "method=nosuch: choose one that kvbench run --help lists"),
        (["knorm", "skip_layers"], "skip_layers: KEY=VALUE"),
        (["knorm", "skip_layers=[1"], "skip_layers=[1: the value is not valid YAML"),
        (["knorm", "no=1"], "method setting=no: choose one of "),
        (["qfilters"], "method.path=null: "),
        (["knorm", "--model", "/no/such/folder"], "--model=/no/such/folder: no such folder"),
    ],
)
def test_what_cannot_be_checked_is_one_line(arguments, line, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"kvbench: {line}") and err.count("\n") == 1


@pytest.mark.parametrize(
    "source, line",
    [
        ("import no_such_package", "cannot be imported (ModuleNotFoundError: No module named 'no_such_package')"),
        ("def broken(:", "cannot be imported (SyntaxError: invalid syntax"),
        ("while True: pass", "takes longer than 0.2 s to import"),
        ("import time\ntry:\n    time.sleep(1000)\nexcept Exception: pass", "takes longer than 0.2 s to import"),
        ("raise SystemExit(0)", "ends the program when it is imported"),
        ("", "cannot be imported (AttributeError: module "),
    ],
)
def test_an_import_that_goes_wrong_is_one_line(source, line, tmp_path, monkeypatch):
    name = f"mine_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(catalogue, "IMPORT_SECONDS", 0.2)
    with pytest.raises(SettingError) as found:
        catalogue.load_class("method=mine", f"{name}.Mine")
    assert str(found.value).startswith(f"method=mine: {name} {line}") and "\n" not in str(found.value)


def test_what_an_import_prints_stays_out_of_the_output(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine_prints.py").write_text("print('hello')\nprint('again')\nclass Mine: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert catalogue.load_class("method=mine", "mine_prints.Mine").__name__ == "Mine"
    out, err = capsys.readouterr()
    assert out == "" and err == "kvbench: method=mine: mine_prints prints when it is imported: hello\n"

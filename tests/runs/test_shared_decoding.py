"""A sweep whose answers are decoded as one batch has the records of one whose cells answer alone."""

import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from kvbench.cli import run as command
from kvbench.cli.command import run_command
from kvbench.engine import graph_decoding, graph_path
from kvbench.methods.keydiff import KeyDiff
from kvbench.runs import runner, shared_runs
from kvbench.runs.responder import Responder
from kvbench.runs.spec import RunSpec
from kvbench.runs.warming import choose_examples, find_companion
from kvbench.store.run_folder import RunFolder
from kvbench.store.runs import load_runs
from kvbench.validation import ContractError
from tests.support.recorded_runs import OWN
from tests.support.selection import only_in_full

TASK = ("-m", "task=niah", "task.lengths=[300]", "task.depths=[0,50]", "dtype=float32")
CELLS = ("method=snapkv,keydiff,quest", "budget=0.3")
MORE_CELLS = ("method=snapkv,keydiff,sink,quest", "budget=0.3,0.5")
SHORT = ("question=hidden", "task.question=' Where?'", "task.answer_prefix=' In'", "task.new_tokens=10")
CAN_CAPTURE = "kvbench.engine.context.can_capture"
Records = dict[tuple[str, str], dict]


def read_all(results: Path) -> Records:
    """Records by run and sample."""
    return {(run.hash, uid): own for run in load_runs(results) for uid, own in run.records.items()}


@pytest.fixture(scope="module")
def alone(checkpoint, tmp_path_factory) -> Records:
    """Records of CELLS whose answers are decoded one after the other."""
    results = tmp_path_factory.mktemp("alone")
    settings = ["model=hf", f"model.path={checkpoint}", "device=cpu", *TASK, *CELLS, f"results={results}"]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(CAN_CAPTURE, lambda model: True)
        monkeypatch.setattr(sys, "argv", ["run.py", *settings])
        assert run_command(command.main) == 0
    return read_all(results)


@pytest.fixture
def sweep(kvbench, monkeypatch, tmp_path):
    """Runs a sweep as on a GPU, but without graphs, and gives exit code, errors and records."""
    monkeypatch.setattr(CAN_CAPTURE, lambda model: True)
    describe = RunSpec.describe

    def call(*settings: str, together: bool, rehearses: bool = False) -> tuple[int, str, Records]:
        def describe_shared(*given, **named):
            return replace(describe(*given, **named), shares_decoding=together)

        def make_group(runs, bench):
            group = shared_runs.RunGroup(runs, partial(Responder, bench=bench), bench.reload_model, 4)
            if rehearses:
                for batch in choose_examples(bench.prompts, next(iter(runs.values())), 1):
                    group.rehearse([batch, *find_companion(batch, bench.prompts)])
            return group

        monkeypatch.setattr(RunSpec, "describe", describe_shared)
        monkeypatch.setattr(runner, "make_warm_group", make_group)
        results = tmp_path / f"together-{together}"
        code, _, errors = kvbench(*TASK, *settings, f"results={results}")
        return code, errors, read_all(results)

    return call


def strip(records):
    """What must be equal."""
    left_out = OWN | {"asked_together", "decoded_together", "fidelity", "fidelity_ms", "predictions"}
    return {key: {name: own for name, own in record.items() if name not in left_out} for key, record in records.items()}


@pytest.mark.full
def test_a_rehearsal_decodes_together_too(sweep, alone, monkeypatch):
    run_together, counts = shared_runs.run_together, []

    def run(sessions):
        found = run_together(sessions)
        counts.append(len(found))
        return found

    monkeypatch.setattr(shared_runs, "run_together", run)
    code, _, joined = sweep(*CELLS, together=True, rehearses=True)
    assert code == 0 and strip(alone) == strip(joined)
    assert counts == [8, 8]  # an example with another sample, and both samples


FIDELITY = ("fidelity=true", "question=hidden")


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        (CELLS, 8),
        (("method=snapkv", "budget=0.3", *FIDELITY), 4),
        only_in_full((*MORE_CELLS, *FIDELITY), 16),
        only_in_full((*MORE_CELLS, "temperature=0.2"), 9),
    ],
)
def test_records_are_those_of_lone_runs(sweep, alone, settings, most):
    """The answers to two samples are decoded together, apart from those that end with their first token."""
    if settings != CELLS:
        code, errors, alone = sweep(*settings, together=False)
        assert code == 0, errors
    code, errors, joined = sweep(*settings, together=True)
    assert code == 0, errors
    assert strip(alone) == strip(joined) and len(joined) >= most and "decoded alone" not in errors, errors
    for key, record in alone.items():  # together the right answers are read token by token, which rounds differently
        assert joined[key].get("fidelity", {}) == pytest.approx(record.get("fidelity", {}), rel=1e-5, abs=1e-8)
        assert ("predictions" in joined[key]) == ("predictions" in record)
    assert {record["decoded_together"] for record in alone.values()} == {1}
    assert max(record["decoded_together"] for record in joined.values()) == most


@pytest.mark.parametrize("taken", [only_in_full(False), True])
def test_samples_that_others_have_claimed_are_not_left(taken, sweep, monkeypatch):
    """What a process claims at once follows from the samples that are left (`limit_claim`)."""
    asked, limit_claim = [], runner.limit_claim

    def note(most, size, left, processes):
        asked.append(left)
        return limit_claim(most, size, left, processes)

    monkeypatch.setattr(runner, "limit_claim", note)
    if taken:
        monkeypatch.setattr(RunFolder, "is_free", lambda folder, uid: False)
    assert sweep("method=snapkv", "budget=0.5", together=True)[0] == 0
    assert asked == ([1, 1] if taken else [2])


@pytest.mark.parametrize(
    ("name", "depths", "most"),
    [("kivi", "50", 2), only_in_full("kivi", "0,50", 4), only_in_full("raw", "0,50", 2)],
)
def test_questions_are_read_together_token_by_token(name, depths, most, sweep):
    """With `raw` only quest reads them so, with `kivi` all others: quest over packed rows is left to the modules."""
    methods = "full,snapkv" if depths == "50" else "full,snapkv,quest"
    cells = (f"method={methods}", "budget=0.5", f"codec={name}", *SHORT, f"task.depths=[{depths}]")
    alone, joined = (sweep(*cells, together=together)[2] for together in (False, True))
    assert strip(alone) == strip(joined) and {record.get("asked_together", 1) for record in alone.values()} == {1}
    asked = [record["asked_together"] for record in joined.values() if "asked_together" in record]
    assert max(asked) == most  # one or two samples each


def test_answers_are_decoded_alone_if_the_batch_is_not_finite(sweep, alone, monkeypatch):
    read = graph_decoding.read_token

    def spoil(weights, rows, *more):
        logits = read(weights, rows, *more)
        return logits * torch.nan if len(logits) > 1 else logits

    monkeypatch.setattr(graph_decoding, "read_token", spoil)
    code, errors, joined = sweep(*CELLS, together=True)
    assert code == 0 and "answers are decoded alone: NumericalError: model: its logits are not finite" in errors
    assert strip(alone) == strip(joined)


@pytest.mark.full
@pytest.mark.parametrize("after", [1, 5])
def test_a_sweep_that_is_killed_in_a_batch_continues(sweep, alone, after, monkeypatch, tmp_path):
    """Here a fork of this process decodes together, and dies when it has written some records."""
    if (process := os.fork()) == 0:
        append, written = RunFolder.append, []

        def append_or_die(folder, record):
            if len(written) == after:
                os.kill(os.getpid(), signal.SIGKILL)
            append(folder, record)
            written.append(record)

        monkeypatch.setattr(RunFolder, "append", append_or_die)
        try:
            sweep(*CELLS, together=True)
        finally:
            os._exit(1)
    assert os.waitpid(process, 0)[1] == signal.SIGKILL
    before = read_all(tmp_path / "together-True").keys()
    code, errors, together = sweep(*CELLS, together=True)
    assert code == 0 and len(before) == after and before < together.keys() == alone.keys()
    assert strip(together) == strip(alone)
    assert max(own["decoded_together"] for key, own in together.items() if key not in before) > 1


@pytest.mark.full
def test_questions_of_runs_that_share_the_rows_of_a_prompt(sweep):
    """Each writes its question behind the same rows."""
    cells = ("method=quest", "budget=0.05,0.5", *SHORT, "method.dense_layers=0", "method.page=4")
    (_, _, alone), (code, _, joined) = [sweep(*cells, "temperature=2.0", together=own) for own in (False, True)]
    assert code == 0 and strip(alone) == strip(joined)
    assert max(record["decoded_together"] for record in joined.values()) > 3  # of both samples


def disturb(sweep, monkeypatch, work) -> tuple[int, str, Records]:
    """Code, errors and records of a sweep whose keydiff does `work` at each token of an answer."""
    score = KeyDiff.score

    def disturbed(self, observation, rows, state):
        if torch.as_tensor(observation.tokens).min() > 200 and observation.queries.shape[2] == 1:
            work(observation)
        return score(self, observation, rows, state)

    monkeypatch.setattr(KeyDiff, "score", disturbed)
    return sweep(*CELLS, together=True)


def test_weights_that_a_run_spoils_are_loaded_again(sweep, alone, monkeypatch):
    code, errors, found = disturb(sweep, monkeypatch, lambda seen: seen.output_weight.mul_(0.1))
    assert code == 1 and "wrote into observation.output_weight" in errors
    assert len(alone) - len(found) == 2 and strip(found) == strip({key: alone[key] for key in found})


def test_a_run_that_fails_is_left_out(sweep, alone, monkeypatch):
    """The others answer alone, and one line says why."""

    def fail(observation):
        raise ContractError("method=keydiff: score is tired")

    code, errors, found = disturb(sweep, monkeypatch, fail)
    assert code == 1 and "answers are decoded alone: ContractError: method=keydiff: score is tired" in errors
    assert {record["decoded_together"] for record in found.values()} == {1}
    assert len(alone) - len(found) == 2 and strip(found) == strip({key: alone[key] for key in found})


def test_fewer_answer_together_if_memory_does_not_suffice(sweep, alone, monkeypatch):
    run_together, counts = shared_runs.run_together, []

    def run(sessions):
        begun = []

        def count():
            for session in sessions:
                if len(begun) == 3:
                    raise torch.cuda.OutOfMemoryError("for a test")
                begun.append(session)
                yield session

        counts.append(begun)
        return run_together(count())

    monkeypatch.setattr(shared_runs, "run_together", run)
    code, errors, found = sweep(*CELLS, together=True, rehearses=True)
    assert code == 0 and strip(found) == strip(alone) and "no memory for 8 answers at once: 4 from now on" in errors
    assert [len(begun) for begun in counts] == [3] * 3 + [2] * 4  # a rehearsal, 8 and 4 are too many, then 8 answers
    assert max(record["decoded_together"] for record in found.values()) == 2


@pytest.mark.full
def test_fewer_questions_are_read_together_if_memory_does_not_suffice(sweep, monkeypatch):
    """What was read of them before is forgotten."""
    make, tried = graph_path.AnswerBatch.__init__, []

    def limited(self, parts, begin):
        tried.append(len(parts))
        if len(parts) > 2 and parts[0][0].keeps_rows:
            raise torch.cuda.OutOfMemoryError("for a test")
        make(self, parts, begin)

    cells = ("method=full,snapkv", "budget=0.5", "codec=kivi", "question=hidden")
    _, _, expected = sweep(*cells, together=False)
    monkeypatch.setattr(graph_path.AnswerBatch, "__init__", limited)
    code, errors, found = sweep(*cells, together=True)
    assert code == 0 and strip(found) == strip(expected) and "no memory for" in errors and max(tried) > 2
    assert max(record.get("asked_together", 1) for record in found.values()) == 2


def test_the_setting_is_checked(kvbench):
    code, out, errors = kvbench("-m", "sweep.share_decoding=maybe", "method=snapkv,knorm")
    assert (code, out) == (2, "") and errors.startswith("kvbench: sweep.share_decoding=") and errors.count("\n") == 1


@pytest.mark.full
@pytest.mark.parametrize("fidelity", ["false", "true"])
def test_turns_read_token_by_token_get_the_answers_of_the_modules(fidelity, kvbench, monkeypatch, tmp_path):
    """Also where an answer's last token is read with the next turn."""
    given = ("-m", "task=scbench", "task.subtasks=scbench_many_shot", "task.max_turns=3", "limit=1", "question=hidden")
    given += ("method=full,quest", "budget=0.3", "codec=kivi", f"fidelity={fidelity}", "dtype=float32")
    found = []
    for captures in (False, True):
        monkeypatch.setattr("kvbench.engine.context.can_capture", lambda model, captures=captures: captures)
        results = tmp_path / f"{captures}"
        assert kvbench(*given, f"results={results}")[0] == 0
        found.append({(run.hash, uid): own for run in load_runs(results) for uid, own in run.records.items()})
    modules, step = found
    assert {record["decoding"] for record in modules.values()} == {"modules"} and len(modules) == 9
    assert modules.keys() == step.keys() and "graph" in {record["decoding"] for record in step.values()}
    assert all(record["output"] == step[key]["output"] for key, record in modules.items())

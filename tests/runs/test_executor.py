"""What the cells of a sweep load once, in this process and in workers, and workers that die."""

import os
import pickle
import signal
from multiprocessing import get_context

import pytest

from kvbench.config.compose import compose_config
from kvbench.models.checkpoint import Checkpoint
from kvbench.runs.checks import check_settings
from kvbench.runs.executor import Executor
from kvbench.runs.resources import Resources
from kvbench.runs.spec import RunSpec, SharedParts
from kvbench.validation import ContractError
from tests.support.selection import only_in_full

TASK = ("task=niah", "task.lengths=[200]", "task.depths=[50]", "method=knorm", "device=cpu")


@pytest.fixture
def make_run(checkpoint):
    shared = SharedParts()

    def make(*settings: str) -> RunSpec:
        config = compose_config(["model=hf", f"model.path={checkpoint}", *TASK, *settings])
        return RunSpec.describe(config, check_settings(config, shared.tasks), shared)

    return make


def test_a_sweep_loads_a_model_once(kvbench, monkeypatch):
    """Its cells read in blocks, so they do not read together."""
    loaded, weights = [], Checkpoint.weights

    def load(checkpoint, *given):
        loaded.append(given)
        return weights(checkpoint, *given)

    monkeypatch.setattr(Checkpoint, "weights", load)
    code, out, _ = kvbench("-m", *TASK, "budget=0.3,0.5", "block_size=64")
    assert code == 0 and "2 cells" in out and len(loaded) == 1


def test_resources_keep_what_another_run_can_use(make_run):
    one = make_run("budget=0.3")
    bench = Resources(one, predictions={"a": "b"})
    parts = bench.tokenizer, bench.model, bench.prompts
    same = bench.renew(make_run("budget=0.5"))
    assert (same.loaded["tokenizer"], same.loaded["model"], same.loaded["prompts"]) == parts
    assert same.predictions == bench.predictions
    sent = bench.renew(pickle.loads(pickle.dumps(make_run("budget=0.5"))))  # as a worker gets it, with another task
    assert sent.prompts is bench.prompts and sent.run.task is bench.run.task
    longer = bench.renew(make_run("task.lengths=[300]"))
    assert sorted(longer.loaded) == ["model", "tokenizer"] and longer.predictions == {}
    other = bench.renew(make_run("dtype=bfloat16"))
    assert sorted(other.loaded) == ["prompts", "tokenizer"] and other.predictions == {}
    assert bench.renew(make_run("question=hidden")).predictions == {}


@pytest.mark.parametrize("how", ["fork", only_in_full("spawn")])
def test_workers_stay_from_cell_to_cell_and_are_replaced_if_they_die(how, make_run, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("kvbench.runs.workers.get_context", lambda method: get_context(how))
    with Executor(tmp_path) as executor:
        first = executor.execute([make_run("budget=0.3")], count=2)
        workers = executor.workers
        before = [process.pid for process, _ in workers.processes]
        executor.execute([make_run("budget=0.4")], count=2)
        assert [process.pid for process, _ in workers.processes] == before
        os.kill(before[1], signal.SIGKILL)
        workers.processes[1][0].join()
        [records] = executor.execute([make_run("budget=0.5")], count=2)
        assert len(records) == len(first[0]) == 1 and "worker 1 ended with code -9" in capfd.readouterr().err
        executor.execute([make_run("budget=0.6")], count=2)
        after = [process.pid for process, _ in workers.processes]
        assert after[0] == before[0] and after[1] != before[1]
        processes = [process for process, _ in workers.processes]
        executor.execute([make_run("budget=0.7")])  # this process needs the memory
        assert executor.workers is None
    assert not any(process.is_alive() for process in processes)


def test_workers_make_room_for_what_they_left(make_run, tmp_path, monkeypatch):
    monkeypatch.setattr("kvbench.runs.workers.get_context", lambda method: get_context("fork"))

    def fail(runs, results, bench):
        raise EOFError if fail_as is EOFError else ContractError("broken")

    for fail_as in (ContractError, EOFError):
        monkeypatch.setattr("kvbench.runs.workers.execute_runs", fail)
        with Executor(tmp_path) as executor:
            [records] = executor.execute([make_run("budget=0.3", f"seed={fail_as is EOFError:d}")], count=2)
            assert len(records) == 1 and executor.workers is None


def test_finished_runs_need_no_workers(make_run, tmp_path):
    run = make_run("budget=0.3")
    with Executor(tmp_path) as executor:
        made = executor.execute([run])
    with Executor(tmp_path) as executor:
        assert executor.execute([run], [[run]], count=2) == made
        assert executor.workers.processes == [None, None]

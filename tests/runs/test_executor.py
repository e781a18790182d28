"""What the cells of a sweep load once, in this process and in workers, and workers that die."""

import os
import pickle
import signal
from functools import partial
from multiprocessing import get_context

import pytest
import torch

from kvbench.config.compose import compose_config
from kvbench.models.checkpoint import Checkpoint
from kvbench.runs.checks import check_settings
from kvbench.runs.executor import Executor
from kvbench.runs.resources import Resources
from kvbench.runs.responder import Responder
from kvbench.runs.runner import execute_run
from kvbench.runs.spec import RunSpec, SharedParts
from kvbench.runs.workers import Workers, choose_gpus, count_workers, share_threads
from kvbench.validation import ContractError, SettingError
from tests.support.selection import only_in_full

TASK = ("task=niah", "task.lengths=[200]", "task.depths=[50]", "method=knorm", "device=cpu")


@pytest.fixture
def make_run(checkpoint):
    shared = SharedParts()

    def make(*settings: str) -> RunSpec:
        config = compose_config(["model=hf", f"model.path={checkpoint}", *TASK, *settings])
        return RunSpec.describe(config, check_settings(config, shared.tasks), shared)

    return make


@pytest.mark.full
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
    assert sorted(longer.loaded) == ["beyond", "model", "tokenizer", "weights"] and longer.predictions == {}
    other = bench.renew(make_run("dtype=bfloat16"))
    assert sorted(other.loaded) == ["beyond", "prompts", "tokenizer"] and other.predictions == {}
    assert bench.renew(make_run("question=hidden")).predictions == {}


@pytest.mark.parametrize("how", ["fork", only_in_full("forkserver")])
def test_workers_stay_from_cell_to_cell_and_are_replaced_if_they_die(how, make_run, tmp_path, monkeypatch, capfd):
    if how == "fork":
        monkeypatch.setattr("kvbench.runs.workers.start_fork_server", partial(get_context, how))
    with Executor(tmp_path) as executor:
        first = executor.execute([make_run("budget=0.3")], count=2)
        workers = executor.workers
        before = [process.pid for process, _ in workers.processes]
        os.kill(before[1], signal.SIGKILL)
        workers.processes[1][0].join()
        [records] = executor.execute([make_run("budget=0.5")], count=2)
        assert len(records) == len(first[0]) == 1 and "worker 1 ended with code -9" in capfd.readouterr().err
        if how == "forkserver":
            executor.execute([make_run("budget=0.6")], count=2)
            after = [process.pid for process, _ in workers.processes]
            assert after[0] == before[0] and after[1] != before[1]
        processes = [own[0] for own in workers.processes if own]
        executor.execute([make_run("budget=0.7")])  # this process needs the memory
        assert executor.workers is None
    assert not any(process.is_alive() for process in processes)


def test_workers_make_room_for_what_they_left(make_run, tmp_path, monkeypatch):
    monkeypatch.setattr("kvbench.runs.workers.start_fork_server", partial(get_context, "fork"))

    def fail(runs, results, bench):
        raise EOFError if fail_as is EOFError else ContractError("broken")

    for fail_as in (ContractError, EOFError):
        monkeypatch.setattr("kvbench.runs.workers.execute_runs", fail)
        with Executor(tmp_path) as executor:
            [records] = executor.execute([make_run("budget=0.3", f"seed={fail_as is EOFError:d}")], count=2)
            assert len(records) == 1 and executor.workers is None


def test_a_worker_that_ends_early_is_named_whatever_its_code(make_run, tmp_path, monkeypatch, capfd):
    end = os._exit
    monkeypatch.setattr("kvbench.runs.workers.start_fork_server", partial(get_context, "fork"))
    monkeypatch.setattr("kvbench.runs.workers.execute_runs", lambda *given: end(0))
    workers = Workers(tmp_path, 1, "cpu")
    assert workers.execute([[make_run("budget=0.3")]]) == {} and workers.processes == [None]
    assert "kvbench: worker 0 ended with code 0" in capfd.readouterr().err


def test_workers_say_whom_they_accuse(make_run, tmp_path, monkeypatch):
    def accuse(runs, results, bench):
        bench.accused["mine"] = "method=mine: it changed weights"

    monkeypatch.setattr("kvbench.runs.workers.start_fork_server", partial(get_context, "fork"))
    monkeypatch.setattr("kvbench.runs.workers.execute_runs", accuse)
    with Executor(tmp_path) as executor:
        executor.execute([make_run("budget=0.3")], count=2)
        assert executor.bench.accused == {"mine": "method=mine: it changed weights"}


def test_finished_runs_need_no_workers(make_run, tmp_path):
    run = make_run("budget=0.3")
    with Executor(tmp_path) as executor:
        made = executor.execute([run])
    with Executor(tmp_path) as executor:
        assert executor.execute([run], [[run]], count=2) == made
        assert executor.workers.processes == [None, None]


@pytest.mark.parametrize(
    ("count", "visible", "found", "gpus"),
    [
        (1, None, 2, "0"),
        (2, "", 2, "0 1"),
        (5, None, 2, "0 1 0 1 0"),
        (3, "5", 1, "5 5 5"),
        (3, "GPU-7f,3", 2, "GPU-7f 3 GPU-7f"),
        (2, "1,9", 1, "1 1"),  # CUDA finds no GPU 9
    ],
)
def test_processes_are_spread_over_the_gpus(count, visible, found, gpus):
    assert choose_gpus(count, visible, found) == gpus.split()


def test_workers_may_be_more_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    counts = [count_workers(*given) for given in (("auto", "cuda"), ("auto", "cpu"), (5, "cuda"), (3, "cpu"))]
    assert counts == [2, 1, 5, 3]


def test_a_worker_gets_a_gpu_and_knows_how_many_share_it(make_run, tmp_path, monkeypatch):
    def describe(runs, results, bench):
        (results / str(os.getpid())).write_text(f"{os.environ['CUDA_VISIBLE_DEVICES']} {bench.gpu_processes}")

    monkeypatch.setattr("kvbench.runs.workers.start_fork_server", partial(get_context, "fork"))
    monkeypatch.setattr("kvbench.runs.workers.execute_runs", describe)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    workers = Workers(tmp_path, 3, "cuda")
    workers.execute([[make_run("budget=0.3")]])
    workers.close()
    assert sorted(file.read_text() for file in tmp_path.iterdir() if file.is_file()) == ["4 2", "4 2", "7 1"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,7"


def test_records_say_that_processes_shared_the_gpu(make_run, tmp_path):
    run = make_run("budget=0.3")
    alone, shared = Resources(run), Resources(run, gpu_processes=3).renew(run)
    [one] = execute_run(run, tmp_path / "alone", alone).values()
    [other] = execute_run(run, tmp_path / "shared", shared).values()
    assert "gpu_processes" not in one and other["gpu_processes"] == 3
    assert one.keys() | {"gpu_processes"} == other.keys() and one["output"] == other["output"]


def test_what_has_no_memory_beside_others_is_answered_alone(make_run, tmp_path, monkeypatch, capfd):
    parent, attempt = os.getpid(), Responder.attempt
    monkeypatch.setattr(
        Responder, "attempt", lambda self, batch: attempt(self, batch) if os.getpid() == parent else None
    )
    monkeypatch.setattr("kvbench.runs.workers.start_fork_server", partial(get_context, "fork"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("kvbench.runs.executor.Workers", lambda results, count, _: Workers(results, count, "cuda"))
    with Executor(tmp_path) as executor:
        [records] = executor.execute([make_run("budget=0.3")], count=2)
        assert executor.workers is None
    [record] = records.values()
    assert record["error"] is None and "gpu_processes" not in record
    said = capfd.readouterr().err
    assert said.count("no memory beside the other processes of the GPU") == 2 and "ended with code" not in said


def test_weights_without_memory_are_a_wrong_setting_only_alone(make_run, monkeypatch):
    def load(*given):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Checkpoint, "weights", load)
    run = make_run("budget=0.3")
    for processes, error in ((1, SettingError), (2, torch.cuda.OutOfMemoryError)):
        with pytest.raises(error):
            _ = Resources(run, gpu_processes=processes).model


@pytest.mark.parametrize(("threads", "processes", "each"), [(16, 1, 16), (16, 12, 1), (16, 5, 3), (1, 4, 1)])
def test_processes_of_a_gpu_share_the_threads(threads, processes, each):
    assert share_threads(threads, processes) == each

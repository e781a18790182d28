"""How many samples' answers are decoded as one batch, and how many a process claims."""

from dataclasses import replace

import pytest

from kvbench.config.compose import compose_config
from kvbench.interfaces.budget import Budget
from kvbench.runs import joint_samples
from kvbench.runs.checks import check_settings
from kvbench.runs.joint_samples import choose_joint_batches, count_rows, limit_claim
from kvbench.runs.spec import RunSpec


def make_run(*settings: str) -> RunSpec:
    config = compose_config(["task=niah", *settings])
    return RunSpec.describe(config, check_settings(config))


def test_methods_that_evict_hold_their_budget_and_others_all_rows():
    assert count_rows(make_run("method=snapkv", "budget=0.25"), 1000, 0) == 250
    assert count_rows(make_run("method=snapkv", "budget=4000"), 1000, 0) == 1000
    assert count_rows(make_run("method=quest", "budget=0.25"), 1000, 0) == 1000
    assert count_rows(make_run("method=full"), 1000, 0) == 1000


def test_an_answer_adds_its_rows_unless_they_are_cut_too():
    assert count_rows(make_run("method=snapkv", "budget=0.25"), 1000, 3000) == 3250
    assert count_rows(make_run("method=h2o", "budget=0.25", "method.decoding=true"), 1000, 3000) == 500  # in slots too
    assert count_rows(make_run("method=quest", "budget=0.25"), 1000, 3000) == 4000


def test_the_rows_of_all_answers_fit_into_the_process_s_share_of_memory(monkeypatch):
    runs = [make_run("method=full"), make_run("method=snapkv", "budget=0.5")]
    shape = runs[0].checkpoint.layout()
    sample = 1900 * 2 * shape.layers * shape.heads * shape.dim * 4  # bytes of 1200 and 700 rows in float32

    def choose(memory: float, processes: int = 1, size: int = 1) -> int:
        monkeypatch.setattr(joint_samples, "count_device_bytes", lambda device, all_gpus: int(memory))
        monkeypatch.setattr(joint_samples, "find_batch_size", lambda runs: size)
        return choose_joint_batches(runs, 1000, 200, processes)

    assert choose(2 * 5 * sample) == 5  # half of the memory is for rows
    assert choose(2 * 5 * sample - 2) == 4
    assert choose(2 * 5 * sample, processes=2) == 2
    assert choose(2 * 5 * sample, size=2) == 2  # batches of two samples
    assert choose(1) == 1  # halving them is left to a lack of memory
    assert choose(1e15) == joint_samples.MOST
    assert choose(1e15, size=4) == joint_samples.MOST // 4
    assert choose(1e15, size=100) == 1


@pytest.mark.parametrize(
    "most, size, left, processes, claimed",
    [
        (16, 1, 40, 1, 16), (16, 1, 40, 8, 5), (16, 1, 3, 8, 1), (16, 1, 0, 2, 1), (4, 1, 40, 2, 4),
        (4, 4, 16, 4, 1), (4, 4, 40, 4, 3),
    ],
)  # fmt: skip
def test_processes_leave_samples_to_each_other(most, size, left, processes, claimed):
    assert limit_claim(most, size, left, processes) == claimed


def test_a_method_that_decides_how_many_rows_stay_reads_alone():
    """Otherwise its neighbours would be read in smaller batches than the same runs elsewhere."""
    run = make_run("method=snapkv", "budget=0.25")
    assert run.reading is not None and replace(run, budget=Budget(None)).reading is None

"""How many samples' answers are decoded as one batch, and how many a process claims."""

import pytest

from kvbench.config.compose import compose_config
from kvbench.runs import joint_samples
from kvbench.runs.checks import check_settings
from kvbench.runs.joint_samples import choose_joint_samples, count_rows, limit_claim
from kvbench.runs.spec import RunSpec


def make_run(*settings: str) -> RunSpec:
    config = compose_config(["task=niah", *settings])
    return RunSpec.describe(config, check_settings(config))


def test_rows_follow_from_the_budget_and_the_method():
    assert count_rows(make_run("method=snapkv", "budget=0.25"), 1000) == 250
    assert count_rows(make_run("method=snapkv", "budget=4000"), 1000) == 1000
    assert count_rows(make_run("method=tova", "budget=0.25"), 1000) == 500  # it cuts while decoding
    assert count_rows(make_run("method=quest", "budget=0.25"), 1000) == 1000
    assert count_rows(make_run("method=full"), 1000) == 1000


def test_the_rows_of_all_answers_fit_into_the_process_s_share_of_memory(monkeypatch):
    runs = [make_run("method=full"), make_run("method=snapkv", "budget=0.5")]
    shape = runs[0].checkpoint.layout()
    sample = 1500 * 2 * shape.layers * shape.heads * shape.dim * 4  # bytes of 1000 and 500 rows in float32

    def choose(memory: float, processes: int = 1) -> int:
        monkeypatch.setattr(joint_samples, "count_device_bytes", lambda device, all_gpus: int(memory))
        return choose_joint_samples(runs, 1000, processes)

    assert choose(2 * 5 * sample) == 5  # half of the memory is for rows
    assert choose(2 * 5 * sample - 2) == 4
    assert choose(2 * 5 * sample, processes=2) == 2
    assert choose(1) == 1  # halving them is left to a lack of memory
    assert choose(1e15) == joint_samples.MOST


@pytest.mark.parametrize(
    "most, left, processes, claimed", [(16, 40, 1, 16), (16, 40, 8, 5), (16, 3, 8, 1), (16, 0, 2, 1), (4, 40, 2, 4)]
)
def test_processes_leave_samples_to_each_other(most, left, processes, claimed):
    assert limit_claim(most, left, processes) == claimed

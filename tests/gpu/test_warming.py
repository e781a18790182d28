"""On a machine that has compiled nothing, the first record takes no longer than the others."""

import json
import os
import subprocess
import sys
from statistics import median

import pytest
import torch

from tests.support.repository import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
MODEL = ("model=random", "model.like=llama31_8b", "model.tokenizer=reference", "device=cuda")
TASK = ("task=niah", "task.lengths=[4096,6000]", "task.depths=[0,25,50,75,100]", "results=results")
RUN = """
import json, sys
from pathlib import Path

import triton

from kvbench.cli.run import main
from kvbench.runs import runner
from kvbench.store.runs import load_runs

warmed, make, compiled = [], runner.make_warm_group, {"before": [], "after": []}


def make_warm_group(*given):
    warmed.clear()
    group = make(*given)
    warmed.append(True)
    return group


def note(*, repr, **_):
    compiled["after" if warmed else "before"].append(repr)


runner.make_warm_group = make_warm_group
triton.knobs.runtime.jit_post_compile_hook = note
code = main(sys.argv[1:])
records = [list(run.records.values()) for run in load_runs(Path("results"))]
times = [[(record["index"], record["tokens_context"], record["ttft_ms"]) for record in some] for some in records]
print(json.dumps({"code": code, "compiled": compiled, "times": times}))
"""


def run(folder, *command: str) -> subprocess.CompletedProcess:
    paths = os.pathsep.join([str(ROOT), *sys.path])
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "triton"), "PYTHONPATH": paths}
    return subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)


def run_first(folder, *settings: str) -> list[list[list]]:
    """Run on a machine that has compiled nothing. Give (index, tokens, time to the first token) of each run's records.

    No kernel may be compiled after the group of runs was made.
    """
    done = run(folder, "-c", RUN, "-m", *MODEL, *TASK, "budget=0.2", *settings)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["code"] == 0 and found["compiled"]["before"] and found["compiled"]["after"] == [], done.stderr
    assert "kvbench: compiled " in done.stderr and "one after the other" not in done.stderr
    return found["times"]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(("method=keydiff", "block_size=128"), marks=pytest.mark.rest, id="blocks"),
        pytest.param(("method=snapkv", "codec=kivi"), id="packed"),
    ],
)
def test_no_record_contains_compilation(tmp_path, settings):
    run_first(tmp_path, *settings)


def test_the_first_record_takes_no_longer(tmp_path):
    """`make test-gpu` runs this test alone, because others would disturb its times."""
    for times in run_first(tmp_path, "method=snapkv,quest", "task.lengths=[4096]"):
        first, *others = [(size, spent) for _, size, spent in sorted(times)]
        same = [spent for size, spent in others if abs(size - first[0]) < 100]
        assert len(same) >= 3 and first[1] <= 1.2 * median(same), times


def test_a_run_after_the_command_compiles_nothing(tmp_path):
    settings = [*MODEL, *TASK, "budget=0.2", "method=snapkv,knorm"]
    warmed = run(tmp_path, "-m", "kvbench", "warm", *settings)
    assert warmed.returncode == 0 and "3 of 3 runs have all their kernels." in warmed.stdout, warmed.stderr
    assert "kvbench: compiled " in warmed.stderr and not list((tmp_path / "results").glob("runs/*"))
    done = run(tmp_path, "-m", "kvbench", "run", "-m", *settings)
    assert done.returncode == 0 and "kvbench: compiled " not in done.stderr, done.stderr


def test_processes_that_share_a_gpu_compile_once(tmp_path):
    done = run(tmp_path, "-m", "kvbench", "run", "-m", *MODEL, *TASK, "budget=0.2", "method=snapkv,knorm", "workers=2")
    assert done.returncode == 0, done.stderr
    files = tmp_path.glob("results/runs/*/records*.jsonl")
    records = [record for file in files for record in file.read_text().splitlines()]
    assert len(records) == 30 and all(json.loads(record)["gpu_processes"] == 2 for record in records)
    assert len(list((tmp_path / "triton").glob("kvbench-*.compiled"))) == 1

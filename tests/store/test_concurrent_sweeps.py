"""Sweeps that overlap on one results folder: every sample is answered once, whoever is killed when."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from kvbench.store.audit import audit_runs
from kvbench.store.run_folder import RunFolder
from tests.support.made_up_runs import VALUE
from tests.support.recorded_runs import read_whole_lines
from tests.support.repository import ROOT
from tests.support.selection import only_in_full

RUNS, SAMPLES = 6, 30
SWEEP = """
import os, random, sys, time
from pathlib import Path
from kvbench.store.run_folder import RunFolder, claim_samples
results, seed, log = Path(sys.argv[1]), int(sys.argv[2]), os.open(sys.argv[3], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
cells = random.Random(seed).sample(range({runs}), {runs} - 2)
print(flush=True)
sys.stdin.readline()
for cell in cells:
    folder = RunFolder(results / "runs", {value} | {{"cell": cell}})
    uids = [str(index) for index in range({samples})]
    if folder.finished:
        continue
    with folder.open({{}}, len(uids)):
        for uid, _ in claim_samples([folder], uids, pause=0.01):
            os.write(log, f"{{cell}}/{{uid}}\\n".encode())
            time.sleep(0.03)
            record = {{"uid": uid, "prompt_hash": uid, "target_hash": uid, "error": None, "score": 1}}
            folder.append(record | {{"output": uid * 500}})
        folder.finish(uids)
"""


def begun(results: Path, seed: int) -> subprocess.Popen:
    """A sweep over all runs but two, in an order of its own; it waits for a line."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    code = SWEEP.format(runs=RUNS, samples=SAMPLES, value=VALUE)
    arguments = [sys.executable, "-c", code, str(results), str(seed), str(results / "log")]
    process = subprocess.Popen(arguments, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    return process


def go(sweep: subprocess.Popen) -> None:
    sweep.stdin.write(b"\n")
    sweep.stdin.flush()


@pytest.mark.parametrize(("count", "most"), [(5, 6), only_in_full(8, 16)])
def test_sweeps_with_random_kills(count, most, tmp_path):
    rng, kills = random.Random(0), 0
    sweeps = {seed: begun(tmp_path, seed) for seed in range(count)}
    for sweep in sweeps.values():
        go(sweep)
    while kills < most:
        time.sleep(rng.uniform(0.01, 0.05))
        seed = rng.choice([seed for seed, sweep in sweeps.items() if sweep.poll() is None] or [0])
        sweeps[seed].send_signal(signal.SIGKILL)
        assert sweeps[seed].wait() in (0, -signal.SIGKILL)
        kills += sweeps[seed].returncode == -signal.SIGKILL
        sweeps[seed].stdout.close()
        sweeps[seed].stdin.close()
        if all(RunFolder(tmp_path / "runs", VALUE | {"cell": cell}).finished for cell in range(RUNS)):
            break
        sweeps[seed] = begun(tmp_path, seed)
        go(sweeps[seed])
    for sweep in sweeps.values():
        assert sweep.wait(60) in (0, -signal.SIGKILL)
        sweep.stdout.close()
        sweep.stdin.close()
    assert kills >= 4  # else nothing was shown
    found = Counter(
        (file.parent.name, record["uid"])
        for file in (tmp_path / "runs").glob("*/records*.jsonl")
        for record in read_whole_lines(file)
    )
    assert len(found) == RUNS * SAMPLES and set(found.values()) == {1}
    assert len((tmp_path / "log").read_text().split()) - RUNS * SAMPLES <= kills  # at most the sample in flight
    damaged = [one for _, _, wrong in audit_runs(tmp_path) for one in wrong]
    assert not damaged and all(RunFolder(tmp_path / "runs", VALUE | {"cell": cell}).finished for cell in range(RUNS))

"""Sweeps on a real SLURM, with jobs that are killed, cancelled and queued again (`make test-slurm`)."""

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kvbench.store import audit
from kvbench.sweeps import status
from tests.support.recorded_runs import read_whole_lines
from tests.support.repository import ROOT
from tests.support.slurm_cluster import find_missing_programs, run_cluster, wait_until

SAMPLES = 24
CELLS = ["method=snapkv,keydiff,dropkv,sink", "budget=0.05,0.1,0.3,0.5"]

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def environment():
    assert not find_missing_programs(), f"SLURM is not installed: no {', '.join(find_missing_programs())}"
    with run_cluster() as found:
        yield found


def begin(results, environment):
    """The command that a user types; 16 cells."""
    launcher = ["gpus_per_node=null", "cpus_per_task=1", "timeout_min=20", "array_parallelism=2", "signal_delay_s=5"]
    arguments = ["-m", "hydra/launcher=slurm", *(f"hydra.launcher.{own}" for own in launcher), *CELLS]
    arguments += ["task.subtasks=niah_single_1", f"task.samples={SAMPLES}", "task.length=1024", f"results={results}"]
    own = environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "run.py", *arguments], cwd=ROOT, env=own, **pipes)


def at_work(environment, busy):
    """(job, process) of a job that runs and has written a record, and is not among `busy`."""
    listed = subprocess.run(["squeue", "-h", "-t", "RUNNING", "-o", "%A %i"], env=environment, capture_output=True)
    for line in listed.stdout.decode().splitlines():
        number, job = line.split()
        if job in busy:
            continue
        for process in Path("/proc").glob("[0-9]*"):
            try:
                own = (process / "environ").read_bytes().split(b"\0")
                command = (process / "cmdline").read_bytes()
            except OSError:
                continue
            if f"SLURM_JOB_ID={number}".encode() in own and b"submitit.core._submit" in command:
                return job, int(process.name)
    return None


def records(results):
    """How often each sample of each run stands in the files."""
    found = Counter()
    for file in (results / "runs").glob("*/records*.jsonl"):
        for record in read_whole_lines(file):
            found[file.parent.name, record["uid"]] += 1
    return found


def test_a_sweep_survives_what_happens_to_its_jobs(environment, tmp_path):
    """Of 16 jobs one is queued again, one cancelled, one killed; the same command then finishes what they left."""
    first, harmed = begin(tmp_path, environment), []
    harms = {
        "queued again": lambda job, process: subprocess.run(["scontrol", "requeue", job], env=environment, check=True),
        "cancelled": lambda job, process: subprocess.run(["scancel", job], env=environment, check=True),
        "killed": lambda job, process: os.kill(process, signal.SIGKILL),
    }
    for harm in harms.values():
        before, found = sum(records(tmp_path).values()), []

        def working(before=before, found=found):
            assert first.poll() is None, first.communicate()[1]
            found[:] = [at_work(environment, harmed)]
            return found[0] is not None and sum(records(tmp_path).values()) > before + 2

        wait_until(working, 300)
        harm(*found[0])
        harmed.append(found[0][0])
    out, err = first.communicate(timeout=900)
    assert out.startswith("16 cells: 16 missing") and first.returncode != 0, err  # two jobs did not come back
    cells = dict(status.read_states(tmp_path, status.find_newest(tmp_path)))
    assert len(cells) == 16 and sum(own.name == "done" for own in cells.values()) >= 13, cells
    second = begin(tmp_path, environment)
    out, err = second.communicate(timeout=900)
    assert second.returncode == 0, err
    assert all(own.name == "done" for _, own in status.read_states(tmp_path, status.find_newest(tmp_path)))
    found = records(tmp_path)
    assert len(found) == 17 * SAMPLES and set(found.values()) == {1}
    assert not [wrong for _, _, wrong in audit.audit_runs(tmp_path) if wrong]

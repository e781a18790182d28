"""Jobs that SLURM refuses, that an error ends, or that are killed are one line. There is no SLURM here."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import submitit
from submitit.core.utils import FailedJobError, UncompletedJobError

from kvbench.sweeps import plan, slurm
from tests.support.command_line import run_cli

JOBS = ("-m", "hydra/launcher=slurm", "method=snapkv", "budget=0.1,0.2,0.3", "task=ruler", "limit=1")


class Job:
    """A job that ended: with nothing, with the error that it left, or killed."""

    def __init__(self, number: int, error: Exception | None, killed: bool = False) -> None:
        self.job_id, self.error, self.killed = f"12_{number}", error, killed

    def exception(self) -> Exception | None:
        if self.killed:
            raise UncompletedJobError("no output\nwas produced")
        return self.error


@pytest.fixture
def launch(monkeypatch, capsys, tmp_path):
    """Runs a sweep of three jobs on a stand-in for SLURM: exit code, output and error."""

    def launched(jobs, refused: Exception | None = None) -> tuple[int, str, str]:
        left = iter(jobs)

        def submit(job: slurm.CellJob) -> Job:
            if refused is not None:
                raise refused
            return next(left)

        executor = SimpleNamespace(update_parameters=lambda **_: None, batch=nullcontext, submit=submit)
        monkeypatch.setattr(submitit, "AutoExecutor", lambda *_, **__: executor)
        monkeypatch.setattr(plan, "which", lambda name: name)
        return run_cli([*JOBS, f"results={tmp_path}"], monkeypatch, capsys)

    return launched


def test_jobs_that_failed_are_one_line(launch):
    jobs = [Job(0, FailedJobError("Job failed with trace:\nTraceback …")), Job(1, None), Job(2, None, killed=True)]
    code, _, err = launch(jobs)
    assert code == 1
    [line] = [line for line in err.splitlines() if line.startswith("kvbench: ")]
    assert line.startswith("kvbench: 2 jobs of 3 failed or did not end: 12_0, 12_2; their logs lie in ")
    assert line.endswith(".submitit; the same command goes on") and "Traceback" not in err


def test_jobs_that_are_refused_are_one_line(launch):
    code, _, err = launch([], FailedJobError("sbatch: error: invalid partition\nsbatch: error: Batch job failed"))
    line = "sbatch: error: invalid partition sbatch: error: Batch job failed"
    assert (code, err) == (2, f"kvbench: hydra/launcher=slurm: sbatch refuses the jobs ({line})\n")


def test_jobs_that_end_well_leave_the_exit_code_of_their_cells(launch):
    assert launch([Job(0, None), Job(1, None), Job(2, None)])[::2] == (0, "")

"""Launch the cells of a sweep as jobs on SLURM, one job a cell, through submitit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit
from omegaconf import DictConfig, OmegaConf

from kvbench.stops import waiting
from kvbench.validation import SettingError, summarize

SHARED = (
    "name",
    "nodes",
    "tasks_per_node",
    "gpus_per_node",
    "cpus_per_task",
    "mem_gb",
    "timeout_min",
    "stderr_to_stdout",
)


@dataclass(frozen=True)
class CellJob:
    """What a job does. It is pickled, and unpickled on the machine that the job runs on."""

    work: Callable[[Path, int, Sequence[str], Sequence[str]], None]
    folder: Path
    """The sweep's."""
    number: int
    """The cell's."""
    overrides: tuple[str, ...]
    config_folders: tuple[str, ...] = ()
    """Folders of configuration files beside conf/."""

    def __call__(self) -> None:
        self.work(self.folder, self.number, self.overrides, self.config_folders)

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """What submitit queues when the job's time is over: the same again, which continues where its records end."""
        return submitit.helpers.DelayedSubmission(self)


def launch_jobs(settings: DictConfig, jobs: Sequence[CellJob]) -> list[str]:
    """Submit one job array and wait until all jobs have ended.

    Args:
        settings: Those of conf/hydra/launcher/slurm.yaml.
        jobs: What the jobs do.

    Returns:
        The ids of the jobs that were killed or cancelled, or that an error ended.

    Raises:
        SettingError: SLURM refuses the jobs.
    """
    plain = OmegaConf.to_container(settings, resolve=True)
    assert isinstance(plain, dict)  # of a DictConfig
    parameters: dict[str, Any] = {str(name): value for name, value in plain.items() if value is not None}
    parameters.pop("_target_", None)
    requeued = parameters.pop("max_num_timeout", 0)
    logs = jobs[0].folder / ".submitit" / "%j"
    executor = submitit.AutoExecutor(logs, cluster="slurm", slurm_max_num_timeout=requeued)
    executor.update_parameters(
        **{name if name in SHARED else f"slurm_{name}": value for name, value in parameters.items()}
    )
    try:
        with executor.batch():
            submitted = [executor.submit(job) for job in jobs]
    except (submitit.core.utils.FailedSubmissionError, submitit.core.utils.FailedJobError) as error:
        raise SettingError(f"hydra/launcher=slurm: sbatch refuses the jobs ({summarize(error)})") from None
    with waiting():
        return [str(job.job_id) for job in submitted if has_failed(job)]


def has_failed(job: Any) -> bool:
    """Wait for a job, and return whether it was killed or cancelled, or an error ended it."""
    try:
        return job.exception() is not None
    except submitit.core.utils.UncompletedJobError:
        return True

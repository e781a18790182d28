"""Execute the runs of the cells of a sweep, in this process or in several, and keep what they have loaded."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from kvbench.engine.spending import spend
from kvbench.runs.resources import Resources
from kvbench.runs.runner import execute_run, execute_runs
from kvbench.runs.spec import RunSpec
from kvbench.runs.workers import Workers
from kvbench.store.run_folder import RunFolder


class Executor:
    """Executes runs. A context manager: at its end, the processes that it has started end.

    Args:
        results: The results folder.
    """

    def __init__(self, results: Path) -> None:
        self.results = results
        self.bench: Resources | None = None
        self.workers: Workers | None = None

    def execute(
        self, runs: Sequence[RunSpec], groups: Sequence[Sequence[RunSpec]] = (), count: int = 1
    ) -> list[dict[str, dict]]:
        """Make the missing records of runs, and return all records of each run by uid.

        Args:
            runs: Runs with the same checkpoint, device and task.
            groups: Runs that read prompts together with these. They are executed first.
            count: The number of processes.
        """
        bench = self.bench = Resources(runs[0]) if self.bench is None else self.bench.renew(runs[0])
        if count > 1:
            with spend("workers"):
                bench.accused |= self._find_workers(count, runs[0].device).execute([*groups, *([run] for run in runs)])
                if not all(RunFolder(self.results / "runs", run.value).finished for run in runs):
                    self.close()  # this process executes them, and needs the memory of the GPU
        else:
            self.close()
            for group in groups:
                execute_runs(group, self.results, bench)
        return [execute_run(run, self.results, bench) for run in runs]

    def _find_workers(self, count: int, device: str) -> Workers:
        """Return so many processes for a device. Others are ended."""
        if self.workers is not None and (len(self.workers.processes), self.workers.device) != (count, device):
            self.close()
        if self.workers is None:
            self.workers = Workers(self.results, count, device)
        return self.workers

    def close(self, at_once: bool = False) -> None:
        """End the processes (`Workers.close`)."""
        if self.workers is not None:
            self.workers.close(at_once)
            self.workers = None

    def __enter__(self) -> "Executor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with spend("workers"):
            self.close(at_once=kind is not None)

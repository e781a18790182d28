"""Several processes that share the samples of runs, on GPUs one each. The store's claims see to it that every sample is
answered once; what one leaves undone when it dies, the others do.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread

import torch

from kvbench.runs.checks import check_workers
from kvbench.runs.resources import Resources
from kvbench.runs.runner import execute_runs
from kvbench.runs.spec import RunSpec
from kvbench.validation import (
    ContractError,
    SettingError,
    Terminated,
    describe_write_error,
    ignore_interrupts,
    raise_on_sigterm,
)

PATIENCE = 10  # seconds that a process which is told to end may take to close what it has open


def count_workers(workers: object, device: str) -> int:
    """The number of processes, auto: one a GPU; SettingError where there are fewer GPUs."""
    if workers == "auto":
        return max(1, torch.cuda.device_count()) if device == "cuda" else 1
    check_workers(workers)
    if device == "cuda" and workers > torch.cuda.device_count():
        raise SettingError(f"workers={workers}: a GPU each, and there are {torch.cuda.device_count()}")
    return workers


def execute_in_workers(companies: Sequence[Sequence[RunSpec]], results: Path, workers: int) -> None:
    """Execute the runs, those of one company together and one company after the other, in `workers` processes at once.
    Whoever asks for a run's records next finds them on disk; a process that died is reported and what it did is kept.
    """
    context, gpus = get_context("spawn"), os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    gpus = gpus if gpus != [""] else [str(index) for index in range(workers)]
    processes = []
    try:
        for index in range(workers):
            own = {"CUDA_VISIBLE_DEVICES": gpus[index]} if companies[0][0].device == "cuda" else {}
            own |= {"TQDM_DISABLE": "1"} if index else {}
            process = context.Process(target=run_worker, args=(companies, results), daemon=True)
            with (
                set_environment(own),
                ignore_interrupts(),
            ):  # of the new process, from its first import on: tqdm looks then
                process.start()
            processes.append(process)
        for index, process in enumerate(processes):
            process.join()
            if process.exitcode:
                print(f"kvbench: worker {index} ended with code {process.exitcode}", file=sys.stderr)
    finally:
        for process in processes:  # still at work where this one was stopped
            process.terminate()
        for process in processes:
            process.join(PATIENCE)
            process.kill()
            process.join()


@contextmanager
def set_environment(own: dict[str, str]) -> Iterator[None]:
    """Inside, these variables are set."""
    before = dict(os.environ)
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name)
        os.environ.update({name: value for name, value in before.items() if name in own})


def run_worker(companies: Sequence[Sequence[RunSpec]], results: Path) -> None:
    """What a process does. A setting that cannot be used and a contract that is broken are said by whoever asks for the
    records; so is a disk that cannot be written, which that process finds as this one did.
    """
    Thread(target=exit_with_parent, daemon=True).start()
    bench = Resources(companies[0][0])
    try:
        with raise_on_sigterm():
            for runs in companies:
                with suppress(ContractError):
                    execute_runs(runs, results, bench)
    except (SettingError, Terminated):
        pass
    except OSError as error:
        if describe_write_error(error) is None:
            raise


def exit_with_parent() -> None:
    """End this process when its parent has ended, killed or not: nobody waits for it any more."""
    parent_process().join()
    os._exit(1)

"""Execute runs in several processes that share the samples; on GPUs each process has one.

The store's claims make sure that every sample is answered once. If a process dies, the others answer the samples that
it had claimed.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread

import torch

from kvbench.engine.spending import start_counting
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

PATIENCE = 10  # seconds that a process may take to close its files before it is killed


def count_workers(workers: object, device: str) -> int:
    """Return the number of processes; ``auto`` is one for each GPU. SettingError if there are fewer GPUs."""
    if workers == "auto":
        return max(1, torch.cuda.device_count()) if device == "cuda" else 1
    check_workers(workers)
    assert isinstance(workers, int)
    if device == "cuda" and workers > torch.cuda.device_count():
        raise SettingError(f"workers={workers}: a GPU each, and there are {torch.cuda.device_count()}")
    return workers


def execute_in_workers(companies: Sequence[Sequence[RunSpec]], results: Path, workers: int) -> None:
    """Execute runs in several processes at once and wait for them. The records are on disk then.

    A process that died is reported on stderr; its records are kept.

    Args:
        companies: Groups of runs that share prefills. One group is executed after the other.
        results: The results folder.
        workers: The number of processes.
    """
    context, gpus = get_context("spawn"), os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    gpus = gpus if gpus != [""] else [str(index) for index in range(workers)]
    processes = []
    try:
        for index in range(workers):
            own = {"CUDA_VISIBLE_DEVICES": gpus[index]} if companies[0][0].device == "cuda" else {}
            own |= {"TQDM_DISABLE": "1"} if index else {}
            process = context.Process(target=run_worker, args=(companies, results), daemon=True)
            with set_environment(own), ignore_interrupts():  # before the new process imports tqdm, which reads it
                process.start()
            processes.append(process)
        for index, process in enumerate(processes):
            process.join()
            if process.exitcode:
                print(f"kvbench: worker {index} ended with code {process.exitcode}", file=sys.stderr)
    finally:
        for process in processes:  # they still work if this process was stopped
            process.terminate()
        for process in processes:
            process.join(PATIENCE)
            process.kill()
            process.join()


@contextmanager
def set_environment(own: dict[str, str]) -> Iterator[None]:
    """Set environment variables inside."""
    before = dict(os.environ)
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name)
        os.environ.update({name: value for name, value in before.items() if name in own})


def run_worker(companies: Sequence[Sequence[RunSpec]], results: Path) -> None:
    """Execute runs; the main function of a process.

    It is silent about invalid settings, broken contracts and a disk that cannot be written. The process that asks for
    the records next finds them too, and says so.
    """
    Thread(target=exit_with_parent, daemon=True).start()
    bench, say_spending = Resources(companies[0][0]), start_counting(" of a worker")
    try:
        with raise_on_sigterm():
            for runs in companies:
                with suppress(ContractError):
                    execute_runs(runs, results, bench)
        say_spending()
    except (SettingError, Terminated):
        pass
    except OSError as error:
        if describe_write_error(error) is None:
            raise


def exit_with_parent() -> None:
    """End this process when its parent has ended, killed or not, because nobody waits for it any more."""
    parent = parent_process()
    assert parent is not None  # a worker is always started by another process
    parent.join()
    os._exit(1)

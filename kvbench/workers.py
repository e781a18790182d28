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

from kvbench.run import Run
from kvbench.runner import Bench, execute_all
from kvbench.settings import ContractError, SettingError, whole


def check(workers: object, device: str) -> int:
    """The number of processes, auto: one a GPU; SettingError where there are fewer GPUs."""
    if workers == "auto":
        return max(1, torch.cuda.device_count()) if device == "cuda" else 1
    whole("workers", workers, 1)
    if device == "cuda" and workers > torch.cuda.device_count():
        raise SettingError(f"workers={workers}: a GPU each, and there are {torch.cuda.device_count()}")
    return workers


def share(companies: Sequence[Sequence[Run]], results: Path, workers: int) -> None:
    """Execute the runs, those of one company together and one company after the other, in `workers` processes at once.
    Whoever asks for a run's records next finds them on disk; a process that died is reported and what it did is kept.
    """
    context, gpus = get_context("spawn"), os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    gpus = gpus if gpus != [""] else [str(index) for index in range(workers)]
    processes = []
    for index in range(workers):
        own = {"CUDA_VISIBLE_DEVICES": gpus[index]} if companies[0][0].device == "cuda" else {}
        own |= {"TQDM_DISABLE": "1"} if index else {}
        processes.append(context.Process(target=work, args=(companies, results), daemon=True))
        with environment(own):  # of the new process, from its first import on: tqdm looks when it is imported
            processes[-1].start()
    for index, process in enumerate(processes):
        process.join()
        if process.exitcode:
            print(f"kvbench: worker {index} ended with code {process.exitcode}", file=sys.stderr)


@contextmanager
def environment(own: dict[str, str]) -> Iterator[None]:
    """Inside, these variables are set."""
    before = dict(os.environ)
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name)
        os.environ.update({name: value for name, value in before.items() if name in own})


def work(companies: Sequence[Sequence[Run]], results: Path) -> None:
    """What a process does. What cannot be used, or breaks its contract, is said by whoever asks for the records."""
    Thread(target=follow, daemon=True).start()
    bench = Bench(companies[0][0])
    for runs in companies:
        with suppress(SettingError, ContractError):
            execute_all(runs, results, bench)


def follow() -> None:
    """End this process when its parent has ended, killed or not: nobody waits for it any more."""
    parent_process().join()
    os._exit(1)

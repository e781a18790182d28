"""Several processes that share the samples of runs, on GPUs one each. The store's claims see to it that every sample is
answered once; what one leaves undone when it dies, the others do.
"""

import os
import sys
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

import torch

from kvbench.run import Run
from kvbench.runner import Bench, execute
from kvbench.settings import SettingError, whole


def check(workers: object, device: str) -> int:
    """The number of processes; SettingError where there are fewer GPUs."""
    whole("workers", workers, 1)
    if device == "cuda" and workers > torch.cuda.device_count():
        raise SettingError(f"workers={workers}: a GPU each, and there are {torch.cuda.device_count()}")
    return workers


def share(runs: Sequence[Run], results: Path, workers: int) -> None:
    """Execute the runs, one after the other, in `workers` processes at once. Whoever asks for a run's records next
    finds them on disk; a process that died is reported and what it did is kept.
    """
    context, gpus = get_context("spawn"), os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    gpus = gpus if gpus != [""] else [str(index) for index in range(workers)]
    processes = []
    for index in range(workers):
        environment = {"CUDA_VISIBLE_DEVICES": gpus[index]} if runs[0].device == "cuda" else {}
        environment |= {"TQDM_DISABLE": "1"} if index else {}
        processes.append(context.Process(target=work, args=(runs, results, environment), daemon=True))
    for process in processes:
        process.start()
    for index, process in enumerate(processes):
        process.join()
        if process.exitcode:
            print(f"kvbench: worker {index} ended with code {process.exitcode}", file=sys.stderr)


def work(runs: Sequence[Run], results: Path, environment: dict[str, str]) -> None:
    """What a process does; `environment` is set before anything asks for a GPU."""
    os.environ.update(environment)
    if runs[0].device == "cpu":
        torch.set_num_threads(1)
    bench = Bench(runs[0])
    for run in runs:
        execute(run, results, bench)

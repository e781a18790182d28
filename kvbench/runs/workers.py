"""Execute runs in several processes that share the samples. On GPUs each process uses one, which others may share.

The store's claims make sure that every sample is answered once. If a process dies, the others answer the samples that
it had claimed.
"""

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partialmethod
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn

import torch
from tqdm import tqdm

from kvbench.engine.spending import spend, start_counting
from kvbench.engine.timing import clear
from kvbench.runs.fork_server import replace_environment, start_fork_server
from kvbench.runs.resources import Resources
from kvbench.runs.runner import execute_runs, make_records_folder
from kvbench.runs.spec import RunSpec
from kvbench.stops import Terminated, refuse_exits, stop_at_safe_points, waiting
from kvbench.store.run_folder import RunFolder
from kvbench.validation import ContractError, SettingError, describe_write_error

PATIENCE = 10  # seconds that a process may take to close its files before it is killed


def count_workers(workers: int | str, device: str) -> int:
    """Return the number of processes for the setting `workers`; ``auto`` is one for each GPU, and one on a CPU."""
    if isinstance(workers, int):
        return workers
    return max(1, torch.cuda.device_count()) if device == "cuda" else 1


def choose_gpus(count: int, visible: str | None, available: int) -> list[str]:
    """Return the GPU of each process. The GPUs take turns, so that they have equally many processes, or one more.

    Args:
        count: The number of processes.
        visible: CUDA_VISIBLE_DEVICES, which names GPUs; None or "" if it is not set.
        available: The number of GPUs that CUDA finds. It ignores names from the first unknown one on.

    Returns:
        What CUDA_VISIBLE_DEVICES must be in each process.
    """
    names = visible.split(",")[:available] if visible else list(map(str, range(available)))
    return [names[number % len(names)] for number in range(count)]


def share_threads(threads: int, processes: int) -> int:
    """Return how many of a process's CPU threads each of several processes may have.

    Threads of small operations wait for each other in a loop. With more of them than processors, an operation can take
    a hundred times as long.
    """
    return max(1, threads // processes)


class Workers:
    """Processes that execute runs at once, from the first call of `execute` to `close`.

    A process keeps what it has loaded from call to call. One that died is reported on stderr and replaced at the next
    call; its records are kept.

    Args:
        results: The results folder.
        count: The number of processes.
        device: "cpu" or "cuda".

    Attributes:
        gpus: The GPU of each process (`choose_gpus`); empty on a CPU.
    """

    def __init__(self, results: Path, count: int, device: str) -> None:
        self.results, self.device = results, device
        self.processes: list[tuple[Any, Connection] | None] = [None] * count
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.gpus = choose_gpus(count, visible, torch.cuda.device_count()) if device == "cuda" else []

    def execute(self, groups: Sequence[Sequence[RunSpec]]) -> dict[str, str]:
        """Execute runs and wait for them. The records are on disk then.

        Args:
            groups: Groups of runs that share prefills. One group is executed after the other, and finished ones are
                left out.

        Returns:
            Whom the processes accuse (`Resources.accused`).

        Raises:
            SettingError: The results folder cannot be used.
        """
        root = self.results / "runs"
        with make_records_folder(self.results, root):
            left = [group for group in groups if not all(RunFolder(root, run.value).finished for run in group)]
        if not left:
            return {}
        for index, process in enumerate(self.processes):
            worker = self.processes[index] = process or self._start(index)
            with suppress(BrokenPipeError):  # it has died; `_wait` says so
                worker[1].send(left)
        return {name: line for index in range(len(self.processes)) for name, line in self._wait(index).items()}

    def _start(self, index: int) -> tuple[Any, Connection]:
        """Start a process."""
        context = start_fork_server()
        environment, sharing = dict(os.environ), 1
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"], sharing = self.gpus[index], self.gpus.count(self.gpus[index])
        here, there = context.Pipe()
        arguments = there, self.results, environment, sharing, len(self.processes), index == 0
        process = context.Process(target=run_worker, args=arguments, daemon=True)
        process.start()
        there.close()  # so that `recv` fails if the process dies
        return process, here

    def _wait(self, index: int) -> dict[str, str]:
        """Wait until a process has done its work or died, and return whom it accuses."""
        assert (started := self.processes[index]) is not None  # `execute` has started it
        process, connection = started
        accused: dict[str, str] = {}
        try:
            with waiting():
                accused = connection.recv()
        except (EOFError, ConnectionResetError):
            process.join()
            self.processes[index] = None
            print(f"kvbench: worker {index} ended with code {process.exitcode}", file=sys.stderr)
        return accused

    def close(self, at_once: bool = False) -> None:
        """End the processes.

        Args:
            at_once: Whether they may still work. Otherwise each says first what its time was spent on.
        """
        workers = [worker for worker in self.processes if worker is not None]
        self.processes = [None] * len(self.processes)
        for process, connection in workers:
            if at_once:
                process.terminate()
            else:
                with suppress(OSError):
                    connection.send(None)
        for process, connection in workers:
            process.join(PATIENCE)
            process.kill()
            process.join()
            connection.close()


def run_worker(
    connection: Connection,
    results: Path,
    environment: Mapping[str, str],
    gpu_processes: int,
    processes: int,
    shows_progress: bool,
) -> None:
    """Execute the runs that arrive, and answer when they are done; the main function of a process.

    It is silent about invalid settings, broken contracts and a disk that cannot be written. The process that asks for
    the records next finds them too, and says so.

    Args:
        connection: Gives lists of groups of runs, and None at the end.
        results: The results folder.
        environment: The environment variables of the process. Packages that read theirs when they are imported have
            seen those of the time when the sweep was planned.
        gpu_processes: The number of processes that use the GPU, this one included; 1 on a CPU.
        processes: The number of processes that share the samples, this one included.
        shows_progress: Whether its progress bars and notes are shown. The bars count what all processes do.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    replace_environment(environment)
    if not shows_progress:  # TQDM_DISABLE would be too late, because tqdm is imported
        tqdm.__init__ = partialmethod(tqdm.__init__, disable=True)
    Thread(target=exit_with_parent, args=(os._exit,), daemon=True).start()
    bench: Resources | None = None
    say_spending = start_counting(" of a worker")
    with suppress(Terminated), stop_at_safe_points(), refuse_exits():
        while (groups := receive(connection)) is not None:
            try:
                for runs in groups:
                    if bench is None:
                        if runs[0].device != "cpu":  # there the number of threads may change the last bits of a result
                            torch.set_num_threads(share_threads(torch.get_num_threads(), processes))
                        bench = Resources(
                            runs[0], gpu_processes=gpu_processes, processes=processes, speaks=shows_progress
                        )
                    else:
                        bench = bench.renew(runs[0])
                    with suppress(ContractError):
                        execute_beside_others(runs, results, bench)
            except SettingError:
                pass
            except OSError as error:
                if describe_write_error(error) is None:
                    raise
            connection.send({} if bench is None else bench.accused)
        say_spending()


def execute_beside_others(runs: Sequence[RunSpec], results: Path, bench: Resources) -> None:
    """Execute runs like `execute_runs`, and leave what is left of them if the others need the memory of the GPU.

    The process that asks for the records executes what all have left, with the GPU to itself.
    """
    fits = False
    with suppress(torch.cuda.OutOfMemoryError):
        execute_runs(runs, results, bench)
        fits = True
    if not fits:  # not in an except block, whose error would keep tensors alive
        clear(runs[0].device)
        line = f"kvbench: no memory beside the other processes of the GPU, which get {len(runs)} runs of this one"
        tqdm.write(line, file=sys.stderr)


@spend("waiting")
def receive(connection: Connection) -> Sequence[Sequence[RunSpec]] | None:
    """Wait for groups of runs. None at the end, and if the process that sends them has died."""
    try:
        with waiting():
            groups: Sequence[Sequence[RunSpec]] | None = connection.recv()
    except EOFError:
        return None
    return groups


def exit_with_parent(end: Callable[[int], NoReturn]) -> None:
    """End this process when its parent has ended, killed or not, because nobody waits for it any more.

    Args:
        end: `os._exit`, as it was before `refuse_exits`.
    """
    parent = parent_process()
    assert parent is not None  # a worker is always started by another process
    parent.join()
    end(1)

"""Run a function in a process of its own that can be killed when an answer takes too long."""

import os
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Concatenate

from kvbench.stops import ignore_interrupts, waiting


class Worker:
    """A process that calls a function with one end of a pipe; this object holds the other end.

    What the process prints is thrown away. It ignores Ctrl-C, because whoever started it ends it.
    """

    def __init__(self, function: Callable[Concatenate[Connection, ...], None], *arguments: object) -> None:
        """Start the process.

        Args:
            function: A function of a module, which the process imports. It gets its end of the pipe first.
            arguments: Its other arguments, which are pickled.
        """
        context = get_context("spawn")  # not fork: the caller has threads
        self._pipe, its_end = context.Pipe()
        self.process = context.Process(target=_run, args=(function, its_end, *arguments), daemon=True)
        with ignore_interrupts():
            self.process.start()
        its_end.close()  # the process alone holds it now, so that the pipe ends when the process does

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()

    def send(self, request: object) -> None:
        """Send a request.

        Raises:
            OSError: The process has ended.
        """
        self._pipe.send(request)

    def receive(self, seconds: float) -> Any:
        """Wait for the next answer, at most so many seconds.

        Raises:
            TimeoutError: There is no answer in time. The process goes on.
            EOFError: The process has ended.
        """
        with waiting():
            if not self._pipe.poll(max(seconds, 0)):
                raise TimeoutError
        try:
            return self._pipe.recv()
        except OSError as error:  # it was killed while the pipe was read
            raise EOFError from error

    def kill(self) -> None:
        """Kill the process, whatever it does."""
        self.process.kill()
        self.process.join()
        self._pipe.close()


def _run(function: Callable[Concatenate[Connection, ...], None], pipe: Connection, *arguments: object) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    function(pipe, *arguments)

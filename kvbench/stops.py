"""Stop at safe points: SIGTERM and Ctrl-C set a flag, and the program raises it where nothing is half done.

A handler that raises wherever the program happens to be can interrupt a library, which may turn the stop into another
error. Therefore:

* The first SIGTERM or Ctrl-C sets the flag. `check_stop` raises it between cells, samples, blocks of a prompt, and
  tokens.
* Inside `waiting` the signal raises at once, because a wait has nothing that could be half done.
* If no safe point comes within GRACE seconds, for example while weights are loaded, the stop is raised once wherever
  the program is. If a library swallows that, the next safe point raises it again.
* A second Ctrl-C ends the process at once, as a kill does. Records on the disk stay. A second SIGTERM changes nothing,
  because schedulers send several.

Code in C that does not return, such as one long operation on tensors, delays all but the kill. SLURM kills 30 seconds
after its SIGTERM; a killed run goes on like a stopped one.

`refuse_exits` is about the opposite: code of a method must not end the process at once.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import current_thread, main_thread
from types import FrameType

GRACE = 3.0  # seconds from a signal until it is raised outside safe points too; workers have 10 to end


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived. It stops the work as Ctrl-C does."""


class _Stop:
    """What was asked for. There is one, because signals belong to the process."""

    kind: type[KeyboardInterrupt] | None = None
    """What the first signal raises."""
    is_due = False
    """Whether `check_stop` has yet to raise it."""
    waits = 0
    """Depth of `waiting`."""


_stop = _Stop()


@contextmanager
def stop_at_safe_points() -> Iterator[None]:
    """Let SIGTERM and Ctrl-C inside raise Terminated and KeyboardInterrupt at safe points, at the latest at the end.

    A Ctrl-C that is ignored or handled by others stays so. Signals reach the main thread only; in another thread this
    does nothing.
    """
    global _stop
    if current_thread() is not main_thread():
        yield
        return
    outer, _stop = _stop, _Stop()
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, _note)}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, _note)
    try:
        yield
        check_stop()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _disarm()
        _stop = outer


def check_stop() -> None:
    """Raise the stop that a signal has asked for, if there is one; a safe point. It takes less than a microsecond.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed.
        Terminated: SIGTERM arrived.
    """
    if _stop.is_due:
        _raise()


@contextmanager
def waiting() -> Iterator[None]:
    """Let a signal raise at once inside, where this process only waits for another one, for a lock or for time."""
    if current_thread() is not main_thread():
        yield
        return
    stop = _stop
    stop.waits += 1
    try:
        check_stop()
        yield
    finally:
        stop.waits -= 1


@contextmanager
def ignore_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C inside. Processes that start inside ignore it for ever: the process that started them ends them."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def refuse_exits() -> Iterator[None]:
    """Let functions of `os` that end this process at once, or make another program of it, raise SystemExit inside.

    A hook of a method that calls one would end all runs without a word, with the exit code that it likes. Processes
    that this one forks may call them.
    """
    process, before = os.getpid(), {name: getattr(os, name) for name in ("_exit", "abort", "execv", "execve")}

    def refuse(name: str, *given: object) -> object:
        if os.getpid() != process:
            return before[name](*given)
        raise SystemExit(f"os.{name} would end the process")

    modules = os, sys.modules["posix"]
    for module in modules:
        for name in before:
            setattr(module, name, partial(refuse, name))
    try:
        yield
    finally:
        for module in modules:
            for name, function in before.items():
                setattr(module, name, function)


def _note(number: int, frame: FrameType | None) -> None:
    """Note a signal; its handler."""
    if number == signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the next one ends the process, even inside C
    if _stop.kind is not None:
        return
    _stop.kind, _stop.is_due = Terminated if number == signal.SIGTERM else KeyboardInterrupt, True
    if _stop.waits:
        _raise()
    if signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:  # otherwise somebody limits the time of what runs now
        signal.signal(signal.SIGALRM, _raise_late)
        signal.setitimer(signal.ITIMER_REAL, GRACE)


def _raise() -> None:
    if current_thread() is main_thread() and _stop.kind is not None:
        _stop.is_due = False
        _disarm()
        raise _stop.kind


def _raise_late(number: int, frame: FrameType | None) -> None:
    """Raise the stop wherever the program is. It stays due, because a library may swallow it."""
    if _stop.is_due and _stop.kind is not None:
        raise _stop.kind


def _disarm() -> None:
    if signal.getsignal(signal.SIGALRM) is _raise_late:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

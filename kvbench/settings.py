"""Settings that are wrong, said in one line that names the setting and what is allowed."""

import math
import os
import select
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NoReturn

UNREAD = 141  # exit code: what a shell says of a program that SIGPIPE ended


class SettingError(ValueError):
    """A setting cannot be used. The message is one line: `setting=value: what is allowed`."""


class ContractError(RuntimeError):
    """A method, an allocator, a codec or a task broke its contract. The message is one line that names it and its hook.

    `spoils_model` says that the weights of the model were changed: whoever holds the model must load it again.
    """

    def __init__(self, message: str, spoils_model: bool = False) -> None:
        super().__init__(message)
        self.spoils_model = spoils_model


class Arguments(ArgumentParser):
    """What the command `python -m <module>` takes; SettingError, with its usage, for anything else."""

    def __init__(self, module: str, doc: str | None) -> None:
        super().__init__(f"python -m {module}", description=(doc or "").partition("\n")[0])

    def error(self, message: str) -> NoReturn:
        raise SettingError(f"{message}; {' '.join(self.format_usage().split())}")


def answered(work: Callable[[], int | None]) -> int:
    """The exit code of a command: `work`'s; 2 and one line on stderr for a setting that cannot be used, 1 and one line
    for a method or task that broke its contract. Where nobody reads what it prints any more (`| head -1`), it ends in
    silence.
    """
    try:
        try:
            return work() or 0
        except (SettingError, ContractError) as error:
            print(f"kvbench: {error}", file=sys.stderr)
            return 1 if isinstance(error, ContractError) else 2
        finally:
            print(end="", flush=True)  # now, not when Python ends
    except BrokenPipeError:
        if not unread(sys.stdout.fileno()):
            raise  # another pipe broke
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would fail when Python ends
        return UNREAD


def unread(descriptor: int) -> bool:
    """Whether it is a pipe or socket whose reader is gone."""
    asked = select.poll()
    asked.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in asked.poll(0))


def choose(name: str, value: object, allowed: Iterable[object]) -> None:
    """Raise a SettingError unless `value` is one of `allowed`."""
    allowed = list(allowed)
    if value not in allowed:
        raise SettingError(f"{name}={value}: choose one of {', '.join(map(str, allowed))}")


def several(
    name: str, value: object, allowed: Sequence[str], sets: Mapping[str, Sequence[str]] | None = None
) -> list[str]:
    """The subtasks that `all`, the name of one of the `sets`, one of `allowed` or a list of different ones stands for;
    SettingError for others.
    """
    sets = {**(sets or {}), "all": allowed}
    names = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    for one in names:
        choose(name, one, allowed if len(names) > 1 else (*sets, *allowed))
    if not names or len(set(names)) < len(names):
        raise SettingError(f"{name}={names}: {', '.join(sets)}, one subtask, or a list of different ones")
    return list(sets.get(names[0], names)) if len(names) == 1 else names


def writable(name: str, folder: Path) -> None:
    """Raise a SettingError unless `folder` can be written, or made; nothing is."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise SettingError(f"{name}={folder}: a folder that can be written")


def whole(name: str, value: object, least: int) -> None:
    """Raise a SettingError unless `value` is an int (no bool) of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SettingError(f"{name}={value}: a whole number of at least {least}")


def odd(name: str, value: object) -> None:
    """Raise a SettingError unless `value` is an odd int of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value % 2 == 0:
        raise SettingError(f"{name}={value}: an odd whole number of at least 1")


def number(value: object) -> bool:
    """Whether `value` is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def part(share: float, count: int) -> int:
    """⌊share · count⌋ in exact decimal arithmetic: int(0.29 * 100) would be 28."""
    return int(Fraction(str(share)) * count)

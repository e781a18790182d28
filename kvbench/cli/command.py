"""What all commands share: their parser, their exit codes, and the one line that says what stopped them."""

import os
import select
import shutil
import signal
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from kvbench.stops import Terminated, refuse_exits, stop_at_safe_points
from kvbench.validation import ContractError, SettingError, describe_write_error, require_int, require_writable

READER_GONE = 141  # exit code: what a shell says of a program that SIGPIPE ended


class CommandParser(ArgumentParser):
    """The parser of `kvbench <command>`.

    Args:
        command: The command's name.
        doc: The docstring of its module. The help prints all of it.
        help_option: Whether `--help` prints that. A command with a help of its own reads the option itself.
    """

    def __init__(self, command: str, doc: str | None, help_option: bool = True) -> None:
        first, _, rest = (doc or "").strip().partition("\n")
        super().__init__(
            f"kvbench {command}",
            description=first,
            epilog=rest.strip("\n"),
            formatter_class=RawDescriptionHelpFormatter,
            add_help=help_option,
        )

    def add_results(self) -> None:
        """Add the folder of results, which need not be given."""
        self.add_argument(
            "results", nargs="?", default="results", type=Path, help="folder of results (default: results)"
        )

    def add_selection(self, use: str) -> None:
        """Add the folder of results and settings that choose runs, as `kvbench.store.runs.parse_selection` reads them.

        Args:
            use: What is done with the runs, for the help.
        """
        self.add_argument(
            "chosen",
            nargs="*",
            metavar="RESULTS | SETTING=VALUE,VALUE",
            help=f"folder of results (default: results); settings of the runs to {use}",
        )

    def error(self, message: str) -> NoReturn:
        """Raise a SettingError that says what is wrong and how the command is used."""
        raise SettingError(f"{message}; {' '.join(self.format_usage().split())}")


def read_number(name: str, text: str | None) -> int:
    """Return a positive whole number; SettingError if the text is none."""
    value = int(text) if text is not None and text.isdecimal() else text
    require_int(name, value, 1)
    return int(value)  # type: ignore[arg-type]


def require_file(option: str, path: Path) -> None:
    """Raise a SettingError if a file cannot be written at this path, before anything is computed for it."""
    require_writable(option, path.parent)
    if path.is_dir():
        raise SettingError(f"{option} {path}: this is a folder; name a file")


def refuse_given(options: Namespace, names: Iterable[str], reason: str) -> None:
    """Raise a SettingError, which begins with the reason, if options were given that have no meaning here."""
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is not None]
    if given:
        raise SettingError(f"{reason}; leave out {', '.join(given)}")


def run_command(work: Callable[[], int | None]) -> int:
    """Run a command and return its exit code.

    Args:
        work: The command. It returns its exit code, or None for 0.

    Returns:
        What `work` returns. 2 for a setting that cannot be used, 1 for a method or task that broke its contract and for
        a file that cannot be written, 130 for Ctrl-C and 143 for SIGTERM: each of these is one line on stderr. 141, in
        silence, where nobody reads what the command prints any more (`| head -1`).
    """
    try:
        try:
            with stop_at_safe_points(), refuse_exits():
                return work() or 0
        except (SettingError, ContractError) as error:
            print(f"kvbench: {error}", file=sys.stderr)
            return 1 if isinstance(error, ContractError) else 2
        except KeyboardInterrupt as stop:
            print(f"kvbench: stopped{stop.args[0] if stop.args else ''}", file=sys.stderr)
            return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)
        except OSError as error:
            if (line := describe_write_error(error)) is None:
                raise
            print(f"kvbench: {line}", file=sys.stderr)
            return 1
        finally:
            print(end="", flush=True)  # now, not when Python ends
    except BrokenPipeError:
        if not is_reader_gone(sys.stdout.fileno()):
            raise  # another pipe broke
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would fail when Python ends
        return READER_GONE


def find_width() -> int:
    """Return the width of a table in characters: the terminal's, at least 60, or 120 without a terminal."""
    return max(shutil.get_terminal_size(fallback=(120, 24)).columns, 60)


def is_styled() -> bool:
    """Return whether standard output is a terminal that can show bold text, and the user did not set NO_COLOR."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


def require_extra(extra: str, *modules: str) -> None:
    """Refuse a command whose packages are not installed.

    Args:
        extra: The extra of kvbench that installs them.
        modules: What the command imports from them.

    Raises:
        SettingError: A module cannot be found. The message names the package's extra.
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise SettingError(f"{', '.join(missing)}: not installed; pip install 'kvbench[{extra}]' installs it")


def is_reader_gone(descriptor: int) -> bool:
    """Whether it is a pipe or socket whose reader is gone."""
    asked = select.poll()
    asked.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in asked.poll(0))

"""What all commands share: their parser, their exit codes, and the one line that says what stopped them."""

import os
import select
import shutil
import signal
import sys
from argparse import SUPPRESS, Action, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from kvbench.stops import Terminated, refuse_exits, stop_at_safe_points
from kvbench.validation import ContractError, SettingError, describe_write_error, require_int, require_writable

RESULTS = Path("results")  # the folder of results if none is given
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
        self.settings_name: str | None = None  # the argument that takes settings of a run, results among them

    def add_results(self, old: bool = True) -> None:
        """Add `--results`, the folder of results.

        Args:
            old: Whether 0.1 took the folder as an argument at this place, which `parse` still accepts.
        """
        text = f"folder of results (default: {RESULTS})"
        self.add_argument("--results", action=Once, default=RESULTS, type=Path, metavar="DIR", help=text)
        if old:
            self.add_argument("old_results", nargs="?", help=SUPPRESS)

    def add_selection(self, use: str) -> None:
        """Add `--results` and settings that choose runs, as `kvbench.store.runs.parse_filters` reads them.

        Args:
            use: What is done with the runs, for the help.
        """
        self.add_results(old=False)
        self.add_argument("filters", nargs="*", metavar="SETTING=VALUE,VALUE", help=f"settings of the runs to {use}")

    def add_settings(self, name: str, metavar: str, text: str, nargs: str = "*") -> None:
        """Add the settings of a run or a sweep, and `--results DIR`, which stands for the setting results=DIR."""
        self.add_results(old=False)
        self.add_argument(name, nargs=nargs, metavar=metavar, help=text)
        self.settings_name = name

    def add_old_set(self) -> None:
        """Accept settings behind `--set`, as 0.1 did, beside the argument `settings`."""
        self.add_argument("--set", nargs="+", action="extend", default=[], help=SUPPRESS)

    def parse(self, arguments: Sequence[str]) -> Namespace:
        """Return the options. Forms of 0.1 are accepted with a line on stderr.

        Raises:
            SettingError: The arguments cannot be used.
        """
        options = self.parse_intermixed_args(arguments)
        move_old_forms(options)
        if self.settings_name is not None and options.results is not RESULTS:
            add_setting(options.results, vars(options)[self.settings_name])
        return options

    def error(self, message: str) -> NoReturn:
        """Raise a SettingError that says what is wrong and how the command is used."""
        raise SettingError(f"{message}; {' '.join(self.format_usage().split())}")


class Once(Action):
    """The option for the folder of results, which is given once."""

    def __call__(
        self, parser: ArgumentParser, options: Namespace, value: object, option_string: str | None = None
    ) -> None:
        if options.results is not RESULTS:
            raise SettingError(f"{option_string} {value}: give only one folder of results")
        options.results = value


def add_setting(results: Path, settings: list[str]) -> None:
    """Add the setting `results` that `--results` stands for.

    Raises:
        SettingError: The settings have one already.
    """
    if any(word.partition("=")[0] == "results" for word in settings):
        raise SettingError(f"--results {results}: give only one folder of results")
    from kvbench.config.catalogue import quote_value

    settings.append(f"results={quote_value(str(results))}")


def move_old_forms(options: Namespace) -> None:
    """Put what was given as in 0.1 where it belongs: a folder of results as an argument, settings behind `--set`."""
    values = vars(options)
    if (folder := values.pop("old_results", None)) is not None:
        move_results(options, folder)
    for word in [text for text in values.get("filters", ()) if "=" not in text or "/" in text.partition("=")[0]]:
        if not Path(word).is_dir() and "/" not in word:
            raise SettingError(f"{word}: no SETTING=VALUE; --results DIR names a folder of results")
        move_results(options, word)
        options.filters.remove(word)
    if moved := values.pop("set", None):
        say_renamed(f"--set {' '.join(moved)}", " ".join(moved), "form")
        options.settings += moved


def move_results(options: Namespace, folder: str) -> None:
    """Take an argument for the folder of results, as 0.1 did, and say how it is given now.

    Raises:
        SettingError: There is a folder already.
    """
    if options.results is not RESULTS:
        raise SettingError(f"{folder}: give only one folder of results")
    say_renamed(folder, f"--results {folder}", "form")
    options.results = Path(folder)


def say_renamed(old: str, new: str, kind: str) -> None:
    """Say on stderr what an old name or form is now.

    Args:
        old: What was typed.
        new: What is typed now.
        kind: What is old, such as "name".
    """
    print(f"{old} is now {new}; the old {kind} goes in the next release", file=sys.stderr)


def read_number(name: str, text: str | None) -> int:
    """Return a positive whole number; SettingError if the text is none."""
    value = int(text) if text is not None and text.isdecimal() else text
    require_int(name, value, 1)
    return int(value)  # type: ignore[arg-type]


def parse_int(name: str, text: str, least: int) -> int:
    """Return the whole number that an argument gives.

    Raises:
        SettingError: The text is no whole number, or one below `least`.
    """
    if not (text.isascii() and text.isdecimal() and int(text) >= least):
        raise SettingError(f"{name}={text}: a whole number of at least {least}")
    return int(text)


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
        except ModuleNotFoundError as error:
            if error.name != "hydra":  # which a run needs first
                raise
            print(
                "kvbench: this Python has no hydra; `make setup` makes .venv/bin/python, which has it", file=sys.stderr
            )
            return 2
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

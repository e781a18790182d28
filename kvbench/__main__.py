"""`kvbench <command> …`, or `python -m kvbench <command> …`: start a command of kvbench/cli/.

Each command is a module, which is imported only when it is asked for. The help reads the first line of each module
without importing any of them, so it needs neither torch nor pandas nor Hydra.
"""

import ast
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import chain
from pathlib import Path

from kvbench.cli import GROUPS
from kvbench.cli.command import run_command
from kvbench.validation import SettingError, describe_choices

FOLDER = Path(__file__).resolve().parent / "cli"


def list_commands() -> dict[str, str]:
    """Return every command with the first line of its module's docstring. No module is imported."""
    texts = {name: ast.get_docstring(ast.parse(find_file(name).read_bytes())) for name in chain(*GROUPS.values())}
    return {name: (text or "").partition("\n")[0] for name, text in texts.items()}


def find_file(command: str) -> Path:
    """Return the file of a command's module."""
    return FOLDER / f"{command.replace('-', '_')}.py"


def format_help() -> str:
    """Return what `kvbench --help` prints: the commands by group, with what each of them does."""
    known = list_commands()
    width = max(map(len, known))
    lines = ["usage: kvbench <command> [arguments …]", "       kvbench --help | --version", ""]
    for title, names in GROUPS.items():
        lines += [f"{title}:", *(f"  {name:{width}}  {known[name]}" for name in names), ""]
    return "\n".join([*lines, "kvbench <command> --help describes a command."])


def start(arguments: Sequence[str]) -> int:
    """Run the command that the first argument names with the other arguments, and return its exit code.

    Raises:
        SettingError: There is no such command.
    """
    if not arguments:
        print(format_help(), file=sys.stderr)
        return 2
    name, *rest = arguments
    if name in ("-h", "--help"):
        print(format_help())
        return 0
    if name == "--version":
        from kvbench.config.provenance import find_version

        print(f"kvbench {find_version()}")
        return 0
    known = list(chain(*GROUPS.values()))
    if name not in known:
        raise SettingError(f"{name}: no such command; {describe_choices(name, known, 'kvbench --help')}")
    return import_module(f"kvbench.cli.{name.replace('-', '_')}").main(rest) or 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; 2 and one line on stderr where there is no such command."""
    given = sys.argv[1:] if arguments is None else arguments
    return run_command(lambda: start(given))


if __name__ == "__main__":
    sys.exit(main())

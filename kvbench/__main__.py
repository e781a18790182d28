"""`kvbench <command> …`, or `python -m kvbench <command> …`: start a command of kvbench/cli/.

Each command is a module, which is imported only when it is called. The help reads the first line of each module
without importing any of them, so it needs neither torch nor pandas nor Hydra.
"""

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path

from kvbench.cli import COMMANDS, GROUPS, Command
from kvbench.cli.command import run_command, say_renamed
from kvbench.config.paths import CONF
from kvbench.validation import SettingError, describe_choices, find_closest

BEGIN = """kvbench measures what a KV-cache method costs and what it loses. Begin with

  kvbench run method=snapkv budget=0.1 task=ruler limit=5   run a method, and the full cache on the same samples
  kvbench results scores                                    print the scores of all runs
  kvbench results report                                    write a page to read in a browser
"""
HELP = ("-h", "--help")


def format_start() -> str:
    """Return what `kvbench` alone prints: three commands for a newcomer, and the groups."""
    words = [command.word for command in COMMANDS if not command.group]
    return "\n".join([BEGIN, "All commands:", *format_lines([("", ", ".join(words)), *list_groups()], "kvbench ")])


def format_help(group: str = "") -> str:
    """Return what `kvbench --help` or `kvbench GROUP --help` prints."""
    prefix = f"kvbench {group}".rstrip()
    lines = [f"usage: {prefix} COMMAND [arguments …]"]
    lines += ["", GROUPS[group], ""] if group else ["       kvbench --help | --version", "", "Commands:"]
    lines += format_lines((command.word, command.summary) for command in COMMANDS if command.group == group)
    if not group:
        lines += ["", "Groups of commands, which kvbench GROUP --help lists:", *format_lines(list_groups())]
    more = "" if group else " kvbench dev lists commands for kvbench's maintainers."
    return "\n".join([*lines, "", f"{prefix} COMMAND --help describes a command.{more}"])


def list_groups() -> list[tuple[str, str]]:
    """Return the groups that users need, each with what it is for."""
    return [(group, text) for group, text in GROUPS.items() if group != "dev"]


def format_lines(pairs: Iterable[tuple[str, str]], before: str = "") -> list[str]:
    """Return a line for each pair of a name and a text, in two columns."""
    pairs = list(pairs)
    width = max(len(name) for name, _ in pairs)
    return [f"  {before}{name:{width}}  {text}" for name, text in pairs]


def find_command(words: Sequence[str]) -> tuple[Command, Sequence[str]]:
    """Return the command that the first words name, and the words that follow. An old name prints a line on stderr.

    Raises:
        SettingError: There is no such command.
    """
    names = [" ".join(words[:count]) for count in (2, 1)]
    for name in names:
        for command in COMMANDS:
            if name == command.name:
                return command, words[len(name.split()) :]
    for name in names:
        for command in COMMANDS:
            if name in command.old and (name not in GROUPS or is_old_form(words)):
                say_renamed(f"kvbench {name}", f"kvbench {command.name}", "name")
                return command, words[len(name.split()) :]
    raise SettingError(describe_unknown(words))


def is_old_form(words: Sequence[str]) -> bool:
    """Return whether a command of 0.1 whose name is a group's name now was called, such as `results task=ruler`."""
    first = words[1] if len(words) > 1 else "-"
    is_argument = first.startswith("-") or "=" in first or Path(first).is_dir()
    return is_argument or "/" in first or (CONF / words[0] / f"{first}.yaml").exists()


def describe_unknown(words: Sequence[str]) -> str:
    """Return a line about words that name no command, with the commands that may be meant."""
    group = words[0]
    if group in GROUPS:
        known = [command.word for command in COMMANDS if command.group == group]
        return f"{group} {words[1]}: no such command; {describe_choices(words[1], known, f'kvbench {group} --help')}"
    places = {name: command.name for command in COMMANDS for name in (*command.old, command.word)}
    places |= {name: name for name in GROUPS}
    close = dict.fromkeys(f"kvbench {places[word]}" for word in find_closest(group, places, 3))
    meant = f"did you mean {' or '.join(close)}? kvbench --help lists all" if close else None
    return f"{group}: no such command; {meant or 'choose one that kvbench --help lists'}"


def start(arguments: Sequence[str]) -> int:
    """Run the command that the first arguments name with the other arguments, and return its exit code.

    Raises:
        SettingError: There is no such command.
    """
    words = list(arguments)
    if not words:
        print(format_start(), file=sys.stderr)
        return 2
    if words[0] in HELP:
        print(format_help())
        return 0
    if words[0] == "--version":
        from kvbench.config.provenance import find_version

        print(f"kvbench {find_version()}")
        return 0
    if words[0] in GROUPS and words[1:2] in ([HELP[0]], [HELP[1]]):
        print(format_help(words[0]))
        return 0
    if words[0] in GROUPS.keys() - {name for command in COMMANDS for name in command.old} and not words[1:]:
        print(format_help(words[0]), file=sys.stderr)
        return 2
    command, rest = find_command(words)
    return import_module(f"kvbench.cli.{command.module}").main(rest) or 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; 2 and one line on stderr where there is no such command."""
    given = sys.argv[1:] if arguments is None else arguments
    return run_command(lambda: start(given))


if __name__ == "__main__":
    sys.exit(main())

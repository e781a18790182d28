"""Check a local copy of a benchmark's data: print its rows and its fingerprint.

Examples:
  kvbench check data longbench /data/LongBench/data.zip
  kvbench check data longbench /data/LongBench/data.zip task.variant=e

For a copy that cannot be used, one line names the file, the line and the column, and the exit code is 2.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.command import CommandParser, run_command
from kvbench.validation import SettingError, require_choice


def make_parser() -> CommandParser:
    parser = CommandParser("check data", __doc__)
    parser.add_argument("task", help="a name of conf/task/ whose settings include a path")
    parser.add_argument("path", help="file or folder in the benchmark's official format")
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help="further settings of the task")
    return parser


def examine(name: str, path: str, settings: Sequence[str] = ()) -> str:
    """Return the number of rows of each subtask, a line each, and the fingerprint of the data.

    Raises:
        SettingError: There is no such task, it reads no data from a path, or the data cannot be used.
    """
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # `main` says once that a hub is out of reach
    from kvbench.config import catalogue
    from kvbench.config.compose import LISTED_BY, compose_config

    require_choice("TASK", name, catalogue.list_choices("task"), LISTED_BY)
    with catalogue.translate_errors():
        given = catalogue.resolve("task", compose_config([f"task={name}", *settings]).task)
    if "path" not in given:
        choices = [task for task in catalogue.list_choices("task") if "path" in compose_config([f"task={task}"]).task]
        raise SettingError(f"TASK={name}: its data is not read from one place; choose one of {', '.join(choices)}")
    task = catalogue.build("task", given | {"path": str(Path(path).expanduser())})
    task.check()
    lines = [f"{subtask:<28}{count:>8} rows" for subtask, count in task.inventory().items()]
    return "\n".join([*lines, f"fingerprint {task.fingerprint()}"])


def print_data(arguments: Sequence[str]) -> None:
    """Print the rows and the fingerprint."""
    given = make_parser().parse(arguments)
    print(examine(given.task, given.path, given.settings))


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: print_data(arguments))

"""Say whether a local copy of a benchmark's data can be used: its rows and its fingerprint.

    python -m kvbench check-data longbench /data/LongBench/data.zip

A copy that cannot be used is one line that names the file, the line and the column, and exit code 2.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # a hub out of reach is said once, by `main`

from kvbench.cli.command import run_command
from kvbench.config import catalogue
from kvbench.config.compose import compose_config
from kvbench.validation import SettingError, require_choice


def examine(name: str, path: str) -> str:
    """Rows of each subtask and the fingerprint; SettingError."""
    require_choice("TASK", name, catalogue.list_choices("task"))
    settings = catalogue.resolve("task", compose_config([f"task={name}"]).task)
    if "path" not in settings:
        own = [task for task in catalogue.list_choices("task") if "path" in compose_config([f"task={task}"]).task]
        raise SettingError(f"TASK={name}: its data is not read from one place; choose one of {', '.join(own)}")
    task = catalogue.build("task", settings | {"path": str(Path(path).expanduser())})
    task.check()
    lines = [f"{subtask:<28}{count:>8} rows" for subtask, count in task.inventory().items()]
    return "\n".join([*lines, f"fingerprint {task.fingerprint()}"])


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2:
        print("kvbench: make data TASK=<task> DATA=<file or folder in the official format>", file=sys.stderr)
        return 2
    return run_command(lambda: print(examine(*arguments)))

"""`python -m kvbench <command> …`: the commands of kvbench/cli/, one file each, imported when they are asked for."""

import ast
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from kvbench.cli.command import run_command

FOLDER = Path(__file__).resolve().parent / "cli"


def list_commands() -> dict[str, str]:
    """Return every command with the first line of its file; none is imported."""
    names = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("__init__", "command"))
    texts = {name: ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_bytes())) for name in names}
    return {name.replace("_", "-"): text.partition("\n")[0] for name, text in texts.items()}


def main(given: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names, with the others; return its exit code.

    2, and a line for each command, where there is no such command.
    """
    given = sys.argv[1:] if given is None else given
    known = list_commands()
    if not given or given[0] not in known:
        print("kvbench:", f"{given[0]}: no such command;" if given else "which command?", "one of", file=sys.stderr)
        for name, text in known.items():
            print(f"  {name:{max(map(len, known))}}  {text}", file=sys.stderr)
        return 2
    name, *rest = given
    return run_command(lambda: import_module(f"kvbench.cli.{name.replace('-', '_')}").main(rest))


if __name__ == "__main__":
    sys.exit(main())

"""Let math-verify judge answers that it has not seen.

python -m kvbench grade results
"""

from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.command import CommandParser, run_command
from kvbench.integrations.math_verify import SECONDS, grade_all


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: grade_runs(arguments))


def grade_runs(arguments: Sequence[str]) -> None:
    parser = CommandParser("kvbench grade", __doc__)
    parser.add_argument("results", nargs="?", default="results", type=Path)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for one answer")
    given = parser.parse_args(arguments)
    grade_all(given.results, given.seconds)

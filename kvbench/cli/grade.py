"""Let math-verify judge the answers that it has not judged yet.

Examples:
  kvbench results grade --seconds 20
"""

from collections.abc import Sequence

from kvbench.cli.command import CommandParser, run_command


def make_parser() -> CommandParser:
    parser = CommandParser("results grade", __doc__)
    parser.add_results()
    parser.add_argument("--seconds", type=float, help="time limit for one answer (default: 10)")
    return parser


def grade_runs(arguments: Sequence[str]) -> None:
    """Judge the answers of every run that asks for it."""
    given = make_parser().parse(arguments)
    from kvbench.integrations.math_verify import SECONDS, grade_all

    grade_all(given.results, SECONDS if given.seconds is None else given.seconds)


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: grade_runs(arguments))

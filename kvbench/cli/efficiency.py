"""Measure time, memory and throughput for a list of conf/efficiency/plan.yaml.

Examples:
  kvbench efficiency quick --minutes 6
  kvbench efficiency full

The exit code is 1 if the minutes were over before the list was. The same command goes on with the rest.
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.command import CommandParser, run_command
from kvbench.config.paths import CONF


def make_parser() -> CommandParser:
    parser = CommandParser("efficiency", __doc__)
    parser.add_argument("list", help="a key of conf/efficiency/plan.yaml")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no cell after so many minutes")
    parser.add_results(old=False)
    parser.add_argument(
        "--plan", type=Path, default=CONF / "efficiency" / "plan.yaml", help="another file with lists of cells"
    )
    return parser


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    return make_parser().parse(arguments)


def measure(arguments: Sequence[str]) -> int | None:
    """Measure the cells of the list that have no line yet."""
    options = parse_arguments(arguments)
    from kvbench.efficiency.plan import measure_plan

    return measure_plan(options)


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: measure(arguments))

"""Measure time, memory and throughput for a list of conf/efficiency/plan.yaml.

python -m kvbench efficiency quick [--minutes 6] [--results results]
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.command import CommandParser, run_command
from kvbench.efficiency.plan import PLAN, measure_plan


def parse_arguments(argv: Sequence[str] | None) -> Namespace:
    parser = CommandParser("kvbench efficiency", __doc__)
    parser.add_argument("list", help="a key of conf/efficiency/plan.yaml")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no cell is begun after as many")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--plan", type=Path, default=PLAN)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 2 and one line for a list that does not exist; 1 if the time was over before the list was."""
    return run_command(lambda: measure_plan(parse_arguments(argv)))

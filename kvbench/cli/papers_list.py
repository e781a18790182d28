"""List the papers' tables and figures: what the store has of each, and the command that fills it.

Examples:
  kvbench papers list
  kvbench papers list dropkv --results /data/results
"""

from collections.abc import Sequence

from kvbench.cli.command import CommandParser, run_command
from kvbench.cli.papers import print_list


def make_parser() -> CommandParser:
    parser = CommandParser("papers list", __doc__)
    parser.add_results(old=False)
    parser.add_argument("paper", nargs="?", help="name of a paper in conf/papers (default: all)")
    return parser


def main(arguments: Sequence[str]) -> int:
    def work() -> None:
        options = make_parser().parse(arguments)
        print_list(options.results, options.paper)

    return run_command(work)

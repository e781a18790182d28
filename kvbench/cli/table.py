"""Print one table of a paper, published and measured side by side.

Examples:
  kvbench table dropkv 5
  kvbench table keydiff 18 --results /data/results

The table is also written into the folder of results, as Markdown, CSV and LaTeX.
"""

from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.command import CommandParser, run_command
from kvbench.cli.papers import emit_exhibits, print_page


def make_parser() -> CommandParser:
    parser = CommandParser("table", __doc__)
    parser.add_argument("paper", help="name of a paper in conf/papers")
    parser.add_argument("table", help="number of the table")
    parser.add_argument("--results", default="results", type=Path, help="folder of results (default: results)")
    return parser


def print_table(arguments: Sequence[str]) -> None:
    """Print the table."""
    given = make_parser().parse_args(arguments)
    for text in emit_exhibits(given.results, given.paper, given.table):
        print_page(text)


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: print_table(arguments))

"""Compare two runs: the settings that differ, the paired difference of each subtask, and the samples lost and gained.

Examples:
  kvbench results compare 3f9a 77b0
  kvbench results compare 3f9a 77b0 --results /data/results

A and B are hashes of runs, or their first characters. kvbench results scores --format csv lists the hashes.
"""

from collections.abc import Sequence

from kvbench.cli.command import CommandParser, find_width, run_command


def make_parser() -> CommandParser:
    parser = CommandParser("results compare", __doc__)
    parser.add_argument("a", help="the first run")
    parser.add_argument("b", help="the second run")
    parser.add_results()
    return parser


def print_comparison(arguments: Sequence[str]) -> None:
    """Print the comparison."""
    options = make_parser().parse(arguments)
    from kvbench.analysis.run_comparison import compare_runs
    from kvbench.store.runs import choose_run, list_runs

    stored = list_runs(options.results)
    print(compare_runs(choose_run(stored, options.a), choose_run(stored, options.b)).to_text(find_width()), end="")


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: print_comparison(arguments))

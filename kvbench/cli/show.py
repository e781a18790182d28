"""Print the closing table of a run: its subtasks, averages, costs and notes.

Examples:
  kvbench results show 3f9a
  kvbench results show 3f9a --results /data/results --format markdown

RUN is the hash of a run, or its first characters. kvbench results scores --format csv lists the hashes.
"""

from collections.abc import Sequence

from kvbench.cli.command import CommandParser, find_width, run_command
from kvbench.validation import require_choice

FORMATS = ("text", "markdown", "csv")


def make_parser() -> CommandParser:
    parser = CommandParser("results show", __doc__)
    parser.add_argument("run", help="hash of a run, or its first characters")
    parser.add_results()
    parser.add_argument("--format", default="text", help="text, markdown or csv (default: text)")
    parser.add_argument("--full", metavar="HASH", help="the full cache's run, where there are several")
    return parser


def print_run(arguments: Sequence[str]) -> None:
    """Print the table."""
    options = make_parser().parse(arguments)
    require_choice("--format", options.format, FORMATS)
    from kvbench.analysis.closing_table import build_run_table
    from kvbench.store.runs import choose_run, find_baseline, list_runs

    stored = list_runs(options.results)
    run = choose_run(stored, options.run)
    if run.full:
        table = build_run_table(run.value, run.records, None)
    else:
        table = build_run_table(run.value, find_baseline(run, stored, options.full).records, run.records)
    texts = {"text": lambda: table.to_text(find_width()), "markdown": table.to_markdown, "csv": table.to_csv}
    print(texts[options.format](), end="")


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: print_run(arguments))

"""Print the scores of a folder of results as one matrix: methods by budgets, a block for each protocol.

Examples:
  kvbench results scores task=ruler question=hidden
  kvbench results scores method=snapkv,knorm budget=0.05,0.1 --format latex > table.tex
  kvbench results scores --sort 0.05
  kvbench results scores --group-by question,allocator --sort bytes_held@0.05
  kvbench results scores --columns score,score_interval,rows_kept
  kvbench results scores --by bytes --at 0.1

The formats are text, markdown, csv, latex (booktabs, siunitx) and html. Text is as wide as the terminal, which shows
the best in bold unless NO_COLOR is set. The columns are score, score_interval, difference (from the full cache),
interval (the difference's), lost, gained, n, bytes_held, bytes_with_files (and the weights that a method or codec needs
beside the model), bytes_in_all (and what a method keeps beside the rows), rows_kept, rows_attended and at_limit. By
default, LaTeX has score and difference, CSV has all but bytes_with_files, bytes_in_all and rows_kept, and the other
formats have score, difference, interval, bytes_held, rows_attended and at_limit.

--group-by takes any setting that a filter takes, except the budget. A setting of the protocol (model, task, question,
seed, ...) gathers blocks; a setting of the cache (method, allocator, codec, block_size, ...) gathers the rows inside
each block. This changes the order only: runs are never averaged, and marks still compare all rows of a block.

--by bytes prints another table, as text, markdown or csv: all methods, codecs and budgets in the order of the bytes
that they were measured to hold, which of them are on the front of score over bytes, and which cannot be told from
those. It says what to use at a share of the full cache's bytes (--at), and whether a codec scores more than raw rows at
equal bytes. --by bytes_with_files also counts the files that methods and codecs need, and --by bytes_in_all also what
is kept beside the rows.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from kvbench.cli.command import CommandParser, find_width, is_styled, refuse_given, run_command
from kvbench.validation import SettingError, escape, require_choice

DEFAULT_SHARE = "0.1"


def make_parser() -> CommandParser:
    parser = CommandParser("results scores", __doc__)
    parser.add_selection("show")
    parser.add_argument("--format", default="text", help="text, markdown, csv, latex or html (default: text)")
    parser.add_argument("--average", help="one of the task's averages, each or solvable (default: the task's first)")
    parser.add_argument("--full", metavar="HASH", help="the full cache's run, where there are several")
    parser.add_argument("--columns", metavar="NAME,NAME", help="what to show of each run; names and defaults are below")
    parser.add_argument(
        "--sort",
        metavar="BUDGET",
        help="sort the rows by their score at this budget, best first; by another COLUMN@BUDGET; or by method",
    )
    parser.add_argument(
        "--group-by", metavar="SETTING,SETTING", help="gather blocks and rows under a heading for each value"
    )
    parser.add_argument(
        "--by", default="budget", help="budget, bytes, bytes_with_files or bytes_in_all (default: budget)"
    )
    parser.add_argument("--at", help="with --by bytes: choose for this share of the full cache's bytes (default: 0.1)")
    return parser


def check_order(options: Namespace) -> None:
    """Check the options that say by what scores are ordered, and put the share that --at names into `options.at`.

    Raises:
        SettingError: A choice does not exist, or an option belongs to the other table.
    """
    from kvbench.analysis import byte_front_format, score_matrix_format
    from kvbench.analysis.byte_front import SIZES
    from kvbench.analysis.curves import parse_shares

    require_choice("--by", options.by, ["budget", *SIZES])
    by_bytes = options.by in SIZES
    if by_bytes:
        refuse_given(options, ("sort", "group_by", "columns"), f"--by {options.by}: has its own order and columns")
    elif options.at is not None:
        raise SettingError(f"--at={options.at}: chooses for a share of the bytes; add --by bytes, or leave out --at")
    formats = byte_front_format.FORMATS if by_bytes else score_matrix_format.FORMATS
    require_choice("--format", options.format, ["text", *formats])
    options.at = parse_shares("--at", options.at or DEFAULT_SHARE, 1)[0]


def print_results(arguments: Sequence[str]) -> int:
    """Print the matrix, and on stderr what cannot be shown. Return 2 if there is nothing to show."""
    options = make_parser().parse(arguments)
    from kvbench.analysis.byte_front_format import format_by_bytes
    from kvbench.analysis.score_matrix import build_blocks
    from kvbench.analysis.score_matrix_columns import choose_columns
    from kvbench.analysis.score_matrix_format import FORMATS, format_text
    from kvbench.analysis.score_matrix_order import group_blocks, sort_rows
    from kvbench.store.runs import filter_runs, load_runs, parse_filters

    check_order(options)
    chosen: dict[str, Any] = {}
    if options.columns is not None:
        chosen["columns"] = choose_columns(options.columns.split(","))
    filters = parse_filters(options.filters)
    stored = load_runs(options.results)
    runs = filter_runs(stored, filters)
    blocks, refused = build_blocks([run for run in runs if not run.full] or runs, stored, options.average, options.full)
    if blocks and options.sort is not None:
        blocks = sort_rows(blocks, options.sort)
    if options.group_by is not None:
        blocks = group_blocks(blocks, options.group_by.split(","))
    if blocks:
        if options.by != "budget":
            print(format_by_bytes(blocks, options.by, options.at, options.format, find_width()), end="")
        elif options.format == "text":
            print(format_text(blocks, find_width(), styled=is_styled(), **chosen), end="")
        else:
            print(FORMATS[options.format](blocks, **chosen), end="")
    for line in refused:
        print(f"kvbench: {escape(line)}", file=sys.stderr)
    return 0 if blocks else 2


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: print_results(arguments))

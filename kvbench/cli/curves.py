"""Print scores over budgets, with the area below each curve.

Examples:
  kvbench results curves task=ruler question=hidden method=snapkv,knorm
  kvbench results curves --against rows --range 0.05:0.4
"""

import sys
from argparse import Namespace
from collections.abc import Sequence

from kvbench.cli.command import CommandParser, run_command
from kvbench.validation import escape, require_choice


def make_parser() -> CommandParser:
    parser = CommandParser("results curves", __doc__)
    parser.add_selection("compare")
    parser.add_argument("--range", help="LOW:HIGH, kept shares between which the area lies (default: all in common)")
    parser.add_argument("--against", default="bytes", help="bytes (bytes held) or rows (rows attended while decoding)")
    parser.add_argument("--keep", help="share of the full cache's score (default: 0.95)")
    parser.add_argument("--average", help="one of the task's averages, each or solvable (default: the task's first)")
    parser.add_argument("--full", metavar="HASH", help="the full cache's run, where there are several")
    return parser


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    """Return the options, with the choices that they name.

    Raises:
        SettingError: An argument cannot be used.
    """
    options = make_parser().parse(arguments)
    from kvbench.analysis.budget_curve import KEEP
    from kvbench.analysis.budget_series import SHARES, CurveOptions
    from kvbench.analysis.curves import parse_shares
    from kvbench.store.runs import parse_filters

    options.filters = parse_filters(options.filters)
    subtask = options.filters.pop("subtask", None)
    require_choice("--against", options.against, SHARES)
    options.choice = CurveOptions(options.against, options.average, subtask, options.full)
    options.keep = parse_shares("--keep", str(KEEP) if options.keep is None else options.keep, 1)[0]
    options.range = parse_shares("--range", options.range, 2) if options.range else None
    return options


def print_curves(arguments: Sequence[str]) -> int:
    """Print the curves, and on stderr why some runs make none. Return 2 if there are such runs."""
    options = parse_arguments(arguments)
    from kvbench.analysis.curves import report_curves

    lines, refused = report_curves(options, 120)
    if lines:
        print("\n".join(lines))
    for line in refused:
        print(f"kvbench: {escape(line)}", file=sys.stderr)
    return 2 if refused else 0


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: print_curves(arguments))

"""Print curves over budgets.

python -m kvbench curves results task=ruler question=hidden method=snapkv,knorm
"""

import sys
from argparse import Namespace
from collections.abc import Sequence

from kvbench.analysis.budget_curve import KEEP
from kvbench.analysis.budget_series import EACH, SHARES, SOLVABLE, CurveOptions
from kvbench.analysis.curves import parse_shares, report_curves
from kvbench.cli.command import CommandParser, run_command
from kvbench.store.runs import parse_selection
from kvbench.validation import escape, require_choice


def parse_arguments(given: Sequence[str]) -> Namespace:
    """SettingError for what cannot be used."""
    parser = CommandParser("kvbench curves", __doc__)
    parser.add_argument(
        "chosen", nargs="*", metavar="RESULTS | SETTING=VALUE,VALUE", help="folder of the records; runs"
    )
    parser.add_argument("--range", help="LOW:HIGH, kept shares between which the area lies; default: all in common")
    parser.add_argument("--against", default="bytes", help="bytes held, or rows attended while decoding")
    parser.add_argument("--keep", default=str(KEEP), help="share of the full cache's score")
    parser.add_argument(
        "--average", help=f"name of one of the task's averages, {EACH} or {SOLVABLE}; default: its first"
    )
    parser.add_argument("--full", metavar="HASH", help="run of the full cache, where there are several")
    options = parser.parse_intermixed_args(given)
    options.results, options.filters = parse_selection(options.chosen)
    subtask = options.filters.pop("subtask", None)
    require_choice("--against", options.against, SHARES)
    options.choice = CurveOptions(options.against, options.average, subtask, options.full)
    options.keep = parse_shares("--keep", options.keep, 1)[0]
    options.range = parse_shares("--range", options.range, 2) if options.range else None
    return options


def main(given: Sequence[str]) -> int:
    return run_command(lambda: print_curves(given))


def print_curves(given: Sequence[str]) -> int:
    """Print curves, and what makes none; 2 if anything does."""
    lines, refused = report_curves(parse_arguments(given), 120)
    if lines:
        print("\n".join(lines))
    for line in refused:
        print(f"kvbench: {escape(line)}", file=sys.stderr)
    return 2 if refused else 0

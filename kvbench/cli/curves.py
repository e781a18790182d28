"""Print curves over budgets.

python -m kvbench curves results task=ruler question=hidden method=snapkv,knorm
"""

import sys
from argparse import Namespace
from collections.abc import Sequence

from kvbench.analysis.budget_curve import KEEP
from kvbench.analysis.budget_series import EACH, SHARES, SOLVABLE, CurveOptions
from kvbench.analysis.curves import report, shares
from kvbench.cli.command import Arguments, answered
from kvbench.store.runs import asked
from kvbench.validation import choose, escape


def arguments(given: Sequence[str]) -> Namespace:
    """SettingError for what cannot be used."""
    parser = Arguments("kvbench curves", __doc__)
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
    options.results, options.filters = asked(options.chosen)
    subtask = options.filters.pop("subtask", None)
    choose("--against", options.against, SHARES)
    options.choice = CurveOptions(options.against, options.average, subtask, options.full)
    options.keep = shares("--keep", options.keep, 1)[0]
    options.range = shares("--range", options.range, 2) if options.range else None
    return options


def main(given: Sequence[str]) -> int:
    return answered(lambda: show(given))


def show(given: Sequence[str]) -> int:
    """Print curves, and what makes none; 2 if anything does."""
    lines, refused = report(arguments(given), 120)
    if lines:
        print("\n".join(lines))
    for line in refused:
        print(f"kvbench: {escape(line)}", file=sys.stderr)
    return 2 if refused else 0

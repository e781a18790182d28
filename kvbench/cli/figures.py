"""Draw the charts of a store for print.

python -m kvbench figures results                                       # `make figures`: all that the store
holds python -m kvbench figures results question=hidden method=snapkv,dropkv --kind curve,cost --width 5.5
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from kvbench.analysis.budget_series import EACH, SHARES, SOLVABLE, list_subtasks
from kvbench.cli.command import CommandParser, run_command
from kvbench.report.figures import INCHES, list_averages, make_figures, parse_inches
from kvbench.store.runs import check_folder, filter_runs, find_finished, parse_selection
from kvbench.validation import SettingError, escape, require_choice, require_writable


def draw_figures(given: Sequence[str]) -> int:
    """Write the figures; SettingError, and nothing is written, where there is nothing to draw."""
    options = parse_arguments(given)
    check_folder(options.results)
    found = find_finished(options.results)
    wanted = filter_runs(found.runs, options.filters)
    for subtask in options.subtasks:
        require_choice("subtask", subtask, list_subtasks(wanted))
    if options.average is not None:
        require_choice(
            "--average", options.average, sorted({EACH, *(name for run in wanted for name in list_averages(run))})
        )
    refused: dict[str, str] = {}
    own = list(make_figures(options, found, wanted, refused))
    found.print_damage()
    for name, why in sorted(refused.items()):
        print(f"kvbench: {escape(name)} is left out: {escape(why)}", file=sys.stderr)
    if not own:
        raise SettingError(f"{options.results}: nothing there for --kind {','.join(options.kinds)}")
    folder = options.out or options.results / "figures"
    require_writable("--out" if options.out else "results", folder)
    folder.mkdir(parents=True, exist_ok=True)
    for figure in own:
        print(figure.write(folder))
    if found.unfinished:
        print(f"{len(found.unfinished)} unfinished runs are left out.")
    return 0


def parse_arguments(given: Sequence[str]) -> Namespace:
    """SettingError for what cannot be used."""
    parser = CommandParser("kvbench figures", __doc__)
    parser.add_argument("chosen", nargs="*", metavar="RESULTS | SETTING=VALUE,VALUE", help="folder; runs")
    parser.add_argument("--kind", help=f"of {','.join(INCHES)}; default: all")
    parser.add_argument("--width", help="inches at most; default: 3.25 for curves, else 6.75")
    parser.add_argument("--against", default="bytes", help="of curves: bytes held, or rows attended while decoding")
    parser.add_argument("--average", help=f"of curves: name of one of the task's averages, {EACH} or {SOLVABLE}")
    parser.add_argument("--out", type=Path, help="folder of the files; default: RESULTS/figures")
    options = parser.parse_intermixed_args(given)
    options.results, options.filters = parse_selection(options.chosen)
    subtasks = options.filters.pop("subtask", None)
    options.subtasks = list(dict.fromkeys(subtasks.split(","))) if subtasks is not None else []
    kinds = "curve" if options.subtasks else ",".join(INCHES)
    options.kinds = list(dict.fromkeys((kinds if options.kind is None else options.kind).split(",")))
    for kind in options.kinds:
        require_choice("--kind", kind, ["curve"] if options.subtasks else list(INCHES))
    require_choice("--against", options.against, SHARES)
    options.width = None if options.width is None else parse_inches(options.width)
    return options


def main(given: Sequence[str]) -> int:
    return run_command(lambda: draw_figures(given))

"""Draw the charts of a store for print, as PDF, SVG, PNG and CSV.

Examples:
  kvbench results figures
  kvbench results figures question=hidden method=snapkv,dropkv --kind curve,cost --width page --plain
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.command import CommandParser, require_extra, run_command
from kvbench.validation import SettingError, escape, require_choice, require_writable


def draw_figures(given: Sequence[str]) -> int:
    """Write the figures and print their paths.

    Raises:
        SettingError: There is nothing to draw. Nothing is written then.
    """
    options = parse_arguments(given)
    from kvbench.analysis.budget_series import EACH, list_subtasks
    from kvbench.report.figures import list_averages, make_figures
    from kvbench.store.runs import check_folder, filter_runs, find_finished

    check_folder(options.results)
    stored = find_finished(options.results)
    wanted = filter_runs(stored.runs, options.filters)
    for subtask in options.subtasks:
        require_choice("subtask", subtask, list_subtasks(wanted))
    if options.average is not None:
        require_choice(
            "--average", options.average, sorted({EACH, *(name for run in wanted for name in list_averages(run))})
        )
    refused: dict[str, str] = {}
    figures = list(make_figures(options, stored, wanted, refused))
    stored.print_damage()
    for name, why in sorted(refused.items()):
        print(f"kvbench: {escape(name)} is left out: {escape(why)}", file=sys.stderr)
    if not figures:
        raise SettingError(f"{options.results}: nothing there for --kind {','.join(options.kinds)}")
    folder = options.out or options.results / "figures"
    require_writable("--out" if options.out else "results", folder)
    folder.mkdir(parents=True, exist_ok=True)
    for figure in figures:
        print(figure.write(folder))
    if stored.unfinished:
        print(f"{len(stored.unfinished)} unfinished runs are left out.")
    return 0


def make_parser() -> CommandParser:
    parser = CommandParser("results figures", __doc__)
    parser.add_selection("draw")
    parser.add_argument("--kind", help="of curve,tasks,grid,change,cost,bytes (default: all)")
    parser.add_argument(
        "--width",
        help="at most: column (3.25 in), page (6.75 in) or inches (default: column for curves, page for others)",
    )
    parser.add_argument("--plain", action="store_true", help="no title and no notes, for a paper that has a caption")
    parser.add_argument("--against", default="bytes", help="of curves: bytes (bytes held) or rows (rows attended)")
    parser.add_argument("--average", help="of curves: one of the task's averages, each or solvable")
    parser.add_argument("--out", type=Path, help="folder of the files (default: RESULTS/figures)")
    return parser


def parse_arguments(given: Sequence[str]) -> Namespace:
    """Return the options, with the choices that they name.

    Raises:
        SettingError: An argument cannot be used.
    """
    options = make_parser().parse(given)
    require_extra("report", "altair", "vl_convert")
    from kvbench.analysis.budget_series import SHARES
    from kvbench.report.figures import INCHES, parse_inches
    from kvbench.store.runs import parse_filters

    options.filters = parse_filters(options.filters)
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

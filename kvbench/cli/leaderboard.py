"""Build a site from bundles: a table of scores, and the bundles and reports of all submissions.

Examples:
  kvbench results leaderboard ours.zip theirs.zip --out site
  kvbench results leaderboard --check ours.zip

The site is a folder that opens from disk and from any web server. Each bundle is a submission of its own: its numbers
come from its own records, and no other bundle changes them. A bundle that cannot be verified is named on stderr and on
the page, and the site shows the others. The exit code is then 1. It is 2, and nothing is written, if no bundle is left.

With --check, the command writes nothing and prints a list of what readers will ask about a submission: pass, warn or
fail. The exit code is 2 if a point fails.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from kvbench.cli.command import CommandParser, refuse_given, require_extra, run_command
from kvbench.validation import escape, require_writable

OUT = Path("leaderboard")


def make_parser() -> CommandParser:
    parser = CommandParser("results leaderboard", __doc__)
    parser.add_argument("bundles", nargs="+", type=Path, metavar="BUNDLE", help="files of kvbench results bundle")
    parser.add_argument("--out", type=Path, help=f"folder of the site (default: {OUT})")
    parser.add_argument("--average", help="one of the task's averages, each or solvable (default: the task's first)")
    parser.add_argument("--check", action="store_true", help="print a checklist of each bundle in place of the site")
    return parser


def build_site(arguments: Sequence[str]) -> int:
    """Write the site and print the path of its first page, or print the checklists. Return the exit code."""
    options = make_parser().parse(arguments)
    if options.check:
        refuse_given(options, ("out",), "--check writes nothing")
        return print_checklists(options.bundles, options.average)
    require_extra("report", "altair", "vl_convert")
    out = options.out or OUT
    require_writable("--out", out)
    from kvbench.report.leaderboard import write_leaderboard

    page, refused = write_leaderboard(options.bundles, out, datetime.now(UTC), options.average)
    print(page)
    return 1 if refused else 0


def print_checklists(paths: Sequence[Path], average: str | None) -> int:
    """Print the checklist of each bundle, and return the exit code."""
    from kvbench.analysis.submission_checks import FAIL, check_bundle

    failed = False
    for path in paths:
        print(escape(str(path)))
        for verdict, point, text in check_bundle(path, average):
            print(f"  {verdict}  {point:<13} {escape(text)}")
            failed = failed or verdict == FAIL
    return 2 if failed else 0


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: build_site(arguments))

"""Build a site from bundles: one table of scores, the report page, and the bundles for readers to verify.

Examples:
  kvbench leaderboard ours.zip theirs.zip --out site
  kvbench leaderboard bundles/*.zip --sort 0.1

The site is a folder that opens from disk and from any web server. Each bundle is verified first; one that does not pass
is named, and nothing is written.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from kvbench.cli.command import CommandParser, require_extra, run_command
from kvbench.validation import require_writable


def make_parser() -> CommandParser:
    parser = CommandParser("leaderboard", __doc__)
    parser.add_argument("bundles", nargs="+", type=Path, metavar="BUNDLE", help="files that kvbench bundle wrote")
    parser.add_argument("--out", default="leaderboard", type=Path, help="folder of the site (default: leaderboard)")
    parser.add_argument("--average", help="one of the task's averages, each or solvable (default: the task's first)")
    parser.add_argument("--sort", metavar="BUDGET", help="sort the rows as kvbench results does, such as 0.1 or n@0.1")
    return parser


def build_site(arguments: Sequence[str]) -> None:
    """Write the site, and print the path of its first page."""
    options = make_parser().parse_args(arguments)
    require_extra("report", "altair", "vl_convert")
    require_writable("--out", options.out)
    from kvbench.report.leaderboard import write_leaderboard

    print(write_leaderboard(options.bundles, options.out, datetime.now(UTC), options.average, options.sort))


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: build_site(arguments))

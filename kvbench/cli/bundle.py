"""Pack the runs behind a table into one file, with which others can check every number of it.

Examples:
  kvbench results bundle task=ruler question=hidden --out table3.zip
  kvbench check bundle table3.zip
  kvbench results bundle --draw 200 --seed 1 --out answers.zip

The file holds settings, records, the machine and a manifest of hashes. Questions, targets, other texts of the data
set and local paths are left out; --texts keeps them. The models' answers stay. The command prints the SHA-256 of the
file. Publish it beside the table, so that readers can tell your file from another one.

--draw N packs N answers in place of whole runs: a small file from which readers execute answers again (check bundle
--replay). They are drawn with --seed from all finished runs that the settings choose, as many of one run as of another,
and within a run as many of one subtask as of another. The file's checksum goes into SHA256SUMS beside it, which
`sha256sum -c` reads, and the command also prints a line of Markdown for the page.
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.command import CommandParser, parse_int, read_number, refuse_given, require_file, run_command
from kvbench.validation import SettingError


def make_parser() -> CommandParser:
    parser = CommandParser("results bundle", __doc__)
    parser.add_selection("pack")
    parser.add_argument("--out", default="bundle.zip", type=Path, help="the file to write (default: bundle.zip)")
    parser.add_argument("--average", help="one of the task's averages, each or solvable (default: the task's first)")
    parser.add_argument("--texts", action="store_true", help="keep texts of the data set and local paths")
    parser.add_argument("--draw", metavar="N", help="pack N answers, drawn at random, in place of whole runs")
    parser.add_argument("--seed", metavar="S", help="with --draw: draw the same answers as another call (default: 0)")
    return parser


def make_bundle(arguments: Sequence[str]) -> None:
    """Write the bundle, and print its size and digest."""
    options = make_parser().parse(arguments)
    require_file("--out", options.out)
    if options.draw is None and options.seed is not None:
        raise SettingError(f"--seed={options.seed}: draws the answers of --draw N, which is missing")
    if options.draw is not None:
        make_drawn_bundle(options)
        return
    from kvbench.analysis.bundle import write_bundle
    from kvbench.store.runs import parse_filters

    filters = parse_filters(options.filters)
    digest = write_bundle(options.results, filters, options.out, options.average, options.texts)
    print(f"{options.out}  {options.out.stat().st_size / 1e6:.2f} MB  sha256 {digest}")


def make_drawn_bundle(options: Namespace) -> None:
    """Write a bundle of drawn answers and its checksum, and print a line of Markdown about it.

    Raises:
        SettingError: An option cannot be used, or the runs have fewer answers.
    """
    count = read_number("--draw", options.draw)
    seed = 0 if options.seed is None else parse_int("--seed", options.seed, 0)
    refuse_given(options, ("average",), "--draw: no score follows from drawn answers")
    from kvbench.analysis.bundle import verify_bundle, write_drawn_bundle
    from kvbench.analysis.drawn_answers import describe_drawn
    from kvbench.store.checksums import check_name, read_checksums, write_checksum
    from kvbench.store.runs import parse_filters

    check_name(options.out)
    read_checksums(options.out.parent)  # raises before anything is written if they are damaged
    filters = parse_filters(options.filters)
    digest = write_drawn_bundle(options.results, filters, options.out, count, seed, options.texts)
    write_checksum(options.out)
    bundle = verify_bundle(options.out)
    assert bundle.drawn is not None
    about = describe_drawn(bundle.drawn, bundle.records, bundle.runs)
    size = options.out.stat().st_size / 1e6
    print(f"[{options.out.name}]({options.out.name}): {about}; {size:.2f} MB, sha256 `{digest}`.")


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: make_bundle(arguments))

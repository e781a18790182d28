"""Check a bundle: its checksums, and whether every number of its table follows from its records.

Examples:
  kvbench verify table3.zip
  kvbench verify table3.zip --digest 5b1c6f0e2a9d4477

The exit code is 2 if anything is wrong, and one line says what.
"""

from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.command import CommandParser, find_width, run_command
from kvbench.validation import SettingError

LEAST = 16  # digits of a digest that are enough


def make_parser() -> CommandParser:
    parser = CommandParser("verify", __doc__)
    parser.add_argument("bundle", type=Path, help="the file that kvbench bundle wrote")
    parser.add_argument("--digest", help="the digest that was published, or its first characters")
    return parser


def print_verdict(arguments: Sequence[str]) -> None:
    """Print the table that the records give."""
    options = make_parser().parse_args(arguments)
    from kvbench.analysis.bundle import verify_bundle
    from kvbench.analysis.score_matrix_format import format_text

    found = verify_bundle(options.bundle)
    if options.digest is not None and len(options.digest) < LEAST:
        raise SettingError(f"--digest={options.digest}: at least {LEAST} digits of the SHA-256 that was published")
    if options.digest is not None and not found.digest.startswith(options.digest.lower()):
        raise SettingError(f"--digest={options.digest}: the bundle has {found.digest}")
    print(format_text(found.blocks, find_width()))
    print(f"{found.records} records of {found.runs} runs give every number of the table.  sha256 {found.digest}")


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: print_verdict(arguments))

"""Say how far the cells of a sweep are.

python -m kvbench sweep-status [results] [folder of the sweep, else the newest]      # `make sweep-status`
"""

from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.command import CommandParser, run_command
from kvbench.sweeps.status import find_newest, print_states


def print_status(arguments: Sequence[str]) -> None:
    """Print how far the cells of a sweep are, of the newest where none is named."""
    parser = CommandParser("kvbench sweep-status", __doc__)
    parser.add_argument("results", nargs="?", default="results", type=Path)
    parser.add_argument("folder", nargs="?", type=Path, help="of the sweep; default: the newest")
    given = parser.parse_args(arguments)
    folder = given.folder or find_newest(given.results)
    print_states(given.results, folder)


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: print_status(arguments))

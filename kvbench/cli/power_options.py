"""The options of the commands that say, before a study runs, what its samples can tell apart."""

from argparse import Namespace
from math import inf

from kvbench.cli.command import CommandParser
from kvbench.validation import SettingError


def add_power(parser: CommandParser) -> None:
    """Add the options `--power` and `--deviation` to a command."""
    parser.add_argument(
        "--power", action="store_true", help="run nothing, and print which differences the planned samples tell apart"
    )
    parser.add_argument(
        "--deviation",
        type=float,
        metavar="POINTS",
        help="with --power: standard deviation of a sample's difference (default: of measured tiers, or 40)",
    )


def check_power(options: Namespace) -> None:
    """Check these options.

    Raises:
        SettingError: A deviation without `--power`, or one that is no positive number.
    """
    if options.deviation is None:
        return
    if not options.power:
        raise SettingError("--deviation: only with --power")
    if not 0 < options.deviation < inf:
        raise SettingError(f"--deviation={options.deviation:g}: choose points above 0")

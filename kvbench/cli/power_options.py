"""The options of the commands that say, before a study runs, what its samples can tell apart."""

from argparse import Namespace
from math import inf

from kvbench.cli.command import CommandParser
from kvbench.validation import SettingError


def add_power(parser: CommandParser) -> None:
    """Add the options `--power`, `--deviation` and `--rate` to a command."""
    parser.add_argument(
        "--power", action="store_true", help="run nothing, and print which differences the planned samples tell apart"
    )
    parser.add_argument(
        "--deviation",
        type=float,
        metavar="POINTS",
        help="with --power: standard deviation of a sample's difference (default: of measured parts, or 40)",
    )
    parser.add_argument(
        "--rate", type=float, metavar="ANSWERS", help="with --power: answers a minute, for an estimate of the time"
    )


def check_power(options: Namespace) -> None:
    """Check these options.

    Raises:
        SettingError: A deviation or a rate without `--power`, or one that is no positive number.
    """
    for name, unit in (("deviation", "points"), ("rate", "answers a minute")):
        given = getattr(options, name)
        if given is None:
            continue
        if not options.power:
            raise SettingError(f"--{name}: only with --power")
        if not 0 < given < inf:
            raise SettingError(f"--{name}={given:g}: choose {unit} above 0")

"""Time every method's prefill as a ratio of the full cache's.

Examples:
  kvbench dev bench-methods qfilters.path=FILE palu.path=FILE --cross snapkv
  kvbench dev bench-methods --methods kvzip --also kvzip.plus --also full+kivi
"""

import shlex
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.command import CommandParser, run_command


def parse_budget(text: str) -> object:
    """Return the budget that an argument gives, as the command `run` reads it."""
    from kvbench.efficiency.prefill_bench import parse_value

    return parse_value(text)


def make_parser() -> CommandParser:
    parser = CommandParser("dev bench-methods", __doc__)
    parser.add_argument("--model", default="reference", help="reference, a local folder or a hub id")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the prompt (default: 4096)")
    parser.add_argument("--budget", type=parse_budget, default=0.1, help="as in kvbench run (default: 0.1)")
    parser.add_argument("--rounds", type=int, default=5, help="times that each method is timed (default: 5)")
    parser.add_argument("--methods", nargs="+", help="default: all of conf/method/")
    parser.add_argument("--cross", metavar="METHOD", help="run this method with every allocator and codec too")
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="METHOD[.PRESET][+CODEC]",
        help="run this method with this preset and codec too",
    )
    parser.add_argument("settings", nargs="*", metavar="NAME.KEY=VALUE", help="settings of methods and codecs")
    parser.add_old_set()
    parser.add_argument("--out", type=Path, default=Path("results/efficiency/prefill.csv"), help="CSV file to write")
    return parser


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    """Return the options; all methods where none is named."""
    options = make_parser().parse(arguments)
    from kvbench.config.catalogue import methods_available

    options.methods = options.methods or methods_available()
    return options


def time_methods(arguments: Sequence[str]) -> None:
    """Time the methods and write the CSV file with the command that makes it."""
    options = parse_arguments(arguments)
    from kvbench.efficiency.prefill_bench import run_prefill_bench

    run_prefill_bench(options, shlex.join(["kvbench", "dev", "bench-methods", *arguments]))


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: time_methods(arguments))

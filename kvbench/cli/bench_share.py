"""Measure the time saved by reading prompts and decoding answers once for many runs.

Examples:
  kvbench dev bench-share task.length=4096 limit=1 rounds=3
  kvbench dev bench-share model=smollm2 task.length=4096 limit=4 sweep.share_decoding=false
"""

from collections.abc import Sequence

from kvbench.cli.command import CommandParser, run_command


def make_parser() -> CommandParser:
    parser = CommandParser("dev bench-share", __doc__)
    parser.add_settings("settings", "SETTING=VALUE,VALUE", "of kvbench run -m; and rounds=N, 1 by default")
    return parser


def measure(arguments: Sequence[str]) -> None:
    """Measure, and append a line to the machine's CSV file."""
    options = make_parser().parse(arguments)
    from kvbench.efficiency.sharing_bench import run_sharing_bench

    run_sharing_bench(options.settings)


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: measure(arguments))

"""Say what a sweep would do, and run nothing: its cells, what is done, what is refused and why, hours and memory.

Examples:
  kvbench plan method=snapkv,knorm budget=0.05,0.1 task=ruler
  kvbench plan preset=dropkv_table5 model=llama31_8b
  kvbench plan method=snapkv,tova budget=0.1 task=ruler task.samples=108 --power

With --power it says how many answers there are and which differences the planned samples can tell apart, and no more.
"""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from kvbench.cli.command import CommandParser, find_width, run_command
from kvbench.cli.power_options import add_power, check_power


def make_parser() -> CommandParser:
    parser = make_sweep_parser("plan", __doc__)
    add_power(parser)
    return parser


def make_sweep_parser(name: str, text: str | None) -> CommandParser:
    """Make the parser of a command that takes a sweep's settings and does not run it."""
    parser = CommandParser(name, text)
    parser.add_settings("overrides", "SETTING=VALUE,VALUE", "as for kvbench run -m", nargs="+")
    parser.add_argument("-m", "--multirun", action="store_true", help="changes nothing: the settings are a sweep's")
    parser.add_argument("--config-dir", help="a folder of configuration files, as for kvbench run")
    return parser


def plan_sweep(options: Namespace) -> Any:
    """Return the `kvbench.sweeps.plan.Sweep` that the arguments of `make_sweep_parser` name."""
    from pathlib import Path

    from kvbench.config.catalogue import translate_errors
    from kvbench.config.compose import add_folder
    from kvbench.sweeps.plan import Sweep

    with translate_errors():
        if options.config_dir is not None:
            add_folder(Path(options.config_dir))
        return Sweep.plan(options.overrides)


def print_plan(arguments: Sequence[str]) -> int:
    """Print the plan. Return 2 if a cell is refused."""
    options = make_parser().parse(arguments)
    check_power(options)
    if options.power:
        return print_power(options)
    sweep = plan_sweep(options)
    from kvbench.config.catalogue import translate_errors

    with translate_errors():
        print(sweep.describe())
        print("".join(f"{line}\n" for line in sweep.describe_memory()), end="")
    return 2 if any(planned.cell.refused for planned in sweep.cells) else 0


def print_power(options: Namespace) -> int:
    """Print what the samples of a sweep can tell apart, and return 0."""
    from pathlib import Path

    from kvbench.config.catalogue import translate_errors
    from kvbench.config.compose import add_folder, compose
    from kvbench.sweeps.plan import expand_sweep
    from kvbench.sweeps.power_table import describe_columns, describe_power

    with translate_errors():
        if options.config_dir is not None:
            add_folder(Path(options.config_dir))
        cells = expand_sweep(options.overrides)
        measured = Path(compose(cells[0]).config.results) / "measured"
        lines = describe_power(cells, measured, width := find_width(), options.deviation, options.rate)
        print("\n".join([*lines, *describe_columns(width)]))
    return 0


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: print_plan(arguments))

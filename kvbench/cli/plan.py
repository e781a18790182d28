"""Say what a sweep would do, and run nothing: its cells, what is done, what is refused and why, hours and memory.

Examples:
  kvbench plan method=snapkv,knorm budget=0.05,0.1 task=ruler
  kvbench plan preset=dropkv_table5 model=llama31_8b
"""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from kvbench.cli.command import CommandParser, run_command


def make_parser() -> CommandParser:
    return make_sweep_parser("plan", __doc__)


def make_sweep_parser(name: str, text: str | None) -> CommandParser:
    """Make the parser of a command that takes a sweep's settings and does not run it."""
    parser = CommandParser(name, text)
    parser.add_settings("overrides", "SETTING=VALUE,VALUE", "as for kvbench run -m", nargs="+")
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
    sweep = plan_sweep(make_parser().parse(arguments))
    from kvbench.config.catalogue import translate_errors

    with translate_errors():
        print(sweep.describe())
        print("".join(f"{line}\n" for line in sweep.describe_memory()), end="")
    return 2 if any(planned.cell.refused for planned in sweep.cells) else 0


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: print_plan(arguments))

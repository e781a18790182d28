"""Time every method's prefill.

python -m kvbench bench-methods --cross snapkv --set qfilters.path=FILE
"""

import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.command import CommandParser, run_command
from kvbench.config.catalogue import methods_available
from kvbench.efficiency.prefill_bench import parse_value, run_prefill_bench


def parse_arguments(argv: Sequence[str] | None) -> Namespace:
    parser = CommandParser("kvbench bench-methods", "Time every method's prefill.")
    parser.add_argument("--model", default="reference", help="reference, reference_v1, a local folder or a hub id")
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt")
    parser.add_argument("--budget", type=parse_value, default=0.1, help="as in run.py")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--methods", nargs="+", default=methods_available(), help="default: all of conf/method/")
    parser.add_argument("--cross", help="the method to run with every allocator and codec too")
    parser.add_argument("--set", action="append", default=[], help="a method's setting: METHOD.KEY=VALUE")
    parser.add_argument("--out", type=Path, default=Path("results/efficiency/prefill.csv"), help="CSV to write")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 2 and one line for a setting that cannot be used."""
    given = sys.argv[1:] if argv is None else argv
    return run_command(
        lambda: run_prefill_bench(
            parse_arguments(given), shlex.join(["python", "-m", "kvbench", "bench-methods", *given])
        )
    )

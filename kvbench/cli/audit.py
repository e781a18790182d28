"""Check that every run of a store is whole, and run some of its records again.

Examples:
  kvbench check results
  kvbench check results --replay 10 --seed 1

The exit code is 1 if a run or a record is damaged. An unfinished run is not damaged.
"""

import subprocess
import sys
from collections.abc import Sequence
from secrets import randbelow

from kvbench.cli.command import CommandParser, parse_int, run_command
from kvbench.config.paths import make_environment
from kvbench.validation import SettingError


def make_parser() -> CommandParser:
    parser = CommandParser("check results", __doc__)
    parser.add_results()
    parser.add_argument("--replay", metavar="N", help="run N records again, drawn at random, and compare them")
    parser.add_argument("--seed", metavar="S", help="draw the same records as another audit, which prints its seed")
    return parser


def run_audit(arguments: Sequence[str]) -> int:
    """Print the state of every run, then what running records again gives. Return 1 if anything is damaged."""
    options = make_parser().parse(arguments)
    from kvbench.store.audit import audit_runs, draw_records

    again = []
    if options.replay is None and options.seed is not None:
        raise SettingError(f"--seed={options.seed}: draws the records of --replay N, which is missing")
    if options.replay is not None:
        count = parse_int("--replay", options.replay, 1)
        seed = randbelow(1 << 31) if options.seed is None else parse_int("--seed", options.seed, 0)
        if not any((options.results / "runs").glob("*/run.yaml")):
            raise SettingError(f"{options.results / 'runs'}: no run there")
        there = draw_records(options.results, count, seed)[1]
        again = ["--results", str(options.results.absolute()), "--records", str(count), "--seed", str(seed)]
    damaged = 0
    for name, state, wrong in audit_runs(options.results):
        print(f"{name}  {state}")
        for line in wrong:
            print(f"    {line}")
        damaged += bool(wrong)
    print(f"{damaged} damaged")
    code = 1 if damaged else 0
    if again:
        print(f"replay: {count} of {there} records, drawn with --seed {seed}", flush=True)
        # in a process of its own, so that this module and all that read the store do without torch
        command = [sys.executable, "-m", "kvbench", "dev", "replay", *again]
        code = subprocess.run(command, env=make_environment()).returncode or code
    return code


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: run_audit(arguments))

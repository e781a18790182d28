"""Run records of a store again and compare them. `kvbench audit --replay` starts this command.

Examples:
  kvbench replay results --records 10 --seed 1
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.command import CommandParser, run_command


def make_parser() -> CommandParser:
    parser = CommandParser("replay", __doc__)
    parser.add_argument("results", type=Path, help="folder of results")
    parser.add_argument("--records", type=int, required=True, help="how many records to draw")
    parser.add_argument("--seed", type=int, required=True, help="seed that draws them")
    return parser


def replay_records(arguments: Sequence[str]) -> int:
    """Print what running the records again gives. Return 1 if a record is damaged."""
    own = make_parser().parse_args(arguments)
    from kvbench.runs.replay import replay
    from kvbench.store.audit import draw_records

    logging.getLogger("hydra").addHandler(logging.NullHandler())  # what it logs is in the reason
    found = replay(own.results, draw_records(own.results, own.records, own.seed)[0])
    for line in found.lines():
        print(line)
    return 1 if found.damaged else 0


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: replay_records(arguments))

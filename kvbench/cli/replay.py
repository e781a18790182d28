"""Execute records of a store again and compare.

python -m kvbench replay results --records n --seed s
"""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from kvbench.runs.replay import replay
from kvbench.store.audit import draw_records


def main(arguments: Sequence[str]) -> int:
    """Print what `replay` finds; 1 if a record is damaged."""
    parser = argparse.ArgumentParser("python -m kvbench replay", description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--records", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    own = parser.parse_args(arguments)
    logging.getLogger("hydra").addHandler(logging.NullHandler())  # what it logs is in the reason
    found = replay(own.results, draw_records(own.results, own.records, own.seed)[0])
    for line in found.lines():
        print(line)
    return 1 if found.damaged else 0

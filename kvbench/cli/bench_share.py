"""Measure what reading a prompt once for many runs saves.

python -m kvbench bench-share task.length=4096 limit=1      # `make bench-share`; settings are those of
run.py -m
"""

from collections.abc import Sequence

from kvbench.cli.command import run_command
from kvbench.efficiency.sharing_bench import run_sharing_bench


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: run_sharing_bench(arguments))

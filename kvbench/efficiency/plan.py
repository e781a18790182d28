"""Measure all cells of a list in one process: `make efficiency`.

A list is a key of conf/efficiency/plan.yaml. Its lines are arguments of `run.py -m`, with comma lists. The model stays
loaded from cell to cell. A cell that was measured with the same settings and sources is skipped, so the same command
continues a list that was stopped. A refused cell is printed and skipped. A cell that fails is kept as a failure, and
the others follow, unless the GPU itself cannot be used any more.
"""

import time
import traceback
from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import torch
import yaml
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from kvbench.config.catalogue import CONF, compose_overrides
from kvbench.efficiency import caches
from kvbench.efficiency import measure as efficiency
from kvbench.engine import timing
from kvbench.runs.spec import RunSpec
from kvbench.validation import SettingError, require_choice

PLAN = CONF / "efficiency" / "plan.yaml"
EVERY = ("task=efficiency", "model=random")


def expand_cells(lines: Sequence[str]) -> Iterator[list[str]]:
    """Yield the settings of every cell. Lists are multiplied as in `run.py -m`: the last one changes fastest."""
    parser = OverridesParser.create()
    for line in lines:
        several: list[list[str]] = []
        for override in parser.parse_overrides(line.split()):
            line_of_one = str(override.input_line)
            name = line_of_one.split("=")[0]
            values = list(override.sweep_string_iterator()) if override.is_sweep_override() else None
            several.append([f"{name}={value}" for value in values] if values else [line_of_one])
        yield from (list(own) for own in product(*several))


def measure_cell(settings: list[str], results: Path, loaded: tuple | None) -> tuple:
    """Measure one cell. Another model that is still loaded is dropped first; return the key of the loaded one."""
    run = RunSpec.from_config(compose_overrides([*EVERY, *settings, f"results={results}"]))
    key = (run.checkpoint, run.dtype, run.device)
    if loaded not in (None, key):
        caches.load_weights.cache_clear()
        timing.clear(run.device)
    try:
        print(efficiency.summarize_lines(*efficiency.measure_once(run, results)), flush=True)
    except SettingError:
        raise
    except Exception as error:
        traceback.print_exc()
        print(f"failed: {' '.join(settings)}", flush=True)
        efficiency.append_failure(run, results, error)
        if run.device != "cpu":
            torch.cuda.synchronize()  # raises again if nothing can run any more
    timing.clear(run.device)
    return key


def measure_plan(options: Namespace) -> int:
    """Measure the cells of a list. Return 1 if the time was over before the last one, else 0."""
    begin, loaded = time.monotonic(), None
    plan = yaml.safe_load(options.plan.read_text())
    require_choice("list", options.list, plan)
    todo = list(expand_cells(plan[options.list]))
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for number, settings in enumerate(todo, 1):
            if time.monotonic() - begin > 60 * options.minutes:
                print(f"{options.minutes:g} minutes are over: {len(todo) - number + 1} of {len(todo)} cells are left")
                return 1
            print(f"[{number}/{len(todo)}] {' '.join(settings)}", flush=True)
            try:
                loaded = measure_cell(settings, options.results, loaded)
            except SettingError as error:
                print(f"refused: {error}", flush=True)
    return 0

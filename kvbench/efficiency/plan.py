"""Measure all cells of a list in one process: `make efficiency`.

A list is a key of conf/efficiency/plan.yaml. Its lines are arguments of `run.py -m`, with comma lists. The model stays
loaded from cell to cell. A cell that was measured with the same settings and sources is skipped, so the same command
continues a list that was stopped. A refused cell is printed and skipped. A cell that fails is kept as a failure, and
the others follow, unless the GPU itself cannot be used any more.
"""

import time
import traceback
from argparse import Namespace
from pathlib import Path

import torch
import yaml

from kvbench.config.compose import CONF, compose_config, expand_cells
from kvbench.efficiency import caches
from kvbench.efficiency import measure as efficiency
from kvbench.engine import timing
from kvbench.runs.spec import RunSpec
from kvbench.validation import SettingError, require_choice

PLAN = CONF / "efficiency" / "plan.yaml"
EVERY = ("task=efficiency", "model=random")


def measure_cell(settings: list[str], results: Path, loaded: tuple | None) -> tuple:
    """Measure one cell. Another model that is still loaded is dropped first; return the key of the loaded one."""
    run = RunSpec.from_config(compose_config([*EVERY, *settings, f"results={results}"]))
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
    todo = [cell for line in plan[options.list] for cell in expand_cells(line.split())]
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

"""Measure what sharing saves: the seconds of a sweep's runs together and each alone.

Without given methods and budgets it runs METHODS at BUDGETS, and the full cache as in a sweep. In a round, all runs are
executed twice into new folders, first together and then one after the other, from the same prompts with the same loaded
weights. Together they share prefills and, unless sweep.share_decoding=false, the decoding of answers. Before the first
round all runs read a sample together: a short one on a CPU. On a GPU they read it alone too, and nothing has to be
compiled or rehearsed in the rounds. The ratio is seconds alone / seconds together, with medians over the rounds. A line
is appended to <results>/efficiency/share-<machine>.csv, and what the last round's seconds were spent on is printed.

Weights may be random, but prompts need a tokenizer: model=random model.like=llama31_8b model.tokenizer=reference.
"""

import time
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from kvbench.config import catalogue
from kvbench.config.compose import compose_config, expand_cells, parse_override
from kvbench.efficiency.measure import collect_versions
from kvbench.efficiency.measured_task import machine_name
from kvbench.engine.spending import describe, start_counting
from kvbench.runs.resources import Resources
from kvbench.runs.runner import execute_runs
from kvbench.runs.spec import RunSpec
from kvbench.store.efficiency_csv import append_lines, check_columns
from kvbench.validation import SettingError, require_int, require_writable

METHODS = ("snapkv", "keydiff", "dropkv", "knorm", "tova", "expected_attention")
BUDGETS = (0.1, 0.3)
SHORT = 1024  # tokens of the prompts that a CPU reads before anything is timed
ROUNDS = "rounds="
COLUMNS = (
    "machine", "model", "weights", "task", "length", "samples", "methods", "budgets", "runs", "rounds", "together_s",
    "alone_s", "ratio", "decoded_together", "dtype", "threads", "torch", "transformers", "triton", "date", "python",
    "cuda", "sources", "commit", "driver",
)  # fmt: skip


@dataclass(frozen=True)
class Round:
    """What executing the runs once took.

    Attributes:
        seconds: The time.
        spent: A line that says what it was spent on.
        decoded_together: Most answers that were decoded as one batch.
    """

    seconds: float
    spent: str = ""
    decoded_together: int = 1


@dataclass(frozen=True)
class SharingTimes:
    """Every round, with all runs together and each alone."""

    together: tuple[Round, ...]
    alone: tuple[Round, ...]

    @property
    def seconds(self) -> tuple[float, float]:
        """The medians of both."""
        return median(timed.seconds for timed in self.together), median(timed.seconds for timed in self.alone)

    @property
    def ratio(self) -> float:
        """How many times longer the runs take alone."""
        together, alone = self.seconds
        return alone / together


def measure_sharing(runs: Sequence[RunSpec], short: Sequence[RunSpec], rounds: int, bench: Resources) -> SharingTimes:
    """Time runs that share their prefills.

    Args:
        runs: The runs.
        short: The same runs on one sample, executed once before.
        rounds: Number of rounds.
        bench: Tokenizer, model and prompts.
    """
    first = Resources(short[0], {"model": bench.model, "tokenizer": bench.tokenizer}, rehearsed=bench.rehearsed)
    for together in (True, False) if runs[0].device != "cpu" else (True,):
        time_runs(short, first, together)
    bench.prompts  # noqa: B018 - the prompts are made before anything is timed
    pairs = [(time_runs(runs, bench, True), time_runs(runs, bench, False)) for _ in range(rounds)]
    return SharingTimes(tuple(together for together, _ in pairs), tuple(alone for _, alone in pairs))


def time_runs(runs: Sequence[RunSpec], bench: Resources, together: bool) -> Round:
    """Make the records of the runs in a new folder."""
    with TemporaryDirectory() as folder:
        start_counting()
        begin, most = time.perf_counter(), 1
        for some in [runs] if together else [[replace(run, shares_decoding=False)] for run in runs]:
            with redirect_stderr(StringIO()) as said:
                folders = execute_runs(some, Path(folder), bench)
            records = [record for run_folder in folders for record in run_folder.records().values()]
            shared = {record.get("shared_prefill") for record in records}
            most = max([most, *(record.get("decoded_together", 1) for record in records)])
            if not all(run_folder.finished for run_folder in folders) or shared != {len(some)}:
                raise SettingError(f"limit: {len(some)} runs could not be made at once: {said.getvalue()[-300:]}")
        seconds = time.perf_counter() - begin
        return Round(seconds, describe(seconds), most)


def compose_runs(overrides: Sequence[str], *more: str) -> tuple[DictConfig, list[RunSpec]]:
    """Compose the full cache's run and those of all cells; SettingError unless all can share their prefills."""
    given = [parse_override(text).key_or_group for text in overrides]
    usual = {"method": METHODS, "budget": BUDGETS}
    lines = [f"{name}={','.join(map(str, values))}" for name, values in usual.items() if name not in given]
    configs = [compose_config([*cell, *more]) for cell in expand_cells([*overrides, *lines])]
    runs = [RunSpec.from_config(config) for config in configs]
    runs = list({str(run.value): run for run in [runs[0].baseline(), *runs]}.values())
    if len({run.reading for run in runs}) > 1 or runs[0].reading is None or len(runs) < 3:
        raise SettingError("method: cells that read their prompts together, two at least; not all of these do")
    return configs[0], runs


def run_sharing_bench(arguments: Sequence[str]) -> None:
    """Measure, append a line and print it. `arguments` are overrides of settings, and maybe ``rounds=``."""
    given = next((argument.removeprefix(ROUNDS) for argument in arguments if argument.startswith(ROUNDS)), "1")
    require_int("rounds", int(given) if given.isdecimal() else given, 1)
    rounds = int(given)
    try:
        asked = [argument for argument in arguments if not argument.startswith(ROUNDS)]
        config, runs = compose_runs(asked)
    except (HydraException, OmegaConfBaseException) as error:
        raise SettingError(catalogue.error_message(error) or " ".join(str(error).split())) from None
    require_writable("results", Path(config.results))
    length = runs[0].task.length
    if length is None or runs[0].measures:
        raise SettingError(f"task={runs[0].task_settings['name']}: one whose prompts have a task.length")
    brief = [f"task.length={min(SHORT, length)}"] if runs[0].device == "cpu" else []
    _, short = compose_runs(asked, *brief, "limit=1")
    first, name = runs[0], machine_name(runs[0].device)
    path = Path(config.results) / "efficiency" / f"share-{name}.csv"
    if path.exists():
        check_columns(path, COLUMNS)
    bench = Resources(first)
    saving = measure_sharing(runs, short, rounds, bench)
    line = {
        "machine": name, "model": first.checkpoint.name, "weights": first.checkpoint.identity(),
        "task": first.task_settings["name"], "length": length, "samples": len(bench.prompts),
        "methods": " ".join(dict.fromkeys(run.groups["method"]["name"] for run in runs)),
        "budgets": " ".join(dict.fromkeys(str(run.budget.value) for run in runs)), "runs": len(runs), "rounds": rounds,
        "together_s": saving.seconds[0], "alone_s": saving.seconds[1], "ratio": saving.ratio,
        "decoded_together": max(timed.decoded_together for timed in saving.together),
        "dtype": first.dtype, "threads": torch.get_num_threads(), **collect_versions(first),
    }  # fmt: skip
    append_lines(path, [line], COLUMNS)
    print(
        f"{len(runs)} runs of {line['samples']} samples, {length} tokens: {line['together_s']:.1f} s together, "
        f"{line['alone_s']:.1f} s alone, {saving.ratio:.2f} times: {path}"
    )
    print(f"together: {saving.together[-1].spent}\nalone: {saving.alone[-1].spent}")

"""Run one cell or a sweep: `python run.py method=dropkv budget=0.05 task=ruler` (conf/config.yaml has the settings)."""

import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors reach `main`, which says them in one line
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # a hub out of reach is said once, by `print_refusal`

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from kvbench.config import catalogue
from kvbench.integrations.loggers import make_logger
from kvbench.runs import checks
from kvbench.validation import ContractError, SettingError, describe_write_error, name_file_in_errors

MULTIRUN_OPTIONS = {"-m", "--multirun"}


@hydra.main(version_base="1.3", config_path=str(catalogue.CONF), config_name="config")
def run_cell(config: DictConfig) -> None:
    """One run and its baseline, from the store or made now, and the table of both."""
    runs, log, swept = [], None, HydraConfig.get().mode == RunMode.MULTIRUN
    choices = HydraConfig.get().runtime.choices
    try:
        if swept:
            write_reason("failed", None)
            write_reason("refused", None)
        elif preset := choices.get("preset"):
            raise SettingError(f"preset={preset}: is a sweep; python run.py -m preset={preset}")
        elif choices["hydra/launcher"] == "slurm":
            raise SettingError("hydra/launcher=slurm: needs -m, which makes each cell a job; or hydra/launcher=local")
        catalogue.check_choices(config, choices)
        checked = checks.check_settings(config)
        log = make_logger(config)
        if log is not None and getattr(checked.task, "measures", False):
            raise SettingError(f"logger={config.logger.name}: task={config.task.name} keeps no records; logger=none")
        from kvbench.analysis.closing_table import build_run_table
        from kvbench.efficiency import measure
        from kvbench.integrations import math_verify
        from kvbench.runs.resources import Resources
        from kvbench.runs.runner import execute_run, execute_runs
        from kvbench.runs.spec import RunSpec
        from kvbench.runs.workers import count_workers, execute_in_workers
        from kvbench.store.run_folder import run_hash
        from kvbench.sweeps.compose import sharing_groups

        run = RunSpec.from_config(config, checked)
        if run.measures:
            print(measure.summarize_lines(*measure.measure_once(run, Path(config.results))))
            return
        results, bench, workers = (
            Path(config.results),
            Resources(run),
            count_workers(choose_workers(config), run.device),
        )
        base = run.baseline()
        runs = [base] if run.value == base.value else [base, run]
        together = sharing_groups(Path(HydraConfig.get().sweep.dir), runs, results) if swept else []
        if workers > 1:
            execute_in_workers([*together, *([own] for own in runs)], results, workers)
        else:
            for company in together:
                execute_runs(company, results, bench)
        full, *more = found = [execute_run(own, results, bench) for own in runs]
        method = more[0] if more else None
        width = shutil.get_terminal_size(fallback=(120, 24)).columns
        print(build_run_table(run.value, full, method).to_text(max(width, 80)))
        for own, records in zip(runs, found, strict=True):
            if not any(record["meta"].get("verify") for record in records.values()):
                continue
            folder = results / "runs" / run_hash(own.value)
            try:
                math_verify.grade(folder)
            except SettingError as error:  # the answers are there, and can be graded later
                print_refusal(f"{error}, then python -m kvbench grade {results}")
            for note in math_verify.describe_verdicts(own.groups["method"]["name"], folder):
                print("\n".join(textwrap.wrap(note, max(width, 80), subsequent_indent="  ")))
        if log is not None:
            log.finished(runs)
    except (SettingError, ContractError) as error:
        broken = isinstance(error, ContractError)
        if broken and log is not None:
            log.failed(runs, error)
        if not swept:
            code = print_refusal(str(error))
            sys.exit(1 if broken else code)
        print_refusal(f"{' '.join(HydraConfig.get().overrides.task)}: {error}")
        # Hydra would announce an error itself; `Sweep.exit_code` reads these files
        write_reason("failed" if broken else "refused", str(error))
    except KeyboardInterrupt as stop:
        if not swept:
            stop.args = (describe_progress([own.value for own in runs], Path(str(config.results))),)
        raise
    except Exception as error:
        if log is not None:
            log.failed(runs, error)
        line = describe_write_error(error) if isinstance(error, OSError) else None
        if line is not None and choices["hydra/launcher"] != "slurm":  # the next cell would not find a better disk
            print_refusal(line)
            sys.exit(1)
        if swept:  # for whoever asks for the sweep's state
            write_reason("failed", f"{type(error).__name__}: {error}")
        raise


def write_reason(name: str, reason: str | None) -> None:
    """Write why a cell of a sweep has no records into its folder, where the disk takes it; None: take it away."""
    path = Path(HydraConfig.get().runtime.output_dir, name)
    with suppress(OSError):
        if reason is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(f"{reason}\n", encoding="utf-8", errors="backslashreplace")


def describe_progress(values: Sequence[Mapping[str, Any]], results: Path) -> str:
    """Say how many samples of these runs are done and that the others can follow."""
    from kvbench.store.run_folder import run_hash
    from kvbench.sweeps.status import read_state

    states = [read_state(results, run_hash(value)) for value in values]
    total = next((state.total for state in states if state.total), None)
    where = f" at {sum(state.records for state in states)} of {total * len(states)}" if total else ""
    return f"{where}; the same command goes on"


def choose_workers(config: DictConfig) -> object:
    """What `workers` says, or what the launcher makes of it where it says nothing."""
    local = HydraConfig.get().runtime.choices.get("hydra/launcher") == "local"
    return config.workers if config.workers is not None else "auto" if local else 1


def print_refusal(line: str) -> int:
    """Say in one line what cannot be used; returns the exit code for it."""
    print(f"kvbench: {line}", file=sys.stderr)
    return 2


def main(given: Sequence[str] | None = None) -> int:
    """Exit code 2 and one line for a setting that cannot be used."""
    if given is not None:
        sys.argv[1:] = given  # Hydra reads them there
    if "--cfg" in sys.argv or "-c" in sys.argv:
        sys.argv.append("--resolve")
    swept = None
    try:
        if MULTIRUN_OPTIONS & set(sys.argv) and not {"--cfg", "-c", "--info", "-i", "--help", "-h"} & set(sys.argv):
            from kvbench.sweeps import capacity
            from kvbench.sweeps.compose import Sweep, SweepOverrides

            asked = SweepOverrides.of([argument for argument in sys.argv[1:] if not argument.startswith("-")])
            capacity.check_capacity(asked)
            swept = Sweep.begin(asked)
            if (code := swept.early_exit_code) is not None:
                return code
            options = [
                argument for argument in sys.argv[1:] if argument.startswith("-") and argument not in MULTIRUN_OPTIONS
            ]
            sys.argv[1:] = ["-m", *asked.overrides, f"hydra.sweep.dir={swept.folder}", *options]
        with name_file_in_errors(swept.folder) if swept is not None else nullcontext():  # Hydra writes there too
            run_cell()
    except KeyboardInterrupt as stop:
        if swept is not None:
            stop.args, swept = (swept.progress_note,), None
        raise
    except Exception as error:
        line = catalogue.error_message(error)
        if line is None:
            raise
        return print_refusal(line)
    finally:
        if swept is not None:
            swept.print_end()
    return swept.exit_code if swept is not None else 0

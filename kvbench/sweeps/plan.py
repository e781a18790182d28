"""Plan a sweep: expand its cells, check each of them, and find out which are done, before the first one runs.

The cells of a sweep come from the values between commas on the command line, from `preset=`, which stands for all runs
of a paper's table, or from both. Every cell is composed and checked once. If a cell is refused, the others still run.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shutil import which
from typing import Any

from tqdm import tqdm

from kvbench.config.compose import Composition, compose, expand_cells, expand_override, is_group, parse_override
from kvbench.config.imports import sources_unchanging
from kvbench.integrations.loggers import Logger, make_logger
from kvbench.papers.experiment_key import CUT_SETTINGS
from kvbench.papers.paper_runs import FULL, Settings, expand_preset, is_of_cache, list_rows, read_rows
from kvbench.runs.checks import check_results, check_settings
from kvbench.runs.devices import is_built_for_gpus
from kvbench.runs.fork_server import start_fork_server
from kvbench.runs.spec import RunSpec, SharedParts
from kvbench.stops import check_stop
from kvbench.store.run_folder import RunFolder, run_hash
from kvbench.sweeps import status
from kvbench.sweeps.capacity import check_capacity, describe_memory
from kvbench.sweeps.results import describe_results
from kvbench.validation import ContractError, SettingError, require_choice, require_writable

PAPER_KEYS = ("preset", "row")  # keys of the command line that stand for settings of the papers' runs


def resolve_rows(overrides: Sequence[str]) -> list[str]:
    """Return the overrides of one run. The settings that `row=` stands for replace it.

    Raises:
        SettingError: There are several runs, or no such row.
    """
    for text in overrides:
        override = parse_override(text)
        if override.key_or_group == "preset" and override.value() is not None:
            raise SettingError(f"{text}: is a sweep; python run.py -m {text}")
        if override.is_sweep_override():
            raise SettingError(f"{text}: has several values; python run.py -m {text}")
    [cell] = expand_sweep(overrides)
    return cell


def expand_sweep(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of every cell, each cell once.

    Settings that the user gives replace those of a preset. With a preset, `row=` selects some of its rows.
    """
    presets, rows = (_read_names(overrides, key) for key in PAPER_KEYS)
    for row in rows:
        require_choice("row", row, list_rows())
    if presets:
        bases = [base for preset in presets for base in _choose_rows(preset, rows)]
    else:
        bases = [read_rows()[row] for row in rows] or [{}]
    plain = [text for text in overrides if parse_override(text).key_or_group not in PAPER_KEYS]
    cells = [_merge(base, cell) for base in bases for cell in expand_cells(plain)]
    return [list(cell) for cell in dict.fromkeys(map(tuple, cells))]


def _read_names(overrides: Sequence[str], key: str) -> list[str]:
    """Return the names that the overrides give for `preset` or `row`."""
    parsed = [parse_override(text) for text in overrides]
    texts = [text for override in parsed if override.key_or_group == key for text in expand_override(override)]
    return [name for text in texts if (name := text.partition("=")[2]) not in ("", "null")]


def _choose_rows(preset: str, rows: Sequence[str]) -> list[Settings]:
    """Return the runs of a preset. If rows are given, only theirs."""
    runs = expand_preset(preset)
    if not rows:
        return list(runs)
    caches = [{name: value for name, value in run.items() if is_of_cache(name)} for run in runs]
    for row in rows:
        if read_rows()[row] not in caches:
            there = [name for name, settings in read_rows().items() if settings in caches]
            raise SettingError(f"row={row}: preset={preset} has none; choose from {', '.join(there)}")
    wanted = [read_rows()[row] for row in rows]
    return [run for run, cache in zip(runs, caches, strict=True) if cache in wanted]


def _merge(base: Mapping[str, str], given_overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a paper's run, in which the settings that the user gives replace the paper's.

    If the user chooses another file of a group, none of the paper's settings of this group remain. Settings that say
    how much is cut are dropped for the full cache.
    """
    if not base:
        return list(given_overrides)
    given = {parse_override(text).key_or_group for text in given_overrides}
    groups = {name for name in given if is_group(name)}
    kept = {name: value for name, value in base.items() if name not in given and name.split(".")[0] not in groups}
    merged = [f"{name}={value}" for name, value in kept.items()] + list(given_overrides)
    if f"method={FULL}" not in merged:
        return merged
    return [text for text in merged if parse_override(text).key_or_group.split(".")[0] not in CUT_SETTINGS]


@dataclass(frozen=True)
class PlannedCell:
    """A cell of a sweep.

    Attributes:
        composition: Its settings.
        cell: What the sweep's folder stores about it.
        run: Its run. None if the cell is refused.
        log: Its logger, or None.
    """

    composition: Composition
    cell: status.SweepCell
    run: RunSpec | None = None
    log: Logger | None = None


@dataclass
class Sweep:
    """A sweep that is about to begin.

    Attributes:
        composition: The settings of its first cell. All cells have the same folders and launcher.
        cells: The cells.
        results: The folder of results.
        folder: The sweep's own folder, which says what its cells are and why some of them have no records.
        is_folder_given: Whether the user chose it. Otherwise `announce` takes one that no other sweep has.
    """

    composition: Composition
    cells: Sequence[PlannedCell]
    results: Path
    folder: Path
    is_folder_given: bool

    @classmethod
    def plan(cls, overrides: Sequence[str], executes: bool = False) -> "Sweep":
        """Compose and check the cells of the command line after `kvbench run -m` (`plan_lines`)."""
        return cls.plan_lines([overrides], executes)

    @classmethod
    def plan_lines(cls, lines: Sequence[Sequence[str]], executes: bool = False) -> "Sweep":
        """Compose and check the cells of several command lines, which become one sweep.

        Args:
            lines: Command lines after `kvbench run -m`, with the same folders, launcher and logger.
            executes: Whether this process will launch the sweep.

        Raises:
            SettingError: A folder cannot be written, there is no SLURM here, or all cells are refused for the same
                reason.
        """
        listed = (tuple(cell) for overrides in lines for cell in expand_sweep(overrides))
        expanded = [list(cell) for cell in dict.fromkeys(listed)]
        shared = compose(expanded[0])
        config, launcher = shared.config, shared.launcher
        check_results(config.results)
        results, folder = Path(config.results), Path(shared.hydra.sweep.dir)
        require_writable("results", results)
        require_writable("hydra.sweep.dir", folder)
        make_logger(config)  # raises here, once, if it cannot be used
        shown = tqdm(expanded, desc="checking cells", unit="cell", leave=False, disable=None)
        parts, counts = SharedParts(), status.RecordCounter()
        with sources_unchanging():
            cells = [
                plan_cell(cell_overrides, label, results, parts, counts, executes and launcher != "slurm")
                for cell_overrides, label in zip(shown, label_cells(expanded), strict=True)
            ]
        for preset in [name for overrides in lines for name in _read_names(overrides, "preset")]:
            check_capacity(preset, [planned.run for planned in cells if planned.run is not None])
        reasons = {planned.cell.refused for planned in cells}
        if len(reasons) == 1 and None not in reasons:  # all for the same reason: there is nothing to launch
            raise SettingError(reasons.pop())
        given = any(parse_override(text).key_or_group == "hydra.sweep.dir" for text in lines[0])
        sweep = cls(shared, cells, results, folder, given)
        absent = [name for name in ("sbatch", "srun") if launcher == "slurm" and which(name) is None]
        if absent and not sweep.finished:
            raise SettingError(
                f"hydra/launcher=slurm: no {' and no '.join(absent)} on PATH; a host that submits to SLURM, or "
                "hydra/launcher=local"
            )
        return sweep

    @property
    def launcher(self) -> str:
        """How the cells are launched: basic, local or slurm."""
        return self.composition.launcher

    @property
    def counted(self) -> bool:
        """Whether the cells have samples. Cells that measure cost have none."""
        return not any(planned.run and planned.run.measures for planned in self.cells)

    @cached_property
    def states(self) -> list[status.RunState]:
        """The state of each cell before the first one is launched."""
        return status.read_planned_states(self.results, [planned.cell for planned in self.cells])

    @property
    def finished(self) -> bool:
        """Whether every cell is either refused or done."""
        return self.counted and all(state.name in ("done", "refused") for state in self.states)

    def describe(self) -> str:
        """Return a text that lists the cells with their states and estimates the remaining time."""
        if not self.counted:
            return f"{len(self.cells)} cells; those that measure cost keep no records, so no states are known"
        return status.describe_plan(self.results, [planned.cell for planned in self.cells], self.states)

    def describe_memory(self) -> list[str]:
        """Return lines about the memory of the runs that are not done. This reads the models' configurations."""
        runs = [planned.run for planned, state in zip(self.cells, self.states, strict=True) if state.name != "done"]
        return describe_memory([run for run in runs if run is not None])

    def announce(self, width: int, styled: bool) -> None:
        """Print the cells and their states, and write them into the sweep's folder. If all are done, print the matrix.

        Args:
            width: Characters of a line.
            styled: As in `kvbench.analysis.score_matrix_format.format_text`.
        """
        if not self.finished and not self.is_folder_given:
            self.folder = status.make_sweep_folder(self.folder)
        if not self.counted:
            return
        if self.finished:
            count = status.count_states(self.states)
            print(f"{len(self.cells)} cells: {count}\n{self.describe_results(width, styled)}", end="", flush=True)
        else:
            print(self.describe(), flush=True)
            status.write_cells(self.folder, [planned.cell for planned in self.cells])

    def describe_results(self, width: int, styled: bool) -> str:
        """Return the matrix of the cells' scores, and why cells are refused."""
        return describe_results(self.results, [planned.cell for planned in self.cells], width, styled)

    @property
    def exit_code(self) -> int:
        """The exit code: 1 if a cell failed, 2 if one was refused, otherwise 0."""
        failed, refused = (any(self.folder.glob(f"*/{name}")) for name in ("failed", "refused"))
        return 1 if failed else 2 if refused or any(planned.cell.refused for planned in self.cells) else 0

    @property
    def progress_note(self) -> str:
        """The end of the message after Ctrl-C: how many cells and answers there are, and that the command continues."""
        states = [state for _, state in status.read_states(self.results, self.folder)] if self.counted else []
        if not states:
            return "; the same command goes on"
        done, answers = sum(state.name == "done" for state in states), status.count_answers(self.results, self.folder)
        return f" at {done} of {len(states)} cells, with {answers} answers; the same command goes on"

    def print_end(self, width: int, styled: bool) -> None:
        """Print the matrix of the cells' scores, and the states of the cells that are not done."""
        if self.counted:
            print(self.describe_results(width, styled))
            self.print_states()

    def print_states(self) -> None:
        """Print the states of the cells that are not done."""
        if self.counted:
            status.print_states(self.results, self.folder, with_done=False)


def label_cells(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return a label for each cell: the overrides in which it differs from other cells."""
    values: dict[str, set[str | None]] = {}
    settings = [{name: value for name, _, value in (text.partition("=") for text in overrides)} for overrides in cells]
    names = dict.fromkeys(name for cell in settings for name in cell)
    for name in names:
        uncut = name.split(".")[0] in CUT_SETTINGS  # the full cache has none of these
        values[name] = {cell.get(name) for cell in settings if name in cell or not uncut}
    told = [[f"{name}={cell[name]}" for name in cell if len(values[name]) > 1] for cell in settings]
    return [" ".join(texts) or "(one cell)" for texts in told]


def plan_cell(
    overrides: Sequence[str],
    label: str = "(one cell)",
    results: Path | None = None,
    shared: SharedParts | None = None,
    counts: Callable[[Path], tuple[int, int, str]] = status.count_records,
    executes: bool = False,
) -> PlannedCell:
    """Compose and check a cell. If it is refused, the returned cell holds the reason.

    Args:
        overrides: The overrides of the cell.
        label: A label that distinguishes it from the other cells.
        results: The folder of results. A cell whose records are all in it is not checked again, so that a finished
            sweep needs neither torch nor transformers. None checks every cell.
        shared: Parts that its run may share with other runs of the sweep.
        counts: How the records of a run are counted. It may remember what it counted.
        executes: Whether this process will execute the cell, so that the imports of its workers may begin.
    """
    check_stop()
    composition = compose(overrides)
    try:
        run, log = describe_run(composition, shared, executes)
        if results is None or not is_done(run, results, counts):
            if executes and not run.measures:
                import_for_workers(composition, run.device)
            run.check()
            shares = composition.config.sweep.share_prefill and not run.measures
            readings = [spec.reading for spec in (run, run.baseline())] if shares else []
        else:
            readings = []
        cell = status.SweepCell(label, run.value, run.baseline().value, overrides=overrides, readings=readings)
    except (SettingError, ContractError) as error:
        return PlannedCell(composition, status.SweepCell(label, refused=str(error), overrides=overrides))
    return PlannedCell(composition, cell, run, log)


def import_for_workers(composition: Composition, device: str | None = None) -> None:
    """Let the imports of worker processes begin if there will be several.

    Args:
        composition: The settings of a run.
        device: Its device. None if it is not known yet: then the imports begin only if torch, whose own import takes
            seconds, must be asked for a GPU. Otherwise it is soon known whether the run needs any worker.
    """
    count = composition.workers
    if count == 1 or device is None and (composition.config.device == "cpu" or not is_built_for_gpus()):
        return
    if count == "auto" and device == "cuda":
        import torch

        count = torch.cuda.device_count()
    if isinstance(count, int) and count > 1:
        start_fork_server()


def is_done(run: RunSpec, results: Path, counts: Callable[[Path], tuple[int, int, str]]) -> bool:
    """Return whether the store has all records of a run and of its full cache.

    Args:
        run: The run.
        results: The folder of results.
        counts: How records are counted. It may remember what it counted.
    """
    if run.measures or not (results / "runs").is_dir():
        return False
    try:
        names = [run_hash(spec.value) for spec in (run, run.baseline())]
    except SettingError:  # `check` may say more about it
        return False
    return status.read_cell_state(results, names, counts).name == "done"


def make_run(composition: Composition) -> tuple[RunSpec, Logger | None]:
    """Return the run that settings describe, checked, and its logger or None. This process will execute it.

    Raises:
        SettingError: It cannot be made.
    """
    run, log = describe_run(composition, executes=True)
    if not run.measures:  # a run that measures cost has one process
        import_for_workers(composition, run.device)
    run.check()
    return run, log


def describe_run(
    composition: Composition, shared: SharedParts | None = None, executes: bool = False
) -> tuple[RunSpec, Logger | None]:
    """Return the run that settings describe, not checked yet, and its logger or None.

    This needs torch only if there may be a GPU.

    Args:
        composition: The settings.
        shared: Parts that the run may share with other runs of a sweep.
        executes: Whether this process will execute the run, so that the imports of its workers may begin.

    Raises:
        SettingError: A setting is invalid.
    """
    config = composition.config
    checked = check_settings(config, shared.tasks if shared else None)
    log, measures = make_logger(config), getattr(checked.task, "measures", False)
    if log is not None and measures:
        raise SettingError(f"logger={config.logger.name}: task={config.task.name} keeps no records; logger=none")
    if executes and not measures:
        import_for_workers(composition)
    return RunSpec.describe(config, checked, shared), log


def sharing_groups(
    cells: Iterable[tuple[Sequence[str], Sequence[str | None], Callable[[], Any]]], runs: Sequence[Any], results: Path
) -> list[list[Any]]:
    """Group the runs of a sweep that can read their prompts together.

    Args:
        cells: For each cell the hashes of its run and its full cache, their readings (`RunSpec.reading`), and a
            function that makes its run.
        runs: The runs that are about to be executed.
        results: The folder of results.

    Returns:
        A list of runs for each reading that an unfinished run of `runs` belongs to.
    """
    left = [folder for run in runs if not (folder := RunFolder(results / "runs", run.value)).finished]
    if not left:
        return []
    cells = list(cells)
    pairs = [pair for names, shared, _ in cells for pair in zip(names, shared, strict=False)]
    readings = {name: reading for name, reading in pairs if reading is not None}
    groups: dict[str, dict[str, Any]] = {readings[folder.hash]: {} for folder in left if folder.hash in readings}
    for names, _, make in cells:
        here = {name: groups[readings[name]] for name in names if readings.get(name) in groups}
        if new := [name for name, some in here.items() if name not in some]:
            run = make()
            for name, spec in zip(names, (run, run.baseline()), strict=True):
                if name in new:
                    here[name][name] = spec
    return [list(some.values()) for some in groups.values() if len(some) > 1]

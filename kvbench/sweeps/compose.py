"""The cells of a sweep, composed and checked before the first of them runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from kvbench.config import catalogue
from kvbench.integrations.loggers import make_logger
from kvbench.runs.checks import check_results, check_settings
from kvbench.store.run_folder import RunFolder
from kvbench.sweeps import status
from kvbench.validation import ContractError, SettingError, require_writable


@dataclass(frozen=True)
class SweepOverrides:
    """What the overrides of a sweep say: what its cells share, and what they do not, the axes of a preset first."""

    config: DictConfig  # of what they share, with Hydra's own
    fixed: list[str]
    axes: list[Override]

    @classmethod
    def of(cls, overrides: Sequence[str]) -> "SweepOverrides":
        """What is given takes the place of a preset's axis. What Hydra would refuse is raised as Hydra does."""
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        fixed = [one.input_line for one in parsed if not one.is_sweep_override()]
        with initialize_config_dir(str(catalogue.CONF), version_base="1.3"):
            whole = compose("config", fixed, return_hydra_config=True)
        given = {one.key_or_group for one in parsed}
        left = {key: axis for key, axis in (whole.hydra.sweeper.params or {}).items() if key not in given}
        own = OverridesParser.create().parse_overrides([f"{key}={axis}" for key, axis in left.items()])
        return cls(whole, fixed, [*own, *(one for one in parsed if one.is_sweep_override())])

    @property
    def overrides(self) -> list[str]:
        """What makes Hydra launch these cells and no others."""
        return [*self.fixed, *(one.input_line for one in self.axes), "hydra.sweeper.params=null"]


@dataclass(frozen=True)
class Sweep:
    """A sweep that Hydra is about to launch: where its records go and where it leaves what it did."""

    results: Path
    folder: Path
    counted: bool  # False: its cells measure cost and have no samples
    queued: bool = False  # whether a job has to be asked for, and nothing else than its records is wanted of it

    @classmethod
    def begin(cls, asked: SweepOverrides) -> "Sweep":
        """Say what its cells are and how far, and keep it. A cell that is refused does not stop the others."""
        check_results(asked.config.results)
        results, folder = Path(asked.config.results), Path(asked.config.hydra.sweep.dir)
        require_writable("results", results)
        require_writable("hydra.sweep.dir", folder)
        with initialize_config_dir(str(catalogue.CONF), version_base="1.3"):
            log = make_logger(asked.config)  # what it cannot use is said once
            [chosen] = BasicSweeper.split_arguments(asked.axes, None)
            found = [compose_cell(asked.fixed, some) for some in chosen]
        reasons = {cell.refused for cell, _ in found}
        if len(reasons) == 1 and None not in reasons:  # all for the same reason: there is nothing to launch
            raise SettingError(reasons.pop())
        launched = asked.config.hydra.runtime.choices["hydra/launcher"]
        queued = launched == "slurm" and log is None
        absent = [name for name in ("sbatch", "srun") if launched == "slurm" and which(name) is None]
        if absent and not (queued and all(is_done(results, cell) for cell, _ in found)):
            raise SettingError(
                f"hydra/launcher=slurm: no {' and no '.join(absent)} on PATH; a host that submits to SLURM, or "
                "hydra/launcher=local"
            )
        this = cls(results, folder, not any(run and run.measures for _, run in found), queued)
        if this.counted:
            cells = [cell for cell, _ in found]
            print(status.describe_plan(this.results, cells), flush=True)
            status.write_cells(this.folder, cells)
        return this

    @property
    def early_exit_code(self) -> int | None:
        """The exit code where jobs would wait in a queue to find everything done: 2 if a cell is refused."""
        states = status.read_states(self.results, self.folder) if self.queued and self.counted else ()
        return {("done",): 0, ("done", "refused"): 2}.get(tuple(sorted({state.name for _, state in states})))

    @property
    def exit_code(self) -> int:
        """The exit code once Hydra has launched the cells: 1 if one of them failed, 2 if one of them was refused."""
        failed, refused = (any(self.folder.glob(f"*/{name}")) for name in ("failed", "refused"))
        return 1 if failed else 2 if refused else 0

    @property
    def progress_note(self) -> str:
        """Say how many cells are done and that the others can follow."""
        states = [state for _, state in status.read_states(self.results, self.folder)] if self.counted else []
        where = f" at {sum(state.name == 'done' for state in states)} of {len(states)}" if states else ""
        return f"{where}; the same command goes on"

    def print_end(self) -> None:
        """Say how far the cells are now."""
        if self.counted:
            status.print_states(self.results, self.folder)


def is_done(results: Path, cell: status.SweepCell) -> bool:
    """Whether a cell wants nothing: it is refused, or all its records are there."""
    return cell.refused is not None or status.read_cell_state(results, cell.names).name == "done"


def compose_cell(fixed: list[str], own: list[str]) -> tuple[status.SweepCell, Any]:
    """A cell, of which `own` is what it does not share with the others, and its run, or why there is none."""
    label, overrides = " ".join(own) or "(one cell)", [*fixed, *own]
    try:
        config = catalogue.compose_overrides(overrides)
        known = check_settings(config)
        from kvbench.runs.spec import RunSpec  # imports torch, which no refusal waits for

        run = RunSpec.from_config(config, known)
    except (SettingError, ContractError) as error:
        return status.SweepCell(label, refused=str(error), overrides=overrides), None
    both = run, run.baseline()
    readings = [one.reading for one in both] if config.sweep.share_prefill and not run.measures else []
    return status.SweepCell(label, *(one.value for one in both), overrides=overrides, readings=readings), run


def sharing_groups(folder: Path, runs: Sequence[Any], results: Path) -> list[list[Any]]:
    """Runs of the sweep in `folder` that read prompts together, one list for each reading that any of `runs` which is
    not finished takes part in. Inside a job of Hydra, where its settings are at hand.
    """
    from kvbench.runs.spec import RunSpec

    left = [own for run in runs if not (own := RunFolder(results / "runs", run.value)).finished]
    if not left or not (folder / status.CELLS).is_file():
        return []
    cells = status.read_cells(folder)
    readings = {name: own for cell in cells for name, own in zip(cell["runs"], cell["readings"], strict=False)}
    found: dict[str, dict[str, Any]] = {readings[own.hash]: {} for own in left if readings.get(own.hash)}
    for cell in cells:
        here = {name: found[readings[name]] for name in cell["runs"] if readings.get(name) in found}
        new = [name for name, some in here.items() if name not in some]
        if new:
            run = RunSpec.from_config(compose("config", cell["overrides"]))
            for name, own in zip(cell["runs"], (run, run.baseline()), strict=True):
                if name in new:
                    here[name][name] = own
    return [list(some.values()) for some in found.values() if len(some) > 1]

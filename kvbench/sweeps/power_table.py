"""Say what planned sweeps can tell apart (kvbench.analysis.power): a line for each protocol and its largest column."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvbench.analysis.power import DEVIATION, POWER, compute_power, estimate_deviation
from kvbench.analysis.result_lines import Line, list_line_files, read_lines
from kvbench.analysis.text_table import Column, format_table, wrap_texts
from kvbench.config.catalogue import load_class
from kvbench.config.compose import compose
from kvbench.papers.experiment_key import CUT_SETTINGS
from kvbench.validation import SettingError, resolve_subtasks

CELL_SETTINGS = {*CUT_SETTINGS, "method", "codec"}  # in which the cells of a protocol may differ
LEGEND = (
    "Points that two cells must truly differ by, so that {power:.0f} % of studies show it on the same samples: two "
    "cells named beforehand (pair); a cell and the full cache, where all cells of a column are compared with it "
    "(full); two of all pairs of a column (ranks). The points of pair are also the smallest margin at which an equal "
    "cell is shown to be no worse. deviation: of one sample's difference, in points."
)


@dataclass(frozen=True)
class PlannedProtocol:
    """A protocol of planned sweeps.

    Attributes:
        label: Model, task and question.
        model: Name of the model.
        task: Name of the task.
        samples: Number of samples of each subtask.
        cells: Number of cells of its largest column, those with one budget.
    """

    label: str
    model: str
    task: str
    samples: Sequence[int]
    cells: int


def describe_power(cells: Iterable[Sequence[str]], measured: Path, deviation: float | None, width: int) -> list[str]:
    """Return lines that say what planned cells can tell apart.

    Args:
        cells: The overrides of each cell.
        measured: The folder with the files of measured tiers, by machine, from which deviations are estimated.
        deviation: Standard deviation of a sample's difference in points; None estimates it for each model and task.
        width: Width in characters.

    Raises:
        SettingError: No protocol says how many samples it has, or a setting is invalid.
    """
    protocols, unknown = list_protocols(cells)
    if not protocols:
        raise SettingError(f"--power: {'; '.join(unknown) or 'no cell compares a method with the full cache'}")
    lines = [line for path in list_line_files(measured) for line in read_lines(path)]
    rows = []
    for protocol in protocols:
        spread, source = choose_deviation(protocol, lines, deviation)
        rows.append((protocol, spread, source, compute_power(spread, protocol.samples, protocol.cells)))
    columns = [
        Column("", "protocol", lambda row: row[0].label),
        Column("", "samples", lambda row: str(sum(row[0].samples))),
        Column("", "cells", lambda row: str(row[0].cells)),
        Column("", "deviation", lambda row: f"{row[1]:.1f} {row[2]}"),
        Column("", "pair", lambda row: f"{row[3].pair:.1f}"),
        Column("", "full", lambda row: f"{row[3].full:.1f}"),
        Column("", "ranks", lambda row: f"{row[3].ranks:.1f}"),
    ]
    left = [f"Not computed: {text}." for text in unknown]
    table = [line for line in format_table(columns, rows, 0, width, 60) if line]
    return [*table, "", *wrap_texts([LEGEND.format(power=100 * POWER), *left], width)]


def list_protocols(cells: Iterable[Sequence[str]]) -> tuple[list[PlannedProtocol], list[str]]:
    """Return the protocols of planned cells, and why the samples of others are not known."""
    columns: dict[str, Counter[str]] = {}
    configs: dict[str, DictConfig] = {}
    for overrides in cells:
        config = compose(overrides).config
        if (config.method.name, config.codec.name) == ("full", "raw"):
            continue
        key = name_protocol(config)
        configs.setdefault(key, config)
        columns.setdefault(key, Counter())[str(config.budget)] += 1
    protocols: list[PlannedProtocol] = []
    unknown: dict[str, None] = {}
    for key, config in configs.items():
        try:
            samples = count_samples(config.task)
        except SettingError as error:
            unknown[str(error)] = None
            continue
        length = f" {config.task.length}" if config.task.get("length") else ""
        label = f"{config.model.name}, {config.task.name}{length}, question {config.question}"
        most = max(columns[key].values())
        protocols.append(PlannedProtocol(label, config.model.name, config.task.name, samples, most))
    return protocols, list(unknown)


def name_protocol(config: DictConfig) -> str:
    """Return a text that is the same for cells of one protocol."""
    kept = {name: value for name, value in config.items() if name not in CELL_SETTINGS}
    return OmegaConf.to_yaml(OmegaConf.create({str(name): value for name, value in kept.items()}))


def count_samples(task: Mapping[str, Any]) -> list[int]:
    """Return the number of samples of each subtask, from a task's settings alone.

    Raises:
        SettingError: The settings do not say it, or there is only one sample of a subtask.
    """
    names = getattr(load_class(f"task={task['name']}", task["_target_"]), "subtask_names", ())
    if not names or not isinstance(task.get("samples"), int):
        raise SettingError(f"the settings of task={task['name']} do not say how many samples each subtask has")
    given = task["subtasks"]
    chosen = resolve_subtasks("task.subtasks", given if isinstance(given, str) else list(given), names)
    count = min(task["samples"], task["samples"] if task.get("limit") is None else task["limit"])
    if count < 2:
        raise SettingError(f"task={task['name']} has {count} sample a subtask; give at least 2")
    return [count] * len(chosen)


def choose_deviation(protocol: PlannedProtocol, lines: Sequence[Line], deviation: float | None) -> tuple[float, str]:
    """Return the standard deviation of a sample's difference for a protocol, and where it comes from."""
    if deviation is not None:
        return deviation, "(given)"
    same = [line for line in lines if (line["model"], line["task"]) == (protocol.model, protocol.task)]
    estimate = estimate_deviation(same)
    return (DEVIATION, "(assumed)") if estimate is None else (estimate, "(measured)")

"""Say what planned sweeps can tell apart (kvbench.analysis.power): a line for each protocol and its largest column."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from kvbench.analysis.power import DEVIATION, POWER, compute_power, compute_reach, estimate_deviation
from kvbench.analysis.result_lines import Line, list_part_files, read_lines
from kvbench.analysis.text_table import Column, format_table, wrap_texts
from kvbench.config.catalogue import build, resolve
from kvbench.config.compose import compose
from kvbench.config.planned_pairs import ProtocolCell, count_pairs, parse_settings
from kvbench.papers.experiment_key import CUT_SETTINGS
from kvbench.validation import SettingError, call_hook

CELL_SETTINGS = {*CUT_SETTINGS, "method", "codec"}  # in which the cells of a protocol may differ
LEGEND = (
    "Points that two cells must truly differ by, so that {power:.0f} % of studies show it on the same samples: two "
    "cells named beforehand (pair), and the same where all planned comparisons of the sweeps are tested together "
    "(planned); a cell and the full cache, where all cells of a column are compared with it (full); two of all pairs "
    "of a column (ranks). The points of pair are also the smallest margin at which an equal cell is shown to be no "
    "worse. cells: those of the budget that has most. deviation: of one sample's difference, in points. Questions "
    "about one context count as if each had its own, which is too many where they go wrong together."
)


@dataclass(frozen=True)
class PlannedProtocol:
    """A protocol of planned sweeps.

    Attributes:
        key: A text that is the same for cells of the protocol.
        label: Model, task and question.
        model: Name of the model.
        task: Name of the task.
        samples: Number of samples of each subtask.
        cells: Its cells, without the full cache.
    """

    key: str
    label: str
    model: str
    task: str
    samples: Sequence[int]
    cells: Sequence[ProtocolCell]

    @property
    def answers(self) -> int:
        """Number of answers, those of the full cache included."""
        return sum(self.samples) * (len(self.cells) + 1)

    @property
    def column(self) -> int:
        """Number of cells of its largest column, those with one budget."""
        return max(Counter(cell.budget for cell in self.cells).values())


def describe_power(
    cells: Iterable[Sequence[str]],
    measured: Path,
    width: int,
    deviation: float | None = None,
    rate: float | None = None,
    pairs: Sequence[tuple[str, str]] = (),
) -> list[str]:
    """Return lines that say how many answers planned cells have, and what these can tell apart.

    Args:
        cells: The overrides of each cell.
        measured: The folder with the files of measured parts, by machine, from which deviations are estimated.
        width: Width in characters.
        deviation: Standard deviation of a sample's difference in points; None estimates it for each model and task.
        rate: How many answers are given in a minute; None if that is not known.
        pairs: The pairs of cells whose comparison is planned (kvbench.config.planned_pairs).

    Raises:
        SettingError: No protocol says how many samples it has, a setting is invalid, or a pair has no cells.
    """
    protocols, unknown = list_protocols(cells)
    if not protocols:
        raise SettingError(f"--power: {'; '.join(unknown) or 'no cell compares a method with the full cache'}")
    planned = count_pairs(pairs, [cell for protocol in protocols for cell in protocol.cells])
    lines = [line for path in list_part_files(measured) for line in read_lines(path)]
    together = sum(planned.values())
    rows = []
    for protocol in protocols:
        spread, source = choose_deviation(protocol, lines, deviation)
        joint = compute_reach(spread, protocol.samples, together) if protocol.key in planned else None
        rows.append(
            (protocol, f"{spread:.1f} {source}", compute_power(spread, protocol.samples, protocol.column), joint)
        )
    columns = [
        Column("", "protocol", lambda row: row[0].label),
        Column("", "samples", lambda row: str(sum(row[0].samples))),
        Column("", "cells", lambda row: str(row[0].column)),
        Column("", "answers", lambda row: f"{row[0].answers:,}"),
        Column("", "deviation", lambda row: row[1]),
        Column("", "pair", lambda row: f"{row[2].pair:.1f}"),
        Column("", "planned", lambda row: "" if row[3] is None else f"{row[3]:.1f}"),
        Column("", "full", lambda row: f"{row[2].full:.1f}"),
        Column("", "ranks", lambda row: f"{row[2].ranks:.1f}"),
    ]
    said = [describe_answers(sum(protocol.answers for protocol in protocols), rate)]
    if pairs:
        said.append(f"{together} planned comparisons: {'; '.join(f'{one} against {other}' for one, other in pairs)}.")
    said += [f"Not counted: {text}." for text in unknown]
    table = [line for line in format_table(columns, rows, 0, width, 60) if line]
    return [*table, "", *wrap_texts(said, width)]


def describe_columns(width: int) -> list[str]:
    """Return lines that say what the columns of the tables mean."""
    return wrap_texts([LEGEND.format(power=100 * POWER)], width)


def describe_answers(answers: int, rate: float | None) -> str:
    """Return how many answers there are, and how long they take at a rate of so many a minute."""
    if rate is None:
        return f"{answers:,} answers."
    return f"{answers:,} answers, about {max(1, round(answers / rate)):,} minutes at {rate:,g} a minute."


def list_protocols(cells: Iterable[Sequence[str]]) -> tuple[list[PlannedProtocol], list[str]]:
    """Return the protocols of planned cells, and why the samples of others are not known."""
    planned: dict[str, list[ProtocolCell]] = {}
    configs: dict[str, DictConfig] = {}
    for overrides in cells:
        config = compose(overrides).config
        if (config.method.name, config.codec.name) == ("full", "raw"):
            continue
        key = name_protocol(config)
        configs.setdefault(key, config)
        settings = tuple(f"{name}={value}" for name, value in parse_settings(overrides).items())  # each once
        budget = 1.0 if config.method.name == "full" else config.budget  # the full cache keeps all rows
        planned.setdefault(key, []).append(ProtocolCell(key, settings, str(budget)))
    protocols: list[PlannedProtocol] = []
    unknown: dict[str, None] = {}
    for key, config in configs.items():
        try:
            samples = count_samples(config)
        except SettingError as error:
            unknown[str(error)] = None
            continue
        length = f" {config.task.length}" if config.task.get("length") else ""
        label = f"{config.model.name}, {config.task.name}{length}, question {config.question}"
        protocols.append(PlannedProtocol(key, label, config.model.name, config.task.name, samples, planned[key]))
    return protocols, list(unknown)


def name_protocol(config: DictConfig) -> str:
    """Return a text that is the same for cells of one protocol."""
    kept = {name: value for name, value in config.items() if name not in CELL_SETTINGS}
    return OmegaConf.to_yaml(OmegaConf.create({str(name): value for name, value in kept.items()}))


def count_samples(config: DictConfig) -> list[int]:
    """Return the number of samples of each subtask, from the settings of a task and its data alone.

    Raises:
        SettingError: The task does not say it, a setting is invalid, or there is only one sample of a subtask.
    """
    settings = resolve("task", config.task)
    name = settings["name"]
    task = build("task", settings)
    if not hasattr(task, "count_samples"):
        raise SettingError(f"the settings of task={name} do not say how many samples each subtask has")
    call_hook(f"task={name}", "check", task.check)
    counts = list(call_hook(f"task={name}", "count_samples", task.count_samples).values())
    if min(counts) < 2:
        raise SettingError(f"task={name} has {min(counts)} sample a subtask; give at least 2")
    return counts


def choose_deviation(protocol: PlannedProtocol, lines: Sequence[Line], deviation: float | None) -> tuple[float, str]:
    """Return the standard deviation of a sample's difference for a protocol, and where it comes from."""
    if deviation is not None:
        return deviation, "(given)"
    same = [line for line in lines if (line["model"], line["task"]) == (protocol.model, protocol.task)]
    estimate = estimate_deviation(same)
    return (DEVIATION, "(assumed)") if estimate is None else (estimate, "(measured)")

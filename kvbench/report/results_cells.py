"""What the lines of measured cells say (kvbench.analysis.result_lines), for the pages of results.

A *part* of a study is one file of lines. A *section* is the lines of a part that may be compared: those of one model,
task, question and protocol. Cells are of three kinds, which no table mixes:

    evicting   raw rows, and the method was given a budget of them: cells of one budget hold similar bytes
    reading    a token reads clearly fewer rows than the cell holds: compared by the rows read
    point      a codec, or a method that decides how many rows stay: a point at its measured bytes
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from types import MappingProxyType
from typing import Any

from kvbench.analysis.byte_classes import reads_few_rows
from kvbench.analysis.cell_comparisons import CellComparison
from kvbench.analysis.joint_signs import find_margin, is_no_worse
from kvbench.analysis.result_lines import BYTES_GAIN, SIGN, Line, PartNumbers
from kvbench.analysis.turn_scores import TurnScores

ALL = 0.995  # a cell with at least this share of the full cache's bytes counts as holding all of them
MODELS = (
    "smollm2_long",
    "smollm2",
    "reference",
)  # the real models first; conclusions stand on the first that has lines
LONG_TASKS = ("ledger", "math500", "aime24", "aime25")  # their answers are long, and methods cut them too
TURN_TASKS = ("scbench",)  # several questions on one context
SEEDS = "seeds"  # part whose cells differ in the seeds of their files
TWICE = ("kvzip", "kvgrad")  # methods that let the model read each prompt twice
EVICTING, READING, POINT = KINDS = ("evicting", "reading", "point")
Protocol = tuple[str, str, str, str]  # model, task, question, and what else the cells of a section have in common


@dataclass(frozen=True)
class Section:
    """The cells of a part that may be compared.

    Attributes:
        part: Name of the part.
        protocol: What the cells have in common.
        cells: Their lines, with that of the full cache.
        planned: The planned comparisons of two of them.
        planned_in_all: Number of planned comparisons of the part that were measured; their signs hold together.
        varied: The comparisons of those that differ in presets, settings or files alone.
        changed: Their comparisons with what conf/measured.yaml changes in them.
        turns: Their scores by turn, where contexts get several questions.
        by_subtask: Run -> subtask -> mean score of its samples.
    """

    part: str
    protocol: Protocol
    cells: Sequence[Line]
    planned: Sequence[CellComparison] = ()
    planned_in_all: int = 0
    varied: Sequence[CellComparison] = ()
    changed: Sequence[CellComparison] = ()
    turns: Sequence[TurnScores] = ()
    by_subtask: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"Part {self.part}: {describe_protocol(self.protocol)}"

    @property
    def model(self) -> str:
        return self.protocol[0]

    @property
    def task(self) -> str:
        return self.protocol[1]

    @property
    def question(self) -> str:
        return self.protocol[2]

    @property
    def full(self) -> Line:
        """The line of the unchanged full cache."""
        return next(line for line in self.cells if is_full(line))

    @property
    def subtasks(self) -> int:
        """Subtasks of the task."""
        count: int = self.full["subtasks"]
        return count

    @property
    def samples(self) -> int:
        """Samples of a cell."""
        samples: int = self.full["n"]
        return samples

    def list_cells(self, *kinds: str) -> list[Line]:
        """Return the cells of these kinds, without the full cache."""
        return [line for line in list_methods(self.cells) if classify(line) in kinds]

    def find_cell(self, line: Line) -> Line | None:
        """Return the cell with the label and the budget of another one; None without any."""
        return next((each for each in self.cells if name_settings(each) == name_settings(line)), None)

    def list_classes(self) -> list[list[Line]]:
        """Return the evicting cells of each budget, the largest first, by their classes of similar bytes."""
        evicting = self.list_cells(EVICTING)
        columns = [[line for line in evicting if line["budget"] == budget] for budget in list_budgets(evicting)]
        return [cells for column in columns for cells in split_classes(column)]


def name_settings(line: Line) -> tuple[str, Any]:
    """Return label and budget, which say what a cell is in any section of a model, task and question."""
    return line["label"], line["budget"]


def split_sections(
    parts: Mapping[str, Sequence[Line]],
    numbers: Mapping[str, PartNumbers] = MappingProxyType({}),
) -> list[Section]:
    """Return the sections of all parts, in the order in which they begin.

    Args:
        parts: Name of a part -> its lines.
        numbers: Name of a part -> its numbers, for the parts whose comparisons are known.
    """
    sections = []
    for part, lines in parts.items():
        known = numbers.get(part, PartNumbers(lines))
        for protocol, cells in split_protocols(lines):
            names = {line["hash"] for line in cells}
            planned, varied, changed = (
                [each for each in compared if {each.one, each.other} <= names]
                for compared in (known.planned, known.varied, known.changed)
            )
            turns = [each for each in known.turns if each.run in names]
            compared = planned, len(known.planned), varied, changed
            sections.append(Section(part, protocol, cells, *compared, turns, known.subtasks))
    return sections


def list_models(sections: Sequence[Section]) -> list[str]:
    """Return the models of sections, those of MODELS first."""
    models = dict.fromkeys(section.model for section in sections)
    return [*(model for model in MODELS if model in models), *(model for model in models if model not in MODELS)]


def count_cells(sections: Sequence[Section]) -> dict[str, int]:
    """Return by part the number of its cells, without those of the full cache."""
    counts: dict[str, int] = {}
    for section in sections:
        counts[section.part] = counts.get(section.part, 0) + len(list_methods(section.cells))
    return counts


def split_protocols(lines: Sequence[Line]) -> list[tuple[Protocol, list[Line]]]:
    """Return the lines of each protocol, in the order in which models, tasks and questions begin, by their numbers."""
    groups: dict[Protocol, list[Line]] = {}
    for line in lines:
        model, task, question, also = (str(line[name] or "") for name in ("model", "task", "question", "protocol"))
        groups.setdefault((model, task, question, also), []).append(line)
    begun = list(dict.fromkeys(protocol[:3] for protocol in groups))

    def find_place(protocol: Protocol) -> tuple[int, list[int]]:
        return begun.index(protocol[:3]), find_numbers(protocol[3])

    return [(protocol, groups[protocol]) for protocol in sorted(groups, key=find_place)]


def find_numbers(also: str) -> list[int]:
    """Return the numbers in what a protocol says beside model, task and question, such as the length of the prompts."""
    return [int(number) for number in re.findall(r"\d+", also)]


def describe_protocol(protocol: Protocol) -> str:
    """Return the title of a protocol."""
    model, task, question, also = protocol
    return ", ".join(part for part in (model, f"{task} {also}".strip(), f"question {question}") if part)


def is_full(line: Line) -> bool:
    """Return whether a line is that of the unchanged full cache."""
    return (line["method"], line["codec"]) == ("full", "raw")


def is_decided(line: Line) -> bool:
    """Return whether the method decides how many rows stay. The line then has a setting in the place of the budget."""
    return isinstance(line["budget"], str)


def classify(line: Line) -> str:
    """Return the kind of a cell, one of KINDS."""
    if is_decided(line):
        return POINT
    if reads_few_rows(line["rows_kept"], line["rows_attended"]):
        return READING
    return EVICTING if line["codec"] == "raw" else POINT


def list_methods(cells: Sequence[Line]) -> list[Line]:
    """Return the cells but that of the full cache."""
    return [line for line in cells if not is_full(line)]


def list_budgets(cells: Sequence[Line]) -> list[Any]:
    """Return the budgets that cells were given, the largest first."""
    return sorted({line["budget"] for line in list_methods(cells) if not is_decided(line)}, reverse=True)


def arrange(cells: Sequence[Line]) -> dict[str, dict[Any, Line]]:
    """Return label -> budget -> cell."""
    rows: dict[str, dict[Any, Line]] = {}
    for line in cells:
        rows.setdefault(line["label"], {})[line["budget"]] = line
    return rows


def split_classes(column: Sequence[Line]) -> list[list[Line]]:
    """Return the cells of one budget by the class of similar bytes in which they are ranked."""
    classes: dict[str, list[Line]] = {}
    for line in column:
        classes.setdefault(line["rank_class"], []).append(line)
    return list(classes.values())


def list_leaders(cells: Sequence[Line]) -> list[Line]:
    """Return the cells of a class, or of a part of it, that may be the best there, the highest score first."""
    return sort_by_score(line for line in cells if not any(is_beaten_by(line, other) for other in cells))


def is_beaten_by(line: Line, other: Line) -> bool:
    """Return whether another cell of a class scores more for certain."""
    return other["hash"] in (line["beaten_by"] or "").split()


def list_ties(cells: Sequence[Line]) -> list[list[Line]]:
    """Return the largest runs of neighbours, by their scores, of which no two are told apart; each has two at least."""
    ordered, ties, covered = sort_by_score(cells), [], 0
    for begin in range(len(ordered)):
        end = begin + 1
        while end < len(ordered) and not any(is_beaten_by(ordered[end], line) for line in ordered[begin:end]):
            end += 1
        if end - begin > 1 and end > covered:
            ties.append(ordered[begin:end])
            covered = end
    return ties


def sort_by_score(cells: Any) -> list[Line]:
    """Return cells, the highest score first, and of equal scores by their labels."""
    return sorted(cells, key=lambda line: (-line["score"], line["label"]))


def sign_cells(cells: Sequence[Line], name: str) -> list[int]:
    """Return the joint sign of each cell's gain or difference.

    Args:
        cells: The cells that are counted together: of one protocol for a gain and OF_ALL, and of one budget for
            "difference".
        name: A key of GAINS, "difference" or OF_ALL.
    """
    return [line[f"{name}{SIGN}"] for line in cells]


def count_signs(cells: Sequence[Line], gain: str) -> dict[int, int]:
    """Return how many changes are jointly below 0, above 0, and neither: {-1: …, 1: …, 0: …}."""
    signs = sign_cells(cells, gain)
    return {sign: signs.count(sign) for sign in (-1, 0, 1)}


def is_kept(line: Line, full: Line, margin: float) -> bool:
    """Return whether a cell is shown to lose at most the margin, in points, against the full cache."""
    return is_no_worse(line["low"], find_margin(full["score"], margin))


def count_with_files(line: Line) -> float:
    """Return the bytes of a cell's cache and files over those of the full cache. Older runs know of no files."""
    files: float | None = line["bytes_with_files"]
    return read_bytes(line) if files is None else files


def find_front(cells: Sequence[Line], count: Callable[[Line], float] | None = None) -> list[Line]:
    """Return the cells such that no other one has a smaller count and scores as much, the smallest count first.

    Args:
        cells: The cells.
        count: Function that returns what is to be small; None takes the bytes held.
    """
    count = count or read_bytes
    front: list[Line] = []
    for line in sorted(cells, key=lambda line: (count(line), -line["score"])):
        if not front or line["score"] > front[-1]["score"]:
            front.append(line)
    return front


@dataclass(frozen=True)
class Spread:
    """Cells of similar bytes that differ in a preset, a setting or a file only.

    Attributes:
        cells: The cells, the highest score first.
        change: Difference of the highest and the lowest score, and the ends of its 95 % interval.
        apart: How many pairs of them differ, jointly for all pairs of the section.
    """

    cells: Sequence[Line]
    change: tuple[float, float | None, float | None]
    apart: int

    @property
    def pairs(self) -> int:
        return len(self.cells) * (len(self.cells) - 1) // 2


def find_spreads(section: Section) -> list[Spread]:
    """Return the cells of similar bytes that differ in nothing but presets, settings or files, if there are two."""
    lines = {line["hash"]: line for line in section.cells}
    compared = {frozenset((each.one, each.other)): each for each in section.varied}
    groups: list[set[str]] = []
    for pair in compared:  # all cells of a group are compared with each other
        joined = [group for group in groups if group & pair]
        groups = [*(group for group in groups if group not in joined), set(pair).union(*joined)]
    spreads = []
    for group in groups:
        cells = sort_by_score(lines[name] for name in group)
        known = [compared[frozenset((one["hash"], other["hash"]))] for one, other in combinations(cells, 2)]
        change = compared[frozenset((cells[0]["hash"], cells[-1]["hash"]))].change
        spreads.append(Spread(cells, change, sum(each.sign != 0 for each in known)))
    return spreads


@dataclass(frozen=True)
class BytesPair:
    """Two cells of a method that hold equal bytes: many rows in a codec, and fewer raw rows.

    Attributes:
        coded: The cell with the codec.
        raw: The cell with raw rows.
        change: Difference of their scores, coded - raw, and the ends of its 95 % interval.
        sign: -1, 0 or 1: whether the difference is below or above 0, jointly for all pairs of the section.
    """

    coded: Line
    raw: Line
    change: tuple[float, float | None, float | None]
    sign: int


def pair_equal_bytes(section: Section) -> list[BytesPair]:
    """Return the pairs of a section: for each cell with a codec, the raw cell of its method with the nearest bytes."""
    lines = {line["hash"]: line for line in section.cells}
    return [
        BytesPair(
            line,
            lines[line[f"{BYTES_GAIN}_from"]],
            (line[BYTES_GAIN], line[f"{BYTES_GAIN}_low"], line[f"{BYTES_GAIN}_high"]),
            line[f"{BYTES_GAIN}{SIGN}"],
        )
        for line in section.cells
        if line[f"{BYTES_GAIN}_from"] is not None
    ]


def read_bytes(line: Line) -> float:
    """Return the bytes that a cell holds, over those of the full cache."""
    held: float = line["bytes_held"]
    return held

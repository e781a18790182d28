"""Write and read what a tuning leaves for a model's card, beside its output OUT.

OUT.text.csv has the loss on plain text before and after the tuning. OUT.curve.csv is the learning curve of
OUT.log.jsonl in POINTS lines or fewer, in which kinds of samples are joined to families.
"""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import ceil
from pathlib import Path
from typing import Any

from kvbench.store.csv_rows import write_rows
from kvbench.validation import refuse_on_error

POINTS = 60  # most lines of a short learning curve
LINES = 5  # least lines of a log that a point joins, so that a few samples do not decide it
FAMILIES = {  # family -> the kinds of samples that it joins (kvbench.training.tuning_data)
    "needles": (
        *(f"niah_{name}" for name in ("single_1", "single_2", "single_3", "multivalue", "multiquery")),
        *(f"niah_multikey_{place}" for place in (1, 2, 3)),
        *("phonebook", "magic_number"),
    ),
    "chains": ("ruler_vt",),
    "words": ("ruler_cwe", "ruler_fwe"),
    "questions": ("ruler_qa_squad", "ruler_qa_hotpot"),
    "turns": tuple(f"scbench_{name}" for name in ("kv", "prefix_suffix", "vt", "qa_eng", "choice_eng", "many_shot")),
    "ledger": ("ledger",),
}
COUNTS = ("step", "tokens", "seconds")  # columns of the last line that a point joins
LOSSES = ("loss", "text", "kl")  # columns that are means over lines


@dataclass(frozen=True)
class TextLoss:
    """The mean cross-entropy of the next token in plain text that is held out, in nats."""

    length: int
    """Tokens of a sequence."""
    sequences: int
    base: float
    tuned: float
    device: str
    """Name of the GPU, or CPU."""

    @property
    def change(self) -> float:
        """By how much the tuning raised the loss."""
        return self.tuned - self.base


def name_text(out: Path) -> Path:
    """Return the file with the losses on plain text of the tuning of `out`."""
    return out.with_name(f"{out.name}.text.csv")


def name_curve(out: Path) -> Path:
    """Return the file with the short learning curve of the tuning of `out`."""
    return out.with_name(f"{out.name}.curve.csv")


def write_text_losses(path: Path, losses: Sequence[TextLoss]) -> None:
    """Write losses on plain text as CSV."""
    rows = [(loss.length, loss.sequences, round(loss.base, 5), round(loss.tuned, 5), loss.device) for loss in losses]
    write_rows(path, [[one.name for one in fields(TextLoss)], *rows])


def read_text_losses(path: Path) -> list[TextLoss]:
    """Read losses on plain text.

    Raises:
        SettingError: The file is missing or damaged.
    """
    with refuse_on_error(f"{path}: cannot read losses on plain text there"):
        return [
            TextLoss(int(row["length"]), int(row["sequences"]), float(row["base"]), float(row["tuned"]), row["device"])
            for row in read_csv(path)
        ]


def write_curve(log: Path, path: Path, earlier: Path | None = None) -> None:
    """Write the short learning curve of a log as CSV.

    Args:
        log: The log.
        path: The file to write.
        earlier: The file of an earlier tuning, with whose factors this one began. If its short curve is beside it, this
            one goes on from there.

    Raises:
        SettingError: The log or the earlier curve is missing or damaged.
    """
    with refuse_on_error(f"{log}: cannot read a learning curve there"):
        points = shorten_curve([json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()])
    if earlier is not None and name_curve(earlier).exists():
        before = read_curve(name_curve(earlier))
        for point in points:
            point |= {name: round((before[-1][name] or 0) + (point[name] or 0), 1) for name in COUNTS}
        points = [*before, *points]
    names = [*COUNTS, *LOSSES, *FAMILIES]
    write_rows(path, [names, *([point[name] for name in names] for point in points)])


def read_curve(path: Path) -> list[dict[str, float | None]]:
    """Read a short learning curve: its points, with None where a family had no samples.

    Raises:
        SettingError: The file is missing or damaged.
    """
    with refuse_on_error(f"{path}: cannot read a learning curve there"):
        return [
            {name: float(row[name]) if row[name] else None for name in (*COUNTS, *LOSSES, *FAMILIES)}
            for row in read_csv(path)
        ]


def shorten_curve(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, float | None]]:
    """Return the points of a learning curve, each the mean of as many lines of a log.

    A family's score is the mean over its kinds in these lines. It is None where there are none.
    """
    width = max(LINES, ceil(len(lines) / POINTS))
    points = []
    for start in range(0, len(lines), width):
        window = lines[start : start + width]
        point: dict[str, float | None] = {name: window[-1][name] for name in COUNTS}
        point |= {name: average([line[name] for line in window if line[name] is not None], 4) for name in LOSSES}
        for family, kinds in FAMILIES.items():
            scores = [line["scores"][kind] for line in window for kind in kinds if kind in line["scores"]]
            point[family] = average(scores, 1)
        points.append(point)
    return points


def average(values: Sequence[float], decimals: int) -> float | None:
    """Return the rounded mean, None of no values."""
    return round(sum(values) / len(values), decimals) if values else None


def read_csv(path: Path) -> list[dict[str, str]]:
    """Read the lines of a CSV, of which there must be one."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise ValueError("no line")
    return rows

"""Write and read what studies found: results/studies/<hash>/, with one line for each number.

A folder holds

    study.yaml                          the model, the prompts and all settings that may change a number
    prompts/<study>-<sources>-<n>.csv   the numbers of one study and one prompt, written when the prompt has been read
    <study>.csv                         the means over the prompts, written when the study is complete; the repository
                                        holds large ones packed (kvbench.store.packed_csv)

This module does not import torch, so that tables and figures can be made on any machine.
"""

import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from kvbench.atomic import replace_file
from kvbench.store.csv_rows import format_rows
from kvbench.store.packed_csv import find_csv, read_csv_text
from kvbench.store.parse import parse_yaml
from kvbench.validation import SettingError, summarize

HOLDS = "holds"  # the series of a number that is the share of instances in which a claim holds
DIAGNOSIS, CELLS = "diagnosis", "cells"  # the study of `kvbench diagnose`, and the key of its cells in study.yaml
FOLDER, ABOUT, PROMPTS = "studies", "study.yaml", "prompts"


class Line(NamedTuple):
    """One number of a study.

    Attributes:
        study: The study, such as ``key_geometry``.
        quantity: What the value is, such as ``cosine_of_means``.
        value: The number.
        series: The curve, class or part that it belongs to, such as ``keys``.
        layer: The index of the layer, from 0; None if the number is not of one layer.
        head: The index of the head, from 0; None if the number is not of one head. The quantity says whether it is a KV
            head or a query head.
        x: The first coordinate of the number in a chart: a bin's middle, a distance, a position. None if it has none.
        y: The second coordinate.
        n: How many tokens, pairs or samples of a prompt the number is computed from.
        low: Lower end of the 95 % interval over prompts; None if there is none.
        high: Upper end of the interval.
        prompts: Number of prompts that the value is the mean of; 0 for a number that needs none.
    """

    study: str
    quantity: str
    value: float
    series: str = ""
    layer: int | None = None
    head: int | None = None
    x: float | None = None
    y: float | None = None
    n: int = 1
    low: float | None = None
    high: float | None = None
    prompts: int = 0

    @property
    def place(self) -> tuple[Any, ...]:
        """What the number is of. Numbers of different prompts with the same place are averaged."""
        return self.study, self.quantity, self.series, self.layer, self.head, self.x, self.y


COLUMNS = Line._fields[1:]  # the name of the file is the study's
WHOLE = ("layer", "head", "n", "prompts")
TEXTS = ("quantity", "series")


def format_lines(lines: Iterable[Line]) -> str:
    """Return lines as CSV. Numbers have four significant digits, coordinates six."""
    return format_rows([COLUMNS, *([_format(name, getattr(line, name)) for name in COLUMNS] for line in lines)])


def _format(name: str, value: object) -> object:
    if isinstance(value, float):
        return f"{value:.6g}" if name in ("x", "y") else f"{value:.4g}"
    return "" if value is None else value


def read_lines(path: Path, study: str) -> list[Line]:
    """Read the lines of a study that `format_lines` formatted.

    Raises:
        SettingError: The file cannot be read, has other columns, or a value is no number. The message names it.
    """
    try:
        table, where = csv.DictReader(io.StringIO(read_csv_text(path))), str(path)
    except SettingError:  # names the packed file
        raise
    except (OSError, ValueError) as error:
        raise SettingError(f"{path}: {summarize(error)}") from None
    if tuple(table.fieldnames or ()) != COLUMNS:
        raise SettingError(f"{where}: not a file of kvbench papers study; its columns are {', '.join(COLUMNS)}")
    lines = []
    for number, row in enumerate(table, 2):
        try:
            lines.append(Line(study, **{name: _parse(name, row[name]) for name in COLUMNS}))
        except (TypeError, ValueError):
            raise SettingError(f"{where} line {number}: a value is missing or no number") from None
    return lines


def _parse(name: str, text: str) -> Any:
    if name in TEXTS:
        return text
    if text == "" and name not in ("value", "n", "prompts"):
        return None
    return int(text) if name in WHOLE else float(text)


@dataclass(frozen=True)
class StudyFolder:
    """The numbers of the studies on one model and one set of prompts.

    Attributes:
        path: The folder.
        about: The contents of study.yaml: ``model``, ``prompts`` and other settings.
        lines: The numbers of all its studies.
    """

    path: Path
    about: dict[str, Any]
    lines: list[Line]

    @property
    def name(self) -> str:
        """The model, the prompts and the beginning of the hash, for the names of emitted files."""
        return f"{self.about['model']['name']}-{self.about['prompts']['name']}-{self.path.name[:6]}"

    @property
    def source(self) -> str:
        """The model and the prompts in words."""
        prompts = self.about["prompts"]
        return f"{self.about['model']['name']}, {count_prompts(prompts)}, up to {prompts['longest']:,} tokens"

    @cached_property
    def by_study(self) -> Mapping[str, list[Line]]:
        """The lines of each study; none of a study that was not computed."""
        groups: defaultdict[str, list[Line]] = defaultdict(list)
        for line in self.lines:
            groups[line.study].append(line)
        return groups


def count_prompts(prompts: Mapping[str, Any]) -> str:
    """Return the number and the name of a study's prompts, as study.yaml has them, in words."""
    return f"{prompts['count']} prompt{'s' if prompts['count'] > 1 else ''} of {prompts['name']}"


def find_studies(results: Path) -> list[StudyFolder]:
    """Return all studies of a folder of results that have been computed, sorted by their name.

    Raises:
        SettingError: A file cannot be read. The message names it.
    """
    folders = [read_study(path.parent) for path in (results / FOLDER).glob(f"*/{ABOUT}")]
    return sorted((folder for folder in folders if folder.lines), key=lambda folder: folder.name)


def read_study(path: Path) -> StudyFolder:
    """Read the folder of studies.

    Raises:
        SettingError: A file cannot be read. The message names it.
    """
    try:
        about = parse_yaml((path / ABOUT).read_bytes())
    except (OSError, ValueError) as error:
        raise SettingError(f"{path / ABOUT}: {summarize(error)}") from None
    if not isinstance(about, dict) or not {"model", "prompts"} <= about.keys():
        raise SettingError(f"{path / ABOUT}: names no model and no prompts")
    lines = [line for file in find_csv(path) for line in read_lines(file, file.stem)]
    return StudyFolder(path, about, lines)


def write_text(path: Path, text: str) -> None:
    """Write a file, completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as draft:
        draft.write_text(text, encoding="utf-8")

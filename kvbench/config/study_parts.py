"""Read the parts of conf/measured.yaml: the sweeps behind docs/results.md, which `kvbench dev measured` runs.

A part of the study can be published by itself. Its sweeps run in their order, and each of them is whole before the next
one begins, so that a part that was stopped still has sweeps whose cells can be compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from kvbench.config.paths import CONF
from kvbench.validation import SettingError, is_number, require_choice

STUDY = CONF / "measured.yaml"
FILES = "FILES/"  # begins the name of a file that a part makes first
TEXTS = ("title", "question", "common", "note")


Pair = tuple[str, str]  # two cells, each as settings with spaces between them


@dataclass(frozen=True)
class StudyPart:
    """Sweeps that are measured and published together.

    Attributes:
        name: Its key in conf/measured.yaml.
        title: Its title on the page.
        sweeps: Its sweeps, each as one line or several lines of arguments of `kvbench run -m`. The cells of several
            lines run together, so that they share what they read. They may have settings in common: {settings: lines}.
        question: The question that it answers, a sentence for the page.
        common: Arguments that all sweeps share.
        files: Name of a file or folder that a sweep needs -> the `kvbench` command that makes it, without `--out`.
        pairs: The pairs of cells whose comparison was planned: in every column that has both, or, where their settings
            name budgets, with these budgets.
        changes: Cell -> what another cell changes in it, in words -> the other cell. Cells are settings, as those of
            pairs. A file is given by its name without the suffix.
        rate: How many answers one GPU gives in a minute; None if that is not known.
        note: What a reader of its cells must know, for the page.
    """

    name: str
    title: str
    sweeps: Sequence[str | Mapping[str, Sequence[str]]]
    question: str = ""
    common: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    pairs: Sequence[Pair] = ()
    changes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    rate: float | None = None
    note: str = ""

    def list_stages(self, results: Path) -> list[list[list[str]]]:
        """Return the lines of each sweep, each as arguments, with results and files in the folder `results`."""

        def place(argument: str) -> str:
            name, _, values = argument.partition("=")
            each = values.split(",")
            if not all(value.startswith(FILES) for value in each):
                return argument
            return f"{name}={','.join(quote(find_place(value, results)) for value in each)}"

        return [
            [[*map(place, line.split()), f"results={quote(results)}"] for line in lines] for lines in self._spell_out()
        ]

    def list_sweeps(self, results: Path) -> list[list[str]]:
        """Return the arguments of each line of all sweeps (`list_stages`)."""
        return [line for lines in self.list_stages(results) for line in lines]

    def list_cells(self, results: Path) -> list[list[str]]:
        """Return the arguments of each cell of all sweeps, without those of the full cache."""
        from kvbench.config.compose import expand_cells  # imports Hydra, which --help does without

        return [cell for sweep in self.list_sweeps(results) for cell in expand_cells(sweep)]

    def _spell_out(self) -> list[list[str]]:
        """Return the lines of each sweep, with what they have in common."""
        stages = []
        for sweep in self.sweeps:
            groups = {"": [sweep]} if isinstance(sweep, str) else sweep
            stages.append([f"{self.common} {shared} {line}" for shared, lines in groups.items() for line in lines])
        return stages

    def find_files(self, results: Path) -> set[Path]:
        """Return the paths of files that the sweeps give to methods and codecs, made first or not, if they exist."""
        given = (argument.partition("=") for lines in self._spell_out() for line in lines for argument in line.split())
        texts = [text for name, _, text in given if name.startswith(("method.", "codec.")) and name.endswith(".path")]
        places = {find_place(file, results) for text in texts for file in text.split(",")}
        return {path for path in places if path.exists()}

    def list_files(self, results: Path) -> dict[Path, list[str]]:
        """Return the path of each missing file, and the arguments of `kvbench` that make it, without `--out`."""
        made = {find_place(FILES + name, results): command.split() for name, command in self.files.items()}
        return {path: command for path, command in made.items() if not path.exists()}


def find_place(text: str, results: Path) -> Path:
    """Return the path that a text names, which is in the folder `results` if the text begins with FILES."""
    return results / "files" / text.removeprefix(FILES) if text.startswith(FILES) else Path(text)


def quote(path: Path) -> str:
    """Return a path as a value on Hydra's command line, which would read spaces, commas and brackets otherwise."""
    text = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"


def read_study(path: Path = STUDY) -> dict[str, StudyPart]:
    """Return the parts of a file by name.

    Raises:
        SettingError: The file cannot be read, or a part has other keys than `StudyPart`.
    """
    try:
        parts = yaml.safe_load(path.read_text(encoding="utf-8"))
        return {name: make_study_part(name, fields) for name, fields in parts.items()}
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError, TypeError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise SettingError(f"--file={path}: cannot be read as parts ({reason}); see conf/measured.yaml") from None


def make_study_part(name: str, given: Mapping[str, Any]) -> StudyPart:
    """Return the part that an entry of the file describes.

    Raises:
        TypeError: It lacks a title or sweeps, has other keys than `StudyPart`, texts that are none, a pair of other
            than two cells, changes that are not named in words, or a rate that is no positive number.
    """
    known = [each.name for each in fields(StudyPart) if each.name != "name"]
    for key in given:
        if key not in known:
            raise TypeError(f"part {name}: {key}: choose keys from {', '.join(known)}")
    for key in TEXTS:
        if not isinstance(given.get(key, ""), str):
            raise TypeError(f"part {name}: {key}: a text")
    if "title" not in given or not isinstance(given.get("sweeps"), list):
        raise TypeError(f"part {name}: it needs a title, and sweeps as a list")
    part = StudyPart(name, **given)
    if not all(len(pair) == 2 and all(isinstance(cell, str) for cell in pair) for pair in part.pairs):
        raise TypeError(f"part {name}: pairs are lists of two cells")
    if not all(isinstance(cell, str) and are_texts(words) for cell, words in part.changes.items()):
        raise TypeError(f"part {name}: changes are {{cell: {{what is changed: cell}}}}")
    if part.rate is not None and not (is_number(part.rate) and part.rate > 0):
        raise TypeError(f"part {name}: rate={part.rate}: answers a minute")
    for sweep in part.sweeps:
        groups = sweep if isinstance(sweep, Mapping) else {"": [sweep]}
        lines = [line for some in groups.values() for line in some]
        if not lines or not all(isinstance(line, str) for line in lines):
            raise TypeError(f"part {name}: a sweep is a line, or {{settings: lines}}")
    return replace(part, pairs=[(one, other) for one, other in part.pairs])


def are_texts(entries: object) -> bool:
    """Return whether something is a mapping of texts to texts."""
    return isinstance(entries, Mapping) and all(isinstance(text, str) for entry in entries.items() for text in entry)


def choose_study_parts(names: Sequence[str], path: Path = STUDY) -> list[StudyPart]:
    """Return the parts of these names, each once.

    Raises:
        SettingError: There is no such part.
    """
    parts = read_study(path)
    for name in names:
        require_choice("part", name, parts)
    return [parts[name] for name in dict.fromkeys(names)]

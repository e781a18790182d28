r"""Load the problems of MATH-500 and AIME from a file in one of their published formats, from the hub, or synthetic.

A row has `problem` and `answer` (also called Problem, question and Answer, because the copies of AIME differ). It may
have an id (unique_id, id, ID, problem_idx; else the hash of the problem is its id), `subject`, `level` and
`answer_prefix`. AIME's answers are whole numbers from 0 to 999, as numbers or as text, also as 73.0. A degree sign
behind one, as in opencompass/AIME2025, is dropped. SOURCES names the pinned data sets, and the other copies that a
folder may hold.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.tasks.common import dataset_rows
from kvbench.tasks.mathematics.miniature import make_problems
from kvbench.validation import SettingError

SETTING = "task.path"
NAMES = {  # column -> its names in the copies that are in use
    "id": ("unique_id", "id", "ID", "problem_idx"),
    "problem": ("problem", "Problem", "question"),
    "answer": ("answer", "Answer"),
}
EXTRA = ("subject", "level", "answer_prefix")


@dataclass(frozen=True)
class Source:
    """A published set of problems.

    Attributes:
        dataset: The data set on the hub.
        revision: Its pinned commit.
        split: Its split.
        problems: The number of its problems.
        integers: Whether answers are whole numbers from 0 to 999, as in AIME.
        copy: Files of another copy that is in use; they are read one after the other.
    """

    dataset: str
    revision: str
    split: str
    problems: int
    integers: bool
    copy: tuple[str, ...] = ()


SOURCES = {
    "math500": Source("HuggingFaceH4/MATH-500", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be", "test", 500, False),
    "aime24": Source(
        "HuggingFaceH4/aime_2024", "2fe88a2f1091d5048c0f36abc874fb997b3dd99a", "train", 30, True,
        copy=("aime_2024_problems.parquet",),  # Maxwell-Jia/AIME_2024
    ),
    "aime25": Source(
        "math-ai/aime25", "563bb8404243c5f09de6ec262f2db674fe5bce9b", "test", 30, True,
        copy=("aime2025-I.jsonl", "aime2025-II.jsonl"),  # opencompass/AIME2025
    ),
}  # fmt: skip
ENDINGS = (".jsonl", ".json", ".parquet", ".csv")
DEGREES = re.compile(r"\s*(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|°)\s*$")


def load_problems(name: str, path: str) -> list[dataset_rows.Row]:
    """Load the rows of a set, with the columns id, problem, answer (str) and those of EXTRA that it has.

    Args:
        name: A name in SOURCES.
        path: ``miniature``, ``hub``, or a file or folder.

    Raises:
        SettingError: Rows are missing or wrong. The message names the file, the line and the column.
    """
    source = SOURCES[name]
    if path == dataset_rows.MINIATURE:
        located: Iterable[tuple[str, dataset_rows.Row]] = make_problems(name, source.integers)
    elif path == dataset_rows.HUB:
        located = dataset_rows.read_hub_rows(SETTING, source.dataset, source.revision, None, source.split)
    else:
        located = (
            row for file in _find_files(name, Path(path).expanduser()) for row in dataset_rows.read_rows(SETTING, file)
        )
    rows = dataset_rows.check_rows(
        SETTING, _rename_columns(located, source.integers), {"id": str, "problem": str, "answer": str}, "id"
    )
    if path == dataset_rows.HUB and len(rows) != source.problems:
        raise SettingError(f"{SETTING}=hub: {source.dataset} has {len(rows)} problems, expected {source.problems}")
    return rows


def _find_files(name: str, path: Path) -> list[Path]:
    """Return the files to read: `path`, or those of the first known layout that the folder has."""
    source = SOURCES[name]
    stems = (source.split, name, *sorted({"test", "train"} - {source.split}))
    files = [f"{stem}{ending}" for stem in stems for ending in ENDINGS]
    files += [f"data/{stem}-00000-of-00001.parquet" for stem in stems]  # as on the hub
    first = dataset_rows.find_file(SETTING, path, [*files, *source.copy[:1]])
    if path.is_dir() and first.name in source.copy:
        return [path / file for file in source.copy]
    return [first]


def _rename_columns(
    located: Iterable[tuple[str, dataset_rows.Row]], integers: bool
) -> Iterator[tuple[str, dataset_rows.Row]]:
    """Give columns one name each. Missing columns stay missing, and `check_rows` refuses the row."""
    for where, row in located:
        renamed = {name: row[column] for name, columns in NAMES.items() if (column := _find_column(columns, row))}
        for name in ("problem", "answer"):
            if isinstance(renamed.get(name), str) and not renamed[name].strip():
                raise SettingError(f"{SETTING}: {where}: {name} is empty")
        if isinstance(renamed.get("problem"), str):
            renamed.setdefault("id", hashlib.sha256(renamed["problem"].encode()).hexdigest()[:12])
        if integers and isinstance(renamed.get("answer"), str):
            renamed["answer"] = DEGREES.sub("", renamed["answer"])
            if "." in renamed["answer"]:  # 070 stays as it is
                renamed["answer"] = dataset_rows.parse_whole(renamed["answer"])
        for name in ("id", "answer"):
            value = renamed.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                whole = dataset_rows.parse_whole(value)
                renamed[name] = str(whole) if isinstance(whole, int) else value
        if integers and isinstance(renamed.get("answer"), str) and not _is_aime_answer(renamed["answer"]):
            raise SettingError(
                f"{SETTING}: {where}: answer is {renamed['answer']!r}, expected a whole number from 0 to 999"
            )
        if not isinstance(row.get("answer_prefix", ""), str):
            raise SettingError(f"{SETTING}: {where}: answer_prefix is not a text")
        yield where, renamed | {name: row[name] for name in EXTRA if name in row}


def _find_column(columns: Sequence[str], row: dataset_rows.Row) -> str | None:
    return next((column for column in columns if column in row), None)


def _is_aime_answer(answer: str) -> bool:
    digits = answer.strip()
    return digits.isascii() and digits.isdigit() and len(digits) <= 3

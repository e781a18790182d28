"""LongBench's rows: from data.zip as published, from its files, from the hub, or from the miniature.

The revision on the hub is pinned; data.zip holds data/<task>.jsonl, and data/<task>_e.jsonl of LongBench-E. A `length`
that a copy stores as text is read as a number, so that the copy has the rows of the published file.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType

from kvbench.tasks.common import dataset_rows
from kvbench.tasks.longbench import metrics, miniature
from kvbench.tasks.longbench.subtasks import Subtask
from kvbench.validation import SettingError

HUB = ("zai-org/LongBench", "5e628be450b7e67fb7ae6e201bd6d8f7056f7672", "data.zip")
COLUMNS: dataset_rows.Columns = {
    "_id": str,
    "dataset": str,
    "language": str,  # en, zh, or the programming language of code
    "input": str,
    "context": str,
    "answers": list,
    "length": int,  # number of words of input, context and answers; in Chinese of characters
    "all_classes": (list, NoneType),
}


def load_rows(path: str, subtasks: Iterable[Subtask], ending: str = "") -> dict[str, list[dataset_rows.Row]]:
    """Load the rows of each subtask.

    Args:
        path: ``miniature``, ``hub``, or a file or folder in the official format.
        subtasks: The subtasks to load.
        ending: What the files' names have behind the subtask: ``_e`` for LongBench-E.

    Raises:
        SettingError: Rows are missing or wrong. The message names the file, the line and the column.
    """
    if path == dataset_rows.MINIATURE:
        return {own.name: check_rows(own, miniature.make_rows(own.name)) for own in subtasks}
    place = dataset_rows.fetch_hub_file("task.path", *HUB) if path == dataset_rows.HUB else Path(path).expanduser()
    return {own.name: check_rows(own, find_rows(place, own.name + ending), ending) for own in subtasks}


def find_rows(path: Path, name: str) -> Iterator[tuple[str, dataset_rows.Row]]:
    """Yield (where, row) of <name>.jsonl from data.zip, a folder that has data.zip or its files, or a .jsonl file."""
    member = f"data/{name}.jsonl"
    file = dataset_rows.find_file("task.path", path, (member, f"{name}.jsonl", "data.zip"))
    return dataset_rows.read_rows("task.path", file, member if file.suffix == ".zip" else None)


def check_rows(
    subtask: Subtask, found: Iterable[tuple[str, dataset_rows.Row]], ending: str = ""
) -> list[dataset_rows.Row]:
    """Check that rows have the official format and return them; a SettingError names line and column."""
    listed = [
        (where, {**row, "length": dataset_rows.parse_whole(row["length"])} if "length" in row else row)
        for where, row in found
    ]
    rows = dataset_rows.check_rows("task.path", listed, COLUMNS, unique="_id", what=f"rows of {subtask.name}")
    for where, row in listed:
        if row["dataset"] not in (subtask.name, subtask.name + ending):
            raise SettingError(f"task.path: {where}: dataset is {row['dataset']!r}, expected {subtask.name!r}")
        answers = dataset_rows.check_texts("task.path", where, "answers", row["answers"])
        if subtask.metric is metrics.classification_score:
            dataset_rows.check_texts("task.path", where, "all_classes", row["all_classes"])
        if subtask.metric is metrics.retrieval_score and not all(map(metrics.find_paragraph, answers)):
            raise SettingError(f"task.path: {where}: answers are not of the form 'Paragraph 1' or '段落1'")
    return rows

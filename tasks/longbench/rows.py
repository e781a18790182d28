"""LongBench's rows: from data.zip as published, from its files, from the hub, or from the miniature. kvpress's rows.

The revision on the hub is pinned; data.zip holds data/<task>.jsonl, and data/<task>_e.jsonl of LongBench-E. A `length`
that a copy stores as text is read as a number, so that the copy has the rows of the published file.

kvpress's rows (`Xnhyacinth/LongBench`, evaluation/longbench/create_huggingface_dataset.py) are the same rows with whole
prompts: `context`, `question` and `answer_prefix` hold the instructions too. Each task is a parquet file. Whole numbers
may be stored as text.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType

from kvbench.tasks.common import dataset_rows, kvpress_rows
from kvbench.tasks.longbench import metrics, miniature
from kvbench.tasks.longbench.prompts import load_official_prompt
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
KVPRESS_HUB = ("Xnhyacinth/LongBench", "2e9ade51ebf45d98942056c0716234f9d5d257d5")
KVPRESS_COLUMNS = {
    **{name: COLUMNS[name] for name in ("_id", "answers", "length", "all_classes")},
    "task": str,
    **kvpress_rows.COLUMNS,
}
WHOLE = ("length", "max_new_tokens")
MORE_TOKENS = 20  # tokens that kvpress's rows allow an answer beyond the official limit


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
        return {subtask.name: check_rows(subtask, miniature.make_rows(subtask.name)) for subtask in subtasks}
    place = dataset_rows.fetch_hub_file("task.path", *HUB) if path == dataset_rows.HUB else Path(path).expanduser()
    return {subtask.name: check_rows(subtask, find_rows(place, subtask.name + ending), ending) for subtask in subtasks}


def load_kvpress_rows(path: str, subtasks: Iterable[Subtask], ending: str = "") -> dict[str, list[dataset_rows.Row]]:
    """Load kvpress's rows of each subtask. Arguments and errors are those of `load_rows`."""
    rows = {}
    for subtask in subtasks:
        if path == dataset_rows.MINIATURE:
            listed = make_kvpress_rows(subtask)
        else:
            file = f"{subtask.name}{ending}/test-00000-of-00001.parquet"
            if path == dataset_rows.HUB:
                place = dataset_rows.fetch_hub_file("task.path", *KVPRESS_HUB, file)
            else:
                names = (file, f"{subtask.name}{ending}.parquet", f"{subtask.name}{ending}.jsonl")
                place = dataset_rows.find_file("task.path", Path(path).expanduser(), names)
            read = dataset_rows.read_rows("task.path", place)
            listed = ((f"{place.parent.name}/{where}", row) for where, row in read)  # files of all tasks have one name
        rows[subtask.name] = check_rows(subtask, listed, ending, KVPRESS_COLUMNS)
    return rows


def make_kvpress_rows(subtask: Subtask) -> Iterator[tuple[str, dataset_rows.Row]]:
    """Yield the miniature's rows with the official prompts, in kvpress's columns."""
    for where, row in miniature.make_rows(subtask.name):
        context, question = load_official_prompt(subtask.name).render(row["context"], row["input"])
        yield (
            where,
            {
                **{name: row[name] for name in KVPRESS_COLUMNS if name in row},
                "task": subtask.name,
                "context": context,
                "question": question,
                "answer_prefix": "",
                "max_new_tokens": subtask.new_tokens + MORE_TOKENS,
            },
        )


def find_rows(path: Path, name: str) -> Iterator[tuple[str, dataset_rows.Row]]:
    """Yield (where, row) of <name>.jsonl from data.zip, a folder that has data.zip or its files, or a .jsonl file."""
    member = f"data/{name}.jsonl"
    file = dataset_rows.find_file("task.path", path, (member, f"{name}.jsonl", "data.zip"))
    return dataset_rows.read_rows("task.path", file, member if file.suffix == ".zip" else None)


def check_rows(
    subtask: Subtask,
    located: Iterable[tuple[str, dataset_rows.Row]],
    ending: str = "",
    columns: dataset_rows.Columns = COLUMNS,
) -> list[dataset_rows.Row]:
    """Check that rows have the official format, or kvpress's, and return them; a SettingError names line and column."""
    of_task = "dataset" if columns is COLUMNS else "task"
    listed = [
        (where, {**row, **{name: dataset_rows.parse_whole(row[name]) for name in WHOLE if name in row}})
        for where, row in located
    ]
    rows = dataset_rows.check_rows("task.path", listed, columns, unique="_id", what=f"rows of {subtask.name}")
    for where, row in listed:
        if row[of_task] not in (subtask.name, subtask.name + ending):
            raise SettingError(f"task.path: {where}: {of_task} is {row[of_task]!r}, expected {subtask.name!r}")
        if columns is not COLUMNS:
            kvpress_rows.check_limit("task.path", where, row)
        answers = dataset_rows.check_texts("task.path", where, "answers", row["answers"])
        if subtask.metric is metrics.classification_score:
            dataset_rows.check_texts("task.path", where, "all_classes", row["all_classes"])
        if subtask.metric is metrics.retrieval_score and not all(map(metrics.find_paragraph, answers)):
            raise SettingError(f"task.path: {where}: answers are not of the form 'Paragraph 1' or '段落1'")
    return rows

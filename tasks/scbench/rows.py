"""Load the rows of SCBench: a long context and turns that ask about it, from the hub, a local copy or the miniature.

The published format (https://huggingface.co/datasets/microsoft/SCBench) has a config for each task and a row for each
context. The columns are `context` (a list of numbers in mf) and `multi_turns`, a list of {input, answer}. A turn also
has `options` in choice_eng (four, with the answer among them) and `task` in summary_with_needles. Some configs have
`id`. A copy may store an answer as a list of one item, which is read as this item.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.tasks.common.dataset_rows import (
    HUB,
    MINIATURE,
    Columns,
    Row,
    check_rows,
    check_texts,
    find_file,
    read_hub_rows,
    read_rows,
)
from kvbench.tasks.scbench.miniature import ROWS, make_rows
from kvbench.tasks.scbench.prompts import TaskForm
from kvbench.validation import SettingError, is_number

DATASET = "microsoft/SCBench"
REVISION = "283310bb8c5ba6909dd9a6b1be087d2937f76f6d"
SETTING = "task.path"
ASKED = re.compile(r"The .+ is")  # in mf's inputs; upstream makes a question of the words between


@dataclass(frozen=True)
class Turn:
    """One question.

    Attributes:
        slots: Values of the slots of the task's wording.
        answers: The reference answers.
        golden: The answer that later turns find in the conversation.
        task: The turn's column `task`, if the task has one.
    """

    slots: dict[str, str]
    answers: tuple[str, ...]
    golden: str
    task: str | None


@dataclass(frozen=True)
class Session:
    """A context and its turns."""

    context: str
    turns: tuple[Turn, ...]


def list_files(name: str) -> tuple[str, ...]:
    """List the files that may hold a task's rows in a local copy: as published, or one file for each task."""
    return f"{name}.jsonl", f"{name}.parquet", f"data/{name}.jsonl", f"{name}/test-00000-of-00001.parquet"


def load_rows(path: str, form: TaskForm, count: int | None = None) -> tuple[list[Row], list[Session]]:
    """Load a task's rows.

    Args:
        path: ``miniature``, ``hub``, or a file or folder.
        form: The task.
        count: Number of rows that the miniature makes; None makes ROWS.

    Returns:
        The rows as they are, and as sessions.

    Raises:
        SettingError: Rows are missing or wrong. The message names the file, the line and the column.
    """
    if path == MINIATURE:
        made = make_rows(form.name, ROWS if count is None else count)
        rows: Iterable[tuple[str, Row]] = ((f"{form.name} row {i}", row) for i, row in enumerate(made))
    elif path == HUB:
        rows = read_hub_rows(SETTING, DATASET, REVISION, form.name, "test")
    else:
        rows = read_rows(SETTING, find_file(SETTING, Path(path).expanduser(), list_files(form.name)))
    located = [(where, unwrap_answers(row, form)) for where, row in rows]
    columns: Columns = {"context": list if form.numbers else str, "multi_turns": list}
    plain = check_rows(SETTING, located, columns, what=f"rows of {form.name}")
    seen: dict[str, str] = {}
    for where, row in located:  # ids may start again with each context
        known = json.dumps([row.get("id", where), row["context"]])
        if (first := seen.setdefault(known, where)) != where:
            raise SettingError(f"{SETTING}: {where}: id {row['id']!r} with this context is that of {first}")
    return plain, [parse_session(where, row, form) for where, row in located]


def unwrap_answers(row: Row, form: TaskForm) -> Row:
    """Take each answer that is a list of one item out of its list, except in a task whose answers are lists."""
    turns = row.get("multi_turns")
    if form.answer is list or not isinstance(turns, list):
        return row
    return {**row, "multi_turns": [_unwrap_answer(turn) if isinstance(turn, dict) else turn for turn in turns]}


def _unwrap_answer(turn: dict[str, Any]) -> dict[str, Any]:
    answer = turn.get("answer")
    return {**turn, "answer": answer[0]} if isinstance(answer, list) and len(answer) == 1 else turn


def parse_session(where: str, row: Row, form: TaskForm) -> Session:
    """Turn a row into a session; `where` names the row in a SettingError."""
    if form.numbers and not all(map(is_number, row["context"])):
        raise SettingError(f"{SETTING}: {where}: context is not a list of numbers")
    if not row["multi_turns"]:
        raise SettingError(f"{SETTING}: {where}: multi_turns is empty")
    turns = [
        _parse_turn(f"{where}: turn {i} of multi_turns", turn, form) for i, turn in enumerate(row["multi_turns"], 1)
    ]
    return Session(str(row["context"]), tuple(turns))


def _parse_turn(where: str, turn: object, form: TaskForm) -> Turn:
    if not isinstance(turn, dict):
        raise SettingError(f"{SETTING}: {where} is {type(turn).__name__}, expected an object with input and answer")
    [checked] = check_rows(SETTING, [(where, turn)], {"input": str, "answer": form.answer, **_more(form)})
    answer, slots, task = checked["answer"], {"input": checked["input"]}, None
    answers = check_texts(SETTING, where, "answer", answer) if isinstance(answer, list) else (str(answer),)
    if "" in answers:
        raise SettingError(f"{SETTING}: {where}: answer is empty")
    if form.choices:
        options = check_texts(SETTING, where, "options", checked["options"])
        if len(options) != 4 or answer not in options:
            raise SettingError(f"{SETTING}: {where}: options are not four with the answer among them")
        slots |= dict(zip("ABCD", options, strict=True))
        answers = (answer, "ABCD"[options.index(answer)])
    if form.numbers:
        asked = ASKED.search(checked["input"])
        if asked is None:
            raise SettingError(f"{SETTING}: {where}: input has no `The ... is`")
        slots["prefix"] = f"What is {asked[0].lower()[:-3]}?"
    if len(form.metrics) > 1:
        task = checked["task"]
        if task not in form.metrics:
            raise SettingError(f"{SETTING}: {where}: task is {task!r}, expected {' or '.join(map(str, form.metrics))}")
    return Turn(slots, answers, str(answer), task)


def _more(form: TaskForm) -> dict[str, type]:
    return ({"options": list} if form.choices else {}) | ({"task": str} if len(form.metrics) > 1 else {})

"""Runs of a store with made-up records, as far as the papers' tables read them."""

import os
from pathlib import Path

from kvbench.papers.experiment_key import resolve_value
from kvbench.store.run_folder import RunFolder

BOOK = {"model": "llama32_3b", "task": "phonebook", "task.preset": "keydiff", "question": "visible", "block_size": 128}
SUBTASK = "phonebook_100"


def record(index: int, score: float | None, subtask: str = SUBTASK, **own: object) -> dict:
    """A record's line, as far as tables read it."""
    base = {"uid": f"{subtask}/{index}", "index": index, "subtask": subtask, "group": f"{subtask}/{index}"}
    base |= {"score": score, "error": None if score is not None else "out_of_memory", "meta": {}, "also": {}}
    return base | {"prompt_hash": f"{subtask}{index}", "target_hash": "t", "tokens_in": 100, "tokens_out": 10} | own


def put(results: Path, settings: dict, records: list[dict], finish: bool = True, ended: int = 1, **own: object) -> str:
    """A run of the store made as the runner makes it; its hash. `own`: parts of its value."""
    value = resolve_value(settings) | {"data": "d", "device": {"type": "cpu"}, "sources": "s", "averages": []} | own
    with RunFolder(results / "runs", value).open({}) as folder:
        for line in records:
            assert folder.claim(line["uid"])
            folder.append(line)
        if finish:
            folder.finish([line["uid"] for line in records])
            os.utime(folder.path / "done", (ended, ended))
    return folder.hash

"""Made-up runs on the disk, as the runner leaves them."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from kvbench.store.run_folder import RunFolder
from kvbench.store.runs import StoredRun

VALUE = {
    "model": {"name": "tiny", "identity": "0a1b"},
    "method": {"name": "snapkv", "window": 64},
    "allocator": {"name": "uniform"},
    "codec": {"name": "raw"},
    "budget": 1.0,
    "budget_of": "prompt",
    "block_size": None,
    "question": "visible",
    "seed": 0,
    "task": {"name": "ruler", "length": 2048},
    "averages": [],
    "data": "d0",
    "device": {"type": "cpu"},
    "sources": "s0",
}


def write_run(
    results: Path,
    own: Mapping[str, dict],
    finish: bool = True,
    machine: Mapping[str, Any] | None = None,
    total: int | None = None,
    **changed: Any,
) -> StoredRun:
    """A run with these records (by uid); `changed`: parts of VALUE."""
    value = deepcopy(VALUE) | changed
    folder = RunFolder(results / "runs", value)
    with folder.open(machine or {}, total):
        for uid, record in own.items():
            assert folder.claim(uid)
            folder.append(record)
        if finish:
            folder.finish(own)
    return StoredRun(folder.hash, value, folder)

"""A store for the report page, with answers and names that would like to be more than text."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tests.support import made_up_runs

VALUE = made_up_runs.VALUE | {"model": {"name": "reference", "identity": "0a1b"}}
MACHINE = {
    "code": f"git {4 * '0123456789'} dirty",
    "gpu": None,
    "processor": "x86_64",
    "threads": 1,
    "python": "3.11",
    "versions": {"torch": "2.13.0"},
}
TASKS = ("niah", "vt", "cwe<img src=x onerror='window.hacked=1'>")
BUDGETS = {0.05: 30, 0.1: 55, 0.3: 85}  # chance in per cent to keep what the full cache has right
HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>",
    "<!-- \u2028 \0 \x1b[31mred\x1b[0m \u202egnorw",
    "lone \ud800 surrogate & 'quotes' \"double\" `ticks` ${window.hacked = 1}",
    "https://example.org/leaves.png " + "huge " * 5_000,  # more than a page shows (kvbench.report.samples)
)


def draw_late_fields(draw: np.random.Generator, budget: float, index: int) -> dict:
    """What older records lack, here those of the largest budget: the question, and which rows survived."""
    if budget == max(BUDGETS):
        return {}
    percents = np.clip(draw.normal(100 * budget, 100 * budget, 64), 0, 100).astype(int)
    percents[[0, -2, -1]] = 100
    asked = "What is the number?\n" + HOSTILE[index % len(HOSTILE)]
    return {"asked": asked, "survived": bytes(percents.tolist()).hex(), "evidence": [20 + index], "rows_seen": 200}


def make_records(budget: float, chance: float, salt: int = 0, count: int = 8, **changed: object) -> dict[str, dict]:
    """Three subtasks of `count` samples; of the first, cells of a grid."""
    found = {}
    for subtask in TASKS:
        for index in range(count):
            draw = np.random.default_rng([int(1000 * budget), index, len(subtask), salt])
            uid = f"{subtask}/{index}"
            right = budget == 1 or draw.random() < chance / 100
            answer = f"the number is {index} and nothing else" if right else HOSTILE[index % len(HOSTILE)]
            where = {"length": 512 * (1 + index % 2), "depth": 50 * (index // 2 % 3)} if subtask == "niah" else {}
            found[uid] = {
                "uid": uid, "subtask": subtask, "index": len(found), "group": f"{subtask}/{index // 2}",
                "prompt_hash": f"p{uid}", "target_hash": "t", "target": [str(index), "</script>"],
                "error": None, "meta": {"data": "miniature"} | where, "also": {}, "output": answer,
                "score": (100.0 if index % 5 else 50.0) * right, "stop": "eos", "tokens_out": 9,
                "ttft_ms": 100.0 + 200 * budget + salt, "decode_ms": 80 + 40 * budget,
                "resident_bytes": int(1000 * budget),
                "full_bytes": 1000, "rows_attended": 200 * budget + 2, "rows_seen_decoding": 200,
                "rows_held": 200 * budget - index % 3,
                **draw_late_fields(draw, budget, index),
            } | changed  # fmt: skip
    return found


def write_run(results: Path, own: Mapping[str, dict], finish: bool = True, **changed: object) -> Path:
    """A run on the disk; its folder."""
    return made_up_runs.write_run(results, own, finish, MACHINE, **VALUE | changed).folder.path


def write_small_store(results: Path, questions: Sequence[str] = ("visible", "hidden"), count: int = 8) -> Path:
    """Three methods, one of them in blocks too, three budgets; `count` samples of each subtask."""
    for question in questions:
        write_run(results, make_records(1.0, 100, count=count), method={"name": "full"}, question=question)
        for salt, (method, block) in enumerate(
            (("snapkv", None), ("keydiff", None), ("keydiff", 128), ("newest", None))
        ):
            for budget, chance in BUDGETS.items():
                own = make_records(budget, chance + 15 * (salt % 2), salt, count)
                changed = {"method": {"name": method}, "budget": budget, "block_size": block, "question": question}
                write_run(results, own, **changed)
    return results

"""The cells as data, and what differs between two versions of them. Nothing here knows kvbench.

`cells.jsonl` has a line for each cell of the engine, `runs.jsonl` a line for each record of a whole run. `cell` gives
the settings, `found` what was computed from them.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parent
CELLS, RUNS = FOLDER / "cells.jsonl", FOLDER / "runs.jsonl"
LOCK = FOLDER.parent.parent / "requirements.lock"
PINNED = ("torch", "transformers")
CLOSE = 1e-9  # at the pinned versions: sums of float64 differ in their last bits between CPUs
LOOSE = 1e-5  # at others, which may compute rotary angles in another order, in float32; and of cells that name one of
RECOMPUTED = ("model=dynamic",)  # these: their angles hang on a power in float32, which CPUs round in different ways
NOISE = 1e-9  # share by which weights change to see whether a cell hangs on a tie; a tie moves rows or tokens,
MOVED = 1e-4  # everything else moves numbers by less than this
LINES = 20  # of a report
DIGITS = 12  # stored of a number with a fraction
LONG = 130  # characters from which on a text is stored as its beginning and a digest

Found = dict[str, Any]


def load(path: Path) -> Found:
    """Cell -> what was found, in the order of the file; None where nothing was computed yet."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["cell"]: line.get("found") for line in lines}
    if len(found) != len(lines):
        raise ValueError(f"{path.name} has a cell twice")
    return found


def save(path: Path, found: Found) -> None:
    """Write a line for each cell."""
    path.write_text("".join(json.dumps({"cell": cell, "found": own}) + "\n" for cell, own in found.items()))


def parse(cell: str) -> dict[str, Any]:
    """{"method": "snapkv", "budget": 0.3} of `method=snapkv budget=0.3`."""
    return {key: yaml.safe_load(value) for key, _, value in (part.partition("=") for part in cell.split())}


def compute_cells(before: Found, play: Callable[[dict], dict]) -> Found:
    """All cells of the engine anew; `play` computes one from its settings."""
    return {cell: store(play(parse(cell))) for cell in before}


def compute_runs(before: Found, execute: Callable[[str], list[dict]]) -> Found:
    """All records anew; `execute` makes those of one command line. Their names begin with it."""
    found = {}
    for settings in dict.fromkeys(cell.partition(" | ")[0] for cell in before):
        for record in execute(settings):
            cell = f"{settings} | {record['method']} {record['allocator']} {record['codec']} | {record['uid']}"
            if cell in found:
                raise ValueError(f"two records are called {cell}")
            found[cell] = store(record)
    return found


def store(value: Any) -> Any:
    """A value as the files hold it."""
    if isinstance(value, Mapping):
        return {key: store(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [store(own) for own in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, str) and len(value) > LONG:
        return f"{value[:40]}… {len(value)} characters {sha256(value.encode()).hexdigest()[:10]}"
    return value


def compare(before: Found, after: Found, close: float) -> dict[str, list[str]]:
    """Cell -> lines on what differs, of the cells that do.

    Numbers with a fraction may differ by `close`, absolutely, or relatively where they are beyond 1. All else is equal.
    """
    changed = {}
    for cell in dict.fromkeys([*before, *after]):
        near = max(close, LOOSE) if any(name in cell for name in RECOMPUTED) else close
        if cell not in after:
            changed[cell] = ["is gone"]
        elif before.get(cell) is None:
            changed[cell] = ["is new"]
        elif own := list(differ(before[cell], after[cell], near)):
            changed[cell] = own
    return {cell: own for cell, own in changed.items() if cell in after or before[cell] is not None}


def differ(before: Any, after: Any, close: float, name: str = "") -> Iterator[str]:
    """A line for each thing that differs, such as `answers.0.tokens.0: [1, 2] → [1, 3]`."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            inner = f"{name}.{key}" if name else key
            if key in before and key in after:
                yield from differ(before[key], after[key], close, inner)
            else:
                yield f"{inner}: is {'gone' if key in before else 'new'}"
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after) and not plain(before):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differ(one, other, close, f"{name}.{number}")
    elif not equal(before, after, close):
        yield f"{name}: {shorten(before)} → {shorten(after)}"


def plain(values: list) -> bool:
    """Whether a list is shown as a whole: one of whole numbers, such as tokens."""
    return all(isinstance(value, int) for value in values)


def equal(before: Any, after: Any, close: float) -> bool:
    """Whether two values are the same, with a tolerance for numbers with a fraction."""
    if isinstance(before, float) and isinstance(after, float):
        return math.isclose(before, after, rel_tol=close, abs_tol=close)
    return type(before) is type(after) and before == after


def shorten(value: Any, most: int = 100) -> str:
    """At most so many characters of a value."""
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}…"


def report(changed: Mapping[str, list[str]], most: int | None = None) -> list[str]:
    """A line for each changed cell: what kinds of things changed, and the first of them; at most so many lines."""
    lines = []
    for cell, own in changed.items():
        kinds = dict.fromkeys(kind_of(line) for line in own)
        lines.append(f"{cell}: {own[0]}" if len(own) == 1 else f"{cell}: {', '.join(kinds)}; first {own[0]}")
    if most is not None and len(lines) > most:
        return [*lines[: most - 1], f"… and {len(lines) - most + 1} more cells"]
    return lines


def kind_of(line: str) -> str:
    """`tokens` of `answers.0.tokens.0: [1, 2] → [1, 3]`."""
    parts = [part for part in line.partition(": ")[0].split(".") if not part.isdigit()]
    return next((part for part in parts if part != "answers"), line)


def other_versions() -> str | None:
    """Which of the pinned packages have other versions here; None where all are as pinned."""
    pins = dict(line.split("==") for line in LOCK.read_text().splitlines() if "==" in line)
    here = {name: version(name).partition("+")[0] for name in PINNED}
    return ", ".join(f"{name} {own}, pinned {pins[name]}" for name, own in here.items() if own != pins[name]) or None

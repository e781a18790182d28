"""Which averages a paper prints although its printed cells give another value (`kvbench.papers.printed_averages`)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvbench.papers.printed_averages import LINE_KEYS

Lines = Sequence[Mapping[str, str]]


def find_contradictions(
    of: Any, cells: Lines, averages: Lines, task: str = "average"
) -> Iterator[tuple[dict[str, str], float, float]]:
    """Find printed averages that contradict their cells.

    Args:
        of: What is averaged: a published task, or a list of such, possibly nested.
        cells: Published lines with the values of tasks.
        averages: Published lines with the averages.
        task: Name of the average in the column `task`.

    Yields:
        The columns that identify the line, the printed average, and the average of its cells. Lines with an unknown
        cell are skipped.
    """
    known: dict[tuple[str, ...], dict[str, str]] = {}
    for row in cells:
        if row["value"]:
            known.setdefault(tuple(row[key] for key in LINE_KEYS), {})[row["task"]] = row["value"]
    for row in averages:
        own = known.get(tuple(row[key] for key in LINE_KEYS), {})
        if row["task"] != task or not row["value"] or not set(list_leaves(of)) <= set(own):
            continue
        value = nested_mean({name: float(text) for name, text in own.items()}, of)
        unit = min(half_unit(own[name]) for name in list_leaves(of))  # 100 and 47.7 stand for 100.00 and 47.70
        if abs(value - float(row["value"])) > half_unit(row["value"]) + unit + 1e-9:
            yield {key: row[key] for key in LINE_KEYS if row[key]}, float(row["value"]), value


def list_leaves(of: Any) -> list[str]:
    """Return the names in nested lists."""
    return [of] if isinstance(of, str) else [name for part in of for name in list_leaves(part)]


def nested_mean(values: Mapping[str, float], of: Any) -> float:
    """Return the mean of nested lists of names, in which each entry of a list has the same weight."""
    return values[of] if isinstance(of, str) else sum(nested_mean(values, part) for part in of) / len(of)


def half_unit(text: str) -> float:
    """Return half a unit in the last decimal place of a printed number."""
    return 0.5 * 10.0 ** -len(text.partition(".")[2])

"""Find averages that a paper prints although its printed cells give another value.

The key `averages` of a table describes them:

    of            what is averaged: published tasks, or lists of them; each entry of a list has the same weight
    files         where the cells are printed (default: the table's own file)
    contradict    lines with another average: the columns that identify the line, the `printed` average, and the average
                  of the `cells`

A printed average agrees with its cells if both differ by no more than rounding: half a unit in the last place of the
average plus half a unit of a cell.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

LINE_KEYS = ("model", "method", "variant", "budget", "block_size", "context_length")  # one line of a table
KEY_FORMATS = {"budget": "{} kept", "context_length": "{} tokens"}

Lines = Sequence[Mapping[str, str]]


def describe_contradictions(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield a footnote for each contradicting line of a table."""
    for own in spec.get("averages", {}).get("contradict", ()):
        who = [KEY_FORMATS.get(key, "{}").format(str(own[key]).rpartition("/")[2]) for key in LINE_KEYS if key in own]
        line = ", ".join(who)
        yield f"Contradiction in {line}: the paper prints the average {own['printed']}, its cells give {own['cells']}."


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

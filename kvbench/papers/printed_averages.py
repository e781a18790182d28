"""Averages that a paper prints and that the cells it prints do not give.

`averages` of a table lists them: `of`, what is averaged (published tasks, lists within lists weigh alike), `files`,
where its cells are printed (default: the table's own), and `contradict`, the lines whose average is another: what tells
them from others, what is `printed`, what the `cells` give. A printed average is what its cells give if it is within the
rounding of both: half a unit of the average and half a unit of a cell.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

LINE_KEYS = ("model", "method", "variant", "budget", "block_size", "context_length")  # one line of a table
KEY_FORMATS = {"budget": "{} kept", "context_length": "{} tokens"}

Lines = Sequence[Mapping[str, str]]


def describe_contradictions(spec: Mapping[str, Any]) -> Iterator[str]:
    """A footnote for each, with the names that the paper prints."""
    for own in spec.get("averages", {}).get("contradict", ()):
        who = [KEY_FORMATS.get(key, "{}").format(str(own[key]).rpartition("/")[2]) for key in LINE_KEYS if key in own]
        line = ", ".join(who)
        yield f"Contradiction, {line}: the average printed is {own['printed']}, its cells give {own['cells']}."


def find_contradictions(
    of: Any, cells: Lines, averages: Lines, task: str = "average"
) -> Iterator[tuple[dict, float, float]]:
    """(line, printed average, what its cells give) of all averages whose cells are all known and give another."""
    known: dict[tuple, dict[str, str]] = {}
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
    return [of] if isinstance(of, str) else [name for part in of for name in list_leaves(part)]


def nested_mean(values: Mapping[str, float], of: Any) -> float:
    return values[of] if isinstance(of, str) else sum(nested_mean(values, part) for part in of) / len(of)


def half_unit(text: str) -> float:
    return 0.5 * 10.0 ** -len(text.partition(".")[2])

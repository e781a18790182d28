"""Name averages that a paper prints although its printed cells give another value.

The key `averages` of a table describes them:

    of            what is averaged: published tasks, or lists of them; each entry of a list has the same weight
    files         where the cells are printed (default: the table's own file)
    contradict    lines with another average: the columns that identify the line, the `printed` average, and the average
                  of the `cells`

A printed average agrees with its cells if both differ by no more than rounding: half a unit in the last place of the
average plus half a unit of a cell. A test finds all lines that do not, from the published values.
"""

from collections.abc import Iterator, Mapping
from typing import Any

LINE_KEYS = ("model", "method", "variant", "budget", "block_size", "context_length")  # one line of a table
KEY_FORMATS = {"budget": "{} kept", "context_length": "{} tokens"}


def describe_contradictions(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield a footnote for each contradicting line of a table."""
    for line in spec.get("averages", {}).get("contradict", ()):
        named = ", ".join(
            KEY_FORMATS.get(key, "{}").format(str(line[key]).rpartition("/")[2]) for key in LINE_KEYS if key in line
        )
        printed, cells = line["printed"], line["cells"]
        yield f"Contradiction in {named}: the paper prints the average {printed}, its cells give {cells}."

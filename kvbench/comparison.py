"""A table of a paper with what was measured beside what was published, as Markdown and as LaTeX.

Where a measured cell is empty it has the number of a note with the command that fills it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SETTING = {
    "measure": "task.measure", "baseline": "task.baseline", "method": "method", "preset": "method.preset",
    "budget": "budget", "block_size": "block_size", "length": "task.length", "batch": "task.batch", "rows": "task.rows",
    "implementation": "task.implementation", "device": "device", "dtype": "dtype",
}  # fmt: skip  # column of a measurement -> setting of run.py

Select = Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """Texts; `select`: the measurement that is missing, None where there is one or none is wanted."""

    published: str
    measured: str
    select: Select | None = None


@dataclass(frozen=True)
class Table:
    """Labels and cells, and what must be said with them."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    notes: tuple[str, ...]

    @property
    def sides(self) -> tuple[str, ...]:
        """What each column is split into: only what any cell has."""
        printed = any(cell.published for _, cells in self.rows for cell in cells)
        return ("published", "measured") if printed else ("measured",)

    @property
    def fillings(self) -> list[tuple[str, ...]]:
        """What fills the missing cells, once each: commands of a row."""
        found = [commands([cell.select for cell in cells if cell.select]) for _, cells in self.rows]
        return list(dict.fromkeys(filter(None, found)))

    def cells(self) -> list[list[str]]:
        """Texts of the rows; missing cells have the number of the note that fills them."""
        texts, fillings = [], self.fillings
        for label, cells in self.rows:
            filling = commands([cell.select for cell in cells if cell.select])
            texts.append([label])
            for cell in cells:
                filled = cell.measured or (f"[{fillings.index(filling) + 1}]" if cell.select else "–")
                texts[-1] += [cell.published or "–", filled] if len(self.sides) == 2 else [filled]
        return texts

    def to_markdown(self) -> str:
        titles = [f"{name} {side}" if len(self.sides) == 2 else name for name in self.columns for side in self.sides]
        lines = [f"# {self.title}", "", line(["", *titles]), "|---" + "|--:" * len(titles) + "|"]
        lines += [line(texts) for texts in self.cells()]
        lines += ["", *(f"* {note}" for note in self.notes)]
        for number, filling in enumerate(self.fillings, 1):
            lines.append(f"* [{number}] " + ", ".join(f"`{own}`" for own in filling))
        return "\n".join(lines) + "\n"

    def to_latex(self) -> str:
        """A tabular; captions and notes as comments, for whoever includes it."""
        width = len(self.sides)
        heads = [f"\\multicolumn{{{width}}}{{c}}{{{literal(name)}}}" for name in self.columns]
        fillings = [f"[{number}] {'; '.join(filling)}" for number, filling in enumerate(self.fillings, 1)]
        lines = [f"% {text}" for text in (self.title, *self.notes, *fillings)]
        lines += [f"\\begin{{tabular}}{{l{'r' * width * len(self.columns)}}}", "\\hline"]
        lines.append(" & ".join(["", *heads]) + r" \\")
        if width == 2:
            lines.append(" & ".join(["", *self.sides * len(self.columns)]) + r" \\")
        body = [" & ".join(map(literal, texts)) + r" \\" for texts in self.cells()]
        return "\n".join([*lines, "\\hline", *body, "\\hline", "\\end{tabular}"]) + "\n"


def commands(selects: Sequence[Select]) -> tuple[str, ...]:
    """run.py with settings that measure all of these; one command for those that name the same settings."""
    groups: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for select in selects:
        own = {"task": "efficiency", "model": "random", "model.like": select["model"]}
        own |= {SETTING[key]: value for key, value in select.items() if key in SETTING and value not in ("", None)}
        name, _, rest = str(select["quantity"]).partition("_")
        if name in ("e2e", "answer"):
            own["task.new_tokens"] = rest.removesuffix("_ms")
        found = groups.setdefault(tuple(sorted(own)), {key: [] for key in own})
        for key, value in own.items():
            if str(value) not in found[key]:
                found[key].append(str(value))
    return tuple(
        f"python run.py{' -m' if any(len(values) > 1 for values in found.values()) else ''} "
        + " ".join(f"{key}={','.join(values)}" for key, values in found.items())
        for found in groups.values()
    )


def line(texts: Iterable[str]) -> str:
    return "| " + " | ".join(texts) + " |"


def literal(text: str) -> str:
    """`text` for LaTeX."""
    return (
        "".join(f"\\{char}" if char in "&%$#_{}" else char for char in text)
        .replace("–", "--")
        .replace("×", "$\\times$")
    )

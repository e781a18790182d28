"""Complete the tables of README.md and docs/ that list methods, allocators, codecs and tasks (dev docs-tables).

People write these tables. What they do not name yet gets a row whose label begins with "other", and a section of
docs/methods.md that begins with the line `WRITTEN`. Both come from the file in conf/ and the docstring of its module,
are written anew by each call, and go when somebody writes a row or a section by hand, or when the file is gone.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvbench.config.paths import FILES
from kvbench.report.method_pages import PRESET, read_docstring, read_first_comment, split_docstring
from kvbench.validation import SettingError, format_value

COMMAND = "python -m kvbench dev docs-tables"
WRITTEN = "<!-- kvbench dev docs-tables writes this section. To write it by hand, delete this line. -->"
TABLE = "<!-- kvbench dev docs-tables {option} writes this table: {label} -->"
OTHER = "| other"  # rows that this module writes begin so
FURTHER = "## Further methods"  # heading of the methods whose sections this module writes
NEXT = {"method": "## Allocators", "allocator": "## Codecs", "codec": "## What a method costs"}  # group -> next heading
SECTION = re.compile(rf"^### [^\n]+\n\n{re.escape(WRITTEN)}\n.*?(?=^##)", re.MULTILINE | re.DOTALL)
UNLISTED = ("full",)  # the baseline, which no table lists


@dataclass(frozen=True)
class Part:
    """A method, an allocator, a codec or a task, as its file in conf/ and the docstring of its module describe it."""

    group: str
    name: str
    config: dict[str, Any]
    text: str
    """The file in conf/."""
    paragraphs: Sequence[str]
    """The docstring of the module."""

    @property
    def file(self) -> str:
        """The module's path in the checkout, such as "methods/snapkv.py"; "" for a class of another package."""
        package, *parts, _ = str(self.config.get("_target_", "")).split(".")
        return "/".join(parts) + ".py" if package == "kvbench" and parts else ""

    @property
    def definition(self) -> str:
        """What it does, in one sentence or several."""
        first = self.paragraphs[0] if self.paragraphs else read_first_comment(self.text) or self.name
        first = first.removeprefix(f"{self.name}:").strip()
        return first[:1].upper() + first[1:]

    def format_section(self) -> str:
        """Return its section of docs/methods.md."""
        link = f" · [{self.file}](../{self.file})" if self.file else " · a class of another package"
        sources = [paragraph for paragraph in self.paragraphs if paragraph.startswith("Source")]
        lines = [f"### {self.name}", WRITTEN, f"`{self.group}={self.name}`{link}", self.definition, *sources]
        if presets := self.config.get("presets"):
            notes = dict(PRESET.findall(self.text))
            rows = ["| preset | settings | source |", "|---|---|---|"]
            for preset, changes in presets.items():
                label = f"`{preset}`{' (default)' if preset == self.config.get('preset') else ''}"
                settings = ", ".join(f"`{key}={format_value(value)}`" for key, value in (changes or {}).items())
                rows.append(f"| {label} | {settings} | {escape_cell(notes.get(preset, ''))} |")
            lines.append("\n".join(rows))
        return "\n\n".join(lines) + "\n\n"


def escape_cell(text: str) -> str:
    """Return a text as it is written into a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def list_parts(group: str, root: Path) -> list[Part]:
    """Return what the files of conf/<group>/ of a checkout describe, by name."""
    parts = []
    for path in sorted((root / "conf" / group).glob("[!_]*.yaml")):
        text = path.read_text(encoding="utf-8")
        config = yaml.safe_load(text) or {}
        paragraphs = split_docstring(read_docstring(str(config.get("_target_", "")), root))
        if path.stem not in UNLISTED:
            parts.append(Part(group, path.stem, config, text, paragraphs))
    return parts


def is_named(name: str, text: str) -> bool:
    """Return whether a row of a table names it: as code, as a link, or in a list."""
    return re.search(rf"[\[`=, ]{re.escape(name)}[\]`,( ]", text) is not None


def complete_table(text: str, heading: str, make_rows: Callable[[Sequence[str]], Iterable[str]]) -> str:
    """Return a page in which rows follow those that people wrote in the first table behind a heading.

    Args:
        text: The page.
        heading: The line of the heading.
        make_rows: Makes the further rows from those that people wrote.

    Raises:
        SettingError: The page has no such heading, or no table follows it.
    """
    lines = text.splitlines()
    title = next((number for number, line in enumerate(lines) if line == heading), len(lines))
    begin = next((number for number in range(title, len(lines)) if lines[number].startswith("|")), len(lines))
    if begin == len(lines):
        raise SettingError(f"{heading}: this heading, with a table behind it, is not on the page")
    end = next((number for number in range(begin, len(lines)) if not lines[number].startswith("|")), len(lines))
    written = [line for line in lines[begin:end] if not line.startswith(OTHER)]
    return "\n".join([*lines[:begin], *written, *make_rows(written[2:]), *lines[end:]]) + "\n"


def complete_readme(text: str, root: Path) -> str:
    """Return README.md with a row of each method, allocator and codec that it does not name, and one of all tasks."""

    def list_methods(rows: Sequence[str]) -> Iterable[str]:
        for group in NEXT:
            labels = "".join(row.split("|")[1] for row in rows if find_group(row) == group)
            for part in list_parts(group, root):
                if not is_named(part.name, labels):
                    name = part.name if group == "method" else f"`{group}={part.name}`"
                    label = f"[{name}]({part.file})" if part.file else name
                    yield f"{OTHER}: {label} | {escape_cell(part.definition)} | |"

    def list_tasks(rows: Sequence[str]) -> Iterable[str]:
        missing = [part for part in list_parts("task", root) if not is_named(part.name, "".join(rows))]
        if missing:
            yield f"{OTHER} `task=` | {', '.join(f'`{part.name}`' for part in missing)} |"

    return complete_table(complete_table(text, "## Methods", list_methods), "## Benchmarks", list_tasks)


def find_group(row: str) -> str:
    """Return whether a row of README's table is about a method, an allocator or a codec."""
    return next((group for group in ("allocator", "codec") if f"`{group}=" in row.split("|")[1]), "method")


def complete_benchmarks(text: str, root: Path) -> str:
    """Return docs/benchmarks.md with a row of each task that it does not name."""

    def list_tasks(rows: Sequence[str]) -> Iterable[str]:
        for part in list_parts("task", root):
            if not is_named(part.name, "".join(rows)):
                yield f"{OTHER}: `{part.name}` | {escape_cell(part.definition)} | |"

    return complete_table(text, "# Benchmarks", list_tasks)


def complete_methods(text: str, root: Path) -> str:
    """Return docs/methods.md with a section of each method, allocator and codec that has none.

    Raises:
        SettingError: The page lacks a heading behind which sections are written.
    """
    missing = {group: find_unwritten(group, text, root) for group in NEXT}
    text = SECTION.sub("", text).replace(f"{FURTHER}\n\n", "")
    for group, heading in NEXT.items():
        if f"\n{heading}\n" not in text:
            raise SettingError(f"docs/methods.md: the heading {heading} is missing")
        sections = "".join(part.format_section() for part in missing[group])
        if group == "method" and sections:
            sections = f"{FURTHER}\n\n{sections}"
        text = text.replace(f"\n{heading}\n", f"\n{sections}{heading}\n", 1)
    return text


def find_unwritten(group: str, text: str, root: Path) -> list[Part]:
    """Return the methods, allocators or codecs of which nobody has written a section of docs/methods.md by hand.

    Args:
        group: "method", "allocator" or "codec".
        text: The page.
        root: The checkout.
    """
    by_hand = SECTION.sub("", text)
    return [
        part
        for part in list_parts(group, root)
        if not re.search(rf"^`{group}={re.escape(part.name)}` ", by_hand, re.MULTILINE)
    ]


def list_unwritten(group: str, root: Path = FILES) -> set[str]:
    """Return the names of what `find_unwritten` finds in a checkout. The tests ask no more of it than the laws."""
    return {part.name for part in find_unwritten(group, (root / "docs/methods.md").read_text(encoding="utf-8"), root)}


PAGES: dict[str, Callable[[str, Path], str]] = {
    "README.md": complete_readme,
    "docs/methods.md": complete_methods,
    "docs/benchmarks.md": complete_benchmarks,
}


def replace_table(text: str, label: str, rows: Sequence[str], option: str) -> str:
    """Return a page in which a whole table, or a picture, is written anew: the one behind the line `TABLE` of a label.

    Args:
        text: The page.
        label: What the line calls the table.
        rows: The lines of the table, its head included.
        option: The option of the command that writes it, as the line says.

    Raises:
        SettingError: The page has no such line.
    """
    line = TABLE.format(label=label, option=option)
    before, marker, after = text.partition(f"\n{line}\n")
    if not marker:
        raise SettingError(f"{label}: the line {line} is not on the page")
    rest = re.sub(r"\A\n((\||!\[)[^\n]*\n)*", "", after)
    return before + marker + "".join(f"{row}\n" for row in ("", *rows)) + rest


def complete_pages(root: Path = FILES) -> dict[str, tuple[str, str]]:
    """Return the text of each page as it is and as it should be.

    Args:
        root: The checkout.
    """
    texts = {page: (root / page).read_text(encoding="utf-8") for page in PAGES}
    return {page: (texts[page], complete(texts[page], root)) for page, complete in PAGES.items()}

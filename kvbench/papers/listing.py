"""List every table and figure of the papers: how each is emitted and what a store has of it, or why it is static.

The key `exhibits` of conf/papers/<paper>.yaml lists them in the paper's order. A value is

    nothing     the specification of this name emits it
    a list      these specifications do
    a text      nothing is emitted, and this is the reason
"""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvbench.papers.build import build_table, shows_machine
from kvbench.papers.cell_values import RunIndex
from kvbench.papers.exhibit_pages import fill_exhibits
from kvbench.papers.exhibits import find_files, load_exhibits, make_study_command, normalize_name, refuse_exhibit
from kvbench.papers.paper_table import PaperTable
from kvbench.papers.table_spec import (
    LISTED,
    PAPERS,
    IndexedLines,
    Select,
    find_preset,
    is_cost_table,
    list_papers,
    load_specs,
    read_tables,
)
from kvbench.store.efficiency_csv import find_measurements, read_lines
from kvbench.validation import SettingError, require_choice

STATIC, SCORES, COST, STUDY = "static", "scores", "cost", "study"
FILLED, PARTLY, EMPTY = "filled", "partly", "empty"

Specs = Mapping[str, Select]


@dataclass(frozen=True)
class PaperExhibit:
    """A table or figure of a paper.

    Attributes:
        paper: The paper, as in conf/papers/.
        name: Its name, such as ``figure04``.
        emitted: Names of the specifications that emit it; () for a static exhibit.
        reason: Why it is static; "" for an emitted one.
    """

    paper: str
    name: str
    emitted: tuple[str, ...]
    reason: str

    @property
    def specs(self) -> tuple[str, ...]:
        """The names of the specifications over all papers, <paper>_<name>."""
        return tuple(f"{self.paper}_{spec}" for spec in self.emitted)


@cache
def list_exhibits() -> tuple[PaperExhibit, ...]:
    """Return the tables and figures of all papers."""
    made = []
    for paper in list_papers():
        for name, entry in read_tables(PAPERS / f"{paper}.yaml").get(LISTED, {}).items():
            reason = entry if isinstance(entry, str) else ""
            made.append(PaperExhibit(paper, name, () if reason else tuple(entry or [name]), reason))
    return tuple(made)


def choose_exhibits(paper: str | None, exhibit: str | None) -> tuple[Specs, Specs]:
    """Return the specifications of tables of scores and costs, and those of exhibits that studies fill.

    Args:
        paper: The paper; None for all of them and for tables that are in no paper.
        exhibit: A name such as ``12``, ``figure4`` or ``table04a``, or the beginning of several, such as ``figure2``
            of ``figure02_left`` and ``figure02_right``; None for all of the paper.

    Raises:
        SettingError: There is no such paper or exhibit, or it is static.
    """
    tables, studied = load_all(paper)
    if exhibit is None:
        return tables, studied
    name, parts = normalize_name(exhibit), find_parts(paper, exhibit)
    wanted = {f"{paper}_{name}", *(spec for part in parts for spec in part.specs)}
    chosen = [{key: spec for key, spec in specs.items() if key in wanted} for specs in (tables, studied)]
    if not any(chosen):
        if parts:
            raise SettingError(f"EXHIBIT={exhibit}: it is static: {parts[0].reason}")
        listed = [entry.name for entry in list_exhibits() if entry.paper == paper]
        there = [*listed, *(key.removeprefix(f"{paper}_") for key in (*tables, *studied))]
        refuse_exhibit(exhibit, dict.fromkeys(there))
    return chosen[0], chosen[1]


def find_parts(paper: str | None, exhibit: str) -> list[PaperExhibit]:
    """Return the tables and figures of a paper that a name stands for: one, or its parts, such as 3a, 3b and 3c."""
    named = re.compile(rf"{re.escape(normalize_name(exhibit))}([a-z]|_[a-z]+)?")
    return [entry for entry in list_exhibits() if entry.paper == paper and named.fullmatch(entry.name)]


def load_all(paper: str | None) -> tuple[Specs, Specs]:
    """Return the specifications of tables of scores and costs, and of exhibits that studies fill.

    Args:
        paper: The only paper, which may have one of both kinds; None for all of them.

    Raises:
        SettingError: There is no such paper.
    """
    if paper is None:
        return load_specs(), load_exhibits()
    require_choice("PAPER", paper, sorted({*list_papers(), *find_files()}))
    return (
        load_specs(paper) if paper in list_papers() else {},
        load_exhibits(paper) if paper in find_files() else {},
    )


@dataclass(frozen=True)
class ListedLine:
    """What the list says of an exhibit: its kind, what the store has of it, and the command that fills it.

    If no single command fills it, because runs need a file of the user's, this is the command that prints all commands.
    """

    exhibit: PaperExhibit
    kind: str
    command: str
    state: str


def describe_exhibits(results: Path, paper: str | None) -> list[ListedLine]:
    """Return what a store has of each exhibit.

    Args:
        results: The folder of results.
        paper: The only paper; None for all of them.

    Raises:
        SettingError: There is no such paper, or a file of the store cannot be read.
    """
    tables, studied = load_all(paper)
    states = find_table_states(results, tables) | find_study_states(results, studied)
    lines = []
    for exhibit in list_exhibits():
        if exhibit.paper != (paper or exhibit.paper):
            continue
        if exhibit.reason:
            lines.append(ListedLine(exhibit, STATIC, exhibit.reason, ""))
            continue
        of = {states[name] for name in exhibit.specs}
        state = of.pop() if len(of) == 1 else PARTLY
        lines.append(ListedLine(exhibit, *describe_filling(exhibit, tables, studied), state))
    return lines


def describe_filling(exhibit: PaperExhibit, tables: Specs, studied: Specs) -> tuple[str, str]:
    """Return the kind of an emitted exhibit and the commands that fill it."""
    commands: dict[str, str] = {}  # command -> kind
    for name in exhibit.specs:
        if name in studied:
            commands.setdefault(make_study_command(name), STUDY)
        elif is_cost_table(tables[name]):
            commands.setdefault(f"make efficiency LIST={tables[name].get('plan', 'full')}", COST)
        elif preset := find_preset(name, tables[name]):
            commands.setdefault(f"python run.py -m preset={preset}", SCORES)
        else:
            commands.setdefault(f"python -m kvbench papers write {exhibit.paper} {exhibit.name}", SCORES)
    return next(iter(commands.values())), "; ".join(commands)


def find_table_states(results: Path, tables: Specs) -> dict[str, str]:
    """Return what a store has of each table of scores or costs. For costs, the machine with the most values counts."""
    runs = RunIndex.read(results)
    machines = {path: IndexedLines(read_lines(path)) for path in find_measurements(results / "efficiency")}
    states = {}
    for name, spec in tables.items():
        if is_cost_table(spec):
            made = [build_table(spec, lines, ()) for path, lines in machines.items() if shows_machine(spec, path)]
        else:
            made = [build_table(spec, (), (), runs)]
        states[name] = find_state(made)
    runs.store.print_damage()
    return states


def find_study_states(results: Path, studied: Specs) -> dict[str, str]:
    """Return what a store has of each exhibit that studies fill. The folder that fills most of it counts."""
    states = {}
    for name, pages in fill_exhibits(results, studied).items():
        tables = [page.table for page in pages if page.table]
        states[name] = find_state(tables, every=True) if len(tables) == len(pages) else FILLED
    return states


def find_state(versions: Iterable[PaperTable], every: bool = False) -> str:
    """Return whether one of several versions of a table has all of its values, any or none of them.

    Args:
        versions: The table, filled by several machines or models.
        every: Whether every cell counts. If not, those count that have a value or a command that makes one.
    """
    counts = []
    for table in versions:
        cells = [cell for _, row in table.rows for cell in row if every or cell.text or cell.filling]
        counts.append((sum(bool(cell.text) for cell in cells), len(cells)))
    if any(filled == most > 0 for filled, most in counts):
        return FILLED
    return PARTLY if any(filled for filled, _ in counts) else EMPTY


def format_list(lines: Iterable[ListedLine], width: int) -> Iterator[str]:
    """Yield the list as text: for each paper a line with its counts, then one for each exhibit.

    Args:
        lines: What the list says.
        width: Characters of a line. A command that does not fit stands below.
    """
    of: dict[str, list[ListedLine]] = {}
    for line in lines:
        of.setdefault(line.exhibit.paper, []).append(line)
    for paper, paper_lines in of.items():
        static = sum(line.kind == STATIC for line in paper_lines)
        yield f"{paper}: {len(paper_lines)} tables and figures, {len(paper_lines) - static} emitted, {static} static"
        for line in paper_lines:
            head = f"  {line.exhibit.name:15}  {line.kind:6}  {line.state:6}"
            yield from put_beside(head, line.command, width)
    every: list[Any] = [line for paper_lines in of.values() for line in paper_lines]
    static = sum(line.kind == STATIC for line in every)
    counts = [f"{sum(line.state == state for line in every)} {state}" for state in (FILLED, PARTLY, EMPTY)]
    yield from textwrap.wrap(
        f"{len(every)} = {len(every) - static} emitted + {static} static; of those emitted, {', '.join(counts)}", width
    )


def put_beside(head: str, text: str, width: int) -> Iterator[str]:
    """Yield a text behind the head of a line, or below it if it does not fit."""
    if len(head) + 2 + len(text) <= width:
        yield f"{head}  {text}"
        return
    yield head.rstrip()
    yield from textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)

"""The runs that fill the papers' tables, for `row=` and `preset=` on the command line.

Both are derived from conf/papers/. `preset=dropkv_table5` stands for every run that a cell of that table needs.
`row=dropkv_snapkv` stands for the method, allocator and codec of one line of that paper's tables, with the settings
that the paper gives them. Rows that need a file, such as trained compressors, are in no preset.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

from kvbench.papers.experiment_key import GROUPS, drop_unused
from kvbench.papers.table_spec import (
    PAPERS,
    Select,
    expand_each,
    find_preset,
    is_cost_table,
    load_specs,
    merge_parts,
    read_yaml,
)
from kvbench.validation import format_value, require_choice

Settings = dict[str, str]  # setting of the command line -> its value as it is typed
FILES = tuple(f"{group}.path" for group in GROUPS)  # settings whose values in conf/papers/ stand for a user's files
FULL = "full"  # the row of the full cache, which all papers share


@cache
def read_specs() -> Mapping[str, Select]:
    return load_specs()


@cache
def find_tables() -> Mapping[str, str]:
    """Return preset -> the first table or figure that it fills."""
    tables: dict[str, str] = {}
    for name, spec in read_specs().items():
        if not is_cost_table(spec) and (preset := find_preset(name, spec)) is not None:
            tables.setdefault(preset, name)
    return tables


def list_presets() -> list[str]:
    """Return the names that `preset=` accepts."""
    return sorted(find_tables())


@cache
def expand_preset(preset: str) -> tuple[Settings, ...]:
    """Return the settings of all runs of a table, each run once.

    Raises:
        SettingError: There is no such preset.
    """
    require_choice("preset", preset, list_presets())
    spec = read_specs()[find_tables()[preset]]
    columns = list(expand_each(spec["columns"]))
    runs = [merge_parts(spec, row, column).get("run") for row in expand_each(spec["rows"]) for column in columns]
    distinct = {}
    for run in runs:
        if run is not None and not needs_file(run):
            settings = {name: format_value(value) for name, value in drop_unused(run).items()}
            distinct[tuple(sorted(settings.items()))] = settings
    return tuple(distinct.values())


def list_rows() -> list[str]:
    """Return the names that `row=` accepts."""
    return sorted(read_rows())


@cache
def read_rows() -> Mapping[str, Settings]:
    """Return row -> the settings of its method, allocator and codec.

    If a paper uses one label for two different rows, the name of the second row contains the name of its table.
    """
    rows: dict[str, Settings] = {FULL: {"method": FULL}}
    for path in sorted(PAPERS.glob("*.yaml")):
        for table, spec in read_yaml(path).items():
            for part in find_methods(spec):
                settings = {name: format_value(value) for name, value in part["run"].items() if is_of_cache(name)}
                names = name_row(path.stem, part["label"]), name_row(f"{path.stem}_{table}", part["label"])
                if settings not in (rows[FULL], rows.get(names[0])):
                    rows.setdefault(names[names[0] in rows], settings)
    return rows


def find_methods(node: object) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a paper's table, at any depth, that set only the method, allocator, codec and budget of a run.

    Rows that need a file are left out.
    """
    if isinstance(node, Mapping):
        run = node.get("run")
        names = run.keys() if "label" in node and isinstance(run, Mapping) else ()
        if "method" in names and not needs_file(names) and all(is_of_cache(k) or k == "budget" for k in names):
            yield node
        node = list(node.values())
    if isinstance(node, list):
        for part in node:
            yield from find_methods(part)


def needs_file(names: Collection[str]) -> bool:
    """Return whether a run with these settings needs a file for its method or codec."""
    return any(name in names for name in FILES)


def is_of_cache(name: str) -> bool:
    """Return whether a setting is one of the method, allocator or codec."""
    return name.split(".")[0] in GROUPS


def name_row(paper: str, label: str) -> str:
    """Return the name of a row: `deltakv_quest` for the label "Quest, 30 % read" in the paper deltakv.

    Shares of rows and remarks are left out.
    """
    plain = re.sub(r", \d+ %( read)?$|\(.*\)", "", label)
    return "_".join([paper, *re.findall(r"[a-z0-9]+", plain.lower())])

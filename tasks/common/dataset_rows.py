"""Read the rows of a benchmark's data from a file or folder in the official format, or from the hub.

A task's `path` is one of:

* `miniature`: rows that kvbench makes in the official format, for trying a task. They are not the benchmark.
* `hub`: the published data set at a pinned revision.
* A file or folder in the published format.

Whatever is wrong with rows is a SettingError that names the file, the line and the column.
"""

import hashlib
import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from kvbench.network import use_hub
from kvbench.validation import SettingError, resolve_subtasks

MINIATURE, HUB = "miniature", "hub"
WHOLE = re.compile(r"\s*-?[0-9]{1,18}(?:\.0*)?\s*")
HALF = re.compile(r"\\u[dD][89a-fA-F]")  # one half of an escaped character beyond U+FFFF

Row = Mapping[str, Any]
Columns = Mapping[str, type | tuple[type, ...]]  # name -> type; a task checks the items of lists


def name_source(path: str) -> str:
    """Return what a record says about its data: miniature, hub or local."""
    return path if path in (MINIATURE, HUB) else "local"


def check_path(setting: str, path: object) -> None:
    """Raise a SettingError unless `path` is miniature, hub, or an existing file or folder."""
    if not isinstance(path, str):
        raise SettingError(f"{setting}={path}: {MINIATURE}, {HUB}, or a file or folder in the official format")
    if path not in (MINIATURE, HUB) and not Path(path).expanduser().exists():
        raise SettingError(f"{setting}={path}: no such file or folder; or {MINIATURE}, or {HUB}")


def select_subtasks(given: object, path: str, names: Sequence[str], ending: str = "") -> list[str]:
    """Resolve `task.subtasks`.

    If `path` is a single file (not a .zip), it holds one subtask, and ``all`` means the subtask that the file is named
    after. `ending` is what the file's name may have behind that of the subtask.

    Raises:
        SettingError: A name is unknown, or a single file is asked for several subtasks.
    """
    file = Path(path).expanduser()
    if path in (MINIATURE, HUB) or not file.is_file() or file.suffix == ".zip":
        return resolve_subtasks("task.subtasks", given, names)
    stem = file.stem.removesuffix(ending)
    chosen = [stem] if given == "all" and stem in names else resolve_subtasks("task.subtasks", given, names)
    if len(chosen) > 1:
        raise SettingError(f"task.path={path}: one file is one subtask's, named by task.subtasks or by the file")
    return chosen


def find_file(setting: str, path: Path, names: Sequence[str]) -> Path:
    """Return `path` if it is a file, else the first of `names` that the folder has; SettingError if it has none."""
    if path.is_file():
        return path
    for name in names:
        if (path / name).is_file():
            return path / name
    some = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
    raise SettingError(f"{setting}={path}: a file, or a folder with one of {some}")


def read_rows(setting: str, path: Path, member: str | None = None) -> Iterator[tuple[str, Row]]:
    """Read rows of a file.

    Args:
        setting: The setting that messages name.
        path: A .jsonl, .json (a list of rows), .csv, .parquet or .zip file. Text is UTF-8, with or without a byte-order
            mark.
        member: The file inside a .zip. If it is not there, it may lie in another folder of the .zip.

    Yields:
        (where, row) for each row. `where` names the file and the line or row, for messages.

    Raises:
        SettingError: The file cannot be read, or a row is no object.
    """
    name = f"{path.name}:{member}" if member else path.name
    suffix = Path(member or path.name).suffix
    try:
        if suffix == ".parquet":
            yield from _frame(name, "parquet", path)
        elif suffix == ".csv":
            yield from _frame(name, "csv", path)
        else:
            raw = _read_member(setting, path, member) if member else path.read_bytes()
            yield from _json(setting, name, suffix, raw.decode("utf-8-sig"))
    except KeyError:
        raise SettingError(f"{setting}: {path.name} has no {member}") from None
    except UnicodeDecodeError as error:
        raise SettingError(f"{setting}: {name} is not UTF-8 (byte {error.start})") from None
    except OSError as error:
        raise SettingError(f"{setting}: {name} cannot be read ({error.strerror or error})") from None
    except (zipfile.BadZipFile, ValueError) as error:
        if isinstance(error, SettingError):
            raise
        raise SettingError(f"{setting}: {name} cannot be read ({str(error).splitlines()[0]})") from None


def parse_whole(value: object) -> object:
    """Return a whole number that a copy stores as text or as a decimal ("12", 73.0, "73.0") as int; else the value."""
    if isinstance(value, str) and WHOLE.fullmatch(value):
        return int(value.partition(".")[0])
    return int(value) if isinstance(value, float) and value.is_integer() else value


def check_rows(
    setting: str, located: Iterable[tuple[str, Row]], columns: Columns, unique: str | None = None, what: str = "rows"
) -> list[Row]:
    """Check rows and return them.

    Args:
        setting: The setting that messages name.
        located: (where, row) for each row.
        columns: Columns that each row must have, and their types.
        unique: A column whose values must differ.
        what: What the rows are, for a message that there are none.

    Raises:
        SettingError: A row lacks a column, has a wrong type or repeats a value of `unique`, or there are no rows.
    """
    kept: list[Row] = []
    seen: dict[Any, str] = {}
    for where, row in located:
        for name, types in columns.items():
            if name not in row:
                raise SettingError(f"{setting}: {where} has no column {name}")
            expected = types if isinstance(types, tuple) else (types,)
            if not isinstance(row[name], expected) or isinstance(row[name], bool) and bool not in expected:
                names = " or ".join(allowed.__name__ for allowed in expected)
                raise SettingError(f"{setting}: {where}: {name} is {type(row[name]).__name__}, expected {names}")
        if unique is not None and (first := seen.setdefault(row[unique], where)) != where:
            raise SettingError(f"{setting}: {where}: {unique} {row[unique]!r} is that of {first}")
        kept.append(row)
    if not kept:
        raise SettingError(f"{setting}: no {what}")
    return kept


def check_texts(setting: str, where: str, name: str, value: object) -> tuple[str, ...]:
    """Return a column's value if it is a list of strings with at least one; else raise a SettingError."""
    if not isinstance(value, list | tuple) or not value or not all(isinstance(text, str) for text in value):
        raise SettingError(f"{setting}: {where}: {name} is not a list of strings with at least one")
    return tuple(value)


def read_hub_rows(
    setting: str, dataset: str, revision: str, config: str | None, split: str
) -> Iterator[tuple[str, Row]]:
    """Yield (where, row) for a split of a data set on the hub at a revision; SettingError if it is out of reach."""

    def fetch() -> Any:
        from datasets import load_dataset

        with use_hub():
            return load_dataset(dataset, config, split=split, revision=revision)

    name = f"{dataset}{'/' + config if config else ''}"
    for index, row in enumerate(try_fetch(setting, name, fetch)):
        yield f"{name} row {index}", row


def fetch_hub_file(setting: str, dataset: str, revision: str, file: str) -> Path:
    """Download a file of a data set on the hub at a revision; SettingError if it is out of reach."""

    def fetch() -> Path:
        from huggingface_hub import hf_hub_download

        with use_hub():
            return Path(hf_hub_download(dataset, file, repo_type="dataset", revision=revision))

    return try_fetch(setting, f"{dataset}/{file}", fetch)


def try_fetch(setting: str, source: str, fetch: Callable[[], Any], instead: str = "give a path instead") -> Any:
    """Call `fetch`; any error becomes a SettingError.

    Args:
        setting: The setting whose value is ``hub``.
        source: What is fetched, for the message.
        fetch: Downloads it.
        instead: The way out that the message names.
    """
    try:
        return fetch()
    except Exception as error:  # whatever the network's libraries raise
        reason = type(error).__name__
        raise SettingError(f"{setting}=hub: {source} is out of reach ({reason}); {instead}") from error


def hash_rows(path: str, rows: Iterable[Row]) -> str:
    """Hash rows in their order, wherever they are stored.

    The miniature's rows have another hash than a copy of them, because settings that are null may mean something else
    there.
    """
    digest = hashlib.sha256(MINIATURE.encode() if path == MINIATURE else b"")
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, ensure_ascii=True, default=str).encode() + b"\n")
    return digest.hexdigest()[:16]


def _read_member(setting: str, path: Path, member: str) -> bytes:
    """Read a file of a .zip: `member`, or the only file of its name in any folder; KeyError if there is none."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if member not in names:
            same_named = [name for name in names if PurePosixPath(name).name == PurePosixPath(member).name]
            if len(same_named) > 1:
                raise SettingError(
                    f"{setting}: {path.name} has {same_named[0]} and {same_named[1]}, expected one or {member}"
                )
            member = same_named[0] if same_named else member
        return archive.read(member)


def _json(setting: str, name: str, suffix: str, text: str) -> Iterator[tuple[str, Row]]:
    if suffix == ".json":
        try:
            listed = json.loads(text)
        except ValueError as error:
            raise SettingError(f"{setting}: {name} is not JSON ({error})") from None
        if not isinstance(listed, list):
            raise SettingError(f"{setting}: {name} is not a list of rows")
        lines = [(f"{name} row {index}", row) for index, row in enumerate(listed)]
    elif suffix == ".jsonl":
        lines = []
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                try:
                    lines.append((f"{name} line {number}", json.loads(line)))
                except ValueError as error:
                    raise SettingError(f"{setting}: {name} line {number} is not JSON ({error})") from None
    else:
        raise SettingError(f"{setting}: {name}: a .jsonl, .json, .csv, .parquet or .zip file")
    halves = HALF.search(text) is not None
    for where, row in lines:
        if not isinstance(row, dict):
            raise SettingError(f"{setting}: {where} is not an object with columns")
        try:
            json.dumps(row, ensure_ascii=False).encode() if halves else None
        except UnicodeEncodeError:
            raise SettingError(f"{setting}: {where} has half of a surrogate pair, which no tokenizer reads") from None
        yield where, row


def _frame(name: str, form: str, path: Path) -> Iterator[tuple[str, Row]]:
    if form == "csv":
        import pandas

        frame = pandas.read_csv(path, dtype=str, keep_default_na=False)
        rows = [{str(column): value for column, value in row.items()} for row in frame.to_dict("records")]
    else:
        from pyarrow import parquet

        rows = parquet.read_table(path).to_pylist()  # plain Python values, also inside lists
    for index, row in enumerate(rows):
        yield f"{name} row {index}", row

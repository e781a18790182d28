"""Rows of a benchmark's data: from a file or folder in the official format, from the hub, or made in that format.

`path` is `miniature` (rows that kvbench makes, to try a task on; no benchmark's numbers), `hub` (the published data set
at a pinned revision) or a file or folder in the published format. Whatever is wrong with them is a SettingError that
names the file, the line and the column.
"""

import hashlib
import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.validation import SettingError, resolve_subtasks

MINIATURE, HUB = "miniature", "hub"
HALF = re.compile(r"\\u[dD][89a-fA-F]")  # of an escaped character beyond U+FFFF

Row = Mapping[str, Any]
Columns = Mapping[str, type | tuple[type, ...]]  # name -> what it holds; a list's items are checked by the task


def name_source(path: str) -> str:
    """What a record says about its data: miniature, hub or local."""
    return path if path in (MINIATURE, HUB) else "local"


def check_path(setting: str, path: object) -> None:
    """SettingError unless `path` is miniature, hub, or a file or folder that is there."""
    if not isinstance(path, str):
        raise SettingError(f"{setting}={path}: {MINIATURE}, {HUB}, or a file or folder in the official format")
    if path not in (MINIATURE, HUB) and not Path(path).expanduser().exists():
        raise SettingError(f"{setting}={path}: no such file or folder; or {MINIATURE}, or {HUB}")


def select_subtasks(given: object, path: str, names: Sequence[str]) -> list[str]:
    """What `task.subtasks` stands for; `all` with one file, of one subtask (not a .zip), is the subtask in its name."""
    file = Path(path).expanduser()
    if path in (MINIATURE, HUB) or not file.is_file() or file.suffix == ".zip":
        return resolve_subtasks("task.subtasks", given, names)
    found = [file.stem] if given == "all" and file.stem in names else resolve_subtasks("task.subtasks", given, names)
    if len(found) > 1:
        raise SettingError(f"task.path={path}: one file is one subtask's, named by task.subtasks or by the file")
    return found


def find_file(setting: str, path: Path, names: Sequence[str]) -> Path:
    """`path` itself if it is a file, else the first of `names` in the folder."""
    if path.is_file():
        return path
    for name in names:
        if (path / name).is_file():
            return path / name
    some = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
    raise SettingError(f"{setting}={path}: a file, or a folder with one of {some}")


def read_rows(setting: str, path: Path, member: str | None = None) -> Iterator[tuple[str, Row]]:
    """(where, row) of a .jsonl, .json (a list of rows), .csv or .parquet file, or of `member` of a .zip. `where` names
    file and line (or row) for messages.
    """
    name = f"{path.name}:{member}" if member else path.name
    suffix = Path(member or path.name).suffix
    try:
        if suffix == ".parquet":
            yield from _frame(name, "parquet", path)
        elif suffix == ".csv":
            yield from _frame(name, "csv", path)
        else:
            raw = zipfile.ZipFile(path).read(member) if member else path.read_bytes()
            yield from _json(setting, name, suffix, raw.decode("utf-8"))
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


def check_rows(
    setting: str, found: Iterable[tuple[str, Row]], columns: Columns, unique: str | None = None, what: str = "rows"
) -> list[Row]:
    """The rows, each with `columns` of the given types, and with different values of `unique`; at least one."""
    kept: list[Row] = []
    seen: dict[Any, str] = {}
    for where, row in found:
        for name, types in columns.items():
            if name not in row:
                raise SettingError(f"{setting}: {where} has no column {name}")
            expected = types if isinstance(types, tuple) else (types,)
            if not isinstance(row[name], expected) or isinstance(row[name], bool) and bool not in expected:
                names = " or ".join(own.__name__ for own in expected)
                raise SettingError(f"{setting}: {where}: {name} is {type(row[name]).__name__}, expected {names}")
        if unique is not None and (first := seen.setdefault(row[unique], where)) != where:
            raise SettingError(f"{setting}: {where}: {unique} {row[unique]!r} is that of {first}")
        kept.append(row)
    if not kept:
        raise SettingError(f"{setting}: no {what}")
    return kept


def check_texts(setting: str, where: str, name: str, value: object) -> tuple[str, ...]:
    """A list of strings that is not empty."""
    if not isinstance(value, list | tuple) or not value or not all(isinstance(text, str) for text in value):
        raise SettingError(f"{setting}: {where}: {name} is not a list of strings with at least one")
    return tuple(value)


def read_hub_rows(
    setting: str, dataset: str, revision: str, config: str | None, split: str
) -> Iterator[tuple[str, Row]]:
    """(where, row) of a split of a data set on the hub at a revision."""

    def fetch() -> Any:
        from datasets import load_dataset

        return load_dataset(dataset, config, split=split, revision=revision)

    name = f"{dataset}{'/' + config if config else ''}"
    for index, row in enumerate(try_fetch(setting, name, fetch)):
        yield f"{name} row {index}", row


def fetch_hub_file(setting: str, dataset: str, revision: str, file: str) -> Path:
    """A file of a data set on the hub at a revision."""

    def fetch() -> Path:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(dataset, file, repo_type="dataset", revision=revision))

    return try_fetch(setting, f"{dataset}/{file}", fetch)


def try_fetch(setting: str, source: str, fetch: Callable[[], Any], instead: str = "give a path instead") -> Any:
    """`fetch()`, or a SettingError that says what is out of reach."""
    try:
        return fetch()
    except Exception as error:  # whatever the network's libraries raise
        reason = type(error).__name__
        raise SettingError(f"{setting}=hub: {source} is out of reach ({reason}); {instead}") from error


def hash_rows(path: str, found: Iterable[Row]) -> str:
    """Hash of rows, in order, wherever they lie; but rows that kvbench made are others than a copy of them, since
    settings that are null may stand for something else there.
    """
    digest = hashlib.sha256(MINIATURE.encode() if path == MINIATURE else b"")
    for row in found:
        digest.update(json.dumps(row, sort_keys=True, ensure_ascii=True, default=str).encode() + b"\n")
    return digest.hexdigest()[:16]


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

        rows = pandas.read_csv(path, dtype=str, keep_default_na=False).to_dict("records")
    else:
        from pyarrow import parquet

        rows = parquet.read_table(path).to_pylist()  # plain Python values, those inside of lists too
    for index, row in enumerate(rows):
        yield f"{name} row {index}", row

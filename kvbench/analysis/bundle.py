"""Pack the runs behind a table into one file, with which a stranger can check every number of the table.

A bundle is a zip archive:

    manifest.json                        format, versions, when runs were finished, and every other file's SHA-256
    table.csv                            the matrix of scores (kvbench.analysis.score_matrix), six decimal places
    runs/<hash>/run.yaml, done           the settings of each run, and of the full cache's runs that it is compared with
    runs/<hash>/records.jsonl            its records: answers, scores, hashes, bytes, rows and times
    runs/<hash>/machine-*.json           machine, versions, revision of the code, and settings to execute samples again

Texts of the data set are left out unless they are asked for: targets, questions, and what tasks store of a sample in
`meta`. Their hashes stay, so the same samples can be recognised. So do the models' answers, which may repeat parts of a
prompt. Local paths in the settings are left out likewise: they become null.

The archive's comment is a checksum of all bytes before it, which finds accidental damage. `verify_bundle` checks all
checksums, computes the table again from the records, and compares. Whoever forges records, table and checksums together
passes; only the SHA-256 of the file, published beside the table, proves that it is the author's.
"""

import csv
import hashlib
import io
import json
import math
import os
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvbench.analysis.score_matrix import ScoreBlock, build_blocks
from kvbench.analysis.score_matrix_format import format_csv
from kvbench.atomic import replace_file
from kvbench.config.provenance import find_installed_version, find_version
from kvbench.store.runs import StoredRun, filter_runs, find_baseline, find_finished, flatten, load_runs, name_some
from kvbench.validation import SettingError, escape

FORMAT = 1
MANIFEST, TABLE = "manifest.json", "table.csv"
TEXTS = ("target", "asked")  # fields of a record that hold text of the data set
META = ("data", "haystack", "qa", "note")  # texts in `meta` that say what the data are, not what they contain
DIGITS = 64  # hexadecimal digits of a SHA-256
DECIMALS = 6  # of the table
NAMES = re.compile(rf"{TABLE}|runs/[0-9a-f]{{16}}/(run\.yaml|done|records\.jsonl|machine[\w.-]*\.json)")
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
LATEST = 253_402_300_800  # seconds until the year 10000, which dates cannot show
MOST = 2_000_000_000  # bytes that an archive may unpack to


@dataclass(frozen=True)
class VerifiedBundle:
    """A bundle whose table follows from its records.

    Attributes:
        digest: SHA-256 of the file.
        runs: Number of runs.
        records: Number of records.
        blocks: The table.
        about: Format, versions, average and times of finishing, from its manifest.
        files: The files of its runs, by name.
    """

    digest: str
    runs: int
    records: int
    blocks: list[ScoreBlock]
    about: Mapping[str, Any]
    files: Mapping[str, bytes]

    def unpack(self, folder: Path) -> None:
        """Write the runs into a folder of results. A run that is there already stays as it is."""
        there = {path.name for path in folder.glob("runs/*")}
        unpack_into(folder, {name: own for name, own in self.files.items() if Path(name).parts[1] not in there})
        for name, seconds in self.about["finished"].items():
            if name not in there:
                os.utime(folder / "runs" / name / "done", (seconds, seconds))

    def has_setting(self, name: str) -> bool:
        """Return whether the settings of some run have a setting of this name, such as "task.path"."""
        machines = (json.loads(own) for path, own in self.files.items() if Path(path).name.startswith("machine"))
        return any(name in flatten(own.get("settings") or {}) for own in machines)


def write_bundle(
    results: Path, filters: Mapping[str, str], out: Path, average: str | None = None, with_texts: bool = False
) -> str:
    """Write the bundle of the runs that pass the filters, and return its digest.

    Args:
        results: The folder of results.
        filters: As in `kvbench.store.runs.filter_runs`.
        out: The file.
        average: As in `kvbench.analysis.score_matrix.build_blocks`.
        with_texts: Keep the texts of the data set.

    Raises:
        SettingError: No run passes, or a run has no full cache to compare with.
    """
    stored = load_runs(results)
    finished = [run for run in stored if run.finished]
    chosen = [run for run in filter_runs(finished, filters) if not run.full]
    if not chosen:
        raise SettingError(f"results={results}: no finished run of a method to bundle")
    full = {own.hash: own for own in (find_baseline(run, finished) for run in chosen)}
    runs = [*full.values(), *chosen]
    blocks, refused = build_blocks(chosen, runs, average)
    if refused:
        raise SettingError(refused[0])
    files = {TABLE: format_csv(blocks, decimals=DECIMALS).encode()}
    for run in runs:
        files |= {f"runs/{run.hash}/{name}": content for name, content in pack_run(run, with_texts).items()}
    about = {"format": FORMAT, "kvbench": find_version(), "scipy": find_installed_version("scipy")}
    about |= {"average": average, "texts": with_texts}
    about |= {"finished": {run.hash: int((run.folder.path / "done").stat().st_mtime) for run in runs}}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())}
    manifest = json.dumps(about | {"files": hashes}, indent=1).encode()
    archive = pack({MANIFEST: manifest, **dict(sorted(files.items()))})
    with replace_file(out) as draft:
        draft.write_bytes(archive)
    return hashlib.sha256(archive).hexdigest()


def pack_run(run: StoredRun, with_texts: bool) -> dict[str, bytes]:
    """Return the files of a run by name."""
    folder = run.folder.path
    files = {name: (folder / name).read_bytes() for name in ("run.yaml", "done")}
    for path in sorted(folder.glob("machine*.json")):
        machine = json.loads(path.read_text())
        if not with_texts:
            machine = replace_local_paths(machine)
        files[path.name] = json.dumps(machine, indent=1).encode()
    records = [record if with_texts else drop_texts(record) for _, record in sorted(run.records.items())]
    return files | {"records.jsonl": "".join(f"{json.dumps(record)}\n" for record in records).encode()}


def replace_local_paths(settings: Any) -> Any:
    """Return settings, or machine.json, with null for each path of the machine, such as those of models and data sets.

    A name on the hub, such as Qwen/Qwen3-8B, stays.
    """

    def is_local(name: str, value: object) -> bool:
        if name not in ("path", "cache", "results") and not name.endswith("_path") or not isinstance(value, str):
            return False
        return HUB_NAME.fullmatch(value) is None or Path(value).exists()

    if isinstance(settings, Mapping):
        return {name: None if is_local(name, own) else replace_local_paths(own) for name, own in settings.items()}
    return [*map(replace_local_paths, settings)] if isinstance(settings, list) else settings


def drop_texts(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record without texts of the data set."""

    def is_text(value: object) -> bool:
        if isinstance(value, list | tuple):
            return any(map(is_text, value))
        return isinstance(value, str) or (isinstance(value, Mapping) and any(map(is_text, value.values())))

    meta = {name: value for name, value in record["meta"].items() if name in META or not is_text(value)}
    return {name: value for name, value in record.items() if name not in TEXTS} | {"meta": meta}


def pack(files: Mapping[str, bytes]) -> bytes:
    """Return a zip archive of the files, which ends with the digest of everything before it."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED, 9)
        archive.comment = b"0" * DIGITS
    body = stream.getvalue()[:-DIGITS]
    return body + hashlib.sha256(body).hexdigest().encode()


def verify_bundle(path: Path) -> VerifiedBundle:
    """Check a bundle, and compute its table again from its records.

    Raises:
        SettingError: It cannot be read, was changed, or its table does not follow from its records. The message says
            what is wrong.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SettingError(f"bundle={path}: cannot be read ({error.strerror})") from None
    manifest, files = unpack(path, content)
    try:
        with TemporaryDirectory() as folder:
            unpack_into(Path(folder), files)
            found = read_runs(path, Path(folder))
            chosen = [run for run in found if not run.full]
            blocks, refused = build_blocks(chosen, found, manifest["average"])
            if refused:
                raise SettingError(f"bundle={path}: {refused[0]}")
            compare_tables(path, files[TABLE].decode(), format_csv(blocks))
            records = sum(len(run.records) for run in found)
        for name in (own for own in files if Path(own).name.startswith("machine")):
            flatten(json.loads(files[name]).get("settings") or {})  # raises if it is damaged
    except Exception as error:  # damaged files make csv and json raise almost anything
        if isinstance(error, SettingError) and str(error).startswith(f"bundle={path}"):
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise SettingError(escape(f"bundle={path}: its runs cannot be used ({reason})")) from None
    about = {name: own for name, own in manifest.items() if name != "files"}
    runs = {name: own for name, own in files.items() if name != TABLE}
    return VerifiedBundle(hashlib.sha256(content).hexdigest(), len(found), records, blocks, about, runs)


def read_runs(path: Path, folder: Path) -> list[StoredRun]:
    """Return the runs of an unpacked bundle, all of which are whole.

    Raises:
        SettingError: One is damaged or not finished.
    """
    found = find_finished(folder)
    for name, reason in (found.damaged | found.passed_over).items():
        raise SettingError(escape(f"bundle={path}: run {name}: {reason}"))
    if found.unfinished:
        raise SettingError(f"bundle={path}: run {found.unfinished[0].hash}: is not finished")
    return found.runs


def unpack(path: Path, content: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the manifest of an archive and its other files, all of which fit the manifest."""
    body, digest = content[:-DIGITS], content[-DIGITS:]
    whole = hashlib.sha256(body).hexdigest().encode() == digest
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            names = archive.namelist()
            if sum(info.file_size for info in archive.infolist()) > MOST:
                raise SettingError(f"bundle={path}: unpacks to more than {MOST / 1e9:g} GB")
            manifest = json.loads(archive.read(MANIFEST))
            if manifest["format"] != FORMAT:
                line = f"bundle={path}: has format {manifest['format']}, and this kvbench reads {FORMAT}"
                raise SettingError(escape(f"{line}; use the kvbench that wrote it ({manifest['kvbench']})"))
            expected = manifest["files"]
            texts = isinstance(manifest["average"], str | None) and isinstance(manifest["kvbench"], str)
            if not texts or TABLE not in expected:
                raise SettingError(f"bundle={path}: {MANIFEST} names no table, or an average that is no name")
            if {f"runs/{own}/done" for own in map(str, manifest["finished"])} != {
                name for name in expected if name.endswith("/done")
            } or not all(type(own) is int and 0 <= own < LATEST for own in manifest["finished"].values()):
                raise SettingError(f"bundle={path}: {MANIFEST} does not say when each run was finished")
            if strange := [name for name in expected if NAMES.fullmatch(name) is None]:
                raise SettingError(escape(f"bundle={path}: {name_some(strange)}: no file of a bundle"))
            odd = sorted({*names} ^ {MANIFEST, *expected}) or [name for name in names if names.count(name) > 1]
            if odd:
                line = f"bundle={path}: {name_some(odd)}: not in both the archive and its manifest, once"
                raise SettingError(escape(line))
            files = {name: archive.read(name) for name in expected}
    except SettingError:
        raise
    except Exception as error:  # a damaged archive makes zipfile and zlib raise almost anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise SettingError(escape(f"bundle={path}: is no bundle, or damaged ({reason})")) from None
    wrong = [name for name, own in files.items() if hashlib.sha256(own).hexdigest() != expected[name]]
    if wrong:
        raise SettingError(f"bundle={path}: {name_some(wrong)}: was changed, the manifest has another checksum")
    if not whole:
        raise SettingError(f"bundle={path}: was changed, the archive has another checksum than its last {DIGITS} bytes")
    return manifest, files


def unpack_into(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files of runs into a folder of results.

    Raises:
        SettingError: A name leads out of the folder.
    """
    for name, content in files.items():
        target = (folder / name).resolve()
        if not target.is_relative_to(folder.resolve()):
            raise SettingError(f"bundle: {name}: leads out of the archive")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def compare_tables(path: Path, said: str, computed: str) -> None:
    """Compare a bundle's table with the one that its records give.

    Raises:
        SettingError: They differ. The message names the first run and column.
    """
    one, other = (list(csv.DictReader(io.StringIO(text))) for text in (said, computed))
    if len(one) != len(other):
        raise SettingError(f"bundle={path}: {TABLE} has {len(one)} rows, and the records give {len(other)}")
    for there, here in zip(one, other, strict=True):
        for name in here:
            if not is_same(there.get(name), here[name]):
                raise SettingError(
                    escape(
                        f"bundle={path}: {TABLE}: {name} of run {here['hash']} is {there.get(name)}, and its records "
                        f"give {here[name]}"
                    )
                )
    if said.splitlines()[:1] != computed.splitlines()[:1]:
        raise SettingError(f"bundle={path}: {TABLE} has other columns than the matrix")


def is_same(said: str | None, computed: str) -> bool:
    """Return whether a number of the table is the computed one, rounded. Texts must be equal."""
    if said is None or said == computed:
        return said == computed
    try:
        number, exact = float(said), float(computed)
    except ValueError:
        return False
    return math.isclose(number, exact, rel_tol=1e-12, abs_tol=0.501 * 10**-DECIMALS)

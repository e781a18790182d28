"""Pack the runs behind a table into one file, with which a stranger can check every number of the table.

A bundle is a zip archive:

    manifest.json                        format, version of kvbench, and the SHA-256 of every other file
    table.csv                            the matrix of scores (kvbench.analysis.score_matrix)
    runs/<hash>/run.yaml, done           the settings of each run, and of the full cache's runs that it is compared with
    runs/<hash>/records.jsonl            its records: answers, scores, hashes, bytes, rows and times
    runs/<hash>/machine-*.json           machine, versions and revision of the code

Texts of the data set (`target`, `asked`) are left out unless they are asked for. Their hashes stay, so the same samples
can be recognised. The comment of the archive is the SHA-256 of all bytes before it, so that no byte can change
unnoticed; `digest` is the text to publish beside a table.

`verify_bundle` checks the checksums, computes the table again from the records, and compares. A bundle whose author
forged records and table together passes, unless the digest was published.
"""

import csv
import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvbench.analysis.score_matrix import ScoreBlock, build_blocks
from kvbench.analysis.score_matrix_format import format_csv
from kvbench.atomic import replace_file
from kvbench.config.provenance import find_version
from kvbench.store.runs import StoredRun, filter_runs, find_baseline, find_finished, load_runs, name_some
from kvbench.validation import SettingError

FORMAT = 1
MANIFEST, TABLE = "manifest.json", "table.csv"
TEXTS = ("target", "asked")  # fields of a record that hold text of the data set
DIGITS = 64  # hexadecimal digits of the digest
MOST = 2_000_000_000  # bytes that an archive may unpack to


@dataclass(frozen=True)
class VerifiedBundle:
    """A bundle whose table follows from its records.

    Attributes:
        digest: SHA-256 of the archive.
        runs: Number of runs.
        records: Number of records.
        blocks: The table.
    """

    digest: str
    runs: int
    records: int
    blocks: list[ScoreBlock]


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
    files = {TABLE: format_csv(blocks).encode()}
    for run in runs:
        files |= {f"runs/{run.hash}/{name}": content for name, content in pack_run(run, with_texts).items()}
    about = {"format": FORMAT, "kvbench": find_version(), "average": average, "texts": with_texts}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())}
    manifest = json.dumps(about | {"files": hashes}, indent=1).encode()
    archive = pack({MANIFEST: manifest, **dict(sorted(files.items()))})
    with replace_file(out) as draft:
        draft.write_bytes(archive)
    return archive[-DIGITS:].decode()


def pack_run(run: StoredRun, with_texts: bool) -> dict[str, bytes]:
    """Return the files of a run by name."""
    folder = run.folder.path
    names = ["run.yaml", "done", *(path.name for path in sorted(folder.glob("machine*.json")))]
    files = {name: (folder / name).read_bytes() for name in names}
    dropped = () if with_texts else TEXTS
    lines = [
        json.dumps({name: value for name, value in record.items() if name not in dropped})
        for _, record in sorted(run.records.items())
    ]
    return files | {"records.jsonl": "".join(f"{line}\n" for line in lines).encode()}


def pack(files: Mapping[str, bytes]) -> bytes:
    """Return a zip archive of the files, which ends with the digest of everything before it."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
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
    with TemporaryDirectory() as folder:
        unpack_into(Path(folder), files)
        found = find_finished(Path(folder))
        for name, reason in (found.damaged | found.passed_over).items():
            raise SettingError(f"bundle={path}: run {name}: {reason}")
        if found.unfinished:
            raise SettingError(f"bundle={path}: run {found.unfinished[0].hash}: is not finished")
        chosen = [run for run in found.runs if not run.full]
        blocks, refused = build_blocks(chosen, found.runs, manifest["average"])
        if refused:
            raise SettingError(f"bundle={path}: {refused[0]}")
        compare_tables(path, files[TABLE].decode(), format_csv(blocks))
        records = sum(len(run.records) for run in found.runs)
    return VerifiedBundle(content[-DIGITS:].decode(), len(found.runs), records, blocks)


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
                raise SettingError(
                    f"bundle={path}: has format {manifest['format']}, and this kvbench reads {FORMAT}; use the kvbench "
                    f"that wrote it ({manifest['kvbench']})"
                )
            expected = manifest["files"]
            odd = sorted({*names} ^ {MANIFEST, *expected}) or [name for name in names if names.count(name) > 1]
            if odd:
                raise SettingError(f"bundle={path}: {name_some(odd)}: not in both the archive and its manifest, once")
            files = {name: archive.read(name) for name in expected}
    except SettingError:
        raise
    except (zipfile.BadZipFile, KeyError, TypeError, ValueError, NotImplementedError, RuntimeError, OSError) as error:
        raise SettingError(f"bundle={path}: is no bundle, or damaged ({' '.join(str(error).split())})") from None
    except Exception as error:  # zlib.error and what else a damaged archive makes zipfile raise
        raise SettingError(f"bundle={path}: is damaged ({type(error).__name__}: {error})") from None
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
    if said == computed:
        return
    one, other = (list(csv.DictReader(io.StringIO(text))) for text in (said, computed))
    if len(one) != len(other):
        raise SettingError(f"bundle={path}: {TABLE} has {len(one)} rows, and the records give {len(other)}")
    for there, here in zip(one, other, strict=True):
        differ = [name for name in here if there.get(name) != here[name]]
        if differ:
            name = differ[0]
            raise SettingError(
                f"bundle={path}: {TABLE}: {name} of run {here['hash']} is {there.get(name)}, and its records give "
                f"{here[name]}"
            )
    raise SettingError(f"bundle={path}: {TABLE} is not written as kvbench writes it")

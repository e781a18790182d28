"""Pack the runs behind a table into one file, with which a stranger can check every number of the table.

A bundle is a zip archive:

    manifest.json                        format, versions, when runs were finished, and every other file's SHA-256
    table.csv                            the matrix of scores (kvbench.analysis.score_matrix), six decimal places
    runs/<hash>/run.json, done           the settings of each run, and of the full cache's runs that it is compared with
    runs/<hash>/records.jsonl            its records: answers, scores, hashes, bytes, rows and times
    runs/<hash>/machine-*.json           machine, versions, revision of the code, and settings to execute samples again;
                                         one file of those that say the same

Texts of the data set are left out unless they are asked for: targets, questions, and what tasks store of a sample in
`meta`. Their hashes stay, so the same samples can be recognised. So do the models' answers, which may repeat parts of a
prompt. Local paths in the settings are left out likewise: they become null.

A bundle of format 3 holds drawn answers of runs (kvbench.analysis.drawn_answers). Its manifest also says how they were
drawn, `records.jsonl` and `done` have the drawn ones only, and `table.csv` lists them, because no score follows from a
part. Its machine.json lacks the hashes of the modules.

Bundles of format 1, which were written before, hold run.yaml in place of run.json and can be read.

Somebody else may have written a bundle, so limits hold while it is read, whatever sizes the archive states: on the
file, its entries, what they unpack to, and the values in them. Entries are stored or deflated, and kvbench.store.parse
reads all documents. Nothing in a bundle is executed, and no file is written outside of a temporary folder.

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
import stat
import struct
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from kvbench.analysis.drawn_answers import count_answers, draw_answers, format_answers
from kvbench.analysis.score_matrix import ScoreBlock, build_blocks
from kvbench.analysis.score_matrix_format import format_csv
from kvbench.atomic import replace_file
from kvbench.config.provenance import find_installed_version, find_version
from kvbench.store.parse import parse_json
from kvbench.store.run_folder import FORMAT as FOLDER_FORMAT
from kvbench.store.run_folder import format_line, make_seal
from kvbench.store.runs import StoredRun, filter_runs, find_baseline, find_finished, load_runs, name_some
from kvbench.validation import SettingError, escape, summarize

FORMAT = 2
DRAWN_FORMAT = 3  # of drawn answers
SETTINGS = {1: "run.yaml", 2: "run.json", 3: "run.json"}  # the file of a run's settings, by format
MANIFEST, TABLE = "manifest.json", "table.csv"
TEXTS = ("target", "asked")  # fields of a record that hold text of the data set
META = ("data", "haystack", "qa", "note")  # texts in `meta` that say what the data are, not what they contain
DRAWN = {"seed", "records", "runs"}  # what a manifest says of a draw: its seed, and what there was to draw from
SOURCES = ("sources",)  # the hashes of all modules, most of a small bundle; `code` names the commit that has them
DIGITS = 64  # hexadecimal digits of a SHA-256
DECIMALS = 6  # of the table
MARKS = ("alike", "best", "tied")  # columns of the table that follow from the rules of the version that wrote it
NAMES = re.compile(
    rf"{TABLE}|runs/[0-9a-f]{{16}}/(run\.yaml|run\.json|done|records\.jsonl|machine[a-zA-Z0-9._-]{{0,200}}\.json)"
)
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
LATEST = 253_402_300_800  # seconds until the year 10000, which dates cannot show
MOST_FILE = 250_000_000  # bytes of an archive
MOST_ENTRIES = 20_000  # of an archive, four for each run
MOST_UNPACKED = 1_000_000_000  # bytes that all entries unpack to
MOST_RATIO = 60  # ratio of unpacked to packed bytes, so that a small file cannot take much memory ...
ALWAYS = 8_000_000  # ... unpacked bytes that are allowed whatever the ratio; records compress to about a quarter
MOST_VALUES = 20_000_000  # in all documents, counted by commas and brackets; a value takes up to 64 bytes of memory
AGAIN = "; get the file again"  # the remedy for accidental damage
SHOWN = 400  # characters of a reason
PIECE = 1 << 18  # bytes that are unpacked at a time
END = struct.Struct("<4s4H2LH")  # of a zip archive: signature, disks, entries, bytes and place of their list, comment
ZIP64 = b"PK\x06\x07"  # signature of the locator of a second, larger end


@dataclass(frozen=True)
class VerifiedBundle:
    """A bundle whose table follows from its records.

    Attributes:
        digest: SHA-256 of the file.
        runs: Number of runs.
        records: Number of records.
        blocks: The table of scores; empty if the bundle holds drawn answers.
        about: Format, versions, average and times of finishing, from its manifest.
        values: The settings of each run.
        files: The files of its runs, by name.
    """

    digest: str
    runs: int
    records: int
    blocks: list[ScoreBlock]
    about: Mapping[str, Any]
    values: list[Mapping[str, Any]]
    files: Mapping[str, bytes]

    @property
    def drawn(self) -> Mapping[str, int] | None:
        """How the answers were drawn: the seed, and how many records and runs there were; None for whole runs."""
        drawn: Mapping[str, int] | None = self.about.get("drawn")
        return drawn

    def unpack(self, folder: Path) -> None:
        """Write the runs into a folder of results. A run that is there already stays as it is."""
        there = {path.name for path in folder.glob("runs/*")}
        unpack_into(folder, {name: content for name, content in self.files.items() if Path(name).parts[1] not in there})
        for name, seconds in self.about["finished"].items():
            if name not in there:
                os.utime(folder / "runs" / name / "done", (seconds, seconds))


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
        SettingError: No run passes, a run has no full cache to compare with, or the bundle exceeds a limit.
    """
    stored = load_runs(results)
    finished = [run for run in stored if run.finished]
    chosen = [run for run in filter_runs(finished, filters) if not run.full]
    if not chosen:
        raise SettingError(f"results={results}: no finished run of a method to bundle")
    full = {baseline.hash: baseline for baseline in (find_baseline(run, finished) for run in chosen)}
    runs = [*full.values(), *chosen]
    blocks, refused = build_blocks(chosen, runs, average)
    if refused:
        raise SettingError(refused[0])
    about = {"format": FORMAT, "average": average, "texts": with_texts}
    return write_runs(runs, format_csv(blocks, decimals=DECIMALS), about, out)


def write_drawn_bundle(
    results: Path, filters: Mapping[str, str], out: Path, count: int, seed: int, with_texts: bool = False
) -> str:
    """Write a bundle of answers drawn from the finished runs that pass the filters, and return its digest.

    Args:
        results: The folder of results.
        filters: As in `kvbench.store.runs.filter_runs`. Runs of the full cache are drawn from if they pass.
        out: The file.
        count: How many answers to draw.
        seed: Seed of the draw.
        with_texts: Keep the texts of the data set.

    Raises:
        SettingError: The runs have fewer answers, or the bundle exceeds a limit.
    """
    runs = [run for run in filter_runs(load_runs(results), filters) if run.finished]
    return write_drawn_runs(runs, out, count, seed, with_texts)


def write_drawn_runs(runs: Sequence[StoredRun], out: Path, count: int, seed: int = 0, with_texts: bool = False) -> str:
    """Write a bundle of answers drawn from finished runs, as `write_drawn_bundle`, and return its digest."""
    drawn = {"seed": seed, "records": count_answers(runs), "runs": len(runs)}
    part = draw_answers(runs, count, seed)
    about = {"format": DRAWN_FORMAT, "average": None, "texts": with_texts, "drawn": drawn}
    return write_runs(part, format_answers(part), about, out)


def write_runs(runs: Sequence[StoredRun], table: str, about: Mapping[str, Any], out: Path) -> str:
    """Write runs, their table and a manifest into a bundle, and return its digest.

    Args:
        runs: The runs, each with the records that the bundle is to hold.
        table: The table.
        about: What the manifest says besides versions, times and checksums.
        out: The file. If the bundle cannot be written, a file that is there stays as it is.

    Raises:
        SettingError: The bundle exceeds a limit.
    """
    files = {TABLE: table.encode()}
    for run in runs:
        packed = pack_run(run, about["texts"], SOURCES if about["format"] == DRAWN_FORMAT else ())
        files |= {f"runs/{run.hash}/{name}": content for name, content in packed.items()}
    finished = {run.hash: int((run.folder.path / "done").stat().st_mtime) for run in runs}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())}
    versions = {"kvbench": find_version(), "scipy": find_installed_version("scipy")}
    manifest = json.dumps({**about, **versions, "finished": finished, "files": hashes}, indent=1).encode()
    archive = pack({MANIFEST: manifest, **dict(sorted(files.items()))})
    unpack(out, archive)  # raises if it is too large to be read
    out.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(out) as draft:
        draft.write_bytes(archive)
    return hashlib.sha256(archive).hexdigest()


def pack_run(run: StoredRun, with_texts: bool, left_out: Sequence[str] = ()) -> dict[str, bytes]:
    """Return the files of a run by name, without the parts of machine.json that are `left_out`."""
    folder = run.folder.path
    value = {"format": FOLDER_FORMAT, "hash": run.hash, "value": run.value}
    files = {SETTINGS[FORMAT]: json.dumps(value, indent=1).encode()}
    files["done"] = json.dumps(make_seal(run.records)).encode() + b"\n"
    machines = {}
    for path in sorted(folder.glob("machine*.json")):  # machine.json is last, so it stands for its equals
        described = json.loads(path.read_text()).items()
        machine: object = {name: part for name, part in described if name not in left_out}
        if not with_texts:
            machine = replace_local_paths(machine)
        machines[json.dumps(machine, indent=1).encode()] = path.name
    files |= {name: content for content, name in machines.items()}
    records = [record if with_texts else drop_texts(record) for _, record in sorted(run.records.items())]
    return files | {"records.jsonl": b"".join(map(format_line, records))}


def replace_local_paths(settings: object) -> object:
    """Return settings, or machine.json, with null for each path of the machine, such as those of models and data sets.

    A name on the hub, such as Qwen/Qwen3-8B, stays.
    """

    def is_local(name: str, value: object) -> bool:
        if name not in ("path", "cache", "results") and not name.endswith("_path") or not isinstance(value, str):
            return False
        return HUB_NAME.fullmatch(value) is None or Path(value).exists()

    if isinstance(settings, Mapping):
        return {name: None if is_local(name, value) else replace_local_paths(value) for name, value in settings.items()}
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
        SettingError: It cannot be read, was changed, exceeds a limit, or its table does not follow from its records.
            The message says what is wrong.
    """
    content = read_archive(path)
    manifest, files = unpack(path, content)
    try:
        for name, data in files.items():
            if Path(name).name.startswith("machine") and not isinstance(parse_json(data), dict):
                refuse(path, f"{name}: is no description of a machine")
        with TemporaryDirectory() as folder:
            unpack_into(Path(folder), {name: data for name, data in files.items() if name != TABLE})
            runs = read_runs(path, Path(folder))
            blocks = [] if "drawn" in manifest else score_runs(path, runs, manifest["average"])
            computed = format_answers(runs) if "drawn" in manifest else format_csv(blocks)
            compare_tables(path, files.pop(TABLE).decode(), computed)
            records = sum(len(run.records) for run in runs)
    except Exception as error:  # damaged files make csv and the table raise almost anything
        if isinstance(error, SettingError) and str(error).startswith(escape(f"bundle={path}: ")):
            raise
        refuse(path, f"its runs cannot be used ({describe(error)})")
    about = {name: part for name, part in manifest.items() if name != "files"}
    values = [run.value for run in runs]
    return VerifiedBundle(hashlib.sha256(content).hexdigest(), len(runs), records, blocks, about, values, files)


def score_runs(path: Path, runs: Sequence[StoredRun], average: str | None) -> list[ScoreBlock]:
    """Return the table of scores that a bundle's runs give.

    Raises:
        SettingError: A run cannot be compared.
    """
    blocks, refused = build_blocks([run for run in runs if not run.full], runs, average)
    if refused:
        refuse(path, refused[0])
    return blocks


def refuse(path: Path, reason: str) -> NoReturn:
    """Raise a SettingError of one line about a bundle. Its length is limited, because its texts may be a stranger's."""
    shown = escape(reason[: SHOWN + 1])
    raise SettingError(f"{escape(f'bundle={path}')}: {shown if len(shown) <= SHOWN else f'{shown[:SHOWN]}…'}")


def describe(error: Exception) -> str:
    """Return the kind and the message of another library's error, as a part of a line."""
    return f"{type(error).__name__}: {summarize(error)}"


def read_archive(path: Path) -> bytes:
    """Return the bytes of a bundle.

    Raises:
        SettingError: It is no file, or too large.
    """
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):  # to open a pipe would wait for its writer
            refuse(path, "cannot be read (no file)")
        if about.st_size > MOST_FILE:
            refuse(path, f"has {about.st_size} bytes, more than {MOST_FILE}")
        return path.read_bytes()
    except OSError as error:
        raise SettingError(f"bundle={path}: cannot be read ({error.strerror})") from None


def read_runs(path: Path, folder: Path) -> list[StoredRun]:
    """Return the runs of an unpacked bundle, all of which are whole.

    Raises:
        SettingError: One is damaged or not finished.
    """
    store = find_finished(folder)
    for name, reason in (store.damaged | store.passed_over).items():
        refuse(path, f"run {name}: {reason}")
    if store.unfinished:
        refuse(path, f"run {store.unfinished[0].hash}: is not finished")
    return store.runs


def unpack(path: Path, content: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the manifest of an archive and its other files, all of which fit the manifest.

    Raises:
        SettingError: The archive is none of kvbench's, was changed, or exceeds a limit.
    """
    check_end(path, content)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
            if twice := [name for name, count in Counter(entry.filename for entry in entries).items() if count > 1]:
                refuse(path, f"{name_some(twice)}: not in both the archive and its manifest, once")
            reader = EntryReader(path, archive, min(MOST_UNPACKED, max(ALWAYS, MOST_RATIO * len(content))))
            manifest = parse_json(reader.read(MANIFEST))
            check_manifest(path, manifest, {entry.filename for entry in entries})
            files = {name: reader.read(name) for name in manifest["files"]}
    except SettingError:
        raise
    except Exception as error:  # a damaged archive makes zipfile and zlib raise almost anything
        refuse(path, f"is no bundle, or damaged ({describe(error)}){AGAIN}")
    wrong = [name for name, data in files.items() if hashlib.sha256(data).hexdigest() != manifest["files"][name]]
    if wrong:
        refuse(path, f"{name_some(wrong)}: was changed, the manifest has another checksum{AGAIN}")
    return manifest, files


def check_end(path: Path, content: bytes) -> None:
    """Check the end of an archive, before zipfile reads the list of entries that it points to.

    Raises:
        SettingError: It has no such end, too many entries, or another checksum.
    """
    start = len(content) - DIGITS - END.size
    end = END.unpack_from(content, start) if start >= 0 else None
    if end is None or end[0] != b"PK\x05\x06" or end[-1] != DIGITS or content[max(start - 20, 0) :].startswith(ZIP64):
        refuse(path, f"is no bundle, or damaged (its end is not that of a zip archive with a checksum){AGAIN}")
    if hashlib.sha256(content[:-DIGITS]).hexdigest().encode() != content[-DIGITS:]:
        refuse(path, f"was changed, the archive has another checksum than its last {DIGITS} bytes{AGAIN}")
    if end[4] > MOST_ENTRIES or end[5] > 400 * MOST_ENTRIES:
        refuse(path, f"has more than {MOST_ENTRIES} entries")


class EntryReader:
    """Read the entries of an archive until all together exceed a number of bytes or of values."""

    def __init__(self, path: Path, archive: zipfile.ZipFile, most: int) -> None:
        self.path, self.archive, self.most = path, archive, most
        self.left, self.values = most, MOST_VALUES

    def read(self, name: str) -> bytes:
        """Return the content of an entry.

        Raises:
            SettingError: It is packed in another way than bundles are, or a limit is exceeded.
            KeyError, zipfile.BadZipFile, zlib.error: There is no such entry, or it is damaged.
        """
        entry = self.archive.getinfo(name)
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or entry.flag_bits & 1:
            refuse(self.path, f"{name}: is neither stored nor deflated, or is encrypted")
        if stat.S_ISLNK(entry.external_attr >> 16):
            refuse(self.path, f"{name}: is a link")
        pieces = []
        with self.archive.open(entry) as stream:
            while piece := stream.read(PIECE):
                self.left -= len(piece)
                self.values -= sum(map(piece.count, (b",", b"[", b"{")))
                if self.left < 0:
                    refuse(self.path, f"unpacks to more than {self.most} bytes")
                if self.values < 0:
                    refuse(self.path, f"has more than {MOST_VALUES} values")
                pieces.append(piece)
        return b"".join(pieces)


def check_manifest(path: Path, manifest: object, names: set[str]) -> None:
    """Check that a manifest has the parts of its format, and names the entries of the archive.

    Args:
        path: The bundle.
        manifest: The manifest.
        names: Names of the entries.

    Raises:
        SettingError: A part is missing or of another type, or the names differ.
    """
    if not isinstance(manifest, dict) or type(version := manifest.get("format")) is not int:
        refuse(path, f"{MANIFEST} names no format")
    if version not in SETTINGS:
        known = f"{min(SETTINGS)} to {max(SETTINGS)}"
        line = f"has format {version}, and this kvbench reads {known}"
        refuse(path, f"{line}; use the kvbench that wrote it ({str(manifest.get('kvbench'))[:20]})")
    expected, finished = manifest.get("files"), manifest.get("finished")
    texts = isinstance(manifest.get("average"), str | None) and isinstance(manifest.get("kvbench"), str)
    if not texts or not isinstance(expected, dict) or TABLE not in expected:
        refuse(path, f"{MANIFEST} names no table, or an average that is no name")
    check_drawn(path, manifest)
    if strange := [name for name in expected if NAMES.fullmatch(name) is None]:
        refuse(path, f"{name_some(strange)}: no file of a bundle")
    if odd := sorted(names ^ {MANIFEST, *expected}):
        refuse(path, f"{name_some(odd)}: not in both the archive and its manifest, once{AGAIN}")
    if not isinstance(finished, dict) or not all(
        type(seconds) is int and 0 <= seconds < LATEST for seconds in finished.values()
    ):
        refuse(path, f"{MANIFEST} does not say when each run was finished")
    runs = {name.split("/")[1] for name in expected if name != TABLE}
    whole = {f"runs/{run}/{name}" for run in runs for name in (SETTINGS[version], "done", "records.jsonl")}
    others = {name for name in expected if name != TABLE and not Path(name).name.startswith("machine")}
    if runs != finished.keys():
        refuse(path, f"{MANIFEST} does not say when each run was finished")
    if odd := sorted(whole ^ others):
        refuse(path, f"{name_some(odd)}: a run has {SETTINGS[version]}, done and records.jsonl")


def check_drawn(path: Path, manifest: Mapping[str, Any]) -> None:
    """Check that a manifest says how answers were drawn if its format is that of drawn answers, and only then.

    Raises:
        SettingError: It does not.
    """
    drawn = manifest.get("drawn")
    if manifest["format"] != DRAWN_FORMAT and "drawn" not in manifest:
        return
    counts = (
        isinstance(drawn, dict)
        and drawn.keys() == DRAWN
        and all(type(number) is int and 0 <= number < 1 << 63 for number in drawn.values())
    )
    if manifest["format"] != DRAWN_FORMAT or not counts:
        refuse(path, f"{MANIFEST} does not say how answers were drawn, or its format has none")


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
    """Compare a bundle's table with the one that its records give, except its marks, which nothing reads.

    Raises:
        SettingError: They differ. The message names the first run and column.
    """
    columns, *theirs = csv.reader(io.StringIO(said))
    our_columns, *ours = csv.reader(io.StringIO(computed))
    compared = [name for name in our_columns if name not in MARKS]
    if [name for name in columns if name not in MARKS] != compared:
        refuse(path, f"{TABLE} has other columns than the matrix")
    if len(theirs) != len(ours):
        refuse(path, f"{TABLE} has {len(theirs)} rows, and the records give {len(ours)}")
    for there, row in zip(theirs, ours, strict=True):
        here = dict(zip(our_columns, row, strict=True))
        if len(there) != len(columns):
            refuse(path, f"{TABLE}: run {here['hash']} has {len(there)} columns of {len(columns)}")
        said_here = dict(zip(columns, there, strict=True))
        for name in compared:
            if not is_same(said_here[name], here[name]):
                refuse(
                    path,
                    f"{TABLE}: {name} of run {here['hash']} is {said_here[name]}, and its records give {here[name]}",
                )


def is_same(said: str, computed: str) -> bool:
    """Return whether a number of the table is the computed one, rounded. Texts must be equal."""
    if said == computed:
        return True
    try:
        number, exact = float(said), float(computed)
    except ValueError:
        return False
    return math.isclose(number, exact, rel_tol=1e-12, abs_tol=0.501 * 10**-DECIMALS)

"""Read and write the folder of one run: its settings, its machines, and one line for each finished sample.

    results/runs/<hash>/run.yaml                 the settings that the hash identifies, and the number of the format
                        machine.json             the machine of the first process that wrote
                        machine-<writer>.json    the machine of a later process, if it differs
                        records-<writer>.jsonl   one line per sample, one file per process, because appends by several
                                                 processes to one file are not atomic on shared file systems
                        untrusted-<writer>.jsonl records that were set aside, because they may be wrong
                        samples                  the number of samples that the run will have
                        claims.lock              byte-range locks: byte 0 while a process sets up or closes the folder,
                                                 one byte for each sample in progress, and a last byte that all
                                                 processes share that have the run open
                        done                     written last: the number of records, a hash of their uids, and the
                                                 SHA-256 of every other file but claims.lock

Three properties of POSIX make this safe:

* A line counts once its newline is on disk. A killed writer leaves at most one torn line at the end of its file, and a
  crash of the machine may leave zeros there. Readers skip it, and the next writer removes it.
* A lock ends with its process. The sample of a killed worker is free at once.
* A renamed file is either complete or absent.

Every line ends with a checksum (`format_line`), and `done` seals the files, so that a change of a single bit is found.
A run in which one does not fit is damaged: `DamagedRun`. Nobody writes into its folder again. Files that come later,
such as those of another grader, are not sealed and do no harm.

Stores of kvbench 0.1 and 0.2 have neither. Their lines count if they are JSON, and their `done` counts records.

Locks belong to the process, not to the object. Open a run only once per process, and claim samples after a fork, not
before it.
"""

import fcntl
import hashlib
import json
import os
import re
import secrets
import socket
import struct
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import yaml

from kvbench.atomic import append_whole, force_to_disk, replace_file
from kvbench.stops import check_stop
from kvbench.store.parse import parse_json, parse_yaml, refuse_constant
from kvbench.store.record import read_version
from kvbench.validation import ContractError, SettingError, name_file_in_errors

FORMAT = 1  # of the folder and its records; a folder of another format is rejected, so that formats never mix
LOCK = {"type": "h", "whence": "h", "start": "q", "length": "q", "process": "i"}  # C's struct flock, in Linux's order
if sys.platform == "darwin":
    LOCK = {name: LOCK[name] for name in ("start", "length", "process", "type", "whence")}
CHECKED = 4  # the first version of a record whose line has a checksum
CHECK, CHECK_DIGITS = b', "check": "', 16  # the text before the checksum of a line, and the number of its digits
SEAL = {"format": int, "records": int, "uids": str}  # keys of `done`; "files" is the other one
DECODER = json.JSONDecoder(parse_constant=refuse_constant)
SEALED_NAME = re.compile(r"run\.(yaml|json)|samples|(machine|records)[^/\0]*\.jsonl?")
CHANGED = "has another checksum than done says"
OPEN_BYTE = 1 << 57  # byte of claims.lock that is locked while a process has the run open, also between two samples


def to_plain(value: object) -> Any:
    """Convert a value to dicts, lists, str, int, float, bool and None.

    Args:
        value: Such a value, or an OmegaConf container of such values.

    Returns:
        The converted copy. -0.0 becomes 0.0.

    Raises:
        TypeError: `value` contains something else, such as a Path or a tensor. The caller must convert it first,
            because only the caller knows what it means.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) + 0.0  # turns -0.0 into 0.0
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"the key {wrong[0]!r} is not a str")
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [to_plain(item) for item in value]
    raise TypeError(f"{value!r} is a {type(value).__name__}, not a number, text, list or mapping")


def to_json_value(value: object) -> Any:
    """Convert a value like `to_plain`, and NaN and the infinities to None, because JSON cannot express them."""
    return json.loads(json.dumps(to_plain(value)), parse_constant=lambda name: None)


def describe_old_format(stored_format: object) -> str:
    """Return the end of a message about a run of another format: both numbers, and what the user can do."""
    return (
        f"format {stored_format}, and this kvbench reads {FORMAT}: read it with the kvbench that wrote it, or move the "
        "folder away and run it again"
    )


def run_hash(value: Mapping[str, Any]) -> str:
    """Return the hash that identifies a run.

    The hash does not depend on the order of keys or the spelling of a number (0.05, 5e-2), because keys are sorted and
    floats have their shortest exact form. 1 and 1.0 are different settings.

    Args:
        value: The resolved settings of the run.

    Returns:
        The first 16 hexadecimal digits of the SHA-256 of `value` as canonical JSON.

    Raises:
        ValueError: `value` contains NaN or an infinity.
        TypeError: `value` contains something that `to_plain` cannot convert.
    """
    text = json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class DamagedRun(ContractError):
    """A run in the store was changed by something else than kvbench. The message is one line: the folder and why."""


class RunFolder:
    """The folder of the run with these settings. Nothing is written before `open`.

    Args:
        root: Folder that holds the folders of all runs.
        value: The resolved settings of the run.

    Attributes:
        hash: The run's hash, which is also the folder's name.
        path: The folder.
    """

    def __init__(self, root: Path, value: Mapping[str, Any]) -> None:
        self.value = to_plain(value)
        self.hash = run_hash(value)
        self.path = Path(root) / self.hash
        host = re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())
        self._writer = f"{host}-{os.getpid()}-{secrets.token_hex(4)}"
        self._locks: int | None = None  # descriptor of claims.lock, opened once
        self._own: int | None = None  # descriptor of this process's records
        self._claimed: set[str] = set()
        self._trusted = 0  # bytes of this process's records that `set_records_aside` leaves
        self._read: dict[str, int] = {}  # file name -> bytes read, always up to the end of a line
        self._lines: dict[str, dict[str, dict[str, Any]]] = {}  # file name -> uid -> record
        self._numbers: dict[str, int] = {}  # file name -> lines read
        self._hashes: dict[str, Any] = {}  # file name -> SHA-256 of the bytes read
        self._sealed: Mapping[str, str] = {}  # file name -> SHA-256 from `done`

    @contextmanager
    def open(self, machine: Mapping[str, Any], samples: int | None = None) -> Iterator["RunFolder"]:
        """Prepare the folder for writing by this process. Locks and claims are released at the end.

        A finished run stays as it is.

        Args:
            machine: Description of this process's machine.
            samples: Number of samples that the run will have. Progress displays read it.

        Yields:
            This object.

        Raises:
            RuntimeError: This object is open already.
            SettingError: The folder has another format.
            DamagedRun: Something in the folder was changed.
        """
        if self._locks is not None:
            raise RuntimeError(f"{self.path} is already open in this process")
        plain = to_json_value(machine)
        self.path.mkdir(parents=True, exist_ok=True)
        self._locks = os.open(self.path / "claims.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            with self._alone():
                if not self.check():
                    self._set_up(plain)
                    if samples is not None:
                        self._put("samples", f"{samples}\n")
                    self._cut_torn_tails()
            self._lock(fcntl.LOCK_SH, OPEN_BYTE)
            yield self
        finally:
            for descriptor in (self._own, self._locks):
                if descriptor is not None:
                    os.close(descriptor)
            self._own = self._locks = None
            self._claimed.clear()

    def records(self) -> dict[str, dict[str, Any]]:
        """Return uid -> record of every complete line that any process has written so far.

        If two files hold the same uid, because somebody merged folders by hand, one that `done` seals wins, then the
        first by name.

        Raises:
            DamagedRun: A line cannot be read.
        """
        self.refresh()
        merged: dict[str, dict[str, Any]] = {}
        for name in sort_sealed(self._lines, self._sealed):
            for uid, record in self._lines[name].items():
                merged.setdefault(uid, record)
        return merged

    def machine(self, uid: str) -> dict[str, Any]:
        """Return the description of the machine that wrote a sample's record, {} if it cannot be read."""
        self.refresh()
        name = next((file for file in sort_sealed(self._lines, self._sealed) if uid in self._lines[file]), "")
        path = self.path / name.replace("records-", "machine-").replace(".jsonl", ".json")
        try:
            description = json.loads((path if path.is_file() else self.path / "machine.json").read_text())
        except (OSError, ValueError):
            return {}
        return description if isinstance(description, dict) else {}

    def refresh(self) -> None:
        """Read the complete lines that other processes have written since the last call.

        Raises:
            DamagedRun: A line cannot be read, or a name of a file of records is that of something else.
        """
        for path in self._list_record_files():
            if self._own is not None and path == self._own_path:
                continue  # its records are known, and over NFS closing a second descriptor would drop the first's lock
            with open(path, "rb") as file:
                file.seek(self._read.get(path.name, 0))
                content = file.read()
            self._take(path.name, content[: find_end(content)])

    def _list_record_files(self) -> list[Path]:
        """Return the files of records; DamagedRun if one of them is a folder, a pipe or a link that leads nowhere."""
        try:
            return list_record_files(self.path)
        except ValueError as error:
            raise self._damaged(str(error)) from None

    def _take(self, name: str, content: bytes) -> None:
        """Take the records from whole lines that follow those that were read from a file."""
        lines = self._lines.setdefault(name, {})
        for line in BytesIO(content):
            self._numbers[name] = number = self._numbers.get(name, 0) + 1
            if not line.strip():
                continue
            try:
                record = parse_line(line)
            except ValueError as error:
                raise self._damaged(f"{name}: line {number} {error}") from None
            lines.setdefault(record["uid"], record)
        self._read[name] = self._read.get(name, 0) + len(content)
        self._hashes.setdefault(name, hashlib.sha256()).update(content)

    def _damaged(self, why: str) -> DamagedRun:
        return DamagedRun(f"{self.path} is damaged: {why}; move the folder away to run it again")

    def record(self, uid: str) -> dict[str, Any] | None:
        """Return the record of a sample, even if another process wrote it; None if there is none yet."""
        if not self.is_recorded(uid):
            self.refresh()
        names = sort_sealed(self._lines, self._sealed)
        return next((self._lines[name][uid] for name in names if uid in self._lines[name]), None)

    def is_recorded(self, uid: str) -> bool:
        """Return whether the sample had a record when the files were last read (`refresh`)."""
        return any(uid in lines for lines in self._lines.values())

    def claim(self, uid: str) -> bool:
        """Claim a sample for this process.

        Returns:
            Whether the claim succeeded: the sample has no record, and no other process has claimed it.

        Raises:
            RuntimeError: The run is not open.
        """
        if uid in self._claimed or self.is_recorded(uid):
            return False
        try:
            self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB, _lock_byte(uid))
        except (BlockingIOError, PermissionError):  # POSIX allows EAGAIN and EACCES for a lock that is taken
            return False
        self._claimed.add(uid)
        self.refresh()
        if self.is_recorded(uid):  # finished by another process between the first look and the lock
            self.release(uid)
            return False
        return True

    def is_free(self, uid: str) -> bool:
        """Return whether the sample had no record when the files were last read, and no process has claimed it."""
        unclaimed = uid not in self._claimed and not self.is_recorded(uid)
        with name_file_in_errors(self.path / "claims.lock"):
            return unclaimed and not _is_locked(self._open_locks, _lock_byte(uid))

    def release(self, uid: str) -> None:
        """Release the claim of a sample. Without a claim nothing happens."""
        if uid in self._claimed:
            self._claimed.remove(uid)
            self._lock(fcntl.LOCK_UN, _lock_byte(uid))

    def append(self, record: Mapping[str, Any]) -> None:
        """Write the record of a claimed sample as one line, wait until it is on disk, and release the claim.

        Raises:
            RuntimeError: This process has not claimed the sample.
            OSError: The line could not be written completely, for example because the disk is full. The file is left
                as it was.
        """
        line, uid = format_line(record), record["uid"]
        if uid not in self._claimed:
            raise RuntimeError(f"{uid}: not claimed by this process")
        if self._own is None:
            self._own = os.open(self._own_path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            with name_file_in_errors(self._own_path):  # held until the process ends: other writers leave this tail
                fcntl.flock(self._own, fcntl.LOCK_EX)
            force_to_disk(self.path)  # the name of the file
        start = self._read.get(self._own_path.name, 0)
        with name_file_in_errors(self._own_path):
            append_whole(self._own, line, start)
        self._take(self._own_path.name, line)
        self.release(uid)

    @property
    def untrusted(self) -> bool:
        """Whether this process has written records since `trust_records`."""
        return self._read.get(self._own_path.name, 0) > self._trusted

    def trust_records(self) -> None:
        """Vouch for the records that this process has written so far."""
        self._trusted = self._read.get(self._own_path.name, 0)

    def set_records_aside(self, everything: bool = False) -> int:
        """Move the records that this process has written since `trust_records` to untrusted-<writer>.jsonl.

        They may be wrong, so they must be made again. Nothing may be appended to this object afterwards.

        Args:
            everything: Move all records that this process has written.

        Returns:
            The number of records that were moved.
        """
        path, start = self._own_path, 0 if everything else self._trusted
        if self._read.get(path.name, 0) <= start:
            return 0
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC) if self._own is None else self._own
        try:
            kept = os.pread(descriptor, start, 0)
            moving = os.pread(descriptor, os.fstat(descriptor).st_size - start, start)
            with replace_file(path.with_name(path.name.replace("records", "untrusted", 1))) as draft:
                draft.write_bytes(moving)
            os.ftruncate(descriptor, start)
            os.fsync(descriptor)
        finally:
            if self._own is None:
                os.close(descriptor)
        (self.path / "done").unlink(missing_ok=True)  # another process may have counted them
        moved = self._lines[path.name]
        for known in (self._read, self._lines, self._numbers, self._hashes):
            known.pop(path.name)
        self._take(path.name, kept)
        return len(moved) - len(self._lines[path.name])

    def finish(self, expected_uids: Iterable[str]) -> bool:
        """Write `done` if every expected sample has a record, and return whether that is the case.

        All files that it seals are on the disk before it is written. It has the hashes of what this object read or
        wrote, so a later change on the disk does not fit them.

        Raises:
            DamagedRun: Something in the folder was changed.
        """
        have = self.records()
        if any(uid not in have for uid in expected_uids):
            return False
        with self._alone():
            if not self.check():
                self._cut_torn_tails()
                names = [name for name in ("run.yaml", "samples") if (self.path / name).exists()]
                small = [*names, *(path.name for path in self.path.glob("machine*.json"))]
                for name in {*small, *self._hashes} - {self._own_path.name}:
                    force_to_disk(self.path / name)
                hashes = {name: digest.hexdigest() for name, digest in self._hashes.items()}
                hashes |= {name: hash_file(self.path / name) for name in small}
                self._put("done", json.dumps(make_seal(self.records(), hashes)) + "\n")
        return True

    def check(self) -> bool:
        """Return whether the run is finished: `done` exists and fits the folder.

        Raises:
            SettingError: The folder has another format.
            DamagedRun: `done` does not fit, or a file cannot be read.
        """
        try:
            seal = read_seal(self.path)  # before the records: once `done` exists, every record is on disk
            sealed = self._sealed = {} if seal is None else seal.get("files", {})
            settings = find_settings(self.path)
            if settings is not None and settings.name not in sealed:
                read_run_value(self.path)
        except SettingError as error:
            raise SettingError(f"results: {self.path} has {error}") from None
        except ValueError as error:
            raise self._damaged(str(error)) from None
        problems = find_changed_files(self.path, sealed)
        records = self.records()
        for name, digest in self._hashes.items():
            if name in sealed and not problems:
                whole = (self.path / name).stat().st_size == self._read[name]
                problems += [] if whole and digest.hexdigest() == sealed[name] else [f"{name} {CHANGED}"]
        if seal is not None and not problems and not fits_records(seal, records):
            problems.append(f"done does not fit the {len(records)} records in the folder")
        if problems:
            raise self._damaged("; ".join(problems))
        return seal is not None

    @property
    def finished(self) -> bool:
        """Whether `done` exists and fits the folder. A damaged run is not finished (`check` says why)."""
        try:
            return self.check()
        except (DamagedRun, SettingError):
            return False

    @property
    def is_damaged(self) -> bool:
        """Whether `open` would raise DamagedRun."""
        try:
            self.check()
        except DamagedRun:
            return True
        return False

    @property
    def _open_locks(self) -> int:
        """Descriptor of claims.lock; RuntimeError unless the run is open."""
        if self._locks is None:
            raise RuntimeError(f"{self.path}: open the run before claiming its samples or finishing it")
        return self._locks

    @property
    def _own_path(self) -> Path:
        return self.path / f"records-{self._writer}.jsonl"

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold byte 0 of the locks, so that only one process at a time sets up or closes the folder."""
        self._lock(fcntl.LOCK_EX, 0)
        try:
            yield
        finally:
            self._lock(fcntl.LOCK_UN, 0)

    def _lock(self, how: int, byte: int) -> None:
        """Lock or unlock a byte of claims.lock."""
        descriptor = self._open_locks
        with name_file_in_errors(self.path / "claims.lock"):
            fcntl.lockf(descriptor, how, 1, byte)

    def _put(self, name: str, text: str) -> None:
        """Write a small file. The caller holds `_alone`, so any other draft of it belongs to a killed writer."""
        for left in self.path.glob(f"{name}.draft*"):
            left.unlink()
        with replace_file(self.path / name) as draft:
            draft.write_text(text, encoding="ascii")

    def _set_up(self, machine: Mapping[str, Any]) -> None:
        """Write run.yaml and the machine's file, if they are missing."""
        if find_settings(self.path) is None:
            self._put("run.yaml", yaml.safe_dump({"format": FORMAT, "hash": self.hash, "value": self.value}))
        text = json.dumps(machine, indent=1, sort_keys=True) + "\n"
        first = self.path / "machine.json"
        if not first.exists():
            self._put("machine.json", text)
        elif first.read_text() != text:
            self._put(f"machine-{self._writer}.json", text)

    def _cut_torn_tails(self) -> None:
        """Cut the files of ended writers back to their last complete line. Nobody holds the lock of such a file."""
        for path in self._list_record_files():
            if self._own is not None and path == self._own_path:
                continue
            with open(path, "r+b") as file:
                try:
                    with name_file_in_errors(path):
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except (BlockingIOError, PermissionError):
                    continue
                content = file.read()
                if (end := find_end(content)) < len(content):
                    file.truncate(end)


def claim_samples(
    folders: Collection[RunFolder], uids: Iterable[str], pause: float = 0.2
) -> Iterator[tuple[str, list[RunFolder]]]:
    """Claim one sample after another until every run has a record of every sample.

    A process that claims a sample in the first run that lacks it also claims it in every other run where it is free.
    Other processes may work on the same runs: this one waits for their samples, and takes a sample over if its process
    ends without a record.

    Args:
        folders: Open runs. The caller may remove a run meanwhile; it is then no longer waited for.
        uids: Names of the samples.
        pause: Seconds between two checks for samples that other processes work on.

    Yields:
        A sample's name and the runs in which this process has claimed it. The caller appends a record to each of these
        runs before it asks for the next sample; claims without a record are released.
    """
    waiting = list(uids)
    while waiting:
        worked = False
        for uid in waiting:
            check_stop()
            lacking = [folder for folder in folders if not folder.is_recorded(uid)]
            if not lacking or not lacking[0].claim(uid):
                continue
            worked, claimed = True, [lacking[0], *(folder for folder in lacking[1:] if folder.claim(uid))]
            try:
                yield uid, claimed
            finally:
                for folder in claimed:
                    folder.release(uid)
        for folder in folders:
            folder.refresh()
        waiting = [uid for uid in waiting if not all(folder.is_recorded(uid) for folder in folders)]
        if waiting and not worked:
            check_stop()
            time.sleep(pause)


def claim_all(folders: Collection[RunFolder], uid: str) -> bool:
    """Claim a sample in all of these runs or in none, and return whether it was claimed."""
    claimed = [folder for folder in folders if folder.claim(uid)]
    if len(claimed) < len(folders):
        for folder in claimed:
            folder.release(uid)
    return len(claimed) == len(folders)


def find_settings(path: Path) -> Path | None:
    """Return the file with the settings of a stored run: run.yaml, or the run.json of a bundle. None without one.

    Raises:
        ValueError: Both are there.
    """
    files = [path / name for name in ("run.yaml", "run.json") if os.path.lexists(path / name)]
    if len(files) == 2:
        raise ValueError("there are both run.yaml and run.json")
    return files[0] if files else None


def read_run_value(path: Path) -> dict[str, Any]:
    """Return the settings of a stored run.

    Args:
        path: Folder of the run.

    Raises:
        SettingError: run.yaml has another format.
        ValueError: run.yaml cannot be read, is incomplete, or does not fit the folder's name.
    """
    file = find_settings(path) or path / "run.yaml"
    content = read_file(file)
    try:
        stored = parse_json(content) if file.suffix == ".json" else parse_yaml(content)
    except ValueError as error:
        raise ValueError(f"{file.name} cannot be read ({error})") from None
    if not isinstance(stored, dict) or "format" not in stored:
        raise ValueError(f"{file.name} is incomplete")
    if type(stored["format"]) is not int or stored["format"] != FORMAT:
        raise SettingError(describe_old_format(stored["format"]))
    if not stored.keys() == {"format", "hash", "value"} or not isinstance(stored["value"], dict):
        raise ValueError(f"{file.name} is incomplete")
    try:
        hashed = run_hash(stored["value"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file.name} holds a setting that no run has ({error})") from None
    if not path.name == stored["hash"] == hashed:
        raise ValueError(f"{file.name} does not fit the folder's name, which is the hash of its settings")
    value: dict[str, Any] = stored["value"]
    return value


def read_total(path: Path) -> int | None:
    """Return the number of samples that a run has when it is finished, which its first writer stored, or None."""
    try:
        return int(read_file(path / "samples"))
    except ValueError:
        return None


def read_file(path: Path) -> bytes:
    """Return the content of a regular file; one that could block its reader is not opened.

    Raises:
        ValueError: It cannot be read. The message is "<name> cannot be read (<reason>)".
    """
    try:
        if os.path.lexists(path) and not path.is_file():
            raise ValueError(f"{path.name} is no regular file")
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read ({type(error).__name__})") from None


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_record_files(path: Path) -> list[Path]:
    """Return the files of records of a run, sorted by name.

    Raises:
        ValueError: A name is that of a folder, a pipe, or a link that leads nowhere.
    """
    files = sorted(path.glob("records*.jsonl"))
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file.name} is no regular file")
    return files


def find_end(content: bytes) -> int:
    """Return where the last line ends that was written whole.

    A kill leaves a line without its end, and a crash of the machine one with zeros.
    """
    end = content.rfind(b"\n") + 1
    last = content.rfind(b"\n", 0, max(0, end - 1)) + 1
    return last if b"\0" in content[last:end] else end


def format_line(record: Mapping[str, Any]) -> bytes:
    """Return the line of a record: JSON whose last key, `check`, is a hash of the bytes before it.

    NaN and the infinities become null. All is ASCII, so that any text survives, lone surrogates too.
    """
    plain = to_json_value(record)
    plain.pop("check", None)
    return add_check(json.dumps(plain, allow_nan=False).encode()[:-1])


def add_check(body: bytes) -> bytes:
    """Return the line that begins with these bytes of a record."""
    return body + CHECK + hashlib.sha256(body).hexdigest()[:CHECK_DIGITS].encode() + b'"}\n'


def parse_line(line: bytes, sealed: bool = False) -> dict[str, Any]:
    """Return the record of a line, without its checksum.

    Args:
        line: The line, which ends with a newline.
        sealed: Whether the file that holds it is known to be unchanged, so that the checksum need not be computed.

    Raises:
        ValueError: It holds no record, or was changed since it was written. The message is a part of a line, such as
            "has another checksum than its content".
    """
    try:
        record = DECODER.decode(line.decode())
    except RecursionError:
        raise ValueError("is nested too deep") from None
    except ValueError:
        raise ValueError("is no JSON") from None
    if not isinstance(record, dict) or not isinstance(record.get("uid"), str):
        raise ValueError("is no record with a uid")
    if record.pop("check", None) is None:
        version = read_version(record)
        if isinstance(version, int) and version >= CHECKED:
            raise ValueError("has no checksum")
    elif not sealed and line != add_check(line[: -len(CHECK) - CHECK_DIGITS - 3]):
        raise ValueError("has another checksum than its content")
    return record


def _lock_byte(uid: str) -> int:
    """Return the byte of claims.lock that stands for a sample: 1 to 2^56, so many that two samples never share one."""
    return 1 + int.from_bytes(hashlib.sha256(uid.encode(errors="surrogatepass")).digest()[:7], "big")


def _is_locked(descriptor: int, byte: int) -> bool:
    """Return whether another process has locked a byte of a file. Locking it as a test would disturb others."""
    asked = {"type": fcntl.F_WRLCK, "whence": os.SEEK_SET, "start": byte, "length": 1, "process": 0}
    layout = "".join(LOCK.values())
    given = struct.pack(layout, *(asked[name] for name in LOCK))
    lock = struct.unpack(layout, fcntl.fcntl(descriptor, fcntl.F_GETLK, given))
    kind: int = lock[list(LOCK).index("type")]
    return kind != fcntl.F_UNLCK


def read_seal(path: Path) -> dict[str, Any] | None:
    """Return the content of a run's `done`, or None if there is none.

    Raises:
        ValueError: It cannot be read, or is no seal.
    """
    if not os.path.lexists(path / "done"):
        return None
    content = read_file(path / "done")
    try:
        seal = parse_json(content)
    except ValueError as error:
        raise ValueError(f"done {error}") from None
    files = seal.get("files", {}) if isinstance(seal, dict) else None
    if (
        not isinstance(files, dict)
        or {name: type(entry) for name, entry in seal.items() if name != "files"} != SEAL
        or seal["format"] != FORMAT
        or not all(map(SEALED_NAME.fullmatch, files))
    ):
        raise ValueError("done is no seal of a run")
    return dict(seal)


def make_seal(records: Iterable[str], files: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the content of `done`: the number of records, a hash of their uids, and the SHA-256 of files by name."""
    uids = sorted(records)
    seal = {"format": FORMAT, "records": len(uids), "uids": hashlib.sha256(json.dumps(uids).encode()).hexdigest()}
    return seal if files is None else seal | {"files": dict(sorted(files.items()))}


def sort_sealed(names: Iterable[str], sealed: Mapping[str, str]) -> list[str]:
    """Return names of files in the order in which records count: those that `done` seals, then others, each by name."""
    return sorted(names, key=lambda name: (name not in sealed, name))


def fits_records(seal: Mapping[str, Any], uids: Iterable[str]) -> bool:
    """Return whether a seal counts exactly the records with these uids."""
    return {name: seal[name] for name in SEAL} == make_seal(uids)


def find_changed_files(path: Path, sealed: Mapping[str, str]) -> list[str]:
    """Return a line for each file of a run that is damaged, without those of records that are there.

    Args:
        path: The folder.
        sealed: SHA-256 by name, from `done`; empty without it.
    """
    problems = []
    for name in sorted(sealed or {file.name for file in path.glob("machine*.json")}):
        if name.startswith("records") and os.path.lexists(path / name):
            continue
        try:
            content = read_file(path / name)
        except ValueError as error:
            problems.append(str(error))
            continue
        if name in sealed:
            if hashlib.sha256(content).hexdigest() != sealed[name]:
                problems.append(f"{name} {CHANGED}")
            continue
        try:
            if not isinstance(parse_json(content), dict):
                raise ValueError("is no description of a machine")
        except ValueError as error:
            problems.append(f"{name} {error}")
    return problems

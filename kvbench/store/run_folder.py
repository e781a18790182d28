"""The folder of one run: what was chosen, on which machine, and one line for every sample done.

    results/runs/<hash>/run.yaml                 the resolved value that the hash stands for, and the format's number
                        machine.json             the first writer's machine; a later writer on another machine adds
                        machine-<writer>.json    its own
                        records-<writer>.jsonl   one line a sample, one file a writing process (appends by several
                                                 to one file are not atomic on shared file systems)
                        samples              how many there will be
                        claims.lock              byte-range locks: byte 0 while the folder is set up or closed,
                                                 one byte for each sample that somebody is working on, and a last one
                                                 that all who have the run open share
                        done                     written last

Three facts of POSIX carry it. A line counts once its newline is on the disk, so a killed writer leaves at most a torn
tail, which readers pass over and the next writer cuts off. A lock dies with its process, so a killed worker's sample
is free at once. A file renamed into place is there whole or not at all. Locks belong to the process, not to the
object: open one run once per process, and claim after a fork rather than before it.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import yaml

from kvbench.atomic import replace_file
from kvbench.validation import SettingError, name_file_in_errors

FORMAT = 1  # of the folder and its records; a folder of another format is refused, never mixed
OPEN_BYTE = 1 << 57  # a byte of claims.lock: who looks on sees who works, between two samples too


def to_plain(value: object) -> Any:
    """`value` as dicts, lists, str, int, float, bool and None; an OmegaConf container is fine.

    Raises TypeError for anything else (a Path, a tensor): what it means must be said by whoever owns it.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) + 0.0  # turns -0.0 into 0.0
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"a key is {wrong[0]!r}: keys are str")
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [to_plain(item) for item in value]
    raise TypeError(f"{value!r} is a {type(value).__name__}: neither a number, a text, a list nor a mapping")


def to_json_value(value: object) -> Any:
    """`to_plain(value)` with None for NaN and the infinities, which JSON cannot say."""
    return json.loads(json.dumps(to_plain(value)), parse_constant=lambda name: None)


def describe_old_format(found: object) -> str:
    """What to do with a run of another format."""
    return (
        f"format {found}, and this kvbench reads {FORMAT}: read it with the kvbench that wrote it, or move the folder "
        "away and run it again"
    )


def run_hash(value: Mapping[str, Any]) -> str:
    """16 hex digits of the SHA-256 of `value` as canonical JSON.

    Keys are sorted and a float is written in its shortest exact form: the order of keys and the spelling of a number
    (0.05, 5e-2) do not matter, but 1 and 1.0 are different settings. Raises ValueError for NaN and the infinities.
    """
    text = json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class RunFolder:
    """The records of the run that `value` describes, under `root`. Nothing is written before `open`."""

    def __init__(self, root: Path, value: Mapping[str, Any]) -> None:
        self.value = to_plain(value)
        self.hash = run_hash(value)
        self.path = Path(root) / self.hash
        host = re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())
        self._writer = f"{host}-{os.getpid()}-{secrets.token_hex(4)}"
        self._locks: int | None = None  # descriptor of claims.lock, opened once
        self._own: int | None = None  # descriptor of this process's records
        self._claimed: set[str] = set()
        self._read: dict[str, int] = {}  # file name -> bytes read, always up to the end of a line
        self._lines: dict[str, dict[str, dict[str, Any]]] = {}  # file name -> uid -> record

    @contextmanager
    def open(self, machine: Mapping[str, Any], samples: int | None = None) -> Iterator["RunFolder"]:
        """Make the folder ready for this process to write; give back locks and claims at the end. `samples`: how many
        there will be, for those who look on.
        """
        if self._locks is not None:
            raise RuntimeError(f"{self.path} is already open in this process")
        plain = to_json_value(machine)
        self.path.mkdir(parents=True, exist_ok=True)
        self._locks = os.open(self.path / "claims.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            with self._alone():
                self._set_up(plain)
                if samples is not None:
                    self._put("samples", f"{samples}\n")
                self._cut_torn_tails()
            fcntl.lockf(self._locks, fcntl.LOCK_SH, 1, OPEN_BYTE)
            yield self
        finally:
            for descriptor in (self._own, self._locks):
                if descriptor is not None:
                    os.close(descriptor)
            self._own = self._locks = None
            self._claimed.clear()

    def records(self) -> dict[str, dict[str, Any]]:
        """uid -> record of every whole line that any process has written so far.

        Should two files hold one uid (folders copied together by hand), the first file by name wins.
        """
        self.refresh()
        merged: dict[str, dict[str, Any]] = {}
        for name in sorted(self._lines):
            for uid, record in self._lines[name].items():
                merged.setdefault(uid, record)
        return merged

    def machine(self, uid: str) -> dict[str, Any]:
        """What machine.json says of the process that wrote a sample's record; {} where it cannot be read."""
        self.refresh()
        name = next((name for name in sorted(self._lines) if uid in self._lines[name]), "")
        own = self.path / name.replace("records-", "machine-").replace(".jsonl", ".json")
        try:
            found = json.loads((own if own.is_file() else self.path / "machine.json").read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def refresh(self) -> None:
        """Take in the whole lines that other processes have written since the last look."""
        for path in self.path.glob("records*.jsonl"):
            if self._own is not None and path == self._own_path:
                continue  # known already; and over NFS closing a second descriptor would drop the lock of the first
            with open(path, "rb") as file:
                start = file.seek(self._read.get(path.name, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path.name] = start + len(whole)
            lines = self._lines.setdefault(path.name, {})
            for line in BytesIO(whole):
                if (record := parse_record(line)) is not None:
                    lines.setdefault(record["uid"], record)

    def record(self, uid: str) -> dict[str, Any] | None:
        """The record of a sample, also one that another process has written; None if there is none so far."""
        if not self.is_recorded(uid):
            self.refresh()
        return next((self._lines[name][uid] for name in sorted(self._lines) if uid in self._lines[name]), None)

    def is_recorded(self, uid: str) -> bool:
        """Whether the sample had a record when the files were last read (`refresh`)."""
        return any(uid in lines for lines in self._lines.values())

    def claim(self, uid: str) -> bool:
        """True if the sample is now this process's to do: it has no record and nobody else is at it."""
        locks = self._open_locks
        if uid in self._claimed or self.is_recorded(uid):
            return False
        try:
            fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _lock_byte(uid))
        except (BlockingIOError, PermissionError):  # POSIX allows EAGAIN and EACCES for "taken"
            return False
        self._claimed.add(uid)
        self.refresh()
        if self.is_recorded(uid):  # finished by another process between the first look and the lock
            self.release(uid)
            return False
        return True

    def release(self, uid: str) -> None:
        """Give a claim back; without a claim nothing happens."""
        if uid in self._claimed:
            self._claimed.remove(uid)
            fcntl.lockf(self._open_locks, fcntl.LOCK_UN, 1, _lock_byte(uid))

    def append(self, record: Mapping[str, Any]) -> None:
        """Write the record of a claimed sample as one line, at once on the disk, and give the claim back."""
        plain: dict[str, Any] = to_json_value(record)
        uid = plain["uid"]
        if uid not in self._claimed:
            raise RuntimeError(f"{uid}: not claimed by this process")
        line = json.dumps(plain, allow_nan=False).encode() + b"\n"  # ASCII: any str, lone surrogates too, survives
        if self._own is None:
            self._own = os.open(self._own_path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._own, fcntl.LOCK_EX)  # held until death: tells others that this tail is being written
        start = self._read.get(self._own_path.name, 0)
        with name_file_in_errors(self._own_path):
            if (written := os.write(self._own, line)) != len(line):
                os.ftruncate(self._own, start)
                raise OSError(errno.ENOSPC, f"{written} of {len(line)} bytes could be written; is the disk full?")
            os.fsync(self._own)
        self._read[self._own_path.name] = start + len(line)
        self._lines.setdefault(self._own_path.name, {})[uid] = plain
        self.release(uid)

    def finish(self, expected_uids: Iterable[str]) -> bool:
        """Write `done` if every expected sample has a record; says whether it has."""
        have = self.records()
        if any(uid not in have for uid in expected_uids):
            return False
        with self._alone():
            self._put("done", json.dumps(make_seal(have)) + "\n")
        return True

    @property
    def finished(self) -> bool:
        """Whether `done` is there and speaks of exactly the records that are."""
        try:
            done = json.loads((self.path / "done").read_text())
        except (FileNotFoundError, ValueError):
            return False
        return bool(done == make_seal(self.records()))

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
        """Hold byte 0 of the locks: one process at a time sets the folder up or closes it."""
        locks = self._open_locks
        fcntl.lockf(locks, fcntl.LOCK_EX, 1, 0)
        try:
            yield
        finally:
            fcntl.lockf(locks, fcntl.LOCK_UN, 1, 0)

    def _put(self, name: str, text: str) -> None:
        """Write a small file. Under `_alone`, so that other drafts of it are those of killed writers."""
        for left in self.path.glob(f"{name}.draft*"):
            left.unlink()
        with replace_file(self.path / name) as draft:
            draft.write_text(text, encoding="ascii")

    def _set_up(self, machine: Mapping[str, Any]) -> None:
        run = self.path / "run.yaml"
        if not run.exists():
            self._put("run.yaml", yaml.safe_dump({"format": FORMAT, "hash": self.hash, "value": self.value}))
        elif (found := yaml.safe_load(run.read_text())["format"]) != FORMAT:
            raise SettingError(f"results: {self.path} has {describe_old_format(found)}")
        text = json.dumps(machine, indent=1, sort_keys=True) + "\n"
        first = self.path / "machine.json"
        if not first.exists():
            self._put("machine.json", text)
        elif first.read_text() != text:
            self._put(f"machine-{self._writer}.json", text)

    def _cut_torn_tails(self) -> None:
        """Cut files of dead writers (their lock can be had) back to their last whole line."""
        for path in self.path.glob("records*.jsonl"):
            with open(path, "r+b") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except (BlockingIOError, PermissionError):
                    continue
                text = file.read()
                if not text.endswith(b"\n"):
                    file.truncate(text.rfind(b"\n") + 1)


def claim_samples(
    folders: Collection[RunFolder], uids: Iterable[str], pause: float = 0.2
) -> Iterator[tuple[str, list[RunFolder]]]:
    """Claim one sample after another, each in all open runs that lack it, until each of `uids` has a record in all of
    `folders`, by this process or another; a run that is taken out of `folders` meanwhile is not waited for. Whoever has
    the first run that lacks a sample takes it in as many of the others as nobody is at.

    Waits `pause` seconds at a time for what others are at, and takes it over when they die. The caller appends
    a record to each run it is given, before it asks for the next.
    """
    waiting = list(uids)
    while waiting:
        worked = False
        for uid in waiting:
            lacking = [folder for folder in folders if not folder.is_recorded(uid)]
            if not lacking or not lacking[0].claim(uid):
                continue
            worked, own = True, [lacking[0], *(folder for folder in lacking[1:] if folder.claim(uid))]
            try:
                yield uid, own
            finally:
                for folder in own:
                    folder.release(uid)
        for folder in folders:
            folder.refresh()
        waiting = [uid for uid in waiting if not all(folder.is_recorded(uid) for folder in folders)]
        if waiting and not worked:
            time.sleep(pause)


def claim_all(folders: Collection[RunFolder], uid: str) -> bool:
    """Claim the sample in all of these runs, or in none."""
    own = [folder for folder in folders if folder.claim(uid)]
    if len(own) < len(folders):
        for folder in own:
            folder.release(uid)
    return len(own) == len(folders)


def read_run_value(path: Path) -> dict[str, Any]:
    """The value that a run's hash stands for; ValueError if run.yaml is not whole or is of another format."""
    try:
        stored = yaml.load((path / "run.yaml").read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"run.yaml cannot be read ({type(error).__name__})") from None
    if not isinstance(stored, dict) or not {"format", "hash", "value"} <= stored.keys():
        raise ValueError("run.yaml is not whole")
    if stored["format"] != FORMAT:
        raise ValueError(describe_old_format(stored["format"]))
    if not path.name == stored["hash"] == run_hash(stored["value"]):
        raise ValueError("run.yaml does not have the value that the folder's name stands for")
    value: dict[str, Any] = stored["value"]
    return value


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line. None for a torn line, a blank one, and a block that a crash of the machine left
    unwritten: such a sample is done again.
    """
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("uid"), str) else None


def _lock_byte(uid: str) -> int:
    """The byte of claims.lock that stands for a sample: 1 to 2^56, so that chance never makes two samples one."""
    return 1 + int.from_bytes(hashlib.sha256(uid.encode(errors="surrogatepass")).digest()[:7], "big")


def make_seal(records: Iterable[str]) -> dict[str, Any]:
    """What `done` says: how many records there are, and a hash of their uids."""
    uids = sorted(records)
    return {"format": FORMAT, "records": len(uids), "uids": hashlib.sha256(json.dumps(uids).encode()).hexdigest()}

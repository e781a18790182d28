"""Bundles that a stranger damaged or forged end in one line or in a right answer, in little memory and time."""

import json
import random
import resource
import sys
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbench.analysis.bundle import MANIFEST, TABLE, verify_bundle, write_bundle
from kvbench.store.run_folder import add_check, run_hash
from kvbench.validation import SettingError
from tests.support.bundles import pack, signed, unpacked
from tests.support.repository import ROOT

SECONDS, MEMORY = 10, 500_000_000
MEMBERS = ("run", "done", "machine", "records")  # files of a run
ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        -1,
        -5,
        0,
        1.5,
        101,
        10**18,
        10**400,
        1e-300,
        "",
        "x",
        "nan",
        "../..",
        "\0",
        "\ud800",
        "${oc.env:HOME}",
    ),
    *([], {}, [[]], {"a": {}}, [0] * 1000, "x" * 100_000, "__import__", "!function os.system"),
)
RAW = (
    *(
        b"",
        b"\xff",
        b"null",
        b"[]",
        b"{}",
        b"1e999",
        b"NaN",
        b"[" * 1000,
        b"[" * 100_000,
        b'{"a":' * 5000,
        b"\0" * 1000,
    ),
    *(b"&a [*a]", b"a: &a [x]\nb: *a", b"!!python/object:os.system x", b'"', b"2020-01-01", b'{"a": 1, "a": 2}'),
)


@cache
def read_good() -> dict[str, bytes]:
    """The files of a good bundle: eight records of two runs."""
    with TemporaryDirectory() as folder:
        write_bundle(ROOT / "tests/stores/0.1", {}, Path(folder) / "own.zip")
        return unpacked(Path(folder) / "own.zip")


def change_value(value: Any, draw: random.Random) -> Any:
    """The value with one part of it replaced, left out, added, or wrapped many times."""
    if not isinstance(value, dict | list) or not value or draw.random() < 0.15:
        if draw.random() < 0.1:
            for _ in range(draw.choice((5, 60, 900))):
                value = [value]
            return value
        return draw.choice(ODD)
    own = dict(value) if isinstance(value, dict) else list(value)
    key = draw.choice(list(own)) if isinstance(own, dict) else draw.randrange(len(own))
    kind = draw.random()
    if kind < 0.15:
        del own[key]
    elif kind < 0.25 and isinstance(own, dict):
        own[draw.choice(("x", "_target_", "base", "../x", "", "version", "check"))] = draw.choice(ODD)
    else:
        own[key] = change_value(own[key], draw)
    return own


def change_bytes(content: bytes, draw: random.Random) -> bytes:
    """The bytes with some replaced, left out or repeated."""
    if draw.random() < 0.3 or not content:
        return draw.choice(RAW)
    first, last = sorted(draw.randrange(len(content) + 1) for _ in range(2))
    kind = draw.randrange(4)
    if kind == 0:
        return content[:first] + draw.choice(RAW) + content[first:]
    if kind == 1:
        return content[:first] + content[last:]
    if kind == 2:
        return content[:last] + content[first:last] * draw.choice((1, 2, 50)) + content[last:]
    return content[:first] + draw.randbytes(min(last - first, 20)) + content[first + 20 :]


def change_json(content: bytes, draw: random.Random) -> bytes:
    return json.dumps(change_value(json.loads(content), draw)).encode()


def change_file(files: dict[str, bytes], draw: random.Random) -> bytes:
    """A document of a run, as a value or as bytes, with fitting checksums."""
    member = draw.choice(MEMBERS)
    name = draw.choice([name for name in files if Path(name).name.startswith(member)])
    if draw.random() < 0.3:
        files[name] = change_bytes(files[name], draw)
    elif member == "records":
        lines = files[name].splitlines(keepends=True)
        at = draw.randrange(len(lines))
        record = {name: own for name, own in json.loads(lines[at]).items() if name != "check"}
        text = json.dumps(changed := change_value(record, draw)).encode()
        lines[at] = add_check(text[:-1]) if changed and isinstance(changed, dict) else text + b"\n"
        files[name] = b"".join(lines)
    else:
        files[name] = change_json(files[name], draw)
    return signed(files)


def change_settings(files: dict[str, bytes], draw: random.Random) -> bytes:
    """Settings of a run, with the hash and the folder that fit them."""
    run = draw.choice([name for name in files if name.endswith("run.json")]).split("/")[1]
    value = change_value(json.loads(files[f"runs/{run}/run.json"])["value"], draw)
    try:
        name = run_hash(value)
    except (TypeError, ValueError, RecursionError):  # nobody can name such a run
        return change_file(files, draw)
    files[f"runs/{run}/run.json"] = json.dumps({"format": 1, "hash": name, "value": value}).encode()
    manifest = json.loads(files[MANIFEST])
    manifest["finished"][name] = manifest["finished"].pop(run)
    files[MANIFEST] = json.dumps(manifest).encode()
    return signed({own.replace(run, name): content for own, content in files.items()})


def change_manifest(files: dict[str, bytes], draw: random.Random) -> bytes:
    change = change_bytes if draw.random() < 0.3 else change_json
    return pack(files | {MANIFEST: change(files[MANIFEST], draw)})


def change_table(files: dict[str, bytes], draw: random.Random) -> bytes:
    return signed(files | {TABLE: change_bytes(files[TABLE], draw)})


def change_names(files: dict[str, bytes], draw: random.Random) -> bytes:
    """A file renamed, left out, or added."""
    name = draw.choice([name for name in files if name != MANIFEST])
    content = files.pop(name)
    other = draw.choice(
        ("", "/etc/x", "../x", "runs/x/done", name + "/x", name.upper(), name, "runs/" + "a" * 300, "\0")
    )
    return signed(files | {other: content} if draw.random() < 0.7 else files)


def change_archive(files: dict[str, bytes], draw: random.Random) -> bytes:
    """Another way of packing, or the archive's own bytes, with a fitting checksum at its end."""
    name = draw.choice(list(files))
    kind = draw.randrange(4)
    if kind == 0:
        return pack(files, draw.choice((0, 12, 14)))
    if kind == 1:
        return pack(files, mode={name: draw.choice((0o120777, 0o040755, 0o010644))}, twice=draw.choice((name, None)))
    archive = bytearray(pack(files)[:-64])
    for _ in range(draw.choice((1, 3))):
        start = draw.choice((0, max(0, len(archive) - 2000)))  # anywhere, or in the list of entries
        archive[draw.randrange(start, len(archive))] = draw.randrange(256)
    return reseal(bytes(archive))


def reseal(body: bytes) -> bytes:
    return body + sha256(body).hexdigest().encode()


CHANGES: tuple[Callable[[dict[str, bytes], random.Random], bytes], ...] = (
    *(change_file, change_file, change_settings, change_manifest, change_table, change_names, change_archive),
)


def check_case(seed: int, path: Path) -> bool:
    """Whether the bundle of a seed is accepted. What is accepted gives the table that the good one gives."""
    draw = random.Random(seed)
    path.write_bytes(draw.choice(CHANGES)(dict(read_good()), draw))
    start = process_time()
    try:
        found = verify_bundle(path)
    except SettingError as error:
        assert str(error).startswith(f"bundle={path}: ") and str(error).isprintable() and len(str(error)) < 1000
        return False
    finally:
        assert process_time() - start < SECONDS
    assert found.runs <= 2 and found.records <= 8
    return True


@settings(max_examples=100, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_a_changed_bundle_is_one_line_or_right(seed):
    with TemporaryDirectory() as folder:
        check_case(seed, Path(folder) / "own.zip")


@pytest.mark.full
@pytest.mark.parametrize("first, last", list(pairwise(range(0, 2001, 500))))
def test_many_changed_bundles_take_little_memory_and_time(tmp_path, first, last):
    before = measure_peak()
    accepted = sum(check_case(seed, tmp_path / "own.zip") for seed in range(first, last))
    assert measure_peak() - before < MEMORY and 0 < accepted < (last - first) / 3


def measure_peak() -> int:
    """The largest resident memory that this process had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

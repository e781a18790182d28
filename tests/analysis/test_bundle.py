"""A bundle proves its table, and no change of it goes unnoticed."""

import hashlib
import json
import os
import random
import re
import zipfile
from string import ascii_lowercase
from time import process_time

import pytest

from kvbench.analysis import bundle, run_labels
from kvbench.analysis.bundle import MANIFEST, TABLE, pack_run, verify_bundle, write_bundle
from kvbench.analysis.score_matrix import build_blocks
from kvbench.analysis.score_matrix_format import format_csv
from kvbench.cli import bundle as bundle_command
from kvbench.cli import verify
from kvbench.store.record import ABSENT, find_problems
from kvbench.store.run_folder import format_line
from kvbench.store.runs import load_runs
from kvbench.validation import SettingError
from tests.support.bundles import pack, signed, unpacked
from tests.support.made_up_runs import write_run
from tests.support.report_store import make_records
from tests.support.repository import ROOT
from tests.support.selection import choose_quick, only_in_full

FULL = {"method": {"name": "full"}}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    for question in ("visible", "hidden"):
        write_run(folder, make_records(1.0, 100, asked="what?"), question=question, **FULL)
        for name, chance in (("snapkv", 80), ("knorm", 40)):
            own = {"method": {"name": name}, "budget": 0.1, "question": question}
            write_run(folder, make_records(0.1, chance, asked="what?"), machine={"code": "git 0123"}, **own)
    return folder


@pytest.fixture(scope="module")
def made(store, tmp_path_factory):
    path = tmp_path_factory.mktemp("bundle") / "own.zip"
    write_bundle(store, {}, path)
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Eight records of two runs."""
    path = tmp_path_factory.mktemp("bundle") / "small.zip"
    write_bundle(ROOT / "tests/stores/0.1", {}, path)
    return path


def test_a_bundle_gives_the_table_of_its_store(store, made):
    found = verify_bundle(made)
    assert (found.runs, found.records) == (6, 6 * 24)
    assert format_csv(found.blocks) == format_csv(build_blocks(load_runs(store), load_runs(store))[0])
    assert unpacked(made)[TABLE].decode() == format_csv(found.blocks, decimals=6)
    assert found.digest == hashlib.sha256(made.read_bytes()).hexdigest()


def test_texts_of_the_data_set_stay_at_home(store, made, tmp_path):
    records = [own for name, own in unpacked(made).items() if name.endswith("records.jsonl")]
    assert records and not any(b'"asked"' in own or b'"target"' in own for own in records)
    assert all(b'"target_hash"' in own and b'"output"' in own for own in records)
    write_bundle(store, {}, tmp_path / "texts.zip", with_texts=True)
    texts = unpacked(tmp_path / "texts.zip")
    assert all(b'"asked"' in own for name, own in texts.items() if name.endswith("records.jsonl"))
    verify_bundle(tmp_path / "texts.zip")


def test_what_tasks_store_of_a_sample_stays_at_home_too():
    meta = {
        "needle": "secret",
        "all_classes": ["a", "b"],
        "depth": 50,
        "depths": [1, 2],
        "data": "local",
        "b": {"x": "y"},
    }
    kept = bundle.drop_texts({"uid": "1", "target": ["t"], "asked": "q", "output": "o", "meta": meta})
    assert kept == {"uid": "1", "output": "o", "meta": {"depth": 50, "depths": [1, 2], "data": "local"}}


def test_settings_with_local_paths_stay_at_home(tmp_path):
    machine = {"code": "git 0123", "settings": {"model": {"path": "/home/me/model"}}}
    write_run(tmp_path, make_records(1.0, 100), machine=machine, **FULL)
    write_run(tmp_path, make_records(0.1, 50), machine=machine, method={"name": "snapkv"}, budget=0.1)
    write_bundle(tmp_path, {}, tmp_path / "own.zip")
    assert not any(b"/home/me" in own for own in unpacked(tmp_path / "own.zip").values())


def test_machines_that_say_the_same_are_packed_once(tmp_path):
    run = write_run(tmp_path, make_records(1.0, 100), machine={"code": "git 0123"}, **FULL)
    for name, code in (("a", "0123"), ("b", "4567"), ("c", "4567")):
        (run.folder.path / f"machine-{name}.json").write_text(json.dumps({"code": f"git {code}"}))
    packed = {name: json.loads(own)["code"] for name, own in pack_run(run, False).items() if "machine" in name}
    assert packed == {"machine.json": "git 0123", "machine-c.json": "git 4567"}


def test_a_table_may_differ_in_the_last_bits(made, monkeypatch):
    """Another scipy or another CPU rounds otherwise."""
    monkeypatch.setattr(bundle, "format_csv", lambda blocks: nudge(format_csv(blocks)))
    verify_bundle(made)


def nudge(text: str) -> str:
    return re.sub(r"\d+\.\d{9,}", lambda found: repr(float(found[0]) * (1 + 1e-13)), text)


def test_filters_keep_the_full_cache(store, tmp_path):
    write_bundle(store, {"method": "snapkv", "question": "hidden"}, tmp_path / "own.zip")
    found = verify_bundle(tmp_path / "own.zip")
    assert found.runs == 2 and [block.question for block in found.blocks] == ["hidden"]


@pytest.mark.parametrize("seed", choose_quick(range(40), *range(10)))
def test_a_changed_byte_is_found(made, tmp_path, seed):
    draw, content = random.Random(seed), bytearray(made.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    changed = tmp_path / "changed.zip"
    changed.write_bytes(bytes(content))
    with pytest.raises(SettingError, match=rf"^bundle={re.escape(str(changed))}: [^\n]+$"):
        verify_bundle(changed)


def change_record(files: dict[str, bytes], draw: random.Random) -> None:
    """Another score, group or subtask of one sample."""
    name = draw.choice([own for own in files if own.endswith("records.jsonl")])
    lines = files[name].decode().splitlines()
    at = draw.randrange(len(lines))
    record = json.loads(lines[at])
    field, value = draw.choice([("score", 37.0), ("resident_bytes", 1), ("prompt_hash", "other"), ("stop", "length")])
    record[field] = value
    lines[at] = format_line(record).decode().rstrip()
    files[name] = "".join(f"{line}\n" for line in lines).encode()


def drop_record(files: dict[str, bytes], draw: random.Random) -> None:
    name = draw.choice([own for own in files if own.endswith("records.jsonl")])
    lines = files[name].splitlines(keepends=True)
    del lines[draw.randrange(len(lines))]
    files[name] = b"".join(lines)


def change_table(files: dict[str, bytes], draw: random.Random) -> None:
    digits = [at for at, char in enumerate(files[TABLE]) if chr(char).isdigit()]
    content, at = bytearray(files[TABLE]), draw.choice(digits)
    content[at] = ord("0") + (content[at] - ord("0") + draw.randrange(1, 10)) % 10
    files[TABLE] = bytes(content)


def change_setting(files: dict[str, bytes], draw: random.Random) -> None:
    name = draw.choice([own for own in files if own.endswith("run.json")])
    files[name] = files[name].replace(b'"length": 2048', b'"length": 4096')


def drop_run(files: dict[str, bytes], draw: random.Random) -> None:
    chosen = draw.choice([own for own in files if own.endswith("run.json")]).rpartition("/")[0]
    for name in [own for own in files if own.startswith(chosen)]:
        del files[name]


CHANGES = (change_record, drop_record, change_table, change_setting, drop_run)


@pytest.mark.parametrize("forged", [False, True], ids=["unsigned", "signed"])
@pytest.mark.parametrize("seed", choose_quick(range(6), 0, 1))
@pytest.mark.parametrize("change", CHANGES)
def test_changed_contents_are_found(made, tmp_path, change, seed, forged):
    """With the old manifest its checksums tell; with a new one, records and table do not fit each other."""
    files = unpacked(made)
    change(files, random.Random(seed))
    changed = tmp_path / "changed.zip"
    changed.write_bytes(signed(files) if forged else pack(files))
    with pytest.raises(SettingError, match=rf"^bundle={re.escape(str(changed))}: [^\n]+$") as caught:
        verify_bundle(changed)
    if not forged:
        assert "checksum" in str(caught.value) or "manifest" in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"score": "54"}, "score is '54', expected"),
        ({"score": True}, "score is True, expected"),
        ({"score": 300.0}, "score is 300.0"),
        ({"resident_bytes": -5}, "resident_bytes is -5"),
        ({"budget": -1}, "budget is -1"),
        ({"version": None, "score": 300.0}, "version is None"),
        ({"version": ABSENT, "score": 300.0}, "score is 300.0"),
        ({"version": 1, "resident_bytes": -5}, "resident_bytes is -5"),
    ],
)
def test_a_value_that_no_record_has_is_refused(made, tmp_path, changed, line):
    """All checksums fit: what a forger writes, also as a record of the first version."""
    files = unpacked(made)
    name = next(own for own in files if own.endswith("records.jsonl"))
    first, *others = files[name].splitlines(keepends=True)
    record = {field: value for field, value in (json.loads(first) | changed).items() if value is not ABSENT}
    files[name] = b"".join([format_line(record), *others])
    forged = tmp_path / "forged.zip"
    forged.write_bytes(signed(files))
    with pytest.raises(SettingError, match=re.escape(line)) as error:
        verify_bundle(forged)
    assert str(error.value).startswith(f"bundle={forged}: run ") and "\n" not in str(error.value)


def test_what_is_no_bundle_is_one_line(made, tmp_path, capsys):
    files = unpacked(made)
    name = next(own for own in files if own.endswith("records.jsonl"))
    lines = [json.loads(line) for line in files[name].splitlines()]
    damaged = {name: b"".join(format_line({key: line[key] for key in line if key != "error"}) for line in lines)}
    newer = json.loads(files[MANIFEST]) | {"format": 4, "kvbench": "9.9"}
    cases = {
        "nothing.zip": (None, "cannot be read"),
        "text.zip": (b"no archive", "is no bundle, or damaged"),
        "empty.zip": (pack({}), "is no bundle, or damaged"),
        "newer.zip": (
            pack(files | {MANIFEST: json.dumps(newer).encode()}),
            "has format 4, and this kvbench reads 1 to 3",
        ),
        "more.zip": (pack(files | {"more.txt": b""}), "more.txt: not in both"),
        "out.zip": (signed(files | {"../out.txt": b""}), "../out.txt: no file of a bundle"),
        "named.zip": (signed(files | {"runs/\x1b[31m": b""}), r"runs/\x1b[31m: no file of a bundle"),
        "nothing_in_it.zip": (signed({MANIFEST: files[MANIFEST]}), "names no table"),
        "letters.zip": (signed(files | {TABLE: b"\xff"}), "its runs cannot be used (UnicodeDecodeError"),
        "fields.zip": (signed(files | damaged), "error is missing"),
    }
    for name, (content, line) in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        assert verify.main([str(tmp_path / name)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("kvbench: bundle") and line in err and err.count("\n") == 1, err
    assert not (tmp_path.parent / "out.txt").exists()


def test_a_bundle_of_format_1_is_read():
    """Its settings are YAML."""
    found = verify_bundle(ROOT / "tests/stores/bundle-format-1.zip")
    assert (found.runs, found.records) == (2, 8)


@pytest.mark.parametrize(
    "limit, line",
    [
        ({"MOST_UNPACKED": 1000}, "unpacks to more than 1000 bytes"),
        ({"MOST_RATIO": 1, "ALWAYS": 1000}, r"unpacks to more than \d+ bytes"),
        ({"MOST_VALUES": 100}, "has more than 100 values"),
        ({"MOST_FILE": 1000}, r"has \d+ bytes, more than 1000"),
        ({"MOST_ENTRIES": 10}, "has more than 10 entries"),
    ],
    ids=lambda own: "" if isinstance(own, str) else "-".join(own),
)
def test_a_bundle_beyond_a_limit_is_refused(made, monkeypatch, limit, line):
    for name, value in limit.items():
        monkeypatch.setattr(bundle, name, value)
    with pytest.raises(SettingError, match=line):
        verify_bundle(made)


def test_each_run_is_named_once(made, monkeypatch):
    """Naming a run lists conf/. A bundle of 4,000 runs that did so for each pair of them took hours."""
    named, label_cache = [], run_labels.label_cache
    monkeypatch.setattr(run_labels, "label_cache", lambda value: named.append(value) or label_cache(value))
    verify_bundle(made)
    assert 0 < len(named) <= 6


def test_no_bundle_is_written_that_cannot_be_read(store, tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "MOST_ENTRIES", 10)
    with pytest.raises(SettingError, match="own.zip: has more than 10 entries"):
        write_bundle(store, {}, tmp_path / "own.zip")
    assert not (tmp_path / "own.zip").exists()


def forge_size(archive: bytes, size: int) -> bytes:
    """Let each entry of a list of entries state this size."""
    content, at = bytearray(archive), -1
    while (at := content.find(b"PK\1\2", at + 1)) >= 0:
        content[at + 24 : at + 28] = size.to_bytes(4, "little")
    return resealed(bytes(content))


def resealed(archive: bytes) -> bytes:
    return archive[:-64] + hashlib.sha256(archive[:-64]).hexdigest().encode()


def encrypted(archive: bytes) -> bytes:
    at = archive.find(b"PK\1\2")
    return resealed(archive[: at + 8] + b"\1" + archive[at + 9 :])


def test_a_hostile_archive_is_one_line(small, tmp_path):
    """Each would take memory, time, or a file outside of the archive. None costs a second."""
    files = unpacked(small)
    run = next(own for own in files if own.endswith("run.json"))
    machine, done = run.replace("run.json", "machine.json"), run.replace("run.json", "done")
    old = {name.replace("run.json", "run.yaml"): own for name, own in files.items()}
    old[MANIFEST] = json.dumps(json.loads(files[MANIFEST]) | {"format": 1}).encode()
    yaml, deep = run.replace("json", "yaml"), 150_000
    aliases = b"a: &a [x, x]\n" + b"".join(b"%c: &%c [*%c, *%c]\n" % (i + 1, i + 1, i, i) for i in range(97, 120))
    odd = b"a\n" * 20_000
    cases = {
        "is neither stored nor deflated": pack(files, zipfile.ZIP_BZIP2),
        "its end is not": small.read_bytes()[:-64],
        "manifest.json: is neither stored nor deflated, or is encrypted": encrypted(small.read_bytes()),
        f"{TABLE}: is a link": pack(files, mode={TABLE: 0o120777}),
        f"{TABLE}: not in both the archive and its manifest, once": pack(files, twice=TABLE),
        "../../x/done: no file of a bundle": signed(files | {"../../x/done": b""}),
        "is nested deeper than 50": pack(files | {MANIFEST: b"[" * deep + b"]" * deep}),
        f"{bundle.MANIFEST} names no format": pack(files | {MANIFEST: b"[]"}),
        "run.json cannot be read (is nested": signed(files | {run: b'{"format":' + b"[" * deep + b"]" * deep + b"}"}),
        "run.yaml cannot be read (is nested": signed(old | {yaml: b"[" * deep + b"]" * deep}),
        "run.yaml cannot be read (has an anchor": signed(old | {yaml: aliases}),
        "machine.json: is no description of a machine": signed(files | {machine: b"[]"}),
        "has more than 200000 values": signed(files | {machine: b"{" + b"[]," * 100_000 + b"}"}),
        "more than 4000000": signed(files | {machine: b'{"a": "' + 5_000_000 * b"b" + b'"}'}),
        "unpacks to more than 8000000 bytes": signed(files | {machine: bytes(9_000_000)}),
        "other columns than the matrix": signed(files | {TABLE: b"," * 50_000 + odd}),
        "has 20000 rows": signed(files | {TABLE: files[TABLE].splitlines()[0] + b"\n" + odd}),
        "done is no seal of a run": signed(files | {done: b"5"}),
        "a run has run.json, done and records.jsonl": signed(files | {yaml: b""}),
        "in both the archive": pack(files | {f"{number}": b"" for number in range(4_000)}),
    }
    for line, content in cases.items():
        (tmp_path / "own.zip").write_bytes(content)
        start = process_time()
        with pytest.raises(SettingError, match=rf"^bundle=.*{re.escape(line)}") as caught:
            verify_bundle(tmp_path / "own.zip")
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
        assert process_time() - start < 1, line
    (tmp_path / "own.zip").write_bytes(forge_size(small.read_bytes(), 4_000_000_000))
    assert verify_bundle(tmp_path / "own.zip").records == 8  # the size that an archive states is not believed
    (tmp_path / "own.zip").write_bytes(forge_size(small.read_bytes(), 3))
    with pytest.raises(SettingError, match="damaged"):
        verify_bundle(tmp_path / "own.zip")
    os.mkfifo(tmp_path / "pipe.zip")
    with pytest.raises(SettingError, match=r"cannot be read \(no file\)"):
        verify_bundle(tmp_path / "pipe.zip")


def test_the_commands(store, tmp_path, capsys):
    path = tmp_path / "own.zip"
    assert bundle_command.main(["--results", str(store), "question=visible", "--out", str(path)]) == 0
    digest = capsys.readouterr().out.split()[-1]
    assert verify.main([str(path), "--digest", digest[:16].upper()]) == 0
    out = capsys.readouterr().out
    assert "72 records of 3 runs give every number of the table." in out and "snapkv" in out
    assert verify.main([str(path), "--digest", 16 * "0"]) == 2
    assert capsys.readouterr().err == f"kvbench: --digest={16 * '0'}: the bundle has {digest}\n"
    assert verify.main([str(path), "--digest", ""]) == 2
    assert capsys.readouterr().err.startswith("kvbench: --digest=: at least 16 digits")
    assert bundle_command.main(["--results", str(store), "method=full", "--out", str(path)]) == 2
    assert "no finished run of a method to bundle" in capsys.readouterr().err


def draw_answers(seed: int, chance: float, budget: float) -> dict[str, dict]:
    """65 records with all fields of a real one: its texts and numbers, drawn at random so that they hardly compress."""
    draw, found = random.Random(seed), {}
    [path, *_] = sorted(ROOT.glob("tests/stores/0.1/runs/*/records*.jsonl"))
    real = json.loads(path.read_text().splitlines()[0])
    for index in range(65):
        uid = f"task_{index % 13}/{index // 13}"
        answer = " ".join("".join(draw.choices(ascii_lowercase, k=6)) for _ in range(32))
        found[uid] = real | {name: draw.uniform(0, 1000) for name, own in real.items() if isinstance(own, float)}
        found[uid] |= {"uid": uid, "index": index, "subtask": uid.partition("/")[0], "group": uid, "budget": budget}
        found[uid] |= {"prompt_hash": f"{index:016x}", "survived": draw.randbytes(64).hex(), "output": answer}
        found[uid] |= {"answer": answer, "score": 100.0 * (draw.random() < chance)}
        assert not find_problems(found[uid])
    return found


@pytest.mark.parametrize(("methods", "budgets"), [(2, 2), only_in_full(25, 4), only_in_full(100, 1)])
def test_a_bundle_is_small_and_soon_verified(tmp_path, methods, budgets):
    """100 cells of 65 samples take at most 5 MB, and 60 s on a laptop; the test asks for half of that."""
    write_run(tmp_path, draw_answers(0, 0.95, 1.0), **FULL)
    cells = [(f"m{method}", (1 + own) / 10) for method in range(methods) for own in range(budgets)]
    for seed, (name, budget) in enumerate(cells, 1):
        chance = 0.3 + 0.6 * seed / len(cells)
        write_run(tmp_path, draw_answers(seed, chance, budget), method={"name": name}, budget=budget)
    write_bundle(tmp_path, {}, tmp_path / "own.zip")
    assert (tmp_path / "own.zip").stat().st_size <= 50_000 * len(cells)
    start = process_time()
    found = verify_bundle(tmp_path / "own.zip")
    assert process_time() - start <= 30 and (found.runs, found.records) == (len(cells) + 1, 65 * (len(cells) + 1))

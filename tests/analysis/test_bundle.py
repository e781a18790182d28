"""A bundle proves its table, and no change of it goes unnoticed."""

import hashlib
import json
import random
import re
from string import ascii_lowercase
from time import process_time

import pytest

from kvbench.analysis import bundle
from kvbench.analysis.bundle import MANIFEST, TABLE, pack, verify_bundle, write_bundle
from kvbench.analysis.score_matrix import build_blocks
from kvbench.analysis.score_matrix_format import format_csv
from kvbench.cli import bundle as bundle_command
from kvbench.cli import verify
from kvbench.store.record import find_problems
from kvbench.store.runs import load_runs
from kvbench.validation import SettingError
from tests.support.bundles import signed, unpacked
from tests.support.made_up_runs import write_run
from tests.support.report_store import make_records
from tests.support.repository import ROOT
from tests.support.selection import only_in_full

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


@pytest.mark.parametrize("seed", range(40))
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
    lines[at] = json.dumps(record)
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
    name = draw.choice([own for own in files if own.endswith("run.yaml")])
    files[name] = files[name].replace(b"length: 2048", b"length: 4096")


def drop_run(files: dict[str, bytes], draw: random.Random) -> None:
    chosen = draw.choice([own for own in files if own.endswith("run.yaml")]).rpartition("/")[0]
    for name in [own for own in files if own.startswith(chosen)]:
        del files[name]


CHANGES = (change_record, drop_record, change_table, change_setting, drop_run)


@pytest.mark.parametrize("forged", [False, True], ids=["unsigned", "signed"])
@pytest.mark.parametrize("seed", range(6))
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


def test_what_is_no_bundle_is_one_line(made, tmp_path, capsys):
    files = unpacked(made)
    name = next(own for own in files if own.endswith("records.jsonl"))
    lines = [json.loads(line) for line in files[name].splitlines()]
    damaged = {name: "".join(json.dumps({**line, "stop": 0}) + "\n" for line in lines).encode()}
    damaged = {name: damaged[name].replace(b'"stop": 0, ', b"")}
    newer = json.loads(files[MANIFEST]) | {"format": 2, "kvbench": "9.9"}
    cases = {
        "nothing.zip": (None, "cannot be read"),
        "text.zip": (b"no archive", "is no bundle, or damaged"),
        "empty.zip": (pack({}), "is no bundle, or damaged"),
        "newer.zip": (pack(files | {MANIFEST: json.dumps(newer).encode()}), "has format 2, and this kvbench reads 1"),
        "more.zip": (pack(files | {"more.txt": b""}), "more.txt: not in both"),
        "out.zip": (signed(files | {"../out.txt": b""}), "../out.txt: no file of a bundle"),
        "named.zip": (signed(files | {"runs/\x1b[31m": b""}), r"runs/\x1b[31m: no file of a bundle"),
        "nothing_in_it.zip": (signed({MANIFEST: files[MANIFEST]}), "names no table"),
        "letters.zip": (signed(files | {TABLE: b"\xff"}), "its runs cannot be used (UnicodeDecodeError"),
        "fields.zip": (signed(files | damaged), "its runs cannot be used (KeyError"),
    }
    for name, (content, line) in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        assert verify.main([str(tmp_path / name)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("kvbench: bundle") and line in err and err.count("\n") == 1, err
    assert not (tmp_path.parent / "out.txt").exists()


def test_a_huge_archive_is_not_unpacked(made, monkeypatch):
    monkeypatch.setattr(bundle, "MOST", 1000)
    with pytest.raises(SettingError, match="unpacks to more than 1e-06 GB"):
        verify_bundle(made)


def test_the_commands(store, tmp_path, capsys):
    path = tmp_path / "own.zip"
    assert bundle_command.main([str(store), "question=visible", "--out", str(path)]) == 0
    digest = capsys.readouterr().out.split()[-1]
    assert verify.main([str(path), "--digest", digest[:16].upper()]) == 0
    out = capsys.readouterr().out
    assert "72 records of 3 runs give every number of the table." in out and "snapkv" in out
    assert verify.main([str(path), "--digest", 16 * "0"]) == 2
    assert capsys.readouterr().err == f"kvbench: --digest={16 * '0'}: the bundle has {digest}\n"
    assert verify.main([str(path), "--digest", ""]) == 2
    assert capsys.readouterr().err.startswith("kvbench: --digest=: at least 16 digits")
    assert bundle_command.main([str(store), "method=full", "--out", str(path)]) == 2
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


@pytest.mark.parametrize(("methods", "budgets"), [(5, 2), only_in_full(25, 4), only_in_full(100, 1)])
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

"""Published runs: a file gives back exactly what was written, packs it, and says in one line what is wrong with it."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from kvbench.store import published_file
from kvbench.store.published_file import KEY, read_published, write_published
from kvbench.store.published_runs import FIELDS, PublishedRun, name_machine, publish, reduce_record, round_number
from kvbench.store.run_folder import RunFolder, run_hash
from kvbench.validation import SettingError
from tests.support.made_up_runs import VALUE, write_run
from tests.support.report_store import make_records

FAILED = {
    "uid": "z/0", "subtask": "z", "group": "z/0", "prompt_hash": "p", "target_hash": "t", "error": "out_of_memory",
    "score": None, "stop": "error", "meta": {}, "also": {},
}  # fmt: skip


def draw_runs(count: int, samples: int) -> list[PublishedRun]:
    """Runs of the same samples, with the numbers of a real store's shapes."""
    draw = random.Random(0)
    lengths = [3900 + draw.randrange(200) for _ in range(samples)]
    runs = []
    for at in range(count):
        value = VALUE | {"method": {"name": f"m{at % 20}"}, "budget": 0.5 ** (1 + at // 20)}
        records = {}
        for index, length in enumerate(lengths):
            held, tokens = int(length * value["budget"]), draw.randrange(1, 129)
            record = dict.fromkeys(FIELDS) | {"uid": f"s-{index:04}", "subtask": f"t{index % 13}"}
            record |= {"group": record["uid"], "prompt_hash": f"{index:016x}", "target_hash": f"{index:016x}"}
            record |= {"score": draw.choice((0.0, 50.0, 100.0)), "stop": draw.choice(("eos", "length"))}
            record |= {"resident_bytes": held * 9216, "full_bytes": length * 9216, "tokens_out": tokens}
            record |= {"rows_held": float(held), "rows_seen": length, "rows_attended": held + (tokens + 1) / 2}
            record |= {"rows_seen_decoding": length + (tokens + 1) / 2}
            records[record["uid"]] = record | {
                "fidelity": {name: round_number(draw.random() ** power) for name, power in (("nll", 1), ("kl", 3))},
                "meta": {"data": "hub", "haystack": "generated", "qa": None},
            }
        runs.append(
            PublishedRun(run_hash(value), value, RunFolder(Path(), value), records, {"code": "git 1", "replay": ""})
        )
    return runs


def get_hash(run: PublishedRun) -> str:
    return run.hash


def rest(run: PublishedRun) -> tuple:
    return run.folder, run.records, run.origin


def describe(run: PublishedRun) -> tuple:
    return run.hash, run.value, run.records, run.machines, run.finished, run.planned, run.damage


def test_a_file_gives_back_what_was_published(tmp_path):
    own = make_records(0.2, 50, fidelity={"nll": 1 / 3, "kl": 0.1 + 0.2}) | {"z/0": FAILED}
    stored = [
        write_run(tmp_path, own, machine={"code": "git 1", "replay": "r"}, budget=0.2),
        write_run(tmp_path, make_records(1.0, 100), method={"name": "full"}),
    ]
    (stored[0].folder.path / "machine-2.json").write_text(json.dumps({"code": "git 0", "replay": "r"}))
    runs = [publish(run) for run in stored]
    assert runs[0].machines == [{"code": "git 0 and git 1", "replay": "r"}]
    write_published(runs, {"0a": "filters"}, tmp_path / "x.parquet")
    again, files = read_published(tmp_path / "x.parquet")
    assert files == {"0a": "filters"}
    assert [describe(run) for run in again] == [describe(run) for run in sorted(runs, key=get_hash)]
    by_hash = {run.hash: run.records for run in again}
    sample = next(iter(own.values()))
    for name in FIELDS:
        assert by_hash[stored[0].hash][sample["uid"]][name] == sample.get(name)
    assert by_hash[stored[0].hash]["z/0"]["fidelity"] == {"nll": None, "kl": None}
    assert publish(again[0]) == again[0]


def test_a_part_of_a_published_run_has_only_its_records():
    [run] = draw_runs(1, 3)
    part = run.restrict({"s-0001": run.records["s-0001"]})
    assert list(part.records) == ["s-0001"] and part.planned == 1 and part.machines == run.machines


def test_the_order_of_runs_does_not_matter(tmp_path):
    runs = draw_runs(8, 5)
    for name, some in (("a", runs), ("b", runs[::-1])):
        write_published(some, {}, tmp_path / name)
        assert [run.hash for run in read_published(tmp_path / name)[0]] == sorted(map(get_hash, runs))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_rows_are_packed(tmp_path):
    """395,000 rows in 5 MB are 12.6 bytes a row; here settings and names weigh more than in a study."""
    write_published(draw_runs(60, 130), {}, tmp_path / "x.parquet")
    assert (tmp_path / "x.parquet").stat().st_size < 13 * 60 * 130
    assert parquet.read_metadata(tmp_path / "x.parquet").num_row_groups == 1


def test_fidelity_is_rounded_and_nothing_else():
    draw = random.Random(0)
    for value in (*(draw.uniform(-20, 20) for _ in range(200)), 1e-300, 5e-324, 1e300):
        rounded = round_number(value)
        assert abs(rounded - value) <= abs(value) / (1 << 13) or abs(value) < 1e-307
        assert round_number(rounded) == rounded
    assert [round_number(value) for value in (None, 3, 0.0, math.inf)] == [None, 3, 0.0, math.inf]
    record = {"uid": "a", "score": 1 / 3, "fidelity": {"nll": 1 / 3, "kl": 0.5}, "meta": {"qa": "x"}}
    reduced = reduce_record(record)
    assert reduced["score"] == 1 / 3 and reduced["fidelity"] == {"nll": 5461 / 16384, "kl": 0.5}


def test_settings_are_written_once_for_a_run(tmp_path):
    """Also where those of all runs are longer than the largest dictionary that pyarrow writes by default."""
    runs = draw_runs(12, 8)
    long = [PublishedRun(run.hash, run.value | {"averages": ["x" * 100_000]}, *rest(run)) for run in runs]
    write_published(long, {}, tmp_path / "x.parquet")
    group = parquet.read_metadata(tmp_path / "x.parquet").row_group(0)
    sizes = {column["path_in_schema"]: column["total_uncompressed_size"] for column in group.to_dict()["columns"]}
    assert 1_200_000 < sizes["settings"] < 1_300_000


def test_no_changed_bit_of_a_page_gives_other_numbers(tmp_path):
    path = tmp_path / "x.parquet"
    runs = draw_runs(3, 40)
    write_published(runs, {}, path)
    data, draw = path.read_bytes(), random.Random(0)
    pages = len(data) - 8 - int.from_bytes(data[-8:-4], "little")  # the footer has its length behind it
    refused = 0
    for place in (draw.randrange(4, pages) for _ in range(60)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :])
        try:
            again, _ = read_published(path)
        except SettingError:
            refused += 1
        else:  # a bit that no reader looks at
            assert [describe(run) for run in again] == [describe(run) for run in sorted(runs, key=get_hash)]
    assert refused > 40


def test_pandas_reads_plain_columns(tmp_path):
    pandas = pytest.importorskip("pandas")
    runs = draw_runs(3, 5)
    write_published(runs, {}, tmp_path / "x.parquet")
    frame = pandas.read_parquet(tmp_path / "x.parquet")
    assert len(frame) == 15 and set(frame.machine) == {"cpu"} and set(frame.budget) == {"0.5"}
    assert json.loads(frame.settings[frame.run == runs[0].hash].iloc[0]) == runs[0].value
    assert frame.score.dtype == frame.kl.dtype == float


def change_rows(path: Path) -> None:
    table = parquet.read_table(path)
    settings = [text.replace('"seed": 0', '"seed": 1') for text in table["settings"].to_pylist()]
    column = pyarrow.array(settings).dictionary_encode()
    parquet.write_table(table.set_column(table.column_names.index("settings"), "settings", column), path)


def set_first(name: str, value: object) -> Callable[[Path], None]:
    """Return what gives the first row of a file another value in a column."""

    def change(path: Path) -> None:
        table = parquet.read_table(path)
        column = pyarrow.array([value, *table[name].to_pylist()[1:]], table.schema.field(name).type)
        parquet.write_table(table.set_column(table.column_names.index(name), name, column), path)

    return change


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 4] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.unlink(), "cannot be read as published runs (No such file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "cannot be read as published runs ("),
        (lambda path: path.write_bytes(b""), "cannot be read as published runs ("),
        (flip, "cannot be read as published runs ("),
        (lambda path: parquet.write_table(parquet.read_table(path)[:0], path), "has no rows"),
        (set_first("subtask", None), "subtask is missing in some row"),
        (set_first("run", None), "run is missing in some row"),
        (set_first("uid", None), "uid is missing in some row"),
        (set_first("score", 1e9), "score is not between 0 and 100 in some row"),
        (set_first("score", math.nan), "score is not between 0 and 100 in some row"),
        (set_first("resident_bytes", -1), "resident_bytes is not between 0 and inf in some row"),
        (set_first("full_bytes", 0), "full_bytes is not between 1 and inf in some row"),
        (lambda path: parquet.write_table(pyarrow.table({"run": ["x"]}), path), "holds no published runs of format 1"),
        (lambda path: parquet.write_table(parquet.read_table(path).drop_columns("kl"), path), "holds no published"),
        (change_rows, "has settings that give the hash"),
    ],
    ids=[
        *("missing", "cut", "empty", "flipped", "rows", "subtask", "run", "uid", "score", "nan", "negative", "zero"),
        *("other", "column", "settings"),
    ],
)
def test_what_is_no_such_file_is_one_line(damage, said, tmp_path):
    path = tmp_path / "x.parquet"
    write_published(draw_runs(2, 40), {}, path)
    damage(path)
    with pytest.raises(SettingError) as error:
        read_published(path)
    assert str(error.value).startswith(f"{path}: ") and said in str(error.value) and "\n" not in str(error.value)


def test_another_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(published_file, "FORMAT", 2)
    write_published(draw_runs(1, 2), {}, tmp_path / "x.parquet")
    assert json.loads(parquet.read_schema(tmp_path / "x.parquet").metadata[KEY])["format"] == 2
    monkeypatch.undo()
    with pytest.raises(SettingError, match="holds no published runs of format 1"):
        read_published(tmp_path / "x.parquet")


@pytest.mark.parametrize(
    ("device", "name"),
    [({"type": "cpu"}, "cpu"), ({"type": "cuda", "gpu": "NVIDIA H100 80GB HBM3"}, "nvidia-h100-80gb-hbm3")],
)
def test_a_machine_has_the_name_that_runs_say(device, name):
    assert name_machine(device) == name

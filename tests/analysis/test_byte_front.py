"""Scores over bytes: the front, its ties, the choice at a share and codecs at equal bytes, by their definitions."""

import csv
import io
import random
from dataclasses import replace

import numpy as np
import pytest

from kvbench.analysis.byte_front import EQUAL, ByteCell, choose_at, compare_at_equal_bytes, mark_front, order_by_bytes
from kvbench.analysis.byte_front_format import FORMATS, ByteTable, format_text
from kvbench.analysis.intervals import Values, mean
from kvbench.analysis.score_matrix import build_blocks
from kvbench.cli import results
from kvbench.store.runs import load_runs
from tests.support.made_up_runs import write_run

SAMPLES = 24  # of each of two subtasks


def write_cell(store, share, right, method="snapkv", codec="raw", budget=0.1, **changed):
    """A run that holds this share of the bytes and has the samples of these places right, in each subtask."""
    held = {"resident_bytes": round(1000 * share), "full_bytes": 1000, "weights_bytes": 30, "metadata_bytes": 10} | {
        "state_bytes": 0
    }
    known = held | {"error": None, "meta": {}, "also": {}, "target": [], "target_hash": "t", "stop": "eos", **changed}
    records = {
        f"{subtask}/{place}": {"uid": f"{subtask}/{place}", "group": f"{subtask}/{place}", "subtask": subtask}
        | {"index": place, "prompt_hash": "p", "output": "", "score": 100.0 * (place in right), **known}
        for subtask in ("one", "two")
        for place in range(SAMPLES)
    }
    own = {"method": {"name": method}, "codec": {"name": codec}, "budget": 1.0 if method == "full" else budget}
    return write_run(store, records, **own)


def build(store):
    """The only block of a store."""
    runs = load_runs(store)
    [block], refused = build_blocks(runs, runs)
    assert not refused
    return block


def compute_mean(changes):
    """The mean of these differences in each of the two subtasks, whose contexts are others."""
    return mean([Values(changes, [f"{subtask}{place}" for place in range(SAMPLES)], -100, 100) for subtask in "ab"])


def name(cells):
    return [one.name.replace("\u202f", "") for one in cells]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    write_cell(folder, 1.0, range(24), method="full")
    write_cell(folder, 0.1, range(12), budget=0.1)
    write_cell(folder, 0.2, range(20), budget=0.2)
    write_cell(folder, 0.101, range(2, 20), codec="fp8", budget=0.2)  # 18 right: more than the 12 of equal bytes
    write_cell(folder, 0.05, range(6, 13), codec="fp8", budget=0.1)  # 7 right
    write_cell(folder, 0.05, range(13, 20), method="h2o", budget=0.05)  # 7 others, in as few bytes
    write_cell(folder, 0.2, range(3), method="h2o", budget=0.2)
    return folder


def test_the_front_and_its_ties(store):
    cells = order_by_bytes(build(store))
    assert name(cells) == [
        "h2o 5%", "snapkv · fp8 10%", "snapkv 10%", "snapkv · fp8 20%", "snapkv 20%", "h2o 20%", "full cache"
    ]  # fmt: skip
    assert [one.place for one in cells] == [1, 2, 3, 4, 5, None, 6]  # equal bytes and equal scores: both
    assert [one.ties for one in cells[:2]] == [(2, 3), (1,)]
    assert cells[5].ties == ()
    assert [one.share for one in cells] == [0.05, 0.05, 0.1, 0.101, 0.2, 0.2, 1.0]


def test_ties_are_those_of_paired_comparisons(tmp_path):
    """Two cells of equal means and of the same distance from a third: only the pairs of samples tell them apart."""
    write_cell(tmp_path, 1.0, range(24), method="full")
    write_cell(tmp_path, 0.2, range(12), budget=0.2)
    write_cell(tmp_path, 0.1, range(8), budget=0.1)  # loses 4 and gains none
    write_cell(tmp_path, 0.1, range(8, 16), method="h2o", budget=0.1)  # loses 8 and gains 4
    cells = {one.name.replace("\u202f", ""): one for one in order_by_bytes(build(tmp_path))}
    assert cells["snapkv 20%"].place == 3 and cells["snapkv 10%"].cell.score == cells["h2o 10%"].cell.score
    assert 3 not in cells["snapkv 10%"].ties and 3 in cells["h2o 10%"].ties


def test_a_front_by_its_definition(store):
    draw, [some, *_] = random.Random(5), order_by_bytes(build(store))

    def make(share: float, score: float) -> ByteCell:
        return replace(some, share=share, cell=replace(some.cell, score=replace(some.cell.score, value=score)))

    def beats(one: ByteCell, other: ByteCell) -> bool:
        more, as_much = one.cell.score.value > other.cell.score.value, one.cell.score.value >= other.cell.score.value
        return one.share <= other.share and (more or (one.share < other.share and as_much))

    for _ in range(50):
        cells = [make(draw.randint(1, 6) / 10, draw.randint(0, 6) * 10.0) for _ in range(8)]
        cells.sort(key=lambda one: (one.share, -one.cell.score.value))
        front = [one for one in cells if not any(beats(other, one) for other in cells)]
        assert mark_front(cells) == [replace(one, place=place) for place, one in enumerate(front, 1)]


@pytest.mark.parametrize(
    ("share", "best"), [(0.049, None), (0.05, "snapkv · fp8 10%"), (0.1, "snapkv 10%"), (0.101, "snapkv · fp8 20%")]
)
def test_what_to_use_at_a_share(store, share, best):
    block = build(store)
    chosen = choose_at(block, order_by_bytes(block), share)
    assert name(chosen)[:1] == ([] if best is None else [best])
    if share == 0.05:
        assert name(chosen) == [best, "h2o 5%"]


def test_ties_at_a_share_hold_more_bytes_than_the_best(tmp_path):
    """A cell that holds more than the best one, but not more than the share, may be truly best too."""
    write_cell(tmp_path, 1.0, range(24), method="full")
    write_cell(tmp_path, 0.05, range(12))
    write_cell(tmp_path, 0.09, range(12, 23), method="h2o")
    write_cell(tmp_path, 0.09, range(2), method="knorm")
    block = build(tmp_path)
    assert name(choose_at(block, order_by_bytes(block), 0.1)) == ["snapkv 10%", "h2o 10%"]


def test_codecs_without_a_raw_cell_of_equal_bytes(tmp_path):
    """One that evicts nothing, and one that holds a tenth more than the raw cell."""
    write_cell(tmp_path, 1.0, range(24), method="full")
    write_cell(tmp_path, 0.5, range(24), method="full", codec="fp8")
    write_cell(tmp_path, 0.1, range(3))
    write_cell(tmp_path, 0.11, range(3), codec="fp8", budget=0.2)
    block = build(tmp_path)
    cells = order_by_bytes(block)
    assert [(one.label, one.place) for one in cells] == [
        ("snapkv", 1), ("snapkv · fp8", None), ("full · fp8", 2), ("full cache", None)
    ]  # fmt: skip
    assert compare_at_equal_bytes(block) == [] and choose_at(block, cells, 0.09) == []


@pytest.mark.parametrize(("share", "count"), [(0.2 * (1 + 0.9 * EQUAL), 1), (0.2 * (1 + 1.1 * EQUAL), 0)])
def test_equal_bytes_differ_by_little(share, count, tmp_path):
    write_cell(tmp_path, 1.0, range(24), method="full")
    write_cell(tmp_path, 0.2, range(3), budget=0.2)
    write_cell(tmp_path, share, range(3), codec="fp8", budget=0.4)
    assert len(compare_at_equal_bytes(build(tmp_path))) == count


def test_bytes_with_files_and_in_all(store):
    block = build(store)
    for size, more in (("bytes", 0), ("bytes_with_files", 0.03), ("bytes_in_all", 0.04)):
        assert [one.share for one in order_by_bytes(block, size)][:3] == pytest.approx([0.05 + more] * 2 + [0.1 + more])


def test_codecs_at_equal_bytes(store):
    """Only fp8 at 20 % holds as much as a raw cell of its method: the difference is that of the same samples."""
    [one] = compare_at_equal_bytes(build(store))
    assert (one.codec, one.labels, one.budget.replace("\u202f", "")) == ("fp8", ("snapkv",), "10%")
    assert (one.raw_share, one.coded_share) == pytest.approx((0.1, 0.101))
    changes = [100.0 * ((place in range(2, 20)) - (place in range(12))) for place in range(SAMPLES)]
    expected = compute_mean(changes)
    assert (one.change.difference, one.change.low, one.change.high) == pytest.approx(
        (expected.value, expected.low, expected.high)
    )
    assert (one.change.lost, one.change.gained) == (2 * 2, 8 * 2)


def test_the_mean_over_methods_is_one_of_samples(tmp_path):
    write_cell(tmp_path, 1.0, range(24), method="full")
    right = {"snapkv": (range(12), range(4, 20)), "h2o": (range(8, 20), range(6))}
    for method, (raw, coded) in right.items():
        write_cell(tmp_path, 0.1, raw, method=method)
        write_cell(tmp_path, 0.097, coded, method=method, codec="int4", budget=0.29)
    write_cell(tmp_path, 0.12, range(24), codec="int4", budget=0.4)  # not equal
    write_cell(tmp_path, 0.104, range(24), codec="int4", budget=0.3)  # equal, but not the nearest
    h2o, snapkv, both = compare_at_equal_bytes(build(tmp_path))
    assert (h2o.labels, snapkv.labels, both.labels) == (("h2o",), ("snapkv",), ("h2o", "snapkv"))
    assert both.coded_share == pytest.approx(0.097)
    scores = np.zeros(SAMPLES)
    for raw, coded in right.values():
        scores += [50.0 * ((place in coded) - (place in raw)) for place in range(SAMPLES)]
    expected = compute_mean(scores.tolist())
    assert (both.change.difference, both.change.low, both.change.high) == pytest.approx(
        (expected.value, expected.low, expected.high)
    )
    assert both.change.samples == 2 * SAMPLES  # not the samples of both methods


def test_text_and_markdown(store):
    table = ByteTable.of(build(store), "bytes", 0.1)
    text = " ".join(format_text([table], 120).replace("\u202f", "").split())
    assert "At 10 % of the bytes: use snapkv 10% (50.0 points, 10.0%). Ties: " in text
    assert "snapkv · fp8 20% 10.1% 75.0 [" in text and "snapkv fp8 10% 10.0% 20% 10.1% +25.0 [" in text
    assert "| snapkv · fp8 | 20 % | 10.1% | 75.0 |" in FORMATS["markdown"]([table]).replace("\u202f", " ")
    least = ByteTable.of(build(store), "bytes", 0.01).choice.replace("\u202f", "")
    assert least == "At 1 % of the bytes: no cell holds so few; the smallest is h2o 5% (29.2 points, 5.0%)."


def test_the_command(store, capsys):
    options = ["--results", str(store), "--by", "bytes"]
    assert results.main([*options, "--at", "0.05", "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["label"], row["front"], row["choice"]) for row in rows[:3]] == [
        ("h2o", "1", "tie"), ("snapkv · fp8", "2", "best"), ("snapkv", "3", "")
    ]  # fmt: skip
    assert rows[3]["codec"] == "fp8" and float(rows[3]["bytes_in_all"]) == pytest.approx(0.141)
    assert results.main([*options, "method=h2o"]) == 0
    assert "At 10 % of the bytes: use h2o" in " ".join(capsys.readouterr().out.split())  # however lines are broken
    assert results.main([*options, "method=full"]) == 0  # the full cache alone
    said = " ".join(capsys.readouterr().out.split())
    assert "no cell holds so few; the smallest is full cache (100.0 points, 100.0%)" in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--by", "byte"], "--by=byte"),
        (["--by", "bytes", "--format", "latex"], "--format=latex"),
        (["--by", "bytes", "--sort", "0.1"], "--by bytes: has its own order and columns; leave out --sort"),
        (["--by", "bytes", "--at", "2"], "--at 2: shares in (0, 1]"),
        (["--at", "0.1"], "--at=0.1: chooses for a share of the bytes; add --by bytes, or leave out --at"),
    ],
)
def test_refusals(store, capsys, given, said):
    assert results.main(["--results", str(store), *given]) == 2
    assert said in capsys.readouterr().err


def test_an_empty_store_is_refused_in_one_line(tmp_path, capsys):
    assert results.main(["--results", str(tmp_path), "--by", "bytes"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1

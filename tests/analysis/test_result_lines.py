"""The lines of measured cells: ranks, fidelity and paired gains against their definitions, and the file they are in."""

import csv
import io
import random
from itertools import combinations

import pytest

from kvbench.analysis import result_lines
from kvbench.analysis.paired import compare_subtasks
from kvbench.analysis.result_lines import format_lines, list_part_files, make_lines, read_lines, read_part
from kvbench.analysis.score_matrix import build_blocks
from kvbench.store.published_file import write_published
from kvbench.store.published_runs import publish
from kvbench.store.runs import load_runs
from kvbench.validation import SettingError
from tests.support.made_up_runs import write_run
from tests.support.report_store import make_records
from tests.support.single_tables import compare_scores

ADA, KIVI, FULL = {"name": "ada", "mode": "interpolate"}, {"name": "kivi", "bits": 2}, {"name": "full"}
MACHINE = {"code": "git 0123 dirty", "replay": "r0"}


def draw_records(budget: float, chance: float, seed: int, count: int = 40, **changed: object) -> dict[str, dict]:
    """Records of one subtask, right with this chance, with fidelity."""
    draw, found = random.Random(seed), {}
    for uid, record in make_records(budget, 100, count=count).items():
        if record["subtask"] == "vt":
            own = {
                "score": 100.0 * (draw.random() < chance),
                "fidelity": {"nll": 1.0, "kl": draw.randrange(1024) / 1024},
            }
            found[uid] = record | own | {"group": uid} | changed
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    for question, less in (("visible", 0.0), ("hidden", 0.5)):
        also = {"question": question, "machine": MACHINE}
        write_run(folder, draw_records(1.0, 1.0, 1), method=FULL, **also)
        for at, (name, chance) in enumerate({"snapkv": 0.95, "knorm": 0.5, "random": 0.05, "tova": 0.9}.items()):
            write_run(folder, draw_records(0.2, chance - less, at), method={"name": name}, budget=0.2, **also)
        write_run(
            folder, draw_records(0.2, 0.55 - less, 8), method={"name": "knorm"}, allocator=ADA, budget=0.2, **also
        )
    write_run(folder, draw_records(0.2, 0.4, 9), method={"name": "knorm"}, codec=KIVI, budget=0.2, machine=MACHINE)
    write_run(folder, draw_records(0.2, 0.4, 9), finish=False, method={"name": "h2o"}, budget=0.2, machine=MACHINE)
    return load_runs(folder)


def find(lines, **wanted):
    [line] = [own for own in lines if all(own[name] == value for name, value in wanted.items())]
    return line


def test_every_finished_run_has_one_line_that_says_where_it_was_made(runs):
    lines = make_lines(runs)
    assert len(lines) == 13 and {line["hash"] for line in lines} == {run.hash for run in runs if run.finished}
    assert {(line["machine"], line["code"], line["replay"]) for line in lines} == {("cpu", "git 0123 dirty", "r0")}
    assert {line["n"] for line in lines} == {40}
    full = find(lines, method="full", question="visible")
    assert (full["rank_first"], full["difference"], full["question_gain"]) == (None, None, None)


def test_ranks_follow_from_all_pairs_at_a_joint_level(runs):
    lines = [line for line in make_lines(runs) if line["question"] == "visible" and line["method"] != "full"]
    stored = {run.hash: run for run in runs}
    first, last = ({line["hash"]: own for line in lines} for own in (1, len(lines)))
    [block] = [own for own in build_blocks(runs, runs)[0] if own.question == "visible"]
    level = 1 - 0.05 / 2 / 15
    for one, other in combinations([line["hash"] for line in lines], 2):
        found = compare_subtasks(block.paired.pair(stored[one], stored[other]), None, level)
        if found.low > 0 or found.high < 0:
            low, high = (one, other) if found.low > 0 else (other, one)
            first[low] += 1
            last[high] -= 1
    assert {line["hash"]: (line["rank_first"], line["rank_last"]) for line in lines} == {
        name: (first[name], last[name]) for name in first
    }
    assert find(lines, method="snapkv")["rank_last"] <= 3 and find(lines, method="random")["rank_first"] >= 4


def test_cells_of_other_bytes_are_ranked_apart(tmp_path):
    write_run(tmp_path, draw_records(1.0, 1.0, 1), method=FULL)
    for held, name in ((0.2, "snapkv"), (0.2, "tova"), (0.1, "knorm")):  # all with a budget of 0.2
        write_run(tmp_path, draw_records(held, 0.9 if held == 0.2 else 0.0, 2), method={"name": name}, budget=0.2)
    lines = make_lines(load_runs(tmp_path))
    ranks = {
        name: tuple(find(lines, method=name)[f"rank_{part}"] for part in ("first", "last", "of", "class"))
        for name in ("snapkv", "tova", "knorm", "full")
    }
    assert ranks == {
        "snapkv": (1, 2, 2, "20.0% of the bytes"),
        "tova": (1, 2, 2, "20.0% of the bytes"),
        "knorm": (1, 1, 1, "10.0% of the bytes"),
        "full": (None,) * 4,
    }


def test_gains_are_paired_with_the_same_cell_without_it(runs):
    lines, stored = make_lines(runs), {run.hash: run for run in runs}

    def compare(one, other):
        scores = [[record["score"] for record in stored[own["hash"]].records.values()] for own in (one, other)]
        found = compare_scores(*scores, list(stored[one["hash"]].records))
        return found.difference, found.low, found.high

    def read(line, name):
        return tuple(line[f"{name}{end}"] for end in ("", "_low", "_high"))

    knorm = {"method": "knorm", "question": "visible"}
    plain = find(lines, **knorm, allocator="uniform", codec="raw")
    ada, kivi = find(lines, **knorm, allocator="ada"), find(lines, **knorm, codec="kivi")
    hidden = find(lines, method="knorm", question="hidden", allocator="ada")
    assert read(ada, "allocator_gain") == compare(plain, ada)
    assert read(kivi, "codec_gain") == compare(plain, kivi)
    assert read(hidden, "question_gain") == compare(ada, hidden)
    assert read(plain, "allocator_gain") == read(kivi, "allocator_gain") == (None, None, None)


def test_codecs_are_paired_with_fewer_raw_rows_of_equal_bytes(tmp_path):
    write_run(tmp_path, draw_records(1.0, 1.0, 1), method=FULL)
    for budget, chance in ((0.2, 0.3), (0.4, 0.6)):
        write_run(tmp_path, draw_records(budget, chance, 2), method={"name": "knorm"}, budget=budget)
    many = draw_records(0.2, 0.9, 3, rows_held=160)
    write_run(tmp_path, many, method={"name": "knorm"}, codec=KIVI, budget=0.8)
    few = draw_records(0.4, 0.9, 3)  # as many rows as the raw cell of equal bytes
    write_run(tmp_path, few, method={"name": "knorm"}, codec=KIVI | {"bits": 4}, budget=0.4)
    write_run(tmp_path, draw_records(0.3, 0.9, 3), method={"name": "knorm"}, codec=KIVI, budget=0.9)
    runs = load_runs(tmp_path)
    lines, stored = make_lines(runs), {run.hash: run for run in runs}
    [coded] = [line for line in lines if line["bytes_gain"] is not None]
    [raw] = [line for line in lines if line["hash"] == coded["bytes_gain_from"]]
    assert (coded["codec"], coded["budget"], raw["codec"], raw["budget"]) == ("kivi", 0.8, "raw", 0.2)
    scores = [[record["score"] for record in stored[line["hash"]].records.values()] for line in (raw, coded)]
    change = compare_scores(*scores, list(stored[raw["hash"]].records))
    assert (coded["bytes_gain"], coded["bytes_gain_low"]) == (change.difference, change.low)
    assert coded["bytes_gain_high"] == change.high and coded["bytes_gain_sign"] == 1


def test_signs_hold_for_the_cells_of_a_protocol_and_of_a_budget(runs):
    lines, stored = make_lines(runs), {run.hash: run for run in runs}
    signs = {}
    for question in ("visible", "hidden"):
        full = find(lines, method="full", question=question)
        column = [line for line in lines if line["question"] == question and line["method"] != "full"]
        [block] = [own for own in build_blocks(runs, runs)[0] if own.question == question]
        for line in column:
            both = block.paired.pair(stored[full["hash"]], stored[line["hash"]])
            first = compare_subtasks(both, None, 1 - 0.025 / len(column))  # the first step of Holm's procedure
            last = compare_subtasks(both)
            sign = line["difference_sign"]
            assert sign == (-1 if first.high < 0 else 0) or (sign == -1 and last.high < 0)
            signs[question, line["label"]] = sign
    assert signs["visible", "snapkv"] == 0 and signs["visible", "random"] == signs["hidden", "snapkv"] == -1
    assert find(lines, method="full", question="hidden")["question_gain_sign"] is None
    assert find(lines, method="snapkv", question="hidden")["question_gain_sign"] == -1
    assert find(lines, method="random", question="hidden")["question_gain_sign"] == 0


def test_signs_are_joint_within_a_protocol_and_not_across(runs, monkeypatch):
    sizes = []

    def sign(averages):
        sizes.append(len(averages))
        return [0] * len(averages)

    monkeypatch.setattr("kvbench.analysis.result_lines.sign_changes", sign)
    make_lines(runs)
    gains = [1, 1, 1, 5]  # the allocator with each question, the codec, and the hidden question
    columns = protocols = [5, 6]  # one budget each, so they are the same: kivi has no cell with a hidden question
    assert sorted(sizes) == sorted([*gains, *columns, *protocols])


def test_the_worst_subtask_is_that_with_the_lowest_paired_difference(tmp_path, runs):
    cut = make_records(0.2, 90, count=12)
    cut |= {uid: record | {"score": 50.0} for uid, record in cut.items() if record["subtask"] == "vt"}
    write_run(tmp_path, make_records(1.0, 100, count=12), method=FULL)
    write_run(tmp_path, cut, method={"name": "knorm"}, budget=0.2)
    stored = load_runs(tmp_path)
    lines, [block] = make_lines(stored), build_blocks(stored, stored)[0]
    [run] = [run for run in stored if not run.full]
    scores = dict(zip(block.paired.places, block.paired.pair(block.full.run, run), strict=True))
    lost = {name: compare_subtasks([own]).difference for name, own in scores.items()}
    assert len(lost) == 3 and min(lost, key=lost.get) == "vt"
    line, change = find(lines, method="knorm"), compare_subtasks([scores["vt"]])
    assert [line[f"worst{end}"] for end in ("_subtask", "", "_low", "_high")] == [
        *("vt", change.difference, change.low, change.high),
    ]
    single = find(make_lines(runs), method="tova", question="visible")
    assert find(lines, method="full")["worst_subtask"] is single["worst_subtask"] is None


def test_fidelity_is_a_mean_with_an_interval(runs):
    line = find(make_lines(runs), method="tova", question="visible")
    run = next(own for own in runs if own.hash == line["hash"])
    kl = [record["fidelity"]["kl"] for record in run.records.values()]
    assert line["kl"] == pytest.approx(sum(kl) / len(kl)) and line["kl_low"] < line["kl"] < line["kl_high"]
    assert line["nll"] == 1.0


def test_labels_name_the_files_of_cells_and_no_setting_that_is_not_used(tmp_path):
    for path, bits in (("0123456789abcdef", None), ("0123456789abcdef", 4), ("fedcba9876543210", None)):
        codec = {"name": "palu", "path": path, "bits": bits}
        write_run(tmp_path, draw_records(1.0, 0.9, 1), method=FULL, codec=codec, budget=1.0)
    write_run(tmp_path, draw_records(1.0, 1.0, 1), method=FULL)
    lines = make_lines(load_runs(tmp_path), {"0123456789abcdef": "palu-50"})
    assert sorted(line["label"] for line in lines) == [
        "full cache",
        "full · palu · codec.bits=4 · codec.path=palu-50",
        "full · palu · codec.path=fedcba9876543210",
        "full · palu · codec.path=palu-50",
    ]


def test_a_file_hides_the_usual_settings_of_its_codec(tmp_path):
    def write(path: str, **changed: object) -> None:
        codec = {"name": "delta", "path": path, "stride": 10, "nearest": 4, "bits": None, "base": {"name": "raw"}}
        write_run(tmp_path, draw_records(1.0, 0.9, 1), method=FULL, codec=codec | changed, budget=1.0)

    own, other = "0123456789abcdef", "fedcba9876543210"
    write(own)
    write(own, bits=4)
    write(own, base={"name": "kivi", "bits": 4, "group": 32})
    write(other, stride=20)
    write_run(tmp_path, draw_records(1.0, 1.0, 1), method=FULL)
    known = {own: "file", other: "stride-20"}
    runs = load_runs(tmp_path)
    assert sorted(line["label"] for line in make_lines(runs, known)) == [
        "full cache",
        "full · delta · codec.base=kivi · codec.path=file",
        "full · delta · codec.bits=4 · codec.path=file",
        "full · delta · codec.path=file",
        "full · delta · codec.stride=20 · codec.path=stride-20",
    ]
    assert sum("codec.stride=10" in line["label"] for line in make_lines(runs)) == 3


def test_labels_that_would_be_the_same_leave_nothing_out(tmp_path):
    for depth in (None, 32):  # 32 is the usual one, and a label never names a setting without a value
        codec = {"name": "delta", "path": "0123456789abcdef", "depth": depth}
        write_run(tmp_path, draw_records(1.0, 0.9, 1), method=FULL, codec=codec, budget=1.0)
    write_run(tmp_path, draw_records(1.0, 1.0, 1), method=FULL)
    labels = {line["label"] for line in make_lines(load_runs(tmp_path), {"0123456789abcdef": "file"})}
    assert labels == {"full cache", "full · delta", "full · delta · codec.depth=32"}


def test_a_csv_has_the_lines_with_rounded_numbers(runs):
    lines = make_lines(runs)
    read = list(csv.DictReader(io.StringIO(format_lines(lines))))
    assert [own["hash"] for own in read] == [own["hash"] for own in lines] and list(read[0]) == list(lines[0])
    assert read[0]["difference"] == "" and float(read[1]["score"]) == round(lines[1]["score"], 4)
    assert "-0.0" not in format_lines([{"difference": -1e-9}])


def test_a_run_without_its_full_cache_is_refused(runs):
    with pytest.raises(SettingError, match="no finished run of the full cache"):
        make_lines([run for run in runs if not run.full])


def test_a_file_of_rows_gives_the_lines_of_the_store(runs, tmp_path, monkeypatch):
    finished = [run for run in runs if run.finished]
    write_published([publish(run) for run in finished], {"0123456789abcdef": "file"}, tmp_path / "x.parquet")
    lines = read_lines(tmp_path / "x.parquet")
    assert lines == make_lines(runs) and len(lines) == 13
    means = read_part(tmp_path / "x.parquet").subtasks
    for line in lines:  # all subtasks weigh the same
        assert len(means[line["hash"]]) == line["subtasks"]
        assert sum(means[line["hash"]].values()) / line["subtasks"] == pytest.approx(line["score"])
    monkeypatch.setattr(result_lines, "publish", lambda run: run)
    assert make_lines(runs) == lines  # from whole records


def test_a_file_of_rows_names_the_files_of_cells(tmp_path):
    names = {"0123456789abcdef": "palu-50", "fedcba9876543210": "palu-30"}
    for path in names:
        codec = {"name": "palu", "path": path, "bits": None}
        write_run(tmp_path, draw_records(1.0, 0.9, 1), method=FULL, codec=codec, budget=1.0)
    write_run(tmp_path, draw_records(1.0, 1.0, 1), method=FULL)
    write_published(list(map(publish, load_runs(tmp_path))), names, tmp_path / "x.parquet")
    lines = read_lines(tmp_path / "x.parquet")
    assert lines == make_lines(load_runs(tmp_path), names)
    labels = {line["label"].removeprefix("full · palu · codec.path=") for line in lines}
    assert labels == {"full cache", "palu-50", "palu-30"}


def test_a_file_of_rows_gives_bytes_warnings_and_samples_that_failed(tmp_path, monkeypatch):
    failed = {"error": "out_of_memory", "score": None, "stop": "error"}
    own = draw_records(0.2, 0.5, 2)
    beside = {"weights_bytes": 70, "metadata_bytes": 50, "state_bytes": 30, "rows_seen": 200}
    own = {uid: record | beside for uid, record in own.items()}
    uid = next(iter(own))
    gone = (
        "resident_bytes",
        "full_bytes",
        "rows_held",
        "rows_attended",
        "rows_seen_decoding",
        "fidelity",
        "tokens_out",
    )
    own[uid] = {name: value for name, value in own[uid].items() if name not in gone} | failed
    write_run(tmp_path, own, method={"name": "tova"}, budget=0.2)
    meta = {"data": "miniature", "haystack": "generated", "qa": "generated"}
    write_run(tmp_path, draw_records(1.0, 1.0, 1, meta=meta), method=FULL)
    runs = load_runs(tmp_path)
    write_published([publish(run) for run in runs], {}, tmp_path / "x.parquet")
    lines = read_lines(tmp_path / "x.parquet")
    monkeypatch.setattr(result_lines, "publish", lambda run: run)
    assert lines == make_lines(runs) and [line["n"] for line in lines] == [39, 39]
    answered = [record for name, record in own.items() if name != uid]
    tokens = sum(record["tokens_out"] for record in answered) / len(answered)
    assert find(lines, method="tova")["tokens_out"] == pytest.approx(tokens)
    shares = [find(lines, method="tova")[name] for name in ("bytes_held", "bytes_with_files", "bytes_in_all")]
    assert shares == pytest.approx([0.2, 0.27, 0.35])
    assert find(lines, method="tova")["warnings"].count("Generated text (haystack; questions and answers)") == 1


def test_the_files_of_parts_are_listed_and_one_that_cannot_be_read_is_named(tmp_path):
    names = "m/0.parquet", "m/a.parquet", "n/a.parquet"
    for name in (*names, "m/a.zip", "n/x.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert list_part_files(tmp_path) == [tmp_path / name for name in names]
    for name in ("n/x.csv", "n/none.parquet"):
        with pytest.raises(SettingError, match=f"{name}: cannot be read"):
            read_lines(tmp_path / name)

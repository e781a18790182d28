"""A bundle of drawn answers: drawn evenly, whole with its checksum, and one line if a part of it is damaged."""

import json
import subprocess
from collections import Counter

import pytest

from kvbench.analysis import bundle
from kvbench.analysis.bundle import MANIFEST, TABLE, verify_bundle, write_drawn_bundle
from kvbench.analysis.drawn_answers import draw_answers
from kvbench.analysis.submissions import read_submission
from kvbench.cli import bundle as bundle_command
from kvbench.cli import verify
from kvbench.store.checksums import CHECKSUMS, read_checksums
from kvbench.store.runs import load_runs
from kvbench.validation import SettingError
from tests.support.bundles import pack, signed, unpacked
from tests.support.made_up_runs import write_run
from tests.support.report_store import TASKS, make_records


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Five runs of 3 subtasks with 4 samples each; one run failed on a subtask."""
    folder = tmp_path_factory.mktemp("store")
    write_run(folder, make_records(1.0, 100, count=4, asked="what?"), method={"name": "full"})
    for budget in (0.1, 0.2, 0.3, 0.4):
        records = make_records(budget, 60, count=4, asked="what?")
        if budget == 0.4:
            failed = {uid: record for uid, record in records.items() if record["subtask"] == TASKS[0]}
            records |= {uid: record | {"error": "out_of_memory"} for uid, record in failed.items()}
        write_run(folder, records, machine={"code": "git 0123", "sources": {"kvbench": "0a"}}, budget=budget)
    return folder


@pytest.fixture(scope="module")
def made(store, tmp_path_factory):
    path = tmp_path_factory.mktemp("bundle") / "drawn.zip"
    write_drawn_bundle(store, {}, path, 12, 3)
    return path


def spread(runs):
    """The numbers of answers of runs, of subtasks, and of the subtasks of each run."""
    pairs = [(run.hash, record["subtask"]) for run in runs for record in run.records.values()]
    return Counter(name for name, _ in pairs), Counter(subtask for _, subtask in pairs), Counter(pairs)


@pytest.mark.parametrize("count", [1, 4, 12, 33, 56])
def test_answers_are_drawn_evenly_and_again_with_their_seed(store, count):
    stored = load_runs(store)
    drawn = draw_answers(stored, count, 3)
    of_runs, of_subtasks, of_both = spread(drawn)
    assert of_runs.total() == count
    assert not any(record["error"] for run in drawn for record in run.records.values())
    if count <= 33:  # as long as no run or subtask has given all that it has
        assert max(of_runs.values()) - min(of_runs[run.hash] for run in stored) <= 1
        assert count < 12 or max(of_subtasks.values()) - min(of_subtasks.values()) <= 2
        whole = {name for name, _ in of_both if len([own for own, _ in of_both if own == name]) == len(TASKS)}
        for name in whole:
            counts = [of_both[name, subtask] for subtask in TASKS]
            assert max(counts) - min(counts) <= 1
    again, other = draw_answers(stored[::-1], count, 3), draw_answers(stored, count, 4)
    listed = [[(run.hash, *run.records) for run in runs] for runs in (drawn, again, other)]
    assert listed[0] == listed[1] and (count in (1, 56) or listed[0] != listed[2])


def test_a_bundle_of_drawn_answers_holds_them_and_no_more(store, made):
    verified = verify_bundle(made)
    assert verified.records == 12 and verified.blocks == []
    assert verified.drawn == {"seed": 3, "records": 56, "runs": 5}
    files = unpacked(made)
    assert files[TABLE].count(b"\n") == 13
    stored = {run.hash: run.records for run in load_runs(store)}
    for line in files[TABLE].decode().splitlines()[1:]:
        assert line.split(",")[0] in stored
    records = [json.loads(line) for name, own in files.items() if "records" in name for line in own.splitlines()]
    assert len(records) == 12 and not any("asked" in own or "target" in own for own in records)
    assert all("sources" not in json.loads(own) for name, own in files.items() if "machine" in name)


def test_the_command_writes_a_checksum_and_a_line_for_the_page(store, tmp_path, capsys):
    path = tmp_path / "new" / "drawn.zip"
    for count, name in ((12, "drawn.zip"), (5, "other.zip"), (6, "drawn.zip")):
        given = ["--results", str(store), "--draw", str(count), "--seed", "3", "--out", str(path.with_name(name))]
        assert bundle_command.main(given) == 0
    out = capsys.readouterr().out.splitlines()[-1]
    digest = verify_bundle(path).digest
    about = "6 answers of 5 runs, drawn with --draw 6 --seed 3 from 56 answers of 5 runs, evenly by run and subtask"
    assert out == f"[drawn.zip](drawn.zip): {about}; 0.01 MB, sha256 `{digest}`."
    assert read_checksums(path.parent)["drawn.zip"] == digest and len(read_checksums(path.parent)) == 2
    subprocess.run(["sha256sum", "-c", "--strict", CHECKSUMS], cwd=path.parent, check=True, stdout=subprocess.DEVNULL)
    assert verify.main([str(path)]) == 0
    assert capsys.readouterr().out == f"{about}. All checksums fit.  sha256 {digest}\n"


@pytest.mark.parametrize(
    "given, line",
    [
        (["--draw", "57"], "--draw=57: the runs have 56 answers"),
        (["--draw", "0"], "--draw=0: a whole number of at least 1"),
        (["--draw", "2", "--seed", "x"], "--seed=x: a whole number of at least 0"),
        (["--seed", "1"], "--seed=1: draws the answers of --draw N, which is missing"),
        (["--draw", "2", "--average", "each"], "--draw: no score follows from drawn answers; leave out --average"),
    ],
)
def test_what_cannot_be_drawn_is_one_line_and_leaves_files_alone(store, tmp_path, capsys, given, line):
    path = tmp_path / "drawn.zip"
    path.write_bytes(b"there")
    assert bundle_command.main(["--results", str(store), "--out", str(path), *given]) == 2
    assert capsys.readouterr().err == f"kvbench: {line}\n"
    assert path.read_bytes() == b"there" and [*tmp_path.iterdir()] == [path]


def test_a_bundle_that_exceeds_a_limit_leaves_the_old_one(store, made, tmp_path, monkeypatch):
    path = tmp_path / "drawn.zip"
    path.write_bytes(made.read_bytes())
    monkeypatch.setattr(bundle, "MOST_ENTRIES", 10)
    with pytest.raises(SettingError, match="more than 10 entries"):
        write_drawn_bundle(store, {}, path, 20, 0)
    assert path.read_bytes() == made.read_bytes() and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("share", [0, 0.01, 0.3, 0.6, 0.9, 0.99])
def test_a_bundle_that_is_cut_says_what_to_do(made, tmp_path, capsys, share):
    content, cut = made.read_bytes(), tmp_path / "cut.zip"
    places = [int(share * len(content)) + more for more in range(20)] + [len(content) - 1 - int(100 * share)]
    for place in places:
        cut.write_bytes(content[:place])
        assert verify.main([str(cut)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        assert err.startswith(f"kvbench: bundle={cut}: ") and err.endswith("; get the file again\n")


def test_a_damaged_part_is_named_with_what_to_do(made, tmp_path, capsys):
    """A member that is missing, another checksum of a member, and one beside the bundle."""
    files, path = unpacked(made), tmp_path / "drawn.zip"
    [name, *_] = [name for name in files if name.endswith("records.jsonl")]
    missing = {own: content for own, content in files.items() if own != name}
    changed = files | {name: files[name].replace(b'"eos"', b'"eot"')}
    cases = {
        f"{name}: not in both the archive and its manifest, once; get the file again": (pack(missing), None),
        f"{name}: was changed, the manifest has another checksum; get the file again": (pack(changed), None),
        f"{CHECKSUMS} beside it has another checksum; get both files again": (
            made.read_bytes(),
            f"{'0' * 64}  drawn.zip\n",
        ),
    }
    for line, (content, checksums) in cases.items():
        path.write_bytes(content)
        if checksums is not None:
            (tmp_path / CHECKSUMS).write_text(checksums)
        assert verify.main([str(path)]) == 2
        assert capsys.readouterr().err == f"kvbench: bundle={path}: {line}\n"


@pytest.mark.parametrize("line", ["x", f"{'0' * 63}  drawn.zip", f"{'0' * 64}  a/b", f"{'0' * 64}  a\n{'0' * 64}  a"])
def test_damaged_checksums_are_one_line_and_stay(store, made, tmp_path, capsys, line):
    (tmp_path / CHECKSUMS).write_text(line)
    number = line.count("\n") + 1
    path = tmp_path / "drawn.zip"
    assert bundle_command.main(["--results", str(store), "--draw", "2", "--out", str(path)]) == 2
    expected = f"{tmp_path / CHECKSUMS}: line {number} is no checksum of another file; get it again"
    assert capsys.readouterr().err == f"kvbench: {expected}\n"
    assert not path.exists() and (tmp_path / CHECKSUMS).read_text() == line


def test_a_forged_part_is_found(made, tmp_path):
    files, path = unpacked(made), tmp_path / "drawn.zip"
    manifest = json.loads(files[MANIFEST])

    def change(**parts) -> bytes:
        return pack(files | {MANIFEST: json.dumps(manifest | parts).encode()})

    cases = [
        (signed(files | {TABLE: files[TABLE].replace(b"visible", b"hidden")}), "question of run"),
        (change(drawn=None), "does not say how answers were drawn"),
        (change(drawn={"seed": 1}), "does not say how answers were drawn"),
        (change(drawn=manifest["drawn"] | {"seed": "1"}), "does not say how answers were drawn"),
        (change(format=2), "its format has none"),
    ]
    for content, line in cases:
        path.write_bytes(content)
        with pytest.raises(SettingError, match=line):
            verify_bundle(path)


def test_a_board_refuses_drawn_answers(made):
    with pytest.raises(SettingError, match="drawn.zip: holds drawn answers; a board needs whole runs"):
        read_submission(made, None)

"""`kvbench diagnose`: cells join each other, a stopped command goes on, and wrong words are refused at once."""

import csv

import pytest

from kvbench.analysis.diagnoses import read_diagnoses
from kvbench.cli import diagnose as command
from kvbench.interfaces.task import Sample
from kvbench.models.checkpoint import Checkpoint
from kvbench.runs.prompt import Prompt
from kvbench.store.study_lines import read_study
from kvbench.studies import diagnosis_pass
from kvbench.studies.diagnosis_pass import find_needles

CHECKPOINT = {"layers": 1}
TASK = ["task=ruler", "task.length=320", "task.subtasks=[niah_single_1]", "device=cpu"]


@pytest.fixture
def diagnose(checkpoint, tmp_path, monkeypatch, capsys):
    """Runs the command on a tiny checkpoint; gives exit code, output, errors, and the runs that read a prompt."""
    monkeypatch.chdir(tmp_path)
    made = diagnosis_pass.WatchedRun

    def call(*words: str) -> tuple[int, str, str, list[str]]:
        names = []

        def record(*own: object, **more: object) -> object:
            names.append(own[1].method.name)
            return made(*own, **more)

        with monkeypatch.context() as patch:
            patch.setattr(diagnosis_pass, "WatchedRun", record)
            code = command.main([*words, "model=hf", f"model.path={checkpoint}"])
        return code, *capsys.readouterr(), names

    return call


def test_cells_join_those_of_before_and_a_stopped_command_goes_on(diagnose, tmp_path):
    code, out, err, names = diagnose("method=sink,knorm", "budget=0.2", *TASK, "prompts=2", "question=hidden")
    assert code == 0, err
    assert names == ["full", "sink", "knorm"] * 2
    assert "sink budget=0.2" in out and "knorm budget=0.2" in out and "2 prompts of ruler" in out
    folder = tmp_path / out.splitlines()[0]
    own = read_diagnoses(read_study(folder))[1]
    assert own.means["rows"].prompts == 2 and 0.1 < own.means["rows"].value <= 0.2
    assert 0 <= own.means["recall"].low <= own.means["recall"].high <= 1 and own.worst == [0]
    assert own.heads["local_answer"].keys() == {(0, 0), (0, 1), (0, 2), (0, 3)} and own.needles
    before = (folder / "diagnosis.csv").read_text()
    [path] = folder.glob(f"prompts/{read_study(folder).about['cells']['knorm budget=0.2']['files']}-1.csv")
    path.unlink()
    code, out, err, names = diagnose("method=knorm", "budget=0.2", *TASK, "prompts=2", "question=hidden")
    assert names == ["full", "knorm"] and (folder / "diagnosis.csv").read_text() == before
    assert "sink" not in out.partition("\n")[2]


def test_the_cost_is_relative_to_the_prefill(diagnose, tmp_path, monkeypatch):
    seconds = iter(range(1000))
    monkeypatch.setattr(diagnosis_pass, "now", lambda device: next(seconds) ** 2)  # each step takes longer
    monkeypatch.setattr(diagnosis_pass, "REPEATS", 1)
    code, out, err, _ = diagnose("method=knorm", "budget=0.2", "tokens=128", "--cost", "cost.csv", *TASK)
    assert code == 0, err
    [row] = csv.DictReader((tmp_path / "cost.csv").read_text().splitlines())
    assert [float(row[name]) for name in ("prefill_seconds", "full_seconds", "cell_seconds", "diagnose_seconds")] == [
        11, 24, 15, 17,
    ]  # fmt: skip
    assert float(row["ratio"]) == pytest.approx((17 - 24 - 15) / 11, abs=1e-3) and row["cell"] == "knorm budget=0.2"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["method=full"], "method=full: the full cache loses nothing; choose a method that cuts"),
        (["method=snap", "budget=0.2"], "method=snap: did you mean snapkv? "),
        (["method=snapkv", "budget=1.5"], "budget=1.5"),
        (["method=snapkv", "budget=0.2", "seed=1,2"], "seed=1,2: one value; only method, allocator, codec"),
        (["method=snapkv", "budget=0.2", "window=400"], "window=400: niah_single_1"),
        (["method=snapkv", "budget=0.2", "window=none"], "window=none: a whole number of at least 1"),
        (["method=snapkv", "budget=0.2", "share=2"], "share=2: a number above 0 and at most 1"),
        (["snapkv", "budget=0.2"], "snapkv: only settings follow diagnose, such as method=snapkv"),
        (["method=snapkv", "budget=0.2", "limit=1"], "limit=1: prompts= says how many samples are read"),
        (["method=snapkv", "budget=0.2", "text="], "text=: a file or a folder of texts"),
    ],
)  # fmt: skip
def test_wrong_words_are_refused_before_weights_are_loaded(diagnose, monkeypatch, words, line):
    monkeypatch.setattr(Checkpoint, "weights", None)
    code, out, err, names = diagnose(*words, *TASK)
    assert (code, out, names) == (2, "", []) and err.count("\n") == 1
    assert err.startswith(f"kvbench: {line}")


def test_caches_that_do_not_fit_are_refused(diagnose, monkeypatch):
    monkeypatch.setattr(Checkpoint, "weights", None)
    monkeypatch.setattr(diagnosis_pass, "count_free_bytes", lambda run: 100_000)
    code, _, err, _ = diagnose("method=snapkv", "budget=0.5", "block_size=64", *TASK)
    assert code == 2 and "weights and 2.5 full caches of " in err and "are free (cpu); shorter prompts or" in err


def test_needles_are_the_tokens_of_whole_words():
    context = "a 12 b 123 c 12"
    ends = (1, 3, 4, 6, 8, 10, 12, 13, 15)
    sample = Sample("0", "s", context, "", "", ("12",), 4)
    assert find_needles(sample, Prompt(tuple(range(9)), (), ends=ends)) == (1, 2, 8)
    assert find_needles(Sample("0", "s", context, "", "", ("1", " "), 4), Prompt((), (), ends=ends)) == ()

"""What sharing a prompt saves, as a line; random weights that read text."""

import csv

import pytest

from kvbench.efficiency.sharing_bench import Round, SharingTimes, run_sharing_bench
from kvbench.models.random_weights import RandomCheckpoint
from kvbench.validation import SettingError
from tests.support.command_line import run_cli

QUICK = ["task.length=512", "task.subtasks=[niah_single_1]", "limit=1", "device=cpu"]


def test_a_line_is_appended_for_all_runs_together_and_alone(checkpoint, tmp_path, capsys):
    model = ["model=hf", f"model.path={checkpoint}"]
    for _ in range(2):
        run_sharing_bench(["method=knorm", "budget=0.2,0.4", "rounds=1", *model, *QUICK, f"results={tmp_path}"])
    [path] = (tmp_path / "efficiency").iterdir()
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert path.name == "share-cpu.csv" and len(lines) == 2
    for line in lines:
        assert (line["methods"], line["budgets"], line["runs"]) == ("full knorm", "1.0 0.2 0.4", "3")
        assert (line["length"], line["samples"], line["rounds"]) == ("512", "1", "1")
        assert float(line["ratio"]) == float(line["alone_s"]) / float(line["together_s"])
        assert line["decoded_together"] == "1"
    out = capsys.readouterr().out
    assert out.count("3 runs of 1 samples, 512 tokens: ") == 2 and out.count("\nalone: ") == 2
    assert SharingTimes(*(tuple(map(Round, own)) for own in ((1.0, 4.0, 2.0), (6.0, 5.0, 9.0)))).ratio == 3.0


@pytest.mark.parametrize(
    ("own", "line"),
    [
        (["method=snapkv,h2o"], "method: cells that read"),
        (["block_size=64"], "method: cells that read"),
        (["method=full"], "method: cells that read"),
        (["rounds=0"], "rounds=0: a whole number"),
        (["method=quest", "allocator=ada"], "allocator=ada: quest"),
        (["task=nothing"], "task=nothing: choose one that kvbench run --help lists"),
        (["task.lenght=512"], "task.lenght: no such setting"),
        (["--quick"], "--quick: cannot be read; a value with = "),
    ],
)
def test_what_cannot_be_compared_is_one_line(own, line, tmp_path):
    with pytest.raises(SettingError, match=f"^{line}"):
        run_sharing_bench([*own, *QUICK, f"results={tmp_path}"])
    assert not list(tmp_path.iterdir())


def test_a_file_of_other_columns_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("kvbench.efficiency.sharing_bench.measure_sharing", None)
    (tmp_path / "efficiency").mkdir()
    (tmp_path / "efficiency" / "share-cpu.csv").write_text("machine,ratio\n")
    with pytest.raises(SettingError, match="share-cpu.csv: has other columns than this version writes"):
        run_sharing_bench([*QUICK, f"results={tmp_path}"])


def test_random_weights_may_borrow_a_tokenizer(monkeypatch, capsys):
    plain, lent = RandomCheckpoint.like("llama31_8b", 0), RandomCheckpoint.like("llama31_8b", 0, "reference")
    assert not plain.reads_text and lent.reads_text and lent.longest() == 131072
    assert lent.name == "random_llama31_8b" and lent.identity().startswith(plain.identity() + " ")
    assert max(lent.tokenizer().get_vocab().values()) < lent.config().vocab_size
    for own, line in (("foo", "model.tokenizer=foo: choose one of null, reference"), ("reference", "model.tokenizer=")):
        code, out, err = run_cli(["model=random", "model.like=tiny", f"model.tokenizer={own}"], monkeypatch, capsys)
        assert (code, out) == (2, "") and err.startswith(f"kvbench: {line}") and err.count("\n") == 1

"""`papers study`: one pass serves all studies, a stopped one goes on, and wrong words are refused before anything."""

import csv
import math
from dataclasses import replace

import pytest

from kvbench.cli import study as command
from kvbench.engine.generation import GenerationContext
from kvbench.models.checkpoint import Checkpoint
from kvbench.papers import exhibits
from kvbench.papers.exhibits import load_exhibits
from kvbench.store.study_lines import Line, find_studies, format_lines, read_lines, read_study
from kvbench.studies import cost, passes, policy_reads
from kvbench.validation import SettingError

CHECKPOINT = {"layers": 1}
TASK = ["task=ruler", "task.length=320", "task.subtasks=[niah_single_1,niah_single_2]", "device=cpu"]


@pytest.fixture
def study(checkpoint, tmp_path, monkeypatch, capsys):
    """Runs the command on a tiny checkpoint; gives exit code, output, errors, and the prompts that were read."""
    monkeypatch.chdir(tmp_path)
    read = passes.read_prompt

    def call(*words: str) -> tuple[int, str, str, list[str]]:
        names = []
        with monkeypatch.context() as patch:
            for module in (passes, cost):
                patch.setattr(module, "read_prompt", lambda *own: names.append(own[1].name) or read(*own))
            code = command.main([*words, "model=hf", f"model.path={checkpoint}"])
        return code, *capsys.readouterr(), names

    return call


def test_prompts_are_read_once_for_all_studies_and_never_again(study, tmp_path, monkeypatch):
    few = {name: own for name, own in load_exhibits("keydiff").items() if name in ("keydiff_figure14", "keydiff_lemma")}
    monkeypatch.setattr(
        exhibits, "load_exhibits", lambda paper, name: few if paper == "keydiff" else load_exhibits(paper, name)
    )
    code, out, err, names = study("keydiff", *TASK, "prompts=2")
    assert code == 0, err
    folder = tmp_path / out.splitlines()[0]
    assert len(names) == 2 and names[0].startswith("niah_single_1") and names[1].startswith("niah_single_2")
    assert "keydiff_figure14: The mean key" in out and "of 8, 2 prompts" in out
    found = read_study(folder)
    assert {line.study for line in found.lines} >= {"key_geometry", "received_attention"}
    [share] = [line for line in found.lines if line.quantity == "opposite"]
    assert 0 <= share.low <= share.value <= share.high <= 1
    before = {file.name: file.read_text() for file in folder.glob("*.csv")}
    assert study("centroidkv", "figure03", *TASK, "prompts=2")[3] == []  # what it needs has been computed
    assert {file.name: file.read_text() for file in folder.glob("*.csv")} == before
    for path in folder.glob("prompts/received_attention-*-1.csv"):  # as if it had been stopped before the second prompt
        path.unlink()
    assert study("keydiff", *TASK, "prompts=2")[3] == names[1:]
    assert {file.name: file.read_text() for file in folder.glob("*.csv")} == before


def test_prompts_are_read_once_for_each_method_and_never_again(study, tmp_path, monkeypatch):
    monkeypatch.setattr(passes, "source_hash", "-".join)
    monkeypatch.setattr(policy_reads, "source_hash", "-".join)
    read, begun = GenerationContext.prefill, []
    monkeypatch.setattr(
        GenerationContext, "prefill", lambda own, ids: begun.append(own.choice.method.name) or read(own, ids)
    )
    for methods in (["sink", "tova", "keydiff"], []):
        code, out, err, names = study("keydiff", "figure12", *TASK, "prompts=1")
        assert (code, names, begun) == (0, [], methods), err
        begun.clear()
    assert out.count("keydiff_figure12: ") == 4 and "of 2;" in out
    code, _, err, _ = study("keydiff", "figure12", "--cost", "cost.csv")
    assert (code, err) == (
        2,
        "kvbench: --cost: not measured for these exhibits, because they read no prompt into a full cache\n",
    )


def test_lengths_are_those_of_all_samples_unless_limit_is_given(study, tmp_path):
    task = ["task=longbench", "task.subtasks=[trec,lcc]", "device=cpu", "prompts=1"]
    counts = []
    for words in ([], ["limit=2"]):
        code, out, err, names = study("keydiff", "table09", *task, *words)
        assert (code, names) == (0, []), err
        [mean] = [
            own for own in read_study(tmp_path / out.strip()).lines if (own.series, own.x) == ("mean of all", 2048)
        ]
        counts.append(mean.n)
    assert counts[0] > counts[1] == 4
    code, out, err, _ = study("keydiff", "table09", "text=book.txt")
    assert (code, out, err) == (2, "", "kvbench: text=book.txt: it is about the samples of a task; leave text out\n")


def test_a_text_is_cut_into_prompts(study, tmp_path):
    (tmp_path / "book.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
    code, out, err, names = study("deltakv", "text=book.txt", "tokens=150", "prompts=2", "block_size=64")
    assert (code, names) == (0, ["0", "1"]), err
    assert "deltakv_figure02b: The nearest" in out and "figure04" not in out  # this model has no compressors
    assert err.count("kvbench: deltakv_figure04b is left out: codec.path=null: ") == 1
    [found] = find_studies(tmp_path / "results")
    assert found.about["prompts"] | {"ids": ""} == {
        "name": "book", "count": 2, "tokens": 150, "ids": "", "longest": 150,
    }  # fmt: skip
    assert found.about["block_size"] == 64


def test_costs_are_ratios_to_the_prefill_alone(study, tmp_path):
    code, out, err, names = study("keydiff", "figure14", "tokens=128", "block_size=64", "--cost", "cost.csv")
    assert (code, names) == (0, ["random"] * 6), err  # each twice
    rows = list(csv.DictReader((tmp_path / "cost.csv").read_text().splitlines()))
    assert [(row["study"], row["tokens"], row["block_size"]) for row in rows] == [
        ("none", "128", "64"), ("key_geometry", "128", "64"), ("all", "128", "64"),
    ]  # fmt: skip
    alone = float(rows[0]["seconds"])
    assert all(float(row["ratio"]) == pytest.approx(float(row["seconds"]) / alone, rel=0.01) for row in rows)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    "words, line",
    [
        (["keydif"], "PAPER=keydif: did you mean keydiff? Choose one of centroidkv, "),
        (["keydiff", "figure41"], "EXHIBIT=figure41: "),
        (["all", "figure14"], "figure14: after a paper one exhibit"),
        (["keydiff", "method=knorm"], "method=knorm: a study reads into a full cache"),
        (["keydiff", "layers=2"], "layers=2: the model has no full cache in layer 2; its layers are 0 to 0, "),
        (["keydiff", "prompts=0"], "prompts=0: a whole number of at least 1"),
        (["keydiff", "text=none.txt"], "text=none.txt: none.txt cannot be read"),
        (["keydiff", "text=raw.txt"], "text=raw.txt: raw.txt is not UTF-8"),
        (["keydiff", "text=short.txt"], "text=short.txt: 2 tokens, fewer than tokens=4096"),
        (["keydiff", "text=short.txt", "tokens=9999"], "tokens=9999: from 128 to 4096"),
        (["deltakv", "figure04a"], "codec.path=null: model=checkpoint"),
        (["deltakv", "codec.path=none"], "codec.path=none: cannot read the compressors"),
        (["keydiff", "codec.path=none"], "codec.path=none: none of these exhibits shows codes"),
        (["keydiff", "task.lenght=512"], "task.lenght"),
    ],
)
def test_wrong_words_are_refused_before_a_model_is_loaded(study, tmp_path, monkeypatch, words, line):
    (tmp_path / "raw.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "short.txt").write_text("a")
    monkeypatch.setattr("kvbench.models.checkpoint.Checkpoint.weights", lambda *_: pytest.fail("loaded"))
    code, out, err, _ = study(*words)
    assert (code, out) == (2, "") and err.count("\n") == 1 and err.startswith(f"kvbench: {line}"), err
    assert not (tmp_path / "results").exists()


def test_a_text_in_blocks_does_not_pass_a_change_of_frequencies(study, tmp_path, monkeypatch):
    (tmp_path / "book.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
    layout = Checkpoint.layout
    monkeypatch.setattr(Checkpoint, "layout", lambda own: replace(layout(own), rope_switch=448))
    words = ("keydiff", "figure14", *TASK, "text=book.txt", "prompts=1")
    code, _, err, names = study(*words, "tokens=449", "block_size=64")
    assert code == 2 and err.startswith("kvbench: block_size=64: this model's RoPE changes its frequencies beyond 448")
    assert names == [] and study(*words, "tokens=448", "block_size=64")[0] == 0


def test_numbers_are_averaged_by_their_place():
    one = [Line("s", "q", 0.2, layer=1, n=3), Line("s", "share", 1.0, series="holds", n=4)]
    two = [Line("s", "q", 0.4, layer=1, n=5), Line("s", "share", 1.0, series="holds", n=4), Line("s", "map", 7.0, x=2)]
    mean, share, single = passes.average_prompts([one, two])
    assert (mean.value, mean.n, mean.prompts) == (pytest.approx(0.3), 8, 2)
    assert mean.high - mean.value == pytest.approx(12.7062 * 0.1, rel=1e-4)  # t with one degree of freedom
    assert share.value == share.high == 1 and 0 < share.low < 1 and share.n == 8
    assert (single.value, single.low, single.prompts) == (7.0, None, 1)
    [never] = passes.average_prompts([[Line("s", "share", 0.0, series="holds", n=4)]] * 2)
    assert f"{never.low:.1f}" == "0.0"  # not -0.0
    [ratio] = passes.average_prompts([[Line("s", "ratio", math.inf)], [Line("s", "ratio", 2.0)]])
    assert (ratio.value, ratio.low, ratio.prompts) == (math.inf, None, 2)


def test_lines_are_read_as_they_were_written(tmp_path):
    lines = [Line("a", "q", 0.1235, "keys", 3, None, -1.5, None, 10, 0.1, 0.2, 2), Line("a", "r", -7.0)]
    file = tmp_path / "a.csv"
    file.write_text(format_lines(lines))
    assert read_lines(file, "a") == lines
    file.write_text(format_lines(lines).replace("-7", "?"))
    with pytest.raises(SettingError, match=r"a.csv line 3: a value is missing or no number"):
        read_lines(file, "a")
    file.write_text("a,b\n")
    with pytest.raises(SettingError, match="a.csv: not a file of kvbench papers study"):
        read_lines(file, "a")

"""task=ruler_kvpress: kvpress's prompts to the byte, its scores, its files, and what is refused."""

import json
import re
from pathlib import Path

import pytest
from datasets import Dataset
from pyarrow import Table, parquet
from transformers import AutoTokenizer

from kvbench.cli.data import examine
from kvbench.interfaces.task import Sample
from kvbench.models.embedded import REFERENCE
from kvbench.runs.prompt import encode
from kvbench.tasks.ruler.kvpress_port import RulerKvpress
from kvbench.tasks.ruler.task import FAMILIES, SUBTASKS
from kvbench.validation import SettingError
from tests.support.command_line import assert_refused, run_cli

FILE = "test-00000-of-00001.parquet"
NAMES = {"niah_single_1": "niah_single_1", "vt": "ruler_vt", "qa_1": "ruler_qa_squad", "qa_2": "ruler_qa_hotpot"}


def make_row(task: str, index: int) -> dict:
    row = {"context": f"Text {index}. \n\n", "question": f"What is {index}?\n", "answer_prefix": " It is"}
    return row | {"answer": [str(index), "a\nb"], "task": task, "max_new_tokens": 30 + index}


ROWS = [make_row(task, index) for index in range(3) for task in NAMES]  # as published: tasks in any order


@pytest.fixture
def folder(tmp_path) -> Path:
    """The data set in two files."""
    (tmp_path / "set" / "8192").mkdir(parents=True)
    for part, rows in enumerate((ROWS[:5], ROWS[5:])):
        parquet.write_table(Table.from_pylist(rows), tmp_path / "set" / "8192" / f"test-{part:05d}-of-00002.parquet")
    return tmp_path / "set"


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (None, ("", "\n")),
        ("{% for m in messages %}<u>{{ m.content }}</u><a>{% endfor %}", ("<u>", "</u><a>")),
    ],
)
def test_prompts_are_those_of_kvpress(folder, template, ends):
    """Without a template kvpress separates question and answer prefix by a line break."""
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    tokenizer.chat_template = template
    task = RulerKvpress(path=str(folder), data_dir=8192, subtasks=["ruler_vt", "niah_single_1"], limit=2)
    made = list(task.samples(tokenizer, 5, 4096))
    assert [sample.uid for sample in made] == [
        f"{name}/8192/{index}" for name in ("ruler_vt", "niah_single_1") for index in (0, 1)
    ]
    for sample in made:
        row = make_row(sample.subtask.removeprefix("ruler_"), int(sample.uid[-1]))
        prompt = encode(tokenizer, sample)
        context = tokenizer.decode(prompt.context, skip_special_tokens=True)
        whole = ends[0] + row["context"] + row["question"] + ends[1] + row["answer_prefix"]
        assert tokenizer.decode(prompt.ids, skip_special_tokens=True) == whole and whole.startswith(context)
        assert (sample.context, sample.answers) == (row["context"], tuple(row["answer"]))
        assert sample.max_new_tokens == row["max_new_tokens"] and sample.meta == {"data": "local"}


def test_scores_are_those_of_kvpress():
    """Control characters go, as in kvpress's calculate_metrics; NVIDIA/RULER makes line breaks of them."""

    def score(subtask: str, output: str, *answers: str) -> float:
        return RulerKvpress().score(Sample("u", subtask, "", "", "", answers, 1), output).score

    assert score("niah_multivalue", "12, 34 and 5", "12", "34", "56", "78") == 50.0
    assert score("ruler_vt", " ABC\n", "abc") == 100.0
    assert score("niah_single_1", "12\n34", "1234") == 100.0
    assert score("ruler_qa_squad", "In Rome.", "Paris", "rome") == 100.0
    assert score("ruler_qa_hotpot", "", "Paris") == 0.0
    reference = RulerKvpress().reference
    assert reference(Sample("u", "ruler_vt", "", "", "", ("a", "b"), 1)) == "a, b"
    assert reference(Sample("u", "ruler_qa_squad", "", "", "", ("a", "b"), 1)) == "a"


def test_every_copy_of_the_data_is_the_same(folder, tmp_path, monkeypatch):
    asked = []

    def load_dataset(name, config, split, revision):
        asked.append((name, config, split, revision))
        return Dataset.from_list(ROWS)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    rows = [row | {"max_new_tokens": str(row["max_new_tokens"])} for row in ROWS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"data_dir": 8192, "subtasks": list(NAMES.values())}
    tasks = [RulerKvpress(path=str(path), **own) for path in ("hub", folder, tmp_path / "rows.jsonl")]
    assert len({task.fingerprint() for task in tasks}) == 1
    assert asked == [("simonjegou/ruler", "8192", "test", "24adceac8a0e6532936e8d721cd9e9084d2e4686")]
    assert tasks[0].inventory() == dict.fromkeys(NAMES.values(), 3)
    said = examine("ruler_kvpress", str(folder), ["task.data_dir=8192", "task.subtasks=ruler_vt"])
    assert re.search("^ruler_vt +3 rows$", said, re.MULTILINE)


BAD_ROWS = {  # changes of a row, and what is said of it
    "no column": ({"answer_prefix": ...}, "has no column answer_prefix"),
    "wrong type": ({"context": ["a"]}, ": context is list, expected str"),
    "no limit": ({"max_new_tokens": 0}, ": max_new_tokens is 0, expected at least 1"),
    "no answer": ({"answer": []}, ": answer is not a list of strings with at least one"),
    "unknown task": ({"task": "ruler_vt"}, ": task is 'ruler_vt', expected one of niah_single_1, niah_single_2, "),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_row_that_cannot_be_used_is_named(tmp_path, case):
    changes, said = BAD_ROWS[case]
    (tmp_path / "4096").mkdir()
    row = {name: value for name, value in (make_row("vt", 1) | changes).items() if value is not ...}
    parquet.write_table(Table.from_pylist([row]), tmp_path / "4096" / FILE)
    with pytest.raises(SettingError, match=f"^task.path: {FILE} row 0 ?{re.escape(said)}"):
        RulerKvpress(path=str(tmp_path), subtasks="ruler_vt").check()


def test_what_cannot_be_used_is_one_line_and_nothing_is_written(folder, tmp_path, monkeypatch, capsys):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    for said, *settings in (
        (f"task.path={folder}: a file, or a folder with 4096/{FILE}", f"task.path={folder}"),
        ("task.path: no rows of niah_single_2, niah_single_3,", f"task.path={folder}", "task.data_dir=8192"),
        ("task.data_dir=8k: a whole number of at least 1", "task.data_dir=8k"),
        ("task.subtasks=vt: choose one of all, niah_single_1", "task.subtasks=vt"),
        ("task.path=hub: simonjegou/ruler/4096 is out of reach (", "task.path=hub"),
    ):
        assert_refused(run_cli(["task=ruler_kvpress", "device=cpu", *settings], monkeypatch, capsys), said, work)


def test_the_miniature_has_prompts_of_ruler():
    assert RulerKvpress().inventory() == dict.fromkeys(SUBTASKS, 4)
    made = RulerKvpress(limit=1).samples(AutoTokenizer.from_pretrained(REFERENCE), 0, 4096)
    for sample, family in zip(made, FAMILIES, strict=True):
        assert (sample.subtask, sample.max_new_tokens) == (family.name, family.new_tokens)
        assert sample.meta == {"data": "miniature"} and sample.answer_prefix


@pytest.mark.full
def test_the_miniature_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = ["task.subtasks=niah_single_1", "limit=1", "method=snapkv", "budget=0.9", "device=cpu"]
    code, out, _ = run_cli(["task=ruler_kvpress", "question=hidden", *settings], monkeypatch, capsys)
    assert code == 0 and "task: ruler_kvpress (miniature)\n" in out and re.search("^niah_single_1 ", out, re.MULTILINE)

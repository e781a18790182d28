"""The task that docs/add-a-task.md makes from a file of questions: short, right, and wrong rows are one line."""

import sys
from importlib.util import module_from_spec, spec_from_file_location

import pytest

from kvbench.config import compose
from kvbench.models.checkpoint import Checkpoint
from kvbench.models.embedded import REFERENCE
from kvbench.runs.task_checks import CHECKS, TaskUnderTest, run_checks
from tests.docs.pages import read_blocks
from tests.support.repository import ROOT

BLOCKS = read_blocks(ROOT / "docs" / "add-a-task.md")
MODULE = "kvbench.tasks.questions"


@pytest.fixture
def questions(tmp_path, monkeypatch) -> TaskUnderTest:
    """The page's task in a folder of its own, with the page's file of questions."""
    shown = {block.file: block.text for block in BLOCKS if block.file}
    for file in ("tasks/questions.py", "conf/task/questions.yaml"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(shown[file])
    spec = spec_from_file_location(MODULE, tmp_path / "tasks" / "questions.py")
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, MODULE, module)
    spec.loader.exec_module(module)
    if not (ROOT / "conf" / "task" / "questions.yaml").exists():  # whoever tries the page adds it
        monkeypatch.setattr(compose, "_added", [tmp_path / "conf"])
    monkeypatch.chdir(tmp_path)
    [makes_file] = [block.text for block in BLOCKS if block.language == "python" and not block.file]
    exec(compile(makes_file, "add-a-task.md", "exec"), {})
    return TaskUnderTest("questions", ["task.path=capitals.jsonl"], Checkpoint("reference", str(REFERENCE)))


def test_thirty_lines_make_a_benchmark_of_a_file(questions, capsys):
    [text] = [block.text for block in BLOCKS if block.file == "tasks/questions.py"]
    assert sum(bool(line.strip()) for line in text.splitlines()[1:]) <= 30
    assert run_checks(questions) == 0
    out = capsys.readouterr().out
    assert out.count("ok ") == len(CHECKS) - 1 and "4 samples, 1 subtasks" in out  # it has no `reference`
    assert questions.samples[1].answers == ("Tessel",)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "capitals.jsonl line 5 is not JSON"),
        ("[1]", "capitals.jsonl line 5 is not an object with columns"),
        ('{"context": "a", "question": "b"}', "capitals.jsonl line 5 has no column answer"),
        ('{"context": "a", "question": "b", "answer": 3}', "capitals.jsonl line 5: answer is int, expected str"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(line, reason, questions, tmp_path, capsys):
    with (tmp_path / "capitals.jsonl").open("a") as file:
        print(line, file=file)
    assert run_checks(questions) == len(CHECKS)
    assert f"task.path: {reason}" in capsys.readouterr().out.splitlines()[0]

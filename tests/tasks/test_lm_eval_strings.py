"""Prompts that are read from lm-eval: a changed sentence, a changed file or a missing package refuses the task."""

import shutil
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbench.tasks.common import lm_eval_strings
from kvbench.tasks.longbench import chinese as longbench_chinese
from kvbench.tasks.longbench import prompts as longbench
from kvbench.tasks.ruler import templates as ruler
from kvbench.tasks.scbench import metrics as scbench_metrics
from kvbench.tasks.scbench import prompts as scbench
from kvbench.validation import SettingError
from tests.support.command_line import assert_refused, run_cli

CHANGES = {  # reader -> its setting, a file of lm_eval/tasks, and a piece of what is read from it
    ruler.load_wordings: [
        ("task=ruler", "ruler/niah_utils.py", "Make sure to memorize it."),
        ("task=ruler", "ruler/prepare_niah.py", "mentioned in the provided text are"),
        ("task=ruler", "ruler/prepare_niah.py", "The grass is green."),
        ("task=ruler", "ruler/vt_utils.py", "assgined"),
        ("task=ruler", "ruler/cwe_utils.py", "Memorize the ones that appear most often."),
        ("task=ruler", "ruler/fwe_utils.py", "track the frequency of each coded word"),
        ("task=ruler", "ruler/qa_utils.py", 'DOCUMENT_PROMPT = "Document'),
    ],
    lambda: longbench.load_lm_eval_prompt("qasper"): [
        ("task=longbench", "longbench/qasper.yaml", "You are given a scientific article"),
        ("task=longbench", "longbench/lcc.yaml", "Please complete the code"),  # another subtask's
        ("task=longbench", "longbench/lsht.yaml", "下面是一些例子"),
    ],
    longbench_chinese.load_punctuation: [("task=longbench", "longbench/metrics.py", "〔〕")],
    scbench.load_forms: [
        ("task=scbench", "infinitebench/infinitebench_kv_retrieval.yaml", "Extract the value"),
        ("task=scbench", "infinitebench/utils.py", "Read the book and answer the question"),
    ],
    scbench_metrics.chinese_punctuation: [("task=scbench", "longbench/metrics.py", "〔〕")],
}
CASES = [(read, *own) for read, listed in CHANGES.items() for own in listed]
CACHES = (
    *(ruler.load_wordings, longbench._load_texts, longbench_chinese.load_punctuation),
    *(scbench.load_forms, scbench_metrics.chinese_punctuation),
)


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """The folder of tasks of a copy of lm-eval that is read instead of the installed one."""
    installed = Path(find_spec("lm_eval").submodule_search_locations[0], "tasks")
    for folder in ("ruler", "longbench", "infinitebench"):
        shutil.copytree(installed / folder, tmp_path / "lm_eval" / "tasks" / folder)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "lm_eval")])
    monkeypatch.setattr(lm_eval_strings, "find_spec", lambda name: spec)
    for own in CACHES:
        own.cache_clear()
    yield tmp_path / "lm_eval" / "tasks"
    for own in CACHES:
        own.cache_clear()


def test_a_copy_of_the_tested_version_is_accepted(tasks):
    for read in CHANGES:
        read()


@pytest.mark.parametrize(("read", "setting", "file", "piece"), CASES, ids=[f"{c[2]}: {c[3][:20]}" for c in CASES])
def test_a_changed_template_is_refused(tasks, monkeypatch, read, setting, file, piece):
    text = (tasks / file).read_text("utf-8")
    assert piece in text
    (tasks / file).write_text(text.replace(piece, piece[:-1] + "x"), "utf-8")
    monkeypatch.setattr(lm_eval_strings, "version", lambda name: "0.4.14")
    with pytest.raises(SettingError) as error:
        read()
    assert str(error.value) == (
        f"{setting}: lm-eval 0.4.14 has other prompts than lm-eval 0.4.13, which this task was tested with, so scores "
        "would not be comparable; install lm-eval==0.4.13"
    )


@pytest.mark.parametrize(("read", "setting", "file", "piece"), CASES, ids=[f"{c[2]}: {c[3][:20]}" for c in CASES])
def test_a_missing_or_empty_file_is_refused(tasks, read, setting, file, piece):
    for spoil in (lambda path: path.write_text(""), Path.unlink):
        spoil(tasks / file)
        with pytest.raises(SettingError, match=f"^{setting}: lm-eval 0.4.13 lacks the prompts that this task reads"):
            read()


def test_what_is_not_read_may_change(tasks):
    for file in ("ruler/niah_utils.py", "infinitebench/utils.py", "longbench/metrics.py"):
        with open(tasks / file, "a") as own:
            own.write("\nADDED = 'text'\n")
    for read in CHANGES:
        read()


def test_without_lm_eval_the_task_says_so(tasks, monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(lm_eval_strings, "version", missing)
    with pytest.raises(SettingError, match="^task=ruler: .* which is missing; install lm-eval==0.4.13$"):
        ruler.load_wordings()


@pytest.mark.parametrize(
    ("setting", "file", "piece"),
    [
        ("task=ruler", "ruler/niah_utils.py", "Make sure to memorize it."),
        ("task=longbench", "longbench/qasper.yaml", "You are given a scientific article"),
        ("task=scbench", "infinitebench/utils.py", "Read the book and answer the question"),
    ],
)
def test_a_run_with_changed_prompts_is_one_line(tasks, tmp_path, monkeypatch, capsys, setting, file, piece):
    (tasks / file).write_text((tasks / file).read_text("utf-8").replace(piece, ""), "utf-8")
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert_refused(run_cli(["device=cpu", setting], monkeypatch, capsys), f"{setting}: lm-eval 0.4.13 has oth", folder)

"""SCBench's prompts, token limits and metrics (microsoft/MInference 0ff346d, scbench/eval_utils.py).

A wording is what a task writes around its rows: the text before the context, what the first turn asks, and what later
turns ask where there is no chat template. (choice_eng is an exception: with a chat template, its later turns ask as the
first one does.) Slots are {input}, {prefix} (mf: "What is ...?", made from the input) and the options {A} to {D}.

SCBench took some prompts over from InfiniteBench, and lm-eval has these too. They are read from the installed lm-eval.
"The the" is upstream's spelling.
"""

import ast
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from kvbench.interfaces.task import Graded
from kvbench.tasks.common.lm_eval_strings import parse_source, read_strings
from kvbench.tasks.scbench import metrics

LM_EVAL_STRINGS = "761f0b1d765b3b40c6909aa8948736b7ae7d1a474de9c31ab73326045176d6d7"  # hash for lm-eval 0.4.13
SUMMARY, NEEDLE = "scbench_summary", "scbench_passkey"  # a turn's column `task` in summary_with_needles
QUESTION = "Question: {input}\nAnswer:"
CHOICE = "Question: {input}\nA. {A}\nB. {B}\nC. {C}\nD. {D}\n\n"


@dataclass(frozen=True)
class Metric:
    """The function that grades a turn, and the most tokens of its answer."""

    grade: Callable[[str, tuple[str, ...]], Graded]
    new_tokens: int


@dataclass(frozen=True)
class Wording:
    """What a task writes around its rows.

    Attributes:
        before: The text before the context.
        asked: What a turn asks.
        later: What turns after the first one ask. ``None``: the same as `asked`; also the same with a chat template,
            but for mf.
        shared_before: `before` in the mode shared_context, where that differs.
        shared_asked: `asked` in the mode shared_context, where that differs.
        prefilled: The beginning of the answers of later turns, with a chat template.
    """

    before: str = ""
    asked: str = "{input}"
    later: str | None = None
    shared_before: str | None = None
    shared_asked: str | None = None
    prefilled: str = ""


@dataclass(frozen=True)
class TaskForm:
    """One task of SCBench.

    Attributes:
        name: The task's name in the benchmark.
        metrics: The metric of a turn by the turn's column `task`. The key is ``None`` where turns have no such column.
        wording: What the task writes around its rows.
        answer: Type of the reference answers.
        choices: Whether a turn has options to choose from.
    """

    name: str
    metrics: Mapping[str | None, Metric]
    wording: Wording = Wording()
    answer: type | tuple[type, ...] = str
    choices: bool = False

    @property
    def numbers(self) -> bool:
        """Whether the context is a list of numbers, as in mf."""
        return self.answer is not list and self.answer is not str


def _one_metric(grade: Callable[[str, tuple[str, ...]], Graded], new_tokens: int) -> dict[str | None, Metric]:
    return {None: Metric(grade, new_tokens)}


# All tasks whose metric needs no code execution, in the order of the benchmark's script. The text before the context of
# kv and choice_eng is read from lm-eval, see `load_forms`.
_FORMS = (
    TaskForm("scbench_kv", _one_metric(metrics.contains_label, 150)),
    TaskForm("scbench_prefix_suffix", _one_metric(metrics.contains_label, 150)),
    TaskForm("scbench_vt", _one_metric(metrics.share_found, 30), answer=list),
    TaskForm(
        "scbench_qa_eng",
        _one_metric(metrics.contains_any, 40),
        Wording("Read the book and answer the question. Be very concise in your answer.\n\n", QUESTION),
    ),
    TaskForm(
        "scbench_qa_chn",
        _one_metric(metrics.chinese_f1, 40),
        Wording("阅读以下书籍然后回答问题。\n\n", "问题：{input}\n答案："),
    ),
    TaskForm(
        "scbench_choice_eng",
        _one_metric(metrics.choice_score, 40),
        Wording("", CHOICE + "The the correct answer is", CHOICE + "The letter of the correct answer is"),
        choices=True,
    ),
    TaskForm("scbench_many_shot", _one_metric(metrics.contains_any_character, 10)),
    TaskForm("scbench_summary", _one_metric(metrics.rouge, 200), Wording(prefilled="This paper")),
    TaskForm(
        "scbench_mf",
        _one_metric(metrics.first_number, 5),
        Wording("{prefix}\n\n", "{input}", "{prefix}\n\n{input}", "{input}\n\n", "{prefix}\n\n{input}"),
        answer=(int, float),
    ),
    TaskForm(
        "scbench_summary_with_needles",
        {SUMMARY: Metric(metrics.rouge, 800), NEEDLE: Metric(metrics.first_digits, 15)},
    ),
)
NAMES = tuple(form.name for form in _FORMS)


@cache
def load_forms() -> tuple[TaskForm, ...]:
    """Load all tasks, in the order of NAMES, with the prompts that are read from lm-eval.

    Raises:
        SettingError: The installed lm-eval has other prompts than the tested one.
    """
    before = read_strings("task=scbench", "infinitebench", _read_files, LM_EVAL_STRINGS)
    return tuple(
        replace(form, wording=replace(form.wording, before=before[form.name])) if form.name in before else form
        for form in _FORMS
    )


def hash_prompts() -> str:
    """Hash every prompt string and token limit, and the punctuation of the Chinese metric."""
    plain = [
        [form.name, asdict(form.wording), [[task, metric.new_tokens] for task, metric in form.metrics.items()]]
        for form in load_forms()
    ]
    return hashlib.sha256(json.dumps([plain, metrics.chinese_punctuation()]).encode()).hexdigest()[:16]


def _read_files(folder: Path) -> dict[str, str]:
    """Read the text before the context of two tasks from the files of lm-eval's folder `infinitebench`."""
    return {
        "scbench_kv": _find_description((folder / "infinitebench_kv_retrieval.yaml").read_text(encoding="utf-8")),
        "scbench_choice_eng": _find_book_heading(parse_source(folder / "utils.py")),
    }


def _find_description(text: str) -> str:
    """Find the `description` in the text of a task's YAML file."""
    description = re.search(r"^description: (\".*\")$", text, re.MULTILINE)
    if description is None:
        raise LookupError("no description of infinitebench_kv_retrieval")
    return json.loads(description[1])


def _find_book_heading(utils: ast.Module) -> str:
    """Find what stands before the book of a multiple-choice question."""
    for node in ast.walk(utils):
        if isinstance(node, ast.FunctionDef) and node.name == "doc_to_text_longbook_choice":
            text = next(part for part in ast.walk(node) if isinstance(part, ast.JoinedStr))
            if isinstance(text.values[0], ast.Constant):
                return str(text.values[0].value)
    raise LookupError("no prompt of longbook_choice")

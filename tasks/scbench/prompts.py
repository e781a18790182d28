"""What each task of SCBench asks: prompts, token limits, metrics (microsoft/MInference 0ff346d, scbench/eval_utils.py).

A wording has the text before the context, what the first turn asks, and what later turns ask where there is no chat
template (with one choice_eng asks as in the first turn). Slots: {input}, {prefix} (mf: "What is ...?" made of the
input) and the options {A} to {D}. Prompt strings that also stand in the installed lm-eval package (of InfiniteBench,
which SCBench took over) are read from its source, not imported; "The the" is upstream's.
"""

import ast
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from kvbench.interfaces.task import Graded
from kvbench.tasks.scbench import metrics

SUMMARY, NEEDLE = "scbench_summary", "scbench_passkey"  # a turn's column `task` in summary_with_needles
QUESTION = "Question: {input}\nAnswer:"
CHOICE = "Question: {input}\nA. {A}\nB. {B}\nC. {C}\nD. {D}\n\n"


@dataclass(frozen=True)
class Metric:
    """How a turn is graded, and the most tokens of its answer."""

    grade: Callable[[str, tuple[str, ...]], Graded]
    new_tokens: int


@dataclass(frozen=True)
class Wording:
    """Of multi_turn, and of shared_context where that differs."""

    before: str = ""
    asked: str = "{input}"
    later: str | None = None  # None: as `asked`; with a chat template too, but for mf
    shared_before: str | None = None  # None: as `before`
    shared_asked: str | None = None  # None: as `asked`
    prefilled: str = ""  # with a chat template: what the answers of later turns begin with


@dataclass(frozen=True)
class TaskForm:
    """One task: metrics by the `task` of a turn (None: turns have none), and what its rows hold."""

    name: str
    metrics: Mapping[str | None, Metric]
    wording: Wording = Wording()
    answer: type | tuple[type, ...] = str
    choices: bool = False

    @property
    def numbers(self) -> bool:
        """mf: the context is a list of numbers."""
        return self.answer is not list and self.answer is not str


@cache
def load_forms() -> tuple[TaskForm, ...]:
    """All tasks whose metric needs no code execution, in the order of the benchmark's script."""
    return (
        TaskForm("scbench_kv", _one_metric(metrics.contains_label, 150), Wording(_retrieval())),
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
            Wording(_choice(), CHOICE + "The the correct answer is", CHOICE + "The letter of the correct answer is"),
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


def hash_prompts() -> str:
    """Hash of every prompt string and token limit, and of the punctuation of the Chinese metric."""
    plain = [
        [form.name, asdict(form.wording), [[task, own.new_tokens] for task, own in form.metrics.items()]]
        for form in load_forms()
    ]
    return hashlib.sha256(json.dumps([plain, metrics.chinese_punctuation()]).encode()).hexdigest()[:16]


def _one_metric(grade: Callable[[str, tuple[str, ...]], Graded], new_tokens: int) -> dict[None, Metric]:
    return {None: Metric(grade, new_tokens)}


def _retrieval() -> str:
    """The `description` of lm-eval's infinitebench_kv_retrieval."""
    found = re.search(r"^description: (\".*\")$", _source("infinitebench_kv_retrieval.yaml"), re.MULTILINE)
    if found is None:
        raise LookupError("lm-eval's infinitebench_kv_retrieval has no description: is lm-eval==0.4.13 installed?")
    return json.loads(found[1])


def _choice() -> str:
    """What lm-eval's InfiniteBench puts before the book of a multiple-choice question."""
    for node in ast.walk(ast.parse(_source("utils.py"))):
        if isinstance(node, ast.FunctionDef) and node.name == "doc_to_text_longbook_choice":
            text = next(part for part in ast.walk(node) if isinstance(part, ast.JoinedStr))
            return text.values[0].value
    raise LookupError("lm-eval's InfiniteBench has no multiple choice: is lm-eval==0.4.13 installed?")


def _source(name: str) -> str:
    package = find_spec("lm_eval").submodule_search_locations[0]
    return Path(package, "tasks", "infinitebench", name).read_text(encoding="utf-8")

"""LongBench's 21 tasks in its order (THUDM/LongBench 2e00731, LongBench/: eval.py, pred.py, config/).

Five of them are Chinese. The others are English or code, and CATEGORIES has these 16. LongBench-E has 13 of the 16,
with rows of its own. It scores a task in each interval of the rows' lengths (`scorer_e` in eval.py).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from kvbench.tasks.longbench import chinese, metrics


@dataclass(frozen=True)
class Subtask:
    """One of the tasks.

    Attributes:
        name: The task's name in the benchmark.
        category: The benchmark's category.
        metric: Scores an output by a reference and, for trec and lsht, the classes.
        new_tokens: The most tokens of an answer: upstream's dataset2maxlen.
        chat: Whether the model's chat template is used.
        extract: Returns the part of an output that is scored.
    """

    name: str
    category: str
    metric: Callable[[str, str, Sequence[str]], float]
    new_tokens: int
    chat: bool = True
    extract: Callable[[str], str] = str


QA_F1, ROUGE, CODE = metrics.qa_f1, metrics.rouge, metrics.code_sim
CLASSES, RETRIEVAL = metrics.classification_score, metrics.retrieval_score
FIRST, LINE = metrics.first_line, metrics.code_line
SINGLE, MULTI, SUMMARY = "single-document QA", "multi-document QA", "summarisation"
SHOTS, SYNTHETIC, COMPLETION = "few-shot", "synthetic", "code"
SUBTASKS = (
    Subtask("narrativeqa", SINGLE, QA_F1, 128),
    Subtask("qasper", SINGLE, QA_F1, 128),
    Subtask("multifieldqa_en", SINGLE, QA_F1, 64),
    Subtask("multifieldqa_zh", SINGLE, chinese.qa_f1, 64),
    Subtask("hotpotqa", MULTI, QA_F1, 32),
    Subtask("2wikimqa", MULTI, QA_F1, 32),
    Subtask("musique", MULTI, QA_F1, 32),
    Subtask("dureader", MULTI, chinese.rouge, 128),
    Subtask("gov_report", SUMMARY, ROUGE, 512),
    Subtask("qmsum", SUMMARY, ROUGE, 512),
    Subtask("multi_news", SUMMARY, ROUGE, 512),
    Subtask("vcsum", SUMMARY, chinese.rouge, 512),
    Subtask("trec", SHOTS, CLASSES, 64, chat=False, extract=FIRST),
    Subtask("triviaqa", SHOTS, QA_F1, 32, chat=False, extract=FIRST),
    Subtask("samsum", SHOTS, ROUGE, 128, chat=False, extract=FIRST),
    Subtask("lsht", SHOTS, CLASSES, 64, chat=False, extract=FIRST),
    Subtask("passage_count", SYNTHETIC, metrics.count_score, 32),
    Subtask("passage_retrieval_en", SYNTHETIC, RETRIEVAL, 32),
    Subtask("passage_retrieval_zh", SYNTHETIC, RETRIEVAL, 32),
    Subtask("lcc", COMPLETION, CODE, 64, chat=False, extract=LINE),
    Subtask("repobench-p", COMPLETION, CODE, 64, chat=False, extract=LINE),
)
CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")
NOT_IN_E = ("narrativeqa", "musique", "qmsum")
INTERVALS = {"0-4k": 4000, "4-8k": 8000, "8k+": math.inf}  # interval of LongBench-E -> the `length` where it ends
NAMES = tuple(subtask.name for subtask in SUBTASKS)
ENGLISH = tuple(name for name in NAMES if name not in CHINESE)  # English and code
E_NAMES = tuple(name for name in ENGLISH if name not in NOT_IN_E)
SETS = {"all": ENGLISH, "all21": NAMES, "chinese": CHINESE}  # what task.subtasks may say -> subtasks
CATEGORIES = {
    category: tuple(subtask for subtask in members if subtask.name in ENGLISH)
    for category, members in groupby(SUBTASKS, lambda subtask: subtask.category)
}


def find_interval(length: int) -> str:
    """Return the interval of LongBench-E that a row's `length`, in words, lies in."""
    return next(name for name, end in INTERVALS.items() if length < end)

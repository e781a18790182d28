"""LongBench's 16 English tasks by category (THUDM/LongBench 2e00731, LongBench/: eval.py, pred.py, config/)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from kvbench.tasks.longbench import metrics


@dataclass(frozen=True)
class Subtask:
    """One of the tasks.

    Attributes:
        name: The task's name in the benchmark.
        category: The benchmark's category.
        metric: Scores an output by a reference and, for trec, the classes.
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
FIRST, LINE = metrics.first_line, metrics.code_line
SINGLE, MULTI, SUMMARY = "single-document QA", "multi-document QA", "summarisation"
SHOTS, SYNTHETIC, COMPLETION = "few-shot", "synthetic", "code"
SUBTASKS = (
    Subtask("narrativeqa", SINGLE, QA_F1, 128),
    Subtask("qasper", SINGLE, QA_F1, 128),
    Subtask("multifieldqa_en", SINGLE, QA_F1, 64),
    Subtask("hotpotqa", MULTI, QA_F1, 32),
    Subtask("2wikimqa", MULTI, QA_F1, 32),
    Subtask("musique", MULTI, QA_F1, 32),
    Subtask("gov_report", SUMMARY, ROUGE, 512),
    Subtask("qmsum", SUMMARY, ROUGE, 512),
    Subtask("multi_news", SUMMARY, ROUGE, 512),
    Subtask("trec", SHOTS, metrics.classification_score, 64, chat=False, extract=FIRST),
    Subtask("triviaqa", SHOTS, QA_F1, 32, chat=False, extract=FIRST),
    Subtask("samsum", SHOTS, ROUGE, 128, chat=False, extract=FIRST),
    Subtask("passage_count", SYNTHETIC, metrics.count_score, 32),
    Subtask("passage_retrieval_en", SYNTHETIC, metrics.retrieval_score, 32),
    Subtask("lcc", COMPLETION, CODE, 64, chat=False, extract=LINE),
    Subtask("repobench-p", COMPLETION, CODE, 64, chat=False, extract=LINE),
)
NAMES = tuple(subtask.name for subtask in SUBTASKS)
CATEGORIES = {category: tuple(own) for category, own in groupby(SUBTASKS, lambda subtask: subtask.category)}

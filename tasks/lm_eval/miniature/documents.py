"""Make documents for lm-eval: columns context, question, answer_prefix and answers, and a metric of one document."""

import random
from typing import Any

from datasets import Dataset

from kvbench.tasks.ruler.task import draw_sample, render_sample
from kvbench.tasks.ruler.texts import load_texts

COUNT, LENGTH = 20, 1024  # number of documents; the length in tokens that decides RULER's parameters


def niah(**_: object) -> dict[str, Dataset]:
    """Make needles in noise."""
    return {"test": _documents("niah_single_1", 25)}


def vt(**_: object) -> dict[str, Dataset]:
    """Make chains of variables."""
    return {"test": _documents("ruler_vt", 12)}


def share_found(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return the share of the answers that the output holds: RULER's string_match_all."""
    return {"found": sum(answer.lower() in results[0].lower() for answer in doc["answers"]) / len(doc["answers"])}


def _documents(subtask: str, units: int) -> Dataset:
    texts = load_texts(None, None)
    made = []
    for index in range(COUNT):
        drawn = draw_sample(subtask, units, random.Random(f"miniature/{subtask}/{index}"), texts, LENGTH, index=index)
        prompt = render_sample(subtask, drawn, texts)
        made.append(
            {
                "context": prompt.context,
                "question": prompt.question,
                "answer_prefix": prompt.answer_prefix,
                "answers": list(prompt.answers),
            }
        )
    return Dataset.from_list(made)

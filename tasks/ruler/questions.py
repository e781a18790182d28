"""Load the documents and questions of RULER's qa tasks: SQuAD v2 dev and HotpotQA dev distractor, or synthetic ones.

Both come in the official JSON formats and are read as upstream reads them (scripts/data/synthetic/qa.py).
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.tasks.common import synthetic_qa
from kvbench.tasks.ruler.sources import download_file, read_source, short_hash
from kvbench.validation import SettingError

SQUAD = "https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json"
HOTPOT = (
    "https://huggingface.co/datasets/namlh2004/hotpotqa/resolve/7e54db4656209750ff487f6fdf8e39a66dba136b/"
    "hotpot_dev_distractor_v1.json"
)
SQUAD_FILES = ("dev-v2.0.json", "squad.json")  # as published, or as upstream's download script names it
HOTPOT_FILES = ("hotpot_dev_distractor_v1.json", "hotpotqa.json")


@dataclass(frozen=True)
class Question:
    """A question.

    Attributes:
        query: The question's text.
        answers: The spans that answer it.
        documents: Numbers of the documents that every prompt holds.
        related: Numbers of the documents that a prompt holds before any others.
    """

    query: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclass(frozen=True)
class QuestionSet:
    """Documents, and questions about them in the order in which samples ask them."""

    documents: tuple[str, ...]
    questions: tuple[Question, ...]


def load_questions(path: str | None) -> tuple[QuestionSet, QuestionSet, str]:
    """Load both sets of questions.

    Args:
        path: A folder with the official files, ``hub``, or None for synthetic questions.

    Returns:
        SQuAD, HotpotQA, and their origin: ``generated``, ``file:<hash>`` or ``hub:<hash>``.

    Raises:
        SettingError: A file is missing, cannot be read or has another format.
    """
    if path is None:
        squad, hotpot = _parse_squad(synthetic_qa.make_squad()), _parse_hotpot(synthetic_qa.make_hotpot())
        return _shuffle(squad), _shuffle(hotpot), "generated"
    if path == "hub":
        sources = [download_file("task.qa_path", url) for url in (SQUAD, HOTPOT)]
    else:
        sources = [_find_one(path, names) for names in (SQUAD_FILES, HOTPOT_FILES)]
    raw = [read_source("task.qa_path", path, file) for file in sources]
    parsers: tuple[Callable[[Any], QuestionSet], ...] = (_parse_squad, _parse_hotpot)
    sets = []
    for file, content, parse in zip(sources, raw, parsers, strict=True):
        try:
            sets.append(parse(json.loads(content)))
        except (ValueError, TypeError, KeyError) as error:
            raise SettingError(f"task.qa_path={path}: {file.name} is not the official JSON ({error!r})") from None
        if not sets[-1].questions:
            raise SettingError(f"task.qa_path={path}: {file.name} has no questions")
    return sets[0], sets[1], f"{'hub' if path == 'hub' else 'file'}:{short_hash(b''.join(raw))}"


def _parse_squad(data: dict) -> QuestionSet:
    """Parse as upstream's read_squad: answerable questions; the other paragraphs of the article are related."""
    documents = sorted({p["context"] for article in data["data"] for p in article["paragraphs"]})
    number = {document: i for i, document in enumerate(documents)}
    questions = []
    for article in data["data"]:
        positions = [number[p["context"]] for p in article["paragraphs"]]
        for position, paragraph in zip(positions, article["paragraphs"], strict=True):
            related = tuple(i for i in positions if i != position)
            questions += [
                Question(q["question"], tuple(a["text"] for a in q["answers"]), (position,), related)
                for q in paragraph["qas"]
                if not q["is_impossible"]
            ]
    return QuestionSet(tuple(documents), tuple(questions))


def _parse_hotpot(data: list) -> QuestionSet:
    """Parse as upstream's read_hotpotqa: a question's ten documents, gold and distractors, are in every prompt."""
    pages = [[f"{title}\n{''.join(sentences)}" for title, sentences in entry["context"]] for entry in data]
    documents = sorted({page for entry_pages in pages for page in entry_pages})
    number = {document: i for i, document in enumerate(documents)}
    return QuestionSet(
        tuple(documents),
        tuple(
            Question(entry["question"], (entry["answer"],), tuple(number[page] for page in entry_pages))
            for entry, entry_pages in zip(data, pages, strict=True)
        ),
    )


def _shuffle(made: QuestionSet) -> QuestionSet:
    """Shuffle questions, so that neighbouring samples do not share an article. Official sets keep upstream's order."""
    rng = random.Random("kvbench questions")
    return QuestionSet(made.documents, tuple(rng.sample(made.questions, len(made.questions))))


def _find_one(folder: str, names: tuple[str, ...]) -> Path:
    for name in names:
        if Path(folder, name).is_file():
            return Path(folder, name)
    raise SettingError(f"task.qa_path={folder}: a folder with {' or '.join(names)}")

"""Write the tables of docs/embedded-model.md from the scores beside the weights: `kvbench dev docs-tables --card`.

`kvbench dev evaluate` writes these scores (kvbench/training/evaluate.py). They are means without intervals.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from kvbench.analysis.full_scores import AVERAGE, FullScore
from kvbench.report.doc_tables import replace_table
from kvbench.training.tuning_card import OPTION, list_measurements, list_scores
from kvbench.validation import refuse_on_error

MODEL = "reference"
PAGE = "docs/embedded-model.md"
SCORES = "kvbench/models/embedded_v2/scores.json"


def make_card(root: Path) -> dict[str, str]:
    """Return the page with its tables, by its path in the checkout.

    Args:
        root: The checkout.

    Raises:
        SettingError: The file of scores is missing or damaged.
    """
    path = root / SCORES
    with refuse_on_error(f"{path}: no scores of the embedded model"):
        scores, ledgers = read_embedded_scores(path)
    text = (root / PAGE).read_text(encoding="utf-8")
    tables = {
        "scores": list_scores(scores, {MODEL: ""}),
        "ledgers": list_ledgers(ledgers),
        "measurements": list_measurements([*scores, *ledgers.values()]),
    }
    for label, rows in tables.items():
        text = replace_table(text, label, list(rows), OPTION)
    return {PAGE: text}


def read_embedded_scores(path: Path) -> tuple[list[FullScore], dict[int, FullScore]]:
    """Return RULER's scores with their averages, and those of ledgers by their numbers of lines."""
    about = json.loads(path.read_text(encoding="utf-8"))

    def make_score(task: str, length: int, subtask: str, samples: int, score: float) -> FullScore:
        where = MODEL, about["weights"], task, about["seed"], length, subtask
        return FullScore(*where, samples, score, None, None, about["dtype"], about["device"])

    scores, ledgers = [], {}
    for one in about["scores"]:
        if "steps" in one:
            ledgers[one["steps"]] = make_score(one["task"], 0, one["task"], one["samples"], one["score"])
        else:
            scores.append(make_score("ruler", one["length"], one["task"], one["samples"], one["score"]))
    for length in dict.fromkeys(score.length for score in scores):
        there = [score for score in scores if score.length == length]
        mean = sum(score.score for score in there) / len(there)
        scores.append(make_score("ruler", length, AVERAGE, sum(score.samples for score in there), mean))
    return scores, ledgers


def list_ledgers(ledgers: dict[int, FullScore]) -> Iterator[str]:
    """Yield a table of the scores of ledgers by their numbers of lines."""
    yield from ("| lines of a ledger | samples | score |", "|--:|--:|--:|")
    yield from (f"| {lines} | {score.samples} | {score.score:.1f} |" for lines, score in sorted(ledgers.items()))

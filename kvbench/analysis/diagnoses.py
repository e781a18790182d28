"""Summarise diagnoses (`kvbench diagnose`): a table of cells, and the layers in which they lose most.

The quantities are defined in kvbench.studies.diagnosis. This module does not import torch.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kvbench.analysis.text_table import Column, format_table, wrap_texts
from kvbench.store.runs import StoredRun
from kvbench.store.study_lines import CELLS, DIAGNOSIS, Line, StudyFolder, count_prompts

WORST = 3  # layers that a table names
ORDER = "local_answer"  # the quantity by which layers are ordered
SHARES = ("rows", "top_p_rows", "recall", "needles_held")  # quantities that cannot exceed 1
FEWEST = 4  # cells of a rank correlation
RESAMPLES = 2000
COLUMNS = {  # quantity -> the two lines of a title
    "rows": ("rows", "held"),
    "local_prompt": ("local error,", "prompt"),
    "local_answer": ("local error,", "answer"),
    "accumulated_prompt": ("accumulated,", "prompt"),
    "accumulated_answer": ("accumulated,", "answer"),
    "dropped_prompt": ("dropped mass,", "prompt"),
    "dropped_answer": ("dropped mass,", "answer"),
    "recall": ("recall of the", "oracle's rows"),
    "top_k_local_answer": ("local error of", "oracle top-k"),
    "top_p_local_answer": ("local error of", "oracle top-p"),
    "top_p_rows": ("rows of", "oracle top-p"),
    "random_local_answer": ("local error of", "random rows"),
    "needles_held": ("heads that hold", "the answer"),
}


@dataclass(frozen=True)
class Diagnosis:
    """The means of a cell over prompts.

    Attributes:
        name: The cell.
        means: The mean over layers and heads of each quantity.
        layers: The mean over heads, by quantity and layer.
        heads: By quantity, layer and head.
        needles: The lines about the rows of the answers' tokens of single prompts.
    """

    name: str
    means: dict[str, Line] = field(default_factory=dict)
    layers: dict[str, dict[int, Line]] = field(default_factory=dict)
    heads: dict[str, dict[tuple[int, int], Line]] = field(default_factory=dict)
    needles: list[Line] = field(default_factory=list)

    @property
    def worst(self) -> list[int]:
        """The layers with the largest local errors at the answer, the worst first."""
        errors = self.layers.get(ORDER, {})
        return sorted(errors, key=lambda layer: -errors[layer].value)[:WORST]


def read_diagnoses(study: StudyFolder) -> list[Diagnosis]:
    """Return the cells of a folder that have been diagnosed, in the order of study.yaml."""
    diagnoses = {name: Diagnosis(name) for name in study.about.get(CELLS, {})}
    for line in study.lines:
        if line.study != DIAGNOSIS or line.series not in diagnoses:
            continue
        diagnosis = diagnoses[line.series]
        if line.x is not None:
            diagnosis.needles.append(line)
        elif line.layer is None:
            diagnosis.means[line.quantity] = line
        elif line.head is None:
            diagnosis.layers.setdefault(line.quantity, {})[line.layer] = line
        else:
            diagnosis.heads.setdefault(line.quantity, {})[line.layer, line.head] = line
    return [diagnosis for diagnosis in diagnoses.values() if diagnosis.layers]


def score_cells(study: StudyFolder, runs: Iterable[StoredRun]) -> dict[str, float]:
    """Return the score of each diagnosed cell that has a finished run: the mean over subtasks, which weigh the same.

    Model, task, question, method, allocator, codec, budget and block size of a run must be the cell's, whatever its
    number of samples. Of several runs, one on the cell's device is taken.
    """
    about = study.about
    shared = [about["model"], drop_limit(about["prompts"].get("task", {})), about.get("question")]
    cells = {json.dumps([*shared, *list_settings(cell)], sort_keys=True): name for name, cell in about[CELLS].items()}
    scores: dict[str, float] = {}
    for run in sorted(runs, key=lambda run: run.value["device"] == about["device"]):
        value = run.value
        key = [value["model"], drop_limit(value["task"]), value["question"], *list_settings(value)]
        name = cells.get(json.dumps(key, sort_keys=True))
        if name is not None and run.finished and (score := find_score(run)) is not None:
            scores[name] = score
    return scores


def drop_limit(task: Mapping[str, Any]) -> dict[str, Any]:
    """Return a task's settings without the number of samples."""
    return {name: value for name, value in task.items() if name != "limit"}


def list_settings(cell: Mapping[str, Any]) -> list[Any]:
    """Return the settings of a cell, also from the settings of a run."""
    full = cell["method"]["name"] == "full"
    return [cell[name] for name in ("method", "allocator", "codec", "budget", "budget_of")] + [
        None if full else cell["block_size"]
    ]


def find_score(run: StoredRun) -> float | None:
    """Return the mean score over subtasks; None if no sample has one."""
    scores: dict[str, list[float]] = {}
    for record in run.records.values():
        if record["score"] is not None:
            scores.setdefault(record["subtask"], []).append(record["score"])
    return float(np.mean([np.mean(subtask_scores) for subtask_scores in scores.values()])) if scores else None


def correlate_ranks(x: Sequence[float], y: Sequence[float], seed: int = 0) -> tuple[float, float, float] | None:
    """Return Spearman's rank correlation of n pairs with a 95 % interval; None if all numbers of x or y are equal.

    The interval is the percentile bootstrap over pairs: `RESAMPLES` draws of n pairs with replacement, of which those
    without a correlation are left out.
    """
    pairs = np.array([x, y], dtype=float)
    draws = np.random.default_rng(seed).integers(len(x), size=(RESAMPLES, len(x)))
    correlation = rank_correlation(pairs[:, None])[0]
    resampled = rank_correlation(pairs[:, draws])
    if np.isnan(correlation):
        return None
    low, high = np.nanquantile(resampled, (0.025, 0.975))
    return float(correlation), float(low), float(high)


def rank_correlation(pairs: np.ndarray) -> np.ndarray:
    """Return Spearman's correlation of pairs (2, draws, n) for each draw; NaN where all numbers of a side are equal."""
    from scipy.stats import rankdata  # here, because importing it takes half a second

    ranks = rankdata(pairs, axis=-1)
    ranks -= ranks.mean(-1, keepdims=True)
    x, y = ranks
    size = np.sqrt((x**2).sum(-1) * (y**2).sum(-1))
    return np.where(size > 0, (x * y).sum(-1) / np.where(size > 0, size, 1), np.nan)


def format_mean(quantity: str, diagnosis: Diagnosis) -> str:
    """Return the mean of a quantity with its interval, or nothing if the quantity has no meaning for the cell."""
    line = diagnosis.means.get(quantity)
    if line is None:
        return ""
    interval = "" if line.low is None or line.high is None else f" [{line.low:.2f}, {line.high:.2f}]"
    return f"{line.value:.2f}{interval}"


def format_diagnosis(study: StudyFolder, cells: Sequence[str], width: int) -> list[str]:
    """Return a table of cells, and what its numbers are.

    Args:
        study: The folder.
        cells: The names of the cells.
        width: Width in characters.
    """
    rows = [diagnosis for diagnosis in read_diagnoses(study) if diagnosis.name in cells]
    quantities = [name for name in COLUMNS if any(name in diagnosis.means for diagnosis in rows)]
    columns = [Column("", "cell", lambda diagnosis: diagnosis.name)]
    columns += [Column(*COLUMNS[name], partial(format_mean, name)) for name in quantities]
    columns.append(Column("worst", "layers", lambda diagnosis: " ".join(map(str, diagnosis.worst))))
    notes = [
        f"Means over layers, heads and {count_prompts(study.about['prompts'])}, with 95 % intervals over prompts. "
        "Errors are relative to the size of the output, so 1 means that an output of zeros would be as near.",
        f"The worst layers have the largest local errors at the answer. {DIAGNOSIS}.csv has every layer and head.",
    ]
    return [*format_table(columns, rows, 0, width), "", *wrap_texts(notes, width)]

"""Keep a file of what models score with the full cache: `kvbench dev choose-solvable --table FILE` writes it.

The file is a CSV with a line for each model, task, length and subtask, and one for the average over the subtasks. A
model's card is made from such a file, with the scores of the model and of the one that it was tuned from.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from kvbench.analysis.intervals import Mean, Values, mean
from kvbench.store.csv_rows import write_rows
from kvbench.validation import refuse_on_error

AVERAGE = "average"  # stands in the column `subtask`: the mean over all subtasks, which weigh the same
DECIMALS = 4


@dataclass(frozen=True)
class FullScore:
    """A mean score of the full cache in points, with its 95 % interval."""

    model: str
    weights: str
    """Identity of the model's weights."""
    task: str
    seed: int
    """Seed of the samples."""
    length: int
    """Tokens of a prompt."""
    subtask: str
    """A subtask, or `AVERAGE`."""
    samples: int
    score: float
    low: float | None
    """Lower end of the interval; None like `Mean.low`."""
    high: float | None
    dtype: str
    device: str


@dataclass(frozen=True)
class ScoreSource:
    """What the scores of one model have in common. The fields are those of `FullScore`."""

    model: str
    weights: str
    task: str
    seed: int
    dtype: str
    device: str

    def list_scores(self, by_length: Mapping[int, Mapping[str, Values]]) -> list[FullScore]:
        """Return the scores by length, of each subtask and of their average.

        Args:
            by_length: Length -> subtask -> the scores of its samples.
        """
        scores = []
        for length, subtasks in by_length.items():
            means = {name: mean([values]) for name, values in subtasks.items()}
            means[AVERAGE] = mean(list(subtasks.values()))
            scores += [self._make_score(length, name, one) for name, one in means.items()]
        return scores

    def _make_score(self, length: int, subtask: str, one: Mean) -> FullScore:
        value, low, high = (
            None if number is None else round(number, DECIMALS) + 0.0  # + 0.0: no negative zero
            for number in (one.value, one.low, one.high)
        )
        assert value is not None
        where = self.model, self.weights, self.task, self.seed, length, subtask
        return FullScore(*where, one.samples, value, low, high, self.dtype, self.device)


def replace_scores(known: Sequence[FullScore], new: Sequence[FullScore]) -> list[FullScore]:
    """Return scores with new ones of one model, in the order model, task, length.

    Known scores of the model leave the list if the new ones are of the same task and length, and if they are of other
    weights or samples of another seed.
    """
    measured = {(score.task, score.length) for score in new}
    source = {(score.model, score.weights, score.seed) for score in new}
    models = {score.model for score in new}
    kept = [
        score
        for score in known
        if score.model not in models
        or ((score.model, score.weights, score.seed) in source and (score.task, score.length) not in measured)
    ]
    return sorted([*kept, *new], key=lambda score: (score.model, score.task, score.length))


def read_scores(path: Path) -> list[FullScore]:
    """Read a file of scores.

    Raises:
        SettingError: The file is missing or damaged.
    """
    with (
        refuse_on_error(f"{path}: cannot read scores of full caches there"),
        path.open(newline="", encoding="utf-8") as file,
    ):
        return [_parse_score(row) for row in csv.DictReader(file)]


def _parse_score(row: Mapping[str, str]) -> FullScore:
    low, high = (float(row[name]) if row[name] else None for name in ("low", "high"))
    numbers = int(row["samples"]), float(row["score"]), low, high
    where = row["model"], row["weights"], row["task"], int(row["seed"]), int(row["length"]), row["subtask"]
    return FullScore(*where, *numbers, row["dtype"], row["device"])


def write_scores(path: Path, scores: Sequence[FullScore]) -> None:
    """Write a file of scores, with its folder.

    Raises:
        OSError: The file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [one.name for one in fields(FullScore)]
    write_rows(path, [names, *map(astuple, scores)])

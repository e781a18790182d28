"""Read which subtasks a model can solve. Its card lists them under the key `solvable` of conf/model/<name>.yaml.

A weak model scores near 0 on many subtasks with any cache, and an average over all subtasks hides what a method loses.
Tables therefore show a second average, over the listed subtasks. `kvbench dev choose-solvable` makes the list:

    solvable:
      weights: "1f9d6ba0c3e84d27"   # identity of the tested model; the list does not apply to other weights
      seed: 50000                   # seed of the samples used; runs on the same samples show no second average
      ruler:                        # a task with task.length: a list for each length
        2048: [niah_single_1, niah_single_2]
      longbench: [trec, triviaqa]   # a task without task.length: one list

A subtask is listed if the full cache scores at least 50 on average. The samples that decide this have another seed than
the evaluated samples. A list chosen on the evaluated samples would prefer subtasks that did well by chance, and the
full cache's average would be too high (tests/analysis/test_intervals.py shows this, and the coverage of the second
average's intervals).

The list changes no record. It is therefore not part of a run's identity, and it also applies to older runs.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import yaml

from kvbench.analysis.intervals import TOLERANCE
from kvbench.config import catalogue
from kvbench.config.compose import find_file
from kvbench.validation import SettingError, format_value, require_choice, require_int

KEY = "solvable"
LEAST_SCORE = 50.0  # points
NO_TASKS = ("weights", "seed")  # keys of the list that are not tasks


def is_solvable(scores: Sequence[float]) -> bool:
    """Return whether a subtask is listed: the mean of the full cache's scores, in points, is at least LEAST_SCORE."""
    return math.fsum(scores) / len(scores) >= LEAST_SCORE - TOLERANCE


def list_solvable(value: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the subtasks that the card lists for the model, task and length of a run.

    Args:
        value: The run's settings (`kvbench.runs.spec.RunSpec.value`).

    Returns:
        The names. Empty if the card has no list for this task and length, if the run has other weights than the card,
        and if the run's samples have the same seed as those that the list was chosen on.

    Raises:
        SettingError: The card is damaged.
    """
    model, task = value["model"], value["task"]
    if model["name"] not in catalogue.list_choices("model"):  # a model from a folder or the hub has no card
        return ()
    card = read_card(model["name"])
    if not card or card["weights"] != model.get("identity") or card["seed"] == task.get("seed"):
        return ()
    listed = card.get(task["name"], ())
    return tuple(listed.get(task.get("length"), ()) if isinstance(listed, Mapping) else listed)


def average_solvable(names: Sequence[str], subtasks: Iterable[str]) -> dict[str, dict[str, float]]:
    """Return the average over a run's listed subtasks.

    Args:
        names: Subtasks that the card lists.
        subtasks: Subtasks of the run.

    Returns:
        The average's name -> the weights of its subtasks. Empty if no subtask is listed, and if all are, because this
        average would equal the one over all subtasks.
    """
    there = list(subtasks)
    listed = [name for name in there if name in names]
    return {f"average of {len(listed)} solvable": dict.fromkeys(listed, 1.0)} if 0 < len(listed) < len(there) else {}


def check_card(config: Mapping[str, Any]) -> None:
    """Raise a SettingError if the card of a composed `model` is damaged, or if the settings override its list."""
    card = read_card(config["name"])
    if KEY in config and (config[KEY] or {}) != card:
        raise SettingError(
            f"model.{KEY}={format_value(config[KEY])}: cannot be overridden; conf/model/{config['name']}.yaml has it"
        )


def read_card(name: str) -> Mapping[str, Any]:
    """Return the value of `solvable` in conf/model/<name>.yaml, {} if there is none.

    Raises:
        SettingError: The value is damaged.
    """
    return _parse_card(name, find_file("model", name).read_text())


@cache
def _parse_card(name: str, text: str) -> Mapping[str, Any]:
    try:
        settings = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingError(catalogue.describe_damage(error, find_file("model", name))) from None
    card = settings.get(KEY) if isinstance(settings, Mapping) else None
    if card is None:
        return {}
    where = f"conf/model/{name}.yaml: {KEY}"
    if not isinstance(card, Mapping) or not set(NO_TASKS) <= card.keys() or not isinstance(card["weights"], str):
        raise SettingError(
            f"{where}: weights (a text in quotes), seed and tasks, as python -m kvbench dev choose-solvable says"
        )
    require_int(f"{where}.seed", card["seed"], 0)
    for task in card.keys() - set(NO_TASKS):
        names, by_length = list_listable(where, task)
        listed = card[task]
        if by_length != isinstance(listed, Mapping):
            raise SettingError(f"{where}.{task}: {'a list for each length' if by_length else 'one list'} of subtasks")
        for length, some in listed.items() if by_length else [(None, listed)]:
            if by_length:
                require_int(f"{where}.{task} length", length, 1)
            place = f"{where}.{task}" + (f".{length}" if by_length else "")
            if not isinstance(some, list) or len(set(map(str, some))) < len(some):
                raise SettingError(f"{place}={format_value(some)}: a list of different subtasks")
            for one in some:
                require_choice(place, one, names)
    return card


def list_listable(where: str, task: object) -> tuple[tuple[str, ...], bool]:
    """Return all subtasks of a task, and whether the task has a length.

    Raises:
        SettingError: There is no such task, or its subtasks have no fixed names.
    """
    require_choice(where, task, catalogue.list_choices("task"))
    settings = yaml.safe_load(find_file("task", str(task)).read_text())
    kind = catalogue.load_class(f"task={task}", settings["_target_"]) if "_target_" in settings else None
    if not (names := getattr(kind, "subtask_names", ())):
        raise SettingError(f"{where}: the subtasks of {task} have no fixed names, so they cannot be listed")
    return names, "length" in settings

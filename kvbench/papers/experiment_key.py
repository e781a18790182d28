"""What a run would be known by, from settings of run.py alone: to find in a store the run that a cell of a table wants.

`{"model": "llama31_8b", "task": "longbench", "method": "snapkv", "method.preset": "dropkv_paper", "budget": 0.05}` and
the value of a stored run (kvbench.runs.spec.RunSpec.value) have the same Protocol if the run answers the same question:
model, method, allocator and codec with all their settings, budget, block, question, seed, sampling and the task with
all its settings. Which of its subtasks a task reads is left out, since they do not change one another: whoever takes a
run looks for the subtasks. Also left out are machine, revisions and sources. No torch is needed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml
from hydra import compose, initialize_config_dir

from kvbench.config import catalogue
from kvbench.papers.paper_table import Settings
from kvbench.validation import typed

GROUPS = ("method", "allocator", "codec")
CUT = ("allocator", "budget", "budget_of", "block_size")  # mean nothing where nothing is cut
CHOSEN = ("subtasks", "tasks")  # of a task's settings: which subtasks
FILE = "a file"  # in the place of what a file holds


@dataclass(frozen=True)
class ExperimentKey:
    """Parts as JSON, equal if they are the same experiment."""

    model: str
    cache: str
    budget: str
    block_size: str
    question: str
    drawn: str  # seed and sampling
    task: str

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> "ExperimentKey":
        """Of a run's value."""
        groups = {name: {**value[name]} for name in GROUPS}
        for own in groups.values():
            if own.get("path") is not None:
                own["path"] = FILE
        return cls(
            model=value["model"]["name"],
            cache=text(groups),
            budget=text([value["budget"], value["budget_of"]]),
            block_size=text(value["block_size"]),
            question=value["question"],
            drawn=text([value["seed"], value["sampling"]]),
            task=text({name: own for name, own in value["task"].items() if name not in CHOSEN}),
        )

    @classmethod
    def wanted(cls, settings: Settings) -> "ExperimentKey":
        """Of the run that these settings make; SettingError for settings that no run can have."""
        return _wanted(tuple((name, text(own)) for name, own in settings.items()))


@cache
def _wanted(settings: tuple[tuple[str, str], ...]) -> ExperimentKey:
    return ExperimentKey.of(value_of({name: json.loads(own) for name, own in settings}))


def value_of(settings: Settings) -> dict[str, Any]:
    """What kvbench.runs.spec.RunSpec.value has of the settings themselves."""
    root = {**defaults(), **needed(settings)}
    full = root["method"] == "full"
    groups = {name: group(name, text(part(name, root))) for name in GROUPS}
    task = task_settings(tuple((name, typed(own)) for name, own in root.items() if of_task(name)))
    return {
        "model": {"name": root["model"]},
        **groups,
        "budget": 1.0 if full else root["budget"],
        "budget_of": "prompt" if full else root["budget_of"],
        "block_size": None if full else root["block_size"],
        "question": root["question"],
        "seed": root["seed"],
        "sampling": {name: float(root[name]) for name in ("temperature", "top_p")},
        "task": task,
    }


def needed(settings: Settings) -> dict[str, Any]:
    """`settings` without what means nothing for the full cache."""
    if settings.get("method") != "full":
        return dict(settings)
    return {name: own for name, own in settings.items() if name.split(".")[0] not in CUT}


def merged(before: Settings, more: Settings) -> dict[str, Any]:
    """`more` over `before`; another choice of a group leaves nothing of the settings of the one before."""
    kept = {name: own for name, own in before.items() if "." not in name or name.split(".")[0] not in more}
    return {**kept, **more}


def part(name: str, root: Settings) -> dict[str, Any]:
    """What is set of a group: its choice, and its settings."""
    return {key: value for key, value in root.items() if key.split(".")[0] == name}


@cache
def group(name: str, chosen: str) -> dict[str, Any]:
    """A group's settings as a run is known by them; `chosen`: its part of the settings, as JSON."""
    own = json.loads(chosen)
    resolved = catalogue.settings(name, own.pop(name), {key.partition(".")[2]: value for key, value in own.items()})
    holds = {} if resolved.get("path") is None else {"path": FILE}  # what it holds is hashed, and need not be here
    return catalogue.identity_settings(resolved | dict.fromkeys(holds)) | holds


def of_task(name: str) -> bool:
    """Whether a setting may change the task's."""
    return name.split(".")[0] == "task" or name in ("question", "seed", "limit", "temperature", "top_p")


@cache
def task_settings(overrides: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    with initialize_config_dir(str(catalogue.CONF), version_base="1.3"):
        composed = compose("config", [f"{name}={own}" for name, own in overrides])
    return catalogue.task_identity(catalogue.resolve("task", composed.task))


@cache
def defaults() -> dict[str, Any]:
    """What conf/config.yaml says where nothing else is said."""
    config = yaml.safe_load((catalogue.CONF / "config.yaml").read_text())
    chosen = [own for own in config["defaults"] if isinstance(own, dict)]
    named = {name: own for one in chosen for name, own in one.items() if " " not in name}
    return named | {name: own for name, own in config.items() if not isinstance(own, dict | list)}


def text(value: object) -> str:
    return json.dumps(value, sort_keys=True)

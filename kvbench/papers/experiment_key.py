"""What a run would be known by, from settings of run.py alone: to find in a store the run that a cell of a table wants.

`{"model": "llama31_8b", "task": "longbench", "method": "snapkv", "method.preset": "dropkv_paper", "budget": 0.05}` and
the value of a stored run (kvbench.runs.spec.RunSpec.value) have the same key if the run answers the same question:
model, method, allocator and codec with all their settings, budget, block, question, seed, sampling and the task with
all its settings. Which of its subtasks a task reads is left out, since they do not change one another: whoever takes a
run looks for the subtasks. Also left out are machine, revisions and sources. No torch is needed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from kvbench.config import catalogue
from kvbench.config.compose import GROUPS as CONFIG_GROUPS
from kvbench.config.compose import compose, compose_config
from kvbench.papers.paper_table import Settings
from kvbench.validation import format_value

GROUPS = ("method", "allocator", "codec")
CUT_SETTINGS = ("allocator", "budget", "budget_of", "block_size")  # mean nothing where nothing is cut
SUBTASK_SETTINGS = ("subtasks", "tasks")  # of a task's settings: which subtasks
FILE_PLACEHOLDER = "a file"  # in the place of what a file holds


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
        for group in groups.values():
            if group.get("path") is not None:
                group["path"] = FILE_PLACEHOLDER
        return cls(
            model=value["model"]["name"],
            cache=to_json(groups),
            budget=to_json([value["budget"], value["budget_of"]]),
            block_size=to_json(value["block_size"]),
            question=value["question"],
            drawn=to_json([value["seed"], value["sampling"]]),
            task=to_json({name: setting for name, setting in value["task"].items() if name not in SUBTASK_SETTINGS}),
        )

    @classmethod
    def from_settings(cls, settings: Settings) -> "ExperimentKey":
        """Of the run that these settings make; SettingError for settings that no run can have."""
        return _make_key(tuple((name, to_json(value)) for name, value in settings.items()))


@cache
def _make_key(settings: tuple[tuple[str, str], ...]) -> ExperimentKey:
    return ExperimentKey.of(resolve_value({name: json.loads(text) for name, text in settings}))


def resolve_value(settings: Settings) -> dict[str, Any]:
    """What kvbench.runs.spec.RunSpec.value has of the settings themselves."""
    root = {**read_defaults(), **drop_unused(settings)}
    full = root["method"] == "full"
    groups = {name: resolve_group(name, to_json(select_group(name, root))) for name in GROUPS}
    task = resolve_task(tuple((name, format_value(value)) for name, value in root.items() if may_change_task(name)))
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


def drop_unused(settings: Settings) -> dict[str, Any]:
    """`settings` without what means nothing for the full cache."""
    if settings.get("method") != "full":
        return dict(settings)
    return {name: value for name, value in settings.items() if name.split(".")[0] not in CUT_SETTINGS}


def merge_settings(before: Settings, more: Settings) -> dict[str, Any]:
    """`more` over `before`; another choice of a group leaves nothing of the settings of the one before."""
    kept = {name: value for name, value in before.items() if "." not in name or name.split(".")[0] not in more}
    return {**kept, **more}


def select_group(name: str, root: Settings) -> dict[str, Any]:
    """What is set of a group: its choice, and its settings."""
    return {key: value for key, value in root.items() if key.split(".")[0] == name}


@cache
def resolve_group(name: str, chosen: str) -> dict[str, Any]:
    """A group's settings as a run is known by them; `chosen`: its part of the settings, as JSON."""
    settings = json.loads(chosen)
    resolved = catalogue.load_settings(
        name, settings.pop(name), {key.partition(".")[2]: value for key, value in settings.items()}
    )
    # what it holds is hashed, and need not be here
    holds = {} if resolved.get("path") is None else {"path": FILE_PLACEHOLDER}
    return catalogue.identity_settings(resolved | dict.fromkeys(holds)) | holds


def may_change_task(name: str) -> bool:
    """Whether a setting may change the task's."""
    return name.split(".")[0] == "task" or name in ("question", "seed", "limit", "temperature", "top_p")


@cache
def resolve_task(overrides: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    composed = compose_config([f"{name}={value}" for name, value in overrides])
    return catalogue.task_identity(catalogue.resolve("task", composed.task))


@cache
def read_defaults() -> dict[str, Any]:
    """What conf/config.yaml says where nothing else is said."""
    composed = compose()
    plain = OmegaConf.to_container(composed.config)
    assert isinstance(plain, dict)  # of a DictConfig
    chosen = {group: composed.choices[group] for group in CONFIG_GROUPS}
    return chosen | {str(name): value for name, value in plain.items() if not isinstance(value, dict | list)}


def to_json(value: object) -> str:
    return json.dumps(value, sort_keys=True)

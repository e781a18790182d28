"""Compute the key of an experiment from settings of run.py alone, to find the run that a cell of a table wants.

The settings `{"model": "llama31_8b", "task": "longbench", "method": "snapkv", "method.preset": "dropkv_paper",
"budget": 0.05}` and the settings of a stored run (kvbench.runs.spec.RunSpec.value) have the same key if model, method,
allocator and codec, budget, block size, question, seed, sampling and task are the same, with all their settings.

The key leaves out which subtasks a run reads, because subtasks do not change one another: whoever uses a run checks
that it has the subtasks. It also leaves out machine, revisions and sources. This module does not import torch.
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
CUT_SETTINGS = ("allocator", "budget", "budget_of", "block_size")  # without a meaning for the full cache
SUBTASK_SETTINGS = ("subtasks", "tasks")  # settings of a task that choose its subtasks
FILE_PLACEHOLDER = "a file"  # replaces the hash of a file's content


@dataclass(frozen=True)
class ExperimentKey:
    """The settings of an experiment, each part as JSON. Two runs of the same experiment have equal keys."""

    model: str
    cache: str
    budget: str
    block_size: str
    question: str
    drawn: str  # seed and sampling
    task: str

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> "ExperimentKey":
        """Return the key of a run with these settings (`kvbench.runs.spec.RunSpec.value`)."""
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
        """Return the key of the run that these settings of the command line make.

        Raises:
            SettingError: No run can have these settings.
        """
        return _make_key(tuple((name, to_json(value)) for name, value in settings.items()))


@cache
def _make_key(settings: tuple[tuple[str, str], ...]) -> ExperimentKey:
    return ExperimentKey.of(resolve_value({name: json.loads(text) for name, text in settings}))


def resolve_value(settings: Settings) -> dict[str, Any]:
    """Return the parts of `kvbench.runs.spec.RunSpec.value` that follow from the settings alone."""
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
    """Return the settings, for the full cache without those that have no meaning for it."""
    if settings.get("method") != "full":
        return dict(settings)
    return {name: value for name, value in settings.items() if name.split(".")[0] not in CUT_SETTINGS}


def merge_settings(before: Settings, more: Settings) -> dict[str, Any]:
    """Return both settings; those in `more` win. If `more` chooses another member of a group, such as another method,
    the settings of the former member are dropped.
    """
    kept = {name: value for name, value in before.items() if "." not in name or name.split(".")[0] not in more}
    return {**kept, **more}


def select_group(name: str, root: Settings) -> dict[str, Any]:
    """Return the settings of a group: which member is chosen, and the settings of this member."""
    return {key: value for key, value in root.items() if key.split(".")[0] == name}


@cache
def resolve_group(name: str, chosen: str) -> dict[str, Any]:
    """Return the settings of a group that identify a run.

    Args:
        name: The group, such as "method".
        chosen: What `select_group` returns of it, as JSON.
    """
    settings = json.loads(chosen)
    resolved = catalogue.load_settings(
        name, settings.pop(name), {key.partition(".")[2]: value for key, value in settings.items()}
    )
    # a run has the hash of the file's content, and the file need not exist on this machine
    holds = {} if resolved.get("path") is None else {"path": FILE_PLACEHOLDER}
    return catalogue.identity_settings(resolved | dict.fromkeys(holds)) | holds


def may_change_task(name: str) -> bool:
    """Return whether a setting may change the settings of the task."""
    return name.split(".")[0] == "task" or name in ("question", "seed", "limit", "temperature", "top_p")


@cache
def resolve_task(overrides: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    composed = compose_config([f"{name}={value}" for name, value in overrides])
    return catalogue.task_identity(catalogue.resolve("task", composed.task))


@cache
def read_defaults() -> dict[str, Any]:
    """Return the default settings in conf/config.yaml, and the default member of each group."""
    composed = compose()
    plain = OmegaConf.to_container(composed.config)
    assert isinstance(plain, dict)  # of a DictConfig
    chosen = {group: composed.choices[group] for group in CONFIG_GROUPS}
    return chosen | {str(name): value for name, value in plain.items() if not isinstance(value, dict | list)}


def to_json(value: object) -> str:
    return json.dumps(value, sort_keys=True)

"""Check a composed configuration without importing torch.

Importing torch and transformers takes seconds. `check_settings` imports neither, so kvbench refuses a wrong setting at
once. `kvbench.runs.spec.RunSpec` continues with its result and checks everything that needs a method's class, a GPU or
a model's configuration.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvbench.analysis import solvable_subtasks
from kvbench.config import catalogue
from kvbench.interfaces.budget import Budget, check_budget
from kvbench.interfaces.task import Task
from kvbench.models.model_kinds import ModelKind
from kvbench.validation import SettingError, call_hook, check_sampling, format_value, require_choice, require_int

CACHE = ("method", "allocator", "codec")
KEPT = (  # settings that reproduce a run; `workers` is not one of them, because it changes no result
    *(*CACHE, "task", "model", "budget", "budget_of", "block_size", "question", "seed", "limit", "temperature"),
    *("top_p", "device", "dtype", "max_batch", "fidelity", "sweep"),
)
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class CheckedSettings:
    """The parts of a configuration that can be built without torch."""

    groups: Mapping[str, Mapping[str, Any]]
    """Resolved settings of the method, the allocator and the codec."""
    budget: Budget
    task: Task
    task_settings: Mapping[str, Any]
    """Resolved settings of the task."""
    settings: Mapping[str, Any]
    """The settings in `KEPT`, resolved."""


def check_settings(config: DictConfig, tasks: dict[str, Task] | None = None) -> CheckedSettings:
    """Check the settings of a run, and build its budget and its task. This loads neither torch nor weights.

    Args:
        config: The composed settings.
        tasks: Tasks of other runs of the same sweep, by their settings. Equal tasks are built and checked once.

    Raises:
        SettingError: A setting cannot be used. The message names it.
    """
    kept = keep_settings(config)
    groups = {group: catalogue.complete(group, kept[group]) for group in CACHE}
    settings = catalogue.complete("task", kept["task"])
    check_results(config.results)
    require_int("seed", config.seed, 0)
    if config.limit is not None:
        require_int("limit", config.limit, 1)
    if config.block_size is not None:
        require_int("block_size", config.block_size, 1)
    require_int("max_batch", config.max_batch, 1)
    require_choice("model.device_map", config.model.device_map, (None, "auto"))
    weights = OmegaConf.select(config, "model.weights")  # older records have no such setting
    require_choice("model.weights", weights, (None, "int4"))
    if weights is not None and config.model.device_map is not None:
        raise SettingError(f"model.weights={weights}: is loaded onto one GPU; model.device_map=null")
    require_choice("model.compile", config.model.compile, ("auto", "off"))
    for name in ("sweep.share_prefill", "sweep.share_decoding"):
        require_choice(name, OmegaConf.select(config, name), (True, False))
    require_choice("model.thinking", OmegaConf.select(config, "model.thinking"), (None, "on", "off"))
    if (system := settings.get(catalogue.SYSTEM)) is not None and (not isinstance(system, str) or not system.strip()):
        raise SettingError(f"task.system={format_value(system)}: a text, or null")
    require_choice("question", config.question, ("visible", "hidden"))
    require_choice("device", config.device, ("auto", "cpu", "cuda"))
    require_choice("dtype", config.dtype, ("auto", *DTYPES))
    check_workers(config.workers)
    check_sampling(config.temperature, config.top_p)
    budget, method = Budget(config.budget, config.budget_of), groups["method"]
    check_budget(budget, method["name"], method.get("budget_setting"))
    solvable_subtasks.check_card(config.model)
    find_model_kind(kept["model"]).check()
    tasks, key = {} if tasks is None else tasks, repr(settings)
    task = tasks[key] if key in tasks else catalogue.build("task", settings)
    if config.question == "hidden" and not getattr(task, "has_context", True):
        name = settings["name"]
        raise SettingError(f"question=hidden: {name} has no context apart from its question; use question=visible")
    require_choice("fidelity", fidelity := OmegaConf.select(config, "fidelity", default=False), (True, False))
    if fidelity and not hasattr(task, "reference"):
        raise SettingError(f"fidelity=true: task={settings['name']} has no reference answers; use fidelity=false")
    if system is not None and getattr(task, "measures", False):
        raise SettingError(f"task.system={system}: task={settings['name']} reads random tokens; null")
    if getattr(task, "measures", False) and method.get("budget_setting") is not None:
        raise SettingError(
            f"method={method['name']}: task={settings['name']} reads random tokens, whose scores say nothing about how "
            "many rows stay; choose a method with a budget"
        )
    if key not in tasks:
        call_hook(f"task={settings['name']}", "check", task.check)
        tasks[key] = task
    return CheckedSettings(groups, budget, task, settings, kept)


def check_results(results: object) -> None:
    """Raise a SettingError unless `results` names a folder."""
    if not isinstance(results, str) or not results:
        raise SettingError(f"results={format_value(results)}: a folder that can be written")


def check_workers(workers: object, name: str = "workers") -> None:
    """Raise a SettingError that begins with `name`, unless `workers` is null, auto or a number of processes."""
    if workers not in (None, "auto"):
        require_int(name, workers, 1)


def keep_settings(config: DictConfig) -> dict[str, Any]:
    """Return the resolved settings that reproduce a run, including paths.

    Raises:
        SettingError: A preset is unknown, or a setting refers to one that does not exist.
    """
    kept = {name: config[name] for name in KEPT if name in config}
    for name, value in kept.items():
        if isinstance(value, DictConfig):
            kept[name] = catalogue.read_settings(name, value)
    kept["model"].pop(solvable_subtasks.KEY, None)  # changes no number
    return kept


def find_model_kind(settings: Mapping[str, Any]) -> ModelKind:
    """Build the kind of model that the settings of the group `model` describe.

    Settings in older records do not name a class. For these, conf/model/<name>.yaml names it.
    """
    target = settings.get("_target_") or catalogue.load_settings("model", settings["name"])["_target_"]
    return catalogue.load_class(f"model={settings['name']}", target)(settings)

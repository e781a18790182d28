"""A run is a value: every resolved setting that may change a number. Its hash names the folder of its records."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from kvbench.analysis import solvable_subtasks
from kvbench.cache.guard import check_shape
from kvbench.cache.policy import CachePolicy
from kvbench.config import catalogue
from kvbench.config.provenance import source_hash
from kvbench.engine.compressed_cache import choose_cache
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.task import Task
from kvbench.models.checkpoint import Checkpoint
from kvbench.models.transformers_port import read_config_layout
from kvbench.runs import checks
from kvbench.runs.checks import CheckedSettings, check_settings, find_model_kind
from kvbench.store.run_folder import run_hash
from kvbench.validation import SettingError

IDENTITY = 2  # how a run is named; runs that were named in another way are shown, and never paired with these
DTYPES = {name: getattr(torch, name) for name in checks.DTYPES}
UNCUT = {"method": "full", "allocator": "uniform", "codec": "raw"}
# read by `RunSpec.from_config`; `workers` is left out: how many processes share a run changes nothing
READ = ("model", "task", *UNCUT, "budget", "budget_of", "block_size", "question", "seed", "limit", "temperature")
READ += ("top_p", "device", "dtype", "max_batch", "fidelity", "sweep")


@dataclass(frozen=True)
class RunSpec:
    """One cell: a model, a cache and a task, checked. Nothing is loaded or written yet."""

    checkpoint: Checkpoint
    groups: Mapping[str, Mapping[str, Any]]  # resolved settings of method, allocator and codec
    budget: Budget
    block_size: int | None
    question: str
    seed: int
    sampling: Sampling
    task: Task
    task_settings: Mapping[str, Any]
    device: str
    dtype: str
    max_batch: int
    fidelity: bool = False  # also compare predictions with the full cache's (kvbench.runs.fidelity)
    compile: bool = True  # decode in a CUDA graph where that is possible
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)  # as composed: `from_config`

    @classmethod
    def from_config(
        cls, config: DictConfig, checked: CheckedSettings | None = None, known: list["RunSpec"] | None = None
    ) -> "RunSpec":
        """Check every setting.

        Args:
            config: The composed settings.
            checked: What `check_settings` made of them, if it was asked before.
            known: Runs of the same sweep. They share the checkpoint and the baseline with this one where these are
                equal, so that a model's files and its identity are read once.

        Raises:
            SettingError: It names the first setting that cannot be used.
        """
        checked = checked or check_settings(config)
        groups, budget = dict(checked.groups), checked.budget
        if config.device == "cuda" and not torch.cuda.is_available():
            raise SettingError("device=cuda: there is no CUDA device here; use device=cpu or device=auto")
        device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        dtype = config.dtype if config.dtype != "auto" else "float32" if device == "cpu" else "bfloat16"
        if config.model.device_map is not None and (device == "cpu" or config.workers not in (None, 1)):
            raise SettingError(f"model.device_map={config.model.device_map}: needs GPUs and workers=1")
        if groups["method"]["name"] == "full":  # nothing is cut: what says how much does not matter
            groups["allocator"], budget = catalogue.load_settings("allocator", UNCUT["allocator"]), Budget(1.0)
        run = cls(
            checkpoint=share_equal(
                find_model_kind(config.model).checkpoint(config.seed), [own.checkpoint for own in known or ()]
            ),
            groups=groups,
            budget=budget,
            block_size=config.block_size,
            question=config.question,
            seed=config.seed,
            sampling=Sampling(config.temperature, config.top_p),
            task=checked.task,
            task_settings=checked.task_settings,
            device=device,
            dtype=dtype,
            max_batch=config.max_batch,
            fidelity=OmegaConf.select(config, "fidelity", default=False),  # older records have no such setting
            compile=config.model.compile == "auto",
            settings=keep_settings(config),
        )
        run.check()
        if known is not None:
            baseline = share_equal(run.baseline(), [own.baseline() for own in known])
            run.__dict__["_baseline"] = baseline  # where a cached property keeps its value
            known.append(run)
        return run

    def check(self) -> None:
        """What only all settings together can tell; the model's configuration is read, its weights are not."""
        choice = self.choice()
        if choice.method.one_block and self.block_size is not None:
            raise SettingError(
                f"block_size={self.block_size}: {choice.method.name} needs the prompt as one block (null)"
            )
        shape = read_config_layout(self.checkpoint.config())
        check_shape(choice.method, shape.layers, shape.heads, shape.dim, shape.sliding)
        if not self.checkpoint.reads_text and not self.measures:
            raise SettingError(
                f"model=random: task={self.task_settings['name']} needs text and it has no tokenizer; task=efficiency, "
                "or to time it model.tokenizer=reference"
            )
        longest, switch = self.checkpoint.longest(), self.checkpoint.find_rope_switch()
        self.checkpoint.check()
        in_parts = self.block_size is not None or self.question == "hidden" or choice.method.needs_extra_reads
        if switch is not None and in_parts and (self.task.length or longest) > switch:
            raise SettingError(
                f"task.length={self.task.length}: this model's RoPE changes its frequencies beyond {switch} tokens, so "
                f"a prompt read in parts is another one; block_size=null and question=visible, or at most {switch}"
            )
        if self.task.length is not None and self.task.length > longest:
            setting = "length" if "length" in self.task_settings else "lengths"
            raise SettingError(
                f"task.{setting}={self.task.length}: {self.checkpoint.name} takes at most {longest} tokens"
            )

    @property
    def measures(self) -> bool:
        """True for a task that measures cost on random tokens and has no samples."""
        return getattr(self.task, "measures", False)

    def choice(self) -> CachePolicy:
        """Method, allocator and codec, constructed."""
        return choose_cache(*(catalogue.build(group, self.groups[group]) for group in UNCUT))

    @property
    def full(self) -> bool:
        """True for the full cache, whatever its codec."""
        return self.groups["method"]["name"] == "full"

    def baseline(self) -> "RunSpec":
        """The full cache on the same samples; one for all methods, budgets, block sizes and allocators."""
        return self._baseline

    @cached_property
    def _baseline(self) -> "RunSpec":
        groups = {group: catalogue.load_settings(group, name) for group, name in UNCUT.items()}
        own = replace(self, groups=groups, budget=Budget(1.0), block_size=None)
        return self if own == self else own  # and so its value, once it is known

    @cached_property
    def reading(self) -> str | None:
        """Runs in which this is the same read a prompt in the same way, and may do so once for all; None: alone."""
        method, shape = self.choice().method, read_config_layout(self.checkpoint.config())
        if self.block_size is not None or method.needs_extra_reads or shape.sliding or shape.window is not None:
            return None
        return run_hash(self.baseline().value) + (" with log-sum-exps" if method.wants_lse else "")

    @cached_property
    def value(self) -> dict[str, Any]:
        """All that may change a number, for the hash and for run.yaml. On a GPU rounding depends on more settings."""
        plain = {group: catalogue.identity_settings(own) for group, own in self.groups.items()}
        where: dict[str, Any] = {"type": self.device, "dtype": self.dtype}
        where |= {name: version(name) for name in ("torch", "transformers")}
        if self.device != "cpu":
            where |= {"gpu": torch.cuda.get_device_name(), "max_batch": self.max_batch, "compile": self.compile}
            where["device_map"] = self.checkpoint.device_map
        own = {"fidelity": True} if self.fidelity else {}
        return own | {
            "model": {"name": self.checkpoint.name, "identity": self.checkpoint.identity()},
            **plain,
            "budget": self.budget.value,
            "budget_of": self.budget.of,
            "block_size": None if self.full else self.block_size,
            "question": self.question,
            "seed": self.seed,
            "sampling": {"temperature": float(self.sampling.temperature), "top_p": float(self.sampling.top_p)},
            "task": catalogue.task_identity(self.task_settings),
            "averages": [[name, own] for name, own in (getattr(self.task, "averages", None) or {}).items()],  # in order
            "data": self.task.fingerprint(),
            "device": where,
            "sources": source_hash(self.sources()),
            "identity": IDENTITY,
        }

    def sources(self) -> list[str]:
        """The modules whose sources, with all that they import, are part of what the run is known by."""
        return ["kvbench.runs.runner", *self.modules()]

    def modules(self) -> list[str]:
        """Of the method, allocator, codec, task and kind of model."""
        chosen = [*self.groups.values(), self.task_settings]
        chosen += [own for own in [self.settings.get("model", {})] if "_target_" in own]
        chosen += [own["base"] for own in chosen if "base" in own]
        return [own["_target_"].rpartition(".")[0] for own in chosen]


def keep_settings(config: DictConfig) -> dict[str, Any]:
    """The resolved settings that `RunSpec.from_config` reads, paths among them: enough to make the same run again."""
    found: dict[str, Any] = {}
    for name in (key for key in config if key in READ):
        own = config[name]
        found[name] = own = OmegaConf.to_container(own, resolve=True) if OmegaConf.is_config(own) else own
        if isinstance(own, dict):
            own.pop("presets", None)  # the chosen one is in the settings
            own.pop(solvable_subtasks.KEY, None)  # of a model: it changes no number
    return found


def share_equal(own: Any, known: Iterable[Any]) -> Any:
    """The first of `known` that equals `own`, or `own` itself."""
    return next((other for other in known if other == own), own)

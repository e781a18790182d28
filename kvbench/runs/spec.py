"""Describe and check a run. A run is a value: every resolved setting that may change a number.

The hash of the value names the folder of the run's records. `RunSpec.describe` needs neither torch nor transformers,
so a sweep whose runs are all in the store is answered without importing them. `RunSpec.check` needs the method's class
and therefore torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from kvbench.config import catalogue
from kvbench.config.provenance import find_installed_version, source_hash
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.layout import Layout
from kvbench.interfaces.task import Task
from kvbench.models.checkpoint import Checkpoint
from kvbench.runs.checks import CheckedSettings, check_settings, find_model_kind
from kvbench.runs.devices import choose_device, choose_dtype, name_gpu
from kvbench.store.run_folder import run_hash
from kvbench.validation import SettingError, call_hook

IDENTITY = 2  # version of the rules that name runs; runs of other versions are shown, but not paired with these
Part = TypeVar("Part")
UNCUT = {"method": "full", "allocator": "uniform", "codec": "raw"}


class SharedParts:
    """Equal parts of the runs of a sweep. Runs share them, so that a model's files are read once.

    Attributes:
        checkpoints: Different checkpoints.
        baselines: Different runs of the full cache.
        tasks: Different tasks, by their settings.
    """

    def __init__(self) -> None:
        self.checkpoints: list[Checkpoint] = []
        self.baselines: list[RunSpec] = []
        self.tasks: dict[str, Task] = {}

    def share(self, part: Part, known: list[Part]) -> Part:
        """Return the element of `known` that equals `part`. If there is none, append `part` and return it."""
        same = next((other for other in known if other == part), None)
        if same is None:
            known.append(same := part)
        return same


@dataclass(frozen=True)
class RunSpec:
    """One run: a model, a cache and a task. Nothing is loaded or written yet."""

    checkpoint: Checkpoint
    groups: Mapping[str, Mapping[str, Any]]  # resolved settings of method, allocator and codec
    budget: Budget
    block_size: int | None
    question: str
    seed: int
    temperature: float
    top_p: float
    task: Task
    task_settings: Mapping[str, Any]
    device: str
    dtype: str
    max_batch: int
    fidelity: bool = False  # also compare predictions with the full cache's (kvbench.runs.fidelity)
    thinking: str | None = None  # what the chat template is told: "on" or "off"
    compile: bool = True  # decode in a CUDA graph where that is possible
    shares_decoding: bool = field(default=False, compare=False)  # with the other runs of a sweep, on a GPU
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)  # as composed
    shared: SharedParts = field(default_factory=SharedParts, compare=False, repr=False)
    served: set[Layout] = field(default_factory=set, init=False, compare=False, repr=False)  # what `check` accepted

    @classmethod
    def from_config(cls, config: DictConfig) -> "RunSpec":
        """Describe the run of composed settings and check it.

        Raises:
            SettingError: It names the first setting that cannot be used.
        """
        run = cls.describe(config, check_settings(config))
        run.check()
        return run

    @classmethod
    def describe(cls, config: DictConfig, checked: CheckedSettings, shared: SharedParts | None = None) -> "RunSpec":
        """Describe a run that is not checked yet, without torch and transformers.

        Args:
            config: The composed settings.
            checked: What `check_settings` made of them.
            shared: What it may share with other runs of the same sweep.

        Raises:
            SettingError: There is no such device or model.
        """
        shared = shared or SharedParts()
        groups, budget = dict(checked.groups), checked.budget
        device = choose_device(config.device)
        if config.model.device_map is not None and (device == "cpu" or config.workers not in (None, 1)):
            raise SettingError(f"model.device_map={config.model.device_map}: needs GPUs and workers=1")
        if groups["method"]["name"] == "full":  # it cuts nothing, whatever allocator and budget say
            groups["allocator"], budget = catalogue.load_settings("allocator", UNCUT["allocator"]), Budget(1.0)
        checkpoint = find_model_kind(checked.settings["model"]).checkpoint(config.seed)
        weights = OmegaConf.select(config, "model.weights")  # older records have no such setting
        if weights != checkpoint.weights_format:
            raise SettingError(f"model.weights={weights}: model={config.model.name} has no such weights; null")
        return cls(
            checkpoint=shared.share(checkpoint, shared.checkpoints),
            groups=groups,
            budget=budget,
            block_size=config.block_size,
            question=config.question,
            seed=config.seed,
            temperature=config.temperature,
            top_p=config.top_p,
            task=checked.task,
            task_settings=checked.task_settings,
            device=device,
            dtype=choose_dtype(config.dtype, device),
            max_batch=config.max_batch,
            fidelity=OmegaConf.select(config, "fidelity", default=False),  # older records have no such setting
            thinking=OmegaConf.select(config, "model.thinking"),  # nor have they this one
            compile=config.model.compile == "auto",
            shares_decoding=device != "cpu" and OmegaConf.select(config, "sweep.share_decoding", default=False),
            settings=checked.settings,
            shared=shared,
        )

    def check(self) -> None:
        """Check what only all settings together can tell. The model's configuration is read, its weights are not.

        Raises:
            SettingError: It names the first setting that cannot be used.
        """
        from kvbench.cache.hook_table import check_identity
        from kvbench.cache.refusals import explain_one_block

        choice = self.choice()
        if choice.method.one_block and self.block_size is not None:
            reason = explain_one_block(choice.method)
            raise SettingError(f"block_size={self.block_size}: {choice.method.name} {reason}")
        shape = self.checkpoint.layout()
        choice.check(shape)
        self.served.update(choice.served)
        if not self.checkpoint.reads_text and not self.measures:
            raise SettingError(
                f"model=random: task={self.task_settings['name']} needs text and it has no tokenizer; task=efficiency, "
                "or to time it model.tokenizer=reference"
            )
        longest, switch = shape.longest, shape.rope_switch
        self.checkpoint.check()
        check_identity(choice.method, choice.codec, self.checkpoint.identity)
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
        """Whether the task measures cost on random tokens. Such a task has no samples."""
        return getattr(self.task, "measures", False)

    @property
    def system(self) -> str | None:
        """The system prompt."""
        return self.task_settings.get(catalogue.SYSTEM)

    @property
    def sampling(self) -> Any:
        """How tokens are chosen, a `kvbench.engine.sampling.Sampling`."""
        from kvbench.engine.sampling import Sampling

        return Sampling(self.temperature, self.top_p)

    @property
    def torch_dtype(self) -> Any:
        """The dtype of the weights, a `torch.dtype`."""
        import torch

        return getattr(torch, self.dtype)

    def choice(self) -> Any:
        """Construct the method, allocator and codec, which are not checked again for a layout that `check` accepted.

        Every call constructs them anew, because a method or codec keeps what it has read of its file, and copies of
        that on the device. A sweep would hold them for all its runs at once.

        Returns:
            A `kvbench.cache.policy.CachePolicy`.

        Raises:
            SettingError: A setting is invalid, or two of the three cannot work together.
        """
        from kvbench.cache.policy import choose_cache

        policy = choose_cache(*(catalogue.build(group, self.groups[group]) for group in UNCUT))
        policy.served.update(self.served)
        return policy

    @property
    def choice_name(self) -> str:
        """A text that is equal for runs with the same method, allocator and codec."""
        return str(sorted(self.groups.items()))

    @property
    def is_of_kvbench(self) -> bool:
        """Whether kvbench holds all classes that the settings name."""
        return all(module.split(".")[0] == "kvbench" for module in self.modules())

    @property
    def full(self) -> bool:
        """Whether nothing is evicted. The codec may still be lossy."""
        return self.groups["method"]["name"] == "full"

    def baseline(self) -> "RunSpec":
        """Return the run of the full cache on the same samples. All methods, budgets and block sizes share it."""
        return self._baseline

    @cached_property
    def _baseline(self) -> "RunSpec":
        groups = {group: catalogue.load_settings(group, name) for group, name in UNCUT.items()}
        baseline = replace(self, groups=groups, budget=Budget(1.0), block_size=None)
        # runs share one object, so that its value is computed once
        return self.shared.share(self if baseline == self else baseline, self.shared.baselines)

    @cached_property
    def reading(self) -> str | None:
        """A text that is equal for runs that can share the prefill of a prompt. None if this run must read alone."""
        choice, shape = self.choice(), self.checkpoint.layout()
        method = choice.method
        if self.block_size is not None or method.needs_extra_reads or shape.sliding or shape.window is not None:
            return None
        if self.budget.value is None:  # it reads samples one by one, and others in batches
            return None
        key = run_hash(self.baseline().value) + (" with log-sum-exps" if "lse" in method.wants else "")
        if choice.codec.packing.before_attention:
            key += f" with codec {run_hash(catalogue.identity_settings(self.groups['codec']))}"
        return key

    @cached_property
    def value(self) -> dict[str, Any]:
        """All settings that may change a number, for the hash and run.yaml. On a GPU, more settings change rounding."""
        plain = {group: catalogue.identity_settings(settings) for group, settings in self.groups.items()}
        where: dict[str, Any] = {"type": self.device, "dtype": self.dtype}
        where |= {name: find_installed_version(name) for name in ("torch", "transformers")}
        if self.device != "cpu":
            where |= {"gpu": name_gpu(), "max_batch": self.max_batch, "compile": self.compile}
            where["device_map"] = self.checkpoint.device_map
        fidelity = {"fidelity": True} if self.fidelity else {}
        averages = getattr(self.task, "averages", None) or {}
        model: dict[str, Any] = {"name": self.checkpoint.name, "identity": self.checkpoint.identity()}
        model |= {} if self.checkpoint.most is None else {"longest": self.checkpoint.most}
        model |= {} if self.checkpoint.weights_format is None else {"weights": self.checkpoint.weights_format}
        model |= {} if self.thinking is None else {"thinking": self.thinking}
        return fidelity | {
            "model": model,
            **plain,
            "budget": self.budget.value,
            "budget_of": self.budget.of,
            "block_size": None if self.full else self.block_size,
            "question": self.question,
            "seed": self.seed,
            "sampling": {"temperature": float(self.temperature), "top_p": float(self.top_p)},
            "task": catalogue.task_identity(self.task_settings),
            "averages": [[name, weights] for name, weights in averages.items()],  # a list, whose order counts
            "data": call_hook(f"task={self.task_settings.get('name')}", "fingerprint", self.task.fingerprint),
            "device": where,
            "sources": source_hash(self.sources()),
            "identity": IDENTITY,
        }

    def sources(self) -> list[str]:
        """Return the modules whose sources, with everything that they import, are part of the hash."""
        return ["kvbench.runs.runner", *self.modules()]

    def modules(self) -> list[str]:
        """Return the modules of the method, allocator, codec, task and kind of model."""
        chosen = [*self.groups.values(), self.task_settings]
        chosen += [settings for settings in [self.settings.get("model", {})] if "_target_" in settings]
        chosen += [settings["base"] for settings in chosen if "base" in settings]
        return [settings["_target_"].rpartition(".")[0] for settings in chosen]

"""Load what the runs of one process share: the model, its tokenizer and the encoded prompts."""

import sys
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tqdm import tqdm

from kvbench.engine.full_cache_check import check_full_cache
from kvbench.engine.spending import spend
from kvbench.interfaces.task import Sample
from kvbench.models.chat_template import count_template_tokens, find_end, settle_template
from kvbench.models.encoding import FastTokenizer, find_appended, find_ids_beyond
from kvbench.models.loading import find_stop_tokens
from kvbench.runs.integrity import WeightHashes
from kvbench.runs.prompt import Prompt, encode_all
from kvbench.runs.spec import RunSpec
from kvbench.runs.task_calls import read_samples
from kvbench.store.run_folder import RunFolder
from kvbench.validation import SettingError, exempt_imports_from_collection

BEGINNING = 300  # tokens of the first prompt that a model of a probed architecture reads to compare its logits


@dataclass
class Resources:
    """Tokenizer, samples and weights of a checkpoint. Each is loaded once, when it is first needed.

    Attributes:
        run: The run whose checkpoint and task are loaded.
        loaded: What has been loaded, by name.
        full: The full cache's records, for runs with fidelity=true.
        predictions: The full cache's predictions that this process has made, by uid.
        rehearsed: What was tried before a first sample and need not be tried again with this model: the choices of
            responders, and what a group of runs may need (`kvbench.runs.warming.list_needs`).
        gpu_processes: The number of processes of the sweep that use this one's GPU, this one included; 1 on a CPU.
        processes: The number of processes that share the samples, this one included.
        speaks: Whether notes about the model are printed. One process of a sweep prints them.
        accused: What a method did that harms other runs, by `RunSpec.choice_name`. It is not executed again.
    """

    run: RunSpec
    loaded: dict[str, Any] = field(default_factory=dict)
    full: RunFolder | None = None
    predictions: dict[str, str] = field(default_factory=dict)
    rehearsed: set[Hashable] = field(default_factory=set)
    gpu_processes: int = 1
    processes: int = 1
    speaks: bool = True
    accused: dict[str, str] = field(default_factory=dict)

    def renew(self, run: RunSpec) -> "Resources":
        """Return the resources of another run, with what it can use of these.

        The caller must drop this object before the new one loads a model. Otherwise both models are in memory.
        """
        before, rehearsed = self.run, set()
        loaded: dict[str, Any] = {}
        same = run.checkpoint == before.checkpoint
        if same and (run.system, run.thinking) == (before.system, before.thinking):
            loaded |= {name: resource for name, resource in self.loaded.items() if name in ("tokenizer", "beyond")}
        if same and (run.dtype, run.device) == (before.dtype, before.device) and "model" in self.loaded:
            loaded |= {
                name: part for name, part in self.loaded.items() if name in ("model", "weights", "ends", "law 1")
            }
            rehearsed = self.rehearsed
        asked = run.thinking == before.thinking and run.task_settings == before.task_settings
        if same and asked and "prompts" in self.loaded:
            loaded["prompts"] = self.loaded["prompts"]
            run = replace(run, task=before.task)  # only the task that made the samples can score them
        alike = run.baseline().value == before.baseline().value
        predictions = self.predictions if alike else {}
        return Resources(
            run,
            loaded,
            predictions=predictions,
            rehearsed=rehearsed,
            gpu_processes=self.gpu_processes,
            processes=self.processes,
            speaks=self.speaks,
            accused=self.accused,
        )

    def _say(self, line: str) -> None:
        """Print a line about the model. What is loaded says it once."""
        if self.speaks:
            tqdm.write(f"kvbench: model={self.run.checkpoint.name}: {line}", file=sys.stderr)

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self.loaded:
            self.loaded[name] = make()
        return self.loaded[name]

    @property
    def probed(self) -> str | None:
        """The name of the model's architecture if a probe admitted it, or None if it is on the tested list."""
        probe = self.run.checkpoint.layout().probe
        return None if probe is None else probe.architecture

    def check_probed(self) -> None:
        """Repeat with the loaded weights and the beginning of the first prompt what the probe did with a miniature.

        Nothing is done for an architecture on the tested list. What is loaded is checked once.

        Raises:
            SettingError: The full cache gives other logits than transformers' eager attention.
        """
        if self.probed is not None:
            self._once("law 1", self._compare_with_eager)

    def _compare_with_eager(self) -> float:
        self._say(f"its architecture {self.probed} was probed, and is not on the tested list (docs/models.md)")
        _, prompt = next(iter(self.prompts.values()))
        return check_full_cache(self.model, torch.tensor([prompt.ids[:BEGINNING]], device=self.run.device))

    @property
    def tokenizer(self) -> FastTokenizer:
        """The checkpoint's tokenizer, whose chat template shows the run's system prompt.

        Raises:
            SettingError: The model has no embeddings for its ids, or the chat template cannot do what settings ask for.
        """

        @spend("loading")
        def load() -> FastTokenizer:
            tokenizer, merged = settle_template(self.run.checkpoint.tokenizer(), self.run.system, self.run.thinking)
            if merged:
                self._say("its chat template has no system role; task.system stands in front of the first message")
            self._find_beyond(tokenizer)
            if appended := find_appended(tokenizer):
                self._say(
                    f"its tokenizer appends {tokenizer.decode(appended)} to every text; prompts are read without it"
                )
            return tokenizer

        return self._once("tokenizer", load)

    @property
    def model(self) -> torch.nn.Module:
        """The model with its weights on the run's device.

        Raises:
            SettingError: The GPU's memory does not suffice.
            torch.cuda.OutOfMemoryError: The same, but other processes of the sweep use the GPU too.
        """

        @spend("loading")
        def load() -> torch.nn.Module:
            exempt_imports_from_collection()
            try:
                model = self.run.checkpoint.weights(self.run.torch_dtype, self.run.device)
                self.loaded["weights"] = WeightHashes(model)
                return model
            except torch.cuda.OutOfMemoryError:
                if self.gpu_processes > 1:
                    raise
                raise SettingError(
                    f"model={self.run.checkpoint.name}: its weights do not fit into the GPU's memory; a smaller model, "
                    "a smaller dtype, or model.device_map=auto"
                ) from None

        return self._once("model", load)

    @property
    def weights(self) -> WeightHashes:
        """What the model's weights were when they were loaded."""
        return self._once("weights", lambda: WeightHashes(self.model))

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end an answer: those of the model's generation_config, of its tokenizer and chat template."""

        def find() -> frozenset[int]:
            tokenizer, listed = self.tokenizer, find_stop_tokens(self.model)
            by_source = {"generation_config": listed, "tokenizer": {tokenizer.eos_token_id}}
            by_source["chat template"] = {find_end(tokenizer)}
            ends = {name: frozenset(token for token in ids if token is not None) for name, ids in by_source.items()}
            stop_ids = frozenset().union(*ends.values())
            if not stop_ids:
                self._say("it has no token that ends an answer; an answer has max_new_tokens tokens")
            elif stop_ids > listed:  # generation_config may list several, which is fine
                named = [f"{name} {_name_tokens(tokenizer, ids)}" for name, ids in ends.items()]
                self._say(f"answers end at any of these tokens, which differ: {', '.join(named)}")
            return stop_ids

        return self._once("ends", find)

    def _find_beyond(self, tokenizer: FastTokenizer) -> frozenset[int]:
        """Return the ids of the tokenizer's special tokens for which the model has no embedding."""

        def find() -> frozenset[int]:
            model, checkpoint = self.loaded.get("model"), self.run.checkpoint
            config = checkpoint.config() if model is None else model.config
            size = config.get_text_config(decoder=True).vocab_size
            return find_ids_beyond(tokenizer, size, f"model.path={checkpoint.path}")

        return self._once("beyond", find)

    def reload_model(self) -> None:
        """Load the weights again when they are needed next, because a method wrote into them."""
        for name in ("model", "weights"):
            self.loaded.pop(name, None)

    @property
    def prompts(self) -> dict[str, tuple[Sample, Prompt]]:
        """Sample and prompt by uid, in the task's order."""

        @spend("samples")
        def make() -> dict[str, tuple[Sample, Prompt]]:
            longest = self.run.checkpoint.longest()
            owner, added = f"task={self.run.task_settings.get('name')}", count_template_tokens(self.tokenizer)
            samples = read_samples(owner, self.run.task, self.tokenizer, added, longest)
            prompts = encode_all(self.tokenizer, samples)
            if self.run.system is not None and not any(sample.chat for sample, _ in prompts.values()):
                raise SettingError("task.system: no sample of this task is read with the chat template; null")
            if beyond := self._find_beyond(self.tokenizer):
                for uid, (_, prompt) in prompts.items():
                    if used := beyond.intersection(prompt.ids):
                        tokens = _name_tokens(self.tokenizer, used)
                        raise SettingError(f"task: {uid} contains {tokens}, for which the model has no embedding")
            return prompts

        return self._once("prompts", make)


def _name_tokens(tokenizer: FastTokenizer, ids: Iterable[int]) -> str:
    return " ".join(map(str, tokenizer.convert_ids_to_tokens(sorted(ids)))) or "none"

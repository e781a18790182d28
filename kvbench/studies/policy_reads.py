"""Read prompts with the methods that studies compare, and show the studies what was kept."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.policy import CachePolicy, choose_cache
from kvbench.config.catalogue import build, identity_settings, load_settings
from kvbench.config.provenance import source_hash
from kvbench.engine.generation import GenerationContext
from kvbench.engine.shared_prefill import prefill
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.layout import Layout
from kvbench.interfaces.observation import Observation
from kvbench.interfaces.rows import Rows
from kvbench.models.transformers_port import read_layout
from kvbench.store.study_lines import Line
from kvbench.studies.policy_study import Policy, PolicyStudy, Reading
from kvbench.studies.study import Memory
from kvbench.studies.watched_method import watch_method


def load_policy(policy: Policy) -> dict[str, dict[str, Any]]:
    """Return the settings of a policy's method, allocator and codec."""
    presets = {"method": policy.preset, "allocator": policy.allocator_preset}
    names = {"method": policy.method, "allocator": policy.allocator, "codec": "raw"}
    return {
        group: load_settings(group, name, {"preset": preset} if (preset := presets.get(group)) else None)
        for group, name in names.items()
    }


def build_policy(policy: Policy) -> CachePolicy:
    """Build a policy's method, allocator and codec.

    Raises:
        SettingError: Two of them cannot work together.
    """
    return choose_cache(*(build(group, settings) for group, settings in load_policy(policy).items()))


def check_policies(study: PolicyStudy, layout: Layout) -> None:
    """Check that the methods that a study compares can serve a model.

    Raises:
        SettingError: One cannot. The message names it.
    """
    for choice in map(build_policy, study.policies):
        choice.check(layout)


def identify_policies(study: PolicyStudy) -> dict[str, Any]:
    """Return the settings of the methods that a study compares, and a hash of their sources."""
    loaded = [load_policy(policy) for policy in study.policies]
    modules = [part["_target_"].rpartition(".")[0] for parts in loaded for part in parts.values()]
    settings = [{group: identity_settings(part) for group, part in parts.items()} for parts in loaded]
    return {"policies": settings, "methods": source_hash(sorted(set(modules)))}


def read_policies(
    model: torch.nn.Module, ids: Tensor, prefix: int, studies: Sequence[PolicyStudy], seed: int, first: bool
) -> Iterator[tuple[PolicyStudy, list[Line]]]:
    """Read a prompt in all ways that studies ask for, and yield each study's lines.

    Args:
        model: A supported model.
        ids: Token ids of the prompt, (1, n).
        prefix: Number of tokens before the text.
        studies: The studies.
        seed: Seed of the sample.
        first: Whether it is the first prompt.
    """
    wanted: dict[Reading, list[PolicyStudy]] = {}
    for study in studies:
        for reading in study.list_readings(ids.shape[1], first):
            wanted.setdefault(reading, []).append(study)
    choices = {reading: build_policy(reading.policy) for reading in wanted}
    memories: dict[str, Memory] = {study.name: {} for study in studies}
    groups: dict[Hashable, list[Reading]] = {}
    layout = read_layout(model)
    for reading, choice in choices.items():  # one pass serves all methods that read the same tokens as one block
        alone = reading.block_size is not None or choice.method.needs_extra_reads
        alone = alone or bool(layout.sliding) or layout.window is not None
        groups.setdefault(reading if alone else (reading.tokens, "lse" in choice.method.wants), []).append(reading)
    for group in groups.values():
        contexts = []
        for reading in group:
            choice, look = choices[reading], watch_reading(reading, wanted[reading], memories)
            if look is not None:
                choice = CachePolicy(watch_method(choice.method, look), choice.allocator, choice.codec)
            budget = Budget(reading.budget)
            contexts.append(
                GenerationContext(model, choice, budget, reading.block_size, (seed,), prefix, compile=False)
            )
        part = ids[:, : group[0].tokens]
        if len(contexts) > 1:
            prefill(contexts, part)
        else:
            contexts[0].prefill(part)
        for reading, context in zip(group, contexts, strict=True):
            for study in wanted[reading]:
                study.inspect(memories[study.name], reading, context, ids[:, reading.tokens :])
        del contexts, context  # freed before the next ones grow
    for study in studies:
        yield study, list(study.finish(memories[study.name], first))


def watch_reading(
    reading: Reading, studies: Sequence[PolicyStudy], memories: dict[str, Memory]
) -> Callable[[Observation, Rows], None] | None:
    """Return a function that shows a block to the studies that watch; None if none does."""
    watching = [study for study in studies if type(study).watch is not PolicyStudy.watch]

    def look(observation: Observation, rows: Rows) -> None:
        for study in watching:
            study.watch(memories[study.name], reading, observation, rows)

    return look if watching else None

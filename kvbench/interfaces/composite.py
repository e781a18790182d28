"""The interface of a composite: a method that holds another one, its base, and decides by the base's scores."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor

from kvbench.interfaces.layout import Layout
from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import ExtraRead, Observation, PromptEncoder, State
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting
from kvbench.interfaces.tensor_files import ModelFile
from kvbench.validation import SettingError

T = TypeVar("T")


@dataclass(frozen=True)
class Composite(Method):
    """The base of every composite. It answers each question as its base method does, with its own settings of decoding.

    In a method's file, `base` is the name of the base method and `base_args` are its settings.
    """

    base: Method = setting()
    """The method whose scores count."""

    def __post_init__(self) -> None:
        super().__post_init__()
        captured = self.base.captured
        if not self.base.overrides("score") or (captured is not None and captured.streams):
            raise SettingError(f"method.base={self.base.name}: {self.name} needs a method that scores rows")
        if self.base.budget_setting is not None:
            raise SettingError(
                f"method.base={self.base.name}: it decides itself how many rows stay; choose another method"
            )
        if self.base.merges:
            raise SettingError(
                f"method.base={self.base.name}: it changes the rows that stay, and {self.name} takes scores only; "
                "choose another method"
            )
        base = replace(
            self.base,
            decoding=self.decoding,
            decode_interval=self.decode_interval,
            decode_size=self.decode_size,
        )
        object.__setattr__(self, "base", base)

    @property
    def wants(self) -> tuple[str, ...]:
        return self.base.wants

    @property
    def refusals(self) -> Mapping[str, str]:
        of = f"has {self.base.name} as its base, which"
        reasons = {name: f"{of} {name_base_args(reason)}" for name, reason in self.base.refusals.items()}
        if self.budget_setting is None:
            return reasons
        # whatever the base says of allocators, a method that counts its rows needs allocator=uniform
        return {name: reason for name, reason in reasons.items() if not name.endswith("allocator")}

    @property
    def file(self) -> ModelFile | None:
        return self.base.file

    @property
    def sets_head_quotas(self) -> bool:
        return self.base.sets_head_quotas or self.budget_setting is not None

    @property
    def takes_rotation(self) -> bool:
        return self.base.takes_rotation

    @property
    def needs_extra_reads(self) -> bool:
        return self.base.needs_extra_reads

    @property
    def uses_cache_positions(self) -> bool:
        return self.base.uses_cache_positions

    def check(self, layout: Layout) -> None:
        self.base.check(layout)

    def extra_reads(self, ids: Tensor, prefix: int, words: PromptEncoder) -> Iterable[ExtraRead]:
        return self.base.extra_reads(ids, prefix, words)

    def objective(self, hidden: Tensor) -> Tensor:
        return self.base.objective(hidden)

    def skips_layer(self, layer: int, layers: int) -> bool:
        return self.base.skips_layer(layer, layers)

    def head_quotas(self, quota: int, observation: Observation, state: State) -> Tensor:
        return self.base.head_quotas(quota, observation, state)

    def update(self, observation: Observation, rows: Rows, state: State) -> Mapping[str, Tensor]:
        return self.base.update(observation, rows, state)

    def steps(self, tokens: int, quota: int | None) -> int:
        return self.base.steps(tokens, quota)

    def forget(self, state: State) -> None:
        self.base.forget(state)

    def protect_sinks(self, observation: Observation, rows: Rows, quota: int | Tensor) -> Tensor | None:
        return self.base.protect_sinks(observation, rows, quota)

    def protect(self, observation: Observation, rows: Rows, quota: int | Tensor) -> Tensor | None:
        return self.base.protect(observation, rows, quota)

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        return self.base.score(observation, rows, state)


def name_base_args(reason: str) -> str:
    """Return a base's reason, whose advice names the base's own settings as those of a composite."""

    def rename(setting: re.Match[str]) -> str:
        name, value = setting.groups()
        return setting[0] if name in Method.__dataclass_fields__ else f"method.base_args={{{name}: {value}}}"

    return re.sub(r"method\.(\w+)=(\w+)", rename, reason)


def ask_base(hook: Callable[..., T] | None) -> Callable[..., T] | None:
    """Return a hook of captured steps that asks the base of the composite that it gets first. None stays None."""
    return None if hook is None else lambda composite, *given: hook(composite.base, *given)

"""The interface of a composite: a method that holds another one, its base, and decides by the base's scores."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.codec import Codec
from kvbench.interfaces.layout import Layout
from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import ExtraRead, Observation, PromptEncoder, State, StateCapture
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting
from kvbench.validation import SettingError


@dataclass(frozen=True)
class Composite(Method):
    """The base of every composite. It answers each question as its base method does, with its own settings of decoding.

    In a method's file, `base` is the name of the base method and `base_args` are its settings.
    """

    base: Method = setting()
    """The method whose scores count."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.base.overrides("score") or self.base.streams:
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
    def wants_lse(self) -> bool:
        return self.base.wants_lse

    @property
    def wants_unrotated_keys(self) -> bool:
        return self.base.wants_unrotated_keys

    @property
    def wants_hidden(self) -> bool:
        return self.base.wants_hidden

    @property
    def wants_normed_hidden(self) -> bool:
        return self.base.wants_normed_hidden

    @property
    def needs_fixed_rotation(self) -> bool:
        return self.base.needs_fixed_rotation

    @property
    def wants_gradient(self) -> bool:
        return self.base.wants_gradient

    @property
    def weights_bytes(self) -> int:
        return self.base.weights_bytes

    @property
    def one_block(self) -> bool:
        return self.base.one_block

    @property
    def needs_extra_reads(self) -> bool:
        return self.base.needs_extra_reads

    @property
    def uses_cache_positions(self) -> bool:
        return self.base.uses_cache_positions

    @property
    def moves_state(self) -> bool:
        return self.base.moves_state

    def check(self, layout: Layout) -> None:
        self.base.check(layout)

    def check_identity(self, identify: Callable[[], str]) -> None:
        self.base.check_identity(identify)

    def refuses(self, allocator: Allocator, codec: Codec) -> str | None:
        return super().refuses(allocator, codec) or self.base.refuses(allocator, codec)

    def extra_reads(self, ids: Tensor, prefix: int, words: PromptEncoder) -> Iterable[ExtraRead]:
        return self.base.extra_reads(ids, prefix, words)

    def objective(self, hidden: Tensor) -> Tensor:
        return self.base.objective(hidden)

    def skips_layer(self, layer: int, layers: int) -> bool:
        return self.base.skips_layer(layer, layers)

    def update(self, observation: Observation, rows: Rows, state: State) -> Mapping[str, Tensor]:
        return self.base.update(observation, rows, state)

    def steps(self, tokens: int, quota: int | None) -> int:
        return self.base.steps(tokens, quota)

    def forget(self, state: State) -> None:
        self.base.forget(state)

    def capture_state(self, state: State, capture: StateCapture) -> State | None:
        return self.base.capture_state(state, capture)

    def release_state(self, captured: State, state: State, seen: int, since: int) -> None:
        self.base.release_state(captured, state, seen, since)

    def protect_sinks(self, observation: Observation, rows: Rows, quota: int | Tensor) -> Tensor | None:
        return self.base.protect_sinks(observation, rows, quota)

    def protect(self, observation: Observation, rows: Rows, quota: int | Tensor) -> Tensor | None:
        return self.base.protect(observation, rows, quota)

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        return self.base.score(observation, rows, state)

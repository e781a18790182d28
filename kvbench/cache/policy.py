"""The method, allocator and codec of a cache, and how far its prompt has been read."""

from dataclasses import dataclass, field
from fractions import Fraction

from kvbench.cache.hook_table import (
    check_declarations,
    check_known_rotation,
    check_rotation,
    check_shape,
    check_softcap,
    check_widths,
)
from kvbench.cache.refusals import find_refusal
from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.codec import Codec
from kvbench.interfaces.layout import Layout
from kvbench.interfaces.method import Method
from kvbench.validation import SettingError

LAYER_INPUTS = frozenset({"unrotated_keys", "hidden", "normed_hidden"})
"""The inputs of a layer's attention that a method may ask for."""


@dataclass(frozen=True)
class Progress:
    """How far a prompt has been read. The engine sets it before each block, and the layers read it."""

    prompt: int = 0
    """Tokens of the prompt, or of the context if the question is hidden."""
    last: bool = False
    """Whether the block being read is the prompt's last."""
    decoding: bool = False
    """Whether the block being read follows the prompt."""
    prefix: int = 0
    """Number of tokens before the user's text."""
    about: tuple[int, int] | None = None
    """Start and stop of the positions that an extra read is about."""
    quota: int | None = None
    """Rows per head that the cut after this block leaves; None if no cut follows."""
    share: Fraction | None = None
    """The same number, not rounded down."""
    look: int | None = None
    """Rows that a query head may attend to if the method sets `attends_subset`; None for all rows."""
    fraction: Fraction | None = None
    """The budget if it is a fraction and the method sets `attends_subset`."""
    room: int = 0
    """Number of tokens to reserve memory for when storage must grow."""


@dataclass(frozen=True)
class CachePolicy:
    """The method, allocator and codec of a cache."""

    method: Method
    allocator: Allocator
    codec: Codec
    exact: bool = False
    """Whether guards compare copies of everything that hooks are handed (kvbench.cache.guard)."""
    served: set[Layout] = field(default_factory=set, init=False, compare=False, repr=False)
    """The layouts that `check` has accepted. A policy that `replace` makes of this one has none, so it is checked."""
    uncaptured: set[str] = field(default_factory=set, init=False, compare=False, repr=False)
    """Work of this policy that no graph could capture and that is not tried again (`kvbench.engine.repeated_cuts`)."""

    def check(self, layout: Layout) -> None:
        """Check once for each layout that the method and the codec can serve a model.

        Raises:
            SettingError: One of them cannot. The message says why.
            ContractError: Its own check raised something else.
        """
        if layout not in self.served:
            check_shape(self.method, self.codec, layout)
            check_rotation(self.method, self.codec, layout.rope_switch)
            check_softcap(self.method, layout.softcap)
            check_known_rotation(self.method, self.codec, layout)
            check_widths(self.codec, layout)
            self.served.add(layout)

    @property
    def owners(self) -> str:
        """Name everyone who may have kept a reference to a tensor: the method, and an allocator or codec with hooks."""
        owners = [f"method={self.method.name}"]
        owners += [f"allocator={self.allocator.name}"] * (not self.allocator.is_uniform)
        owners += [f"codec={self.codec.name}"] * self.codec.packs
        return " or ".join(owners)

    @property
    def shows_inputs(self) -> bool:
        """Whether the method is shown inputs of a layer's attention (`LayerInputs`)."""
        return not LAYER_INPUTS.isdisjoint(self.method.wants)

    @property
    def asks_for_inputs(self) -> bool:
        """Whether the method or the codec needs inputs of a layer's attention."""
        return self.shows_inputs or self.codec.packing.takes_unrotated_keys

    @property
    def streams(self) -> bool:
        """Whether heads keep all rows or a fixed number, by positions alone (`Captured.streams`)."""
        return self.method.captured is not None and self.method.captured.streams

    @property
    def captures_state(self) -> bool:
        """Whether a CUDA graph needs the method's state at fixed addresses (`Captured.capture_state`)."""
        return self.method.captured is not None and self.method.captured.capture_state is not None

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights that the method and the codec read from files and need beside the model."""
        file = self.method.file
        return self.codec.weights_bytes + (0 if file is None else file.nbytes)

    @property
    def token_by_token(self) -> bool:
        """Whether tokens that follow the prefill are read one at a time, even if several are known."""
        return self.method.token_by_token or self.codec.packing.token_by_token


def choose_cache(method: Method, allocator: Allocator, codec: Codec) -> CachePolicy:
    """Return the policy of a cache.

    Raises:
        SettingError: Two of the three cannot work together. The message says why.
        ContractError: One of them declares something that does not exist, or a hook of it takes other arguments.
    """
    check_declarations(method, codec)
    reason = find_refusal(method, allocator, codec)
    if reason is not None:
        raise SettingError(reason)
    return CachePolicy(method, allocator, codec)

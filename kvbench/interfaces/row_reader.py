"""The interface by which a method that reads few of many rows chooses them inside a CUDA graph.

`Method.read` returns a mask of all rows and may wait for the device. A captured step must do the same operations for
every token of an answer, so a method describes its choice once, as an object that holds tensors at fixed addresses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

from torch import Tensor

from kvbench.interfaces.observation import State
from kvbench.kernels.softmax_extras import SoftmaxExtras


@dataclass(frozen=True)
class ListedRows:
    """The rows that one token attends to: those of listed blocks, and those behind a position."""

    blocks: Tensor
    """Different blocks, int64: one list per query head, (B, Hq, k), per KV head, (B, H, k), or for all heads,
    (B, 1, k). Row j lies in block ⌊j/size⌋. Rows that do not exist yet are not attended to. A shorter list is filled
    with a block of such rows, which may occur several times.
    """
    size: int = 1
    """Rows of a block."""
    after: int | None = None
    """The rows from this one on are attended to as well. No listed block may contain one of them."""


# Gets the largest product q·k, without the factor of the logits, that a query of each KV head has with each row,
# (B, H, n) in at least float32. The numbers of rows that do not exist yet mean nothing.
Watcher = Callable[[Tensor], None]

# Chooses the rows of one layer. It gets the layer's index, the queries (B, Hq, 1, d) and the keys (B, H, n, d). If it
# returns None or a `Watcher`, the layer attends to all rows. The engine calls the `Watcher` with the layer's largest
# products before the rows of a later layer are chosen. For a layer whose rows are packed, the rows are chosen right
# after the previous layer, without queries and keys: (B, Hq, 0, d) and (B, H, 0, d). No `Watcher` may be returned then.
RowChoice = Callable[[int, Tensor, Tensor], ListedRows | Watcher | None]


class RowReader(Protocol):
    """Chooses the rows of each token of an answer."""

    def choose(self, last: Tensor) -> RowChoice:
        """Return the function that chooses one token's rows, layer by layer, in ascending order.

        Args:
            last: The token's own row, the newest one, int64 without dimensions.
        """

    def finish(self, seen: int) -> None:
        """Leave the state as the method's hooks would have left it after `seen` tokens. The last call."""


@dataclass(frozen=True)
class CapturedAnswer:
    """What a reader is made for: the next tokens of an answer, of which every layer keeps every row."""

    keys: Mapping[int, Tensor]
    """The keys of each layer, (B, H, n, d), the first `seen` of them written. The answer writes the others. Layers
    whose rows are packed have none.
    """
    states: Mapping[int, State]
    """The method's state of each layer."""
    layers: int
    """Number of layers of the model. Those with a sliding window have no keys and no state here."""
    query_heads: int
    """Number of query heads."""
    seen: int
    """Tokens read so far."""
    tokens: int
    """Number of tokens to read at most."""
    prompt: int
    """Tokens of the prompt, or of the context if the question is hidden."""
    quota: int | None
    """Rows that a query head may attend to; None for all."""
    fraction: Fraction | None
    """The budget if it is a fraction, for methods that take it of other rows than the prompt's. None otherwise."""
    scaling: float
    """The factor of the logits."""
    undone: int
    """Most tokens that may be undone: `choose` may be called again for any of so many last tokens."""
    find_packed: Callable[[int, int], tuple[int, int] | None]
    """Returns `ReadRequest.packed` of a layer at a token of the answer, by its number, counted from 0."""
    extras: Mapping[int, SoftmaxExtras] = field(default_factory=dict)
    """Sinks and cap of the softmax of each layer that has any."""

    @property
    def all_layers(self) -> Sequence[int]:
        """The layers that keep rows, ascending."""
        return sorted(self.states)

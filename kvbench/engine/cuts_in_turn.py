"""Let the same layer of several contexts see a block and be cut, one context after the other."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvbench.cache.guard import Handed
from kvbench.cache.layer import Layer, Lazy
from kvbench.cache.storage import StoredRows
from kvbench.engine.shared_scores import SharedScores
from kvbench.interfaces.rows import Rows
from kvbench.kernels.softmax_extras import SoftmaxExtras, get_sinks


class ContextFailed(Exception):
    """The context with this number failed, and its error is the cause of this one.

    The others can continue without it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def attribute_errors_to(number: int) -> Iterator[None]:
    """Raise errors inside as `ContextFailed`. Out-of-memory errors pass, because any context may have caused them."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        raise ContextFailed(number) from error


@dataclass(frozen=True)
class SeenBlock:
    """What attention of a layer made of a block. Fields are arguments and results of `Layer.attend`."""

    queries: Tensor
    outputs: Tensor
    lse: Tensor | None
    scaling: float
    output_weight: Tensor
    rotation: Callable[[Tensor], tuple[Tensor, Tensor]]
    extras: SoftmaxExtras | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the block and of the layer."""
        given = self.queries, self.outputs, self.lse, self.output_weight, get_sinks(self.extras)
        return [tensor for tensor in given if tensor is not None]


def cut_in_turn(
    layers: Mapping[int, Layer],
    groups: Sequence[int],
    block: SeenBlock,
    check: Callable[[str, Handed], None],
    scores: list[SharedScores],
    timed: bool = True,
) -> Iterator[int]:
    """Let the layers with the same index see a block and cut them, one context after the other.

    Args:
        layers: The layers by the numbers of their contexts.
        groups: A number for each context. Those with the same number may share scores.
        block: The block.
        check: Gets the name of a context's method, and what hooks of several contexts were shown, after each cut.
        scores: Gets the scores that were shared.
        timed: Whether to time them.

    Yields:
        The number of each context after its cut.

    Raises:
        ContextFailed: A context failed.
    """
    shown = Handed()  # what hooks of several contexts are shown

    def view(rows: StoredRows) -> Rows:
        shown_rows = rows.view()
        shown.add("rows", shown_rows)
        return shown_rows

    views: dict[int, Lazy] = {}  # of the same rows
    own_views = {n: views.setdefault(id(layer.rows), Lazy(partial(view, layer.rows))) for n, layer in layers.items()}
    kinds = {number: (groups[number], id(layer.rows)) for number, layer in layers.items()}
    device = block.queries.device.type
    alike = {kind: SharedScores(device, shown, timed) for kind, n in Counter(kinds.values()).items() if n > 1}
    for number, layer in layers.items():
        shared = alike.get(kinds[number])
        with attribute_errors_to(number):
            layer.share_scores = partial(shared.find, number) if shared is not None else None
            layer.after_attention(
                block.queries,
                block.outputs,
                block.lse,
                block.scaling,
                block.output_weight,
                block.rotation,
                own_views[number],
                block.extras,
            )
            layer.share_scores = None
            check(f"method={layer.choice.method.name}", shown)
        yield number
    for shared in alike.values():
        shared.release()
    scores += alike.values()

"""One reading of a prompt for several contexts that differ only in what they keep of it.

The model reads the prompt once, as one block. At every layer attention is computed once; then the contexts' layers,
which refer to the same rows, are asked and cut one after the other, each as it would be alone. All methods want the
log-sum-exps or none does: the two ways of attention round differently.

A method that writes into rows which other contexts still hold is found as soon as its layer is done, so it is known
which context is to blame. The rows are spoiled for all of them: the prompt has to be read again without it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from weakref import ref

import torch
from torch import Tensor

from kvbench.cache.guard import count_writes, without_gradients
from kvbench.cache.layer import Layer, Lazy
from kvbench.engine.generation import GenerationContext
from kvbench.engine.timing import Stamps, now
from kvbench.models.transformers_port import forward, kvbench_attention, make_cache
from kvbench.validation import ContractError


class ContextFailed(Exception):
    """The context of this `number` raised what is the cause of this; the others can go on without it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class FanOutLayer:
    """Layers of the same place in several contexts, as one layer for the model. `stamps`: behind attention, and behind
    each of the layers; `watched`: see `SharedTensors`.
    """

    def __init__(self, layers: Sequence[Layer], watched: "SharedTensors") -> None:
        self.layers, self.watched = layers, watched
        self.stamps: Stamps | None = None

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Read a block's keys and values (B, H, T, d): copied once for all layers that reserve the same room."""
        copied: dict[int, Layer] = {}
        for layer in self.layers:
            first = copied.setdefault(layer.progress.room, layer)
            if first is layer:
                layer.append(keys, values)
                self.watched.add(layer)
            else:
                layer.share_block_of(first)

    def attend(
        self,
        queries: Tensor,
        scaling: float,
        output_weight: Tensor,
        rotation: Callable[[Tensor], tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Outputs (B, Hq, T, d) of the block's queries; all layers are cut before this returns."""
        outputs, lse = self.layers[0].run_attention(queries, scaling, None, None)
        for layer in self.layers[1:]:
            layer.count_attended(None, None)
        self.stamps = Stamps(queries.device.type)
        self.stamps.put()
        for number, layer in enumerate(self.layers):
            with attribute_errors_to(number):
                layer.after_attention(queries, outputs, lse, scaling, output_weight, rotation, Lazy(layer.rows.view))
                self.watched.check(f"method={layer.choice.method.name}")
            self.stamps.put()
        return outputs


class SharedTensors:
    """Keys and values of the layers so far that several contexts may hold, with their versions. They are not kept
    alive: once all contexts have cut a layer, nobody holds them any more.
    """

    def __init__(self) -> None:
        self.tensors: list[tuple[ref[Tensor], int, int]] = []  # tensor, version, layer

    def add(self, layer: Layer) -> None:
        """Watch what the layer has just read, as the engine left it."""
        rows = layer.rows
        self.tensors += [(ref(own), count_writes(own), layer.index) for own in (rows.tail_keys, rows.tail_values)]

    def check(self, owner: str) -> None:
        """ContractError if something was written to since it was added; `owner` was asked last."""
        for reference, before, index in self.tensors:
            tensor = reference()
            if tensor is not None and count_writes(tensor) != before:
                line = f"a hook wrote into the keys or values of layer {index}, which other runs share"
                raise ContractError(f"{owner}: {line}")


@without_gradients
def prefill(contexts: Sequence[GenerationContext], ids: Tensor) -> list[float]:
    """Read the prompt `ids` (B, n) into all contexts, which have the same model and read it as one block. Returns the
    milliseconds of each: what all have in common and what it took itself. `ContextFailed` names a context that cannot
    go on.
    """
    model, device, tokens = contexts[0].model, contexts[0].device, ids.shape[1]
    begin = now(device)
    for context in contexts:
        context.begin(tokens)
        context.expect(tokens)
    watched = SharedTensors()
    layers = [FanOutLayer(own, watched) for own in zip(*(context.layers for context in contexts), strict=True)]
    cache = make_cache(model, layers)
    with kvbench_attention(model):
        logits = forward(model, ids, cache, keep=1)[:, -1]
    spent = 1000 * (now(device) - begin)
    own = [sum(times) for times in zip(*(layer.stamps.between() for layer in layers), strict=True)]
    common = spent - sum(own)
    for number, context in enumerate(contexts):
        begin = now(device)
        with attribute_errors_to(number):
            context.passed(tokens, cache.frequencies)
            context.end(logits)
            context.lent = [(index, reference) for reference, _, index in watched.tensors]
        own[number] += 1000 * (now(device) - begin)
    return [common + times for times in own]


@contextmanager
def attribute_errors_to(number: int) -> Iterator[None]:
    """What is raised inside is said to be of the context of this number; memory may have run out because of any."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        raise ContextFailed(number) from error

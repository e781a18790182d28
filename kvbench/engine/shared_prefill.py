"""Read a prompt once for several contexts that differ only in the rows they keep.

The model reads the prompt once, as one block. At every layer, attention is computed once. Then the layers of the
contexts, which share the same rows, are cut one after the other, each as it would be alone. Contexts that differ only
in the budget share the scores too (`kvbench.engine.shared_scores`). Either all methods need the log-sum-exps or none
does, because the two attention kernels round differently.

If a method writes into rows that other contexts share, the check after its layer names the context. The rows are then
wrong for all contexts, so the caller must read the prompt again without that context.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from weakref import ref

import torch
from torch import Tensor

from kvbench.cache.guard import Handed, without_gradients
from kvbench.cache.layer import Layer, Lazy
from kvbench.cache.storage import StoredRows
from kvbench.engine.generation import GenerationContext
from kvbench.engine.shared_scores import SharedScores, group_by_scores
from kvbench.engine.spending import move
from kvbench.engine.timing import Stamps, now
from kvbench.interfaces.observation import LayerInputs
from kvbench.interfaces.rows import Rows
from kvbench.models.transformers_port import forward, kvbench_attention, make_cache
from kvbench.validation import ContractError


class ContextFailed(Exception):
    """The context with this number failed, and its error is the cause of this one.

    The others can continue without it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class FanOutLayer:
    """The layers with the same index in several contexts, as one layer for the model."""

    def __init__(self, layers: Sequence[Layer], watched: "SharedTensors", groups: Sequence[int]) -> None:
        """Combine the layers.

        Args:
            layers: The layers.
            watched: The tensors that they share.
            groups: A number for each layer. Layers with the same number may share scores.
        """
        self.layers, self.watched, self.groups = layers, watched, groups
        self.stamps: Stamps | None = None  # the time after attention, and after each of the layers
        self.scores: list[SharedScores] = []

    @property
    def wants_unrotated_keys(self) -> bool:
        """Whether one of the layers needs keys before QK norm and rotation."""
        return any(layer.wants_unrotated_keys for layer in self.layers)

    @property
    def wants_hidden(self) -> bool:
        """Whether one of the layers needs the hidden states that enter it."""
        return any(layer.wants_hidden for layer in self.layers)

    @property
    def wants_normed_hidden(self) -> bool:
        """Whether one of the layers needs the hidden states behind its norm."""
        return any(layer.wants_normed_hidden for layer in self.layers)

    def append(self, keys: Tensor, values: Tensor, inputs: LayerInputs | None) -> None:
        """Append a block. Layers that store the same keys and reserve the same room share one copy.

        Arguments are those of `Layer.append`.
        """
        copied: dict[tuple[int, bool], Layer] = {}
        for layer in self.layers:
            first = copied.setdefault((layer.progress.room, layer.codec.takes_unrotated_keys), layer)
            if first is layer:
                layer.append(keys, values, inputs)
                self.watched.add(layer)
            else:
                layer.share_block_of(first, inputs)

    def attend(
        self,
        queries: Tensor,
        scaling: float,
        output_weight: Tensor,
        rotation: Callable[[Tensor], tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Attend once, then cut all layers. Arguments and result are those of `Layer.attend`."""
        reader = next((own for own in self.layers if own.rows.is_raw), self.layers[0])  # need not rotate keys again
        outputs, lse = reader.run_attention(queries, scaling, None, None)
        for layer in self.layers:
            if layer is not reader:
                layer.count_attended(None, None)
        self.stamps = Stamps(queries.device.type)
        self.stamps.put()
        shown = Handed()  # what hooks of several contexts are shown

        def view(rows: StoredRows) -> Rows:
            found = rows.view()
            shown.add_rows(found)
            return found

        views: dict[int, Lazy] = {}  # of the same rows
        own_views = [views.setdefault(id(own.rows), Lazy(partial(view, own.rows))) for own in self.layers]
        groups = [(group, id(own.rows)) for group, own in zip(self.groups, self.layers, strict=True)]
        scores = {group: SharedScores(queries.device.type, shown) for group, n in Counter(groups).items() if n > 1}
        for number, (layer, own, group) in enumerate(zip(self.layers, own_views, groups, strict=True)):
            with attribute_errors_to(number):
                layer.share_scores = partial(scores[group].find, number) if group in scores else None
                layer.after_attention(queries, outputs, lse, scaling, output_weight, rotation, own)
                layer.share_scores = None
                self.watched.check(f"method={layer.choice.method.name}", shown)
            self.stamps.put()
        self.scores = list(scores.values())
        for shared in self.scores:
            shared.release()
        return outputs


class SharedTensors:
    """Keys and values that several contexts may share, with their versions.

    They are held weakly, so they are freed once all contexts have cut their layer.
    """

    def __init__(self) -> None:
        self.tensors: list[tuple[ref[Tensor], int, int]] = []  # tensor, version, layer

    def add(self, layer: Layer) -> None:
        """Watch the keys and values that a layer has just read."""
        rows = layer.rows
        tails = [own for own in (rows.tail_keys, rows.tail_values) if own is not None]
        self.tensors += [(ref(own), own._version, layer.index) for own in tails]

    def check(self, owner: str, shown: Handed) -> None:
        """Check that neither these tensors nor those that hooks of several contexts were shown were written to.

        Raises:
            ContractError: A tensor was written to. The message names `owner`, whose hooks ran last.
        """
        if written := shown.written():
            raise ContractError(f"{owner}: a hook wrote into {', '.join(written)}, which other runs share")
        for reference, before, index in self.tensors:
            tensor = reference()
            if tensor is not None and tensor._version != before:
                line = f"a hook wrote into the keys or values of layer {index}, which other runs share"
                raise ContractError(f"{owner}: {line}")


@without_gradients
def prefill(contexts: Sequence[GenerationContext], ids: Tensor) -> list[float]:
    """Read a prompt into several contexts of the same model, as one block.

    Args:
        contexts: The contexts.
        ids: Token ids, (B, n).

    Returns:
        Milliseconds of each context: the time of the shared part plus its own. Scores that it took from another
        context count as its own, as if it had computed them.

    Raises:
        ContextFailed: A context failed.
        ValueError: The codec of one context changes what the model attends to, and another context has another codec.
    """
    if len({codec if (codec := own.choice.codec).packs_before_attention else None for own in contexts}) > 1:
        raise ValueError("prefill: contexts whose codecs pack before attention must have the same codec")
    model, device, tokens = contexts[0].model, contexts[0].device, ids.shape[1]
    begin = now(device)
    for context in contexts:
        context.begin(tokens)
        context.expect(tokens)
    watched = SharedTensors()
    groups = group_by_scores(contexts)
    layers = [
        FanOutLayer(own, watched, groups) for own in zip(*(context.own_layers for context in contexts), strict=True)
    ]
    cache = make_cache(model, layers)
    with kvbench_attention(model):
        logits = forward(model, ids, cache, keep=1)[:, -1]
    spent = 1000 * (now(device) - begin)
    stamps = [layer.stamps for layer in layers if layer.stamps is not None]
    own = [sum(times) for times in zip(*(stamp.between() for stamp in stamps), strict=True)]
    common = spent - sum(own)
    for number, context in enumerate(contexts):
        begin = now(device)
        with attribute_errors_to(number):
            context.passed(tokens, cache.frequencies)
            context.end(logits)
            context.lent = [(index, reference) for reference, _, index in watched.tensors]
        own[number] += 1000 * (now(device) - begin)
    move("reading", "cutting", sum(own) / 1000)
    for scores in (scores for layer in layers for scores in layer.scores if scores.borrowers):
        saved = scores.saved()
        for number in scores.borrowers:
            own[number] += saved
    return [common + times for times in own]


@contextmanager
def attribute_errors_to(number: int) -> Iterator[None]:
    """Raise errors inside as `ContextFailed`. Out-of-memory errors pass, because any context may have caused them."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        raise ContextFailed(number) from error

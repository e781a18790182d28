"""Read a prompt once for several contexts that differ only in the rows they keep.

The model reads the prompt once, as one block. At every layer, attention is computed once. Then the layers of the
contexts, which share the same rows, are cut one after the other, each as it would be alone. Contexts that differ only
in the budget share the scores too (`kvbench.engine.shared_scores`), and on a GPU the cuts of one layer are repeated for
others where possible (`kvbench.engine.repeated_cuts`). Either all methods need the log-sum-exps or none
does, because the two attention kernels round differently.

If a method writes into rows that other contexts share, the check after its layer names the context. The rows are then
wrong for all contexts, so the caller must read the prompt again without that context.
"""

from collections.abc import Callable, Sequence
from weakref import ref

from torch import Tensor

from kvbench.cache.guard import Handed, without_gradients
from kvbench.cache.layer import Layer
from kvbench.engine.cuts_in_turn import SeenBlock, attribute_errors_to, cut_in_turn
from kvbench.engine.generation import GenerationContext
from kvbench.engine.repeated_cuts import RepeatedCuts
from kvbench.engine.shared_scores import SharedScores, group_by_scores
from kvbench.engine.spending import move
from kvbench.engine.timing import Stamps, now
from kvbench.interfaces.observation import LayerInputs
from kvbench.kernels.softmax_extras import SoftmaxExtras
from kvbench.models.transformers_port import forward, kvbench_attention, make_cache
from kvbench.validation import ContractError


class FanOutLayer:
    """The layers with the same index in several contexts, as one layer for the model."""

    def __init__(
        self,
        layers: Sequence[Layer],
        watched: "SharedTensors",
        groups: Sequence[int],
        repeated: RepeatedCuts,
        place: int,
    ) -> None:
        """Combine the layers.

        Args:
            layers: The layers.
            watched: The tensors that they share.
            groups: A number for each layer. Layers with the same number may share scores.
            repeated: Cuts those whose cuts can be repeated.
            place: How many earlier layers of the model hold rows.
        """
        self.layers, self.watched, self.groups = layers, watched, groups
        self.repeated, self.place = repeated, place
        self.stamps: Stamps | None = None  # the time after attention, after repeated cuts, and after each other cut
        self.cut_here: list[int] = []  # numbers of the contexts whose cut was none of the repeated ones
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
            first = copied.setdefault((layer.progress.room, layer.codec.packing.takes_unrotated_keys), layer)
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
        extras: SoftmaxExtras | None = None,
    ) -> Tensor:
        """Attend once, then cut all layers. Arguments and result are those of `Layer.attend`."""
        # a layer with raw rows need not rotate keys again
        reader = next((layer for layer in self.layers if layer.rows.is_raw), self.layers[0])
        outputs, lse = reader.run_attention(queries, scaling, None, None, extras)
        for layer in self.layers:
            if layer is not reader:
                layer.count_attended(None, None)
        self.stamps = Stamps(queries.device.type)
        self.stamps.put()
        block = SeenBlock(queries, outputs, lse, scaling, output_weight, rotation, extras)
        done = self.repeated.cut(self.place, self.layers, block)
        self.stamps.put()
        others = {number: layer for number, layer in enumerate(self.layers) if number not in done}
        for number in cut_in_turn(others, self.groups, block, self.watched.check, self.scores):
            self.cut_here.append(number)
            self.stamps.put()
        return outputs

    def measure(self) -> tuple[float, dict[int, float]]:
        """Return the milliseconds of all cuts, and of each context whose cut was none of the repeated ones.

        Scores that it took from another context count as its own, as if it had computed them.
        """
        assert self.stamps is not None  # the model has read the block
        between = self.stamps.between()
        cut_times = dict(zip(self.cut_here, between[1:], strict=True))
        for shared in (shared for shared in self.scores if shared.borrowers):
            for number in shared.borrowers:
                cut_times[number] += shared.saved()
        return sum(between), cut_times


class SharedTensors:
    """Keys and values that several contexts may share, with their versions.

    They are held weakly, so they are freed once all contexts have cut their layer.
    """

    def __init__(self) -> None:
        self.tensors: list[tuple[ref[Tensor], int, int]] = []  # tensor, version, layer

    def add(self, layer: Layer) -> None:
        """Watch the keys and values that a layer has just read."""
        rows = layer.rows
        tails = [tensor for tensor in (rows.tail_keys, rows.tail_values) if tensor is not None]
        self.tensors += [(ref(tensor), tensor._version, layer.index) for tensor in tails]

    def check(self, owner: str, shown: Handed) -> None:
        """Check that neither these tensors nor those that hooks of several contexts were shown were written to.

        Raises:
            ContractError: A tensor was written to. The message names `owner`, whose hooks ran last.
        """
        if shown.is_changed() and (written := shown.written()):
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
        context count as its own, as if it had computed them. A repeated cut counts like the one of the last layer.

    Raises:
        ContextFailed: A context failed.
        ValueError: The codec of one context changes what the model attends to, and another context has another codec.
    """
    if len({codec if (codec := context.choice.codec).packing.before_attention else None for context in contexts}) > 1:
        raise ValueError("prefill: contexts whose codecs pack before attention must have the same codec")
    model, device, tokens = contexts[0].model, contexts[0].device, ids.shape[1]
    begin = now(device)
    for context in contexts:
        context.begin(tokens)
        context.expect(tokens)
    watched, groups = SharedTensors(), group_by_scores(contexts)
    repeated = RepeatedCuts(contexts, groups, watched.check)
    places = {layer.index: place for place, layer in enumerate(contexts[0].own_layers)}
    every = list(zip(*(context.own_layers for context in contexts), strict=True))
    layers = [
        FanOutLayer(every[places[index]], watched, groups, repeated, places[index]) if index in places else None
        for index in range(len(contexts[0].layers))
    ]
    cache = make_cache(model, layers)
    with kvbench_attention(model):
        logits = forward(model, ids, cache, keep=1)[:, -1]
    spent = 1000 * (now(device) - begin)
    repeated.raise_faults()
    measured = [layer.measure() for layer in layers if layer is not None]
    cutting = sum(time for time, _ in measured)
    last = measured[-1][1]  # no cut of it was repeated
    cut_times = [sum(times.get(number, last[number]) for _, times in measured) for number in range(len(contexts))]
    common, states = spent - cutting, cache.copy_states()
    for number, context in enumerate(contexts):
        begin = now(device)
        with attribute_errors_to(number):
            context.cache.put_states(states)
            context.passed(tokens, cache.frequencies)
            context.end(logits)
            context.lent = [(index, reference) for reference, _, index in watched.tensors]
        ending = 1000 * (now(device) - begin)
        cut_times[number] += ending
        cutting += ending
    move("reading", "cutting", cutting / 1000)
    return [common + times for times in cut_times]

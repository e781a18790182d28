"""Cut the layers of several contexts after a prompt's only block, and repeat the cuts of one layer for others.

With a small model, the host needs longer to launch the kernels of a cut than the GPU needs to run them. All layers of a
prompt have the same shapes, and a `captured` method runs the same operations in each of them. So the cuts of the second
layer are captured in a CUDA graph, which then cuts all other layers but the first and the last one.

The first two layers show whose cuts can be repeated. A method that asks for the layer's index, or changes what all
layers share, cuts each layer itself. So do contexts that `can_repeat` excludes, and all of them if the capture fails.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from kvbench.cache.accounting import LayerTally
from kvbench.cache.guard import Handed, copy_containers
from kvbench.cache.layer import Layer
from kvbench.cache.storage import StoredRows
from kvbench.engine.context import PromptContext, can_capture
from kvbench.engine.cuts_in_turn import ContextFailed, SeenBlock, attribute_errors_to, cut_in_turn
from kvbench.engine.graph_decoding import record_launches
from kvbench.engine.quota_rows import repeats_cuts
from kvbench.interfaces.observation import State
from kvbench.kernels.dispatch import is_announcing
from kvbench.kernels.softmax_extras import SoftmaxExtras, get_cap, get_sinks
from kvbench.validation import ContractError

T = TypeVar("T")

FEWEST = 6  # layers; with fewer, capturing takes longer than it saves
MOST = 32 << 20  # bytes of a block's queries; with more, the GPU needs longer for a cut than the host
CUTS = "cuts of a prompt's layers"  # in `CachePolicy.uncaptured`


@dataclass(frozen=True)
class CapturedCut:
    """What the captured cut of a layer left. The tensors are in the graph's memory, which its next replay overwrites.

    Attributes:
        rows: The rows.
        tally: What the layer has counted.
        state: What the method remembers of the layer.
        held: Bytes that the layer occupied then.
        rise: By how many bytes the cache grew at most during the cut.
        faults: Messages of the flags that the guard has noted.
    """

    rows: StoredRows
    tally: LayerTally
    state: dict[str, Any]
    held: int
    rise: int
    faults: tuple[str, ...]


class CutGraph:
    """The cuts of one layer in several contexts, captured for the layers with the same shapes."""

    def __init__(
        self, layers: Mapping[int, Layer], groups: Sequence[int], block: SeenBlock, check: Callable[[str, Handed], None]
    ) -> None:
        """Capture the cuts. The layers stay as they are. Arguments are those of `cut_in_turn`.

        Raises:
            ContextFailed: A context failed.
            RuntimeError: The cuts cannot be captured, or memory does not suffice.
        """
        self.block = replace(
            block,
            queries=block.queries.clone(),
            outputs=block.outputs.clone(),
            lse=copy_tensor(block.lse),
            output_weight=block.output_weight.clone(),
            extras=copy_extras(block.extras),
        )
        self.rows = {id(layer.rows): layer.rows.copy_tail() for layer in layers.values()}
        self.sources = {id(layer.rows): number for number, layer in layers.items()}
        self.layer = next(iter(layers.values())).index
        self.cuts: dict[int, CapturedCut] = {}
        self.differing: set[int] = set()  # contexts whose hooks cut each layer differently
        self.flags = block.queries.new_zeros(0, dtype=torch.bool)
        self.counted = block.queries.new_zeros(0, dtype=torch.int64)  # what tallies have counted, one after the other
        self.shapes: list[torch.Size] = []  # of the parts of `counted`
        meters = [layer.cache.memory for layer in layers.values()]
        before = [meter.snapshot() for meter in meters]

        def cut() -> None:
            for meter, snapshot in zip(meters, before, strict=True):
                meter.restore(snapshot)
            self._cut(layers, groups, check)

        try:
            self.graph = record_launches(cut)
        finally:
            for meter, snapshot in zip(meters, before, strict=True):
                meter.restore(snapshot)

    def _cut(self, layers: Mapping[int, Layer], groups: Sequence[int], check: Callable[[str, Handed], None]) -> None:
        copies = {number: self._copy(layer) for number, layer in layers.items()}
        totals = {number: layer.cache.memory.total for number, layer in copies.items()}
        asked: dict[int, list[str]] = {number: [] for number in copies}
        for number, layer in copies.items():
            layer.cache.memory.peak, layer.asked = totals[number], asked[number]
        for number in cut_in_turn(copies, groups, self.block, check, [], timed=False):
            layer, meter = copies[number], copies[number].cache.memory
            held, rise, faults = meter.held[layer.index], meter.peak - totals[number], tuple(layer.guard.faults)
            self.cuts[number] = CapturedCut(layer.rows, layer.tally, layer.state.layer, held, rise, faults)
            if "layer" in asked[number] or mark(layer.state.shared) != mark(layers[number].state.shared):
                self.differing.add(number)
        flags = [flag for layer in copies.values() for flag in layer.guard.faults.values()]
        if flags:
            self.flags = torch.stack(flags)
        counted = [numbers for cut in self.cuts.values() for numbers in cut.tally.counted]
        self.shapes = [numbers.shape for numbers in counted]
        if counted:
            self.counted = torch.cat([numbers.flatten().long() for numbers in counted])

    def _copy(self, layer: Layer) -> Layer:
        """Return a layer that holds copies of the rows and may change without changing anything but the meter."""
        state = State(layer.state.seeds, {}, copy_containers(layer.state.shared))
        copy = Layer(layer.index, layer.layers, layer.choice, state, layer.cache)
        copy.rows, copy.tally = self.rows[id(layer.rows)], layer.tally
        return copy

    def fits(self, layers: Sequence[Layer], block: SeenBlock) -> bool:
        """Return whether a block and the rows have the shapes of the captured ones, on the same device.

        The captured hooks rotate as their layer does, so the block's layer must rotate alike.
        """
        if block.rotation is not self.block.rotation or describe(block.extras) != describe(self.block.extras):
            return False
        pairs = [*zip(block.tensors, self.block.tensors, strict=True)]
        for key, number in self.sources.items():
            tail, captured_tail = layers[number].rows.tail_keys, self.rows[key].tail_keys
            assert tail is not None and captured_tail is not None  # the layers have read the block
            pairs.append((tail, captured_tail))
        return all(
            (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device) for one, other in pairs
        )

    def repeat(self, layers: Sequence[Layer], block: SeenBlock) -> Tensor:
        """Cut the layers of all contexts as the captured ones, and return the guards' flags.

        Args:
            layers: The layers of all contexts, of which those that were captured are cut.
            block: What attention made of the block.
        """
        for target, source in zip(self.block.tensors, block.tensors, strict=True):
            target.copy_(source)
        for key, number in self.sources.items():
            self.rows[key].take_tail(layers[number].rows)
        self.graph.replay()
        copied = self.counted.clone().split([shape.numel() for shape in self.shapes])  # instead of many small copies
        counted = (numbers.view(shape) for numbers, shape in zip(copied, self.shapes, strict=True))
        for number, cut in self.cuts.items():
            state = {name: copy_tensor(value) for name, value in cut.state.items()}
            tally = cut.tally.with_counted(counted)  # which takes as many tensors as it counts
            layers[number].take_over_cut(cut.rows.copy_cut(), tally, state, cut.held, cut.rise, block.output_weight)
        return self.flags.clone()


def copy_tensor(value: T) -> T:
    """Return a copy of a tensor, and any other value itself."""
    return cast(T, value.clone()) if isinstance(value, Tensor) else value


def copy_extras(extras: SoftmaxExtras | None) -> SoftmaxExtras | None:
    """Return a copy whose sinks lie in memory of their own."""
    return None if extras is None else replace(extras, sinks=copy_tensor(extras.sinks))


def describe(extras: SoftmaxExtras | None) -> tuple[bool, float | None]:
    """Return what must be equal for the same operations to compute two softmaxes."""
    return get_sinks(extras) is not None, get_cap(extras)


def mark(value: object) -> object:
    """Return a value to compare with an earlier one: the same containers, with ids in place of tensors."""
    if isinstance(value, Tensor):
        return id(value)
    if isinstance(value, Mapping):
        return {key: mark(member) for key, member in value.items()}
    return [mark(member) for member in value] if isinstance(value, list | tuple) else value


class RepeatedCuts:
    """Cuts the contexts that can repeat their cuts, in all layers but the first and the last one.

    Attributes:
        numbers: The contexts whose cuts are repeated.
    """

    def __init__(
        self, contexts: Sequence[PromptContext], groups: Sequence[int], check: Callable[[str, Handed], None]
    ) -> None:
        """Choose contexts. Arguments are those of `cut_in_turn`."""
        self.groups, self.check, self.count = groups, check, len(contexts[0].own_layers)
        self.numbers = (
            {n for n, context in enumerate(contexts) if can_repeat(context)} if self.count >= FEWEST else set()
        )
        self.asked: dict[int, list[str]] = {number: [] for number in self.numbers}
        self.first: Sequence[Layer] = []  # the first layers of the contexts
        self.graph: CutGraph | None = None
        self.noted: list[tuple[int, Tensor]] = []  # layers, and the flags that their guards would have noted

    def cut(self, place: int, layers: Sequence[Layer], block: SeenBlock) -> set[int]:
        """Cut the layers of some contexts, and return the numbers of these.

        Args:
            place: How many layers were cut before.
            layers: The layers of all contexts.
            block: What attention made of the block.
        """
        if place == 0:
            self.first = layers
            for number, asked in self.asked.items():
                layers[number].asked = asked
        if place == 1:
            self._choose(block)
            self._capture(layers, block)
        if self.graph is None or place == self.count - 1 or not self.graph.fits(layers, block):
            return set()
        self.noted.append((layers[0].index, self.graph.repeat(layers, block)))
        return self.numbers

    def _choose(self, block: SeenBlock) -> None:
        """Leave out the contexts that the first layer has shown to differ from layer to layer.

        Of contexts that share scores only one computed them, so what it asked for holds for its whole group.
        """
        asked = {self.groups[number] for number, names in self.asked.items() if "layer" in names}
        for number in sorted(self.numbers):
            first = self.first[number]
            first.asked = None
            if self.groups[number] in asked or not is_flat(first.state.layer) or block.queries.nbytes > MOST:
                self.numbers.remove(number)

    def _capture(self, layers: Sequence[Layer], block: SeenBlock) -> None:
        """Capture the cuts of the contexts that are left. If that fails, every layer is cut on its own.

        If a hook raised, it raises again then, and its context is known.
        """
        while self.numbers and self.graph is None:
            captured, graph = {number: layers[number] for number in sorted(self.numbers)}, None
            try:
                graph = CutGraph(captured, self.groups, block, self.check)
            except torch.cuda.OutOfMemoryError:
                self.numbers = set()
            except (ContextFailed, RuntimeError):  # as CUDA's errors are
                self.numbers = set()
                for layer in captured.values():
                    layer.choice.uncaptured.add(CUTS)
            if graph is not None:
                self.numbers -= graph.differing
                self.graph = None if graph.differing else graph

    def raise_faults(self) -> None:
        """Release the graph, and raise what a guard has found in a repeated cut.

        Raises:
            ContextFailed: A hook returned something that it must not return.
        """
        graph, self.graph = self.graph, None
        if graph is None or not len(graph.flags):
            return
        lines = [(number, line) for number, cut in graph.cuts.items() for line in cut.faults]
        for (layer, _), flags in zip(
            self.noted, torch.stack([layer_flags for _, layer_flags in self.noted]).tolist(), strict=True
        ):
            for (number, line), wrong in zip(lines, flags, strict=True):
                with attribute_errors_to(number):
                    if wrong:
                        raise ContractError(line.replace(f" of layer {graph.layer}", f" of layer {layer}", 1))


def is_flat(state: Mapping[str, Any]) -> bool:
    """Return whether `copy_tensor` copies what a method remembers: numbers, texts, tensors that are no views."""
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    simple = all(isinstance(value, Tensor | int | float | str | None) for value in state.values())
    return simple and all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)


def can_repeat(context: PromptContext) -> bool:
    """Return whether the cuts of a context's layers run the same operations, as far as its settings tell.

    Guards that are `exact` compare tensors on the host, so nothing is captured with them.
    """
    choice, progress = context.choice, context.progress
    if context.weights is None or not can_capture(context.model) or is_announcing() or choice.exact:
        return False  # without `weights`, graphs are not wanted or cannot decode
    if progress.quota is None or progress.quota >= progress.prompt:
        return False  # nothing is cut
    if choice.asks_for_inputs or choice.codec.packing.before_attention or CUTS in choice.uncaptured:
        return False
    alike = repeats_cuts(choice) and choice.allocator.is_uniform
    return alike and context.layers.cut_layers == tuple(layer.index for layer in context.own_layers)

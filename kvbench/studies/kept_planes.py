"""kept_planes: where the keys lie that Sink, TOVA and KeyDiff keep and evict (KeyDiff, Figures 5 and 8 to 10).

Each method reads the first prompt in blocks of 128 and keeps N = min(4096, half of the prompt) rows. The keys are those
that its own run wrote, after the rotation: behind the first layer they depend on what was evicted before. The plane is
that of the first two principal components of the keys of all three runs together, so that all plots share it. Shown are
the same random tokens in each plot:

    plane_<figure>_<method>     keys of one method's run, of the series `kept` and `evicted` after the prompt
    plane_<figure>_kept         the kept ones of all methods

A figure shows one layer and KV head. The paper's are of a model with 28 layers and 8 KV heads; in other models they are
those at the same relative depth and place (`find_place`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvbench.engine.generation import GenerationContext
from kvbench.interfaces.layout import Layout
from kvbench.interfaces.observation import Observation
from kvbench.interfaces.rows import Rows
from kvbench.models.checkpoint import Checkpoint
from kvbench.store.study_lines import Line
from kvbench.studies.policy_study import Policy, PolicyStudy, Reading
from kvbench.studies.study import Memory, draw_positions, find_plane

COMPARED = (Policy("sink", "original"), Policy("tova", "keydiff_paper"), Policy("keydiff"))  # as in the paper's tables
BLOCK = 128  # tokens
ROWS = 4096  # N
POINTS = 400  # tokens of a scatter
LAYERS, HEADS = 28, 8  # of the paper's model
PLACES = {5: (5, 3), 8: (27, 4), 9: (20, 0), 10: (8, 1)}  # figure -> layer and KV head


@dataclass(frozen=True)
class KeptPlanes(PolicyStudy):
    """Where kept and evicted keys lie."""

    name: ClassVar[str] = "kept_planes"
    policies: ClassVar[tuple[Policy, ...]] = COMPARED
    places: tuple[tuple[int, int, int], ...] = ()
    """Figure, layer and KV head."""

    def prepare(self, checkpoint: Checkpoint, compressors: str | None) -> Self:
        layout = checkpoint.layout()
        return replace(self, places=tuple((figure, *find_place(*place, layout)) for figure, place in PLACES.items()))

    def list_readings(self, tokens: int, first: bool) -> Sequence[Reading]:
        return list_block_readings(ROWS, tokens) if first else ()

    def watch(self, memory: Memory, reading: Reading, observation: Observation, rows: Rows) -> None:
        for figure, layer, head in self.places:
            if layer == observation.layer:
                block = rows.keys[0, head, -observation.queries.shape[2] :]
                memory.setdefault((figure, reading.policy.method), []).append(block.clone())

    def inspect(self, memory: Memory, reading: Reading, context: GenerationContext, rest: Tensor) -> None:
        layers = {layer.index: layer for layer in context.own_layers}
        for figure, layer, head in self.places:
            key = figure, reading.policy.method
            kept = torch.zeros(reading.tokens, dtype=torch.bool)
            kept[layers[layer].rows.head_places(0, head).cpu()] = True
            memory[key] = torch.cat(memory[key]).double(), kept

    def finish(self, memory: Memory, first: bool) -> Iterable[Line]:
        for figure, layer, head in self.places if first else ():
            runs = {policy.method: memory[figure, policy.method] for policy in COMPARED}
            centre, plane = find_plane(torch.cat([keys for keys, _ in runs.values()]))
            shown = draw_positions(POINTS, len(next(iter(runs.values()))[0]), self.seed)
            kept_lines: list[Line] = []
            for method, (keys, kept) in runs.items():
                points, stays = ((keys[shown.to(keys.device)] - centre) @ plane).cpu(), kept[shown]
                for series, part in (("evicted", points[~stays]), ("kept", points[stays])):
                    yield from self._list_points(f"plane_{figure}_{method}", part, series, layer, head)
                kept_lines += self._list_points(f"plane_{figure}_kept", points[stays], method, layer, head)
            yield from kept_lines

    def _list_points(self, quantity: str, points: Tensor, series: str, layer: int, head: int) -> Iterator[Line]:
        for x, y in points.tolist():
            yield self.line(quantity, y, series=series, layer=layer, head=head, x=x, y=y)


def list_block_readings(rows: int, tokens: int) -> list[Reading]:
    """Return the readings of the three methods in blocks, which keep `rows` rows, or half of a short prompt."""
    return [Reading(policy, min(rows, tokens // 2), tokens, BLOCK) for policy in COMPARED]


def find_place(layer: int, head: int, layout: Layout) -> tuple[int, int]:
    """Return the layer with a full cache and the KV head of a model that lie where those of the paper's model lie.

    Args:
        layer: Of the paper's model, from 0.
        head: KV head of the paper's model, from 0.
        layout: The model's.
    """
    depth = layer * (layout.layers - 1) / (LAYERS - 1)
    return min(layout.held, key=lambda index: abs(index - depth)), round(head * (layout.heads - 1) / (HEADS - 1))

"""delta_codes: the codes that DeltaKV's compressors give (DeltaKV, Figure 4).

A code z = f_c(kv) - f_c(ref) is what codec=delta stores of a token, with the codec's settings (methods/codecs/delta.py)
but for two: every layer is compressed, and so are all tokens of a prompt behind the sinks but the last one.

    size         means of |z| over squares of tokens (`y`) and channels (`x`), of the first `FIRST` tokens that are
                 compressed and the first `FIRST` channels, of the middle one of the layers, of one prompt
    codes        histogram of the numbers of z, in root mean squares of the layer's z, in some layers
    small        share of numbers of a layer's z that are smaller than a `PART` of its largest
    near_zero    share of layers in which these are most numbers
    token_ratio, channel_ratio   the largest root mean square of a token, or of a channel, divided by the median one

The ratios are 1 if z is equally large everywhere.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kvbench.config.catalogue import build, identity_settings, load_settings
from kvbench.config.provenance import source_hash
from kvbench.interfaces.observation import Observation
from kvbench.interfaces.rows import Rows
from kvbench.models.checkpoint import KNOWN_MODELS, Checkpoint
from kvbench.models.embedded import REFERENCE
from kvbench.store.study_lines import Line
from kvbench.studies.study import (
    LayerStudy,
    Memory,
    collect_unrotated_keys,
    count_bins,
    list_shares,
    widen,
)
from kvbench.validation import SettingError

FIRST = 256  # tokens and channels of the map
SQUARES = 32  # rows and columns of it
BINS = 40  # bins of a histogram
ENDS = 4.0  # of the histogram
PART = 0.1


@dataclass(frozen=True)
class DeltaCodes(LayerStudy):
    """The codes that DeltaKV's compressors give."""

    path: str | None = None
    """The file of the compressors, which `prepare` finds."""

    name: ClassVar[str] = "delta_codes"
    wants: ClassVar[tuple[str, ...]] = ("unrotated_keys",)

    def prepare(self, checkpoint: Checkpoint, compressors: str | None) -> Self:
        folder = Path(checkpoint.path)
        beside = folder.with_name(f"{folder.name}_deltakv.safetensors")
        path = str(beside) if compressors is None and folder == REFERENCE else compressors
        if path is None:
            model = checkpoint.name if checkpoint.name in KNOWN_MODELS else checkpoint.path
            raise SettingError(
                f"codec.path=null: model={checkpoint.name} has no compressors of DeltaKV; give codec.path=FILE, which "
                f"`kvbench calibrate deltakv --model {model} --out FILE` trains"
            )
        study = replace(self, path=path)
        study.codec.check(checkpoint.layout())
        study.codec.check_identity(checkpoint.identity)
        return study

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The codec's settings."""
        return load_settings("codec", "delta", {"path": self.path, "full_layers": [], "depth": None, "recent": 1})

    @cached_property
    def codec(self) -> Any:
        """The codec."""
        return build("codec", self.settings)

    @property
    def inputs(self) -> str:
        """The file of the compressors, and the codec."""
        return repr([identity_settings(self.settings), source_hash([type(self.codec).__module__])])

    def update(self, memory: Memory, observation: Observation, rows: Rows) -> None:
        keys = collect_unrotated_keys(memory, observation)
        if keys is None:
            return
        flat = [every.reshape(-1, every.shape[-1]) for every in (keys, rows.values[0])]
        lengths = torch.full((1, rows.heads), keys.shape[1], device=keys.device)
        packed = self.codec.of_layer(observation.layer, observation.layers).pack(*flat, lengths)
        codes = widen(packed.codes[0])
        layers = observation.cut_layers
        memory.clear()
        memory |= describe_codes(codes)
        if observation.layer == layers[len(layers) // 2]:
            memory["map"] = codes[:FIRST, :FIRST].abs().cpu()

    def finish(self, memories: Mapping[int, Memory], first: bool) -> Iterable[Line]:
        shown = self.list_shown(list(memories))
        for layer, memory in memories.items():
            for quantity in ("small", "token_ratio", "channel_ratio"):
                yield self.line(quantity, memory[quantity], layer=layer, n=memory["count"])
            if layer in shown:
                yield from list_shares(self, "codes", memory["counts"], -ENDS, ENDS, layer=layer)
            if first and "map" in memory:
                yield from self._list_map(memory["map"], layer)
        yield self.claim("near_zero", [torch.tensor([memory["small"] > 0.5 for memory in memories.values()])])

    def _list_map(self, sizes: Tensor, layer: int) -> Iterator[Line]:
        tokens, channels = sizes.shape
        for y, some in zip(*cut_squares(tokens), strict=True):
            for x, part in zip(*cut_squares(channels), strict=True):
                yield self.line("size", sizes[some, part].mean(), layer=layer, x=x, y=y)


def cut_squares(count: int) -> tuple[list[int], list[slice]]:
    """Cut numbers into at most `SQUARES` nearly equal parts, and return the first number of each and the part."""
    parts = min(SQUARES, count)
    ends = [index * count // parts for index in range(parts + 1)]
    return ends[:-1], [slice(*pair) for pair in pairwise(ends)]


def describe_codes(codes: Tensor) -> Memory:
    """Describe the codes of a layer, (tokens, channels)."""
    squares = codes.square()
    sizes = {"token_ratio": squares.mean(1).sqrt(), "channel_ratio": squares.mean(0).sqrt()}
    return {quantity: float(norms.max() / norms.median()) for quantity, norms in sizes.items()} | {
        "count": codes.numel(),
        "counts": count_bins(codes / squares.mean().sqrt(), -ENDS, ENDS, BINS),
        "small": float((codes.abs() < PART * codes.abs().max()).sum() / codes.numel()),
    }

"""Both operations in PyTorch, context by context. They wait for the host."""

import torch
from torch import Tensor

from kvbench.kernels.attention import attend_ragged
from kvbench.kernels.joined_rows.rows import JoinedLayer
from kvbench.kernels.rope_append.reference import append_reference
from kvbench.kernels.softmax_extras import SoftmaxExtras


def append_joined_reference(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    places: Tensor,
    layer: JoinedLayer,
    step: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
) -> Tensor:
    tails = [
        (part.tail_keys[sample, None], part.tail_values[sample, None], part.tail)
        for part in layer.parts
        for sample in range(len(part.tail_keys))
    ]
    rotated = [
        append_reference(
            queries[sample, None],
            keys[sample, None],
            values[sample, None],
            cos[place:],
            sin[place:],
            *tail,
            step,
            None,
            None,
            None,
            norms,
        )
        for sample, (tail, place) in enumerate(zip(tails, places.tolist(), strict=True))
    ]
    return torch.cat(rotated)


def attend_joined_reference(
    queries: Tensor, layer: JoinedLayer, scaling: float, step: Tensor, extras: SoftmaxExtras | None
) -> Tensor:
    by_part = queries.split([len(part.tail_keys) for part in layer.parts])
    return torch.cat(
        [
            attend_ragged(
                some,
                part.held,
                part.tail_keys,
                part.tail_values,
                scaling,
                tail=part.tail + 1,
                step=step,
                extras=extras,
                implementation="reference",
            )[0]
            for some, part in zip(by_part, layer.parts, strict=True)
        ]
    )

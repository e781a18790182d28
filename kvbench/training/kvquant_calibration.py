"""Compute the ranges and the code books of KVQuant.

Source: the KVQuant paper (arXiv 2401.18079); SqueezeAILab/KVQuant, quant/kvquant/simquant_module_quantizer.py and
gradients/. Symbols are those of kvbench/methods/codecs/kvquant.py.

The ends of a channel's range are quantiles of its keys over all tokens of the texts. z of the keys within their ranges,
and of the values that are no outliers of their rows, are clustered, all channels of a layer together: the code book
minimises Σ w·(z − nearest c)² by up to 50 rounds of Lloyd's algorithm. w is the square of the gradient of the next
token's cross-entropy with respect to the number (Fisher information), or 1. The first `sinks` tokens of a sequence,
which stay raw, have no part.

Where kvbench differs: the code book begins with the quantiles (i + ½)/2^bits of z, weighed by w, where the source draws
its first numbers (k-means++).
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from kvbench.interfaces.layout import Layout
from kvbench.methods.codecs.kvquant import (
    BITS,
    OUTLIERS,
    RANGES,
    SIDES,
    count_outliers,
    name_levels,
    name_norms,
    normalise_keys,
    normalise_values,
)
from kvbench.models.transformers_port import find_text_decoder
from kvbench.training.delta_losses import compute_cross_entropy, replace_rows
from kvbench.validation import SettingError, is_number, require_int

ROUNDS = 50  # of Lloyd's algorithm


@dataclass(frozen=True)
class KVQuantRecipe:
    """The settings of a calibration, by default the source's."""

    outliers: float = 0.01
    """Share of outliers, t."""
    sinks: int = 1
    """First tokens of a sequence that have no part."""
    weighed: bool = True
    """Whether numbers are weighed by the squares of their gradients."""
    sequences: int = 16
    """Number of sequences."""
    length: int = 2048
    """Their tokens."""

    def check(self, layout: Layout) -> None:
        """Raise a SettingError, which names the option, if a model cannot be calibrated with these settings."""
        if not is_number(self.outliers) or not 0 <= self.outliers < 1:
            raise SettingError(f"--outliers={self.outliers}: a share in [0, 1)")
        require_int("--sinks", self.sinks, 0)
        require_int("--sequences", self.sequences, 1)
        require_int("--length", self.length, self.sinks + 2)
        if self.length > layout.longest:
            raise SettingError(f"--length={self.length}: the model takes {layout.longest} tokens")
        if count_outliers(self.outliers, layout.dim) >= layout.dim:
            raise SettingError(f"--outliers={self.outliers}: leaves none of {layout.dim} channels")

    def describe(self) -> dict[str, str]:
        """Return what the metadata say about the recipe."""
        return {"recipe": json.dumps(asdict(self))}


@dataclass(frozen=True)
class LayerNumbers:
    """The keys, before norm and rotation, and the values of a layer over all tokens, with their weights."""

    rows: Tensor
    """[K ‖ V] of each token, (n, 2·H·d)."""
    weights: Tensor | None
    """The squares of their gradients, (n, 2·H·d), or None for 1."""

    def split(self, heads: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the keys and their weights, and then the values and theirs, (n, H, d) float32 each."""
        parts = [None if part is None else part.float().chunk(2, -1) for part in (self.rows, self.weights)]
        for side in range(2):
            rows, weights = (None if part is None else part[side].unflatten(-1, (heads, -1)) for part in parts)
            assert rows is not None
            yield rows, weights


def collect_numbers(
    model: torch.nn.Module, layers: Sequence[int], sequences: Sequence[Tensor], recipe: KVQuantRecipe
) -> dict[int, LayerNumbers]:
    """Read texts and return the keys and values of layers, on the CPU.

    Args:
        model: A supported transformers model. Its weights no longer require gradients afterwards.
        layers: The layers.
        sequences: Token ids, (tokens,) each.
        recipe: The recipe.

    Raises:
        SettingError: A gradient is not finite.
    """
    model.requires_grad_(False)
    decoder, device = find_text_decoder(model), next(model.parameters()).device
    rows: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    squares: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    probes: dict[int, Tensor] = {}

    def watch(layer: int, kv: Tensor) -> Tensor:
        if layer not in rows:
            return kv
        rows[layer].append(kv[0, recipe.sinks :].detach().cpu())
        if not recipe.weighed:
            return kv
        probes[layer] = torch.zeros_like(kv, requires_grad=True)  # its gradient is that of kv
        return kv + probes[layer]

    with replace_rows(model, watch), torch.set_grad_enabled(recipe.weighed):
        for ids in tqdm(sequences, desc="keys and values", unit="sequence", file=sys.stderr):
            tokens = ids[None].to(device, torch.int64)
            if not recipe.weighed:
                decoder(input_ids=tokens, use_cache=False)
                continue
            loss = compute_cross_entropy(model, tokens)
            for layer, gradient in zip(probes, torch.autograd.grad(loss, [*probes.values()]), strict=True):
                if not gradient.isfinite().all():
                    raise SettingError(
                        f"--dtype: gradients of layer {layer} are not finite; use float32 or --unweighed"
                    )
                squares[layer].append(gradient[0, recipe.sinks :].float().square().cpu())
    return {
        layer: LayerNumbers(torch.cat(parts), torch.cat(squares[layer]) if recipe.weighed else None)
        for layer, parts in rows.items()
    }


def find_quantiles(rows: Tensor, share: float) -> Tensor:
    """Return the quantiles `share` over the first dimension, interpolated linearly. Rows are sorted, (n, …)."""
    place = share * (len(rows) - 1)
    below = int(place)
    return torch.lerp(rows[below], rows[min(below + 1, len(rows) - 1)], place - below)


def fit_levels(numbers: Tensor, weights: Tensor, count: int) -> Tensor:
    """Return the numbers of a code book that has the least weighed squared distance to `numbers`, ascending.

    Args:
        numbers: (n,), ascending.
        weights: At least 0, (n,) float64.
        count: Numbers of the code book.

    Returns:
        The code book, (count,) float64.
    """
    weights = weights if weights.sum() > 0 else torch.ones_like(weights)
    sums = [torch.cat([part.new_zeros(1), part.cumsum(0)]) for part in (weights, weights * numbers.double())]
    shares = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    places = torch.searchsorted(sums[0][1:], shares * sums[0][-1]).clamp(max=len(numbers) - 1)
    levels = numbers[places].double()
    for _ in range(ROUNDS):
        borders = torch.searchsorted(numbers.double(), (levels[1:] + levels[:-1]) / 2)
        ends = torch.cat([borders.new_zeros(1), borders, borders.new_full((1,), len(numbers))])
        weight, total = (part[ends].diff() for part in sums)
        after = torch.where(weight > 0, total / weight.clamp(min=torch.finfo(torch.float64).tiny), levels)
        if torch.equal(after, levels):
            break
        levels = after.sort().values
    return levels


def fit_norm(numbers: Tensor, levels: Tensor) -> Tensor:
    """Return a and b of Q-Norm, (2,) float64: a·c + b of the nearest c have the mean and deviation of the numbers."""
    numbers = numbers.double()
    read = levels[torch.bucketize(numbers, (levels[1:] + levels[:-1]) / 2, right=True)]
    factor = numbers.std(correction=0) / read.std(correction=0)
    factor = factor if factor.isfinite() else torch.ones_like(factor)  # all codes are the same
    return torch.stack([factor, numbers.mean() - factor * read.mean()])


def calibrate_layer(numbers: LayerNumbers, heads: int, outliers: float) -> dict[str, Tensor]:
    """Return a layer's part of each tensor of the file, by name, float32."""
    made: dict[str, Tensor] = {}
    for side, (rows, weights) in zip(SIDES, numbers.split(heads), strict=True):
        if side == "key":
            ascending = rows.sort(0).values
            ends = [find_quantiles(ascending, share) for share in (outliers / 2, 1 - outliers / 2)]
            made |= dict(zip(RANGES, ends, strict=True))
            z = normalise_keys(rows, *ends)
            inside = (rows >= ends[0]) & (rows <= ends[1])
        else:
            flat = rows.flatten(0, 1)
            z, _, index = normalise_values(flat, count_outliers(outliers, rows.shape[-1]))
            z = z.view_as(rows)
            inside = torch.ones_like(flat, dtype=torch.bool).scatter(-1, index, False).view_as(rows)
        ascending, order = z[inside].sort()
        each = torch.ones(len(order)) if weights is None else weights[inside][order]
        for bits in BITS:
            levels = fit_levels(ascending, each.double(), 2**bits)
            made[name_levels(side, bits)] = levels
            made[name_norms(side, bits)] = fit_norm(ascending, levels)
    return {name: tensor.float() for name, tensor in made.items()}


def calibrate_model(
    model: torch.nn.Module, layout: Layout, recipe: KVQuantRecipe, sequences: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Compute the ranges and code books of all layers that hold rows; those of other layers are 0.

    Args:
        model: A supported transformers model.
        layout: Its layout.
        recipe: The recipe.
        sequences: Token ids, (tokens,) each.

    Returns:
        The tensors of the file.
    """
    made: dict[str, list[Tensor]] = {}
    numbers = collect_numbers(model, layout.held, sequences, recipe)
    parts = {layer: calibrate_layer(numbers.pop(layer), layout.heads, recipe.outliers) for layer in layout.held}
    none = {name: torch.zeros_like(part) for name, part in parts[layout.held[0]].items()}
    for layer in range(layout.layers):
        for name, part in parts.get(layer, none).items():
            made.setdefault(name, []).append(part)
    shares = torch.tensor([recipe.outliers], dtype=torch.float64)
    return {name: torch.stack(each) for name, each in made.items()} | {OUTLIERS: shares}

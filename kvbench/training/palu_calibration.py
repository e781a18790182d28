"""Compute the projections of Palu for a model: second moments of keys and values, ranks, eigenvectors.

Source: the Palu paper (arXiv 2407.21118); shadowpa0327/Palu bb22666, palu/decomposition.py and rank_search.py. Symbols
as in kvbench.methods.codecs.palu_projections: w the width of a group, r its rank, b the bias of k_proj or v_proj.

1. The mean of (k − b)(k − b)ᵀ over a text, for the keys and the values of each group of each layer, in float64.
2. The ranks. `uniform` gives every group w·kept. `fisher` shares Σ w·kept out in proportion to F, the mean over the
   group's rows of W of sqrt(mean over sequences of grad²). `fisher_uniform` takes one F for the keys and one for the
   values of a layer, and divides their rank equally among the groups. Shares are rounded down, at most w; what is left
   is handed out one by one, again and again, in ascending order of what was rounded off. At the end each rank is
   rounded to a multiple of `unit`.
3. The r first eigenvectors U_r and eigenvalues λ of each moment: U = U_r·λ^¼.

Where kvbench differs: Σ w·kept is rounded to a whole number. (The source hands out ranks until exactly 0 are left, and
where they are no whole number every group gets a further one.) Gradients are those of the next token. (The source
passes inputs and labels that are shifted already to a model that shifts them again, so it predicts the token after the
next.) They are taken in the model's dtype, by default float32, not float16. The moment is a mean and not a sum, which
scales latents by a constant. Eigenvalues are at least 1e-12 of the largest, so that U has a pseudo-inverse of moderate
size. The unit is 32 for w of 512 and more, as the authors' models have; for smaller w it is w/16, in multiples of 8
from 8 on.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kvbench.interfaces.layout import Layout
from kvbench.methods.codecs.palu_projections import SIDES, Place, name_group, name_module
from kvbench.models.transformers_port import find_text_decoder
from kvbench.training.delta_losses import compute_cross_entropy, replace_rows
from kvbench.validation import SettingError, is_number, require_choice, require_int

FULL_WIDTH = 512  # w of the authors' models
SEARCHES = ("fisher_uniform", "fisher", "uniform")
LEAST_TOKENS = 8  # tokens of text for each dimension of a group, so that the moments have full rank
FLOOR = 1e-12  # smallest share of the largest eigenvalue
Shares = Mapping[Place, Sequence[float]]  # F of each group


@dataclass(frozen=True)
class PaluRecipe:
    """The settings of a calibration. `choose_recipe` gives the defaults."""

    removed: float
    """Share of keys and values that is removed: the paper's compression rate."""
    search: str
    """How ranks are chosen, one of `SEARCHES`."""
    group: int
    """KV heads of a group."""
    sequences: int
    """Number of sequences for the moments."""
    length: int
    """Their tokens."""
    fisher_sequences: int
    """Number of sequences for F."""
    fisher_length: int
    """Their tokens."""

    def check(self, layout: Layout) -> None:
        """Raise a SettingError, which names the option, if a model cannot be calibrated with these settings."""
        if not is_number(self.removed) or not 0 <= self.removed < 1:
            raise SettingError(f"--removed={self.removed}: a share in [0, 1)")
        require_choice("--ranks", self.search, SEARCHES)
        for option, least in (
            ("group", 1),
            ("sequences", 1),
            ("length", 2),
            ("fisher_sequences", 1),
            ("fisher_length", 2),
        ):
            require_int(f"--{option.replace('_', '-')}", getattr(self, option), least)
        if layout.heads % self.group:
            raise SettingError(f"--group={self.group}: the model has {layout.heads} KV heads; a divisor of this number")
        if self.length > layout.longest:
            raise SettingError(f"--length={self.length}: the model takes {layout.longest} tokens")
        if self.fisher_length > self.length:
            raise SettingError(f"--fisher-length={self.fisher_length}: at most --length={self.length}")

    @property
    def sequences_to_read(self) -> int:
        """Number of sequences that a text should have."""
        return self.sequences if self.search == "uniform" else max(self.sequences, self.fisher_sequences)


def choose_recipe(layout: Layout, given: Mapping[str, Any]) -> PaluRecipe:
    """Return the authors' recipe, with less text if the model is smaller than theirs, and with what was given.

    With s = min(1, w / 512), these are 256·s sequences of 2048·s tokens for the moments, and 2048·s of 1024·s for F,
    but at least 16 sequences of 64 tokens. The scaling is ours.

    Args:
        layout: The model's.
        given: Settings by name; None stands for the default.

    Raises:
        SettingError: A setting cannot be used.
    """
    group = given.get("group") or max(heads for heads in range(1, 5) if layout.heads % heads == 0)
    share = min(1.0, group * layout.dim / FULL_WIDTH)

    def scale(least: int, full: int) -> int:
        return max(least, round(full * share))

    length = min(given.get("length") or scale(64, 2048), layout.longest)
    chosen: dict[str, Any] = {
        "removed": 0.5,
        "search": "fisher_uniform",
        "group": group,
        "sequences": scale(16, 256),
        "length": length,
        "fisher_sequences": scale(16, 2048),
        "fisher_length": min(length, scale(64, 1024)),
    } | {name: value for name, value in given.items() if value is not None}
    recipe = PaluRecipe(**chosen)
    recipe.check(layout)
    return recipe


def find_biases(attention: Any, width: int) -> dict[str, Tensor | None]:
    """Return the biases of a layer's keys and values, `width` numbers each, or None for those without."""
    if hasattr(attention, "qkv_proj"):
        bias = attention.qkv_proj.bias
        return dict(zip(SIDES, (None, None) if bias is None else bias[-2 * width :].chunk(2), strict=True))
    return {"k": attention.k_proj.bias, "v": attention.v_proj.bias}


def find_weights(attention: Any) -> list[Tensor]:
    """Return the weights that the keys and values of a layer come from: W_k and W_v, or the joint one of Phi-3."""
    if hasattr(attention, "qkv_proj"):
        return [attention.qkv_proj.weight]
    return [attention.k_proj.weight, attention.v_proj.weight]


@torch.no_grad()
def compute_moments(
    model: torch.nn.Module, layers: Sequence[int], groups: int, sequences: Sequence[Tensor]
) -> dict[Place, Tensor]:
    """Compute the means of (k − b)(k − b)ᵀ and of (v − b)(v − b)ᵀ over all tokens.

    Args:
        model: A supported transformers model.
        layers: The layers.
        groups: Number of groups of a layer.
        sequences: Token ids, (tokens,) each.

    Returns:
        For the keys and the values of each layer, (groups, w, w) float64 on the model's device.
    """
    decoder, device = find_text_decoder(model), next(model.parameters()).device
    sums: dict[Place, Tensor] = {}

    def add(layer: int, kv: Tensor) -> Tensor:
        if layer in layers:
            rows = kv.flatten(0, 1).double().chunk(2, -1)
            biases = find_biases(decoder.layers[layer].self_attn, rows[0].shape[1])
            for side, vectors in zip(SIDES, rows, strict=True):
                centred = vectors if (bias := biases[side]) is None else vectors - bias.double()
                parts = centred.unflatten(1, (groups, -1)).transpose(0, 1)
                sums[layer, side] = sums.get((layer, side), 0) + parts.mT @ parts
        return kv

    with replace_rows(model, add):
        for ids in tqdm(sequences, desc="moments", unit="sequence", file=sys.stderr):
            decoder(input_ids=ids[None].to(device, torch.int64), use_cache=False)
    tokens = sum(len(ids) for ids in sequences)
    return {place: moment / tokens for place, moment in sums.items()}


def compute_fisher(
    model: torch.nn.Module, layers: Sequence[int], width: int, groups: int, sequences: Sequence[Tensor]
) -> dict[Place, list[float]]:
    """Compute F of each group: the mean over its rows of W of the root of the mean square of the gradients.

    Args:
        model: A supported transformers model. Its weights no longer require gradients afterwards.
        layers: The layers.
        width: Keys, or values, of all heads of a layer.
        groups: Number of groups of a layer.
        sequences: Token ids, (tokens,) each. Gradients of the mean cross-entropy of the next token are taken of each.

    Raises:
        SettingError: A gradient is not finite.
    """
    model.requires_grad_(False)
    decoder, device = find_text_decoder(model), next(model.parameters()).device
    weights = {layer: find_weights(decoder.layers[layer].self_attn) for layer in layers}
    every = [weight.requires_grad_() for layer in layers for weight in weights[layer]]
    squares = [torch.zeros_like(weight, dtype=torch.float32) for weight in every]
    for ids in tqdm(sequences, desc="gradients", unit="sequence", file=sys.stderr):
        loss = compute_cross_entropy(model, ids[None].to(device, torch.int64))
        for square, gradient in zip(squares, torch.autograd.grad(loss, every), strict=True):
            square += gradient.float().square()
    model.requires_grad_(False)
    fisher, left = dict[Place, list[float]](), iter(squares)
    for layer in layers:
        joined = torch.cat([next(left) for _ in weights[layer]])
        rows = joined[-2 * width :]  # the joint matrix of Phi-3 begins with the queries
        means = (rows / len(sequences)).sqrt().view(2, groups, -1).double().mean(-1)
        if not means.isfinite().all():
            raise SettingError(f"--dtype: gradients of layer {layer} are not finite; use float32 and --ranks uniform")
        fisher |= {(layer, side): group_means.tolist() for side, group_means in zip(SIDES, means, strict=True)}
    return fisher


def choose_unit(width: int) -> int:
    """Return the number of which ranks are multiples, for groups of `width` numbers."""
    return min(32, max(8, width // 128 * 8))


def choose_ranks(
    places: Sequence[Place], width: int, groups: int, recipe: PaluRecipe, fisher: Shares | None
) -> dict[Place, list[int]]:
    """Choose the rank of each group.

    Args:
        places: The keys and the values of each layer.
        width: Width of a group, w.
        groups: Number of groups of a layer.
        recipe: The recipe.
        fisher: F of each group; None if ranks are uniform.
    """
    kept = 1 - recipe.removed
    if fisher is None:
        ranks = {place: [width * kept] * groups for place in places}
    elif recipe.search == "fisher":
        each = share_out(
            {(place, group): fisher[place][group] for place in places for group in range(groups)}, width, kept
        )
        ranks = {place: [each[place, group] for group in range(groups)] for place in places}
    else:
        each = share_out({(place, 0): math.fsum(fisher[place]) / groups for place in places}, width * groups, kept)
        ranks = {place: [each[place, 0] // groups] * groups for place in places}
    unit = choose_unit(width)
    return {place: [min(width, max(1, round(rank / unit)) * unit) for rank in exact] for place, exact in ranks.items()}


def share_out(fisher: Mapping[tuple[Place, int], float], most: int, kept: float) -> dict[tuple[Place, int], int]:
    """Share the numbers that are kept out in proportion to F. No share exceeds `most`."""
    total = round(len(fisher) * most * kept)
    exact = {place: total * score / math.fsum(fisher.values()) for place, score in fisher.items()}
    ranks = {place: min(most, math.floor(share)) for place, share in exact.items()}
    order = sorted(ranks, key=lambda place: exact[place] - ranks[place])
    left = total - sum(ranks.values())
    while left:
        for place in [candidate for candidate in order if ranks[candidate] < most][:left]:
            ranks[place] += 1
            left -= 1
    return ranks


def make_weights(
    moments: Mapping[Place, Tensor], ranks: Mapping[Place, Sequence[int]], biases: Mapping[Place, Tensor | None]
) -> dict[str, Tensor]:
    """Make the weights of a file of projections, in float32 on the CPU.

    Args:
        moments: The second moments of each group, (groups, w, w).
        ranks: The rank of each group.
        biases: The biases, (groups·w,), or None.
    """
    weights = {}
    for place, moment in moments.items():
        values, vectors = (part.flip(-1) for part in torch.linalg.eigh(moment))
        values = values.clamp(min=FLOOR * values.max().clamp(min=torch.finfo(torch.float32).tiny).item())
        weights[f"{name_module(place)}.eigenvalues"] = values.float().cpu()
        for group, rank in enumerate(ranks[place]):
            name = name_group(place, group)
            up = vectors[group, :, :rank] * values[group, :rank] ** 0.25
            weights[f"{name}.weight"] = up.float().cpu().contiguous()
            bias = biases[place]
            if bias is not None:
                weights[f"{name}.bias"] = bias.detach().chunk(len(moment))[group].float().cpu().contiguous()
    return weights


def calibrate_model(
    model: torch.nn.Module, layout: Layout, recipe: PaluRecipe, sequences: Tensor
) -> tuple[dict[str, Tensor], dict[Place, list[int]]]:
    """Compute the projections of all layers without a sliding window.

    Args:
        model: A supported transformers model.
        layout: Its layout.
        recipe: The recipe.
        sequences: Token ids, (n, tokens). The first ones serve for the moments and for F.

    Returns:
        The weights of the file by their names, and the ranks.
    """
    layers = list(layout.held)
    groups, width = layout.heads // recipe.group, recipe.group * layout.dim
    moments = compute_moments(model, layers, groups, [*sequences[: recipe.sequences, : recipe.length]])
    fisher = None
    if recipe.search != "uniform":
        short = sequences[: recipe.fisher_sequences, : recipe.fisher_length]
        fisher = compute_fisher(model, layers, groups * width, groups, [*short])
    ranks = choose_ranks([*moments], width, groups, recipe, fisher)
    layer_biases = {
        layer: find_biases(find_text_decoder(model).layers[layer].self_attn, groups * width) for layer in layers
    }
    biases = {(layer, side): layer_biases[layer][side] for layer, side in moments}
    return make_weights(moments, ranks, biases), ranks


def draw_projections(layout: Layout, recipe: PaluRecipe, seed: int) -> tuple[dict[str, Tensor], dict[Place, list[int]]]:
    """Draw projections with orthonormal columns and equal ranks, for measurements of time and memory.

    Args:
        layout: The model's layout.
        recipe: The recipe, of which the share and the groups count.
        seed: The seed.

    Returns:
        The weights of the file by their names, and the ranks.
    """
    generator = torch.Generator().manual_seed(seed)
    groups, width = layout.heads // recipe.group, recipe.group * layout.dim
    places = [(layer, side) for layer in layout.held for side in SIDES]
    ranks = choose_ranks(places, width, groups, recipe, None)
    weights = {
        f"{name_group(place, group)}.weight": torch.linalg.qr(torch.randn(width, rank, generator=generator)).Q
        for place, group_ranks in ranks.items()
        for group, rank in enumerate(group_ranks)
    }
    return weights, ranks


def describe_ranks(ranks: Mapping[Place, Sequence[int]], recipe: PaluRecipe) -> dict[str, str]:
    """Return what the metadata say about the ranks and the recipe."""
    named = {name_module(place): list(group_ranks) for place, group_ranks in ranks.items()}
    return {"head_wise_ranks": json.dumps(named), "recipe": json.dumps(asdict(recipe))}

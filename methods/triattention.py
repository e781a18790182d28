"""triattention: keep the rows that the model's usual queries will attend to at many distances (TriAttention).

Source: the TriAttention paper (arXiv 2604.04921); WeianMao/triattention 0.2.0, methods/pruning_utils.py (the score) and
methods/triattention.py (normalisation and selection). Symbols: q_f, k_f the complex pair of frequency f of a query and
a key before rotation; ω_f its frequency; c_f the factor that the model's rotation multiplies by (1, but for YaRN);
q̄_f = E[q_f] and q̂_f = E|q_f| over the queries of some texts; t the distance from the key to the position after the
last token read; Δ = {1, 2, 4, …} up to `horizon`.

    a_j = mean_{δ∈Δ} Σ_f c_f² Re(q̄_f · conj(k_f) · e^{iω_f(t+δ)}) + Σ_f c_f² (q̂_f - |q̄_f|) |k_f|
    z_j = (a_j - mean of a) / standard deviation of a, per query head
    s_j = max over the query heads of the KV head of z_j

The first sum is the logit of the mean query, without the factor 1/√d. The second one makes up for what the mean loses.

The mean over δ folds into one complex factor W_f = mean_δ c_f e^{iω_f(p+δ)} per frequency, where p is the position
after the last token. Cached keys are κ_f = c_f k_f e^{iω_f(p-t)}, so that

    a_j = Σ_f Re(q̄_f W_f conj(κ_f)) + Σ_f c_f (q̂_f - |q̄_f|) |κ_f|

which needs no keys before rotation, and no positions of rows. W_f is the mean of the model's own rotations. Models
whose frequencies change with the length of the text (dynamic RoPE, LongRoPE) have no one ω_f and are refused.

`pin_prompt` is the way of the source's code for transformers: rows of the prompt stay, they count as part of the
budget, and do not enter the mean and the deviation. The source's vLLM plugin pins no prompt (0.1.0 did). It normalises
over all rows, and the `recent` newest rows stay.

kvbench's own choices: each layer selects for itself, as the source does with per_layer_perhead_pruning; its default
takes the mean of s_j over the layers. A cut follows every 128 tokens of an answer; in the source it follows whenever
128 rows more than the budget are held, which is the same once the budget is full. Ties go to the earlier row; the
source adds noise. Dimensions that the model does not rotate have frequency 0 and form pairs among themselves. Without
`pin_prompt` the prompt is cut to the budget.

The file is a safetensors file of `python -m kvbench calibrate triattention`, or one of the authors' (torch.save), which
is opened with weights_only=True and so cannot run code. The authors' script leaves out the norm of queries, so for
models that have one (Qwen3, Gemma 3) its files do not describe the queries that attend.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvbench.interfaces.layout import Layout
from kvbench.interfaces.method import Captured, Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting
from kvbench.interfaces.tensor_files import TensorFile, check_tensors, find_weights, is_pickled, read_tensors
from kvbench.kernels.rerotation import rotate
from kvbench.validation import SettingError, summarize

MEAN, ABS = "q_mean", "q_abs_mean"
SHAPES = {MEAN: ("layers", "query heads", "dimensions"), ABS: ("layers", "query heads", "frequencies")}
WHAT = "statistics of queries"
ENTRY = re.compile(r"layer(?P<layer>\d+)_head(?P<head>\d+)")  # a query head in the authors' files
PARTS = (
    "q_mean_real",
    "q_mean_imag",
    "q_abs_mean",
)  # the three vectors of a query head, (frequencies,)
CHUNK = 8192  # rows that are scored at once
LEAST = 1e-6  # smallest standard deviation (the source)


@dataclass(frozen=True)
class TriAttention(Method):
    """Score rows by the attention of the mean query at many distances."""

    path: str | None = setting()
    """The file of the statistics."""
    horizon: int = setting(minimum=1)
    """The distances δ from the text's end to a query are the powers of 2 up to this number."""
    recent: int = setting(minimum=0)
    """Number of newest rows that always stay."""
    pin_prompt: bool = setting()
    """Whether the rows of the prompt always stay."""

    captured = Captured()
    refusals = {"rope_switch": "needs fixed rotary frequencies; use another method or another model"}

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.file  # refuse an unusable file at once

    @cached_property
    def file(self) -> TensorFile:
        """The statistics: q̄ in the order of the model's dimensions, and q̂."""
        return read_statistics(self.path)

    def check(self, layout: Layout) -> None:
        shape = tuple(self.file.tensors[MEAN].shape)
        if shape != (needed := (layout.layers, layout.query_heads, layout.dim)):
            raise SettingError(
                f"method.path={self.path}: the statistics have (layers, query heads, dimensions) {shape}, "
                f"the model {needed}"
            )

    def protect_sinks(self, observation: Observation, rows: Rows, quota: int | Tensor) -> Tensor | None:
        return rows.places < observation.prompt if self.pin_prompt else None

    def protect(self, observation: Observation, rows: Rows, quota: int | Tensor) -> Tensor:
        return rows.places >= observation.tokens - self.recent

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        mean, size = (self.file.like(name, rows.mass)[observation.layer] for name in (MEAN, ABS))
        cos, sin, factor = mean_rotation(observation, self.horizon, rows.mass)
        counted = rows.present
        if self.pin_prompt:
            counted = counted & (rows.places >= observation.prompt)
        return normalise(weigh_keys(rows.keys, mean, size, cos, sin, factor), counted).amax(2)


def mean_rotation(observation: Observation, horizon: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean rotation of queries 1, 2, 4, …, `horizon` positions behind the text, and c.

    Returns:
        The cos and sin, (1 or B, 1, r) each, and c of the rotated pairs, (r/2,), with the dtype and device of `like`.
    """
    count = horizon.bit_length()
    places = ((1 << torch.arange(count, device=like.device)) + observation.tokens).reshape(-1, count)
    cos, sin = (part.to(like) for part in observation.rotation(pad(places, (1, 0))))  # the cos of position 0 is c
    factor = cos[0, 0, : cos.shape[2] // 2]
    return cos[:, 1:].mean(1, keepdim=True), sin[:, 1:].mean(1, keepdim=True), factor


def pair_sizes(x: Tensor, rotated: int) -> Tensor:
    """Return |x_f| of each pair, (…, d/2), of x (…, d) whose first `rotated` dimensions the model rotates.

    Pairs are the dimensions i and i + r/2 of the r rotated ones, followed by such pairs of the others.
    """
    return torch.cat([part.unflatten(-1, (2, -1)).norm(dim=-2) for part in x.tensor_split([rotated], -1)], -1)


def weigh_keys(keys: Tensor, mean: Tensor, size: Tensor, cos: Tensor, sin: Tensor, factor: Tensor) -> Tensor:
    """Return a of the rows for each query head, (B, H, G, n).

    Args:
        keys: Rotated keys, (B, H, n, d).
        mean: q̄ of the query heads, (H*G, d), in the order of the model's dimensions.
        size: q̂, (H*G, d/2).
        cos: The mean cos of the queries' rotations, (1 or B, 1, r).
        sin: Likewise the sin.
        factor: c of the rotated pairs, (r/2,).
    """
    heads, rotated = keys.shape[1], cos.shape[2]
    turned = rotate(mean.expand(len(cos), -1, -1), cos, sin).unflatten(1, (heads, -1))  # (1 or B, H, G, d)
    more = size - pair_sizes(mean, rotated)
    more = torch.cat([more[:, : len(factor)] * factor, more[:, len(factor) :]], 1).unflatten(0, (heads, -1))
    scores = []
    for some in keys.split(CHUNK, 2):
        block = some.to(mean.dtype)
        scores.append(turned @ block.mT + more @ pair_sizes(block, rotated).mT)
    return torch.cat(scores, 3)


def normalise(scores: Tensor, counted: Tensor) -> Tensor:
    """Return scores (B, H, G, n) minus their mean over the rows `counted` (B, H, n), in standard deviations."""
    others, count = ~counted[:, :, None], counted.sum(-1)[:, :, None, None].clamp(min=1)
    centred = scores - scores.masked_fill(others, 0).sum(-1, keepdim=True) / count
    spread = (centred.masked_fill(others, 0).square().sum(-1, keepdim=True) / count).sqrt()
    return centred / spread.clamp(min=LEAST)


def read_statistics(path: object) -> TensorFile:
    """Read a file of statistics, kvbench's or the authors'.

    Returns:
        The tensors q_mean (layers, query heads, d) and q_abs_mean (layers, query heads, d/2).

    Raises:
        SettingError: The file cannot be read, or does not hold these.
    """
    file = find_weights(path, "method.path", WHAT, "triattention")
    statistics = read_authors_file(path, file) if is_pickled(file) else read_tensors(path, SHAPES, WHAT, "triattention")
    mean, size = statistics.tensors[MEAN], statistics.tensors[ABS]
    if mean.shape != (*size.shape[:2], 2 * size.shape[2]) or not mean.numel() or (size < 0).any():
        raise SettingError(
            f"method.path={path}: {MEAN} {tuple(mean.shape)} and {ABS} {tuple(size.shape)} must be (layers, query "
            "heads, d) and (layers, query heads, d/2), the latter from 0 on"
        )
    return statistics


def read_authors_file(path: object, file: Path) -> TensorFile:
    """Read a file of WeianMao/triattention, scripts/calibrate.py: a dictionary of `metadata` and `stats`.

    Raises:
        SettingError: It holds anything but tensors and plain values, or not all query heads of all layers.
    """

    def refuse(reason: str) -> SettingError:
        return SettingError(f"method.path={path}: cannot read the {WHAT} ({reason})")

    try:
        read = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises errors of many classes, and nothing of the file has run
        raise refuse(summarize(error)) from None
    stats = read.get("stats") if isinstance(read, dict) else None
    if not isinstance(stats, dict) or not stats:
        raise refuse("its stats are no dictionary of query heads")
    about = read.get("metadata")
    style = about.get("rope_style", "half") if isinstance(about, dict) else "half"
    if style != "half":
        raise refuse(f"its rope_style is {style}, and models of kvbench rotate halves")
    heads: dict[tuple[int, int], Any] = {}
    for key, vectors in stats.items():
        entry = ENTRY.fullmatch(key) if isinstance(key, str) else None
        if entry is None:
            raise refuse(f"{key} is no layer and query head")
        heads[int(entry["layer"]), int(entry["head"])] = vectors
    layers, count = (max(numbers) + 1 for numbers in zip(*heads, strict=True))
    for place in ((layer, head) for layer in range(layers) for head in range(count)):
        if not is_entry(heads.get(place), heads[max(heads)]):
            raise refuse(f"layer {place[0]}, query head {place[1]} lacks {', '.join(PARTS)} of one length")
    real, imaginary, size = (
        torch.stack([torch.stack([heads[layer, head][part] for head in range(count)]) for layer in range(layers)])
        for part in PARTS
    )
    tensors = {MEAN: torch.cat([real, imaginary], 2).float(), ABS: size.float()}
    check_tensors(path, tensors, SHAPES)
    return TensorFile.of(path, tensors)


def is_entry(entry: object, like: object) -> bool:
    """Whether the entry of a query head holds three vectors of real numbers, as long as those of the entry `like`."""
    if not isinstance(entry, Mapping) or not isinstance(like, Mapping):
        return False
    parts, other = [entry.get(part) for part in PARTS], like.get(ABS)
    return isinstance(other, Tensor) and all(
        isinstance(part, Tensor) and part.dim() == 1 and part.shape == other.shape and part.is_floating_point()
        for part in parts
    )

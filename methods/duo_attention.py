"""duo_attention: each head is full or streaming. A streaming head holds only its first and its newest rows.

Source: the DuoAttention paper (arXiv 2410.10819); mit-han-lab/duo-attention, duo_attn/utils.py (pattern files, the
quantile) and attn_patterns/; NVIDIA/kvpress, duo_attention_press.py (a rounded count). Symbols: α the trained gate of a
layer and KV head, N the number of heads of all layers, n tokens read, w = sinks + recent, b the mean number of rows per
head (the budget). A head is full or streaming by the number of heads whose gates are smaller, rank(α):

    streams(head) = rank(α_head) < S
    a streaming head holds rows 0 … sinks - 1 and n - recent … n - 1

The heads with the smallest α stream. How many heads stream, S, depends on the settings:

- `sparsity` σ, count=quantile: those below the σ-quantile of all α. That is ⌈σ·(N-1)⌉ heads, none for σ=0 and all for
  σ=1.
- `sparsity` σ, count=round: σ·N heads, rounded.
- no `sparsity`: the fewest heads that keep to the budget, ⌈N·(n-b)/(n-w)⌉. This rule is kvbench's own.

Of equal α the lower layer, then the lower head, stays full. (The official code adds unseeded noise.)

A pattern is a folder as published: full_attention_heads.tsv has a line of α per layer, and config.json has sink_size
and recent_size. α is nan in layers with a sliding window, which no method cuts.
"""

import json
import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor

from kvbench.interfaces.layout import Layout
from kvbench.interfaces.method import Captured, Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting
from kvbench.interfaces.tensor_files import ModelFile
from kvbench.validation import SettingError, require_int


@dataclass(frozen=True)
class Pattern:
    """A trained pattern: which heads need the full cache."""

    alpha: list[list[float]]
    """The gate α of each layer and KV head; nan in layers that are not cut."""
    sinks: int
    """First rows that a streaming head holds."""
    recent: int
    """Newest rows that a streaming head holds."""

    @property
    def unheld(self) -> tuple[int, ...]:
        """Layers without α, which have a sliding window or no rows."""
        return tuple(layer for layer, alphas in enumerate(self.alpha) if all(map(math.isnan, alphas)))

    def order(self) -> list[tuple[int, int]]:
        """Return (layer, head) of every head that can stream. The heads that stream first come last."""
        heads = [(layer, head) for layer, alphas in enumerate(self.alpha) for head in range(len(alphas))]
        cut = [place for place in heads if place[0] not in self.unheld]
        return sorted(cut, key=lambda place: -self.alpha[place[0]][place[1]])


@dataclass(frozen=True)
class DuoAttention(Method):
    """Make the heads with the smallest trained gates stream."""

    path: str | None = setting()
    """The pattern's folder."""
    sparsity: float | None = setting(minimum=0, maximum=1, allowed="a share in [0, 1], or null to follow the budget")
    """Share of the heads that stream, σ. `None` follows the budget."""
    count: str = setting(choices=("quantile", "round"))
    """How a share becomes a number of heads."""
    sinks: int | None = setting(minimum=0)
    """First rows of a streaming head; `None` takes the pattern's number."""
    recent: int | None = setting(minimum=1)
    """Newest rows of a streaming head; `None` takes the pattern's number."""
    pattern: Pattern = field(init=False, repr=False, compare=False)
    """The pattern that was read from `path`."""

    captured = Captured(order_free=True, streams=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        pattern = read(self.path)
        sinks = pattern.sinks if self.sinks is None else self.sinks
        recent = pattern.recent if self.recent is None else self.recent
        object.__setattr__(self, "pattern", replace(pattern, sinks=sinks, recent=recent))

    @property
    def file(self) -> ModelFile:
        return ModelFile(str(self.path), 8 * sum(map(len, self.pattern.alpha)))

    def check(self, layout: Layout) -> None:
        stated = (len(self.pattern.alpha), len(self.pattern.alpha[0]))
        if stated != (needed := (layout.layers, layout.heads)):
            raise SettingError(
                f"method.path={self.path}: the pattern has (layers, KV heads) {stated}, the model {needed}"
            )
        unheld = tuple(layer for layer in range(layout.layers) if layer not in layout.held)
        if self.pattern.unheld != unheld:
            raise SettingError(
                f"method.path={self.path}: layers {self.pattern.unheld} have no α (nan), but the model's layers "
                f"without rows to cut are {unheld}"
            )

    def head_quotas(self, quota: int, observation: Observation, state: State) -> Tensor:
        """Return all rows for a full head and `window` rows for a streaming one.

        Which heads stream is decided at the cuts of the prompt. A head that streams keeps streaming.
        """
        streaming, window = state.layer.get("streaming", 0), state.layer.get("window", 0)
        if not observation.decoding:
            now, window = self.streaming(quota, observation.tokens)
            streaming = max(streaming, now)
            state.layer |= {"streaming": streaming, "window": window}
        order = self.pattern.order()
        stream = set(order[len(order) - streaming :])
        heads = range(len(self.pattern.alpha[observation.layer]))
        return torch.tensor([window if (observation.layer, head) in stream else observation.tokens for head in heads])

    def streaming(self, quota: int, tokens: int) -> tuple[int, int]:
        """Return how many heads of all layers stream, and how many rows each of them may hold."""
        heads, window = len(self.pattern.order()), self.pattern.sinks + self.pattern.recent
        if self.sparsity is None:
            if quota >= tokens:
                return 0, window
            if quota <= window:
                return heads, quota
            return -(-heads * (tokens - quota) // (tokens - window)), window
        share = Fraction(str(self.sparsity))
        if self.count == "round" or share == 1:
            return round(heads * share), window
        return math.ceil((heads - 1) * share), window

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        """Rank the first rows of a streaming head above all others, and those by their position.

        If the first and the newest rows do not all fit, both shrink in proportion.
        """
        sinks = state.layer.get("window", 0) * self.pattern.sinks // (self.pattern.sinks + self.pattern.recent)
        newest = rows.places.to(rows.mass.dtype)  # exact up to 2^24 tokens
        return newest.masked_fill(rows.places < min(sinks, self.pattern.sinks), torch.inf)


def read(path: str | None) -> Pattern:
    """Read the pattern of a folder.

    Raises:
        SettingError: There is no pattern, or it cannot be read.
    """
    if path is None:
        raise SettingError(
            "method.path=null: give a folder with full_attention_heads.tsv and config.json, as in "
            "mit-han-lab/duo-attention attn_patterns/ or from python -m kvbench calibrate duo_attention"
        )
    if not isinstance(path, str | Path):
        raise SettingError(f"method.path={path}: a path")
    folder = Path(path).expanduser()
    try:
        lines = (folder / "full_attention_heads.tsv").read_text(encoding="utf-8").split("\n")
        alpha = [[float(number) for number in line.split("\t")] for line in lines if line.strip()]
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        sinks, recent = config["sink_size"], config["recent_size"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SettingError(f"method.path={path}: no readable pattern ({reason})") from None
    if not alpha or len({len(row) for row in alpha}) > 1 or any(len(set(map(math.isnan, row))) > 1 for row in alpha):
        raise SettingError(
            f"method.path={path}: full_attention_heads.tsv must be a table with one α per layer and KV head"
        )
    require_int("method.path: sink_size", sinks, 0)
    require_int("method.path: recent_size", recent, 1)
    return Pattern(
        [[min(max(number, 0.0), 1.0) if number == number else number for number in line] for line in alpha],
        sinks,
        recent,
    )

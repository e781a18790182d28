"""duo_attention: whole heads are full or streaming; a streaming head holds the first rows and the newest.

Source: the DuoAttention paper (arXiv 2410.10819); mit-han-lab/duo-attention, duo_attn/utils.py (pattern files, the
quantile) and attn_patterns/; NVIDIA/kvpress, duo_attention_press.py (a rounded count). Symbols: α trained gate of a
layer and KV head, N heads of all layers, n tokens read, w = sinks + recent, b mean rows per head (the budget).
The heads with the smallest α stream. How many: by `sparsity` σ, quantile: those below the σ-quantile of all α (it is
⌈σ·(N-1)⌉ of them, none for σ=0, all for σ=1), or round: σ·N rounded; or, without it, the fewest that keep to the
budget, ⌈N·(n-b)/(n-w)⌉ (ours). Equal α: the lower layer, then the lower head, stays full (official: unseeded noise).

Pattern: a folder as published, full_attention_heads.tsv (a line of α per layer) and config.json (sink_size,
recent_size); α is nan in layers with a sliding window, which no method cuts.
"""

import json
import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor

from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.validation import SettingError, is_number, require_choice, require_int


@dataclass(frozen=True)
class Pattern:
    """`alpha` by layer and KV head, nan where nothing is cut; rows that a streaming head holds."""

    alpha: list[list[float]]
    sinks: int
    recent: int

    @property
    def sliding(self) -> tuple[int, ...]:
        """Layers without α."""
        return tuple(layer for layer, own in enumerate(self.alpha) if all(map(math.isnan, own)))

    def order(self) -> list[tuple[int, int]]:
        """(layer, head) of all that can stream; those that stream first come last."""
        heads = [(layer, head) for layer, own in enumerate(self.alpha) for head in range(len(own))]
        cut = [place for place in heads if place[0] not in self.sliding]
        return sorted(cut, key=lambda place: -self.alpha[place[0]][place[1]])


@dataclass(frozen=True)
class DuoAttention(Method):
    """`path` of the pattern's folder; `sparsity`: share of heads that stream, None to follow the budget; `count`:
    quantile | round; `sinks`, `recent`: rows of a streaming head, None for the pattern's own.
    """

    path: str | None
    sparsity: float | None
    count: str
    sinks: int | None
    recent: int | None
    pattern: Pattern = field(init=False, repr=False, compare=False)

    scores = False
    sets_head_quotas = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("method.count", self.count, ("quantile", "round"))
        if self.sparsity is not None and not (is_number(self.sparsity) and 0 <= self.sparsity <= 1):
            raise SettingError(f"method.sparsity={self.sparsity}: a share in [0, 1], or null to follow the budget")
        if self.sinks is not None:
            require_int("method.sinks", self.sinks, 0)
        if self.recent is not None:
            require_int("method.recent", self.recent, 1)
        own = read(self.path)
        sinks = own.sinks if self.sinks is None else self.sinks
        recent = own.recent if self.recent is None else self.recent
        object.__setattr__(self, "pattern", replace(own, sinks=sinks, recent=recent))

    def check(self, layers: int, heads: int, dim: int, sliding: tuple[int, ...]) -> None:
        found = (len(self.pattern.alpha), len(self.pattern.alpha[0]))
        if found != (layers, heads):
            raise SettingError(
                f"method.path={self.path}: a pattern for (layers, KV heads) {found}, the model has {(layers, heads)}"
            )
        if self.pattern.sliding != sliding:
            raise SettingError(
                f"method.path={self.path}: layers {self.pattern.sliding} have no α (nan), the model's layers with a "
                f"sliding window are {sliding}"
            )

    def head_quotas(self, quota: int, observation: Observation, state: State) -> Tensor:
        """All rows for a full head, `window` for a streaming one. Chosen at the cuts of the prompt; a head that
        streams never stops to.
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
        """How many heads of all layers stream, and the rows that each of them may hold."""
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

    def cut(self, rows: Rows, scores: Tensor, quotas: Tensor, protected: Tensor, each: int | None = None) -> Rows:
        """First and newest rows of every head; where `sinks + recent` do not fit, both give way alike."""
        sinks = quotas * self.pattern.sinks // (self.pattern.sinks + self.pattern.recent)
        sinks = sinks.clamp(max=self.pattern.sinks)[..., None]
        worth = torch.where(rows.places < sinks, torch.inf, rows.places.double())
        return self.merge(rows, self.select(worth.masked_fill(~rows.present, -torch.inf), quotas))


def read(path: str | None) -> Pattern:
    """The pattern of a folder; SettingError if there is none."""
    if path is None:
        raise SettingError(
            "method.path=null: a folder with full_attention_heads.tsv and config.json, as in "
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
    if not alpha or len({len(own) for own in alpha}) > 1 or any(len(set(map(math.isnan, own))) > 1 for own in alpha):
        raise SettingError(f"method.path={path}: full_attention_heads.tsv is no table of one α per layer and KV head")
    require_int("method.path: sink_size", sinks, 0)
    require_int("method.path: recent_size", recent, 1)
    return Pattern([[min(max(own, 0.0), 1.0) if own == own else own for own in line] for line in alpha], sinks, recent)

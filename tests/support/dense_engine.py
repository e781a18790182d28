"""An independent engine to compare with: plain attention, dense, head by head, in float64."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import AttentionInterface

from tests.support.tiny_models import make_double


@dataclass
class Head:
    """What one KV head holds, one numpy row each."""

    keys: np.ndarray
    values: np.ndarray
    places: np.ndarray
    mass: np.ndarray

    def take(self, index: object) -> "Head":
        return Head(self.keys[index], self.values[index], self.places[index], self.mass[index])


@dataclass
class HeadView:
    """What the dense engine shows of one KV head when a block was read."""

    layer: int
    head: int
    queries: np.ndarray  # (G, T, d)
    outputs: np.ndarray  # (G, T, d)
    rows: Head  # the block's rows are its last
    scaling: float
    tokens: int  # read so far


Cut = Callable[[list[HeadView]], list[Head]]


@dataclass
class DenseEngine:
    """Reads blocks with plain attention over what each head holds; transformers does the rest. `cut` is asked after
    every block of the prompt (and while decoding if `cuts_decoding`) with the glances of a layer's KV heads and gives
    what they hold from then on.
    """

    name: str
    cut: Cut | None = None
    cuts_decoding: bool = False
    held: dict[int, list[Head]] = field(default_factory=dict)
    seen: int = 0
    cutting: bool = False

    def prefill(self, tokens: torch.Tensor, block: int | None) -> torch.Tensor:
        """Logits (vocab) after the last of `tokens` (1, n)."""
        for part in tokens.split(block or tokens.shape[1], dim=1):
            self.cutting = self.cut is not None
            logits = self.read(part)
        return logits[-1]

    def extend(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (t, vocab) of further tokens (1, t)."""
        self.cutting = self.cut is not None and self.cuts_decoding
        return self.read(tokens)

    def positions(self, count: int) -> torch.Tensor:
        """The positions (count,) of the next tokens."""
        return torch.arange(self.seen, self.seen + count)

    @torch.no_grad()
    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        model = make_double(self.name)
        AttentionInterface.register("dense", self.attention)
        before = model.config._attn_implementation
        model.set_attn_implementation("dense")
        positions = self.positions(tokens.shape[1])[None]
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[0]
        model.set_attn_implementation(before)  # other tests read with the same model
        self.seen += tokens.shape[1]
        return logits

    def attention(self, module, query, key, value, mask, scaling, sliding_window=None, **kwargs):
        layer, tokens = module.layer_idx, query.shape[2]
        places = np.arange(self.seen, self.seen + tokens)
        fresh = [Head(k.numpy(), v.numpy(), places, np.ones(tokens)) for k, v in zip(key[0], value[0], strict=True)]
        before = self.held.get(layer, [head.take(slice(0)) for head in fresh])
        glances, outputs = [], []
        for index, (old, new) in enumerate(zip(before, fresh, strict=True)):
            rows = Head(*(np.concatenate([getattr(old, f), getattr(new, f)]) for f in vars(old)))
            group = query.shape[1] // len(fresh)
            queries = query[0, index * group : (index + 1) * group].numpy()
            found = np.stack([self.attend(q, rows, places, scaling, sliding_window) for q in queries])
            glances.append(HeadView(layer, index, queries, found, rows, scaling, self.seen + tokens))
            outputs.extend(found)
        cut = self.cutting and sliding_window is None
        self.held[layer] = self.cut(glances) if cut else [glance.rows for glance in glances]
        return torch.from_numpy(np.stack(outputs, axis=1))[None], None

    @staticmethod
    def attend(queries, rows, places, scaling, window) -> np.ndarray:
        """(T, d): softmax(q·k·s + log mass)·v over the rows whose place a query may see."""
        logits = queries @ rows.keys.T * scaling + np.log(rows.mass)
        logits[rows.places[None] > places[:, None]] = -np.inf
        if window is not None:
            logits[rows.places[None] <= places[:, None] - window] = -np.inf
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True) @ rows.values

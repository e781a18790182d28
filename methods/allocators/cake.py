"""cake: layers share the rows by how widely their attention spreads and how much it changes (CAKE's preferences).

Source: the CAKE paper; antgroup/cakekv, cake/cake_cache.py and cake/utils.py. Symbols: A the attention of the last w
queries to the rows before the window, not normalised again; H = -Σ A·log(A + 1e-10) over heads, queries and rows; V the
sum over heads and rows of A's variance over the queries; P = H^(1/τ1)·V^(1/τ2). Of n layers with `quota` rows on
average, layer l has w + P_l/ΣP·n·(quota - w) rows, but at most what it holds. The excess goes to the others evenly.

With `cascade`, the whole total is shared among the layers read so far after every layer, and earlier layers are cut
again. A layer never gets rows back, but shares only shrink as layers follow. Apart from rounding the result is
therefore the same as without `cascade`, where all layers are cut after the last one and the total is exact. The cascade
saves memory on the way.

While decoding, the shares of the prefill stay. A layer that holds less than its share grows up to it. Shares are
computed per sample; the published sums over a batch would mix samples. Rows that rounding leaves over go to the layers
with the largest fractions, in the source to the first layers. The source does not define two cases. Here the shares are
equal if no layer has any preference (one query has no variance), and if the quota is not above the window.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.apportion import apportion, scale_quotas
from kvbench.interfaces.observation import Observation
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting
from kvbench.kernels.window_attention import window_statistics


@dataclass(frozen=True, eq=False)
class Shown:
    """What the l layers so far of this block have shown, and the rows that follow from it. All tensors are on the CPU.

    Samples come first, so that a prompt that is copied to several samples has as many shares.
    """

    quota: int
    preferences: Tensor
    """log P, (B, l) float64."""
    held: Tensor
    """Rows per head before the cut, (B, l) int64."""
    shares: Tensor
    """Rows per head, (B, l) int64; (B, 0) until they are computed."""


@dataclass(frozen=True)
class Cake(Allocator):
    """Give each layer rows in proportion to its preference P."""

    tau1: float = setting(above=0)
    """The entropy's exponent is 1/τ1."""
    tau2: float = setting(above=0)
    """The variance's exponent is 1/τ2."""
    window: int = setting(minimum=1)
    """Number of last queries that are observed, w."""
    cascade: bool = setting()
    """Whether layers are cut while later ones are still being read."""

    cascades = True
    keeps_shares = True

    def layer(
        self, quota: int, observation: Observation, rows: Callable[[], Rows], shared: dict[str, Any]
    ) -> tuple[int, ...]:
        number, layers = observation.cut_layers.index(observation.layer), len(observation.cut_layers)
        if observation.decoding:
            prefill: Shown | None = shared.get("cake")
            if prefill is None:  # the prompt was not cut
                return (quota,) * observation.queries.shape[0]
            return tuple(scale_quotas(shares, prefill.quota, quota)[number] for shares in prefill.shares.tolist())
        now = rows()
        rows_held = now.present[:, 0].sum(-1).cpu()
        everything = observation.tokens <= quota
        preference = torch.zeros(len(rows_held), dtype=torch.float64)
        if not everything:
            preference = self.preference(observation, now).cpu()
        preferences, held = preference[:, None], rows_held[:, None]
        if number:
            before: Shown = shared["cake"]
            preferences, held = torch.cat([before.preferences, preferences], 1), torch.cat([before.held, held], 1)
        shares = held[:, :0]
        if self.cascade or number == layers - 1:
            samples = zip(preferences.tolist(), held.tolist(), strict=True)
            shares = torch.tensor([self.share(quota, layers, *sample) for sample in samples])
        shared["cake"] = Shown(quota, preferences, held, shares)
        shared["allocation"] = "all" if everything else "uniform" if quota <= self.window else "preferences"
        return tuple((shares if shares.numel() else held)[:, -1].tolist())

    def earlier(self, quota: int, observation: Observation, shared: dict[str, Any]) -> dict[int, tuple[int, ...]]:
        others = shared["cake"].shares[:, : observation.cut_layers.index(observation.layer)]
        return {layer: tuple(rows) for layer, rows in zip(observation.cut_layers, others.T.tolist(), strict=False)}

    def preference(self, observation: Observation, rows: Rows) -> Tensor:
        """Return log P of the layer, (B,). The logarithm cannot overflow if 1/τ is large."""
        queries = observation.queries[:, :, -self.window :]
        given = queries, rows.keys, rows.mass, observation.scaling
        both = window_statistics(*given, ("entropy", "variance"), extras=observation.extras)  # (B, H, G, n) each
        inside = rows.places >= observation.tokens - self.window
        entropy, variance = (
            x.sum(2, dtype=torch.float64).masked_fill(inside, 0).flatten(1).sum(-1).clamp(min=0) for x in both
        )
        return entropy.log() / self.tau1 + variance.log() / self.tau2

    def share(self, quota: int, layers: int, preferences: Sequence[float], held: Sequence[int]) -> tuple[int, ...]:
        """Return the rows per head of each layer so far.

        Args:
            quota: The mean over all layers.
            layers: Number of layers that are cut.
            preferences: log P of the layers so far.
            held: Rows per head that they held before the cut.
        """
        base = min(self.window, quota)
        free, most = layers * (quota - base), max(preferences)
        weights = [1.0 if most == -math.inf else math.exp(preference - most) for preference in preferences]
        parts = [weight / sum(weights) for weight in weights]
        least = [min(base, rows) for rows in held]
        return tuple(apportion([base + part * free for part in parts], least, list(held), len(held) * base + free))

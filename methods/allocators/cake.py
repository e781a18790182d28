"""cake: layers share the rows by how spread and how changing their attention is (CAKE's preferences).

Source: the CAKE paper; antgroup/cakekv, cake/cake_cache.py and cake/utils.py. A = attention of the last w queries over
the rows before the window, not normalised again; H = -Σ A·log(A + 1e-10) over heads, queries and rows, V = Σ over heads
and rows of A's variance over the queries; P = H^(1/τ1)·V^(1/τ2). Of n layers with `quota` rows on average, layer l has
w + P_l/ΣP·n·(quota - w), at most what it holds; what that takes from one goes to the others evenly.
cascade: after every layer the whole total is shared among the layers read so far, and earlier ones are cut again.
A layer never gets back what it lost; shares only shrink as layers come, so but for rounding the same is held in the
end as without it, where all layers are cut when the last one has been read and the total is exact: what the cascade
saves is memory on the way. While decoding the shares of the prefill stay; a layer that holds less than its
share grows up to it. Per sample: the published sums over a batch would mix samples.
Not defined there and chosen here: equal shares where no layer has any preference (one query has no variance) and
where the quota is the window's or less.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.apportion import apportion, scale_quotas
from kvbench.interfaces.observation import Observation
from kvbench.interfaces.rows import Rows
from kvbench.kernels.window_attention import window_statistics
from kvbench.validation import SettingError, is_number, require_choice, require_int


@dataclass(frozen=True)
class Shown:
    """What the layers of this block showed so far, and what that gives them."""

    quota: int
    preferences: tuple[tuple[float, ...], ...] = ()  # a number per sample, for every layer
    held: tuple[tuple[int, ...], ...] = ()  # rows per head before the cut, likewise
    shares: tuple[tuple[int, ...], ...] = ()  # rows per head of the layers so far, for every sample


@dataclass(frozen=True)
class Cake(Allocator):
    """`tau1` τ1, `tau2` τ2 (> 0), `window` w, `cascade`."""

    tau1: float
    tau2: float
    window: int
    cascade: bool

    cascades = True

    def __post_init__(self) -> None:
        require_int("allocator.window", self.window, 1)
        require_choice("allocator.cascade", self.cascade, (True, False))
        for name, value in (("tau1", self.tau1), ("tau2", self.tau2)):
            if not is_number(value) or not value > 0:
                raise SettingError(f"allocator.{name}={value}: a number above 0")

    def layer(
        self, quota: int, observation: Observation, rows: Callable[[], Rows], shared: dict[str, Any]
    ) -> tuple[int, ...]:
        number, layers = observation.cut_layers.index(observation.layer), len(observation.cut_layers)
        if observation.decoding:
            before: Shown | None = shared.get("cake")
            if before is None:  # the prompt was not cut
                return (quota,) * observation.queries.shape[0]
            return tuple(scale_quotas(shares, before.quota, quota)[number] for shares in before.shares)
        now, before = rows(), shared["cake"] if number else Shown(quota)
        held = tuple(now.present[:, 0].sum(-1).tolist())
        everything = observation.tokens <= quota
        preferences = (0.0,) * len(held) if everything else tuple(self.preference(observation, now).tolist())
        preferences, held = (*before.preferences, preferences), (*before.held, held)
        samples = zip(zip(*preferences, strict=True), zip(*held, strict=True), strict=True)
        ready = self.cascade or number == layers - 1
        shares = tuple(self.share(quota, layers, *sample) for sample in samples) if ready else ()
        shared["cake"] = Shown(quota, preferences, held, shares)
        shared["allocation"] = "all" if everything else "uniform" if quota <= self.window else "preferences"
        return tuple(own[-1] for own in shares) if ready else held[-1]

    def earlier(self, quota: int, observation: Observation, shared: dict[str, Any]) -> dict[int, tuple[int, ...]]:
        shares = shared["cake"].shares
        number = observation.cut_layers.index(observation.layer)
        return {observation.cut_layers[i]: tuple(own[i] for own in shares) for i in range(number)} if shares else {}

    def preference(self, observation: Observation, rows: Rows) -> Tensor:
        """(B,) log P of the layer: 1/τ may be large."""
        queries = observation.queries[:, :, -self.window :]
        both = window_statistics(
            queries, rows.keys, rows.mass, observation.scaling, ("entropy", "variance")
        )  # (B, H, G, n) each
        inside = rows.places >= observation.tokens - self.window
        entropy, variance = (
            x.sum(2, dtype=torch.float64).masked_fill(inside, 0).flatten(1).sum(-1).clamp(min=0) for x in both
        )
        return entropy.log() / self.tau1 + variance.log() / self.tau2

    def share(self, quota: int, layers: int, preferences: tuple[float, ...], held: tuple[int, ...]) -> tuple[int, ...]:
        """Rows per head of the layers so far, out of the total for all `layers`; preferences: their log P."""
        base = min(self.window, quota)
        free, most = layers * (quota - base), max(preferences)
        weights = [1.0 if most == -math.inf else math.exp(own - most) for own in preferences]
        parts = [weight / sum(weights) for weight in weights]
        least = [min(base, rows) for rows in held]
        return tuple(apportion([base + part * free for part in parts], least, list(held), len(held) * base + free))

"""pyramid: first layers keep more rows than last ones (PyramidKV).

Source: Zefan-Cai/KVCache-Factory, pyramidkv/pyramidkv_utils.py (official); NVIDIA/kvpress, pyramidkv_press.py.
Symbols: c quota, w window, b = c - w, L tokens read, l = 0…n-1 layers that are cut.
official: everything if L < c; c everywhere if L < 2b; else top = 2b - b//β, but at most L - w, bottom = 2b - top, and
layer l has top - l·((top - bottom)//(n - 1)) + w. The floored step gives all layers but the first too much, up to
(n - 2)/2 rows a layer; here the excess is taken from all layers alike, the first ones where it does not divide, so
that the total is the budget's.
kvpress: top = 2c - c/β, but at most L - w, bottom = 2c - top, not floored and window included; c everywhere unless
L ≥ top ≥ bottom ≥ w. There c is the budget's exact share of L, not the whole rows of the quota: half of 1001 tokens are
500.5 rows, and 500 would miss bottom ≥ w. The source rounds every layer's rows to the nearest; here their total is the
quota's, so that where c is no whole number up to half of the layers have one row less.
The record says which rule applied: all, uniform or pyramid.
Not defined there and chosen here: where n = 1 or, of the official rule, c ≤ w, c everywhere; under blocks the rule is
asked with the L of now, a layer has at most what it held and the block, and what it lacks goes to the others; while
decoding the shares of the prefill stay.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.apportion import apportion, scale_quotas
from kvbench.interfaces.observation import Observation
from kvbench.interfaces.rows import Rows
from kvbench.validation import require_choice, require_int


@dataclass(frozen=True)
class Shares:
    """What the layers got at the last cut."""

    tokens: int  # read by then
    quota: int
    rows: tuple[int, ...]  # per head


@dataclass(frozen=True)
class Pyramid(Allocator):
    """`beta` β >= 1, `window` w, `arithmetic` official|kvpress."""

    beta: int
    window: int
    arithmetic: str

    def __post_init__(self) -> None:
        require_int("allocator.beta", self.beta, 1)
        require_int("allocator.window", self.window, 0)
        require_choice("allocator.arithmetic", self.arithmetic, ("official", "kvpress"))

    def layer(self, quota: int, observation: Observation, rows: Callable[[], Rows], shared: dict[str, Any]) -> int:
        number, layers = observation.cut_layers.index(observation.layer), len(observation.cut_layers)
        before: Shares | None = shared.get("pyramid")
        if observation.decoding:
            return quota if before is None else scale_quotas(before.rows, before.quota, quota)[number]
        if number == 0:
            held = [0] * layers if before is None else before.rows
            most = [own + observation.tokens - (before.tokens if before else 0) for own in held]
            shared["allocation"], targets = self.targets(quota, observation.share, observation.tokens, layers)
            least = [min(self.window, quota, rows) for rows in most]
            shares = apportion(targets, [max(1, rows) for rows in least], most, quota * layers)
            shared["pyramid"] = Shares(observation.tokens, quota, tuple(shares))
        return shared["pyramid"].rows[number]

    def targets(
        self, quota: int, share: Fraction | None, tokens: int, layers: int
    ) -> tuple[str, Sequence[float | Fraction]]:
        """The rule that applies and what it gives every layer, before the total is made exact. `share`: the quota
        before it was floored, None where it was not.
        """
        uniform = [float(quota)] * layers
        if tokens <= quota:
            return "all", uniform
        if layers == 1:
            return "uniform", uniform
        if self.arithmetic == "official":
            base = quota - self.window
            if base <= 0 or tokens < 2 * base:
                return "uniform", uniform
            top = min(2 * base - base // self.beta, tokens - self.window)
            step = (top - (2 * base - top)) // (layers - 1)
            return "pyramid", [float(top - number * step + self.window) for number in range(layers)]
        share = Fraction(quota) if share is None else share
        top = min(2 * share - share / self.beta, tokens - self.window)
        bottom = 2 * share - top
        if not tokens >= top >= bottom >= self.window:
            return "uniform", uniform
        return "pyramid", [top - number * (top - bottom) / (layers - 1) for number in range(layers)]

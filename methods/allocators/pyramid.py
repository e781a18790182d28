"""pyramid: the first layers keep more rows than the last ones (PyramidKV).

Source: Zefan-Cai/KVCache-Factory, pyramidkv/pyramidkv_utils.py (official); NVIDIA/kvpress, pyramidkv_press.py. Symbols:
c quota, w window, b = c - w, L tokens read, l = 0…n-1 the layers that are cut.

official: all rows if L < c; c rows everywhere if L < 2b. Otherwise top = 2b - b//β, but at most L - w; bottom = 2b -
top; layer l has top - l·((top - bottom)//(n - 1)) + w rows. Rounding the step down gives all layers but the first too
many rows, up to (n - 2)/2 per layer. Here the excess is taken from all layers alike, and what does not divide is taken
from the first ones, so that the total is the budget's.

kvpress: top = 2c - c/β, but at most L - w; bottom = 2c - top; nothing is rounded and the window is included. c rows
everywhere unless L ≥ top ≥ bottom ≥ w. This c is the budget's exact share of L, not the whole rows of the quota: half
of 1001 tokens are 500.5 rows, and 500 would violate bottom ≥ w. The source rounds every layer's rows to the nearest
number. Here their total is the quota's, so if c is no whole number, up to half of the layers have one row less.

The record says which rule applied: all, uniform or pyramid.

Neither source defines the following cases. If n = 1, or c ≤ w with the official rule, every layer has c rows. If the
prompt is read in blocks, the rule uses the current L; a layer has at most the rows that it held and the block's, and
what it lacks goes to the others. While decoding, the shares of the prefill stay.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.apportion import apportion, scale_quotas
from kvbench.interfaces.observation import Observation
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting


@dataclass(frozen=True)
class Shares:
    """How many rows the layers got at the last cut."""

    tokens: int
    """Number of tokens that had been read."""
    quota: int
    """The mean over the layers."""
    rows: tuple[int, ...]
    """Rows per head of each layer."""


@dataclass(frozen=True)
class Pyramid(Allocator):
    """Give each layer fewer rows than the layer before it."""

    beta: int = setting(minimum=1)
    """Steepness of the pyramid, β. Larger values make it steeper."""
    window: int = setting(minimum=0)
    """Rows that every layer keeps, w: the method's window."""
    arithmetic: str = setting(choices=("official", "kvpress"))
    """Whose formula is used."""

    keeps_shares = True

    def layer(self, quota: int, observation: Observation, rows: Callable[[], Rows], shared: dict[str, Any]) -> int:
        number, layers = observation.cut_layers.index(observation.layer), len(observation.cut_layers)
        before: Shares | None = shared.get("pyramid")
        if observation.decoding:
            return quota if before is None else scale_quotas(before.rows, before.quota, quota)[number]
        if number == 0:
            held = [0] * layers if before is None else before.rows
            most = [count + observation.tokens - (before.tokens if before else 0) for count in held]
            shared["allocation"], targets = self.targets(quota, observation.share, observation.tokens, layers)
            least = [min(self.window, quota, rows) for rows in most]
            shares = apportion(targets, [max(1, rows) for rows in least], most, quota * layers)
            shared["pyramid"] = Shares(observation.tokens, quota, tuple(shares))
        return shared["pyramid"].rows[number]

    def targets(
        self, quota: int, share: Fraction | None, tokens: int, layers: int
    ) -> tuple[str, Sequence[float | Fraction]]:
        """Return the rule that applies and the rows that it gives every layer, before the total is made exact.

        Args:
            quota: The mean over the layers, in whole rows.
            share: The same mean before it was rounded down; None if there is no budget.
            tokens: Number of tokens read so far.
            layers: Number of layers that are cut.
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
        highest = min(2 * share - share / self.beta, Fraction(tokens - self.window))
        lowest = 2 * share - highest
        if not tokens >= highest >= lowest >= self.window:
            return "uniform", uniform
        return "pyramid", [highest - number * (highest - lowest) / (layers - 1) for number in range(layers)]

"""expected_exponential: the closed form of an expected attention weight (Expected Attention, Appendix G).

For a query q ~ N(μ, Σ) and a key k, X = q·k/√d is a normal variable with mean m = μ·k/√d and variance s² = kᵀΣk/d, and

    ẑ = E exp(X) = exp(m + s²/2),

which the method computes with kvbench.kernels.expected_attention. For each head dimension d, over random μ, Σ and k:

    quadrature      the largest relative difference of ẑ from E exp(X) by Gauss-Hermite quadrature in one dimension
    monte_carlo     quantiles x of the relative difference of ẑ from the mean of exp(X) over y draws of q
    equal           share of cases in which quadrature gives ẑ up to 1e-10
    covered         share of means over draws that lie within four standard errors of ẑ
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kvbench.interfaces.layout import Layout
from kvbench.kernels.expected_attention import expected_logits
from kvbench.store.study_lines import Line
from kvbench.studies.study import ClosedForm, ModelConfig

DIMENSIONS = (16, 64, 128)
DRAWS = (1000, 10_000, 100_000)
CASES = 4
NODES = 64  # of the quadrature
SHARES = (0.5, 1.0)


@dataclass(frozen=True)
class ExpectedExponential(ClosedForm):
    """How far the closed form is from quadrature and from draws."""

    name: ClassVar[str] = "expected_exponential"

    def compute(self, layout: Layout, config: ModelConfig) -> Iterable[Line]:
        draw = torch.Generator().manual_seed(self.seed)
        equal, covered = [], []
        for dimension in DIMENSIONS:
            series, scaling = f"d = {dimension}", dimension**-0.5
            mean, factor, key = draw_cases(dimension, draw)
            covariance = factor @ factor.mT
            closed = expected_logits(mean[None], covariance[None], key[None, :, None], scaling)[0, :, 0].exp()
            exact = integrate(
                (mean * key).sum(-1) * scaling, (factor.mT @ key[..., None])[..., 0].norm(dim=-1) * scaling
            )
            difference = (closed / exact - 1).abs()
            yield self.line("quadrature", difference.amax(), series=series, n=CASES)
            equal.append(difference <= 1e-10)
            for draws in DRAWS:
                values = torch.stack(
                    [
                        (
                            (centre + torch.randn(draws, dimension, generator=draw, dtype=torch.float64) @ turn.mT)
                            @ k
                            * scaling
                        )
                        for centre, turn, k in zip(mean, factor, key, strict=True)
                    ]
                ).exp()
                covered.append((values.mean(-1) - closed).abs() <= 4 * values.std(-1) / draws**0.5)
                off = (values.mean(-1) / closed - 1).abs()
                for share in SHARES:
                    yield self.line("monte_carlo", off.quantile(share), series=series, x=share, y=draws, n=CASES)
        yield self.claim("equal", equal)
        yield self.claim("covered", covered)


def draw_cases(dimension: int, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return means (cases, d), factors A of the covariances Σ = AAᵀ (cases, d, d), and keys (cases, d), float64.

    X then has a mean and a standard deviation of about 1.
    """
    mean, key = (torch.randn(CASES, dimension, generator=draw, dtype=torch.float64) for _ in range(2))
    factor = torch.randn(CASES, dimension, dimension, generator=draw, dtype=torch.float64) / dimension**0.5
    return mean, factor, key


def integrate(mean: Tensor, deviation: Tensor) -> Tensor:
    """Return E exp(X) of normal variables by quadrature, in the shape of their means and standard deviations."""
    nodes, weights = (torch.from_numpy(numbers) for numbers in np.polynomial.hermite.hermgauss(NODES))
    return (mean[..., None] + 2**0.5 * deviation[..., None] * nodes).exp() @ weights / torch.pi**0.5

"""What a Gaussian query expects to look at: moments of queries, and the expected logits of keys."""

from torch import Tensor

from kvbench.kernels.expected.reference import Moments, logits_reference, merge, moments_reference

__all__ = ["Moments", "expected_logits", "merge", "moments"]


def moments(queries: Tensor, scatter: bool = True) -> Moments:
    """Count, mean (B, H, d) and, if wanted, scatter (B, H, d, d) of `queries` (B, H, T, d), T >= 1, about their mean.

    In float32, in float64 for float64 queries. ValueError for another shape.
    """
    if queries.dim() != 4 or queries.shape[2] == 0:
        raise ValueError(f"moments: queries {tuple(queries.shape)}")
    return moments_reference(queries, scatter)


def expected_logits(mean: Tensor, covariance: Tensor | None, keys: Tensor, scaling: float) -> Tensor:
    """log E[exp(q·k·s)] of q ~ N(mean, covariance): (B, H·G, n) in the mean's dtype.

    mean (B, H·G, d); covariance (B, H·G, d, d) or None for none; keys (B, H, n, d). Touches every key once.
    ValueError if heads or dimensions do not fit.
    """
    heads, (keys_heads, _, dim) = mean.shape[1], keys.shape[1:]
    if heads % keys_heads or mean.shape[2] != dim:
        raise ValueError(f"expected_logits: mean {tuple(mean.shape)}, keys {tuple(keys.shape)}")
    if covariance is not None and covariance.shape != (*mean.shape, dim):
        raise ValueError(f"expected_logits: mean {tuple(mean.shape)}, covariance {tuple(covariance.shape)}")
    return logits_reference(mean, covariance, keys, scaling)

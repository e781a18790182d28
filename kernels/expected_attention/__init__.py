"""What a Gaussian query expects to look at: moments of queries, and the expected logits and scores of keys."""

from torch import Tensor

from kvbench.kernels.dispatch import choose_implementation
from kvbench.kernels.expected_attention.gaussian import Moments, merge
from kvbench.kernels.expected_attention.reference import logits_reference, moments_reference, scores_reference

__all__ = ["Moments", "expected_logits", "expected_scores", "merge", "moments"]


def moments(
    queries: Tensor,
    scatter: bool = True,
    turn: tuple[Tensor, Tensor] | None = None,
    *,
    implementation: str | None = None,
) -> Moments:
    """Count, mean (B, H, d) and, if wanted, scatter (B, H, d, d) of `queries` (B, H, T, d), T >= 1, about their mean.

    turn: cos and sin (T, r/2) that channels i and i + r/2 of the queries were rotated with; then the moments are of
    queries as they were before. In float32, in float64 for float64 queries. implementation: "reference" | "triton";
    None chooses. ValueError for shapes that do not fit.
    """
    if queries.dim() != 4 or queries.shape[2] == 0:
        raise ValueError(f"moments: queries {tuple(queries.shape)}")
    if turn is not None:
        cos, sin = turn
        if cos.shape != sin.shape or cos.shape[:-1] != queries.shape[2:3] or 2 * cos.shape[1] > queries.shape[3]:
            raise ValueError(f"moments: queries {tuple(queries.shape)}, turned by {tuple(cos.shape)}")
    if choose_implementation("moments", implementation, queries) == "triton":
        from kvbench.kernels.expected_attention.triton import moments_triton

        return moments_triton(queries, scatter, turn)
    return moments_reference(queries, scatter, turn)


def expected_logits(
    mean: Tensor, covariance: Tensor | None, keys: Tensor, scaling: float, *, implementation: str | None = None
) -> Tensor:
    """log E[exp(q·k·s)] of q ~ N(mean, covariance): (B, H·G, n) in the mean's dtype.

    mean (B, H·G, d); covariance (B, H·G, d, d), symmetric, or None for none; keys (B, H, n, d). implementation:
    "reference" | "triton"; None chooses. ValueError if heads or dimensions do not fit.
    """
    check_shapes("expected_logits", mean, covariance, keys)
    if choose_implementation("expected_logits", implementation, keys) == "triton":
        from kvbench.kernels.expected_attention.triton import logits_triton

        return logits_triton(mean, covariance, keys, None, scaling)[0]
    return logits_reference(mean, covariance, keys, scaling)


def expected_scores(
    mean: Tensor,
    covariance: Tensor | None,
    keys: Tensor,
    mass: Tensor,
    scaling: float,
    values: Tensor | None = None,
    epsilon: float = 0.0,
    *,
    implementation: str | None = None,
) -> Tensor:
    """(B, H, n) mean over a KV head's query heads of softmax_j(expected logit + log mass), then, with `values`
    (B, H, n, d), plus epsilon and times ‖v_j‖. Rows of mass (B, H, n) 0 score 0 and take no part.

    The rest as for `expected_logits`.
    """
    check_shapes("expected_scores", mean, covariance, keys)
    if mass.shape != keys.shape[:3] or (values is not None and values.shape[:3] != mass.shape):
        raise ValueError(f"expected_scores: keys {tuple(keys.shape)}, mass {tuple(mass.shape)} and values")
    if choose_implementation("expected_scores", implementation, keys) == "triton":
        from kvbench.kernels.expected_attention.triton import scores_triton

        return scores_triton(mean, covariance, keys, mass, scaling, values, epsilon)
    return scores_reference(mean, covariance, keys, mass, scaling, values, epsilon)


def check_shapes(op: str, mean: Tensor, covariance: Tensor | None, keys: Tensor) -> None:
    """ValueError if heads or dimensions do not fit."""
    heads, (keys_heads, _, dim) = mean.shape[1], keys.shape[1:]
    if heads % keys_heads or mean.shape[2] != dim:
        raise ValueError(f"{op}: mean {tuple(mean.shape)}, keys {tuple(keys.shape)}")
    if covariance is not None and covariance.shape != (*mean.shape, dim):
        raise ValueError(f"{op}: mean {tuple(mean.shape)}, covariance {tuple(covariance.shape)}")

"""Moments of queries, and the logits and scores that keys can expect from a Gaussian query with these moments."""

from torch import Tensor

from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.expected_attention.gaussian import Moments, merge
from kvbench.kernels.expected_attention.reference import logits_reference, moments_reference, scores_reference

__all__ = ["Moments", "expected_logits", "expected_scores", "merge", "moments"]


@announced
def moments(
    queries: Tensor,
    scatter: bool = True,
    turn: tuple[Tensor, Tensor] | None = None,
    *,
    implementation: str | None = None,
) -> Moments:
    """Return the count, mean and scatter of queries.

    Args:
        queries: (B, H, T, d), with at least one query.
        scatter: Whether the scatter is computed.
        turn: The cos and sin (T, r/2) that channels i and i + r/2 of the queries were rotated with. The moments are
            then those of the queries before the rotation.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        Moments in float32, or in float64 for float64 queries.

    Raises:
        ValueError: Shapes do not fit.
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


@announced
def expected_logits(
    mean: Tensor, covariance: Tensor | None, keys: Tensor, scaling: float, *, implementation: str | None = None
) -> Tensor:
    """Return log E[exp(q·k·scaling)] of q ~ N(mean, covariance) for every key.

    Args:
        mean: (B, H·G, d)
        covariance: (B, H·G, d, d), symmetric; None for 0.
        keys: (B, H, n, d)
        scaling: The factor of the logits.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        (B, H·G, n) in the mean's dtype.

    Raises:
        ValueError: Heads or dimensions do not fit.
    """
    check_shapes("expected_logits", mean, covariance, keys)
    if choose_implementation("expected_logits", implementation, keys) == "triton":
        from kvbench.kernels.expected_attention.triton import logits_triton

        return logits_triton(mean, covariance, keys, None, scaling)[0]
    return logits_reference(mean, covariance, keys, scaling)


@announced
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
    """Return the mean over a KV head's query heads of softmax_j(expected logit + log mass).

    Args:
        mean: (B, H·G, d)
        covariance: (B, H·G, d, d), symmetric; None for 0.
        keys: (B, H, n, d)
        mass: Tokens that each row stands for, (B, H, n). Rows of mass 0 score 0 and do not enter the softmax.
        scaling: The factor of the logits.
        values: (B, H, n, d). If given, the result is (p_j + epsilon)·‖v_j‖ instead of p_j.
        epsilon: See `values`.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        (B, H, n)

    Raises:
        ValueError: Shapes do not fit.
    """
    check_shapes("expected_scores", mean, covariance, keys)
    if mass.shape != keys.shape[:3] or (values is not None and values.shape[:3] != mass.shape):
        raise ValueError(f"expected_scores: keys {tuple(keys.shape)}, mass {tuple(mass.shape)} and values")
    if choose_implementation("expected_scores", implementation, keys) == "triton":
        from kvbench.kernels.expected_attention.triton import scores_triton

        return scores_triton(mean, covariance, keys, mass, scaling, values, epsilon)
    return scores_reference(mean, covariance, keys, mass, scaling, values, epsilon)


def check_shapes(op: str, mean: Tensor, covariance: Tensor | None, keys: Tensor) -> None:
    """Raise a ValueError if heads or dimensions do not fit."""
    heads, (keys_heads, _, dim) = mean.shape[1], keys.shape[1:]
    if heads % keys_heads or mean.shape[2] != dim:
        raise ValueError(f"{op}: mean {tuple(mean.shape)}, keys {tuple(keys.shape)}")
    if covariance is not None and covariance.shape != (*mean.shape, dim):
        raise ValueError(f"{op}: mean {tuple(mean.shape)}, covariance {tuple(covariance.shape)}")

"""The attention of a block's last queries: their probabilities over all rows, and statistics of them per row."""

from torch import Tensor

from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.softmax_extras import SoftmaxExtras
from kvbench.kernels.window_attention.reference import window_probabilities_reference, window_statistics_reference

REDUCTIONS = ("mean", "variance", "entropy")
WIDEST = 64  # most queries that the kernels support
DEEPEST = 256  # largest head dimension that they support


def window_probabilities(
    queries: Tensor, keys: Tensor, mass: Tensor | None, scaling: float, *, extras: SoftmaxExtras | None = None
) -> Tensor:
    """Return the attention probabilities of the last w queries. It computes w·n logits per query head.

    Args:
        queries: (B, H·G, w, d). The last query belongs to the last row.
        keys: (B, H, n, d)
        mass: Tokens that each row stands for, (B, H, n), at least 0; None for one each.
        scaling: The factor of the logits.
        extras: Sinks and cap of the softmax; None for the plain one. With sinks probabilities sum up to less than 1.

    Returns:
        (B, H, G, w, n) in float32, or in float64 for float64 inputs.

    Raises:
        ValueError: w is larger than n, or shapes do not fit.
    """
    check_shapes("window_probabilities", queries, keys, mass)
    return window_probabilities_reference(queries, keys, mass, scaling, extras)


@announced
def window_statistics(
    queries: Tensor,
    keys: Tensor,
    mass: Tensor | None,
    scaling: float,
    of: tuple[str, ...] = ("mean",),
    *,
    extras: SoftmaxExtras | None = None,
    implementation: str | None = None,
) -> tuple[Tensor, ...]:
    """Return statistics of the probabilities p of `window_probabilities` over the w queries t.

    Args:
        queries: (B, H·G, w, d). The last query belongs to the last row.
        keys: (B, H, n, d)
        mass: Tokens that each row stands for, (B, H, n), at least 0; None for one each.
        scaling: The factor of the logits.
        of: Which statistics: "mean", "variance" (unbiased; 0 for one query) or "entropy", -Σ_t p·log(p + 1e-10).
        extras: Sinks and cap of the softmax; None for the plain one.
        implementation: "reference", which holds p, or "triton", which does not and supports up to 64 queries; None
            chooses.

    Returns:
        The statistics in the order of `of`, (B, H, G, n) each in p's dtype. Rows of mass 0 have 0.

    Raises:
        ValueError: Shapes do not fit, or the implementation does not support the arguments.
    """
    check_shapes("window_statistics", queries, keys, mass)
    if not of or not set(of) <= set(REDUCTIONS):
        raise ValueError(f"window_statistics: of {of}; some of {', '.join(REDUCTIONS)}")
    if choose_window_implementation("window_statistics", implementation, queries, keys) == "reference":
        return window_statistics_reference(queries, keys, mass, scaling, of, extras)
    from kvbench.kernels.window_attention.triton import window_statistics_triton

    return window_statistics_triton(queries, keys, mass, scaling, of, extras)


def check_shapes(op: str, queries: Tensor, keys: Tensor, mass: Tensor | None) -> None:
    """Raise a ValueError unless the shapes fit: w queries of H·G heads, and n >= w rows of H KV heads."""
    batch, query_heads, tokens, dim = queries.shape
    fits = keys.shape[0] == batch and keys.shape[3] == dim and not query_heads % keys.shape[1]
    if not fits or not 0 < tokens <= keys.shape[2] or (mass is not None and mass.shape != keys.shape[:3]):
        shapes = f"queries {tuple(queries.shape)}, keys {tuple(keys.shape)}"
        raise ValueError(f"{op}: {shapes}, mass {None if mass is None else tuple(mass.shape)}")


def choose_window_implementation(op: str, asked: str | None, queries: Tensor, *others: Tensor) -> str:
    """Choose an implementation; the kernels support few queries, one dtype, and rows with contiguous elements.

    Raises:
        ValueError: The kernels were asked for, and they do not support these tensors.
    """
    chosen, tensors = choose_implementation(op, asked, queries), (queries, *others)
    few = queries.shape[2] <= WIDEST and queries.shape[3] <= DEEPEST
    plain = len({x.dtype for x in tensors}) == 1 and all(x.stride(-1) == 1 for x in tensors)
    if chosen == "reference" or (few and plain):
        return chosen
    if asked is None:
        return "reference"
    raise ValueError(
        f"{op}: implementation triton supports at most {WIDEST} queries of dimension {DEEPEST}, one dtype and "
        f"contiguous elements, not {', '.join(f'{tuple(x.shape)} {x.dtype} strides {x.stride()}' for x in tensors)}"
    )

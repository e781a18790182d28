"""What the block's last queries saw: their attention probabilities over all rows, and what is left of them per row."""

from torch import Tensor

from kvbench.kernels.dispatch import choose_implementation
from kvbench.kernels.window_attention.reference import window_probabilities_reference, window_statistics_reference

REDUCTIONS = ("mean", "variance", "entropy")
WIDEST = 64  # queries that the kernels take
DEEPEST = 256  # head dimension


def window_probabilities(queries: Tensor, keys: Tensor, mass: Tensor | None, scaling: float) -> Tensor:
    """Probabilities (B, H, G, w, n) in float32 (float64 for float64 inputs) of the last w queries.

    queries (B, H·G, w, d), the last of which belongs to the last row; keys (B, H, n, d); mass (B, H, n) >= 0, None for
    all ones. Touches w·n logits per query head. ValueError if w > n or shapes do not fit.
    """
    check_shapes("window_probabilities", queries, keys, mass)
    return window_probabilities_reference(queries, keys, mass, scaling)


def window_statistics(
    queries: Tensor,
    keys: Tensor,
    mass: Tensor | None,
    scaling: float,
    of: tuple[str, ...] = ("mean",),
    *,
    implementation: str | None = None,
) -> tuple[Tensor, ...]:
    """What is asked for of `window_probabilities`'s probabilities p, each (B, H, G, n) in p's dtype, over the w queries
    t: `of` any of mean, variance (unbiased; 0 for one query) and entropy, -Σ_t p·log(p + 1e-10). Rows of mass 0 have 0.

    Arguments as `window_probabilities`; `implementation`: "reference", which holds p, or "triton", which does not and
    takes up to 64 queries; None chooses. ValueError for what does not fit.
    """
    check_shapes("window_statistics", queries, keys, mass)
    if not of or not set(of) <= set(REDUCTIONS):
        raise ValueError(f"window_statistics: of {of}; some of {', '.join(REDUCTIONS)}")
    if choose_window_implementation("window_statistics", implementation, queries, keys) == "reference":
        return window_statistics_reference(queries, keys, mass, scaling, of)
    from kvbench.kernels.window_attention.triton import window_statistics_triton

    return window_statistics_triton(queries, keys, mass, scaling, of)


def check_shapes(op: str, queries: Tensor, keys: Tensor, mass: Tensor | None) -> None:
    """ValueError unless the shapes fit: the last w queries of H·G heads on n >= w rows of H KV heads."""
    batch, query_heads, tokens, dim = queries.shape
    fits = keys.shape[0] == batch and keys.shape[3] == dim and not query_heads % keys.shape[1]
    if not fits or not 0 < tokens <= keys.shape[2] or (mass is not None and mass.shape != keys.shape[:3]):
        shapes = f"queries {tuple(queries.shape)}, keys {tuple(keys.shape)}"
        raise ValueError(f"{op}: {shapes}, mass {None if mass is None else tuple(mass.shape)}")


def choose_window_implementation(op: str, asked: str | None, queries: Tensor, *others: Tensor) -> str:
    """`choose`, knowing what the window's kernels take: few queries, one dtype, rows whose elements lie together."""
    chosen, tensors = choose_implementation(op, asked, queries), (queries, *others)
    few = queries.shape[2] <= WIDEST and queries.shape[3] <= DEEPEST
    plain = len({x.dtype for x in tensors}) == 1 and all(x.stride(-1) == 1 for x in tensors)
    if chosen == "reference" or (few and plain):
        return chosen
    if asked is None:
        return "reference"
    raise ValueError(
        f"{op}: implementation triton takes {WIDEST} queries of dimension {DEEPEST} at most, one dtype and elements "
        f"side by side, not {', '.join(f'{tuple(x.shape)} {x.dtype} strides {x.stride()}' for x in tensors)}"
    )

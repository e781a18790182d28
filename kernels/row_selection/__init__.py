"""Choose the rows that stay, find their indices, and gather their keys and values."""

import torch
from torch import Tensor

from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.row_selection.reference import gather_rows_reference, kept_indices_reference, top_k_mask_reference


@announced
def top_k_mask(scores: Tensor, quotas: Tensor | int, *, implementation: str | None = None) -> Tensor:
    """Choose each head's largest scores. Of equal scores the lower row comes first.

    Args:
        scores: (B, H, n). NaN counts as the largest number. (On a GPU the reference puts it where torch sorts it. The
            engine refuses such scores.)
        quotas: Number of rows to choose in each head, (B, H) whole numbers on the scores' device, or one number for
            all heads. A head with fewer rows keeps all of them.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        (B, H, n) bool

    Raises:
        ValueError: The quotas have another shape.
    """
    wrong = not isinstance(quotas, int) and (quotas.shape != scores.shape[:2] or quotas.is_floating_point())
    if scores.dim() != 3 or wrong:
        given = quotas if isinstance(quotas, int) else f"{tuple(quotas.shape)} {quotas.dtype}"
        raise ValueError(f"top_k_mask: scores {tuple(scores.shape)}, quotas {given}")
    if choose_implementation("top_k_mask", implementation, scores) == "reference":
        return top_k_mask_reference(scores, quotas)
    from kvbench.kernels.row_selection.triton import top_k_mask_triton

    return top_k_mask_triton(scores, quotas)


@announced
def top_k_indices(
    scores: Tensor,
    k: int,
    *,
    counts: Tensor | None = None,
    flat: bool = False,
    into: Tensor | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Return the indices of each head's k largest scores. Of equal scores the lower row comes first.

    Args:
        scores: (B, H, n)
        k: Number of rows, from 1 to n.
        counts: How many of the k rows each head takes, (B, H) whole numbers; None for all. In place of the
            others the list has -1, or what `into` had, in any places. More than k counts as k.
        flat: Whether the indices count rows in the order (sample, head, row), as those of `kept_indices` do. Not with
            `counts`.
        into: A tensor to write to, (B, H, k) int64, in which the lists of all heads lie at equal distances. It is
            returned. Not with `flat`.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        (B, H, k) int64, ascending but for -1, or (B·H·k,) if `flat`.

    Raises:
        ValueError: k is not in this range, or the counts do not fit.
    """
    check_top_k("top_k_indices", scores, k, counts, into, flat)
    if choose_implementation("top_k_indices", implementation, scores) == "triton" and scores.numel():
        from kvbench.kernels.row_selection.triton import top_k_indices_triton

        return top_k_indices_triton(scores, k, flat, counts, into)
    if into is not None:
        index = top_k_indices(scores, k, counts=counts, implementation=implementation)
        return into.copy_(torch.where(index < 0, into, index))
    if counts is not None:
        index = top_k_indices(scores, k, implementation=implementation)
        taken = top_k_mask(scores.gather(2, index), counts, implementation=implementation)
        return index.masked_fill(~taken, -1)
    kept = top_k_mask(scores, k, implementation=implementation)
    index = kept_indices(kept, k * scores[..., 0].numel(), implementation=implementation)
    return index if flat else (index % scores.shape[2]).view(*scores.shape[:2], k)


@announced
def top_k_of_heads(
    products: Tensor,
    k: int,
    *,
    window: Tensor | None = None,
    counts: Tensor | None = None,
    into: Tensor | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Return the indices of the k rows with the largest products, where a row's score is the largest of all heads'.

    Args:
        products: (B, H, n)
        k: Number of rows, from 1 to n.
        window: The first row that counts, and the row behind the last one, (2,) whole numbers; None for all. The
            others come last.
        counts: How many of the k rows each sample takes, (B, 1). See `top_k_indices`.
        into: A tensor to write to, (B, 1, k). See `top_k_indices`.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        (B, 1, k) int64, ascending but for -1.

    Raises:
        ValueError: k is not in this range, or shapes do not fit.
    """
    if window is not None and (window.shape != (2,) or window.is_floating_point()):
        raise ValueError(f"top_k_of_heads: window {tuple(window.shape)} {window.dtype}")
    one = products[:, :1]
    check_top_k("top_k_of_heads", one, k, counts, into, False)
    if choose_implementation("top_k_of_heads", implementation, products) == "triton" and products.numel():
        from kvbench.kernels.row_selection.triton import top_k_of_heads_triton

        if into is None:
            into = torch.empty(len(products), 1, k, dtype=torch.int64, device=products.device)
            into = into if counts is None else into.fill_(-1)
        return top_k_of_heads_triton(products, k, window, counts, into)
    scores = products.amax(1, keepdim=True)
    if window is not None:
        row = torch.arange(scores.shape[2], device=scores.device)
        scores = scores.masked_fill((row < window[0]) | (row >= window[1]), -torch.inf)
    return top_k_indices(scores, k, counts=counts, into=into, implementation=implementation)


def check_top_k(op: str, scores: Tensor, k: int, counts: Tensor | None, into: Tensor | None, flat: bool) -> None:
    """Raise a ValueError if arguments of `top_k_indices` do not fit each other."""
    if scores.dim() != 3 or not 1 <= k <= scores.shape[2]:
        raise ValueError(f"{op}: {k} of scores {tuple(scores.shape)}")
    if counts is not None and (flat or counts.shape != scores.shape[:2] or counts.is_floating_point()):
        raise ValueError(f"{op}: counts {tuple(counts.shape)} of scores {tuple(scores.shape)}, flat {flat}")
    if into is not None:
        fits = into.shape == (*scores.shape[:2], k) and into.dtype == torch.int64 and into.stride(2) == 1
        if not fits or flat or into.stride(0) != scores.shape[1] * into.stride(1):
            raise ValueError(f"{op}: into {tuple(into.shape)} {into.dtype} {into.stride()}, flat {flat}")


@announced
def kept_indices(kept: Tensor, total: int | None = None, *, implementation: str | None = None) -> Tensor:
    """Return the indices of the rows that stay, counted in the order (sample, head, row).

    Args:
        kept: Which rows stay, (B, H, n) bool.
        total: Number of rows that stay, if the caller knows it. None makes the host wait for the device.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        (R,) int64, ascending.

    Raises:
        ValueError: `kept` is not a bool tensor, or, on the CPU, the total is wrong.
    """
    if kept.dim() != 3 or kept.dtype != torch.bool:
        raise ValueError(f"kept_indices: kept {tuple(kept.shape)} {kept.dtype}")
    if choose_implementation("kept_indices", implementation, torch.empty(0, device=kept.device)) == "reference":
        return kept_indices_reference(kept, total)
    from kvbench.kernels.row_selection.triton import kept_indices_triton

    return kept_indices_triton(kept, total)


@announced
def gather_rows(
    index: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    into: tuple[Tensor, Tensor] | None = None,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Gather the keys and values of some rows.

    Args:
        index: Indices of the rows, as `kept_indices` counts them, (R,).
        keys: (B, H, n, d)
        values: (B, H, n, e). If e is not d, the reference gathers.
        into: Tensors to write to, (B, H, m, d) each with the same strides and R = B·H·m. They are returned. Only if
            d = e.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        Keys and values, (R, d) and (R, e), or `into`.

    Raises:
        ValueError: Keys and values differ in their first dimensions or dtype, or `into` does not fit.
    """
    one_width = keys.shape == values.shape
    other = keys.shape[:3] != values.shape[:3] or keys.dtype != values.dtype
    if index.dim() != 1 or keys.dim() != 4 or values.dim() != 4 or other or not (one_width or into is None):
        raise ValueError(f"gather_rows: {tuple(index.shape)} of keys {tuple(keys.shape)}, values {tuple(values.shape)}")
    if into is not None and not (
        into[0].shape == into[1].shape == (*keys.shape[:2], len(index) // keys[..., 0, 0].numel(), keys.shape[3])
        and into[0].stride() == into[1].stride()
        and into[0].stride(3) == 1
        and into[0].stride(2) == keys.shape[3]
        and into[0].stride(0) == keys.shape[1] * into[0].stride(1)
    ):
        raise ValueError(f"gather_rows: {len(index)} rows into {tuple(into[0].shape)}, {tuple(into[1].shape)}")
    if choose_implementation("gather_rows", implementation, keys) == "reference" or not one_width:
        return gather_rows_reference(index, keys, values, into)
    from kvbench.kernels.row_selection.triton import gather_rows_triton

    return gather_rows_triton(index, keys, values, into)

"""Rotated rows from one place to another."""

from torch import Tensor

from kvbench.kernels.rerotation.reference import rerotate_reference


def rerotate(x: Tensor, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> Tensor:
    """x (…, d), rotated with cos, sin (…, r) `before`, as if rotated with those `after`; channels from r on stay.

    Pairs are channels i and i + r/2, as in all of transformers' Llama-like models. ValueError for odd r or r > d.
    """
    rotated = before[0].shape[-1]
    if rotated % 2 or rotated > x.shape[-1]:
        raise ValueError(f"rerotate: {rotated} rotated channels of {x.shape[-1]}")
    return rerotate_reference(x, before, after)

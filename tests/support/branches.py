"""Reading further tokens in branches and behind them."""

from collections.abc import Callable

import torch

from kvbench.engine.compressed_cache import CompressedCache
from tests.support.tiny_models import ids


def check_after_branches(held: CompressedCache, check: Callable[[int], None]) -> None:
    """Check what a method remembers: after 118 tokens, after further ones, and after branches, which leave no trace.

    Args:
        held: The cache of a tiny model that has read 118 tokens.
        check: Gets the number of tokens read.
    """
    check(118)
    with held.branch():
        first = held.extend(ids(30, seed=1))
        check(148)
    check(118)
    with held.branch():
        assert torch.equal(held.extend(ids(30, seed=1)), first)
    held.extend(ids(1))
    check(119)

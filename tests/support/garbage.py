"""What the tests share that measure."""

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_garbage_of_others() -> None:
    """Each measurement collects garbage first: what tests before it left is not looked at again."""
    gc.collect()
    gc.freeze()

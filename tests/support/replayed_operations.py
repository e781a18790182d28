"""What stands for a CUDA graph on a CPU: the operations that some work makes, and that can be made again."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class ReplayedOperations(TorchDispatchMode):
    """Makes the operations of `work` at once and again at each `replay`, with the results in the same tensors.

    Like a CUDA graph, it does not run any Python of `work` again.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self.made: list[tuple[Any, tuple, dict, Any]] = []
        with self:
            work()

    def __torch_dispatch__(self, op, types, args=(), named=None):
        found = op(*args, **(named or {}))
        self.made.append((op, args, named or {}, found))
        return found

    def replay(self) -> None:
        for op, args, named, before in self.made:
            inputs = {own.untyped_storage().data_ptr() for own in tree_leaves((args, named)) if is_tensor(own)}
            for into, own in zip(tree_leaves(before), tree_leaves(op(*args, **named)), strict=True):
                if is_tensor(into) and into.untyped_storage().data_ptr() not in inputs:  # no view and no write in place
                    into.copy_(own)


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)

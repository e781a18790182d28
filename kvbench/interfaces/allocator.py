"""The interface of an allocator: it decides how many rows each layer and each head may keep.

Every allocator conserves the total exactly. An allocator is a frozen dataclass; its fields are its settings, which
Hydra reads from conf/allocator/<name>.yaml.

Symbols: B samples, H KV heads, n rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvbench.interfaces.hooks import Hooks
from kvbench.interfaces.observation import Observation
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import check_settings


@dataclass(frozen=True)
class Allocator(Hooks):
    """The base of every allocator. Used as it is, every layer and every head keeps the same number of rows.

    An allocator overrides `layer` to give layers different numbers of rows, or `heads` to give the heads of a layer
    different numbers.
    """

    name: str
    """The name of the allocator's file in conf/allocator/."""

    even = True
    """Whether all heads of a layer keep the same number of rows."""
    cascades = False
    """Whether the rows of a layer depend on what later layers show. Such a layer is cut again (`earlier`)."""
    keeps_shares = False
    """Whether, while decoding, `layer` returns what the quota and `shared` say, whatever a layer shows or holds. The
    rows of a whole answer can then be computed before it begins.
    """

    capturable = False
    """Whether `safe` runs the same operations on tensors at every cut and never waits for the device. If heads keep
    different numbers of rows, a CUDA graph can then contain the cuts of an answer, which keep the shares of the
    prompt's cut. `layer` must return the quota, or keep its shares. The quota that `safe` gets is a tensor, int64, if
    it changes during the answer.
    """

    def __post_init__(self) -> None:
        check_settings(self, "allocator")

    @property
    def is_uniform(self) -> bool:
        """Whether every layer and head keeps the quota, because no hook is overridden."""
        return not self.overrides("layer", "heads", "safe", "earlier")

    def layer(
        self, quota: int, observation: Observation, rows: Callable[[], Rows], shared: dict[str, Any]
    ) -> int | tuple[int, ...]:
        """Return how many rows per head the layer that is being cut may keep.

        Args:
            quota: The mean over all layers, which the results must respect. It is `observation.share`, rounded down.
            observation: What the layer computed for the block.
            rows: Returns the layer's rows. Call it only if the answer depends on them, because it takes time.
            shared: One dictionary for all layers of a batch, where the allocator remembers what layers showed. Replace
                its values; never change one in place. What differs by sample is a tensor with samples first, because a
                prompt may be copied to several. The record quotes `shared["allocation"]`, a word that says which rule
                applied.

        Returns:
            Rows per head: one number, or one per sample if they differ.
        """
        return quota

    def heads(self, scores: Tensor, protected: Tensor, quota: int) -> Tensor:
        """Return how many rows each head of a layer keeps.

        Args:
            scores: (B, H, n), with -inf for absent rows and +inf for protected ones.
            protected: Rows that the method protects, (B, H, n) bool.
            quota: The mean over the heads.

        Returns:
            (B, H) int64. They sum to H·quota, or to the number of rows present if that is less. Each head keeps at
            least one row and at most those that it has.
        """
        available = (scores > -torch.inf).sum(-1)
        return available.clamp(max=quota)

    def safe(self, scores: Tensor, protected: Tensor, quota: int) -> Tensor:
        """Return the rows that a head keeps whatever the other heads have, (B, H, n) bool.

        The arguments are those of `heads`. The result includes the protected rows.
        """
        return protected

    def earlier(self, quota: int, observation: Observation, shared: dict[str, Any]) -> dict[int, tuple[int, ...]]:
        """Return the layers before this one that must be cut to fewer rows.

        Called after every layer if the allocator `cascades`, but not while decoding. A layer is never refilled. A layer
        for which `layer` kept everything is cut here for the first time.

        Returns:
            Layer -> rows per head, one number per sample.
        """
        return {}

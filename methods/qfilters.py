"""qfilters: keep the rows whose keys point where the model's queries usually point, by one fixed vector per KV head.

Source: the Q-Filters paper (arXiv 2503.02812); NathanGodey/qfilters, make_filters.py and src/hf_cache.py (it keeps
recent rows and cuts at every step); NVIDIA/kvpress, qfilter_press.py (the score alone). Symbols: f the filter of a
layer and KV head. It is minus the first right singular vector of a query head's rotated queries, with the sign for
which most queries project on it positively, averaged over the group.

    s_j = -⟨f, k_j⟩

The filters come from a safetensors file with `q_filters` (layers, KV heads, d), either as published by the authors or
as `python -m kvbench calibrate qfilters` computes it for any model.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting
from kvbench.kernels.key_similarity import similarity
from kvbench.validation import SettingError


@dataclass(frozen=True)
class QFilters(Method):
    """Score rows by the projection of their keys on a fixed vector."""

    path: str | None = setting()
    """The file of the filters."""
    recent: int = setting(minimum=0)
    """Number of newest rows that always stay."""

    capturable = True
    order_free = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.filters  # refuse an unusable file at once

    @cached_property
    def filters(self) -> Tensor:
        """The filters, (layers, H, d).

        This is no dataclass field, because Hydra could not construct a method that has this one as its base.
        """
        return read(self.path)

    @property
    def weights_bytes(self) -> int:
        return self.filters.nbytes

    @cached_property
    def copies(self) -> dict[tuple[torch.device, torch.dtype], Tensor]:
        """The filters on the devices and in the dtypes that were asked for."""
        return {}

    def filters_like(self, tensor: Tensor) -> Tensor:
        """Return the filters, (layers, H, d), with a tensor's device and dtype. They are copied once."""
        key = tensor.device, tensor.dtype
        if key not in self.copies:
            self.copies[key] = self.filters.to(tensor)
        return self.copies[key]

    def check(self, layers: int, heads: int, dim: int, sliding: tuple[int, ...], hidden: int) -> None:
        if self.filters.shape != (layers, heads, dim):
            raise SettingError(
                f"method.path={self.path}: the filters have (layers, KV heads, dimensions) "
                f"{tuple(self.filters.shape)}, the model {(layers, heads, dim)}"
            )

    def protect(self, observation: Observation, rows: Rows, quota: int) -> Tensor:
        return rows.places >= observation.tokens - self.recent

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        own = self.filters_like(rows.mass)[observation.layer]  # (H, d)
        return -similarity(rows.keys, own.expand(len(rows.keys), -1, -1), "dot")


def read(path: str | None) -> Tensor:
    """Read the filters of a file, (layers, H, d).

    Raises:
        SettingError: The file has no filters, or it cannot be read.
    """
    if path is None:
        raise SettingError(
            "method.path=null: give a safetensors file of filters; make one with "
            "python -m kvbench calibrate qfilters --model MODEL --out FILE"
        )
    if not isinstance(path, str | Path):
        raise SettingError(f"method.path={path}: a path")
    try:
        with safe_open(str(Path(path).expanduser()), framework="pt") as file:
            filters = file.get_tensor("q_filters")
    except (OSError, SafetensorError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SettingError(f"method.path={path}: cannot read the filters ({reason})") from None
    if filters.dim() != 3 or not filters.is_floating_point() or not torch.isfinite(filters).all():
        raise SettingError(f"method.path={path}: q_filters must be a finite tensor (layers, KV heads, dimensions)")
    return filters

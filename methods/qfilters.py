"""qfilters: keep the rows whose keys point where the model's queries usually point, by one fixed vector per KV head.

Source: the Q-Filters paper (arXiv 2503.02812); NathanGodey/qfilters, make_filters.py and src/hf_cache.py (it keeps
recent rows and cuts at every step); NVIDIA/kvpress, qfilter_press.py (the score alone). Symbols: f the filter of a
layer and KV head. It is minus the first right singular vector of a query head's rotated queries, with the sign for
which most queries project on it positively, averaged over the group.

    s_j = -⟨f, k_j⟩

The filters come from a safetensors file with `q_filters` (layers, KV heads, d), either as published by the authors or
as `python -m kvbench calibrate qfilters` computes it for any model. Its metadata then name the model.
"""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from kvbench.interfaces.layout import Layout
from kvbench.interfaces.method import Captured, Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting
from kvbench.interfaces.tensor_files import TensorFile, read_tensors
from kvbench.kernels.key_similarity import similarity
from kvbench.validation import SettingError

NAME = "q_filters"


@dataclass(frozen=True)
class QFilters(Method):
    """Score rows by the projection of their keys on a fixed vector."""

    path: str | None = setting()
    """The file of the filters."""
    recent: int = setting(minimum=0)
    """Number of newest rows that always stay."""

    captured = Captured(order_free=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.file  # refuse an unusable file at once

    @cached_property
    def file(self) -> TensorFile:
        """The file of the filters, whose tensor is (layers, H, d).

        This is no dataclass field, because Hydra could not construct a method that has this one as its base.
        """
        return read_tensors(self.path, {NAME: ("layers", "KV heads", "dimensions")}, "filters", "qfilters")

    def check(self, layout: Layout) -> None:
        shape = tuple(self.file.tensors[NAME].shape)
        if shape != (needed := (layout.layers, layout.heads, layout.dim)):
            raise SettingError(
                f"method.path={self.path}: the filters have (layers, KV heads, dimensions) {shape}, the model {needed}"
            )

    def protect(self, observation: Observation, rows: Rows, quota: int | Tensor) -> Tensor:
        return rows.places >= observation.tokens - self.recent

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        filters = self.file.like(NAME, rows.mass)[observation.layer]  # (H, d)
        return -similarity(rows.keys, filters.expand(len(rows.keys), -1, -1), "dot")

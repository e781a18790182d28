"""qfilters: rows whose keys point where the model's queries usually point stay; one fixed vector per KV head.

Source: the Q-Filters paper (arXiv 2503.02812); NathanGodey/qfilters, make_filters.py and src/hf_cache.py (recent rows
kept, cuts at every step); NVIDIA/kvpress, qfilter_press.py (the score alone). Symbols: f the filter of a layer and KV
head: minus the first right singular vector of its query heads' rotated queries, its sign set so that most queries
project on it positively, mean over the group. s_j = -⟨f, k_j⟩.

The filters come from a safetensors file with `q_filters` (layers, KV heads, d), as published by the authors or as
`python -m kvbench calibrate qfilters` makes it for any model.
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
from kvbench.kernels.key_similarity import similarity
from kvbench.validation import SettingError, require_int


@dataclass(frozen=True)
class QFilters(Method):
    """`path` of the filters; `recent`: newest rows that stay."""

    path: str | None
    recent: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("method.recent", self.recent, 0)
        _ = self.filters  # a file that cannot be used is refused now

    @cached_property
    def filters(self) -> Tensor:
        """(layers, H, d); no field, so that a method which holds this one can be built like any other."""
        return read(self.path)

    def check(self, layers: int, heads: int, dim: int, sliding: tuple[int, ...]) -> None:
        if self.filters.shape != (layers, heads, dim):
            raise SettingError(
                f"method.path={self.path}: filters for (layers, KV heads, dimensions) {tuple(self.filters.shape)}, "
                f"the model has {(layers, heads, dim)}"
            )

    def protect(self, observation: Observation, rows: Rows, quota: int) -> Tensor:
        return rows.places >= observation.tokens - self.recent

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        own = self.filters[observation.layer].to(rows.mass)  # (H, d)
        return -similarity(rows.keys, own.expand(len(rows.keys), -1, -1), "dot")


def read(path: str | None) -> Tensor:
    """Filters (layers, H, d) of a file; SettingError if there are none."""
    if path is None:
        raise SettingError(
            "method.path=null: a safetensors file of filters; make one with "
            "python -m kvbench calibrate qfilters --model MODEL --out FILE"
        )
    if not isinstance(path, str | Path):
        raise SettingError(f"method.path={path}: a path")
    try:
        with safe_open(str(Path(path).expanduser()), framework="pt") as file:
            filters = file.get_tensor("q_filters")
    except (OSError, SafetensorError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SettingError(f"method.path={path}: no readable file of filters ({reason})") from None
    if filters.dim() != 3 or not filters.is_floating_point() or not torch.isfinite(filters).all():
        raise SettingError(f"method.path={path}: q_filters is no finite tensor (layers, KV heads, dimensions)")
    return filters

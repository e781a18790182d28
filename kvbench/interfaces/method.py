"""The interface of a method: a method decides which rows of a layer's KV cache stay.

A method is a frozen dataclass in a file of its own. Its fields are its settings, which Hydra reads from
conf/method/<name>.yaml. Its hooks answer questions about the rows that a layer holds. Every hook has a default, and all
defaults together keep the full cache. Most methods override `score` and `protect` only. `FurtherHooks` has what others
declare and answer.

Symbols: B samples, H KV heads, G query heads per KV head, T tokens of the block that the layer just read, n rows (the
last T of them are the block's), d head dimension. Rows are padded to the longest head: `rows.mass` is 0 where a head
has fewer rows (kvbench.interfaces.rows).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kvbench.interfaces.captured import Captured
from kvbench.interfaces.further_hooks import FurtherHooks
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import check_settings, setting
from kvbench.kernels import cut_order
from kvbench.kernels.cut_order import RECENTS, SINKS, Protection
from kvbench.validation import SettingError, require_choice

__all__ = ["Captured", "Method", "find_rows_without_votes", "fit_protected"]


@dataclass(frozen=True)
class Method(FurtherHooks):
    """The base of every method. Used as it is, it keeps the full cache. A score makes a method of it:

    @dataclass(frozen=True)
    class LongKeys(Method):
        recent: int = setting(minimum=0)

        def protect(self, observation, rows, quota):
            return rows.places >= observation.tokens - self.recent

        def score(self, observation, rows, state):
            return rows.keys.norm(dim=-1)
    """

    name: str
    """The name of the method's file in conf/method/."""
    decoding: bool = setting(default=False, kw_only=True)
    """Whether rows are also evicted while decoding. If not, decoding appends rows."""
    decode_interval: int = setting(minimum=1, default=1, kw_only=True)
    """Number of tokens between two evictions while decoding."""
    decode_size: int | None = setting(minimum=2, default=None, kw_only=True)
    """Rows per layer and KV head that an eviction while decoding leaves. `None` leaves as many as the budget allows."""
    budget_setting: str | None = setting(default=None, kw_only=True)
    """Name of the setting that decides how many rows stay (`count_rows`), such as a threshold, as the method's file in
    conf/method/ states it. Its runs have budget=null, and it has no `captured`. `None`: the budget decides.
    """

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        """Return how important each row is, (B, H, n). Rows with larger scores stay.

        This must be a pure function of its arguments.
        """
        raise NotImplementedError(f"{self.name} has no score")

    def protect(self, observation: Observation, rows: Rows, quota: int | Tensor) -> Tensor | None:
        """Return which rows stay whatever their score, such as the last ones, (B, H, n) bool, or None.

        `quota` is the number of rows that each head may keep. Only methods with `captured` ever get a tensor, int64,
        which broadcasts to (B, H, 1).

        Called again with a smaller quota if the allocator cascades. The observation then has no queries, outputs or
        log-sum-exps.
        """
        return None

    def protect_sinks(self, observation: Observation, rows: Rows, quota: int | Tensor) -> Tensor | None:
        """Return which of the first rows stay whatever their score, (B, H, n) bool, or None. Called like `protect`.

        If the protected rows do not all fit the quota, the rows of `protect` go first, and the first sink goes last.
        """
        return None

    def update(self, observation: Observation, rows: Rows, state: State) -> Mapping[str, Tensor]:
        """Return what to remember about the rows of the layer that just read a block.

        Called after every block of the prompt and after every decoded token. If `decoding` is not set, a CUDA graph
        leaves decoded tokens out. Their queries and keys are then seen by `Captured.row_reader`, if there is one.

        Args:
            observation: What the layer computed for the block.
            rows: The layer's rows, the block's included.
            state: Where the method keeps everything that is not a value per row.

        Returns:
            Values per row, (B, H, n) by name. They stay with their rows through cuts, as `rows.columns`.
        """
        return {}

    def __post_init__(self) -> None:
        check_settings(self, "method")
        if self.decode_size is not None and not self.decoding:
            raise SettingError(f"method.decode_size={self.decode_size}: only with method.decoding=true")
        if self.budget_setting is not None:
            check_budget_setting(self, self.budget_setting)


def check_budget_setting(method: Method, name: str) -> None:
    """Check that a method may decide how many rows stay by its setting of this name.

    Raises:
        SettingError: It has no such setting, or works in a way that needs a budget.
    """
    settings = [field.name for field in fields(method) if field.name not in Method.__dataclass_fields__]
    require_choice("method.budget_setting", name, settings)
    if method.attends_subset or method.captured is not None or method.needs_extra_reads:
        raise SettingError(
            f"method.budget_setting={name}: {method.name} must not keep every row, be captured or need extra reads; "
            "use null"
        )


def find_rows_without_votes(observation: Observation, rows: Rows, window: int) -> Tensor:
    """Return the rows that get no votes from the last queries, (B, H, n) bool: those of the last `window` tokens.

    If these are all rows that a head holds, only the rows of the block get none.
    """
    inside = rows.places >= observation.tokens - window
    may_cover = observation.each is None or observation.each <= window
    if observation.queries.shape[2] < window and may_cover:
        covered = (inside | ~rows.present).all(-1, keepdim=True)
        inside = torch.where(covered, rows.places >= observation.first, inside)
    return inside


def fit_protected(sinks: Tensor | None, recents: Tensor | None, rows: Rows, quota: int | Tensor) -> Protection:
    """Return the protected rows that fit the quota, in the order of `kvbench.kernels.cut_order`.

    Args:
        sinks: What `protect_sinks` returned.
        recents: What `protect` returned.
        rows: The layer's rows, in the order of the text.
        quota: Rows that each head may keep.
    """
    return cut_order.fit_protected({SINKS: sinks, RECENTS: recents}, rows.present, quota)

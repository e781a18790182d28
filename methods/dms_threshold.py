"""dms_threshold: evict the rows whose score is below a threshold once they are no longer among the newest.

Source: NVIDIA/kvpress, dms_press.py (commit 36385e2), which puts the rule of DMS inference (Dynamic Memory
Sparsification, arXiv 2506.05345) around any score. The evictors that DMS trains are no part of it. Symbols: τ the
threshold, w the window, s_j the base method's score of row j.

    s_j is computed when the block of row j has been read, and remembered
    row j is evicted once it is not among the last w tokens, if s_j < τ

How many rows stay is an outcome: it differs between samples, layers and heads, and the budget is null. A score is not
computed again, so a row that has outlived the window stays. Base methods whose scores change with later queries or rows
(h2o, keydiff) are judged by what their block showed. kvpress 0.5.5 computes scores from the new block alone
(`keys[:, :, -q_len:]`), kvbench from all rows held, so a threshold over keydiff evicts other rows while decoding.

Rows that the base method protects when they are read have the largest score, as in kvpress, where its scorers fill the
scores of their sinks and windows with the maximum. A base method that protects the newest rows therefore keeps those of
every block. A share of the quota is a share of the rows held, because there is no quota. kvbench's own choice: a head
keeps at least one row.

This method's `decoding`, `decode_interval` and `decode_size` replace those of the base method.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbench.interfaces.composite import Composite
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting
from kvbench.validation import SettingError, require_choice

SCORE = "base_score"


@dataclass(frozen=True)
class DMSThreshold(Composite):
    """Keep the rows whose score by another method reaches a threshold."""

    threshold: float = setting()
    """The smallest score of a row that stays, τ."""
    window: int = setting(minimum=0)
    """Number of newest rows that always stay, w."""

    def __post_init__(self) -> None:
        require_choice("method.budget_setting", self.budget_setting, ["threshold"])
        if self.base.needs_extra_reads or self.base.overrides("select", "merge", "cut"):
            raise SettingError(
                f"method.base={self.base.name}: {self.name} needs scores of the block that was read, and no other "
                "selection; choose another method"
            )
        super().__post_init__()

    def update(self, observation: Observation, rows: Rows, state: State) -> Mapping[str, Tensor]:
        """Return the base method's columns, and the score of every row by the block in which it was read."""
        columns = self.base.update(observation, rows, state)
        if observation.decoding and not self.decoding:
            return {**rows.columns, **columns}
        new, rows = observation.queries.shape[2], replace(rows, columns={**rows.columns, **columns})
        scores = self.base.score(observation, rows, state).to(rows.mass.dtype)
        for hook in (self.base.protect_sinks, self.base.protect):
            safe = hook(observation, rows, len(rows))
            scores = scores if safe is None else scores.masked_fill(safe, torch.finfo(scores.dtype).max)
        if SCORE in rows.columns:
            scores = torch.cat([rows.columns[SCORE][..., :-new], scores[..., -new:]], -1)
        return {**columns, SCORE: scores}

    def protect(self, observation: Observation, rows: Rows, quota: int | Tensor) -> Tensor:
        return rows.places >= observation.tokens - self.window

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        return rows.columns[SCORE]

    def count_rows(self, scores: Tensor) -> Tensor:
        return (scores >= self.threshold).sum(-1)

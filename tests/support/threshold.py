"""A method that decides itself how many rows stay: those with a short key, and the newest."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting


@dataclass(frozen=True)
class Threshold(Method):
    """Keep the rows whose score exceeds a threshold."""

    threshold: float = setting()
    """What the score of a row must exceed, in (-inf, 0]."""
    recent: int = setting(minimum=0)
    """Newest rows that always stay."""

    def protect(self, observation: Observation, rows: Rows, quota: int) -> Tensor:
        return rows.places >= observation.tokens - self.recent

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        return -rows.keys.norm(dim=-1)

    def count_rows(self, scores: Tensor) -> Tensor:
        return (scores > self.threshold).sum(-1)


def write_settings(folder: Path) -> None:
    """Write the method's file, as method/threshold.yaml in a folder for --config-dir."""
    (folder / "method").mkdir(parents=True)
    (folder / "method" / "threshold.yaml").write_text(
        "defaults: [_decoding, _self_]\n_target_: tests.support.threshold.Threshold\nname: threshold\n"
        "budget_setting: threshold\nthreshold: -0.9\nrecent: 3\n"
    )

"""delta_objectives: losses of DeltaKV's compressors, trained with both losses and with one of them (DeltaKV, Figure 6).

    ce, mse     cross-entropy of the next token in nats, and mean squared error of keys and values, of the sequences
                that a step reads (`x`: the middle of as many steps as a point stands for); the series says which loss
                is trained
    held_out_ce, held_out_mse
                the same after the training, on sequences that it never read

All trainings begin with the same weights and read the same sequences in the same order.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, fsum
from typing import Any, ClassVar

from kvbench.store.study_lines import Line
from kvbench.studies.training_study import Training, TrainingStudy
from kvbench.training.delta_losses import DeltaRecipe

POINTS = 30  # of a curve
NAMES = {"both": "both losses", "mse": "MSE only", "ntp": "next token only"}  # of the trained losses


@dataclass(frozen=True)
class DeltaObjectives(TrainingStudy):
    """The losses of trainings with both losses and with one of them."""

    name: ClassVar[str] = "delta_objectives"

    def list_settings(self, default: DeltaRecipe) -> Iterable[dict[str, Any]]:
        return [{"loss": loss} for loss in NAMES]

    def compare(self, default: DeltaRecipe, trainings: Iterable[Training]) -> Iterable[Line]:
        for training in trainings:
            series, every = NAMES[training.recipe.loss], ceil(len(training.losses) / POINTS)
            for begin in range(0, len(training.losses), every):
                part = training.losses[begin : begin + every]
                for quantity in ("ce", "mse"):
                    value = fsum(step[quantity] for step in part) / len(part)
                    middle = begin + (len(part) + 1) / 2  # steps count from 1
                    yield self.line(quantity, value, series=series, x=middle, n=len(part))
            after = training.held_out
            yield self.line("held_out_ce", after.compressed, series=series, n=after.tokens)
            error = fsum(after.errors) / len(after.errors)
            yield self.line("held_out_mse", error, series=series, n=after.tokens)

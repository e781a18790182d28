"""delta_sizes: the loss of DeltaKV's compressors when one size is varied (DeltaKV, Figure 5).

    code        d_c, the width of a code
    nearest     k, the references of a token
    inner       d_h, the inner width of the networks
    stride      s, the distance of references

A value is the cross-entropy of the next token in nats after the training, on sequences that it never read, with the
size `x`: of the model that reads what the compressors leave (`compressed`), and of the untouched model (`untouched`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from kvbench.store.study_lines import Line
from kvbench.studies.training_study import Training, TrainingStudy
from kvbench.training.delta_losses import DeltaRecipe

# quantity -> setting of the recipe, and multiples of its default. For a large model: d_c = 128 to 768, k = 1 to 8,
# d_h = 768 to 4096, s = 5 to 40
SIZES = {
    "code": ("code", (0.25, 0.5, 1, 1.5)),
    "nearest": ("neighbours", (0.25, 0.5, 1, 2)),
    "inner": ("inner", (0.25, 0.5, 1, 4 / 3)),
    "stride": ("stride", (0.5, 1, 2, 4)),
}


@dataclass(frozen=True)
class DeltaSizes(TrainingStudy):
    """The losses of compressors of several sizes."""

    name: ClassVar[str] = "delta_sizes"

    def list_settings(self, default: DeltaRecipe) -> Iterable[dict[str, Any]]:
        return [{setting: size} for _, setting, size in list_sizes(default)]

    def compare(self, default: DeltaRecipe, trainings: Iterable[Training]) -> Iterable[Line]:
        for (quantity, _, size), training in zip(list_sizes(default), trainings, strict=True):
            held_out, tokens = training.held_out, training.held_out.tokens
            yield self.line(quantity, held_out.compressed, series="compressed", x=float(size), n=tokens)
            yield self.line(quantity, held_out.untouched, series="untouched", x=float(size), n=tokens)


def list_sizes(default: DeltaRecipe) -> list[tuple[str, str, int]]:
    """Return quantity, setting and size of each training."""
    return [
        (quantity, setting, max(1, round(multiple * getattr(default, setting))))
        for quantity, (setting, multiples) in SIZES.items()
        for multiple in multiples
    ]

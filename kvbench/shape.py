"""model=random: the shape of a model with seeded random weights, made on the device, for what does not depend on them.

Shapes are config.json files in conf/model/shapes/, one a model; `tiny` is for tests and the CPU. There is no tokenizer.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvbench.catalogue import CONF
from kvbench.model import Checkpoint, configuration, random_model
from kvbench.settings import SettingError, choose
from kvbench.sources import content_hash

SHAPES = CONF / "model" / "shapes"


def shapes() -> list[str]:
    """Names that `model.like=` takes."""
    return sorted(path.stem for path in SHAPES.glob("*.json"))


@dataclass(frozen=True)
class Shape(Checkpoint):
    """`name` and `path` of the shape's file; `seed` of the weights."""

    seed: int = 0

    reads_text = False

    @classmethod
    def like(cls, name: object, seed: int) -> "Shape":
        """The shape of conf/model/shapes/<name>.json; SettingError if there is none."""
        choose("model.like", name, shapes())
        return cls(str(name), str(SHAPES / f"{name}.json"), seed=seed)

    def config(self) -> Any:
        return configuration(self.path)

    def check(self) -> None:
        """There is nothing that could be missing."""

    def tokenizer(self) -> Any:
        raise SettingError(f"model=random: {self.name} has no tokenizer")

    def weights(self, dtype: torch.dtype, device: str) -> torch.nn.Module:
        """The model with its architecture's own random initialisation, ready to run; no copy is made on the CPU."""
        return random_model(self.config(), dtype, device, self.seed)

    def identity(self) -> str:
        return f"random {self.name} {content_hash(Path(self.path))} seed {self.seed}"

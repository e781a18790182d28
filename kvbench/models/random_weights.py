"""model=random: the shape of a model with seeded random weights, made on the device, for what does not depend on them.

Shapes are config.json files in conf/model/shapes/, one a model; `tiny` is for tests and the CPU. There is no tokenizer,
but the embedded model's may be lent: its token ids are among those of every shape but the smallest, so that prompts of
tasks have their lengths and cost their time, and what is answered says nothing.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvbench.config.catalogue import SHAPES, list_shapes
from kvbench.config.provenance import content_hash
from kvbench.models.checkpoint import Checkpoint, make_random_model
from kvbench.models.configuration import load_configuration
from kvbench.models.embedded import REFERENCE
from kvbench.validation import SettingError, require_choice


@dataclass(frozen=True)
class RandomCheckpoint(Checkpoint):
    """`name` and `path` of the shape's file; `seed` of the weights; `lender`: whose tokenizer it uses."""

    seed: int = 0
    lender: Checkpoint | None = None

    @classmethod
    def like(cls, name: object, seed: int, tokenizer: object = None) -> "RandomCheckpoint":
        """The shape of conf/model/shapes/<name>.json, named random_<name> if it reads text; SettingError if there is
        none, or for another tokenizer than None and "reference".
        """
        require_choice("model.like", name, list_shapes())
        require_choice("model.tokenizer", tokenizer, (None, "reference"))
        path = str(SHAPES / f"{name}.json")
        if tokenizer is None:
            return cls(str(name), path, seed=seed)
        own, lender = cls(f"random_{name}", path, seed=seed), Checkpoint("reference", str(REFERENCE))
        known, lent = (one.config().get_text_config(decoder=True).vocab_size for one in (own, lender))
        if known < lent:
            raise SettingError(f"model.tokenizer={tokenizer}: it has {lent} tokens, model.like={name} {known}; null")
        return replace(own, lender=lender)

    @property
    def reads_text(self) -> bool:
        return self.lender is not None

    def config(self) -> Any:
        return load_configuration(self.path)

    def check(self) -> None:
        """There is nothing that could be missing."""

    def tokenizer(self) -> Any:
        if self.lender is None:
            raise SettingError(f"model=random: {self.name} has no tokenizer")
        return self.lender.tokenizer()

    def weights(self, dtype: torch.dtype, device: str) -> torch.nn.Module:
        """The model with its architecture's own random initialisation, ready to run; no copy is made on the CPU."""
        return make_random_model(self.config(), dtype, device, self.seed)

    def identity(self) -> str:
        own = f"random {Path(self.path).stem} {content_hash(Path(self.path))} seed {self.seed}"
        return own if self.lender is None else f"{own} tokens of {self.lender.identity()}"

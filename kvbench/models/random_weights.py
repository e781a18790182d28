"""model=random: a model's shape with seeded random weights, for measurements that do not depend on the weights.

Shapes are config.json files in conf/model/shapes/; `tiny` is for tests and the CPU. The weights are made on the device.
A random model has no tokenizer, but it can use the embedded model's, whose token ids exist in every shape but the
smallest. Prompts of tasks then have their true lengths and times, but the answers mean nothing.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvbench.config.catalogue import SHAPES, list_shapes
from kvbench.config.provenance import content_hash
from kvbench.interfaces.layout import Layout
from kvbench.models.checkpoint import Checkpoint, add_format
from kvbench.models.configuration import load_configuration, load_layout
from kvbench.models.embedded import REFERENCE
from kvbench.validation import SettingError, require_choice


@dataclass(frozen=True)
class RandomCheckpoint(Checkpoint):
    """A shape whose weights are random. `path` is the shape's file."""

    seed: int = 0
    """The seed of the weights."""
    lender: Checkpoint | None = None
    """The model whose tokenizer it uses."""

    @classmethod
    def like(
        cls, name: object, seed: int, tokenizer: object = None, weights_format: str | None = None
    ) -> "RandomCheckpoint":
        """Make the checkpoint of a shape. It is named random_<name> if it has a tokenizer.

        Args:
            name: The shape's file is conf/model/shapes/<name>.json.
            seed: The seed of the weights.
            tokenizer: None, or "reference" for the embedded model's tokenizer.
            weights_format: The attribute of the checkpoint, which also ends its name.

        Raises:
            SettingError: There is no such shape or tokenizer.
        """
        require_choice("model.like", name, list_shapes())
        require_choice("model.tokenizer", tokenizer, (None, "reference"))
        path = str(SHAPES / f"{name}.json")
        if tokenizer is None:
            return cls(add_format(str(name), weights_format), path, weights_format=weights_format, seed=seed)
        named = add_format(f"random_{name}", weights_format)
        lender = Checkpoint("reference", str(REFERENCE))
        return cls(named, path, weights_format=weights_format, seed=seed, lender=lender)

    @property
    def reads_text(self) -> bool:
        return self.lender is not None

    def config(self) -> Any:
        return load_configuration(self.path)

    @cached_property
    def _layout(self) -> Layout:
        return load_layout(self.path)

    def check(self) -> None:
        """Raise a SettingError if the shape has fewer tokens than the tokenizer. No file can be missing."""
        if self.lender is None:
            return
        known, lent = (
            checkpoint.config().get_text_config(decoder=True).vocab_size for checkpoint in (self, self.lender)
        )
        if known < lent:
            raise SettingError(
                f"model.tokenizer={self.lender.name}: it has {lent} tokens, but model.like={Path(self.path).stem} has "
                f"{known}; use null"
            )

    def tokenizer(self) -> Any:
        if self.lender is None:
            raise SettingError(f"model=random: {self.name} has no tokenizer")
        return self.lender.tokenizer()

    def weights(self, dtype: Any, device: str) -> Any:
        """Make the model with its architecture's own random initialisation. No copy is made on the CPU."""
        from kvbench.models.loading import make_random_model

        return make_random_model(self.config(), dtype, device, self.seed, self.weights_format)

    def identity(self) -> str:
        text = f"random {Path(self.path).stem} {content_hash(Path(self.path))} seed {self.seed}"
        return text if self.lender is None else f"{text} tokens of {self.lender.identity()}"

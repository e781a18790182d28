"""The steps that calibrations share: open a model, read sequences of tokens, and write what comes of them.

The module imports torch. Commands therefore import it when they run, and get the options of their help from
`kvbench.cli.calibration_options`.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvbench.cli.calibration_options import open_texts
from kvbench.config.provenance import find_version
from kvbench.interfaces.layout import Layout
from kvbench.models.checkpoint import Checkpoint, find_model
from kvbench.models.configuration import load_layout
from kvbench.training import recording
from kvbench.training.token_sequences import PackedText, pack_texts

UNTRAINED = {"source": "untrained", "kvbench": find_version()}
"""The metadata of a file that no text was read for."""


@dataclass(frozen=True)
class TextForModel:
    """The sequences of tokens that a calibration reads with a model."""

    checkpoint: Checkpoint
    """The model, which is not loaded yet."""
    text: PackedText
    source: str
    """Where the text comes from."""

    def list_sequences(self) -> Iterator[Tensor]:
        """Yield the token ids of each sequence, (length,) int64."""
        return (sequence.long() for sequence in self.text.sequences)

    def describe_origin(self) -> dict[str, str]:
        """Return the metadata that every file has which was made from a text."""
        return recording.describe_origin(self.checkpoint.identity(), self.text, self.source)

    def write(self, out: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Write a safetensors file that says where it comes from.

        Args:
            out: The file.
            tensors: What it holds.
            metadata: What else it says.
        """
        recording.write_tensors(out, tensors, {**metadata, **self.describe_origin()})

    def report(self, out: Path, what: str) -> None:
        """Print that a file of something was made from the text."""
        count, length = self.text.sequences.shape
        print(f"{out}: {what} from {count} sequences of {length} tokens, {self.source}")

    def write_statistics(self, options: Namespace, tensors: Mapping[str, Tensor]) -> None:
        """Write a file of numbers that were taken from the sequences alone, and print its shapes.

        Args:
            options: What the parser of `kvbench calibrate` reads.
            tensors: The numbers.
        """
        count, length = self.text.sequences.shape
        self.write(options.out, tensors, {"sequences": f"{count} of {length} tokens", "seed": str(options.seed)})
        self.report(options.out, ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items()))


def open_checkpoint(options: Namespace) -> Checkpoint:
    """Return the model that the options name.

    Raises:
        SettingError: There is no such model, or its configuration cannot be read.
    """
    checkpoint = Checkpoint("calibrated", find_model(options.model, "--model"))
    checkpoint.config()
    return checkpoint


def load_untrained_layout(options: Namespace) -> Layout:
    """Return the layout of the model that the options name. For --untrained it may be a file of conf/model/shapes/."""
    return load_layout(options.model if Path(options.model).is_file() else find_model(options.model, "--model"))


def read_sequences(
    options: Namespace,
    checkpoint: Checkpoint,
    length: int,
    wanted: int,
    least: int = 1,
    *,
    between: str | None = None,
    what: str = "training text",
) -> TextForModel:
    """Read the texts that the options name, and cut them into sequences of tokens.

    Args:
        options: What the parser of `kvbench calibrate` reads.
        checkpoint: The model, for its tokenizer.
        length: As `kvbench.training.token_sequences.pack_texts`; and so the others.
        wanted: Likewise.
        least: Likewise.
        between: Likewise.
        what: Likewise.

    Raises:
        SettingError: The model lacks weights or a tokenizer, or the texts cannot be read or are too short.
    """
    checkpoint.check()
    texts, source = open_texts(options, checkpoint.path, length, options.seed)
    text = pack_texts(checkpoint.tokenizer(), texts, length, wanted, least, between=between, what=what)
    return TextForModel(checkpoint, text, source)


def choose_dtype(device: str) -> torch.dtype:
    """Return the dtype of a model for which none was asked."""
    return torch.float32 if device == "cpu" else torch.bfloat16

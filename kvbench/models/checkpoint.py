"""Describe a model of the disk or the hub: its configuration, how many tokens it takes, the identity of its weights.

This module imports neither torch nor transformers, so that a sweep whose runs are all finished is answered at once.
`kvbench.models.loading` loads the tokenizer and the weights.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from kvbench.interfaces.layout import Layout
from kvbench.models.configuration import load_configuration, load_layout, note_linear_rope
from kvbench.models.embedded import REFERENCE
from kvbench.models.local_models import FETCHED_MODELS, MODELS, check_fetched, identify_converted, read_samples
from kvbench.models.tuned_models import TUNED_MODELS, find_factors, find_tuned
from kvbench.validation import EMBEDDED_MODELS, SettingError, check_model_path, is_gguf, refuse_on_error

IDENTITY = (
    "model",
    "pytorch",
    "config.",
    "generation_config",
    "tokenizer",
    "special",
    "added",
    "chat_",
    "vocab",
    "merges",
)
SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".jinja")
KNOWN_MODELS = dict.fromkeys(EMBEDDED_MODELS, REFERENCE) | {name: MODELS / name for name in FETCHED_MODELS}


def find_model(model: str, setting: str = "model.path") -> str:
    """Return the folder of a model, or its id on the hub.

    A name that kvbench knows becomes its folder. A GGUF file is converted once and becomes the converted folder, and so
    are a downloaded model's factors (`kvbench.models.tuned_models`). Any other folder or id is returned as it is.

    Args:
        model: A name, folder, GGUF file or id.
        setting: The setting or option that gives it, for messages.

    Raises:
        SettingError: There is no such file or folder, the name is nearly one that kvbench knows, or the GGUF file
            cannot be converted.
    """
    if model in FETCHED_MODELS:
        check_fetched(model)
    if model in TUNED_MODELS:
        return str(find_tuned(TUNED_MODELS[model], find_factors(model)))
    close = get_close_matches(model.lower(), [*KNOWN_MODELS, *TUNED_MODELS], 1, 0.8)
    if close and model not in KNOWN_MODELS and "/" not in model and not is_gguf(model) and not Path(model).exists():
        # asking the hub would take long
        raise SettingError(f"{setting}={model}: no such model; did you mean {close[0]}?")
    path = str(KNOWN_MODELS.get(model, model))
    check_model_path(path, setting)
    if not is_gguf(path):
        return path
    from kvbench.models.gguf import find_converted

    return str(find_converted(Path(path).expanduser()))


def add_format(name: str, weights_format: str | None) -> str:
    """Return the name of a model whose weights have a format, as tables show it."""
    return name if weights_format is None else f"{name}_{weights_format}"


@dataclass(frozen=True)
class Checkpoint:
    """A model that is not loaded yet."""

    name: str
    path: str
    """A local folder or an id of the hub."""
    revision: str | None = None
    """A revision of the hub."""
    device_map: str | None = None
    """Use "auto" to spread the layers over all GPUs (accelerate)."""
    most: int | None = None
    """How many tokens the model reads (`model.longest`); None takes what its configuration states."""
    weights_format: str | None = None
    """The format of the linear layers' weights (`model.weights`): "int4", or None for the dtype of the run."""

    @property
    def reads_text(self) -> bool:
        """Whether the model has a tokenizer."""
        return True

    def config(self) -> Any:
        """Return the configuration.

        Raises:
            SettingError: There is no configuration, or a probe refuses the architecture.
        """
        check_model_path(self.path)
        return load_configuration(self.path, self.revision)

    def layout(self) -> Layout:
        """Return what a cache must know about the model. It is read once for this object.

        Raises:
            SettingError: There is no configuration, or a probe refuses the architecture.
        """
        return self._layout

    @cached_property
    def _layout(self) -> Layout:
        check_model_path(self.path)
        stated = load_layout(self.path, self.revision)
        if self.most is not None:
            return replace(stated, longest=self.most)
        note_linear_rope(self.path)
        return stated

    def longest(self) -> int:
        """Return how many tokens the model supports."""
        return self.layout().longest

    def check(self) -> None:
        """Raise a SettingError if a local folder lacks weights in safetensors. Nothing is loaded."""
        folder = Path(self.path)
        if folder.is_dir() and not any(folder.glob("*.safetensors")):
            raise SettingError(f"model.path={self.path}: no *.safetensors there")
        if (index := folder / "model.safetensors.index.json").is_file() and not (
            folder / "model.safetensors"
        ).is_file():
            with refuse_on_error(f"model.path={self.path}: cannot read {index.name}"):
                shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            if missing := [name for name in shards if not (folder / name).is_file()]:
                raise SettingError(f"model.path={self.path}: {missing[0]} is missing, which {index.name} names")

    def tokenizer(self) -> Any:
        """Load the tokenizer.

        Raises:
            SettingError: There is no tokenizer, or it is not a fast one.
        """
        from kvbench.models.loading import load_tokenizer

        return load_tokenizer(self.path, self.revision)

    def weights(self, dtype: Any, device: str) -> Any:
        """Load the model from safetensors, ready to run.

        Raises:
            SettingError: The weights cannot be read.
        """
        from kvbench.models.loading import load_weights

        return load_weights(self.path, self.revision, self.device_map, dtype, device, self.weights_format)

    def identity(self) -> str:
        """Return a text that identifies the weights.

        For a model of the hub that is its commit. For a local folder it is a hash over weights, settings and tokenizer;
        of a file over 64 MiB it covers 64 samples of 1 MiB. It is computed once for this object. The format of the
        weights is not part of it, so that files that were made for a model serve it in every format.
        """
        return self._identity

    @cached_property
    def _identity(self) -> str:
        folder = Path(self.path)
        if (converted := identify_converted(folder)) is not None:
            return converted
        if not folder.is_dir():
            return f"{self.path}@{getattr(self.config(), '_commit_hash', None) or self.revision}"
        digest = hashlib.sha256()
        for file in sorted(p for p in folder.iterdir() if p.name.startswith(IDENTITY) and p.suffix in SUFFIXES):
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
            for sample in read_samples(file):
                digest.update(sample)
        return digest.hexdigest()[:16]

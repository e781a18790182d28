"""Load a model from the disk or the hub: its configuration, tokenizer and weights, and the identity of its weights."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from kvbench.models.configuration import LENGTH_DEPENDENT_ROPE, find_max_tokens, load_configuration, read_rope_settings
from kvbench.models.embedded import EMBEDDED_MODELS
from kvbench.models.gguf import find_converted, read_samples
from kvbench.models.local_models import FETCHED_MODELS, MODELS, check_fetched, identify_converted
from kvbench.models.transformers_port import text_config
from kvbench.validation import SettingError, check_model_path, is_gguf

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
KNOWN_MODELS = EMBEDDED_MODELS | {name: MODELS / name for name in FETCHED_MODELS}


def find_stop_tokens(model: Any) -> frozenset[int]:
    """Return the token ids that end an answer."""
    found = model.generation_config.eos_token_id
    if found is None:
        found = text_config(model).eos_token_id
    return frozenset([] if found is None else [found] if isinstance(found, int) else found)


def make_random_model(config: Any, dtype: torch.dtype, device: str, seed: int) -> torch.nn.Module:
    """Make a model with random weights. The global random state does not change.

    Args:
        config: The model's configuration.
        dtype: The dtype of the weights.
        device: Where the weights are initialised, "cpu" or "cuda".
        seed: The seed of the weights.
    """
    gpus = [torch.cuda.current_device()] if device == "cuda" else []
    with torch.random.fork_rng(devices=gpus), torch.device(device):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def count_parameters(config: Any) -> int:
    """Return how many parameters a model of this configuration has. Tied ones count once. It needs no memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(own.numel() for own in model.parameters())


def find_model(model: str) -> str:
    """Return the folder of a model, or its id on the hub.

    A name that kvbench knows becomes its folder. A GGUF file is converted once and becomes the converted folder. Any
    other folder or id is returned as it is.

    Raises:
        SettingError: There is no such file or folder, or the GGUF file cannot be converted.
    """
    if model in FETCHED_MODELS:
        check_fetched(model)
    path = str(KNOWN_MODELS.get(model, model))
    check_model_path(path)
    return str(find_converted(Path(path).expanduser())) if is_gguf(path) else path


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

    @property
    def reads_text(self) -> bool:
        """Whether the model has a tokenizer."""
        return True

    def config(self) -> Any:
        """Return the configuration.

        Raises:
            SettingError: There is no configuration, or the architecture is not supported.
        """
        check_model_path(self.path)
        return load_configuration(self.path, self.revision)

    def longest(self) -> int:
        """Return how many tokens the model supports."""
        return find_max_tokens(self.config())

    def find_rope_switch(self) -> int | None:
        """Return the length beyond which RoPE changes its frequencies (LongRoPE, dynamic), or None if it never does."""
        text = self.config().get_text_config(decoder=True)
        rope = read_rope_settings(text)
        if rope.get("rope_type") not in LENGTH_DEPENDENT_ROPE:
            return None
        original = rope.get("original_max_position_embeddings")
        return original or getattr(text, "original_max_position_embeddings", None) or text.max_position_embeddings

    def check(self) -> None:
        """Raise a SettingError if a local folder has no weights in safetensors. Nothing is loaded."""
        folder = Path(self.path)
        if folder.is_dir() and not any(folder.glob("*.safetensors")):
            raise SettingError(f"model.path={self.path}: no *.safetensors there")

    def tokenizer(self) -> Any:
        """Load the tokenizer.

        Raises:
            SettingError: There is no tokenizer, or it is not a fast one.
        """
        try:
            found = AutoTokenizer.from_pretrained(self.path, revision=self.revision, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise SettingError(
                f"model.path={self.path}: cannot read a tokenizer there ({str(error).splitlines()[0]})"
            ) from None
        if not found.is_fast:
            raise SettingError(
                f"model.path={self.path}: its tokenizer gives no offsets; use a fast one (tokenizer.json)"
            )
        return found

    def weights(self, dtype: torch.dtype, device: str) -> torch.nn.Module:
        """Load the model from safetensors, ready to run.

        Raises:
            SettingError: The weights cannot be read.
        """
        logging.disable_progress_bar()
        try:
            model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
                self.path, revision=self.revision, dtype=dtype, trust_remote_code=False, use_safetensors=True,
                device_map=self.device_map,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            raise SettingError(
                f"model.path={self.path}: cannot read weights there ({str(error).splitlines()[0]})"
            ) from None
        return (model if self.device_map else model.to(device)).eval()

    def identity(self) -> str:
        """Return a text that identifies the weights.

        For a model of the hub that is its commit. For a local folder it is a hash over weights, settings and tokenizer;
        of a file over 64 MiB it covers 64 samples of 1 MiB. It is computed once for this object.
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

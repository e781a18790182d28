"""Load tokenizers and weights with transformers, and make models with random weights."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from kvbench.models.transformers_port import text_config
from kvbench.validation import SettingError


def load_tokenizer(path: str, revision: str | None = None) -> Any:
    """Load the tokenizer of a folder or of a model on the hub.

    Raises:
        SettingError: There is no tokenizer, or it is not a fast one.
    """
    try:
        found = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise SettingError(f"model.path={path}: cannot read a tokenizer there ({str(error).splitlines()[0]})") from None
    if not found.is_fast:
        raise SettingError(f"model.path={path}: its tokenizer gives no offsets; use a fast one (tokenizer.json)")
    return found


def load_weights(
    path: str, revision: str | None, device_map: str | None, dtype: torch.dtype, device: str
) -> torch.nn.Module:
    """Load a model from safetensors, ready to run.

    Args:
        path: A folder, or an id of the hub.
        revision: A revision of the hub.
        device_map: "auto" spreads the layers over all GPUs; None moves the model to `device`.
        dtype: The dtype of the weights.
        device: "cpu" or "cuda".

    Raises:
        SettingError: The weights cannot be read.
    """
    logging.disable_progress_bar()
    try:
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            path, revision=revision, dtype=dtype, trust_remote_code=False, use_safetensors=True, device_map=device_map
        )
    except (OSError, ValueError) as error:
        raise SettingError(f"model.path={path}: cannot read weights there ({str(error).splitlines()[0]})") from None
    return (model if device_map else model.to(device)).eval()


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

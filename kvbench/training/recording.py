"""Read texts through a cache whose method records what the layers show, and write what comes of it."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from kvbench.atomic import replace_file
from kvbench.cache.policy import CachePolicy
from kvbench.config.catalogue import build, load_settings
from kvbench.config.provenance import find_version
from kvbench.engine.generation import GenerationContext
from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import PromptEncoder, State
from kvbench.interfaces.tensor_files import IDENTITY
from kvbench.training.token_sequences import PackedText


def record_states(
    model: torch.nn.Module,
    ids: Tensor,
    recorder: Method,
    budget: float = 1.0,
    prefix: int = 0,
    words: PromptEncoder | None = None,
) -> list[State | None]:
    """Read a text as one block.

    Args:
        model: The model.
        ids: Token ids, shape (tokens,).
        recorder: A method that puts into its state what it is to record.
        budget: Fraction of rows that stay at the end.
        prefix: Number of tokens at the beginning that are not part of the text.
        words: Encodes the recorder's own words to the model.

    Returns:
        The state of each layer; None for layers with a sliding window.
    """
    choice = CachePolicy(recorder, Allocator("uniform"), build("codec", load_settings("codec", "raw")))
    context = GenerationContext(model, choice, Budget(budget), None, (0,), prefix, words)
    context.prefill(ids[None].to(next(model.parameters()).device))
    return [None if layer is None else layer.state for layer in context.layers]


def describe_origin(identity: str, text: PackedText, source: str) -> dict[str, str]:
    """Return the metadata that every file has which was made from a text.

    Args:
        identity: Identity of the model.
        text: The text.
        source: Where it comes from.
    """
    return {IDENTITY: identity, "text": text.digest, "source": source, "kvbench": find_version()}


def write_tensors(out: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, completely or not at all. Equal contents give equal files.

    A run is identified by a hash of its method's file, and safetensors writes metadata in a random order. The header is
    therefore sorted.
    """
    made = save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"format": "pt", **metadata})
    stop = 8 + int.from_bytes(made[:8], "little")
    header = json.dumps(json.loads(made[8:stop]), sort_keys=True, ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)  # tensors are aligned to 8 bytes
    out.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(out) as draft:
        draft.write_bytes(len(header).to_bytes(8, "little") + header + made[stop:])

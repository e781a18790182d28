"""Compute DuoAttention's pattern of full-attention and streaming heads from KVzip's head scores."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvbench.config.catalogue import load_settings
from kvbench.interfaces.observation import PromptEncoder, State
from kvbench.methods.kvzip import KVzip
from kvbench.models.transformers_port import read_layout
from kvbench.training.recording import record_states


@dataclass(frozen=True)
class ScoreRecorder(KVzip):
    """KVzip, but the scores stay in the state of every layer after the cut."""

    def forget(self, state: State) -> None:
        pass


def compute_head_scores(
    model: torch.nn.Module, sequences: Sequence[Tensor], words: PromptEncoder, prefix: int = 0, **args: object
) -> Tensor:
    """Compute KVzip's head scores.

    Args:
        model: The model.
        sequences: Texts as token ids, each of shape (tokens,).
        words: Encodes the prompts of KVzip.
        prefix: Number of tokens at the beginning that are not part of the text.
        args: Settings of conf/method/kvzip.yaml.

    Returns:
        The mean scores over the sequences in float32, shape (layers, KV heads); nan for layers with a sliding window.
    """
    chosen = {k: v for k, v in load_settings("method", "kvzip", args).items() if k not in ("_target_", "preset")}
    sequence_scores = []
    for ids in sequences:
        states = record_states(model, ids, ScoreRecorder(**chosen), 0.5, prefix, words)
        scores = [None if state is None else state.layer["scores"][0] for state in states]
        nothing = torch.full((read_layout(model).heads,), torch.nan)
        sequence_scores.append(
            torch.stack([nothing if layer is None else layer.amax(-1).float().cpu() for layer in scores])
        )
    return torch.stack(sequence_scores).mean(0)


def write_pattern(alpha: Tensor, folder: Path, sinks: int, recent: int, source: str) -> None:
    """Write a pattern in DuoAttention's published format: full_attention_heads.tsv and config.json.

    Args:
        alpha: The score α of each head, shape (layers, KV heads).
        folder: The folder to write to.
        sinks: Number of first rows that streaming heads keep.
        recent: Number of newest rows that streaming heads keep.
        source: Origin of the pattern, for config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["\t".join(f"{value:.6f}" for value in layer) for layer in alpha.tolist()]
    (folder / "full_attention_heads.tsv").write_text("\n".join(lines) + "\n")
    config = {"sink_size": sinks, "recent_size": recent, "source": source}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

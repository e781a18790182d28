"""The interface of a method that lets the model repeat the prompt before the prompt is cut.

Source of the requests: snu-mllab/KVzip, model/wrapper.py; NVIDIA/kvpress, kvzip_press.py. After the prompt the model
reads, over the whole cache, a request to repeat the text and then the text itself, `chunk` tokens at a time. One such
read consists of the request, the last `postfix` tokens before the chunk (for all chunks but the first), the tokens that
the chat template puts between a message and its answer, and the chunk. The read is then forgotten.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import ExtraRead, Observation, PromptEncoder
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting
from kvbench.validation import SettingError


@dataclass(frozen=True)
class Repeating(Method):
    """The base of methods that see how the model repeats the prompt. What stands before the user's text stays."""

    chunk: int = setting(minimum=1)
    """Number of tokens that are repeated at a time."""
    postfix: int = setting(minimum=0)
    """Number of tokens before a chunk that its request quotes."""
    first: Any = setting()
    """The request for the first chunk, a text or token ids. (OmegaConf supports no union of text and list.)"""
    later: Any = setting()
    """The request for every other chunk, a text or token ids."""
    sinks: int | None = setting(minimum=0)
    """Number of first rows that always stay; `None` keeps the prefix."""

    @property
    def one_block(self) -> bool:
        return True

    @property
    def needs_extra_reads(self) -> bool:
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("first", "later"):
            own = getattr(self, name)
            ids = isinstance(own, Sequence) and all(type(token) is int and token >= 0 for token in own)
            if not isinstance(own, str) and not ids:
                raise SettingError(f"method.{name}={own}: a text, or a list of token ids")

    def extra_reads(self, ids: Tensor, prefix: int, words: PromptEncoder) -> Iterator[ExtraRead]:
        turn, start = ids.new_tensor(words.turn), prefix
        for chunk in torch.split(ids[:, prefix:], self.chunk, dim=1):
            name = "first" if start == prefix else "later"
            request = ids.new_tensor(words.ids(f"method.{name}", getattr(self, name)))
            before = ids[:, max(prefix, start - self.postfix) : start]
            spoken = [request.expand(len(ids), -1), before, turn.expand(len(ids), -1), chunk]
            yield ExtraRead(torch.cat(spoken, 1), start, start + chunk.shape[1])
            start += chunk.shape[1]

    def safe(self, observation: Observation) -> int:
        """Return how many first rows always stay."""
        return observation.prefix if self.sinks is None else self.sinks

    def protect_sinks(self, observation: Observation, rows: Rows, quota: int) -> Tensor:
        return rows.places < self.safe(observation)

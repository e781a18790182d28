"""What a benchmark is: samples with a context, a question and an answer prefix, and the score of an output.

A task knows texts and a tokenizer; it does not know that a cache exists.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Sample:
    """One prompt. `context + question + answer_prefix` is the benchmark's own prompt to the byte.

    With `question=hidden` the cache is cut after `context`. Where the model has a chat template and `chat` is
    true, `context + question` is the user's message and `answer_prefix` opens the assistant's.
    """

    uid: str  # unique within the run, e.g. "niah_single_1/2048/0"
    subtask: str  # a row of the closing table, e.g. "niah_single_1"
    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    max_new_tokens: int
    group: str = ""  # samples that share one context share a group: the unit of the paired intervals ("" = uid)
    chat: bool = True
    meta: Mapping[str, Any] = field(default_factory=dict)  # written to the record, e.g. {"haystack": "generated"}


class Tokenizer(Protocol):
    """What a task needs of a Hugging Face tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...


class Task(Protocol):
    """A benchmark; constructed by Hydra from conf/task/<name>.yaml, one frozen dataclass a file in tasks/."""

    length: int | None  # tokens of the longest prompt plus answer where the task sets it, else None

    def check(self) -> None:
        """Raises kvbench.settings.SettingError, naming the setting, before any model is loaded."""

    def fingerprint(self) -> str:
        """Hash of all data that samples are made from (word lists, haystack, templates), tokenizer apart."""

    def samples(self, tokenizer: Tokenizer, template_tokens: int) -> Iterable[Sample]:
        """The samples in order; `template_tokens` is what a chat template adds to every prompt."""

    def score(self, sample: Sample, output: str) -> tuple[float, str]:
        """Score in [0, 100] and the answer that was extracted from the output."""

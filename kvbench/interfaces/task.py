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
    true, `context + question` is the user's message and `answer_prefix` opens the assistant's; a solved example at the
    beginning of the context, if `solved` says where it is, is then a message and an answer of its own.

    Turns of one conversation are samples that follow one another with the same `context` and the same `conversation`.
    A later turn's `question` is what the user says then (where there is no chat template: with all that stands between
    it and the answer before, the end token that was not read too), and its prompt has the turns before it, each with
    `said` as its answer, or with the tokens that the model gave.
    """

    uid: str  # unique within the run, e.g. "niah_single_1/2048/0"; repeats of one prompt differ here: it seeds sampling
    subtask: str  # a row of the closing table, e.g. "niah_single_1"
    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    max_new_tokens: int
    group: str = ""  # samples that share one context share a group: the unit of the paired intervals ("" = uid)
    chat: bool = True
    meta: Mapping[str, Any] = field(default_factory=dict)  # written to the record, e.g. {"data": "miniature"}
    ends: tuple[int, ...] = ()  # token ids that end the answer, besides the model's own
    until: tuple[str, ...] = ()  # texts that end the answer; the output is what stands before the first of them
    min_new_tokens: int = 0  # 1: the first token does not end the answer
    conversation: str = ""  # what turns of one conversation share; "" = no conversation
    said: str | None = None  # of a turn: the answer that later turns find; None: the model's own
    solved: tuple[int, ...] = ()  # where in `context` the answer of a solved example begins, and where it ends


@dataclass(frozen=True)
class Graded:
    """What an output is worth."""

    score: float  # in [0, 100]
    answer: str  # what was extracted from the output
    also: Mapping[str, float | bool | None] = field(default_factory=dict)  # further metrics: points, or whether


class Tokenizer(Protocol):
    """What a task needs of a Hugging Face tokenizer."""

    chat_template: str | None
    eos_token: str | None

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, ids: list[int], skip_special_tokens: bool = ...) -> str: ...


class Task(Protocol):
    """A benchmark; constructed by Hydra from conf/task/<name>.yaml, one frozen dataclass a file in tasks/.

    A task may also have `averages`, names of rows below the subtasks' with the weights of the subtasks they are made of
    (none: one average, each subtask weighing the same), and `inventory()`, the number of rows of each subtask in its
    data, for `make data`. `subtask_names`, where all possible subtasks are known by name, lets a model's card list some
    of them (kvbench.analysis.solvable_subtasks). One whose `has_context` is False has nothing to cut before the
    question: question=hidden is refused. One that has the texts of right answers gives them by `reference(sample) ->
    str`, for fidelity=true; one without that method is refused there. Samples made from data say in `meta["data"]`
    which: "miniature" (made by kvbench in the benchmark's format), "local" or "hub".
    """

    length: int | None  # tokens of the longest prompt plus answer where the task sets it, else None

    def check(self) -> None:
        """Raises kvbench.validation.SettingError, naming the setting, before any model is loaded."""

    def fingerprint(self) -> str:
        """Hash of all data that samples are made from (word lists, haystack, templates), tokenizer apart."""

    def samples(self, tokenizer: Tokenizer, template_tokens: int, longest: int) -> Iterable[Sample]:
        """The samples in order; `template_tokens` is what a chat template adds to every prompt, `longest` the tokens of
        prompt and answer that the model takes.
        """

    def score(self, sample: Sample, output: str) -> Graded:
        """What the output is worth."""

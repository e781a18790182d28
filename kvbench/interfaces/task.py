"""The interface of a task: a benchmark's samples and the score of an output.

A sample has a context, a question and an answer prefix. A task knows texts and a tokenizer. It does not know that a
cache exists.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Sample:
    """One prompt. `context + question + answer_prefix` is the benchmark's own prompt, byte for byte.

    With `question=hidden` the cache is cut after `context`.

    If the model has a chat template and `chat` is true, `context + question` is the user's message and `answer_prefix`
    opens the assistant's message. A solved example at the beginning of the context then becomes a message and an answer
    of its own, if `solved` says where it is.

    The turns of a conversation are consecutive samples with the same `context` and the same `conversation`. The
    `question` of a later turn is what the user says then. Without a chat template it also contains everything between
    the previous answer and the user's words, and the end token that was not read. The prompt of a later turn contains
    the earlier turns. Each has `said` as its answer, or, if that is None, the tokens that the model generated.
    """

    uid: str
    """Unique within the run, such as "niah_single_1/2048/0". It seeds the sampling, so repeats of a prompt need
    different ones.
    """
    subtask: str
    """The row of the closing table, such as "niah_single_1"."""
    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    """The right answers."""
    max_new_tokens: int
    group: str = ""
    """Samples that share a context share a group. Groups are the unit of the paired intervals. "" stands for `uid`."""
    chat: bool = True
    """Whether the model's chat template is used, if it has one."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """What is written to the record, such as {"data": "miniature"}."""
    ends: tuple[int, ...] = ()
    """Token ids that end the answer, besides the model's own."""
    until: tuple[str, ...] = ()
    """Texts that end the answer. The output is the text before the first of them."""
    min_new_tokens: int = 0
    """With 1 the first token does not end the answer."""
    conversation: str = ""
    """The name that the turns of a conversation share; "" for a sample without a conversation."""
    said: str | None = None
    """The answer that later turns see in place of this turn's output. None shows them the model's own answer."""
    solved: tuple[int, ...] = ()
    """Where in `context` the answer of a solved example begins and where it ends."""


@dataclass(frozen=True)
class Graded:
    """The score of an output."""

    score: float
    """In [0, 100]."""
    answer: str
    """The answer that was extracted from the output."""
    also: Mapping[str, float | bool | None] = field(default_factory=dict)
    """Further metrics: points, or whether a condition holds."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that a task uses."""

    chat_template: str | None
    eos_token: str | None

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, ids: list[int], skip_special_tokens: bool = ...) -> str: ...


class Task(Protocol):
    """A benchmark: a frozen dataclass in tasks/ that Hydra constructs from conf/task/<name>.yaml.

    A task may also have:

    - `averages`: names of rows below the subtasks' rows in the closing table, with the weights of the subtasks that
      each one averages. Without it there is one average, in which all subtasks weigh the same.
    - `inventory()`: the number of rows of each subtask in its data, for `kvbench check data`.
    - `count_samples()`: the number of samples of each subtask, without a tokenizer, for `kvbench plan --power`.
    - `subtask_names`: the names of all possible subtasks. A model's card can then list the subtasks that the model can
      solve (kvbench.analysis.solvable_subtasks).
    - `has_context`: False if there is nothing to cut before the question. question=hidden is then refused.
    - `reads_thoughts`: True if `score` is given the whole output, not only what follows the last `</think>`.
    - `reference(sample) -> str`: the text of a right answer. fidelity=true needs it and is refused without it.

    Samples made from data name their source in `meta["data"]`: "miniature" (made by kvbench in the benchmark's format),
    "local" or "hub".
    """

    length: int | None
    """Tokens of the longest prompt and its answer if the task fixes them, else None."""

    def check(self) -> None:
        """Check the settings before a model is loaded.

        Raises:
            SettingError: A setting is not allowed. The message names it.
        """

    def fingerprint(self) -> str:
        """Return a hash of all data that samples are made from (word lists, haystack, templates), without the
        tokenizer.
        """

    def samples(self, tokenizer: Tokenizer, template_tokens: int, longest: int) -> Iterable[Sample]:
        """Return the samples in order.

        Args:
            tokenizer: The model's tokenizer. Other threads encode earlier samples with it meanwhile, so its settings,
                such as truncation, must stay as they are.
            template_tokens: Number of tokens that a chat template adds to every prompt.
            longest: Number of tokens of prompt and answer that the model supports.
        """

    def score(self, sample: Sample, output: str) -> Graded:
        """Return the score of an output."""

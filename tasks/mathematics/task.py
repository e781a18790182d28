r"""Mathematics with long answers: MATH-500 (arXiv 2305.20050), AIME 2024 and AIME 2025.

The user's message is the problem in a prompt that asks for reasoning and for the answer in \boxed{}. The model answers
it `repeats` times, each time with another seed; repeats of one problem are one group. A problem has no context apart
from its question, so nothing can be evicted before the question is known.

The text decides whether two answers are the same (tasks/mathematics/equivalence.py). math-verify gives a second opinion
by algebra after the run (kvbench.integrations.math_verify).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from kvbench.interfaces.task import Graded, Sample, Tokenizer
from kvbench.tasks.common import dataset_rows
from kvbench.tasks.mathematics.equivalence import is_same_answer
from kvbench.tasks.mathematics.extraction import CLOSED, extract_boxed, extract_first_box, extract_flexible
from kvbench.tasks.mathematics.rows import SOURCES, load_problems
from kvbench.validation import SettingError, is_number, require_choice, require_int

NEW_TOKENS = 32768  # DeepSeek-R1's evaluation (arXiv 2501.12948, section 3)
PLACE = "{problem}"


@dataclass(frozen=True)
class MathProblems:
    """The task. conf/task/math500.yaml describes its settings."""

    reads_thoughts: ClassVar[bool] = True  # a box in the thought counts where no other follows
    name: str
    path: str
    prompt: str
    answer_prefix: str
    chat: bool
    extract: str | None
    max_new_tokens: int | None
    repeats: int
    temperature: float
    limit: int | None

    length = None  # a prompt is as long as its problem
    has_context = False

    def check(self) -> None:
        """Check the settings and read the data.

        Raises:
            SettingError: A setting or a row is invalid.
        """
        require_choice("task.name", self.name, SOURCES)
        dataset_rows.check_path("task.path", self.path)
        if not isinstance(self.prompt, str) or self.prompt.count(PLACE) != 1:
            raise SettingError(f"task.prompt={self.prompt!r}: a text with {PLACE} in it, once")
        if not isinstance(self.answer_prefix, str):
            raise SettingError(f"task.answer_prefix={self.answer_prefix}: a text")
        require_choice("task.chat", self.chat, (True, False))
        require_choice("task.extract", self.extract, (None, "boxed", "flexible"))
        if self.max_new_tokens is not None:
            require_int("task.max_new_tokens", self.max_new_tokens, 1)
        require_int("task.repeats", self.repeats, 1)
        if not is_number(self.temperature) or self.temperature == 0 and self.repeats > 1:
            raise SettingError(f"task.repeats={self.repeats}: all the same with temperature=0; temperature=0.6, or 1")
        if self.limit is not None:
            require_int("limit", self.limit, 1)
        _ = self._rows

    def fingerprint(self) -> str:
        """Hash the problems."""
        return dataset_rows.hash_rows(self.path, self._rows)

    def inventory(self) -> dict[str, int]:
        """Count the problems."""
        return {self.name: len(self._rows)}

    def samples(self, tokenizer: Tokenizer, template_tokens: int, longest: int) -> Iterator[Sample]:
        """Yield the samples problem by problem, each with its repeats; `limit` counts problems."""
        tiny = self.path == dataset_rows.MINIATURE
        new_tokens = self.max_new_tokens or (64 if tiny else NEW_TOKENS)
        for row in self._rows[: self.limit]:
            prompt, prefix = self.prompt.replace(PLACE, row["problem"]), row.get("answer_prefix", "")
            tokens = template_tokens + len(tokenizer.encode(prompt + self.answer_prefix + prefix))
            if tokens + new_tokens > longest:
                raise SettingError(
                    f"task.max_new_tokens={new_tokens}: with the {tokens} tokens of {row['id']} more than the "
                    f"{longest} that the model takes; at most {longest - tokens}"
                )
            group = f"{self.name}/{row['id']}"
            for repeat in range(self.repeats):
                meta: dict[str, Any] = {
                    "data": dataset_rows.name_source(self.path),
                    "repeat": repeat,
                    "verify": "math_verify",
                }
                yield Sample(
                    uid=f"{group}/r{repeat}",
                    subtask=self.name,
                    context="",
                    question=prompt,
                    answer_prefix=self.answer_prefix + prefix,
                    answers=(row["answer"],),
                    max_new_tokens=new_tokens,
                    group=group,
                    chat=self.chat,
                    meta=meta | {name: row[name] for name in ("subject", "level") if name in row},
                )

    def score(self, sample: Sample, output: str) -> Graded:
        """Score 100 if the answer that the setting `extract` finds is the same as the reference, else 0.

        Further metrics:
            boxed, flexible: The score by each of the two readings. `flexible` is KeyDiff's flexible match.
            exact: Whether the last box holds the reference to the letter: KeyDiff's exact match.
            first_box: Whether kvpress's reading gives the reference to the letter.
            closed: Whether the output closes its thinking.
        """
        reference = sample.answers[0]
        box, flexible, first = extract_boxed(output), extract_flexible(output), extract_first_box(output)
        right = {"boxed": box is not None and is_same_answer(box, reference)}
        right["flexible"] = (
            right["boxed"] if box is not None else flexible is not None and is_same_answer(flexible, reference)
        )
        right["exact"], right["first_box"] = box == reference.strip(), first == reference
        extract = self.extract or ("flexible" if self.path == dataset_rows.MINIATURE else "boxed")
        also = {name: 100.0 * is_right for name, is_right in right.items()}
        answer = box if extract == "boxed" else flexible
        return Graded(also[extract], answer or "", also | {"closed": CLOSED in output})

    @cached_property
    def _rows(self) -> list[dataset_rows.Row]:
        return load_problems(self.name, self.path)

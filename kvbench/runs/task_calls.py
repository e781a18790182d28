"""Call a task, so that whatever goes wrong in its file is one line that names the task and what was asked of it."""

from collections.abc import Iterable, Iterator
from typing import Any

from kvbench.interfaces.task import Graded, Sample, Task, Tokenizer
from kvbench.validation import ContractError, call_hook, is_number

END: Any = object()  # marks the end of the samples
TEXTS = ("uid", "subtask", "context", "question", "answer_prefix")
NEEDED = ("uid", "subtask")  # texts that may not be empty


def read_samples(owner: str, task: Task, tokenizer: Tokenizer, template_tokens: int, longest: int) -> Iterator[Sample]:
    """Yield the samples of a task, each checked.

    Args:
        owner: The task, such as "task=ruler".
        task: The task.
        tokenizer: The model's tokenizer.
        template_tokens: Number of tokens that a chat template adds to every prompt.
        longest: Number of tokens of prompt and answer that the model supports.

    Raises:
        SettingError: A setting or a row of the task's data cannot be used.
        ContractError: The task raised anything else, or one of its samples is wrong.
    """
    made = call_hook(owner, "samples", lambda: task.samples(tokenizer, template_tokens, longest))
    if not isinstance(made, Iterable):
        raise ContractError(f"{owner}: samples returned {type(made).__name__}, expected an iterable of Sample")
    samples, uids = iter(made), set[str]()
    while (sample := call_hook(owner, "samples", lambda: next(samples, END))) is not END:
        check_sample(owner, sample)
        if sample.uid in uids:
            raise ContractError(f"{owner}: two samples have the uid {sample.uid}")
        uids.add(sample.uid)
        yield sample


def check_sample(owner: str, sample: object) -> None:
    """Raise a ContractError if a sample lacks something, or has it of another type."""
    if not isinstance(sample, Sample):
        raise ContractError(f"{owner}: samples gave {type(sample).__name__}, expected Sample")
    whose = f"{owner}: sample {sample.uid}"
    for name in TEXTS:
        value = getattr(sample, name)
        if not isinstance(value, str) or name in NEEDED and not value:
            shown = repr(value) if name in NEEDED else type(value).__name__
            raise ContractError(f"{whose}: {name} is {shown}, expected a text")
    if not sample.context + sample.question + sample.answer_prefix:
        raise ContractError(f"{whose}: context, question and answer_prefix are empty")
    answers = sample.answers
    if not isinstance(answers, tuple) or not answers or not all(isinstance(text, str) for text in answers):
        raise ContractError(f"{whose}: answers is {answers!r:.60}, expected a tuple of at least one text")
    if not isinstance(sample.max_new_tokens, int) or sample.max_new_tokens < 1:
        raise ContractError(f"{whose}: max_new_tokens is {sample.max_new_tokens!r:.60}, expected a number from 1 on")


def grade_output(owner: str, task: Task, sample: Sample, output: str) -> Graded:
    """Return the task's score of an output; ContractError if it raises, or returns no score from 0 to 100."""
    grade = call_hook(owner, "score", lambda: task.score(sample, output), f" of {sample.uid}")
    score = getattr(grade, "score", None)
    if not is_number(score) or not 0 <= score <= 100:
        shown = score if isinstance(grade, Graded) else type(grade).__name__
        raise ContractError(f"{owner}: score of {sample.uid} returned {shown}, expected a number from 0 to 100")
    return grade

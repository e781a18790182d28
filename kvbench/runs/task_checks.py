"""Check one task against what a task must hold (docs/add-a-task.md), before a model answers it.

The checks need a tokenizer and no weights. Each prints one line: `ok`, `FAIL` with the first thing that is wrong, or
`-` with the reason why it does not apply to the task. The exit code is 1 if a check fails and 2 if the task cannot be
constructed.

A pass does not show that prompts are the benchmark's own to the byte. That needs the benchmark's own code, as in
tests/tasks/test_ruler_lm_eval_port.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any

from kvbench.config import catalogue
from kvbench.config.compose import compose_config
from kvbench.config.provenance import source_hashes
from kvbench.interfaces.task import Graded, Sample, Task
from kvbench.models.chat_template import count_template_tokens
from kvbench.models.checkpoint import Checkpoint
from kvbench.runs.check_list import CheckFailed, NotApplicable, print_checks
from kvbench.runs.prompt import encode_all
from kvbench.runs.task_calls import grade_output, read_samples
from kvbench.validation import SettingError, call_hook, is_number

WRONG = ("", "?", "no answer at all")  # outputs that a task must be able to score, beside the right answers


@dataclass(frozen=True)
class TaskUnderTest:
    """The task under test, and the model whose tokenizer it is given."""

    name: str
    given: Sequence[str]
    """Settings of the command line, such as "task.length=4096" or "limit=5"."""
    checkpoint: Checkpoint

    @property
    def owner(self) -> str:
        return f"task={self.name}"

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The task's settings. No samples are read from the disk, because each call must make them anew."""
        with catalogue.translate_errors():
            settings = catalogue.resolve("task", compose_config([self.owner, *self.given]).task)
        return settings | ({"cache": None} if "cache" in settings else {})

    def construct(self) -> Task:
        """Make the task anew.

        Raises:
            SettingError: There is no such task or setting, its class cannot be used, or it reads no texts.
        """
        task: Task = catalogue.build("task", self.settings)
        if getattr(task, "measures", False):
            raise SettingError(f"{self.owner}: reads random tokens and has no samples to check")
        return task

    def build(self) -> Task:
        """Make the task anew, and let it check its settings and data."""
        task = self.construct()
        call_hook(self.owner, "check", task.check)
        return task

    @cached_property
    def tokenizer(self) -> Any:
        return self.checkpoint.tokenizer()

    def make_samples(self, task: Task) -> list[Sample]:
        """Let a task make its samples, and check each."""
        added, longest = count_template_tokens(self.tokenizer), self.checkpoint.longest()
        return list(read_samples(self.owner, task, self.tokenizer, added, longest))

    @cached_property
    def task(self) -> Task:
        """The task that makes `samples`. Only this one can score them."""
        return self.build()

    @cached_property
    def samples(self) -> list[Sample]:
        return self.make_samples(self.task)


def check_data(subject: TaskUnderTest) -> str:
    """Check that settings and data can be used, and that the fingerprint is a text and the same when built again."""
    prints = [call_hook(subject.owner, "fingerprint", subject.build().fingerprint) for _ in range(2)]
    if not isinstance(prints[0], str) or not prints[0]:
        raise CheckFailed(f"fingerprint returned {prints[0]!r:.60}, expected a text")
    if prints[0] != prints[1]:
        raise CheckFailed("fingerprint differs between two tasks of the same settings")
    return f"fingerprint {prints[0][:16]}"


def check_samples(subject: TaskUnderTest) -> str:
    """Check that there are samples, that each is complete, and that their uids differ."""
    samples = subject.samples
    if not samples:
        raise CheckFailed("samples gave none")
    return f"{len(samples)} samples, {len({sample.subtask for sample in samples})} subtasks"


def check_repeat(subject: TaskUnderTest) -> str:
    """Check that a second call gives the same samples in the same order."""
    samples, again = subject.samples, subject.make_samples(subject.build())
    for number, (first, second) in enumerate(zip(samples, again, strict=False), 1):
        for field in fields(Sample):
            if getattr(first, field.name) != getattr(second, field.name):
                raise CheckFailed(f"sample {number}: {field.name} differs between two calls with the same settings")
    if len(samples) != len(again):
        raise CheckFailed(f"one call gives {len(samples)} samples, the next {len(again)}")
    return "two calls give the same"


def check_length(subject: TaskUnderTest) -> str:
    """Check that every prompt and its answer are as long as the task says, or as the model takes."""
    length, longest = subject.task.length, subject.checkpoint.longest()
    allowed = f"task.length is {length}" if length is not None else f"the model takes {longest}"
    most = 0
    for uid, (sample, prompt) in encode_all(subject.tokenizer, subject.samples).items():
        tokens = len(prompt.ids) + prompt.unknown
        if tokens + sample.max_new_tokens > (longest if length is None else length):
            raise CheckFailed(f"{uid}: {tokens} tokens of prompt and {sample.max_new_tokens} of answer, and {allowed}")
        most = max(most, tokens)
    return f"the longest prompt has {most} tokens, and {allowed}"


def check_grade(where: str, grade: Graded) -> None:
    """Raise CheckFailed if parts of a score beside its number have wrong types."""
    if not isinstance(grade.answer, str):
        raise CheckFailed(f"{where}: answer is {type(grade.answer).__name__}, expected a text")
    if not isinstance(grade.also, Mapping):
        raise CheckFailed(f"{where}: also is {type(grade.also).__name__}, expected names and numbers")
    for name, value in grade.also.items():
        if not (value is None or isinstance(value, bool) or is_number(value)):
            raise CheckFailed(f"{where}: {name} is {value!r:.60}, expected a number, true, false or None")


def check_scores(subject: TaskUnderTest) -> str:
    """Check that right, wrong and empty outputs get a score from 0 to 100, and the same one when asked again."""
    samples, task, scored = subject.samples, subject.task, 0
    for sample in samples:
        for output in (*sample.answers, " ".join(sample.answers), *WRONG):
            grade, again = (grade_output(subject.owner, task, sample, output) for _ in range(2))
            check_grade(f"score of {sample.uid}", grade)
            if grade != again:
                raise CheckFailed(f"score of {sample.uid} differs between two calls with the output {output!r:.40}")
            scored += 1
    return f"{scored} outputs"


def check_reference(subject: TaskUnderTest) -> str:
    """Check that right answers score in every subtask. Some metrics give a few of them less than 100, or nothing."""
    samples, task = subject.samples, subject.task
    if (reference := getattr(task, "reference", None)) is None:
        raise NotApplicable("it has no `reference`, so fidelity=true is refused")
    scores: dict[str, list[float]] = {}
    for sample in samples:
        text = call_hook(subject.owner, "reference", partial(reference, sample), f" of {sample.uid}")
        if not isinstance(text, str):
            raise CheckFailed(f"reference of {sample.uid} returned {type(text).__name__}, expected a text")
        scores.setdefault(sample.subtask, []).append(grade_output(subject.owner, task, sample, text).score)
    for subtask, subtask_scores in scores.items():
        if not any(subtask_scores):
            raise CheckFailed(f"{subtask}: every `reference` scores 0")
    least = min(sum(subtask_scores) / len(subtask_scores) for subtask_scores in scores.values())
    return f"{least:g} or more in each subtask"


CHECKS: tuple[tuple[str, Callable[[TaskUnderTest], str]], ...] = (
    ("settings and data can be used", check_data),
    ("samples are complete and differ by uid", check_samples),
    ("samples are the same every time", check_repeat),
    ("prompts are not too long", check_length),
    ("scores lie in 0 to 100", check_scores),
    ("right answers score", check_reference),
)


def run_checks(subject: TaskUnderTest) -> int:
    """Print a line for each check; return how many failed."""
    return print_checks([(title, partial(check, subject)) for title, check in CHECKS])


def print_subject(subject: TaskUnderTest) -> None:
    """Print the task's class and settings, and which of its sources are hashed."""
    target = subject.settings["_target_"]
    settings = {key: value for key, value in subject.settings.items() if key not in ("_target_", "name", "preset")}
    print(f"{subject.owner}: {target} {settings or 'without settings'}")
    print(f"model={subject.checkpoint.name}: its tokenizer; it takes {subject.checkpoint.longest()} tokens")
    hashed = [name for name in source_hashes([target.rpartition(".")[0]]) if name.split(".")[0] != "kvbench"]
    if hashed:
        print(f"hashed with it: {', '.join(hashed)}")

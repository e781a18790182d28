"""A ledger of sums that build on one another: an answer of a thousand tokens whose end needs what it wrote early.

kvbench makes this task; it is no published benchmark. Line n of the ledger adds a number to the result of an earlier
line or subtracts one (`Line 45: line 12 plus 7.`). The first STARTS lines begin with a number. The answer works out
line after line (`Line 45: line 12 is 38, 38 + 7 = 45`) and closes with the results of a few lines (`Results: line 9 is
52, …`). So every step reads a row of the prompt and a generated row, at distances from one line to the whole answer.

Drawing is separate from rendering. A line builds on any line before it with equal chance, so chains have about
log(steps) lines, and an error reaches few other lines. Every result in [10, 99] that is at most `largest` away has
equal chance, so all results have two digits. The lines to recall are drawn from the first `early` of the ledger. Starts
are left out, because they can be computed from the prompt. No line behind that part builds on a recalled line, so its
result is written there for the last time.
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from fractions import Fraction
from hashlib import sha256
from math import ceil

from kvbench.interfaces.task import Graded, Sample, Tokenizer
from kvbench.tasks.common.axes import parse_axis
from kvbench.tasks.ledger.answer_parser import WrittenSum, parse_answer
from kvbench.validation import SettingError, exact_share, is_number, require_int

STARTS = 4
LEAST, MOST = 10, 99  # the smallest and the largest result
EXAMPLE = 901  # number of the example's first line: no ledger has that many lines
WORDS = {"+": "plus", "-": "minus"}
SLACK = 1.25, 64  # an answer may have so many times the tokens it needs, rounded up to a multiple

CONTEXT = """\
Work out a ledger line by line. Each line adds two numbers or subtracts one from the other, and "line 7" stands for \
the result of line 7. Write every line as the example does, and then the results that are asked for.

Example:
{example}

Answer:
{solved}

Ledger:
{lines}"""
QUESTION = """

Work out all {steps} lines in order, then write again the results of lines {first} and {last}.

Answer:"""
PREFIX = "\n"


@dataclass(frozen=True)
class Step:
    """A line of the ledger: `left sign right`.

    Attributes:
        line: The line whose result is `left`; None if `left` is a number of its own.
        left: The first number.
        sign: ``+`` or ``-``.
        right: The second number.
    """

    line: int | None
    left: int
    sign: str
    right: int

    @property
    def result(self) -> int:
        """The line's result."""
        return self.left + self.right if self.sign == "+" else self.left - self.right

    def render_lines(self) -> str:
        """Render the line as the ledger has it."""
        left = self.left if self.line is None else f"line {self.line}"
        return f"{left} {WORDS[self.sign]} {self.right}."

    def render_solution(self) -> str:
        """Render the line as the answer works it out."""
        named = "" if self.line is None else f"line {self.line} is {self.left}, "
        return f"{named}{self.left} {self.sign} {self.right} = {self.result}"

    def matches(self, written: WrittenSum) -> bool:
        """Whether the answer copied the line rightly, whatever the result of the line that it builds on."""
        named = written.line in (None, self.line) if self.line else written.left == self.left
        return named and (written.sign, written.right) == (self.sign, self.right)


@dataclass(frozen=True)
class Ledger:
    """The lines by their numbers, and the numbers of the lines whose results are asked, in order."""

    steps: Mapping[int, Step]
    recalled: tuple[int, ...]

    def render_lines(self) -> str:
        """Render the ledger."""
        return "\n".join(f"Line {line}: {step.render_lines()}" for line, step in self.steps.items())

    def render_solution(self) -> str:
        """Render the right answer."""
        lines = "\n".join(f"Line {line}: {step.render_solution()}" for line, step in self.steps.items())
        return f"{lines}\nResults: {', '.join(f'line {line} is {self.steps[line].result}' for line in self.recalled)}."

    def context(self) -> str:
        """Render the prompt up to the question."""
        return CONTEXT.format(
            example=EXAMPLE_LEDGER.render_lines(), solved=EXAMPLE_LEDGER.render_solution(), lines=self.render_lines()
        )

    def question(self) -> str:
        """Render the question."""
        *first, last = self.recalled
        return QUESTION.format(steps=len(self.steps), first=", ".join(map(str, first)), last=last)


EXAMPLE_LEDGER = Ledger(
    {EXAMPLE: Step(None, 31, "+", 24), EXAMPLE + 1: Step(EXAMPLE, 55, "-", 9)}, recalled=(EXAMPLE + 1, EXAMPLE)
)


def draw_ledger(steps: int, recalled: int, early: float, largest: int, rng: random.Random) -> Ledger:
    """Draw a ledger.

    Args:
        steps: Number of lines.
        recalled: Number of lines whose results are asked.
        early: The part of the ledger from which these are drawn. ⌊early · steps⌋ must be at least STARTS + recalled.
        largest: The largest difference between a line's first number and its result.
        rng: The sample's generator.
    """
    last = exact_share(early, steps)
    asked = rng.sample(range(STARTS + 1, last + 1), recalled)
    made: dict[int, Step] = {}
    for line in range(1, steps + 1):
        used = None
        if line > STARTS:
            used = rng.choice([earlier for earlier in made if line <= last or earlier not in asked])
        left = rng.randint(LEAST, MOST) if used is None else made[used].result
        near = range(max(LEAST, left - largest), min(MOST, left + largest) + 1)
        result = rng.choice([number for number in near if number != left])
        made[line] = Step(used, left, "+" if result > left else "-", abs(result - left))
    return Ledger(made, tuple(asked))


@dataclass(frozen=True)
class LedgerTask:
    """The task. conf/task/ledger.yaml describes its settings."""

    steps: int | Sequence[int] | Mapping[str, int]
    recalled: int
    early: float
    largest: int
    max_new_tokens: int | None
    samples: InitVar[int]  # kept as `per_subtask`, because `samples` is the protocol's method
    seed: int = 0
    limit: int | None = None
    name: str = "ledger"
    per_subtask: int = field(init=False)

    length = None  # a prompt is as long as its ledger

    def __post_init__(self, samples: int) -> None:
        object.__setattr__(self, "per_subtask", samples)

    def check(self) -> None:
        """Check the settings. This needs no tokenizer, so `samples` may still find a ledger too long for the model.

        Raises:
            SettingError: A setting is invalid.
        """
        require_int("task.recalled", self.recalled, 2)
        if not is_number(self.early) or not 0 < self.early <= 1:
            raise SettingError(f"task.early={self.early}: a number in (0, 1]")
        require_int("task.largest", self.largest, 1)
        if self.largest > MOST - LEAST:
            raise SettingError(f"task.largest={self.largest}: at most {MOST - LEAST}")
        require_int("task.samples", self.per_subtask, 1)
        if self.max_new_tokens is not None:
            require_int("task.max_new_tokens", self.max_new_tokens, 1)
        if self.limit is not None:
            require_int("limit", self.limit, 1)
        for steps in self._steps():
            if exact_share(self.early, steps) < STARTS + self.recalled:
                least = ceil((STARTS + self.recalled) / Fraction(str(self.early)))
                settings = f"task.recalled={self.recalled} and task.early={self.early}"
                if least >= EXAMPLE:
                    raise SettingError(f"{settings}: fewer or a larger part; no ledger has {least} lines")
                raise SettingError(f"task.steps={steps}: at least {least} with {settings}")

    def fingerprint(self) -> str:
        """Hash the wording."""
        return sha256("\0".join([EXAMPLE_LEDGER.context(), EXAMPLE_LEDGER.question(), PREFIX]).encode()).hexdigest()

    def count_samples(self) -> dict[str, int]:
        """Return the number of ledgers of each size."""
        return {f"{self.name}_{steps}": self._count for steps in self._steps()}

    def samples(self, tokenizer: Tokenizer, template_tokens: int, longest: int) -> Iterator[Sample]:
        """Yield the samples size by size."""
        for steps in self._steps():
            for index in range(self._count):
                yield self._sample(tokenizer, template_tokens, longest, steps, index)

    def reference(self, sample: Sample) -> str:
        """Return the right answer: all lines worked out."""
        return self._ledger(sample.meta["steps"], sample.uid).render_solution()

    def score(self, sample: Sample, output: str) -> Graded:
        """Score the share of the asked results that the answer gives. `answer_parser` says what it reads.

        Further metrics, in points:
            recalled_own: The share of the asked results that are given as the answer itself worked them out.
            steps: The share of all lines with the right result.
            holds: The share of the written lines whose sum is right. If not, the model cannot add.
            read: The share of the written lines that are copied rightly. If not, a row of the prompt was lost.
            carried: The share of the written lines that build on another line and begin with the result that the answer
                worked out for it. If not, a generated row was lost.
            ended: Whether the answer came to all asked results.
        """
        ledger = self._ledger(sample.meta["steps"], sample.uid)
        sums, results = parse_answer(output, ledger.recalled)
        by_line: dict[int, WrittenSum] = {}
        carried: dict[int, bool] = {}
        for line, written in sums:
            if step := ledger.steps.get(line):
                named = written.line or step.line
                before = None if named is None else by_line.get(named)
                carried |= {} if step.line is None else {line: before is not None and before.result == written.left}
                by_line[line] = written
        said = {line: written.result for line, written in by_line.items()}
        also = {
            "recalled_own": _share(line in said and said[line] == results.get(line) for line in ledger.recalled),
            "steps": _share(said.get(line) == step.result for line, step in ledger.steps.items()),
            "holds": _share(written.holds for written in by_line.values()),
            "read": _share(ledger.steps[line].matches(written) for line, written in by_line.items()),
            "carried": _share(carried.values()),
            "ended": len(results) == len(ledger.recalled),
        }
        right = [results.get(line) == ledger.steps[line].result for line in ledger.recalled]
        given = (f"line {line} is {result}" for line, result in results.items() if result is not None)
        return Graded(100 * sum(right) / len(right), ", ".join(given), also)

    @property
    def _count(self) -> int:
        return self.per_subtask if self.limit is None else min(self.per_subtask, self.limit)

    def _steps(self) -> list[int]:
        return parse_axis("task.steps", self.steps, 1, EXAMPLE - 1)

    def _ledger(self, steps: int, uid: str) -> Ledger:
        return draw_ledger(steps, self.recalled, self.early, self.largest, random.Random(f"{self.seed}/{uid}"))

    def _sample(self, tokenizer: Tokenizer, template_tokens: int, longest: int, steps: int, index: int) -> Sample:
        def tokens(text: str) -> int:
            return len(tokenizer.encode(text, add_special_tokens=False))

        uid = f"{self.name}/{steps}/{index}"
        ledger = self._ledger(steps, uid)
        times, multiple = SLACK
        new_tokens = self.max_new_tokens or multiple * ceil(times * tokens(ledger.render_solution()) / multiple)
        needed = tokens(ledger.context() + ledger.question() + PREFIX) + template_tokens + new_tokens
        if needed > longest:
            settings = f"task.max_new_tokens={self.max_new_tokens}, " * (self.max_new_tokens is not None)
            settings += f"task.steps={steps}"
            raise SettingError(f"{settings}: {needed} tokens with this tokenizer, the model takes {longest}")
        return Sample(
            uid,
            f"{self.name}_{steps}",
            ledger.context(),
            ledger.question(),
            PREFIX,
            tuple(str(ledger.steps[line].result) for line in ledger.recalled),
            new_tokens,
            group=uid,
            meta={"steps": steps, "recalled": list(ledger.recalled)},
        )


def _share(flags: Iterable[bool]) -> float | None:
    """Return the share in points; None for an empty list."""
    listed = list(flags)
    return 100 * sum(listed) / len(listed) if listed else None

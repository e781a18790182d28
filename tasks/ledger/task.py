"""A ledger of sums that build on one another: an answer of a thousand tokens whose end needs what it wrote early.

Made by kvbench, no benchmark. Line n of the ledger adds a number to the result of an earlier line or takes one away
(`Line 45: line 12 plus 7.`); the first STARTS lines begin with a number. The answer works out line after line
(`Line 45: line 12 is 38, 38 + 7 = 45`) and closes with the results of a few lines (`Results: line 9 is 52, …`). So
every step reads a row of the prompt and one that was generated, at distances from one line to the whole answer.

Drawing is apart from rendering. A line builds on any line before it, each as likely, so chains have about log(steps)
lines and an error reaches few others. Each result in [10, 99] at most `largest` away is as likely, so nothing wraps and
all have two digits. Lines to recall are drawn among the first `early` of the ledger, no starts (these could be computed
from the prompt), and no line behind that part builds on them: their results are last written there.
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from fractions import Fraction
from hashlib import sha256
from itertools import islice
from math import ceil

from kvbench.interfaces.task import Graded, Sample, Tokenizer
from kvbench.tasks.common.axes import parse_axis
from kvbench.tasks.ledger.answer_parser import WrittenSum, parse_answer
from kvbench.validation import SettingError, exact_share, is_number, require_int

STARTS = 4
LEAST, MOST = 10, 99  # of a result
EXAMPLE = 901  # its first line: no ledger has that many
WORDS = {"+": "plus", "-": "minus"}
SLACK = 1.25, 64  # an answer may be that many times as long as it must, rounded up to a multiple

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
    """`left` is a number of its own, or the result of line `line`."""

    line: int | None
    left: int
    sign: str
    right: int

    @property
    def result(self) -> int:
        return self.left + self.right if self.sign == "+" else self.left - self.right

    def render_lines(self) -> str:
        left = self.left if self.line is None else f"line {self.line}"
        return f"{left} {WORDS[self.sign]} {self.right}."

    def render_solution(self) -> str:
        named = "" if self.line is None else f"line {self.line} is {self.left}, "
        return f"{named}{self.left} {self.sign} {self.right} = {self.result}"

    def matches(self, written: WrittenSum) -> bool:
        """Whether the line is written down as the ledger has it, whatever the result of the line that it builds on."""
        named = written.line in (None, self.line) if self.line else written.left == self.left
        return named and (written.sign, written.right) == (self.sign, self.right)


@dataclass(frozen=True)
class Ledger:
    """Lines by their numbers, and the numbers of those whose results are asked for, in order."""

    steps: Mapping[int, Step]
    recalled: tuple[int, ...]

    def render_lines(self) -> str:
        return "\n".join(f"Line {line}: {step.render_lines()}" for line, step in self.steps.items())

    def render_solution(self) -> str:
        """The answer: what the prompt asks for and the score reads."""
        lines = "\n".join(f"Line {line}: {step.render_solution()}" for line, step in self.steps.items())
        return f"{lines}\nResults: {', '.join(f'line {line} is {self.steps[line].result}' for line in self.recalled)}."

    def context(self) -> str:
        return CONTEXT.format(
            example=EXAMPLE_LEDGER.render_lines(), solved=EXAMPLE_LEDGER.render_solution(), lines=self.render_lines()
        )

    def question(self) -> str:
        *first, last = self.recalled
        return QUESTION.format(steps=len(self.steps), first=", ".join(map(str, first)), last=last)


EXAMPLE_LEDGER = Ledger(
    {EXAMPLE: Step(None, 31, "+", 24), EXAMPLE + 1: Step(EXAMPLE, 55, "-", 9)}, recalled=(EXAMPLE + 1, EXAMPLE)
)


def draw_ledger(steps: int, recalled: int, early: float, largest: int, rng: random.Random) -> Ledger:
    """A ledger of `steps` lines; ⌊early · steps⌋ is at least STARTS + recalled."""
    last = exact_share(early, steps)
    asked = rng.sample(range(STARTS + 1, last + 1), recalled)
    made: dict[int, Step] = {}
    for line in range(1, steps + 1):
        used = None
        if line > STARTS:
            used = rng.choice([own for own in made if line <= last or own not in asked])
        left = rng.randint(LEAST, MOST) if used is None else made[used].result
        near = range(max(LEAST, left - largest), min(MOST, left + largest) + 1)
        result = rng.choice([own for own in near if own != left])
        made[line] = Step(used, left, "+" if result > left else "-", abs(result - left))
    return Ledger(made, tuple(asked))


@dataclass(frozen=True)
class LedgerTask:
    """The task; its settings are described in conf/task/ledger.yaml."""

    steps: int | Sequence[int] | Mapping[str, int]
    recalled: int
    early: float
    largest: int
    max_new_tokens: int | None
    samples: InitVar[int]  # required; kept as `per_subtask`, since `samples` is the protocol's method
    seed: int = 0
    limit: int | None = None
    name: str = "ledger"
    per_subtask: int = field(init=False)

    length = None  # what the answer needs

    def __post_init__(self, samples: int):
        object.__setattr__(self, "per_subtask", samples)

    def check(self) -> None:
        """Raises a SettingError; needs no tokenizer, so a ledger may still prove too long in `samples`."""
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
        """Hash of the wording."""
        return sha256("\0".join([EXAMPLE_LEDGER.context(), EXAMPLE_LEDGER.question(), PREFIX]).encode()).hexdigest()

    def samples(self, tokenizer: Tokenizer, template_tokens: int, longest: int) -> Iterator[Sample]:
        """Size by size."""
        for steps in self._steps():
            for index in islice(range(self.per_subtask), self.limit):
                yield self._sample(tokenizer, template_tokens, longest, steps, index)

    def reference(self, sample: Sample) -> str:
        """All lines worked out."""
        return self._ledger(sample.meta["steps"], sample.uid).render_solution()

    def score(self, sample: Sample, output: str) -> Graded:
        """The share of the results asked for that the answer gives (`ledger_answer` says what it reads).

        Also, in points: `recalled_own`, the share that it gives as it worked them out, right or wrong; `steps`, the
        share of all lines with the right result. Of the lines that it wrote down the share whose sum `holds` (else it
        cannot add), that is `read` as the prompt has it (else a row of the prompt was lost), and, if it builds on a
        line, whose first number is `carried` over as the answer itself worked it out (else a generated row was lost).
        `ended`: whether it came to all results.
        """
        ledger = self._ledger(sample.meta["steps"], sample.uid)
        sums, found = parse_answer(output, ledger.recalled)
        own: dict[int, WrittenSum] = {}
        carried: dict[int, bool] = {}
        for line, written in sums:
            if step := ledger.steps.get(line):
                before = own.get(written.line or step.line)
                carried |= {} if step.line is None else {line: before is not None and before.result == written.left}
                own[line] = written
        said = {line: written.result for line, written in own.items()}
        also = {
            "recalled_own": _share(line in said and said[line] == found.get(line) for line in ledger.recalled),
            "steps": _share(said.get(line) == step.result for line, step in ledger.steps.items()),
            "holds": _share(written.holds for written in own.values()),
            "read": _share(ledger.steps[line].matches(written) for line, written in own.items()),
            "carried": _share(carried.values()),
            "ended": len(found) == len(ledger.recalled),
        }
        score = _share(found.get(line) == ledger.steps[line].result for line in ledger.recalled)
        given = (f"line {line} is {result}" for line, result in found.items() if result is not None)
        return Graded(score, ", ".join(given), also)

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


def _share(found: Iterable[bool]) -> float | None:
    """In points; None of nothing."""
    found = list(found)
    return 100 * sum(found) / len(found) if found else None

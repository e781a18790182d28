"""Read an answer to a ledger: the sum of each line, and the results at its end.

Markdown and brackets are ignored, and words may replace signs.

A sum of two numbers stands in a text line that begins with `Line 45`, maybe behind a bullet or a number. The last sum
of the text line counts: `Line 45: so 38 plus 7 = 45`.

Results stand behind the word `Results`. If the word appears several times, the one counts that most of the asked lines
follow, and the last of these. A result stands behind its `line 45` on the same text line. It is the first number after
the last equals sign, or the first number if there is none (`line 5 is 12`, `- Line 5: 38 + 7 = 45`, `| line 5 | 12 |`).
A line with two different results has none. Lines that were not asked do not matter.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

DIGITS = r"\d{1,18}"  # an answer that loops writes longer numbers, which mean nothing
BLANK = re.compile(r"[*_`$\\()\[\] \t]+")
SIGNS = {"−": "-", "–": "-", "plus": "+", "minus": "-", "equals": "="}
SIGN = re.compile("|".join(rf"\b{sign}\b" if sign.isalpha() else sign for sign in SIGNS), re.IGNORECASE)
STEP = re.compile(rf"^[^a-z\n]*line ({DIGITS})\b(.*)$", re.IGNORECASE | re.MULTILINE)
NAMED = re.compile(rf"\bline ({DIGITS})\b", re.IGNORECASE)
SUM = re.compile(
    rf"(?<![\d.])(?<!line )({DIGITS}) ?([+-]) ?({DIGITS}) ?= ?(-?{DIGITS})(?!\d|\.\d| ?[+-] ?\d)", re.IGNORECASE
)  # a sum of values: no number of a line, and its result does not begin another sum
HEADING = re.compile(r"\bresults\b", re.IGNORECASE)
ITEM = re.compile(rf"\bline ({DIGITS})\b(.*?)(?=\bline\b|$)", re.IGNORECASE | re.MULTILINE)
WHOLE = re.compile(rf"-?{DIGITS}$")
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:[.,]\d+)*")


@dataclass(frozen=True)
class WrittenSum:
    """A sum that an answer has written: `left sign right = result`.

    Attributes:
        line: The line that is named last before the sum; None if none is.
        left: The first number.
        sign: ``+`` or ``-``.
        right: The second number.
        result: The result as written, right or wrong.
    """

    line: int | None
    left: int
    sign: str
    right: int
    result: int

    @property
    def holds(self) -> bool:
        """Whether the result is right."""
        return self.result == (self.left + self.right if self.sign == "+" else self.left - self.right)


def parse_answer(
    output: str, asked: Collection[int]
) -> tuple[Sequence[tuple[int, WrittenSum]], Mapping[int, int | None]]:
    """Read an answer.

    Args:
        output: The answer.
        asked: The lines whose results are asked.

    Returns:
        Each line with its sum, in the order of the answer; and the results of asked lines at the end, None for a line
        whose result is no whole number or is written differently.
    """
    text = BLANK.sub(" ", SIGN.sub(lambda match: SIGNS[match[0].lower()], output))
    edges = [*(heading.start() for heading in HEADING.finditer(text)), len(text)]
    ends = [(begin, results) for begin, end in pairwise(edges) if (results := _results(text[begin:end], asked))]
    begin, results = max(ends, key=lambda end: (len(end[1]), end[0]), default=(len(text), {}))
    return list(_sums(text[:begin])), results


def _sums(text: str) -> Iterator[tuple[int, WrittenSum]]:
    for line, said in STEP.findall(text):
        if sums := list(SUM.finditer(said)):
            named = NAMED.findall(said[: sums[-1].start()])
            left, sign, right, result = sums[-1].groups()
            yield int(line), WrittenSum(int(named[-1]) if named else None, int(left), sign, int(right), int(result))


def _results(text: str, asked: Collection[int]) -> dict[int, int | None]:
    texts: dict[int, set[str]] = {}
    for line, said in ITEM.findall(text):
        if int(line) in asked and (numbers := NUMBER.findall(said.rpartition("=")[2])):
            texts.setdefault(int(line), set()).add(numbers[0].lstrip("0"))
    return {line: _only_number(numbers_of_line) for line, numbers_of_line in texts.items()}


def _only_number(written: set[str]) -> int | None:
    """Return the number, if it is a whole one and always the same."""
    first, *others = written
    return int(first) if not others and WHOLE.match(first) else None

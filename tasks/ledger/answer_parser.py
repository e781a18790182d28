"""What an answer to a ledger says: the sum of each line, and the results at its end.

Markdown and brackets count for nothing, words may stand for signs. A sum of two numbers stands in a text line that
begins with `Line 45`, perhaps behind a bullet or a number; the last one there counts: `Line 45: so 38 plus 7 = 45`.

Results stand behind the word `Results` (of several the one that most of the lines asked for follow, the last of these),
each behind its `line 45` on the same text line: the number after the last equals sign, else the first one (`line 5 is
12`, `- Line 5: 38 + 7 = 45`, `| line 5 | 12 |`). A line with two different results has none; lines that were not asked
for do not matter.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

DIGITS = r"\d{1,18}"  # an answer that loops writes numbers that nobody can mean
BLANK = re.compile(r"[*_`$\\()\[\] \t]+")
SIGNS = {"−": "-", "–": "-", "plus": "+", "minus": "-", "equals": "="}
SIGN = re.compile("|".join(rf"\b{own}\b" if own.isalpha() else own for own in SIGNS), re.IGNORECASE)
STEP = re.compile(rf"^[^a-z\n]*line ({DIGITS})\b(.*)$", re.IGNORECASE | re.MULTILINE)
NAMED = re.compile(rf"\bline ({DIGITS})\b", re.IGNORECASE)
SUM = re.compile(
    rf"(?<![\d.])(?<!line )({DIGITS}) ?([+-]) ?({DIGITS}) ?= ?(-?{DIGITS})(?!\d|\.\d| ?[+-] ?\d)", re.IGNORECASE
)  # of values, not of a line's number; what it gives begins no further sum
HEADING = re.compile(r"\bresults\b", re.IGNORECASE)
ITEM = re.compile(rf"\bline ({DIGITS})\b(.*?)(?=\bline\b|$)", re.IGNORECASE | re.MULTILINE)
WHOLE = re.compile(rf"-?{DIGITS}$")
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:[.,]\d+)*")


@dataclass(frozen=True)
class WrittenSum:
    """`left sign right = result`; `line` is the one that is named last before it, None: none is."""

    line: int | None
    left: int
    sign: str
    right: int
    result: int

    @property
    def holds(self) -> bool:
        return self.result == (self.left + self.right if self.sign == "+" else self.left - self.right)


def parse_answer(
    output: str, asked: Collection[int]
) -> tuple[Sequence[tuple[int, WrittenSum]], Mapping[int, int | None]]:
    """Lines and their sums as they follow one another; the results of lines asked for that stand at the end, None where
    it is no whole number or not always the same.
    """
    text = BLANK.sub(" ", SIGN.sub(lambda found: SIGNS[found[0].lower()], output))
    edges = [*(heading.start() for heading in HEADING.finditer(text)), len(text)]
    ends = [(begin, found) for begin, end in pairwise(edges) if (found := _results(text[begin:end], asked))]
    begin, found = max(ends, key=lambda own: (len(own[1]), own[0]), default=(len(text), {}))
    return list(_sums(text[:begin])), found


def _sums(text: str) -> Iterator[tuple[int, WrittenSum]]:
    for line, said in STEP.findall(text):
        if sums := list(SUM.finditer(said)):
            named = NAMED.findall(said[: sums[-1].start()])
            left, sign, right, result = sums[-1].groups()
            yield int(line), WrittenSum(int(named[-1]) if named else None, int(left), sign, int(right), int(result))


def _results(text: str, asked: Collection[int]) -> dict[int, int | None]:
    found: dict[int, set[str]] = {}
    for line, said in ITEM.findall(text):
        if int(line) in asked and (numbers := NUMBER.findall(said.rpartition("=")[2])):
            found.setdefault(int(line), set()).add(numbers[0].lstrip("0"))
    return {line: int(*own) if len(own) == 1 and WHOLE.match(*own) else None for line, own in found.items()}

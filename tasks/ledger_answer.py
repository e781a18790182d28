"""What an answer to a ledger says: the sum of each line, and the results at its end.

Marks of markdown count for nothing, and words may stand for signs. A sum stands in a text line that begins with
`Line 45`, perhaps behind a bullet; of several there the last counts: `Line 45: line 12 is 38, so 38 plus 7 = 45`.

Results stand behind the last `Results` that one of the lines asked for follows, each behind its `line 45` on the same
text line: the number after the last equals sign, else the first number (`line 5 is 12`, `- Line 5: 38 + 7 = 45`,
`| line 5 | 12 |`). A line that is given two different results has none; lines not asked for do not matter.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

MARKS = re.compile(r"[*_`$\\]")
SIGNS = {"−": "-", "–": "-", "plus": "+", "minus": "-", "equals": "="}
SIGN = re.compile("|".join(rf"\b{own}\b" if own.isalpha() else own for own in SIGNS), re.IGNORECASE)
STEP = re.compile(r"^[^\w\n]*line[ \t]+(\d+)\b(.*)$", re.IGNORECASE | re.MULTILINE)
SUM = re.compile(r"(?<![\d.])(\d+)\s*([+-])\s*(\d+)\s*=\s*(-?\d+)(?![\d.]*\d)")
NAMED = re.compile(r"\bline\s+(\d+)\b", re.IGNORECASE)
HEADING = re.compile(r"\bresults\b", re.IGNORECASE)
ITEM = re.compile(r"\bline\s+(\d+)\b(.*?)(?=\bline\b|$)", re.IGNORECASE | re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:[.,]\d+)*")


@dataclass(frozen=True)
class Written:
    """`left sign right = result`; `line` is the one that is named last before it, None: none is."""

    line: int | None
    left: int
    sign: str
    right: int
    result: int

    @property
    def holds(self) -> bool:
        return self.result == (self.left + self.right if self.sign == "+" else self.left - self.right)


def sums(output: str) -> Iterator[tuple[int, Written]]:
    """Lines and their sums in the order in which they are written."""
    for line, text in STEP.findall(_plain(output)):
        if found := list(SUM.finditer(text)):
            left, sign, right, result = found[-1].groups()
            named = NAMED.findall(text[: found[-1].start()])
            yield int(line), Written(int(named[-1]) if named else None, int(left), sign, int(right), int(result))


def results(output: str, asked: Collection[int]) -> Mapping[int, int | None]:
    """The results at the end by their lines, as far as they are asked for; None: no number, or two different ones."""
    text = _plain(output)
    for heading in reversed(list(HEADING.finditer(text))):
        found: dict[int, set[int | None]] = {}
        for line, said in ITEM.findall(text[heading.end() :]):
            numbers = NUMBER.findall(said.rpartition("=")[2])
            if int(line) in asked and numbers:
                found.setdefault(int(line), set()).add(int(numbers[0]) if numbers[0].lstrip("-").isdigit() else None)
        if found:
            return {line: own.pop() if len(own) == 1 else None for line, own in found.items()}
    return {}


def _plain(output: str) -> str:
    return SIGN.sub(lambda found: SIGNS[found[0].lower()], MARKS.sub("", output))

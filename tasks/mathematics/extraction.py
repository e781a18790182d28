r"""The final answer in a model's output.

`extract_boxed` is what stands in the last \boxed{} that is closed (braces balanced as TeX balances them) and not empty.
`extract_flexible` takes that, else what follows the last "answer is" or "answer:", else the last number or `$…$`; where
the output closes its thinking with </think>, it looks for these two only behind it. `extract_first_box` is kvpress's
reading of MATH-500 (evaluation/benchmarks/math500/calculate_metrics.py): from the first "boxed{" to the next "}".
"""

import re
from collections import deque

CLOSED = "</think>"
FEW = 3  # words of what is called the answer, up to which all of it is

_BRACE = re.compile(r"\\f?box(?:ed)?\s*\{|\\.|[{}]", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_SAID = re.compile(r"answer\s*(?:\*\*)?\s*(?:is\s*:?|:|=)", re.IGNORECASE)
_LAST = re.compile(
    r"(?<!\\)\$(?P<tex>(?:\\.|[^$\\\n])+)\$"  # between dollar signs that are no amounts of money
    r"|(?P<number>-?[0-9](?:[0-9,]*[0-9])?(?:\.[0-9]+)?(?:/[0-9]+)?)"
)


def extract_boxed(output: str) -> str | None:
    """What stands in the last closed box that is not empty, if there is one."""
    opened: list[int | None] = []  # for every brace that is open: where the content of its box begins
    last: tuple[int, int] | None = None
    for found in _BRACE.finditer(output):
        if found[0] == "}":
            start = opened.pop() if opened else None
            if start is not None and (last is None or start > last[0]) and output[start : found.start()].strip():
                last = start, found.start()
        elif found[0].endswith("{") and found[0] != r"\{":
            opened.append(found.end() if _BOX.fullmatch(found[0]) else None)
    return output[slice(*last)].strip() if last else None


def extract_flexible(output: str) -> str | None:
    """The last box, else what is called the answer, else the last number or formula, if there is one."""
    box = extract_boxed(output)
    if box is not None:
        return box
    _, closed, rest = output.rpartition(CLOSED)
    text = rest if closed and rest.strip() else output
    said = _find_last(_SAID, text)
    line = text[said.end() if said else len(text) :].partition("\n")[0].strip(" .*:")
    first = _LAST.search(line)
    if line and (first is None or not first["tex"] and len(line.split()) <= FEW):
        return line
    last = first or _find_last(_LAST, text)
    return (last["tex"] or last["number"]).strip() if last else None


def extract_first_box(output: str) -> str | None:
    """As kvpress reads it."""
    _, found, rest = output.partition("boxed{")
    return rest.partition("}")[0] if found else None


def _find_last(pattern: re.Pattern, text: str) -> re.Match | None:
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)

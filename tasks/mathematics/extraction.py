r"""Find the final answer in a model's output.

* `extract_boxed` returns the content of the last \boxed{} that is closed (braces are balanced as in TeX) and not empty.
  A box without braces holds the number, the command with its arguments or the letter that follows, as in \boxed 12.
* `extract_flexible` returns that, else the text after the last "answer is" or "answer:", else the last number or `$…$`.
  If the output closes its thinking with </think>, the last two must stand behind it.
* `extract_first_box` reads MATH-500 as kvpress does (evaluation/benchmarks/math500/calculate_metrics.py): from the
  first "boxed{" to the next "}".
"""

import re
from collections import deque

CLOSED = "</think>"
FEW = 3  # a text behind "answer is" with at most so many words is the whole answer

_DIGITS = r"-?[0-9](?:[0-9,]*[0-9])?(?:\.[0-9]+)?(?:/[0-9]+)?"
_BARE = "|".join(  # the content of a box without braces
    (
        _DIGITS,
        r"\\(?!begin|boxed|fbox)[a-zA-Z]+(?:\s*[0-9]|\s*\{(?:[^{}]|\{[^{}]*\})*\})+",
        r"\\(?:pi|infty|emptyset|varnothing)(?![a-zA-Z])",
        r"[a-zA-Z](?=\s*(?:[.$]|\\[)\]]|\n|\Z))",  # it ends a formula or a line, so that "in a \boxed I" is none
    )
)
_BRACE = re.compile(
    rf"\\(?:boxed|fbox)(?![a-zA-Z])[^\S\n]*(?P<bare>{_BARE})|\\f?box(?:ed)?\s*\{{|\\.|[{{}}]", re.DOTALL
)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_SAID = re.compile(r"answer\s*(?:\*\*)?\s*(?:is\s*:?|:|=)", re.IGNORECASE)
_LAST = re.compile(
    r"(?<!\\)\$(?P<tex>(?:\\.|[^$\\\n])+)\$"  # a formula between dollar signs, no amount of money
    rf"|(?P<number>{_DIGITS})"
)


def extract_boxed(output: str) -> str | None:
    """Return the content of the last box that is closed and not empty; None if there is none."""
    opened: list[int | None] = []  # for each open brace: where the content of its box begins
    last: tuple[int, int] | None = None
    for brace in _BRACE.finditer(output):
        if brace["bare"]:
            last = brace.span("bare")
        elif brace[0] == "}":
            start = opened.pop() if opened else None
            if start is not None and (last is None or start > last[0]) and output[start : brace.start()].strip():
                last = start, brace.start()
        elif brace[0].endswith("{") and brace[0] != r"\{":
            opened.append(brace.end() if _BOX.fullmatch(brace[0]) else None)
    return output[slice(*last)].strip() if last else None


def extract_flexible(output: str) -> str | None:
    """Return the last box, else what the output calls the answer, else the last number or formula, else None."""
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
    """Return the first box as kvpress reads it; None if there is none."""
    _, opening, rest = output.partition("boxed{")
    return rest.partition("}")[0] if opening else None


def _find_last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)

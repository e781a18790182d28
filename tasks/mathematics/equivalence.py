"""Decide by text alone whether two answers of a mathematics problem are the same.

`normalize` brings an answer to one spelling: fractions, roots and powers have braces, and units, degrees, currencies,
per cent signs, thousands separators, endings of ordinals (17th), spacing and a leading `x =` are dropped. It covers
what the rule of MATH's authors covers (Hendrycks et al. 2021, arXiv 2103.03874; hendrycks/math, math_equivalence.py)
and is applied until nothing changes.

`is_same_answer` compares numbers by value (070 = 70, 0.5 = 1/2, 2.5 · 10^3 = 2500), intervals and tuples element by
element, and sets, unions, lists without brackets and the terms of a sum in any order. A time of the day without a.m. or
p.m. is the same as one with it. It does no other algebra: 2(x + 1) and 2x + 2 differ.

This module does not use sympy or math-verify, because both evaluate what a model wrote and may not end.
kvbench.integrations.math_verify asks math-verify after a run, in a process that it can kill.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

LONGEST = 1000  # characters of an answer; a longer text is compared as it is
DEEPEST = 20  # levels of brackets that are compared element by element

_END = r"(?![a-zA-Z])"  # a command ends here
_TEXT = r"\\(?:text|textsuperscript|textrm|textbf|textit|textsf|mbox|mathrm|mathbf|mathit|mathsf|operatorname)\s*"
_WORDS = (
    "degrees?|deg|cm|mm|km|kg|ft|feet|foot|inch|inches|in|yards?|miles?|meters?|metres?|centimeters?|kilometers?|mph|dollars?"
    "|cents?|hours?|minutes?|seconds?|days?|weeks?|months?|years?|units?|percent|people|students?|ways|times|pounds?|grams?"
    "|points?|liters?|litres?|gallons?|radians?"
)
_FUNCTION = r"\\(?:arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln)" + _END
_SPACING = (
    "quad|qquad|enspace|(?:neg)?(?:thin|med|thick)space|displaystyle|textstyle|limits|rm|bf|it|sf|tiny|small|normalsize"
)
_RAISED = r"(?:\s*[\^_]\s*(?:[0-9a-zA-Z]|\{[^{}]*\}))?"  # a power or a base
_NEW_ROW = re.compile(r"\\\\\s*(?:\[\s*-?[0-9.]+\s*(?:pt|em|ex|mm|cm|in|mu|bp|pc)\s*\])?")  # and its distance
_ENDING = r"(?:st|nd|rd|th)"  # of an ordinal
_SET_ENDING = rf"{_TEXT}\{{\s*{_ENDING}\s*\}}"
_RAISED_ENDING = rf"(?:{_ENDING}{_END}|{_SET_ENDING})"
_SIZE = r"(?:(?<=[0-9})\]])|(?<=\\pi))"  # a unit may follow
_CLOCK = r"[0-9]{1,2}(?:\s*:\s*[0-9]{2})?"
_SIGNS = str.maketrans(
    dict.fromkeys("\0\u200b\u2060\ufeff", "")
    | {"−": "-", "–": "-", "÷": "/", "°": "", "\u00a0": " ", "$": "", "%": "", "~": " "}
    | {"×": r"\cdot ", "·": r"\cdot ", "⋅": r"\cdot ", "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "±": r"\pm "}
    | {"≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset "}
)
_RULES: tuple[tuple[re.Pattern, str], ...] = tuple(
    (re.compile(pattern, re.DOTALL), by)
    for pattern, by in (
        # commands that mean nothing
        (r"\\(?:left|right|big|Big|bigg|Bigg|bigl|bigr|Bigl|Bigr)(?:\.|" + _END + ")", ""),
        (r"\\!\s*", ""),
        (rf"\\(?:[,;:> ]|(?:{_SPACING}){_END}|[hm]space\s*\*?\{{[^{{}}]*\}}|m?kern\s*-?[0-9.]+\s*[a-z]{{2}})", " "),
        (r"\\[()\[\]]", ""),
        (r"\\(?=[0-9.]|$)", ""),
        # one name for each thing
        (r"\\[dtc]frac" + _END, r"\\frac"),
        (r"\\lbrace" + _END, r"\\{"),
        (r"\\rbrace" + _END, r"\\}"),
        (r"\\(?:varnothing" + _END + r"|\{\s*\\\})", r"\\emptyset "),
        (r"\\le" + _END + "|<=", r"\\leq "),
        (r"\\ge" + _END + "|>=", r"\\geq "),
        (r"\\ne" + _END + "|!=", r"\\neq "),
        (r"\*\*", "^"),
        (r"\\(?:times|ast)" + _END + r"|\*", r"\\cdot "),
        (r"\\cdot" + _END + r"\s*(?=[a-zA-Z(]|\\(?:sqrt|pi)" + _END + ")", " "),
        (r"\\(begin|end)\s*\{[bvB]?matrix\}", r"\\\1{pmatrix}"),
        (r";\s*(?=\\end\{)", ""),
        (r"(\\begin\{pmatrix\})|(?=\\end\{)", r"\1 "),
        # functions: an argument without brackets gets them, unless more may belong to it
        (rf"({_FUNCTION}{_RAISED})\s*\{{([^{{}}]*)\}}", r"\1(\2)"),
        (
            rf"({_FUNCTION}{_RAISED})\s*([0-9]*\s*(?:\\(?:alpha|beta|gamma|theta|phi|pi){_END}|[a-zA-Z])|[0-9]+)"
            rf"(?=\s*(?:$|[-+=,;&)\]}}]|{_FUNCTION}))",
            r"\1(\2)",
        ),
        # times of the day, ordinals, degrees and units
        *(
            (rf"^\s*({_CLOCK})\s*(?:{_TEXT}\{{)?\s*[{half}{half.upper()}]\.?\s*[mM]\.?\s*\}}?\s*$", rf"\1{half}m")
            for half in "ap"
        ),
        (rf"(?<=[0-9])\s*(?:{_SET_ENDING}|\^\s*(?:{_RAISED_ENDING}|\{{\s*{_RAISED_ENDING}\s*\}}))", " "),
        (rf"^(\s*[0-9]+)\s*{_ENDING}{_END}", r"\1"),
        (r"\^\s*(?:\\circ" + _END + r"|\{\s*\\circ\s*\})|\\degrees?" + _END, ""),
        (_TEXT + r"\{\s*(?:or|and)\s*\}|\s+(?:or|and)\s+", ", "),
        (_SIZE + r"\s*" + _TEXT + r"\{[^{}]*\}(?:\s*\^\s*(?:[0-9]|\{[0-9]\}))?\s*$", ""),
        (rf"{_SIZE}\s+(?:(?:square|cubic|sq\.?)\s+)?(?:{_WORDS})(?:\s*\^\s*(?:[0-9]|\{{[0-9]\}}))?\.?\s*$", ""),
        (_TEXT + r"\{([^{}]*)\}", r" \1 "),
        # fractions, roots, powers
        (r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\sqrt\s*([0-9a-zA-Z])", r"\\sqrt{\1}"),
        (r"\\frac\s*([0-9a-zA-Z]|\\pi(?![a-zA-Z]))\s*(?=[0-9a-zA-Z{])", r"\\frac{\1}"),
        (r"(\\frac\s*\{[^{}]*\})\s*([0-9a-zA-Z])", r"\1{\2}"),
        (r"(?<![0-9a-zA-Z})\].])([0-9]+)\s*/\s*([0-9]+)(?![0-9a-zA-Z{(\[.\\/])", r"\\frac{\1}{\2}"),
        (r"^(-?)([^-+/(),=\[\]]+)/([^-+/(),=\[\]]+)$", r"\1\\frac{\2}{\3}"),
        (r"\\frac\s*\{\s*-([^{}+-]*)\}", r"-\\frac{\1}"),
        (r"([\^_])\s*\{\s*([0-9a-zA-Z])\s*\}", r"\1\2"),
        # numbers
        (r"([0-9])\{,\}(?=[0-9])", r"\1,"),
        (r"(?<![0-9])\.(?=[0-9])", "0."),
        (r"(?<=\+)\s*-|-\s*\+", "-"),
        (r"\+-", "-"),
        (r"--", "+"),
        (r"(^|[(\[{,=])\s*\+", r"\1"),
        # text around the answer
        (r"^\s*(?:[a-zA-Z](?:_[0-9a-zA-Z])?|\\[a-zA-Z]+|[a-zA-Z]\s*\(\s*[a-zA-Z]\s*\))\s*=(?=[^=]*$)", ""),
        (r"^\s*[a-zA-Z]\s*\\in" + _END, ""),
        (r"^\s*\(\s*([A-Z])\s*\)\s*$", r"\1"),
        (r"[\s.,;:]+$", ""),
    )
)
_SPACES = tuple(  # one blank stays between a command and a letter, and behind a comma that separates
    (re.compile(pattern), by)
    for pattern, by in (
        (r"(\\[a-zA-Z]+)\s+(?=[a-zA-Z])", "\\1\0"),
        (r"\s+(?!\0)", ""),
        (r",+", ", "),
        (r"\0", " "),
    )
)
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_POWER = re.compile(r"(-?)(?:([0-9]+(?:\.[0-9]+)?)\\cdot)?10\^(?:([0-9])|\{(-?[0-9]{1,3})\})")  # 2.5 · 10^3
_TIME = re.compile(r"0?([0-9]{1,2})(?::([0-9]{2}))?([ap]m)?")  # a time of the day
_FRACTION = re.compile(r"(-?)([0-9]*)\\frac\{([0-9]+(?:\.[0-9]+)?)\}\{(-?[0-9]+(?:\.[0-9]+)?)\}")


_TOKEN = re.compile(r"\\[a-zA-Z]+ ?|\\.|, |.", re.DOTALL)
_OPENING, _CLOSING = ("(", "[", "{", r"\{"), (")", "]", "}", r"\}")
_BETWEEN = (",", "=", "<", ">", ":", *(rf"\{name}" for name in ("leq", "geq", "neq", "cup", "cap", "in", "to")))
_UNARY_AFTER = ("^", "_", "/", r"\cdot", "+", "-")  # a sign behind one of these begins no new term
_UNCLEAR = re.compile(r"\||\\(?:begin|sum|prod|int|lim|mid)" + _END)


@dataclass
class _Sum:
    """A sum while it is read: the text before it, its terms with their signs, and the last term."""

    before: str
    terms: list[str] = field(default_factory=list)
    term: str = ""

    def text(self) -> str:
        terms = [*self.terms, self.term]
        signed = [term if term[:1] in ("+", "-") else f"+{term}" for term in terms]
        return self.before + ("".join(sorted(signed)) if self.terms else self.term)


def normalize(answer: str) -> str:
    """Bring an answer to one spelling. Normalizing it again changes nothing. Never raises."""
    if len(answer) > LONGEST:
        return answer
    before, seen = None, 0
    while answer != before and seen < LONGEST and len(answer) <= 4 * LONGEST:
        before, seen = answer, seen + 1
        answer = _normalize_once(answer)
    return answer


def is_same_answer(one: str, other: str) -> bool:
    """Whether two answers are the same. Symmetric, and true for equal texts. Never raises."""
    if one.strip() == other.strip() or max(len(one), len(other)) > LONGEST:
        return one.strip() == other.strip()
    if _equal(normalize(one), normalize(other), 0):
        return True
    one, other = (text.replace(",", ", ") for text in (one, other))  # 100,200 may be two numbers
    return _equal(normalize(one), normalize(other), 0)


def _normalize_once(text: str) -> str:
    text = text.translate(_SIGNS)
    text = _NEW_ROW.sub(";", text) if r"\begin{" in text else text.replace("\\\\", "\\")
    for pattern, by in _RULES:
        text = pattern.sub(by, text)
    if not re.search(r"[(\[]|\\\{", text):
        text = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    for pattern, by in _SPACES:
        text = pattern.sub(by, text)
    if text.startswith("{") and _is_bracketed(text):
        text = text[1:-1]
    return text.lower() if re.fullmatch("[a-zA-Z]{2,}", text) else text


def _equal(one: str, other: str, depth: int) -> bool:
    if one == other:
        return True
    values = _value(one), _value(other)
    if None not in values or depth > DEEPEST:
        return None not in values and values[0] == values[1]
    if _is_same_time(one, other):
        return True
    for separator in (r"\cup", ", "):
        left, right = _items(one, separator), _items(other, separator)
        if len(left) > 1 or len(right) > 1:
            return _unordered(left, right, depth)
    if (
        one[:1] in ("(", "[")
        and (one[:1], one[-1:]) == (other[:1], other[-1:])
        and _is_bracketed(one)
        and _is_bracketed(other)
    ):
        parts = [list(map(normalize, _split(text[1:-1], ", "))) for text in (one, other)]
        return len(parts[0]) == len(parts[1]) and all(map(lambda a, b: _equal(a, b, depth + 1), *parts))
    return _sort_terms(one) == _sort_terms(other)


def _value(text: str) -> Fraction | None:
    """Read an integer, a decimal, one of these times a power of ten, a fraction or a mixed number; else None."""
    if _NUMBER.fullmatch(text):
        return Fraction(text)
    if power := _POWER.fullmatch(text):
        size = Fraction(power[2] or 1) * Fraction(10) ** int(power[3] or power[4])
        return -size if power[1] else size
    if not (fraction := _FRACTION.fullmatch(text)) or not Fraction(fraction[4]):
        return None
    size = Fraction(fraction[2] or 0) + Fraction(fraction[3]) / Fraction(fraction[4])
    return -size if fraction[1] else size


def _is_same_time(one: str, other: str) -> bool:
    """Whether two texts are one time of the day. One of them may lack a.m. or p.m."""
    first, second = _TIME.fullmatch(one), _TIME.fullmatch(other)
    if first is None or second is None:
        return False
    halves = {first[3], second[3]} - {None}
    return len(halves) == 1 and first[1] == second[1] and (first[2] or "00") == (second[2] or "00")


def _sort_terms(text: str) -> str:
    """Sort the terms of every sum, also inside brackets; leave the text as it is if the end of a sum is unclear."""
    if _UNCLEAR.search(text):
        return text
    levels = [_Sum("")]
    for token in _TOKEN.findall(text):
        last = levels[-1]
        if token in _OPENING:
            levels.append(_Sum(token))
        elif token in _CLOSING:
            inner = levels.pop()
            if not levels:
                return text
            levels[-1].term += inner.text() + token
        elif token.strip() in _BETWEEN:
            levels[-1] = _Sum(last.text() + token.strip())
        elif token in "+-" and last.term and not last.term.endswith(_UNARY_AFTER):
            last.terms.append(last.term)
            last.term = token
        else:
            last.term += token
    return levels[0].text() if len(levels) == 1 else text


def _unordered(one: Sequence[str], other: Sequence[str], depth: int) -> bool:
    left = list(other)
    for item in one:
        partner = next((place for place, its in enumerate(left) if _equal(item, its, depth + 1)), None)
        if partner is None:
            return False
        left.pop(partner)
    return not left


def _items(text: str, separator: str) -> list[str]:
    """Split a union, a list or a set into its parts; a part with ± is two."""
    if separator == ", " and text.startswith(r"\{") and text.endswith(r"\}") and _is_bracketed(text):
        text = text[2:-2]
    parts = [(part, "+-" if part.count(r"\pm") == 1 and separator == ", " else " ") for part in _split(text, separator)]
    return [normalize(part.replace(r"\pm", sign) if sign != " " else part) for part, signs in parts for sign in signs]


def _brackets(text: str) -> Sequence[tuple[int, int]]:
    """Return (place, depth after it) for every bracket; brackets of different kinds may close each other."""
    depth, brackets = 0, []
    for place, char in enumerate(text):
        if char in "([{)]}":
            depth += 1 if char in "([{" else -1
            brackets.append((place, depth))
    return brackets


def _is_bracketed(text: str) -> bool:
    """Whether the text's first bracket is closed by its last character, and not before."""
    brackets = _brackets(text)
    return bool(brackets) and brackets[-1] == (len(text) - 1, 0) and all(depth > 0 for _, depth in brackets[:-1])


def _split(text: str, separator: str) -> list[str]:
    """Split at the separators that stand in no bracket."""
    parts, start, levels = [], 0, dict(_brackets(text))
    depth = 0
    for place in range(len(text)):
        depth = levels.get(place, depth)
        if depth == 0 and place >= start and text.startswith(separator, place):
            parts.append(text[start:place].strip())
            start = place + len(separator)
    return [*parts, text[start:].strip()]

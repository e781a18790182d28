"""Needles in a haystack: the eight niah_* subtasks of RULER (upstream: scripts/data/synthetic/niah.py).

A needle is a sentence that gives a value to a key. The haystack is an essay with needles between its sentences, or
lines that all hold the same noise sentence, or lines that hold other needles.
"""

import random
import uuid
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Protocol

from kvbench.tasks.ruler.family import Family
from kvbench.tasks.ruler.templates import RenderedPrompt, load_wordings
from kvbench.tasks.ruler.texts import RulerTexts

DEPTHS = tuple(round(100 * i / 39) for i in range(40))  # in per cent of the essay's sentences


class NeedleTexts(Protocol):
    """The texts that keys and an essay are drawn from: `RulerTexts`, or those of a training."""

    @property
    def nouns(self) -> Sequence[str]: ...

    @property
    def adjectives(self) -> Sequence[str]: ...

    def essay(self, units: int) -> tuple[tuple[str, ...], list[int]]:
        """Return `units` words of an essay, and the number of words up to the end of each sentence."""


@dataclass(frozen=True)
class NiahFamily(Family):
    """A niah subtask.

    Attributes:
        haystack: ``essay``, ``noise`` or ``needle``.
        key: Kind of the keys: ``words`` or ``uuids``.
        value: Kind of the values: ``numbers`` or ``uuids``.
        keys: Number of keys.
        values: Number of values of each key.
        asked: Number of keys in the question.
    """

    haystack: str
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1
    asked: int = 1
    new_tokens: ClassVar[int] = 128

    def draw(self, units: int, rng: random.Random, texts: NeedleTexts, length: int, **fixed: int) -> dict[str, Any]:
        keys: list[str] = []
        while len(keys) < self.keys:
            key = _draw(self.key, rng, texts)
            keys += [key] * (key not in keys)
        values = [[_draw(self.value, rng, texts) for _ in range(self.values)] for _ in keys]
        order = rng.sample(range(self.keys * self.values), self.keys * self.values)
        places = rng.sample(DEPTHS if self.haystack == "essay" else range(units), len(order))
        asked = rng.sample(range(self.keys), self.asked)
        draws = {
            "units": units,
            "keys": keys,
            "values": values,
            "order": order,
            "places": sorted(places),
            "asked": asked,
        }
        if self.haystack == "needle":
            draws["others"] = [self._other(keys, rng, texts) for _ in range(units)]
        return draws

    def _other(self, keys: list[str], rng: random.Random, texts: NeedleTexts) -> list[str]:
        key = _draw(self.key, rng, texts)
        while key in keys:
            key = _draw(self.key, rng, texts)
        return [key, _draw(self.value, rng, texts)]

    def render(self, draws: dict[str, Any], texts: NeedleTexts) -> RenderedPrompt:
        needles = [self._needle(k, v) for k, values in zip(draws["keys"], draws["values"], strict=True) for v in values]
        needles = [needles[i] for i in draws["order"]]
        context = self._essay(needles, draws, texts) if self.haystack == "essay" else self._lines(needles, draws)
        queries = [draws["keys"][i] for i in draws["asked"]]
        answers = [value for i in draws["asked"] for value in draws["values"][i]]
        query = ", ".join(queries[:-1]) + ", and " + queries[-1] if len(queries) > 1 else queries[0]
        if len(answers) == 1:
            return load_wordings().niah.singular().render(context, answers, type_needle_v=self.value[:-1], query=query)
        return load_wordings().niah.render(context, answers, type_needle_v=self.value, query=query)

    def _needle(self, key: str, value: str) -> str:
        return load_wordings().needle.format(type_needle_v=self.value, key=key, value=value)

    def _essay(self, needles: list[str], draws: dict[str, Any], texts: NeedleTexts) -> str:
        """Put needles between sentences. As in upstream, a needle at an end leaves an empty piece and thus a blank."""
        words, ends = texts.essay(draws["units"])
        sentences = bisect_left(ends, len(words)) + 1  # the last one may be cut
        cuts = [int(sentences * (depth / 100)) for depth in draws["places"]]
        starts = [0] + [0 if c == 0 else len(words) if c == sentences else ends[c - 1] for c in cuts] + [len(words)]
        pieces = [" ".join(words[a:b]) for a, b in pairwise(starts)]
        return " ".join(x for pair in zip(pieces, needles + [None], strict=True) for x in pair if x is not None)

    def _lines(self, needles: list[str], draws: dict[str, Any]) -> str:
        lines = [self._needle(*other) for other in draws.get("others", ())] or [load_wordings().noise] * draws["units"]
        for place, needle in zip(reversed(draws["places"]), needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)

    def least(self, texts: RulerTexts, length: int, index: int) -> int:
        return self.keys * self.values

    def increment(self, length: int) -> int:
        return 500 if self.haystack == "essay" else 5 if length < 4096 else 25

    def floor(self, texts: RulerTexts, index: int) -> int:
        return 1 if self.haystack == "essay" else self.keys * self.values

    def meta(self, draws: dict[str, Any], texts: RulerTexts) -> dict[str, Any]:
        """Return each needle's depth in per cent of the haystack and, for an essay, how its sentences were found."""
        essay = self.haystack == "essay"
        depths = draws["places"] if essay else [round(100 * p / draws["units"]) for p in draws["places"]]
        described = {"haystack": texts.haystack if essay else "none", "depths": depths}
        return described | {"sentences": texts.sentences.partition(":")[0]} if essay else described


NIAH = (
    NiahFamily("niah_single_1", "noise"),
    NiahFamily("niah_single_2", "essay"),
    NiahFamily("niah_single_3", "essay", value="uuids"),
    NiahFamily("niah_multikey_1", "essay", keys=4),
    NiahFamily("niah_multikey_2", "needle"),
    NiahFamily("niah_multikey_3", "needle", key="uuids", value="uuids"),
    NiahFamily("niah_multivalue", "essay", values=4),
    NiahFamily("niah_multiquery", "essay", keys=4, asked=4),
)


def _draw(kind: str, rng: random.Random, texts: NeedleTexts) -> str:
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "words":
        return f"{rng.choice(texts.adjectives)}-{rng.choice(texts.nouns)}"
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))

"""Counting words: RULER's cwe and fwe (upstream: common_words_extraction.py and freq_words_extraction.py).

cwe is a numbered list in which ten words appear more often than the others, after one solved example. Upstream's
scripts put the model's template around the example too, so with a chat template the example is a turn of its own. (The
example of vt stands within the one message. In the files that upstream prepares for NeMo-Skills, that of cwe does too.)

fwe is a text of coded words whose counts fall as rank^-2. The first rank is noise, and the next three are asked.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Any, ClassVar

from kvbench.tasks.ruler.family import Family
from kvbench.tasks.ruler.fit import bisect_units
from kvbench.tasks.ruler.templates import RenderedPrompt, load_wordings
from kvbench.tasks.ruler.texts import RulerTexts

COMMON = 10  # words that the question asks for


@dataclass(frozen=True)
class CommonWords(Family):
    """The subtask cwe. Its units are different words."""

    new_tokens: ClassVar[int] = 120
    turns: ClassVar[int] = 2

    def draw(self, units: int, rng: random.Random, texts: RulerTexts, length: int, **fixed: int) -> dict[str, Any]:
        """Draw two lists. Below 4096 tokens words repeat less often, and the example is shorter."""
        if length < 4096:
            return {"example": _list(20, 3, 1, rng, texts), **_list(units, 6, 1, rng, texts)}
        return {"example": _list(40, 10, 3, rng, texts), **_list(units, 30, 3, rng, texts)}

    def render(self, draws: dict[str, Any], texts: RulerTexts) -> RenderedPrompt:
        example, main = draws["example"], draws
        shown = load_wordings().cwe.render(_numbered(example["words"]), example["common"])
        asked = load_wordings().cwe.render(_numbered(main["words"]), main["common"])
        solved = f"{shown.prompt} {_numbered(example['common'])}\n"
        turn = len(shown.context + shown.question), len(solved)
        return RenderedPrompt(solved + asked.context, asked.question, asked.answer_prefix, asked.answers, turn)

    def least(self, texts: RulerTexts, length: int, index: int) -> int:
        return COMMON + 1

    def most(self, texts: RulerTexts) -> int:
        return len(texts.pool)

    def size(self, cost: Callable[[int], int], length: int, room: int) -> int:
        most = int(length // (cost(4096) / 4096)) * 2
        return bisect_units(cost, room, self.increment(length), most)


@dataclass(frozen=True)
class FrequentWords(Family):
    """The subtask fwe. Its units are the sum of the counts before each count is rounded down."""

    new_tokens: ClassVar[int] = 50
    redraws: ClassVar[bool] = False  # a shorter sample keeps its coded words

    def draw(self, units: int, rng: random.Random, texts: RulerTexts, length: int, **fixed: int) -> dict[str, Any]:
        """Draw coded words and shuffle them."""
        drawn: dict[str, None] = {}  # an ordered set
        while len(drawn) < length // 50:
            drawn["".join(rng.choices(ascii_lowercase, k=6))] = None
        coded = list(drawn)
        zeta = math.pi**2 / 6
        counts = [int(units * rank**-2.0 / zeta) for rank in range(1, len(coded) + 1)]
        words = [word for word, n in zip(["...", *coded[1:]], counts, strict=True) for _ in range(n)]
        rng.shuffle(words)
        return {"words": words, "top": coded[1:4]}

    def render(self, draws: dict[str, Any], texts: RulerTexts) -> RenderedPrompt:
        return load_wordings().fwe.render(" ".join(draws["words"]), draws["top"])

    def least(self, texts: RulerTexts, length: int, index: int) -> int:
        """Return the first of upstream's sizes (room // 6 plus steps) at which the ranks that are asked stand out."""
        start, step = (length - self.new_tokens) // 6, self.step(length)
        return start - max(0, start - 60) // step * step

    def step(self, length: int) -> int:
        return max(1, (length - self.new_tokens) // 32)

    def increment(self, length: int) -> int:
        return self.step(length)

    def size(self, cost: Callable[[int], int], length: int, room: int) -> int:
        """Return one step less than the first size that fills the room."""
        units = (length - self.new_tokens) // 6
        while cost(units) < room:
            units += self.step(length)
        return units - self.step(length)


WORDS = (CommonWords("ruler_cwe"), FrequentWords("ruler_fwe"))


def _list(units: int, common: int, rare: int, rng: random.Random, texts: RulerTexts) -> dict[str, list[str]]:
    drawn = rng.sample(texts.pool, units)
    words = drawn[:COMMON] * common + drawn[COMMON:] * rare
    rng.shuffle(words)
    return {"words": words, "common": drawn[:COMMON]}


def _numbered(words: list[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))

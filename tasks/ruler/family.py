"""What the five families of RULER tasks have in common: a subtask draws, renders, and says how large it may be."""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from kvbench.tasks.ruler.fit import search_size
from kvbench.tasks.ruler.templates import RenderedPrompt
from kvbench.tasks.ruler.texts import RulerTexts


@dataclass(frozen=True)
class Family:
    """A subtask. `units` counts what its haystack is made of: words, sentences, needles or documents."""

    name: str
    new_tokens: ClassVar[int]  # upstream's tokens_to_generate
    turns: ClassVar[int] = 1  # user's messages that a chat template wraps
    any_answer: ClassVar[bool] = False  # string_match_part: one reference is enough

    def draw(self, units: int, rng: random.Random, texts: RulerTexts, length: int, **fixed: int) -> dict[str, Any]:
        """All random choices of one sample, as plain JSON values."""
        raise NotImplementedError

    def render(self, draws: dict[str, Any], texts: RulerTexts) -> RenderedPrompt:
        """The prompt that these draws make; no randomness."""
        raise NotImplementedError

    def least(self, texts: RulerTexts, length: int, index: int) -> int:
        """The fewest units that the sample can be built of."""
        raise NotImplementedError

    def most(self, texts: RulerTexts) -> int:
        """The most units that there are."""
        return sys.maxsize

    def step(self, length: int) -> int:
        """Units are `least` plus a multiple of this."""
        return 1

    def fixed(self, tokens: Callable[[str], int]) -> dict[str, int]:
        """What the tokenizer alone decides, for `draw`."""
        return {}

    # What follows is NVIDIA/RULER's own fitting (task.fit=upstream).

    redraws: ClassVar[bool] = True  # each attempt at a sample is drawn anew

    def increment(self, length: int) -> int:
        """Units that a sample loses when it is too long: upstream's `incremental`."""
        return 10

    def floor(self, texts: RulerTexts, index: int) -> int:
        """The fewest units with which upstream's script can draw the sample."""
        return 1

    def shown(self, tokens: Callable[[str], int], rng: random.Random) -> tuple[dict[str, int], int]:
        """What upstream fits before all samples: values for `draw`, and tokens that `sized` leaves out."""
        return {}, 0

    def sized(self, draws: dict[str, Any], texts: RulerTexts) -> str:
        """The text that upstream counts while it looks for the size of all samples."""
        return self.render(draws, texts).prompt

    def size(self, cost: Callable[[int], int], length: int, room: int) -> int:
        """Units of all samples; `cost` gives the tokens of `sized`, which may be at most `room`."""
        return search_size(cost, length, room, self.increment(length))

    def meta(self, draws: dict[str, Any], texts: RulerTexts) -> dict[str, Any]:
        """What a record should know of the sample."""
        return {"haystack": "none"}

"""The base class of RULER's subtasks: a subtask draws a sample, renders its prompt, and says how large it may be.

A subtask counts its haystack in units: words of an essay, noise sentences, needles, coded words or documents.
"""

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
    """A subtask of RULER.

    Attributes:
        name: The subtask's name, such as ``niah_single_1``.
        new_tokens: The most tokens of an answer: upstream's ``tokens_to_generate``.
        turns: User messages that a chat template wraps.
        any_answer: Whether one of the references is enough (upstream's ``string_match_part``).
        redraws: Whether upstream's fitting draws each attempt at a sample anew.
    """

    name: str
    new_tokens: ClassVar[int]
    turns: ClassVar[int] = 1
    any_answer: ClassVar[bool] = False

    def draw(self, units: int, rng: random.Random, texts: RulerTexts, length: int, **fixed: int) -> dict[str, Any]:
        """Make all random choices of one sample.

        Args:
            units: Size of the haystack.
            rng: The sample's own generator.
            texts: The words, essay and questions to draw from.
            length: Tokens of prompt and answer. Some parameters of cwe and fwe depend on it.
            fixed: The values of `fixed` or `shown`, and ``index``, the number of the sample.

        Returns:
            The choices as plain JSON values.
        """
        raise NotImplementedError

    def render(self, draws: dict[str, Any], texts: RulerTexts) -> RenderedPrompt:
        """Render the prompt of these draws; no randomness."""
        raise NotImplementedError

    def least(self, texts: RulerTexts, length: int, index: int) -> int:
        """Return the fewest units that sample `index` can have."""
        raise NotImplementedError

    def most(self, texts: RulerTexts) -> int:
        """Return the most units that there are."""
        return sys.maxsize

    def step(self, length: int) -> int:
        """Return the step between sizes: a sample has `least` units plus a multiple of this."""
        return 1

    def fixed(self, tokens: Callable[[str], int]) -> dict[str, int]:
        """Return the arguments of `draw` that depend on the tokenizer alone. `tokens` counts the tokens of a text."""
        return {}

    # The methods below are NVIDIA/RULER's own fitting (task.fit=upstream).

    redraws: ClassVar[bool] = True

    def increment(self, length: int) -> int:
        """Return the units that a sample loses when it is too long: upstream's `incremental`."""
        return 10

    def floor(self, texts: RulerTexts, index: int) -> int:
        """Return the fewest units with which upstream's script can draw the sample."""
        return 1

    def shown(self, tokens: Callable[[str], int], rng: random.Random) -> tuple[dict[str, int], int]:
        """Fit what upstream fits before all samples: arguments of `draw`, and the tokens that `sized` leaves out."""
        return {}, 0

    def sized(self, draws: dict[str, Any], texts: RulerTexts) -> str:
        """Return the text whose tokens upstream counts while it searches the size of all samples."""
        return self.render(draws, texts).prompt

    def size(self, cost: Callable[[int], int], length: int, room: int) -> int:
        """Search the units of all samples; `cost` gives the tokens of `sized`, which may be at most `room`."""
        return search_size(cost, length, room, self.increment(length))

    def meta(self, draws: dict[str, Any], texts: RulerTexts) -> dict[str, Any]:
        """Return what a record says about the sample, as plain JSON values."""
        return {"haystack": "none"}

"""Variable tracking: RULER's vt (upstream: scripts/data/synthetic/variable_tracking.py).

One chain of four hops (`VAR B = VAR A`) stands in order among repetitions of a noise sentence. A solved example of at
most 500 tokens, whose variables have three letters, comes first.
"""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any, ClassVar

from kvbench.tasks.ruler.family import Family
from kvbench.tasks.ruler.fit import fit_units, search_size, step_down
from kvbench.tasks.ruler.templates import RenderedPrompt, load_wordings
from kvbench.tasks.ruler.texts import RulerTexts

HOPS = 4
EXAMPLE_TOKENS = 500
EXAMPLE_UNITS = 15  # noise sentences of the example where no tokenizer counts them


@dataclass(frozen=True)
class VariableTracking(Family):
    """The subtask vt. Its units are noise sentences."""

    new_tokens: ClassVar[int] = 30

    def draw(self, units: int, rng: random.Random, texts: RulerTexts, length: int, **fixed: int) -> dict[str, Any]:
        """Draw two chains; `example` gives the noise sentences of the solved one."""
        example = draw_chain(3, fixed.get("example", EXAMPLE_UNITS), rng)
        return {"example": example, **draw_chain(5, units, rng)}

    def render(self, draws: dict[str, Any], texts: RulerTexts) -> RenderedPrompt:
        main = _render(draws)
        solved = f"{_solved(draws['example'])}\n"
        return RenderedPrompt(solved + main.context, main.question, main.answer_prefix, main.answers)

    def fixed(self, tokens: Callable[[str], int]) -> dict[str, int]:
        return {"example": fit_example(tokens)}

    def least(self, texts: RulerTexts, length: int, index: int) -> int:
        return HOPS + 1

    def increment(self, length: int) -> int:
        return 5 if length < 4096 else 10

    def floor(self, texts: RulerTexts, index: int) -> int:
        return HOPS + 1

    def shown(self, tokens: Callable[[str], int], rng: random.Random) -> tuple[dict[str, int], int]:
        """Fit the example as upstream: as a sample of EXAMPLE_TOKENS. All prompts get its size, with other names."""

        def cost(units: int) -> int:
            return tokens(_render(draw_chain(3, units, rng)).prompt)

        for units in step_down(search_size(cost, EXAMPLE_TOKENS, EXAMPLE_TOKENS, 5), 5, HOPS + 1):
            example = draw_chain(3, units, rng)
            if tokens(_render(example).prompt) <= EXAMPLE_TOKENS:
                break
        return {"example": units}, tokens(_solved(example))

    def sized(self, draws: dict[str, Any], texts: RulerTexts) -> str:
        return _render(draws).prompt


def draw_chain(letters: int, units: int, rng: random.Random) -> dict[str, Any]:
    """Draw one chain: its names in order, its value, and the noise sentences before which its statements stand."""
    names: list[str] = []
    while len(names) < HOPS + 1:
        name = "".join(rng.choices(ascii_uppercase, k=letters))
        names += [name] * (name not in (*names, "VAR"))
    places = sorted(rng.sample(range(units), HOPS + 1))
    return {"units": units, "names": names, "value": str(rng.randrange(10000, 99999)), "places": places}


def fit_example(tokens: Callable[[str], int]) -> int:
    """Count the noise sentences with which the example without its answer fits EXAMPLE_TOKENS, whatever its names."""

    def cost(more: int) -> int:
        return tokens(_render(draw_chain(3, HOPS + 1 + more, random.Random("vt example"))).prompt)

    return HOPS + 1 + (fit_units(cost, sys.maxsize, EXAMPLE_TOKENS) or 0)


def _solved(draws: dict[str, Any]) -> str:
    """Render the example with its answer. The prefix ends in a blank, and upstream adds one before the answer."""
    example = _render(draws)
    return f"{example.prompt} {' '.join(example.answers)}\n"


def _render(draws: dict[str, Any]) -> RenderedPrompt:
    names = draws["names"]
    statements = [f"VAR {names[0]} = {draws['value']}"]
    statements += [f"VAR {new} = VAR {old} " for old, new in zip(names, names[1:], strict=False)]
    lines = [load_wordings().noise] * draws["units"]
    for done, (place, statement) in enumerate(zip(draws["places"], statements, strict=True)):
        lines.insert(place + done, statement)
    return load_wordings().vt.render("\n".join(lines), names, query=draws["value"], num_v=len(names))


VT = (VariableTracking("ruler_vt"),)

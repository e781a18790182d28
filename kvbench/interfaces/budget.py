"""How many rows may stay: a fraction of what was read, or rows per layer and KV head.

A fraction becomes whole rows by exact decimal arithmetic, floored, at least 1: int(1000 * (1 - 0.9)) would be 99.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from kvbench.validation import SettingError, require_choice

ALLOWED = "a fraction in (0, 1] such as 0.05, or whole rows per layer and KV head from 2 on"


@dataclass(frozen=True)
class Budget:
    """`value`: float in (0, 1] (fraction kept, 1.0 keeps everything) or int >= 2 (rows per layer and KV head).

    `of` says what a fraction is taken of: "prompt" (what is in the cache when the prefill ends) or "seen" (all
    that was read so far, at each cut).
    """

    value: float | int
    of: str = "prompt"

    def __post_init__(self) -> None:
        require_choice("budget_of", self.of, ("prompt", "seen"))
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SettingError(f"budget={value}: {ALLOWED}")
        if isinstance(value, int):
            if value == 1:
                raise SettingError(f"budget=1: ambiguous, write 1.0 to keep everything; allowed: {ALLOWED}")
            if value < 2:
                raise SettingError(f"budget={value}: {ALLOWED}")
        elif not (math.isfinite(value) and 0 < value <= 1):
            raise SettingError(f"budget={value}: {ALLOWED}")

    @property
    def everything(self) -> bool:
        """True when nothing is ever cut."""
        return isinstance(self.value, float) and self.value == 1

    def rows(self, prompt: int, seen: int) -> int | None:
        """Rows per layer and KV head after a cut, None for all; `prompt` and `seen` in tokens."""
        share = self.share(prompt, seen)
        return None if share is None else max(1, int(share))

    def share(self, prompt: int, seen: int) -> Fraction | None:
        """The same before it is floored to whole rows: half of 61 tokens are 61/2 rows."""
        if self.everything:
            return None
        if isinstance(self.value, int):
            return Fraction(self.value)
        return Fraction(repr(float(self.value))) * (seen if self.of == "seen" else prompt)

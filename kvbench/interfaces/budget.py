"""The budget: how many rows may stay, as a fraction of the tokens read or as rows per layer and KV head.

A fraction becomes whole rows by exact decimal arithmetic. It is rounded down, to at least 1. Floating point would give
99 rows for int(1000 * (1 - 0.9)).
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from kvbench.validation import SettingError, require_choice

ALLOWED = "a fraction in (0, 1] such as 0.05, or whole rows per layer and KV head from 2 on"


@dataclass(frozen=True)
class Budget:
    """How many rows may stay.

    Raises:
        SettingError: The budget is neither a fraction in (0, 1] nor a number of rows from 2 on.
    """

    value: float | int
    """A float in (0, 1] is the fraction kept; 1.0 keeps everything. An int from 2 on is rows per layer and KV head."""
    of: str = "prompt"
    """What a fraction is taken of: "prompt", the tokens in the cache at the end of the prefill, or "seen", all tokens
    read so far, counted anew at each cut.
    """

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
        """Whether nothing is ever cut."""
        return isinstance(self.value, float) and self.value == 1

    @property
    def fraction(self) -> Fraction | None:
        """The budget exactly as written if it is a fraction, or None if it is a number of rows or keeps everything."""
        return None if self.everything or isinstance(self.value, int) else Fraction(repr(float(self.value)))

    def rows(self, prompt: int, seen: int) -> int | None:
        """Return the rows per layer and KV head after a cut, or None if all rows stay.

        Args:
            prompt: Number of tokens of the prompt.
            seen: Number of tokens read so far.
        """
        share = self.share(prompt, seen)
        return None if share is None else max(1, int(share))

    def share(self, prompt: int, seen: int) -> Fraction | None:
        """Return the same number as `rows`, not rounded down: half of 61 tokens are 61/2 rows."""
        if self.everything:
            return None
        if self.fraction is None:
            return Fraction(self.value)
        return self.fraction * (seen if self.of == "seen" else prompt)

"""The budget: how many rows may stay, as a fraction of the tokens read or as rows per layer and KV head.

A method may also decide itself how many rows stay, by a setting such as a threshold (`Method.budget_setting`). Its
runs have no budget: how much stays is an outcome, and records hold what was measured.

A fraction becomes whole rows by exact decimal arithmetic. It is rounded down, to at least 1. Floating point would give
99 rows for int(1000 * (1 - 0.9)).
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from kvbench.validation import SettingError, require_choice

ALLOWED = "a fraction in (0, 1] such as 0.05, or whole rows per layer and KV head from 2 on"


@dataclass(frozen=True)
class Budget:
    """How many rows may stay.

    Raises:
        SettingError: The budget is neither a fraction in (0, 1], nor a number of rows from 2 on, nor None.
    """

    value: float | int | None
    """A float in (0, 1] is the fraction kept; 1.0 keeps everything. An int from 2 on is rows per layer and KV head.
    None is no limit: the method decides how many rows stay.
    """
    of: str = "prompt"
    """What a fraction is taken of: "prompt", the tokens in the cache at the end of the prefill, or "seen", all tokens
    read so far, counted anew at each cut.
    """

    def __post_init__(self) -> None:
        require_choice("budget_of", self.of, ("prompt", "seen"))
        value = self.value
        if value is None:
            return
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

    @cached_property
    def fraction(self) -> Fraction | None:
        """The budget exactly as written if it is a fraction below 1, otherwise None."""
        return None if self.everything or not isinstance(self.value, float) else Fraction(repr(float(self.value)))

    def rows(self, prompt: int, seen: int) -> int | None:
        """Return the rows per layer and KV head after a cut, or None if all rows stay.

        Without a limit these are all tokens read.

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
        if self.value is None:
            return Fraction(seen)
        if self.fraction is None:
            return Fraction(self.value)
        return self.fraction * (seen if self.of == "seen" else prompt)


def check_budget(budget: Budget, method: str, decides_by: str | None) -> None:
    """Check that a run has a budget, unless its method decides how many rows stay. The full cache may have either.

    Args:
        budget: The budget.
        method: The method's name.
        decides_by: The setting by which the method decides (`Method.budget_setting`), or None.

    Raises:
        SettingError: The method needs a budget and has none, or the other way round.
    """
    if method == "full":
        return
    if decides_by is not None and budget.value is not None:
        raise SettingError(
            f"budget={budget.value}: {method} decides by method.{decides_by} how many rows stay; use null"
        )
    if decides_by is None and budget.value is None:
        raise SettingError(f"budget=null: {method} does not decide how many rows stay; {ALLOWED}")

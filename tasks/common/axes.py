"""Read the values of one axis of a grid from a setting: a number, a list, or a range of evenly spaced values."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import numpy as np

from kvbench.validation import SettingError, is_number, require_int


@overload
def parse_axis(setting: str, given: object, least: float, most: float | None = None) -> list[int]: ...
@overload
def parse_axis(
    setting: str, given: object, least: float, most: float | None = None, *, fractions: Literal[True]
) -> list[float]: ...
def parse_axis(
    setting: str, given: object, least: float, most: float | None = None, *, fractions: bool = False
) -> list[int] | list[float]:
    """Return the values of an axis.

    Args:
        setting: The setting's name, for messages.
        given: A number, a list of numbers, or ``{start, stop, steps}``: evenly spaced values, both ends included,
            rounded to whole numbers as in gkamradt/LLMTest_NeedleInAHaystack.
        least: The smallest value that is allowed.
        most: The largest value that is allowed; None for no limit.
        fractions: Whether a number or a list may have fractions.

    Raises:
        SettingError: Values are equal (fractions are compared by the six digits that uids have), out of range, or no
            numbers.
    """
    kind = "numbers" if fractions else "whole numbers"
    allowed = f"different {kind} {f'from {least} to {most}' if most is not None else f'of at least {least}'}"
    if isinstance(given, Mapping):
        if set(given) != {"start", "stop", "steps"} or not is_number(given["start"]) or not is_number(given["stop"]):
            raise SettingError(f"{setting}={dict(given)}: {{start, stop, steps}} with numbers")
        require_int(f"{setting}.steps", given["steps"], 2)
        spaced = np.linspace(given["start"], given["stop"], given["steps"])
        values: list[Any] = np.round(spaced).astype(int).tolist()
    else:
        values = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]

    def fits(value: object) -> bool:
        if not is_number(value) or not fractions and not isinstance(value, int):
            return False
        return least <= value and (most is None or value <= most)

    if not values or not all(map(fits, values)) or len(set(map(_uid_value, values))) < len(values):
        raise SettingError(f"{setting}={given}: {allowed}, as a list or {{start, stop, steps}}")
    return values


def _uid_value(value: float) -> float:
    """Return the value as a uid has it."""
    return value if isinstance(value, int) else float(f"{value:g}")

"""Values of one axis of a grid, as a setting gives them: a number, a list, or evenly spaced ones."""

from collections.abc import Mapping, Sequence

import numpy as np

from kvbench.validation import SettingError, is_number, require_int


def parse_axis(
    setting: str, given: object, least: float, most: float | None = None, fractions: bool = False
) -> list[float]:
    """The values of a number, a list, or `{start, stop, steps}`: evenly spaced, both ends included, rounded to whole
    numbers as gkamradt's are. SettingError unless they differ, fractions to the six digits that uids have, and lie in
    [least, most]; only listed ones may be `fractions`.
    """
    kind = "numbers" if fractions else "whole numbers"
    allowed = f"different {kind} {f'from {least} to {most}' if most is not None else f'of at least {least}'}"
    if isinstance(given, Mapping):
        if set(given) != {"start", "stop", "steps"} or not is_number(given["start"]) or not is_number(given["stop"]):
            raise SettingError(f"{setting}={dict(given)}: {{start, stop, steps}} with numbers")
        require_int(f"{setting}.steps", given["steps"], 2)
        spaced = np.linspace(given["start"], given["stop"], given["steps"])
        values: list[float] = np.round(spaced).astype(int).tolist()
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
    """The value as a uid has it."""
    return value if isinstance(value, int) else float(f"{value:g}")

"""Declare a setting of a method, an allocator or a codec together with the values that it may have.

    @dataclass(frozen=True)
    class SnapKV(Method):
        window: int = setting(minimum=1)
        pooling: str = setting(choices=("avg", "max"))

The base class checks every declared setting when the object is made. A rule that concerns several settings stays in the
class's own `__post_init__`, which calls `super().__post_init__()` first.
"""

import types
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, Protocol, Union, get_args, get_origin, get_type_hints

from kvbench.validation import SettingError, format_value, is_number, require_choice, require_int

RULE = "kvbench.rule"  # the key of a field's metadata under which its rule stands


class DataclassInstance(Protocol):
    """An object whose class is a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


@dataclass(frozen=True)
class Rule:
    """The values that a setting may have, besides those that its type excludes."""

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    odd: bool = False
    choices: tuple[object, ...] = ()
    allowed: str | None = None

    def check(self, name: str, value: object, kinds: tuple[object, ...]) -> None:
        """Raise a SettingError unless `value` obeys the rule.

        Args:
            name: The setting with its group, such as `method.window`; the error begins with it.
            value: The value to check.
            kinds: The types of the field's annotation, such as `(int, NoneType)` for `int | None`.

        Raises:
            SettingError: The value is not allowed. The message says which values are.
        """
        if value is None and types.NoneType in kinds:
            return
        if self.choices or bool in kinds:
            require_choice(name, value, self.choices or (True, False))
            return
        if not {int, float} & set(kinds):
            return
        whole = float not in kinds
        if not (is_number(value) and (isinstance(value, int) or not whole) and self._contains(value)):
            raise SettingError(f"{name}={format_value(value)}: {self.allowed or self._describe(whole)}")

    def _contains(self, value: float) -> bool:
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
            and (self.below is None or value < self.below)
            and not (self.odd and value % 2 == 0)
        )

    def _describe(self, whole: bool) -> str:
        """Say which numbers are allowed, such as "a whole number of at least 1" or "a share in (0, 1]"."""
        noun = ("an odd whole number" if self.odd else "a whole number") if whole else "a number"
        low = self.minimum if self.above is None else self.above
        high = self.maximum if self.below is None else self.below
        if low is not None and high is not None:
            noun = "a share" if not whole and (low, high) == (0, 1) else noun
            return f"{noun} in {'[' if self.above is None else '('}{low}, {high}{']' if self.below is None else ')'}"
        if low is not None:
            return f"{noun} {'of at least' if self.above is None else 'above'} {low}"
        if high is not None:
            return f"{noun} {'of at most' if self.below is None else 'below'} {high}"
        return noun


def setting(
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    odd: bool = False,
    choices: Iterable[object] = (),
    allowed: str | None = None,
    default: object = MISSING,
    kw_only: bool = False,
) -> Any:
    """Declare a dataclass field and the values that it may have.

    The field's annotation is part of the declaration. `int` allows whole numbers only, `float` any finite number, and
    `bool` only `true` and `false`; `int | None` and `float | None` also allow `null`. Other types, such as `str`
    without `choices`, are not checked.

    Args:
        minimum: The smallest number that is allowed.
        above: A number that is too small; anything larger is allowed.
        maximum: The largest number that is allowed.
        below: A number that is too large; anything smaller is allowed.
        odd: Whether only odd numbers are allowed.
        choices: All values that are allowed.
        allowed: How the error describes the allowed values. By default it is made from the bounds.
        default: The value if none is given. Without it the setting must be given.
        kw_only: Whether the setting can be given by its name only.

    Returns:
        A dataclass field. Write it as the default of an annotated attribute.
    """
    rule = Rule(minimum, above, maximum, below, odd, tuple(choices), allowed)
    return field(default=default, kw_only=kw_only, metadata={RULE: rule})


def check_settings(owner: DataclassInstance, group: str) -> None:
    """Check every field of a dataclass instance that `setting` declares.

    Args:
        owner: A dataclass instance, such as a method.
        group: The configuration group that errors name, such as "method".

    Raises:
        SettingError: A value is not allowed. The message names the setting, the value and the allowed values.
    """
    for declared in fields(owner):
        rule = declared.metadata.get(RULE)
        if rule is not None:
            rule.check(
                f"{group}.{declared.name}",
                getattr(owner, declared.name),
                _list_kinds(type(owner), declared.name, declared.type),
            )


def _list_kinds(owner: type, name: str, hint: object) -> tuple[object, ...]:
    """Return the types of an annotation: both of `int | None`, one of `int`."""
    if isinstance(hint, str):  # a module with `from __future__ import annotations`
        hint = get_type_hints(owner)[name]
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def check_layers(name: str, chosen: Sequence[int], depth: int | None, least: int = 0) -> None:
    """Check a setting that lists layers of a model with `depth` layers.

    Args:
        name: The setting with its group, such as `method.filters`. Its group also has the setting `depth`.
        chosen: Its value.
        depth: Number of layers that it refers to; None for any model.
        least: Smallest number of layers that it may list.

    Raises:
        SettingError: They are no numbers from 0 on in ascending order, too few, or not below `depth`.
    """
    layers = list(chosen)
    numbers = all(isinstance(layer, int) and layer >= 0 for layer in layers)
    if len(layers) < least or not numbers or sorted(set(layers)) != layers:
        raise SettingError(f"{name}={layers}: layers from 0 on, in ascending order")
    if depth is not None:
        require_int(f"{name.partition('.')[0]}.depth", depth, layers[-1] + 1 if layers else 1)


def scale_layers(name: str, chosen: Sequence[int], depth: int | None, layers: int) -> list[int]:
    """Return the layers that such a setting means in a model of `layers` layers, each once, in ascending order.

    Layers of a model with another number of layers move in proportion. Without `depth` they stay.

    Raises:
        SettingError: The model has fewer layers.
    """
    scaled = sorted({i * layers // depth for i in chosen}) if depth else list(chosen)
    if scaled and scaled[-1] >= layers:
        raise SettingError(f"{name}={scaled}: the model has layers 0 to {layers - 1}")
    return scaled

"""Settings are declared on fields and checked when a method, an allocator or a codec is made."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.codec import Codec
from kvbench.interfaces.method import Method
from kvbench.interfaces.settings import setting
from kvbench.validation import SettingError, require_int


@dataclass(frozen=True)
class Declared:
    whole: int = setting(minimum=1, default=1)
    odd: int = setting(minimum=1, odd=True, default=1)
    few: int = setting(minimum=2, maximum=4, default=2)
    most: int = setting(maximum=3, default=0)
    positive: float = setting(above=0, default=1)
    share: float = setting(minimum=0, below=1, default=0)
    ratio: float = setting(above=0, below=2, default=1)
    less: float = setting(below=2, default=1)
    number: float = setting(default=0)
    perhaps: int | None = setting(minimum=2, default=None)
    told: float | None = setting(maximum=1, allowed="at most 1, or null", default=None)
    flag: bool = setting(default=False)
    mode: str = setting(choices=("a", "b"), default="a")
    text: str = setting(default="")


@dataclass(frozen=True)
class OwnMethod(Declared, Method):
    name: str = "own"


@dataclass(frozen=True)
class OwnAllocator(Declared, Allocator):
    name: str = "own"


@dataclass(frozen=True)
class OwnCodec(Declared, Codec):
    name: str = "own"


REFUSED = [
    ("whole", 0, "whole=0: a whole number of at least 1"),
    ("whole", 1.0, "whole=1.0: a whole number of at least 1"),
    ("whole", True, "whole=true: a whole number of at least 1"),
    ("whole", None, "whole=null: a whole number of at least 1"),
    ("odd", 4, "odd=4: an odd whole number of at least 1"),
    ("odd", -1, "odd=-1: an odd whole number of at least 1"),
    ("few", 5, "few=5: a whole number in [2, 4]"),
    ("few", 1, "few=1: a whole number in [2, 4]"),
    ("most", 4, "most=4: a whole number of at most 3"),
    ("positive", 0, "positive=0: a number above 0"),
    ("positive", float("inf"), "positive=inf: a number above 0"),
    ("positive", float("nan"), "positive=nan: a number above 0"),
    ("share", 1, "share=1: a share in [0, 1)"),
    ("share", -0.1, "share=-0.1: a share in [0, 1)"),
    ("ratio", 2, "ratio=2: a number in (0, 2)"),
    ("less", 2, "less=2: a number below 2"),
    ("number", "1", "number=1: a number"),
    ("perhaps", 1, "perhaps=1: a whole number of at least 2"),
    ("told", 2, "told=2: at most 1, or null"),
    ("flag", "no", "flag=no: choose one of true, false"),
    ("mode", "c", "mode=c: choose one of a, b"),
]


@pytest.mark.parametrize("kind, group", [(OwnMethod, "method"), (OwnAllocator, "allocator"), (OwnCodec, "codec")])
@pytest.mark.parametrize("name, value, message", REFUSED)
def test_a_wrong_value_is_refused_by_name_with_the_allowed_values(kind, group, name, value, message):
    with pytest.raises(SettingError) as caught:
        kind(**{name: value})
    assert str(caught.value) == f"{group}.{message}"


def test_allowed_values_are_taken_at_the_bounds_and_inside():
    own = dict(few=4, most=3, positive=1e-9, share=0.999, ratio=1.5, less=-5, perhaps=2, told=1, flag=True, mode="b")
    made = OwnMethod(odd=3, whole=10**9, text="anything", number=-2.5, **own)
    assert {name: getattr(made, name) for name in own} == own


def test_a_setting_without_a_default_must_be_given():
    @dataclass(frozen=True)
    class Needed(Method):
        window: int = setting(minimum=1)

    with pytest.raises(TypeError, match="window"):
        Needed("needed")
    assert Needed("needed", 3).window == 3


def test_a_method_that_checks_in_its_own_post_init_still_works():
    @dataclass(frozen=True)
    class Old(Method):
        window: int

        def __post_init__(self):
            super().__post_init__()
            require_int("method.window", self.window, 1)

    @dataclass(frozen=True)
    class OldAllocator(Allocator):
        window: int

        def __post_init__(self):
            require_int("allocator.window", self.window, 1)

    assert Old("old", 2).window == OldAllocator("old", 2).window == 2
    for wrong in (lambda: Old("old", 0), lambda: OldAllocator("old", 0), lambda: Old("old", 2, decode_interval=0)):
        with pytest.raises(SettingError):
            wrong()

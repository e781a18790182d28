"""Budgets become whole rows exactly; protected rows shrink to what fits."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvbench.interfaces.budget import Budget
from kvbench.interfaces.method import fit_protected
from kvbench.interfaces.rows import Rows
from kvbench.kernels.cut_order import LINE, count_marks
from kvbench.validation import SettingError, exact_share

FRACTIONS = st.floats(0, 1, exclude_min=True)


def test_decimal_arithmetic_where_floats_are_off():
    assert int(1000 * (1 - 0.9)) == 99 and Budget(0.1).rows(1000, 1000) == 100
    for value, prompt in ((0.29, 100), (0.57, 100), (0.07, 100), (0.0035, 10**4), (0.55, 20), (0.28, 25)):
        assert Budget(value).rows(prompt, prompt) == Fraction(str(value)) * prompt
    off = [k for k in range(1, 100) if int(k / 100 * 100) != k]
    assert off and all(Budget(k / 100).rows(100, 100) == k for k in range(1, 100))
    assert Budget(0.3).rows(9, 9) == 2 and Budget(0.3).rows(10, 10) == 3  # floored


@given(st.integers(1, 10**6), st.integers(0, 6), st.integers(1, 10**6))
def test_a_decimal_share_is_floored_exactly(digits, places, prompt):
    value = Decimal(digits).scaleb(-places)
    if value < 1:
        assert Budget(float(value)).rows(prompt, 7) == max(1, digits * prompt // 10**places)


@given(FRACTIONS, st.integers(1, 10**7), st.integers(1, 10**7))
def test_rows_of_any_share(value, prompt, seen):
    rows = Budget(value).rows(prompt, seen)
    if value == 1:
        assert rows is None and Budget(value).everything
        return
    assert type(rows) is int and rows == max(1, math.floor(Fraction(repr(value)) * prompt))
    assert 1 <= rows <= prompt
    assert rows <= Budget(value).rows(prompt + 1, seen)
    assert Budget(value, "seen").rows(prompt, seen) == Budget(value).rows(seen, prompt)


@given(st.integers(2, 10**9), st.integers(1, 10**6))
def test_rows_of_whole_numbers(value, prompt):
    assert Budget(value).rows(prompt, prompt) == Budget(value, "seen").rows(prompt, 1) == value
    assert not Budget(value).everything


@pytest.mark.parametrize(
    "value",
    [1, 0, -1, -7, 0.0, -0.0, -0.5, 1.0000001, 2.0, 1.5, math.nan, math.inf, -math.inf, True, False, "0.5", "10"]
    + [[0.5], (2,), 0.5j, Decimal("0.5"), torch.tensor(0.5), np.array([0.5, 0.5])],
    ids=repr,
)
def test_what_is_no_budget_is_refused(value):
    with pytest.raises(SettingError) as error:
        Budget(value)
    assert str(error.value).startswith("budget=") and "fraction" in str(error.value) and "1]" in str(error.value)
    assert "\n" not in str(error.value)
    if isinstance(value, int) and value == 1 and value is not True:
        assert "1.0" in str(error.value)


@given(st.integers(1, 500), st.integers(1, 500))
def test_without_a_budget_there_is_no_limit(prompt, seen):
    free = Budget(None)
    assert (free.rows(prompt, seen), free.share(prompt, seen)) == (seen, seen)
    assert free.fraction is None and not free.everything


def test_numpy_shares_are_floats():
    assert Budget(np.float64(0.29)).rows(100, 100) == 29


def test_what_a_share_is_of():
    with pytest.raises(SettingError, match="^budget_of=tokens: choose one of prompt, seen$"):
        Budget(0.5, "tokens")
    assert Budget(0.5).rows(100, 30) == 50 and Budget(0.5, "seen").rows(100, 30) == 15


@given(st.lists(st.tuples(*[st.booleans()] * 3), min_size=1, max_size=30), st.integers(1, 35))
def test_recents_give_way_before_sinks_and_the_last_sinks_before_the_first(drawn, quota):
    sinks, recents, present = (torch.tensor([[column]]) for column in zip(*drawn, strict=True))
    nothing = torch.zeros(1, 1, len(drawn), 1)
    rows = Rows(nothing, nothing, torch.arange(len(drawn))[None, None], present.float())
    first = [j for j, (sink, _, there) in enumerate(drawn) if sink and there]
    newest = [j for j, (_, recent, there) in reversed(list(enumerate(drawn))) if recent and there]
    room = quota - 1 if quota > 1 else 1

    def shrunk(*masks):
        return {j for j, safe in enumerate(fit_protected(*masks, rows, quota).kept[0, 0].tolist()) if safe}

    both = first[:room] + [j for j in newest if j not in first[:room]]
    assert shrunk(sinks, recents) == set(both[:room])
    assert shrunk(sinks, None) == set(first[:room])
    assert shrunk(None, recents) == set(newest[:room])
    assert shrunk(None, None) == set()


@pytest.mark.parametrize("length", [0, 1, LINE, LINE + 1, 3 * LINE])
def test_marks_of_a_line_are_counted_up_to_each_place(length):
    marks = torch.rand(2, 3, length, generator=torch.Generator().manual_seed(length)) < 0.5
    assert torch.equal(count_marks(marks), marks.cumsum(-1))


@given(st.integers(0, 100), st.integers(0, 10**6))
def test_a_part_is_exact_decimal_arithmetic(percent, count):
    assert exact_share(percent / 100, count) == percent * count // 100


@given(st.floats(0, 1), st.integers(0, 1 << 30))
@example(0.1234567890123456, 1 << 30)
@example(1e-5, 300000)
def test_a_part_of_a_tensor_is_as_exact(share, count):
    """With more digits than one product of 64 bits holds."""
    assert exact_share(share, count) == int(Fraction(str(share)) * count)
    assert int(exact_share(share, torch.tensor(count))) == exact_share(share, count)

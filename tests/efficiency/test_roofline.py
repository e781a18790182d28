"""The least that a score must read and compute, by hand for a small shape."""

import pytest

from kvbench.efficiency.roofline import Machine, WeightSizes, compute_score_needs, decode_ms

SIZES = {"batch": 2, "heads": 3, "group": 4, "rows": 1000, "tokens": 8, "dim": 128, "hidden": 512, "element": 2}
ROWS = 2 * 3 * 1000  # rows of all KV heads
KEY = 128 * 2  # bytes


@pytest.mark.parametrize(
    ("method", "settings", "bytes_a_row", "operations_a_row"),
    [
        ("random", {}, 4, 0),
        ("knorm", {}, KEY + 4, 0),
        ("keydiff", {}, 2 * KEY + 4, 0),  # the mean key comes from all keys, so each is read twice
        ("tova", {}, KEY + 4 + 8 * 4, 2 * 4 * 128),  # four logits a row are written and read, 16 bytes each way
        ("snapkv", {"window": 4}, KEY + 4 + 8 * 4 * 4, 2 * 4 * 4 * 128),
        ("snapkv", {"window": 64}, 2 * KEY + 4, 2 * 4 * 64 * 128),  # 2 KB of logits: reading the keys again is cheaper
        ("dropkv", {"window": 1}, KEY + 2 * KEY + 4 + 8 * 4, 2 * 2 * 4 * 128),
    ],
)
def test_needs_of_a_row(method, settings, bytes_a_row, operations_a_row):
    assert compute_score_needs(method, settings, SIZES) == (ROWS * bytes_a_row, ROWS * operations_a_row)


def test_a_method_without_a_floor_has_no_needs():
    assert compute_score_needs("mine", {}, SIZES) is None


def test_a_token_reads_and_computes_at_the_same_time_or_in_turn():
    machine, weights = Machine(bandwidth=1e12, flops=1e13), WeightSizes(3 * 10**9, 2 * 10**9, 0)
    assert decode_ms(machine, weights, 10**9, 1, 2) == pytest.approx((3.0, 3.2))
    assert decode_ms(machine, weights, 10**9, 1, 2, 10**11) == pytest.approx((10.2, 13.2))


def test_a_machine_reads_and_computes_at_the_same_time():
    machine = Machine(bandwidth=1e12, flops=1e13)
    assert machine.ms(2e9, 1e9) == pytest.approx(2.0) and machine.ms(1e9, 1e11) == pytest.approx(10.0)

"""The least that a score must read and compute, by hand for a small shape."""

import pytest
import torch
from transformers import CONFIG_MAPPING

from kvbench.efficiency.roofline import (
    Machine,
    WeightSizes,
    compute_score_needs,
    decode_ms,
    make_needs,
    prefill_ms,
    prefill_ratio,
)
from kvbench.models.loading import make_random_model
from kvbench.models.random_weights import RandomCheckpoint

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
        ("pqcache", {"bits": 6, "iterations": 24}, KEY + 4, 2 * 128 * 64 * 25),
        ("kivi", {}, 2 * KEY + 4, 0),
        ("fp8", {}, 2 * KEY + 4, 0),
        ("full", {}, 0, 0),
    ],
)
def test_needs_of_a_row(method, settings, bytes_a_row, operations_a_row):
    assert compute_score_needs(method, settings, SIZES) == (ROWS * bytes_a_row, ROWS * operations_a_row)


def test_a_method_without_a_floor_has_no_needs():
    assert compute_score_needs("mine", {}, SIZES) is None


def test_a_token_reads_and_computes_at_the_same_time_or_in_turn():
    machine, weights = (
        Machine(bandwidth=1e12, flops=1e13),
        WeightSizes(total=3 * 10**9, read=2 * 10**9, layers=9 * 10**8, output=10**8),
    )
    assert decode_ms(machine, weights, 10**9, 1) == pytest.approx((3.0, 3.2))
    assert decode_ms(machine, weights, 10**9, 1, 10**11) == pytest.approx((10.2, 13.2))


def test_a_token_reads_the_experts_that_it_chooses():
    """Three layers of 8 experts, of which a token chooses 2: 64 × (2 × 32 + 32) weights each."""
    config = CONFIG_MAPPING["qwen3_moe"](
        vocab_size=128, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    weights = WeightSizes.of(make_random_model(config, torch.bfloat16, "meta", 0))
    assert (weights.experts, weights.share) == (3 * 8 * 64 * 96 * 2, 0.25)
    assert weights.read_by(1) == weights.read + weights.experts / 4
    assert weights.read_by(2) == weights.read + weights.experts * 7 / 16
    machine = Machine(bandwidth=1e12, flops=1e10)
    assert decode_ms(machine, weights, 0, 2)[0] == pytest.approx(2 * weights.read_by(1) / 1e7)


def test_a_machine_reads_and_computes_at_the_same_time():
    machine = Machine(bandwidth=1e12, flops=1e13)
    assert machine.ms(2e9, 1e9) == pytest.approx(2.0) and machine.ms(1e9, 1e11) == pytest.approx(10.0)


RAW = {"name": "raw"}


@pytest.fixture(scope="module")
def shape_8b():
    return make_random_model(RandomCheckpoint.like("llama31_8b", 0).config(), torch.bfloat16, "meta", 0)


@pytest.mark.parametrize(
    "method, codec, ratio",
    [
        ({"name": "full"}, RAW, 1), ({"name": "full"}, {"name": "kivi"}, 1), ({"name": "knorm"}, RAW, 1),
        ({"name": "h2o"}, RAW, 1.19), ({"name": "observed_attention"}, RAW, 1.19), ({"name": "criticalkv"}, RAW, 1.05),
        ({"name": "pqcache", "bits": 6, "iterations": 25}, RAW, 1.005), ({"name": "mine"}, RAW, None),
        ({"name": "h2o"}, {"name": "mine"}, None),
    ],
)  # fmt: skip
def test_a_prefill_s_least_ratio_counts_what_a_method_does_beside(shape_8b, method, codec, ratio):
    """At 32k: attention has 2.8 of 7.4·10¹⁴ operations, and column sums need half as many again."""
    found = prefill_ratio(shape_8b, 32768, method, codec)
    assert found == (None if ratio is None else pytest.approx(ratio, abs=0.004))


def test_blocks_are_scored_one_by_one_and_packed_once(shape_8b):
    method, codec, seen = {"name": "knorm"}, {"name": "kivi"}, []
    needs, one = make_needs(shape_8b, 2, method, codec), Machine(1e12, 1e30)

    def noting(rows, tokens, packed):
        seen.append((rows, tokens, packed, *needs(rows, tokens, packed)))
        return needs(rows, tokens, packed)

    plain = prefill_ms(one, shape_8b, 1000, 2, 400, 300)
    more = prefill_ms(one, shape_8b, 1000, 2, 400, 300, noting)
    assert [own[:3] for own in seen] == [(400, 400, 0), (700, 400, 0), (500, 200, 300)]
    heads, key = 2 * 8, 128 * 2
    counted = [heads * rows * (key + 4) for rows in (400, 700, 500)]
    counted[-1] += heads * 300 * (2 * key + 4)
    assert [own[3] for own in seen] == counted
    assert more - plain == pytest.approx(1000 * 32 * sum(counted) / 1e12)

"""H2O and observed attention: votes added up query by query in float64, as the formula says."""

import numpy as np
import pytest
import torch

import kvbench
from kvbench.kernels.accumulated_attention import accumulated_attention
from kvbench.kernels.accumulated_attention import reference as votes_reference
from kvbench.kernels.attention import attend
from kvbench.kernels.window_attention import window_probabilities
from kvbench.validation import SettingError
from tests.support.oracle_scores import HeavyHitters
from tests.support.oracle_shares import share_interpolated
from tests.support.oracles import assert_engines_agree, protect_newest, protect_nothing
from tests.support.selection import choose_quick
from tests.support.tiny_models import ids, tiny


@pytest.mark.cover
@pytest.mark.parametrize("block", [None, 1, 9])
@pytest.mark.parametrize("norm, gqa", [("none", "mean"), ("none", "max"), ("count", "mean")])
@pytest.mark.parametrize("model", choose_quick(["llama", "qwen3", "mistral", "gemma3", "phi3"], "llama"))
def test_h2o(model, norm, gqa, block):
    args = dict(recent=0.5, norm=norm, gqa=gqa)
    tokens = 30 if block == 1 else 50
    assert_engines_agree(
        model, HeavyHitters(norm, gqa).keeps(13, protect_newest(6)), "h2o", 13, block, tokens, dense_cuts=True, **args
    )


@pytest.mark.parametrize("block", [None, 9])
def test_h2o_appends_while_decoding_where_it_does_not_cut(block):
    held = assert_engines_agree(
        "llama3",
        HeavyHitters("none", "mean").keeps(13, protect_newest(8)),
        "h2o",
        13,
        block,
        45,
        preset="kvcache_factory",
    )
    assert len(held.places(0, 0)) == 13 + 7


@pytest.mark.parametrize("block", [None, 9])
def test_h2o_shares_rows_among_heads(block):
    share = share_interpolated(0.2)
    ada = ("ada", {"mode": "interpolate", "alpha": 0.2})
    cut = HeavyHitters("none", "mean").keeps(13, protect_newest(6), share)
    assert_engines_agree("llama", cut, "h2o", 13, block, 45, allocator=ada, dense_cuts=True, preset="paper")


@pytest.mark.parametrize("block", [None, 9])
@pytest.mark.parametrize("model", choose_quick(["llama", "yarn"], "llama"))
def test_observed_attention(model, block):
    assert_engines_agree(
        model, HeavyHitters("count", "mean").keeps(13, protect_nothing), "observed_attention", 13, block, 45
    )
    assert_engines_agree(
        model, HeavyHitters("count", "mean").keeps(13, protect_nothing), "h2o", 13, block, 45, preset="kvpress"
    )


def places(**args) -> list[list[int]]:
    held = kvbench.prefill(tiny("llama"), ids(90), "h2o", 20, method_args=args)
    return [held.places(layer, head).tolist() for layer in range(3) for head in range(2)]


def test_count_forgives_rows_that_few_queries_could_see():
    """Plain sums prefer early rows by construction."""
    plain, counted = places(recent=0, norm="none"), places(recent=0, norm="count")
    assert np.mean(counted) > np.mean(plain) + 5


def test_all_queries_vote_and_not_the_last_ones_only():
    """SnapKV without pooling takes the last queries' votes, H2O all."""

    def snapkv(window: int) -> list[list[int]]:
        args = dict(window=window, kernel=1, pooling="avg", group="after")
        held = kvbench.prefill(tiny("llama"), ids(90), "snapkv", 20, method_args=args)
        return [held.places(layer, head).tolist() for layer in range(3) for head in range(2)]

    assert places(recent=8) != snapkv(8)


def test_recents_are_a_share_or_rows():
    for recent, count in [(0.5, 10), (0.24, 4), (7, 7), (0, 0)]:
        held = kvbench.prefill(tiny("llama"), ids(90), "h2o", 20, method_args={"recent": recent})
        assert held.contexts[0].own_layers[0].tally.protected == count
    for recent in (1.0, -1, True):
        with pytest.raises(SettingError, match="method.recent"):
            kvbench.prefill(tiny("llama"), ids(9), "h2o", 5, method_args={"recent": recent})


@pytest.mark.parametrize("chunk", [1, 700, 1 << 20])
@pytest.mark.parametrize("heads, groups, tokens, rows", [(2, 3, 13, 29), (1, 1, 17, 17), (3, 4, 1, 7)])
def test_votes_are_column_sums_of_the_probabilities(monkeypatch, chunk, heads, groups, tokens, rows):
    """Against the whole matrix at once, with masses, absent rows and chunks that do not divide."""
    monkeypatch.setattr(votes_reference, "CHUNK", chunk)
    draw = torch.Generator().manual_seed(0)
    queries = torch.randn(2, heads * groups, tokens, 16, generator=draw, dtype=torch.float64)
    keys = torch.randn(2, heads, rows, 16, generator=draw, dtype=torch.float64)
    mass = torch.randint(0, 4, (2, heads, rows), generator=draw).double()
    mass[..., -tokens:] = 1
    p = window_probabilities(queries, keys, mass, 0.3)
    logits = queries.view(2, heads, groups, tokens, 16) @ keys[:, :, None].mT * 0.3 + mass.log()[:, :, None, None]
    later = torch.arange(rows) > torch.arange(rows - tokens, rows)[:, None]
    lse = logits.masked_fill(later, -torch.inf).logsumexp(-1).flatten(1, 2)
    found = accumulated_attention(queries, keys, mass, lse, 0.3)
    torch.testing.assert_close(found, p.sum(-2), rtol=1e-12, atol=1e-12)
    assert (found[(mass == 0)[:, :, None].expand_as(found)] == 0).all()


@pytest.mark.parametrize("heads, groups, tokens", [(2, 3, 37), (1, 1, 1), (3, 4, 130)])
def test_the_fused_log_sum_exp_is_the_reference(heads, groups, tokens):
    """A whole prompt on the CPU takes both from one pass; anything else asked of it is refused."""
    draw = torch.Generator().manual_seed(0)
    queries = torch.randn(2, heads * groups, tokens, 16, generator=draw)
    keys, values = (torch.randn(2, heads, tokens, 16, generator=draw) for _ in range(2))
    found = attend(queries, keys, values, None, 0.3, lse=True, implementation="sdpa")
    expected = attend(*(x.double() for x in (queries, keys, values)), None, 0.3, lse=True, implementation="reference")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="sdpa"):
        attend(queries, keys, values, torch.ones(2, heads, tokens), 0.3, lse=True, implementation="sdpa")


def test_votes_refuses_shapes_that_do_not_fit():
    x = torch.zeros(1, 3, 4, 8)
    with pytest.raises(ValueError, match="accumulated_attention"):
        accumulated_attention(x, x[:, :2], torch.ones(1, 2, 4), x[..., 0], 1.0)
    with pytest.raises(ValueError, match="accumulated_attention"):
        accumulated_attention(x, x, torch.ones(1, 3, 4), x[..., :3, 0], 1.0)

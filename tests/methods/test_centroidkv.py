"""CentroidKV: its rounds of merging in loops and float64, one-shot and block by block."""

import pytest
import torch

import kvbench
from kvbench.config.catalogue import build, load_settings
from tests.support.dense_engine import DenseEngine
from tests.support.oracle_scores import cut_to_centroids
from tests.support.oracles import CLOSE, assert_engines_agree, assert_same_rows
from tests.support.selection import choose_quick
from tests.support.tiny_models import ids, tiny


@pytest.mark.cover
@pytest.mark.parametrize("block", [None, 9, 25])
@pytest.mark.parametrize("chunk, r", [(8, 0.8), (None, 0.5), (7, 1.0), (2, 0.8)])
@pytest.mark.parametrize("model", choose_quick(["llama", "gemma3"], "llama"))
def test_centroidkv(model, chunk, r, block):
    args = dict(sinks=2, recents=5, chunk=chunk, r=r)
    rounds = []
    held = assert_engines_agree(
        model, cut_to_centroids(15, **args, rounds=rounds), "centroidkv", 15, block, decoding=False, **args
    )
    assert max(rounds) >= (3 if block is None else 1)
    assert held.masses(2, 0).sum() == 67 and held.masses(2, 0).max() > 1


@pytest.mark.parametrize("quota", [2, 3, 8, 40, 59, 60])
def test_centroidkv_is_exact_at_every_size(quota):
    args = dict(sinks=4, recents=6, chunk=16, r=0.8)
    assert_engines_agree("qwen3", cut_to_centroids(quota, **args), "centroidkv", quota, **args)


def test_centroidkv_can_hold_one_row():
    args = dict(sinks=4, recents=6, chunk=16, r=0.8)
    held = assert_engines_agree("llama", cut_to_centroids(1, **args), "centroidkv", 0.02, None, **args)
    assert held.masses(0, 0).tolist() == [60] + [1] * 7


@pytest.mark.parametrize("interval", [1, 3])
def test_centroidkv_clusters_again_while_decoding(interval):
    args = dict(sinks=2, recents=5, chunk=8, r=0.8)
    prompt, model = ids(60), "llama"
    dense = DenseEngine(model, cut_to_centroids(15, **args))
    dense.prefill(prompt, None)
    held = kvbench.prefill(tiny(model), prompt, "centroidkv", 15, method_args={**args, "decode_interval": interval})
    for step in range(1, 8):
        dense.cuts_decoding = step % interval == 0
        token = ids(1, seed=step)
        torch.testing.assert_close(held.extend(token)[0].double(), dense.extend(token), **CLOSE)
        assert_same_rows(held, dense)
    assert len(held.places(0, 0)) == 15 + 7 % interval


def test_centroidkv_matches_in_single_precision():
    """Keys in bfloat16: cosines that are rounded to it tie everywhere, and which rows merge hangs on their order."""
    draw = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 2, 400, 32, generator=draw).bfloat16()
    places, mass = torch.arange(400).expand(1, 2, -1), torch.ones(1, 2, 400)
    method = build("method", load_settings("method", "centroidkv"))
    found = method.centroids([keys, keys, places, mass], 340)
    exact = method.centroids([keys.double(), keys.double(), places, mass.double()], 340)
    assert torch.equal(found[2], exact[2]) and torch.equal(found[3].double(), exact[3])
    assert found[0].dtype == torch.bfloat16


def test_centroidkv_merges_equal_rows_without_changing_attention():
    """A prompt of one token repeated, without position: all keys of a head are equal, and so is every output."""
    from tests.support.tiny_models import make_fresh

    model = make_fresh("llama")
    model.model.rotary_emb.register_buffer("inv_freq", torch.zeros_like(model.model.rotary_emb.inv_freq))
    prompt = torch.full((1, 50), 7)
    full = kvbench.prefill(model, prompt)
    held = kvbench.prefill(
        model, prompt, "centroidkv", 9, method_args={"sinks": 2, "recents": 2, "chunk": 8, "decoding": False}
    )
    assert held.masses(0, 0).sum() == 50 and len(held.masses(0, 0)) == 9
    more = ids(5)
    torch.testing.assert_close(held.extend(more), full.extend(more), rtol=1e-5, atol=1e-5)
    evicting = kvbench.prefill(model, prompt, "knorm", 9)
    assert not torch.allclose(evicting.extend(more), full.extend(more), rtol=1e-3, atol=1e-3)

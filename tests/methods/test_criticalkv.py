"""CriticalKV: its two stages in loops and float64 over bases, sizes and allocators."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

import kvbench
from kvbench.config.catalogue import build, load_settings, methods_available
from kvbench.kernels.projected_norms import projected_norms
from kvbench.kernels.projected_norms import reference as critical
from kvbench.validation import SettingError
from tests.support.dense_engine import DenseEngine, HeadView
from tests.support.method_files import build_policy, make_tiny_method_args
from tests.support.oracle_scores import SNAPKV, attention, cut_in_two_stages, score_mean_votes
from tests.support.oracle_shares import share_safeguarded
from tests.support.oracles import CLOSE, assert_engines_agree, assert_same_rows, protect_newest
from tests.support.selection import choose_quick, only_in_full
from tests.support.tiny_models import distinct, ids, tiny


@pytest.mark.cover
@pytest.mark.parametrize("block", [None, 9])
@pytest.mark.parametrize("alpha, epsilon", [(0.5, 1e-4), (0.25, 1e-2), (0.0, 0.0), (1.0, 1e-4)])
@pytest.mark.parametrize("model", choose_quick(["llama", "qwen3", "gemma3", "mistral"], "llama"))
def test_criticalkv(model, alpha, epsilon, block):
    cut = cut_in_two_stages(model, score_mean_votes(**SNAPKV), 13, alpha, epsilon, protect_newest(4))
    assert_engines_agree(model, cut, "criticalkv", 13, block, 45, alpha=alpha, epsilon=epsilon, base_args=SNAPKV)


@pytest.mark.cover
@pytest.mark.parametrize("block", [None, 9])
@pytest.mark.parametrize("model", choose_quick(["llama", "qwen3"], "llama"))
@pytest.mark.parametrize("quota, floor", [(13, 0.2), (20, 0.75)])
def test_criticaladakv(model, quota, floor, block):
    """Heads share rows by the base method's scores; each then runs both stages on its own quota, its safe rows stay."""
    first = 0.2 if floor == 0.2 else 0.1  # then more rows are safe than the first stage takes
    share, safe = share_safeguarded(floor), int(floor * quota) / quota
    cut = cut_in_two_stages(model, score_mean_votes(**SNAPKV), quota, first, 1e-4, protect_newest(4), share, safe)
    ada = ("ada", {"preset": "kvpress", "alpha": floor})
    assert_engines_agree(model, cut, "criticalkv", quota, block, 45, allocator=ada, base_args=SNAPKV, alpha=first)
    assert floor == 0.2 or changes(
        model, cut_in_two_stages(model, score_mean_votes(**SNAPKV), quota, first, 1e-4, protect_newest(4), share), cut
    )


def changes(model: str, one: Callable, other: Callable) -> bool:
    engines = [DenseEngine(model, cut) for cut in (one, other)]
    for engine in engines:
        engine.prefill(distinct(60), None)
    held = [[head.places.tolist() for layer in engine.held.values() for head in layer] for engine in engines]
    return held[0] != held[1]


def test_another_base_with_columns_of_its_own_that_cuts_while_decoding():
    def last_query(glance: HeadView) -> np.ndarray:
        return attention(glance, 1)[:, 0].mean(0)

    cut = cut_in_two_stages("llama", last_query, 13, 0.5, 1e-4)
    args = dict(base="tova", base_args={"preset": "keydiff_paper"}, decoding=True)
    dense, prompt, more = DenseEngine("llama", cut, cuts_decoding=True), *distinct(52).split([45, 7], dim=1)
    dense.prefill(prompt, 9)
    held = kvbench.prefill(tiny("llama"), prompt, "criticalkv", 13, 9, method_args=args)
    for part in more.split([1, 1, 5], dim=1):
        torch.testing.assert_close(held.extend(part)[0].double(), dense.extend(part), **CLOSE)
        assert_same_rows(held, dense)
    held = kvbench.prefill(
        tiny("llama"), ids(60), "criticalkv", 13, 9, method_args={"base": "h2o", "base_args": {"preset": "paper_max"}}
    )
    columns = held.contexts[0].own_layers[0].rows.columns
    assert set(columns) == {"votes0", "votes1", "votes2", "projected_norm"}


def places(method: str, **args) -> list[list[int]]:
    held = kvbench.prefill(tiny("llama"), ids(90), method, 20, method_args=args)
    return [held.places(layer, head).tolist() for layer in range(3) for head in range(2)]


def test_the_second_stage_changes_what_stays():
    base = places("snapkv", **SNAPKV)
    assert places("criticalkv", base_args=SNAPKV, alpha=1.0) == base
    assert places("criticalkv", base_args=SNAPKV, alpha=0.5) != base
    by_norm = dict(base_args=SNAPKV, epsilon=1.0)
    assert places("criticalkv", **by_norm) != places("criticalkv", base_args=SNAPKV)
    assert places("criticalkv", **by_norm, alpha=0.0) != places("criticalkv", **by_norm, alpha=0.5)


@pytest.mark.parametrize("chunk", [1, 1000, 1 << 22])
def test_norms_do_not_depend_on_chunks(monkeypatch, chunk):
    monkeypatch.setattr(critical, "CHUNK", chunk)
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(2, 3, 7, 5, generator=draw, dtype=torch.float64)
    weight = torch.randn(11, 3 * 4 * 5, generator=draw, dtype=torch.float64)
    found = projected_norms(values, weight, 12)
    outputs = torch.einsum("bhtd,ohgd->bhgto", values, weight.view(11, 3, 4, 5))
    torch.testing.assert_close(found, outputs.abs().sum(-1).mean(2), rtol=1e-12, atol=0)


@pytest.mark.parametrize("base", ["full", "centroidkv", "attention_matching"])
def test_a_base_must_score_and_leave_rows_as_they_are(base):
    with pytest.raises(SettingError, match=f"^method.base={base}"):
        kvbench.prefill(tiny("llama"), ids(9), "criticalkv", 5, method_args={"base": base, "base_args": {}})


def test_a_wrong_setting_of_the_base_is_named_as_such():
    settings = load_settings("method", "criticalkv", {"base": "snapkv", "base_args": {"window": -3}})
    with pytest.raises(SettingError, match=r"^method\.base=snapkv: window=-3: .*; method\.base_args=\{…\} holds"):
        build("method", settings)


def test_what_the_base_refuses_is_refused():
    with pytest.raises(SettingError, match="tova .*scope: group"):
        args = {"base": "tova", "base_args": {}}
        kvbench.prefill(tiny("llama"), ids(9), "criticalkv", 5, allocator="ada", method_args=args)


# Whatever the base method is, it is itself inside.


def held_by(method: str, decoding: bool, **args) -> tuple[list, torch.Tensor]:
    """Rows held after a prompt in two blocks and two more tokens, and the logits of the last."""
    args |= {"decoding": decoding, "decode_interval": 1} if "decoding" in load_settings("method", method) else {}
    block = None if build("method", load_settings("method", method, args)).one_block else 20
    held = kvbench.prefill(tiny("llama"), ids(40), method, 17, block, method_args=args)
    logits = [held.extend(token) for token in ids(2, seed=4).split(1, dim=1)][-1]
    return [held.places(layer, head).tolist() for layer in range(3) for head in range(2)], logits


METHODS = {name: build_policy(name, "uniform", "llama")[0] for name in methods_available()}
BASES = [
    name
    for name, own in METHODS.items()
    if own.scores
    and own.overrides("score")
    and not (own.merges or own.budget_setting or (own.captured and own.captured.streams))
]


@pytest.mark.cover
@pytest.mark.parametrize("decoding", [False, True])
@pytest.mark.parametrize("base", [name for name in BASES if name not in ("criticalkv", "kvzap", "kvgrad")])  # refused
def test_with_alpha_1_it_is_its_base(base, decoding):
    """Any method that scores rows: its state, columns, positions and files serve it as they do alone, and it votes
    while decoding exactly if the composite cuts there, whatever its own preset says.
    """
    own = make_tiny_method_args(base, "llama") | ({"use_vnorm": False} if base == "expected_attention" else {})
    if decoding and build_policy(base, "uniform", "llama")[0].needs_extra_reads:
        with pytest.raises(SettingError, match="^method.decoding=true: criticalkv has scores of the prompt only"):
            held_by("criticalkv", decoding, base=base, base_args=own)
        return
    rows, logits = held_by(base, decoding, **own)
    found, its = held_by("criticalkv", decoding, base=base, base_args=own, alpha=1.0)  # no second stage
    assert found == rows
    torch.testing.assert_close(its, logits)


@pytest.mark.parametrize("size", [30, only_in_full(60), only_in_full(90)])
def test_the_newest_stay_where_more_rows_are_safe_than_a_frozen_share_has(size):
    """⌊0.9·9⌋ = 8 rows of a head are safe and 8 its share; of 30 rows 27 would be safe, and 26 is what 8 become."""
    args = {"base": "h2o", "base_args": {}, "decoding": True, "decode_size": size}
    ada = {"preset": "kvpress", "alpha": 0.9}
    held = kvbench.prefill(
        tiny("wide"), distinct(100), "criticalkv", 9, None, "ada", method_args=args, allocator_args=ada
    )
    for token in ids(size, seed=3).split(1, dim=1):
        held.extend(token)
    newest = set(range(100 + size - size // 2, 100 + size))
    for layer in held.contexts[0].own_layers:
        own = [held.places(layer.index, head).tolist() for head in range(2)]
        assert sum(map(len, own)) == 2 * size and all(newest <= set(places) for places in own)


def test_values_count_once():
    with pytest.raises(SettingError, match="^method.base=expected_attention: values would count twice"):
        kvbench.prefill(tiny("llama"), ids(9), "criticalkv", 5, method_args={"base": "expected_attention"})


def test_what_the_base_remembers_of_the_prompt_is_dropped():
    args = {"base": "expected_attention", "base_args": {"use_vnorm": False}}
    held = kvbench.prefill(tiny("llama"), ids(60), "criticalkv", 17, 9, method_args=args)
    columns = sum(layer.rows.columns["projected_norm"].nbytes for layer in held.contexts[0].own_layers)
    assert held.bytes.state == columns


def test_the_bases_file_must_fit_the_model():
    args = {"base": "qfilters", "base_args": make_tiny_method_args("qfilters", "wide")}
    with pytest.raises(SettingError, match=r"^method\.path=.*the model \(3, 2, 32\)"):
        kvbench.prefill(tiny("llama"), ids(60), "criticalkv", 17, method_args=args)


def test_packed_rows_are_not_cut_while_decoding():
    """It counts when the composite cuts, not when its base would."""
    with pytest.raises(SettingError, match="^codec=kivi: criticalkv cuts while decoding"):
        kvbench.prefill(tiny("llama"), ids(140), "criticalkv", 100, codec="kivi", method_args={"decoding": True})
    args = {"base": "keydiff", "base_args": {}}
    held = kvbench.prefill(tiny("llama"), ids(140), "criticalkv", 100, codec="kivi", method_args=args)
    assert torch.isfinite(held.extend(ids(5))).all() and len(held.places(0, 0)) == 105

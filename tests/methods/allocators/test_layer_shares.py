"""Allocators that share rows among layers, against their rules in loops and float64, engine beside engine."""

import pytest
import torch

import kvbench
from kvbench.config.catalogue import build, load_settings
from kvbench.engine.compressed_cache import choose_cache
from kvbench.engine.generation import GenerationContext
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.observation import Observation
from kvbench.validation import SettingError
from tests.support.dense_engine import DenseEngine, Head, HeadView
from tests.support.oracle_scores import score_votes
from tests.support.oracle_shares import CakeRule, assert_allocator_agrees, assert_cake_agrees, round_shares
from tests.support.oracles import CLOSE, keep_by_score, protect_newest
from tests.support.selection import choose_quick, only_in_full
from tests.support.tiny_models import distinct, ids, tiny

# cake


@pytest.mark.cover
@pytest.mark.parametrize("block", [None, 9, only_in_full(1)])
@pytest.mark.parametrize("cascade", [True, False])
@pytest.mark.parametrize("model", ["llama", "qwen3", "gemma3", "mistral"])
def test_cake(model, cascade, block):
    held, rule = assert_cake_agrees(model, cascade, block, tokens=30 if block == 1 else 60)
    assert block == 1 or rule.differed
    assert held.contexts[0].own_layers[0].state.shared["allocation"] == "preferences"


@pytest.mark.parametrize("block", [4, 8, only_in_full(1)])
def test_cake_where_the_window_covers_all_that_is_held(block):
    """What was held before the block competes by the block's attention; the first row does not stay for ever."""
    args = dict(window=50, kernel=3, gamma=200.0)
    rule = CakeRule(10, [0, 1, 2], **args, tau1=1.0, tau2=1.0, cascade=False, tokens=80)
    cut = lambda glances: [rule.choose(g.rows, rule.indicator(g), 10, g.tokens) for g in glances]  # noqa: E731
    none = ("uniform", {})
    held = assert_allocator_agrees(
        DenseEngine("llama", cut), "llama", "cake", 10, block, none, decoding=True, tokens=80, **args
    )
    free = {held.places(layer, head)[0].item() for layer in range(3) for head in range(2)}
    assert len(free) > 1


def sizes(method="cake", budget=20, block=None, tokens=90, model="llama", name="cake", **allocator_args):
    held = kvbench.prefill(
        tiny(model), ids(tokens), method, budget, block, name, allocator_args={"window": 6, **allocator_args}
    )
    return [len(held.places(layer, 0)) for layer in range(3)]


def test_the_cascade_saves_memory_on_the_way():
    """Shares only shrink as more layers are read, so both end alike but for single rows that rounding moved."""

    def held(cascade: bool, tau2: float = 0.4):
        args = {"window": 6, "cascade": cascade, "tau2": tau2}
        return kvbench.prefill(tiny("llama"), ids(90), "cake", 20, None, "cake", allocator_args=args)

    def rows(one) -> list[list[int]]:
        return [one.places(layer, head).tolist() for layer in range(3) for head in range(2)]

    once, cascade = held(False), held(True)
    peaks = [one.contexts[0].memory.peak for one in (once, cascade)]
    assert peaks[1] < 0.8 * peaks[0]
    assert sum(map(len, rows(once))) == 2 * 3 * 20 >= sum(map(len, rows(cascade))) > 2 * 3 * 20 - 6
    assert sum(len(set(a) ^ set(b)) for a, b in zip(rows(once), rows(cascade), strict=True)) <= 6
    assert rows(held(False, 9.0)) != rows(once)


@pytest.mark.parametrize("model", ["llama", "gemma3"])
@pytest.mark.parametrize("quota, block", [(30, None), (10, 20)])
def test_layers_that_were_first_left_whole_are_cut_too(model, quota, block):
    """The first layer may have the budget of all, more than there are rows; once all are read the budget is met."""
    choice = choose_cache(
        *(build(g, load_settings(g, n)) for g, n in dict(method="cake", allocator="cake", codec="raw").items())
    )
    context, counts = GenerationContext(tiny(model), choice, Budget(quota), block, (0,)), []
    own = context.own_layers
    handle = context.model.register_forward_hook(lambda *_: counts.append(sum(int(x.rows.counts()[0, 0]) for x in own)))
    try:
        context.prefill(distinct(60))
    finally:
        handle.remove()
    assert len(counts) == (1 if block is None else 3)
    assert max(counts) <= len(own) * quota and max(int(x.rows.counts()[0, 0]) for x in own) < 60


def test_the_variance_decides():
    def places(**args):
        held = kvbench.prefill(tiny("llama"), ids(90), "cake", 20, method_args={"window": 6, **args})
        return [held.places(layer, head).tolist() for layer in range(3) for head in range(2)]

    by_mean = dict(window=6, kernel=5, pooling="avg", group="after")
    snapkv = kvbench.prefill(tiny("llama"), ids(90), "snapkv", 20, method_args=by_mean)
    assert places(gamma=0.0) == [snapkv.places(layer, head).tolist() for layer in range(3) for head in range(2)]
    assert places(gamma=0.0) != places(gamma=200.0) != places(gamma=1.0)


@pytest.mark.cover
@pytest.mark.parametrize("method", ["snapkv", "knorm", "h2o", "tova", "dropkv", "random", "sink"])
@pytest.mark.parametrize("cascade", [True, False])
@pytest.mark.parametrize("block", [None, 9])
def test_cake_shares_rows_for_any_score(method, cascade, block):
    total = sum(sizes(method, block=block, cascade=cascade))
    assert total <= 60 if cascade else total == 60


def test_a_share_smaller_than_the_window_keeps_the_newest():
    held = kvbench.prefill(
        tiny("llama"), ids(90), "snapkv", 9, allocator="cake", allocator_args={"window": 2, "cascade": True}
    )
    for layer in range(3):
        kept = held.places(layer, 0).tolist()
        assert kept[1 - len(kept) :] == list(range(91 - len(kept), 90))


def test_recents_follow_the_last_share_and_not_the_first():
    """H2O's recents are half of a quota that the cascade makes smaller."""
    held = kvbench.prefill(
        tiny("llama"), ids(90), "h2o", 16, allocator="cake", allocator_args={"window": 2, "cascade": True, "tau2": 0.4}
    )
    for layer in held.contexts[0].own_layers:
        assert layer.tally.protected == len(held.places(layer.index, 0)) // 2
        assert layer.shown is None and set(layer.rows.columns) == {"votes0"}


@pytest.mark.cover
@pytest.mark.parametrize("cascade", [True, False])
@pytest.mark.parametrize("block", [None, 40])
def test_samples_of_a_batch_have_their_own_shares(cascade, block):
    prompts, more = torch.cat([ids(90), ids(90, 5), torch.full((1, 90), 7)]), ids(3, 8, batch=3)

    def read(sample: slice) -> tuple[torch.Tensor, list]:
        groups = dict(method="cake", allocator="cake", codec="raw")
        own = {"allocator": {"window": 6, "cascade": cascade, "tau2": 0.4}, "method": {"window": 6}}
        choice = choose_cache(*(build(g, load_settings(g, name, own.get(g))) for g, name in groups.items()))
        context = GenerationContext(tiny("llama"), choice, Budget(20), block, (0,) * len(prompts[sample]))
        context.prefill(prompts[sample])
        before = [layer.rows.counts().tolist() for layer in context.own_layers]
        return context.extend(more[sample]), list(zip(*before, strict=True))

    together, counts = read(slice(None))
    assert counts[0] != counts[1]
    for sample in range(3):
        alone, own = read(slice(sample, sample + 1))
        torch.testing.assert_close(together[sample], alone[0], **CLOSE)
        assert own[0] == counts[sample]


def test_methods_without_scores_cannot_be_cut_again():
    with pytest.raises(SettingError, match="^allocator=cake: centroidkv has no scores"):
        kvbench.prefill(tiny("llama"), ids(20), "centroidkv", 5, allocator="cake")


# pyramid


def official(quota: int, tokens: int, layer: int, layers: int, window: int, beta: int) -> int:
    """As published, for a prompt longer than the capacity: rows of one layer."""
    base = quota - window
    least = base // beta
    most = base * 2 - least
    if most >= tokens - window:
        most = tokens - window
        least = base * 2 - most
    if tokens < base * 2:
        return quota
    return most - layer * ((most - least) // (layers - 1)) + window


def line(quota: float, tokens: int, layer: int, layers: int, window: int, beta: int) -> float:
    """kvpress, before rounding: removes tokens - quota rows."""
    capacity = window + quota
    least = (capacity - window) / beta
    most = (capacity - window) * 2 - least
    if most >= tokens - window:
        most = tokens - window
        least = (capacity - window) * 2 - most
    if not tokens >= most >= least >= window:
        return float(quota)
    return most - layer * ((most - least) / (layers - 1))


def asked(budget: float | int, tokens: int, layers: int, **args) -> tuple[list[int], str]:
    """The allocator's answer for a prompt in one block, without a model."""
    quota, share = Budget(budget).rows(tokens, tokens), Budget(budget).share(tokens, tokens)
    allocator = build("allocator", load_settings("allocator", "pyramid", args))
    shared: dict = {}
    found = []
    for layer in range(layers):
        queries = torch.empty(1, 1, tokens, 0)
        observation = Observation(
            queries, queries, None, 1.0, None, None, layer, layers, 0, tokens, True, False, tuple(range(layers)),
            share=share,
        )  # fmt: skip
        found.append(allocator.layer(quota, observation, lambda: None, shared))
    return found, shared["allocation"]


@pytest.mark.parametrize("layers", [2, 3, 28, 32])
@pytest.mark.parametrize("quota", [9, 64, 128, 500, 2048])
@pytest.mark.parametrize("tokens", [600, 4096, 31500])
def test_pyramid_is_the_published_one_with_the_total_made_exact(tokens, quota, layers):
    if tokens <= quota:
        return
    found, branch = asked(quota, tokens, layers)
    published = [official(quota, tokens, layer, layers, 8, 20) for layer in range(layers)]
    assert sum(found) == quota * layers
    excess = sum(published) - quota * layers
    assert 0 <= excess <= layers * (layers - 2) / 2
    if min(published) - excess / layers >= 9:
        taken = [a - b for a, b in zip(published, found, strict=True)]
        assert set(taken) <= {excess // layers, -(-excess // layers)} and taken == sorted(taken, reverse=True)
    assert branch == ("uniform" if tokens < 2 * (quota - 8) else "pyramid")
    assert found == sorted(found, reverse=True) and (branch == "pyramid") == (len(set(found)) > 1 or quota == 9)


def test_the_published_total_is_too_large():
    """32 layers, 128 rows each, 4096 tokens: steps of 7.35 rows are floored to 7."""
    published = [official(128, 4096, layer, 32, 8, 20) for layer in range(32)]
    assert sum(published) - 32 * 128 == 176
    assert sum(asked(128, 4096, 32)[0]) == 32 * 128


@pytest.mark.parametrize("quota, tokens", [(1400, 4096), (3000, 4096), (2000, 100000), (1024, 4096), (64, 4096)])
def test_pyramid_as_kvpress_computes_it(quota, tokens):
    found, branch = asked(quota, tokens, 32, preset="kvpress")
    exact_line = [line(quota, tokens, layer, 32, 64, 20) for layer in range(32)]
    assert sum(found) == 32 * quota
    assert max(abs(a - b) for a, b in zip(found, exact_line, strict=True)) <= 1
    assert branch == ("uniform" if quota < 1280 else "pyramid")  # c/β < w
    assert (branch == "uniform") == (set(found) == {quota})


def kvpress(keep: float, tokens: int, layers: int) -> tuple[list[float], str]:
    """Rows of every layer before rounding and the rule, in its own float64 arithmetic and with its own defaults."""
    compression_ratio, window_size, beta = 1 - keep, 64, 20
    capacity = window_size + tokens * (1 - compression_ratio)
    fewest = (capacity - window_size) / beta
    most = (capacity - window_size) * 2 - fewest
    if most >= tokens - window_size:
        most = tokens - window_size
        fewest = (capacity - window_size) * 2 - most
    if not (tokens >= most >= fewest >= window_size):
        return [tokens * (1 - compression_ratio)] * layers, "uniform"
    return [most - layer * (most - fewest) / (layers - 1) for layer in range(layers)], "pyramid"


@pytest.mark.cover
@pytest.mark.parametrize("keep", [0.5, 0.2, 0.3])
@pytest.mark.parametrize("layers", [6, 32])
@pytest.mark.parametrize("first", choose_quick(range(10), 0, 3, 7))
def test_pyramid_of_a_share_of_the_prompt_is_that_of_kvpress(first, layers, keep):
    """Odd lengths too, whose half is no whole number of rows: the same rule, and no layer is more than a row away from
    what kvpress rounds to. At a fifth only more than 6400 tokens have a pyramid.
    """
    rules = set()
    for tokens in [*[*range(129, 2560, 7), *range(130, 2560, 14)][first::10], 2559, 6401, 6402, 6999]:
        found, rule = asked(keep, tokens, layers, preset="kvpress")
        expected, theirs = kvpress(keep, tokens, layers)
        assert rule == theirs, tokens
        assert sum(found) == layers * Budget(keep).rows(tokens, tokens)
        assert max(abs(a - round(b)) for a, b in zip(found, expected, strict=True)) <= 1, tokens
        rules.add((rule, tokens % 2))
    assert rules >= {("pyramid", 0), ("pyramid", 1)}


def test_arithmetics_and_slopes_differ():
    answers = [asked(1400, 4096, 32, **args)[0] for args in ({}, {"preset": "kvpress"}, {"beta": 2}, {"window": 64})]
    assert len({tuple(answer) for answer in answers}) == 4


def test_what_fits_is_kept_and_one_layer_has_no_slope():
    assert asked(100, 100, 3) == ([100, 100, 100], "all")
    assert asked(100, 60, 3) == ([60, 60, 60], "all")
    assert asked(8, 60, 3) == ([8, 8, 8], "uniform")
    assert asked(20, 60, 1) == ([20], "uniform")


@pytest.mark.cover
@pytest.mark.parametrize("block", [None, 9, only_in_full(1)])
@pytest.mark.parametrize("arithmetic", ["official", "kvpress"])
@pytest.mark.parametrize("model", ["llama", "mistral", "gemma3"])
def test_pyramid(model, arithmetic, block):
    """SnapKV with shares asked at every block; layers have at most what they held and the block."""
    layers = {"llama": [0, 1, 2], "mistral": [0, 1], "gemma3": [2, 5]}[model]
    args = dict(window=4, kernel=5, pooling="max", group="after")
    quota, prompt, beta = 15, 60, 20 if arithmetic == "official" else 2
    held_before = dict.fromkeys(layers, 0)
    shares: dict[int, int] = {}

    def cut(glances: list[HeadView]) -> list[Head]:
        layer, tokens = glances[0].layer, glances[0].tokens
        if layer == layers[0]:
            rule = official if arithmetic == "official" else line
            targets = [float(rule(quota, tokens, i, len(layers), 4, beta)) for i in range(len(layers))]
            targets = targets if tokens > quota else [float(quota)] * len(layers)
            new = glances[0].queries.shape[1]
            found = round_shares(targets, [held_before[i] + new for i in layers], quota * len(layers))
            shares.update(zip(layers, found, strict=True))
            held_before.update(shares)
        return keep_by_score(score_votes(**args), shares[layer], protect_newest(4))(glances)

    allocator = ("pyramid", dict(beta=beta, window=4, arithmetic=arithmetic))
    held = assert_allocator_agrees(
        DenseEngine(model, cut), model, "snapkv", quota, block, allocator, tokens=prompt, **args
    )
    assert sum(shares.values()) == quota * len(layers) and len(set(shares.values())) > 1
    assert held.contexts[0].own_layers[0].state.shared["allocation"] == "pyramid"


@pytest.mark.parametrize("of", ["prompt", "seen"])
@pytest.mark.parametrize("block", [None, 9])
def test_the_share_is_exact_in_blocks_and_while_decoding(block, of):
    """Half of 31 tokens: with 15 rows in place of 15.5 no layer would have more than another."""
    choice = choose_cache(
        build("method", load_settings("method", "snapkv", dict(window=4, decoding=True))),
        build("allocator", load_settings("allocator", "pyramid", dict(beta=20, window=4, arithmetic="kvpress"))),
        build("codec", load_settings("codec", "raw")),
    )
    context = GenerationContext(tiny("llama"), choice, Budget(0.5, of), block, (0,))
    context.prefill(distinct(31))
    rows = [int(layer.rows.counts()[0, 0]) for layer in context.own_layers]
    assert sum(rows) == 3 * 15
    expected = [line(15.5, 31, layer, 3, 4, 20) for layer in range(3)]
    assert expected == [27, 15.5, 4]
    assert rows == ([26, 15, 4] if block is None else rows) and rows[0] > rows[1] > rows[2]
    assert context.own_layers[0].state.shared["allocation"] == "pyramid"
    context.extend(ids(8))
    after = [int(layer.rows.counts()[0, 0]) for layer in context.own_layers]
    assert sum(after) == (3 * 15 if of == "prompt" else 3 * 19) and after[0] > after[1] > after[2]


@pytest.mark.parametrize("name", ["pyramid", "cake"])
def test_shares_stay_while_decoding(name):
    args = {"window": 2} | ({"cascade": False} if name == "cake" else {})
    held = kvbench.prefill(tiny("llama"), ids(60), "tova", 12, 7, name, allocator_args=args)
    before = [len(held.places(layer, 0)) for layer in range(3)]
    assert sum(before) == 36 and len(set(before)) > 1
    held.extend(ids(5))
    held.generate(9, stop=frozenset())
    assert [len(held.places(layer, 0)) for layer in range(3)] == before


@pytest.mark.parametrize("name", ["pyramid", "cake"])
def test_a_prompt_that_fits_is_cut_while_decoding(name):
    held = kvbench.prefill(tiny("llama"), ids(10), "tova", 12, None, name)
    assert [len(held.places(layer, 0)) for layer in range(3)] == [10, 10, 10]
    held.extend(ids(1))
    assert [len(held.places(layer, 0)) for layer in range(3)] == [11, 11, 11]
    held.extend(ids(8))
    assert [len(held.places(layer, 0)) for layer in range(3)] == [12, 12, 12]

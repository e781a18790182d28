"""The laws of docs/architecture.md, for every codec of conf/codec/ that packs, beside methods that evict.

The codecs are read from conf/codec/, so that a new one is held to the laws without a line here; what a short prompt
needs stands in tests/support/codec_files.py. `make test` checks every codec by its defaults with one method,
`make test-all` every preset, rounded as it is written and after the last cut, with every method of `METHODS`. If a
codec refuses a method, the method may not cut while decoding, or the full cache stands in its place.
tests/methods/codecs has the formulas, and every codec with every method and allocator.
"""

import math
from functools import cache

import pytest
import torch

from kvbench.cache.policy import CachePolicy, choose_cache
from kvbench.cache.refusals import find_refusal
from kvbench.engine.generation import GenerationContext
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.codec import Codec
from tests.support.codec_files import build_codec, list_variants
from tests.support.method_files import build_policy
from tests.support.selection import choose_quick
from tests.support.tiny_models import distinct, ids, make_double

TOKENS, KEPT = 40, 16  # of a prompt, and the rows of a head that stay
CLOSE = dict(rtol=1e-4, atol=1e-4)
VARIANTS = list_variants()
METHODS = {
    "at every token": ("keydiff", "uniform", {}),
    "after the prompt, unevenly": ("snapkv", "ada", {"window": 4}),
    "after some tokens": ("h2o", "uniform", {"decode_interval": 3, "recent": 4}),
    "after some tokens, unevenly": ("tova", "ada", {"scope": "group", "decoding": True, "decode_interval": 3}),
    "where sinks stay": ("sink", "uniform", {"preset": "original"}),
}


DEFAULTS = [name for name, (_, args) in VARIANTS.items() if not args]
QUICK = {name: list(METHODS)[number % len(METHODS)] for number, name in enumerate(DEFAULTS)}
ALONE = [name for name, (codec, _) in VARIANTS.items() if codec not in ("delta", "palu")]  # they pack several heads
LAW = pytest.mark.parametrize(
    "name, method",
    [
        pytest.param(name, method, marks=() if QUICK.get(name) == method else pytest.mark.full)
        for name in VARIANTS
        for method in METHODS
    ],
)


def make_codec(name: str) -> Codec:
    codec, args = VARIANTS[name]
    return build_codec(codec, args)


def choose(name: str, method: str) -> CachePolicy:
    """The codec with the method, or with what the codec leaves of it."""
    cutter, allocator, settings = METHODS[method]
    codec = make_codec(name)
    for more in (settings, {"decoding": False}):
        own = build_policy(cutter, allocator, "llama", **more)[:2]
        if find_refusal(*own, codec) is None:
            return choose_cache(*own, codec)
    return choose_cache(*build_policy("full", "uniform", "llama")[:2], codec)


def take_prompts(samples: int) -> torch.Tensor:
    """No token twice: in the first layer, equal tokens have equal values."""
    return torch.cat([distinct(TOKENS, seed) for seed in range(samples)])


def read(choice: CachePolicy, block: int | None = 25, prompts: torch.Tensor | None = None) -> GenerationContext:
    """A context that has read one prompt, or several."""
    own = take_prompts(1) if prompts is None else prompts
    budget = Budget(1.0 if choice.method.name == "full" else KEPT)
    context = GenerationContext(make_double("llama"), choice, budget, block, (0,) * len(own))
    context.prefill(own)
    return context


@cache
def trace(name: str, method: str) -> GenerationContext:
    """The case's prompt, read once, in blocks. Tests branch before they read on."""
    return read(choose(name, method))


@cache
def trace_full(name: str | None) -> GenerationContext:
    """The same with the full cache, by a codec or raw. Tests branch before they read on."""
    policy = build_policy("full", "uniform", "llama")
    return read(choose_cache(*policy[:2], policy[2] if name is None else make_codec(name)))


def read_head(context: GenerationContext, layer: int, head: int, sample: int = 0) -> dict[int, torch.Tensor]:
    """What each place of a head is attended as: its key and its value, one behind the other."""
    rows = context.own_layers[layer].rows.view()
    held = rows.mass[sample, head] > 0
    both = torch.cat([rows.keys, rows.values], -1)[sample, head][held]
    return dict(zip(rows.places[sample, head][held].tolist(), both, strict=True))


def count_rows(context: GenerationContext) -> list[list[int]]:
    return [layer.rows.counts()[0].tolist() for layer in context.own_layers]


def test_raw_rows_serve_every_method():
    """Otherwise the full cache would stand in its place for every codec."""
    for cutter, allocator, settings in METHODS.values():
        assert find_refusal(*build_policy(cutter, allocator, "llama", **settings)) is None


@LAW
def test_law_2_and_3_a_codec_changes_no_quota_and_loses_no_token(name, method):
    """After the prompt, after given tokens and while decoding."""
    context = trace(name, method)
    own, even = context.choice.method, context.choice.allocator.even
    expected = [KEPT if own.cuts else TOKENS]
    with context.branch():
        for more in (0, 3, 2):
            if more:
                context.extend(ids(more, seed=more))
                grown = expected[-1] + more
                cut = own.decoding and (own.decode_interval == 1 or more == 3)
                expected.append(KEPT if cut else grown)
            for layer, counts in zip(context.own_layers, count_rows(context), strict=True):
                assert set(counts) == {expected[-1]} if even else sum(counts) == expected[-1] * len(counts)
                for head, count in enumerate(counts):
                    places, masses = layer.rows.head_places(0, head), layer.rows.head_masses(0, head)
                    assert len(places) == count and (places.diff() > 0).all() and places[-1] < context.seen
                    evicted = 0 if layer.tally.evicted is None else int(layer.tally.evicted[0, head])
                    assert masses.sum() + evicted == context.seen and (masses == 1).all()


@LAW
def test_the_row_of_a_token_is_that_of_this_token(name, method):
    """After cuts of blocks and while decoding: each row that stays is read as what it is read as where none left.

    Some codecs that pack after the last cut of the prompt round rows together with others; then a value of the first
    layer is at least nearer to the token's own than to any other token's.
    """
    context, codec = trace(name, method), make_codec(name)
    leaves_raw = not codec.packing.before_attention and getattr(codec, "sinks", 0)  # the first rows that a cut left
    uncut, raw = trace_full(name), trace_full(None)
    with context.branch(), uncut.branch(), raw.branch():
        for token in (None, *ids(4, seed=4).split(1, dim=1)):
            if token is not None:
                for own in (context, uncut, raw):
                    own.extend(token)
            for head in range(2):
                rows, others, exact = (read_head(own, 0, head) for own in (context, uncut, raw))
                if codec.packing.before_attention or codec.packing.keeps:
                    for place, row in rows.items():
                        readings = [others[place], exact[place]] if leaves_raw else [others[place]]
                        assert any(torch.allclose(row, reading, rtol=1e-5, atol=1e-6) for reading in readings)
                values = torch.stack(list(exact.values()))[:, 32:]
                distances = torch.cdist(torch.stack(list(rows.values()))[:, 32:], values)
                nearest = torch.tensor(list(exact))[distances.argmin(-1)]
                assert (nearest == torch.tensor(list(rows))).double().mean() > 0.9


@LAW
def test_law_4_no_state_leaks(name, method):
    """A sample read by a codec that has read another before gives what it gives alone, and so do branches."""

    def answer(context: GenerationContext) -> tuple:
        with context.branch():
            tokens = torch.stack(list(context.generate(4, Sampling(temperature=1.0), frozenset())))
            return context.logits.tolist(), tokens.tolist(), str(context.bytes())

    alone = trace(name, method)
    before = [layer.rows for layer in alone.own_layers]
    expected = answer(alone)
    assert answer(alone) == expected and [layer.rows for layer in alone.own_layers] == before
    choice = choose(name, method)
    other = answer(read(choice, prompts=distinct(TOKENS, seed=11)))
    assert answer(read(choice)) == expected != other


@pytest.mark.parametrize("name", choose_quick(VARIANTS, *DEFAULTS))
def test_law_6_blocks_without_eviction_equal_one_shot(name):
    """A codec that packs after the last cut changes no logits of the prompt."""
    blocks, raw = trace_full(name), trace_full(None)
    once = read(blocks.choice, None)
    torch.testing.assert_close(once.logits, blocks.logits, **CLOSE)
    assert once.bytes().rows == blocks.bytes().rows
    if once.choice.codec.packing.before_attention:
        assert (raw.logits - once.logits).abs().max() > 1e-4
    else:
        torch.testing.assert_close(raw.logits, once.logits, rtol=0, atol=1e-9)


@LAW
def test_law_7_a_batch_gives_what_its_samples_give_alone(name, method):
    """HQQ's solver alone ends by the mean error of all rows that are rounded together, as in its source."""
    prompts, more = take_prompts(2), ids(3, seed=5, batch=2)
    together = read(choose(name, method), prompts=prompts)
    logits = together.extend(more)
    size = 0
    for sample in range(2):
        alone = read(choose(name, method), prompts=prompts[sample : sample + 1])
        read_on = alone.extend(more[sample : sample + 1])
        if not getattr(make_codec(name), "optimize", False):
            torch.testing.assert_close(logits[sample : sample + 1], read_on, **CLOSE)
        for layer in range(3):
            for head in range(2):
                one, other = read_head(together, layer, head, sample), read_head(alone, layer, head)
                assert one.keys() == other.keys()
        size += alone.bytes().rows
    assert together.bytes().rows == size


@LAW
def test_bytes_are_those_of_the_tensors_that_are_held(name, method):
    """No tensor is a part of a larger one that stays alive, and nothing of the raw rows does."""
    context = trace(name, method)
    with context.branch():
        for more in (0, 3):
            if more:
                context.extend(ids(more))
            for layer in context.own_layers:
                tails = [own for own in (layer.rows.tail_keys, layer.rows.tail_values) if own is not None]
                packed = [] if layer.rows.stored is None else layer.rows.stored.tensors()
                parts = [*packed, *tails]
                held = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}
                own = layer.rows.bytes()
                assert sum(held.values()) == own.rows + own.headroom, own


@pytest.mark.parametrize("name", choose_quick(ALONE, *(own for own in DEFAULTS if own in ALONE)))
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_number_that_is_none_ends_the_run_and_hits_no_other_row(name, bad):
    """NaN is read as NaN, and infinity as what is not finite, or as the largest number of its format."""
    codec, rows = make_codec(name).of_layer(1, 3), torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    lengths, place = torch.tensor([[4, 4]]), 2
    broken = rows.clone()
    broken[place, 5] = bad
    both = zip(codec.pack(broken, broken, lengths).read(), codec.pack(rows, rows, lengths).read(), strict=True)
    for read, plain in both:
        assert read[torch.arange(8) != place].isfinite().all()
        if math.isnan(bad):
            assert read[place].isnan().any()
        else:
            assert not read[place].isfinite().all() or read[place, 5] > 2 * plain[place].abs().max()

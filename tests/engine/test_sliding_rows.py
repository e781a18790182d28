"""A step over windows in rings gives what the modules give, and leaves transformers' layers as the modules do."""

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen2Config, Qwen2ForCausalLM

from kvbench.config.catalogue import build, load_settings
from kvbench.engine.compressed_cache import choose_cache
from kvbench.engine.generation import GenerationContext
from kvbench.engine.graph_decoding import CHUNK, GraphDecoder, GrowingRows
from kvbench.engine.sampling import Sampling
from kvbench.engine.sliding_rows import SlidingRows
from kvbench.interfaces.budget import Budget
from kvbench.models.decoder_weights import collect_weights
from kvbench.validation import SettingError
from tests.support.answer_paths import assert_same, make_contexts
from tests.support.interrupted_answers import (
    answer_both,
    answer_with_interruptions,
    assert_freed_at_once,
    assert_nothing_follows_the_end,
)
from tests.support.method_files import build_policy
from tests.support.selection import choose_quick, only_in_full
from tests.support.tiny_models import (
    COMMON,
    SLIDING,
    draw_model,
    heads,
    ids,
    make_double,
    make_gemma3_with_vision,
    tiny,
    without_head_dim,
)

SHORTER, LONGER = SLIDING - 7, 3 * SLIDING + 5  # prompts, beside the window
METHODS = {
    "full": {},
    "snapkv": {},
    "keydiff": {},  # cuts at every token
    "tova": {"decoding": True, "decode_interval": 5},
    "expected_attention": {"preset": "decode", "buffer": 6, "decode_interval": 5},
    "quest": {"page": 4, "dense_layers": 1},
    "omnikv": {"preset": "reference", "filters": [2], "wait": 0},
    "deltakv": {"full_layers": [2], "depth": None, "sinks": 2, "recent": 3},
    "pqcache": {"sinks": 2, "least": 0, "bits": 3},
}
EVERY = pytest.mark.parametrize("method", METHODS)
SOME = pytest.mark.parametrize("method", choose_quick(METHODS, "snapkv", "tova", "quest"))  # append, cut, read few


def choice_of(method):
    return choose_cache(*build_policy(method, "uniform", "llama", **METHODS[method]))


def read_prompts(method="snapkv", prompt=LONGER, batch=2, **more):
    budget = 1.0 if method == "full" else 0.5 if prompt == LONGER else 5
    return make_contexts(make_double("gemma3"), choice_of(method), budget, batch, prompt=prompt, **more)


def small_gemma3():
    """A Gemma 3 with one layer of each kind."""
    config = Gemma3TextConfig(
        **COMMON, **heads(4, 2), num_hidden_layers=2, sliding_window=SLIDING, query_pre_attn_scalar=32,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return draw_model(lambda: Gemma3ForCausalLM(config), 2)


def qwen2_with_windows():
    """A Qwen 2 whose last layer has a sliding window."""
    config = Qwen2Config(
        **(COMMON | without_head_dim(3, 1)), num_hidden_layers=3, use_sliding_window=True, max_window_layers=2,
        sliding_window=SLIDING,
    )  # fmt: skip
    return draw_model(lambda: Qwen2ForCausalLM(config), 1)


@pytest.mark.cover
@pytest.mark.parametrize("prompt", [SHORTER, LONGER])
@pytest.mark.parametrize("block", [None, 9])
@EVERY
def test_the_step_gives_what_the_modules_give(method, block, prompt):
    modules, step = read_prompts(method, prompt, block=block)
    for tokens in (CHUNK + 9, 7, 2 * CHUNK):  # the second is too short for a graph
        answers = [list(context.generate(tokens, Sampling(), frozenset(), True)) for context in (modules, step)]
        assert torch.equal(*map(torch.stack, answers))
        assert (modules.decoding, step.decoding) == ("modules", "modules" if tokens == 7 else "graph")
        assert_same(modules, step)
        assert torch.allclose(modules.logits, step.logits, atol=1e-5)
    assert modules.bytes().rows == step.bytes().rows
    more = ids(5, 9).repeat(2, 1)
    assert torch.allclose(modules.extend(more), step.extend(more), atol=1e-5)


GROWS = [("h2o", {"decode_size": LONGER + 9}), ("sink", {"decode_size": LONGER + 90}), ("knorm", {"skip_layers": [2]})]


@pytest.mark.parametrize(("method", "more"), GROWS, ids=["until it is full", "all the time", "in a spared layer"])
def test_layers_that_grow_lie_beside_windows(method, more):
    """They are told apart by their places among the layers without a window, not among all."""
    choice = choose_cache(*build_policy(method, "uniform", "gemma3", decoding=True, **more))
    modules, step = make_contexts(make_double("gemma3"), choice, 0.5, 2, prompt=LONGER)
    answers = [list(context.generate(CHUNK + 9, Sampling(), frozenset(), True)) for context in (modules, step)]
    assert step.decoding == "graph" and torch.equal(*map(torch.stack, answers))
    assert_same(modules, step)
    assert torch.allclose(modules.logits, step.logits, atol=1e-5)


@pytest.mark.parametrize("prompt", [SHORTER, only_in_full(LONGER)])
def test_packed_rows_lie_beside_windows(prompt):
    codec = build("codec", load_settings("codec", "kivi", dict(bits=2, group=8, residual=24)))
    choice = choose_cache(*build_policy("snapkv", "uniform", "llama")[:2], codec)
    modules, step = make_contexts(make_double("gemma3"), choice, 0.5 if prompt == LONGER else 5, 2, prompt=prompt)
    answers = [list(context.generate(3 * CHUNK, Sampling(), frozenset(), True)) for context in (modules, step)]
    assert step.decoding == "graph" and torch.equal(*map(torch.stack, answers))
    answer_both((modules, step), CHUNK + 3, False)
    assert modules.seen == step.seen and modules.bytes() == step.bytes()
    assert torch.allclose(modules.logits, step.logits, atol=1e-3)
    more = ids(5, 9).repeat(2, 1)
    assert torch.allclose(modules.extend(more), step.extend(more), atol=1e-3)


@pytest.mark.parametrize(("make", "windows"), [(qwen2_with_windows, 1), (make_gemma3_with_vision, 4)])
def test_other_models_may_have_sliding_layers_too(make, windows):
    modules, step = make_contexts(make().double(), choice_of("keydiff"), batch=2)
    assert len(step.sliding_layers()) == windows
    answers = [list(context.generate(CHUNK + 9, Sampling(), frozenset())) for context in (modules, step)]
    assert step.decoding == "graph" and torch.equal(*map(torch.stack, answers))
    assert_same(modules, step)


@pytest.mark.cover
@SOME
@pytest.mark.parametrize("read_last", [False, only_in_full(True)])
@pytest.mark.parametrize("end", [2, CHUNK, CHUNK + 3])
def test_what_was_decoded_beyond_the_end_is_as_if_it_never_was(end, read_last, method):
    modules, step = read_prompts(method, LONGER if method == "quest" else SHORTER, 1)  # a short text is one page
    assert_nothing_follows_the_end(modules, step, end, read_last)


@pytest.mark.cover
@SOME
@pytest.mark.parametrize("first", [5, CHUNK + 2])
def test_what_is_read_while_an_answer_is_under_way_comes_behind_what_it_has_read(method, first):
    both = read_prompts(method, batch=1)
    found = [(*answer_with_interruptions(context, first), context.logits) for context in both]
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found[0][1:], found[1][1:], strict=True))
    assert_same(*both)


@SOME
def test_a_branch_leaves_nothing_behind(method):
    _, step = read_prompts(method, SHORTER)
    before = [(own.keys, own.values, own.cumulative_length) for own in step.sliding_layers()]
    copies = [(keys.clone(), values.clone()) for keys, values, _ in before]
    answers = []
    for _ in range(2):
        with step.branch():
            answers.append(torch.stack(list(step.generate(2 * CHUNK, Sampling(), frozenset()))))
    with step.branch():
        answer = step.generate(40, Sampling(), frozenset())
        assert len([next(answer) for _ in range(CHUNK + 5)]) == CHUNK + 5
    answer.close()
    assert torch.equal(*answers) and step.seen == SHORTER
    for own, (keys, values, length), copied in zip(step.sliding_layers(), before, copies, strict=True):
        assert own.keys is keys and own.values is values and own.cumulative_length == length
        assert torch.equal(keys, copied[0]) and torch.equal(values, copied[1])


def test_what_is_done_again_gives_the_same_bits():
    """Rows return to the slots in which they lay, so sums are done in the same order."""
    found = []
    for planned in (CHUNK + 5, 3 * CHUNK):  # the second decodes beyond what is read of it
        _, step = make_contexts(tiny("gemma3"), choice_of("keydiff"), batch=2)
        answer = step.generate(planned, Sampling(), frozenset())
        tokens = torch.stack([next(answer) for _ in range(CHUNK + 5)])
        answer.close()
        assert step.seen == 60 + CHUNK + 4 and step.decoding == "graph"
        found.append((tokens, step.logits, *(own.keys for own in step.sliding_layers())))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_blocks_are_read_into_windows_that_are_not_full_yet():
    """In a graph from the third token on."""
    prompt, found = torch.cat([ids(SLIDING + 9, seed) for seed in range(2)]), []
    for stepped in (False, True):
        model = make_double("gemma3")
        context = GenerationContext(model, choice_of("keydiff"), Budget(3), 3, (0, 1), compile=False)
        context.weights = collect_weights(model) if stepped else None
        context.prefill(prompt)
        found.append(context)
    assert_same(*found)
    assert torch.allclose(found[0].logits, found[1].logits, atol=1e-5)


def test_a_context_that_nobody_has_is_freed_at_once():
    assert_freed_at_once(lambda: read_prompts()[1])


def test_a_window_of_every_layer_ends_an_answer_where_the_modules_end_it():
    found = []
    for context in make_contexts(tiny("windowed"), choice_of("full"), 1.0, prompt=10):
        tokens, answer = [], context.generate(40, Sampling(), frozenset())
        with pytest.raises(SettingError, match="sliding window of 24 tokens"):
            tokens.extend(answer)
        found.append((context.decoding, len(tokens), torch.stack(tokens)))
    assert [own[:2] for own in found] == [("modules", 15), ("graph", 15)]
    assert torch.equal(found[0][2], found[1][2])


def test_the_kernels_take_the_same_step():
    """Steps of two layers through the interpreter, or on the GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = small_gemma3().to(device)
    _, context = make_contexts(model, choice_of("snapkv"))
    weights, found = context.weights, []
    for name in ("reference", "triton"):
        with torch.no_grad(), context.branch():
            others = GrowingRows(weights, context.own_layers, 2, context.seen, name)
            windows = context.sliding_layers()
            rows = SlidingRows(
                weights, weights.sliding, windows, others, 2, context.seen, implementation=name
            )  # fmt: skip
            draws = torch.zeros(1, 3, device=device)
            decoder = GraphDecoder(weights, rows, context.logits.argmax(-1), 2, Sampling().pick, draws, name)
            tokens = [int(decoder.next()[0]) for _ in range(2)]
            found.append((tokens, decoder.close(), torch.stack([own.keys for own in windows])))
    assert found[0][0] == found[1][0]
    assert all(torch.allclose(one, other, atol=1e-4) for one, other in zip(found[0][1:], found[1][1:], strict=True))

"""A step over windows in rings gives what the modules give, and leaves transformers' layers as the modules do."""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from kvbench.config.catalogue import build, load_settings
from kvbench.engine.compressed_cache import choose_cache
from kvbench.engine.generation import GenerationContext
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.budget import Budget
from kvbench.models.decoder_weights import collect_weights
from kvbench.validation import SettingError
from tests.support.answer_paths import CHUNK, assert_same, make_contexts
from tests.support.interrupted_answers import (
    answer_both,
)
from tests.support.method_files import build_policy
from tests.support.selection import choose_quick, only_in_full
from tests.support.tiny_models import (
    COMMON,
    SLIDING,
    draw_model,
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
QUICK = ("snapkv", "keydiff", "expected_attention", "quest")  # a method for each kind of rows
EVERY = pytest.mark.parametrize("method", choose_quick(METHODS, *QUICK))


def choice_of(method):
    return choose_cache(*build_policy(method, "uniform", "llama", **METHODS[method]))


def read_prompts(method="snapkv", prompt=LONGER, batch=2, **more):
    budget = 1.0 if method == "full" else 0.5 if prompt == LONGER else 5
    return make_contexts(make_double("gemma3"), choice_of(method), budget, batch, prompt=prompt, **more)


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
    for tokens in (CHUNK + 6, 7, 9):  # the second is too short for a graph
        answers = [list(context.generate(tokens, Sampling(), frozenset(), True)) for context in (modules, step)]
        assert torch.equal(*map(torch.stack, answers))
        assert (modules.decoding, step.decoding) == ("modules", "modules" if tokens == 7 else "graph")
        assert_same(modules, step)
        assert torch.allclose(modules.logits, step.logits, atol=1e-5)
    assert modules.bytes().rows == step.bytes().rows
    more = ids(5, 9).repeat(2, 1)
    assert torch.allclose(modules.extend(more), step.extend(more), atol=1e-5)


GROWS = [("h2o", {"decode_size": LONGER + 9}), ("knorm", {"skip_layers": [2]})]
GROWS += [only_in_full("sink", {"decode_size": LONGER + 90})]


@pytest.mark.parametrize(("method", "more"), GROWS, ids=["until it is full", "in a spared layer", "all the time"])
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
    modules, step = make_contexts(make_double("gemma3"), choice, 0.5 if prompt == LONGER else 5, prompt=prompt)
    answers = [list(context.generate(3 * CHUNK, Sampling(), frozenset(), True)) for context in (modules, step)]
    assert step.decoding == "graph" and torch.equal(*map(torch.stack, answers))
    answer_both((modules, step), CHUNK + 3, False)
    assert modules.seen == step.seen and modules.bytes() == step.bytes()
    assert torch.allclose(modules.logits, step.logits, atol=1e-3)
    more = ids(5, 9)
    assert torch.allclose(modules.extend(more), step.extend(more), atol=1e-3)


@pytest.mark.parametrize(("make", "windows"), [(qwen2_with_windows, 1), (make_gemma3_with_vision, 4)])
def test_other_models_may_have_sliding_layers_too(make, windows):
    modules, step = make_contexts(make().double(), choice_of("keydiff"), batch=2)
    assert len(step.sliding_layers()) == windows
    answers = [list(context.generate(CHUNK + 9, Sampling(), frozenset())) for context in (modules, step)]
    assert step.decoding == "graph" and torch.equal(*map(torch.stack, answers))
    assert_same(modules, step)


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


def test_a_window_of_every_layer_ends_an_answer_where_the_modules_end_it():
    found = []
    for context in make_contexts(tiny("windowed"), choice_of("full"), 1.0, prompt=10):
        tokens, answer = [], context.generate(40, Sampling(), frozenset())
        with pytest.raises(SettingError, match="sliding window of 24 tokens"):
            tokens.extend(answer)
        found.append((context.decoding, len(tokens), torch.stack(tokens)))
    assert [own[:2] for own in found] == [("modules", 15), ("graph", 15)]
    assert torch.equal(found[0][2], found[1][2])

"""A step whose layers have sinks and a cap gives what the modules give, over every kind of rows.

Both are put into the attention of tiny models that have neither. That models with either are read as `eager` attention
reads them is tested in tests/models/test_probe.py.
"""

from dataclasses import replace

import pytest
import torch

from kvbench.cache.policy import choose_cache
from kvbench.config.catalogue import build, load_settings
from kvbench.engine import appended_rows
from kvbench.engine.generation import GenerationContext
from kvbench.engine.joint_decoding import run_together
from kvbench.engine.sampling import Sampling
from kvbench.kernels.joined_rows import attend_joined
from kvbench.kernels.softmax_extras import SoftmaxExtras
from kvbench.models import transformers_port
from tests.support.answer_paths import CHUNK, assert_near_storage, assert_same, assert_same_storage, make_contexts, tell
from tests.support.delta_files import build_delta
from tests.support.method_files import build_policy
from tests.support.palu_files import build_palu, find_palu
from tests.support.selection import choose_quick
from tests.support.tiny_models import make_double, make_exact

CHOOSING = {"filters": [0], "wait": 0, "selector": "softmax_last"}
LISTS = {"full_layers": [0], "depth": None, "sinks": 3, "recent": 8}
KINDS = {  # method, its settings, allocator, model, codec
    "appended": ("snapkv", {}, "uniform", "llama", None),
    "cut at every token": ("keydiff", {}, "uniform", "llama", None),
    "scored at every token": ("tova", {}, "uniform", "llama", None),
    "cut after five tokens": ("tova", {"decode_interval": 5}, "uniform", "llama", None),
    "watched, with log-sum-exps": ("h2o", {"decode_interval": 5}, "uniform", "llama", None),
    "shared unevenly": ("h2o", {"decode_interval": 5}, "ada", "llama", None),
    "pages": ("quest", {"page": 4, "dense_layers": 1}, "uniform", "llama", None),
    "chosen by a softmax": ("omnikv", CHOOSING, "uniform", "llama", None),
    "chosen by codes": ("pqcache", {"sinks": 2, "least": 0, "bits": 3}, "uniform", "llama", None),
    "windows": ("tova", {"decoding": True, "decode_interval": 5}, "uniform", "gemma3", None),
    "packed": ("snapkv", {}, "ada", "llama", "kivi"),
    "rebuilt": ("deltakv", LISTS, "uniform", "llama", "delta"),
    "latent": ("snapkv", {}, "ada", "llama3", "palu"),
    "coded": ("snapkv", {}, "ada", "llama", "fp8"),
    "coded, six at once": ("snapkv", {}, "ada", "llama", "hf_quantized"),
    "coded and cut": ("h2o", {"decode_interval": 5}, "uniform", "llama", "fp8"),
}
QUICK = ("appended", "scored at every token", "shared unevenly", "chosen by a softmax", "windows", "packed", "latent")
EXTRAS = SoftmaxExtras(torch.linspace(-1, 3, 12, dtype=torch.float64), 1.5)


def build_codec(name: str | None, model: str) -> object:
    if name == "kivi":
        return build("codec", load_settings("codec", "kivi", dict(bits=2, group=8, residual=24)))
    if name == "hf_quantized":
        return build("codec", load_settings("codec", name, dict(group=16, residual=6)))
    if name == "fp8":
        return build("codec", load_settings("codec", "fp8", {}))
    if name == "delta":
        return build_delta(model, "drawn")
    return build_palu(find_palu(model, removed=0.7)) if name == "palu" else None


@pytest.fixture(autouse=True)
def extras(monkeypatch):
    """Let all layers have sinks and a cap, in the modules."""
    monkeypatch.setattr(transformers_port, "make_extras", lambda query, *given: take_extras(query.shape[1]))


def take_extras(heads: int) -> SoftmaxExtras:
    return replace(EXTRAS, sinks=EXTRAS.sinks[:heads])


def read_prompts(kind: str, prompt: int = 90) -> tuple[GenerationContext, GenerationContext]:
    method, settings, allocator, name, codec = KINDS[kind]
    model = (make_exact if codec in ("delta", "palu") else make_double)(name)
    policy = build_policy(method, allocator, name, **settings)
    choice = choose_cache(*policy[:2], build_codec(codec, name) or policy[2])
    modules, step = make_contexts(model, choice, 0.5 if codec == "kivi" else 0.3, prompt=prompt)
    own = take_extras(model.config.num_attention_heads)
    blocks = tuple(replace(block, attention=replace(block.attention, extras=own)) for block in step.weights.blocks)
    step.weights = replace(step.weights, blocks=blocks)
    return modules, step


@pytest.mark.parametrize("kind", choose_quick(KINDS, *QUICK))
def test_a_step_gives_what_the_modules_give(kind):
    modules, step = read_prompts(kind)
    answers = [list(context.generate(CHUNK + 6, Sampling(), frozenset())) for context in (modules, step)]
    assert (modules.decoding, step.decoding) == ("modules", "graph")
    assert torch.equal(*map(torch.stack, answers))
    codec = KINDS[kind][4]
    rounds = codec in ("kivi", "fp8", "hf_quantized")
    (assert_same if codec is None else assert_near_storage if rounds else assert_same_storage)(modules, step)
    torch.testing.assert_close(modules.last_logits, step.last_logits, rtol=0, atol=1e-3 if rounds else 1e-5)


def test_answers_that_are_decoded_together_have_them(monkeypatch):
    pairs, joined = [read_prompts("appended", prompt) for prompt in (60, 75)], []

    def attend(queries, *given, **more):
        joined.append(more["extras"])
        return attend_joined(queries, *given, **more)

    monkeypatch.setattr(appended_rows, "attend_joined", attend)
    expected = [torch.stack(list(modules.generate(CHUNK + 4, Sampling(), frozenset()))) for modules, _ in pairs]
    found = run_together([tell(step, CHUNK + 4) for _, step in pairs])
    assert all(map(torch.equal, expected, found)) and None not in joined
    for modules, step in pairs:
        torch.testing.assert_close(modules.last_logits, step.last_logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["appended", "windows"])
@pytest.mark.parametrize("part", ["sinks", "cap"])
def test_a_part_that_a_step_drops_is_noticed(kind, part):
    modules, step = read_prompts(kind)
    parts = [replace(block.attention.extras, **{part: None}) for block in step.weights.blocks]
    blocks = tuple(
        replace(block, attention=replace(block.attention, extras=extras))
        for block, extras in zip(step.weights.blocks, parts, strict=True)
    )
    step.weights = replace(step.weights, blocks=blocks)
    for context in (modules, step):
        list(context.generate(CHUNK + 6, Sampling(), frozenset()))
    assert not torch.allclose(modules.last_logits, step.last_logits, rtol=0, atol=1e-2)

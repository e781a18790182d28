"""A step over rows that are held as codes gives what the modules give: rows that only grow, and rows that are cut."""

import pytest
import torch

from kvbench.cache.policy import choose_cache
from kvbench.config.catalogue import build, load_settings
from kvbench.engine.generation import WORTH, GenerationContext
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.budget import Budget
from tests.support.answer_paths import (
    LONG,
    assert_near_storage,
    make_contexts,
)
from tests.support.method_files import build_policy
from tests.support.selection import choose_quick
from tests.support.tiny_models import ids, make_double

LEVELS = {"rotation": "random", "values": "levels", "raw_layers": 0}
WRITTEN, CUT = {"rounding": "written"}, {"rounding": "cut"}
GROWS = {  # codec, its settings, method, its settings, allocator
    "fp8": ("fp8", WRITTEN, "snapkv", {}, "uniform"),
    "fp8 after the last cut": ("fp8", CUT, "snapkv", {}, "ada"),
    "fp8 of rows": ("fp8", {"preset": "row"}, "full", {}, "uniform"),
    "int8": ("int8", WRITTEN, "snapkv", {}, "ada"),
    "int4 after the last cut": ("int4", {"preset": "quarot"}, "snapkv", {}, "ada"),
    "int4, turned": ("int4", {"preset": "vllm"}, "snapkv", {}, "uniform"),
    "int4 in groups": ("int4", {"preset": "plain", "group": 4}, "full", {}, "uniform"),
    "fp4": ("fp4", {}, "snapkv", {}, "ada"),
    "fp4, a scale of each sample": ("fp4", {"global_scale": 448}, "snapkv", {}, "uniform"),
    "fp4 by powers": ("fp4", {"preset": "mxfp4", "block": 16}, "full", {}, "uniform"),
    "16 levels": ("turboquant", {"preset": "4bit_nc", "raw_layers": 0}, "snapkv", {}, "uniform"),
    "8 levels": ("turboquant", {"preset": "3bit_nc", "raw_layers": 0}, "full", {}, "uniform"),
    "levels of values": (
        "turboquant",
        {"rotation": "random", "values": "levels", "raw_layers": 0},
        "snapkv",
        {},
        "ada",
    ),
    "merged rows": ("int8", CUT, "centroidkv", {"decoding": False, "chunk": 20}, "uniform"),
    "quanto": ("hf_quantized", {"group": 16, "residual": 6}, "snapkv", {}, "ada"),
    "quanto in groups of a byte": (
        "hf_quantized",
        {"preset": "quanto2", "group": 4, "residual": 2},
        "full",
        {},
        "uniform",
    ),
    "HQQ": ("hf_quantized", {"preset": "hqq8", "group": 16, "residual": 9}, "full", {}, "uniform"),
    "merged rows, HQQ": (
        "hf_quantized",
        {"preset": "hqq2", "group": 32, "residual": 5},
        "centroidkv",
        {"decoding": False, "chunk": 20},
        "uniform",
    ),
}
EVERY_TOKEN, FIVES = {"decoding": True}, {"decoding": True, "decode_interval": 5}
CUTS = {
    "other rows of each head": ("fp8", WRITTEN, "keydiff", {}, "uniform"),
    "the same rows of all heads": ("int8", WRITTEN, "tova", EVERY_TOKEN, "uniform"),
    "rotated by slot": ("fp8", WRITTEN, "sink", EVERY_TOKEN | {"preset": "original"}, "uniform"),
    "log-sum-exps": ("fp8", WRITTEN, "h2o", EVERY_TOKEN, "uniform"),
    "every few tokens": ("fp8", {"preset": "row"}, "tova", FIVES, "uniform"),
    "layers that differ": ("int8", WRITTEN, "snapkv", FIVES, "pyramid"),
    "fp4, a scale of each sample": ("fp4", {"global_scale": 448}, "keydiff", {}, "uniform"),
    "levels": ("turboquant", {"preset": "k3v4_nc", "raw_layers": 0}, "keydiff", {}, "uniform"),
    "turned": ("int4", {"preset": "vllm"}, "keydiff", {}, "uniform"),
    "turned, every few tokens": ("int4", {"preset": "vllm"}, "h2o", FIVES, "uniform"),
}
QUICK = "fp8", "int4 after the last cut", "fp4, a scale of each sample", "8 levels", "merged rows", "quanto"


def read_prompts(cell: tuple, model: str = "llama", batch: int = 2) -> tuple[GenerationContext, GenerationContext]:
    """Two contexts, of which the second one answers through the step."""
    codec, settings, method, more, allocator = cell
    policy = build_policy(method, allocator, model, **more)
    choice = choose_cache(*policy[:2], build("codec", load_settings("codec", codec, settings)))
    return make_contexts(make_double(model), choice, Budget(1.0 if method == "full" else 0.3), batch)


def assert_same_in_both(modules: GenerationContext, step: GenerationContext) -> None:
    """Modules norm in float32, and turns are computed in it, so now and then a number gets the next code."""
    for tokens in (LONG, 7, 9):
        answers = [list(context.generate(tokens, Sampling(), frozenset(), True)) for context in (modules, step)]
        assert torch.equal(*map(torch.stack, answers))
        assert step.decoding == ("graph" if tokens >= WORTH else "modules")
        assert_near_storage(modules, step)
    torch.testing.assert_close(modules.last_logits, step.last_logits, rtol=0, atol=1e-2)


@pytest.mark.cover
@pytest.mark.parametrize("name", choose_quick(GROWS, *QUICK))
def test_the_step_gives_what_the_modules_give(name):
    modules, step = read_prompts(GROWS[name])
    assert_same_in_both(modules, step)
    more = ids(5, 9).repeat(2, 1)
    torch.testing.assert_close(modules.extend(more), step.extend(more), rtol=0, atol=1e-2)


@pytest.mark.cover
@pytest.mark.parametrize("name", choose_quick(CUTS, "other rows of each head", "every few tokens", "turned"))
def test_a_step_cuts_codes_as_the_modules_do(name):
    """It attends to what codes stand for, and the layers get the codes of the rows that are left."""
    modules, step = read_prompts(CUTS[name])
    assert_same_in_both(modules, step)


@pytest.mark.parametrize("model", ["qwen3", "qwen2"])
def test_normed_and_shifted_keys_are_rounded_as_they_are_read(model):
    modules, step = read_prompts(CUTS["other rows of each head"], model)
    assert_same_in_both(modules, step)


def test_keys_that_are_the_sum_of_two_rows_are_read_by_the_modules():
    _, context = read_prompts(("turboquant", {"preset": "paper4"}, "snapkv", {}, "uniform"))
    list(context.generate(LONG, Sampling(), frozenset(), True))
    assert context.decoding == "modules"

"""Prompts of other lengths, budgets, questions and answers need no other variant of a kernel.

A variant takes a second to compile, which would be part of the time of the first sample that needs it.
"""

from contextlib import ExitStack
from itertools import pairwise

import pytest
import torch
import triton
from transformers import LlamaConfig, LlamaForCausalLM

import kvbench
from kvbench.config.catalogue import build, load_settings
from kvbench.engine.compressed_cache import choose_cache
from kvbench.engine.generation import Answer, GenerationContext
from kvbench.engine.joint_decoding import finish_answer, run_together
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.budget import Budget
from kvbench.models.transformers_port import read_layout
from tests.support.delta_files import write_for
from tests.support.method_files import build_policy, make_method_args
from tests.support.palu_files import build_palu, draw_palu
from tests.support.tiny_models import draw_model, ids

if not triton.knobs.runtime.interpret:
    pytest.skip("the interpreter's kernels are recorded", allow_module_level=True)

from tests.support.launched_kernels import Variants, describe_new, record_variants

BLOCK = 64
# tokens of the prompt, rows or share of the budget, block size, tokens of the question and of the answer: a prompt in
# one block, and prompts in blocks with a last block of every size that kernels distinguish
KNOWN = [
    (200, 0.3, None, 17, 12),
    (193, 0.3, BLOCK, 3, 12),
    (197, 50, BLOCK, 12, 20),
    (206, 0.3, BLOCK, 40, 40),
    (220, 0.3, BLOCK, 70, 70),  # so many that R-KV cuts the answer
    (256, 0.2, BLOCK, 0, 40),
    (449, 33, BLOCK, 1, 70),
]
OTHERS = [
    (177, 0.25, None, 9, 9),
    (208, 48, None, 1, 33),
    (129, 0.4, BLOCK, 2, 12),
    (327, 0.15, BLOCK, 13, 33),
    (257, 64, BLOCK, 33, 17),
    (400, 0.17, BLOCK, 65, 70),
    (351, 0.2, BLOCK, 0, 35),
]
METHODS = ("quest", "snapkv")
CUTTING = [("keydiff", {"decode_interval": 1}), ("tova", {"decode_interval": 4}), ("h2o", {"decode_interval": 1})]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    """Heads as wide as those of models that are measured, because what divides them matters."""
    config = LlamaConfig(
        vocab_size=208, hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=512,
    )  # fmt: skip
    return draw_model(lambda: LlamaForCausalLM(config), 0).bfloat16()


def record(model, method, cases, allocator="uniform", codec="raw", **more) -> Variants:
    """What a method's prompts, questions and answers compile together."""
    args = make_method_args(method, "variants", model, [ids(100, seed)[0] for seed in range(4)])
    own = build_policy(method, allocator, "llama", codec if isinstance(codec, str) else "raw", **args, **more)
    choice = choose_cache(*own[:2], own[2] if isinstance(codec, str) else codec)
    with record_variants() as found:
        for tokens, budget, block, question, answer in cases:
            own = Budget(1.0 if method == "full" else budget)
            context = GenerationContext(model, choice, own, None if choice.method.one_block else block, (0,))
            context.prefill(ids(tokens))
            with context.branch():
                if question:
                    context.extend(ids(question, 3))
                list(context.generate(answer, Sampling(), frozenset()))
    return found


def check(*args, known=KNOWN, others=OTHERS, **more):
    known, others = (record(*args[:2], cases, *args[2:], **more) for cases in (known, others))
    assert known and describe_new(known, others) == []


@pytest.mark.parametrize("method", METHODS)
def test_some_lengths_need_no_other_variants(model, method):
    check(model, method, known=KNOWN[1:3], others=OTHERS[2:3])


@pytest.mark.full
@pytest.mark.parametrize("method", kvbench.methods_available())
def test_lengths_need_no_other_variants(model, method):
    check(model, method)


def record_together(model, cases) -> Variants:
    """What answers compile that are decoded together after prompts of two of the cases."""
    choices = [choose_cache(*build_policy(*own, "llama", "raw")) for own in (("full", "uniform"), ("snapkv", "ada"))]
    with record_variants() as found:
        for pair in pairwise(cases):
            contexts = []
            for choice, (tokens, budget, block, *_) in zip(choices, pair, strict=True):
                own = Budget(1.0 if choice.method.name == "full" else budget)
                contexts.append(GenerationContext(model, choice, own, block, (0,)))
                contexts[-1].prefill(ids(tokens))
            with ExitStack() as stack:
                for own in contexts:
                    stack.enter_context(own.branch())
                answers = [Answer(own, pair[0][-1], Sampling(), frozenset()) for own in contexts]
                run_together([finish_answer(own, lambda token: True) for own in answers])
    return found


def test_lengths_need_no_other_variants_of_answers_that_are_decoded_together(model):
    known, others = (record_together(model, cases) for cases in (KNOWN[:3], OTHERS[1:4]))
    assert any(kernel.startswith("joined_rows") for kernel in known) and describe_new(known, others) == []


@pytest.mark.full
@pytest.mark.parametrize(("method", "more"), CUTTING)
def test_lengths_need_no_other_variants_of_cuts_while_decoding(model, method, more):
    check(model, method, decoding=True, **more)


@pytest.mark.full
@pytest.mark.parametrize(("allocator", "codec"), [("ada", "raw"), ("pyramid", "raw"), ("uniform", "kivi")])
def test_lengths_need_no_other_variants_of_allocators_and_codecs(model, allocator, codec):
    check(model, "snapkv", allocator, codec)


@pytest.mark.full
@pytest.mark.parametrize("method", ["deltakv", "full"])
def test_lengths_need_no_other_variants_of_compressed_rows(model, method, tmp_path):
    """Of which blocks are compressed during the answers."""
    own = dict(full_layers=[0], depth=None, recent=16)
    settings = own | dict(path=write_for(tmp_path / "file", model, "drawn", 32))
    codec = build("codec", load_settings("codec", "delta", settings))
    check(model, method, "uniform", codec, **(own if method == "deltakv" else {}))


@pytest.mark.full
@pytest.mark.parametrize(("method", "allocator"), [("full", "uniform"), ("snapkv", "ada")])
def test_lengths_need_no_other_variants_of_latents(model, method, allocator, tmp_path):
    check(model, method, allocator, build_palu(draw_palu(tmp_path / "file", read_layout(model), 24)))

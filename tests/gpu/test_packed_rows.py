"""Packed rows on a GPU: the kernels at the size of real models, and answers in CUDA graphs.

`make test-gpu` on a machine with a GPU.
"""

import pytest
import torch
from transformers import LlamaForCausalLM

from kvbench.config.catalogue import build, load_settings
from kvbench.engine.compressed_cache import choose_cache
from kvbench.engine.generation import GenerationContext
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.budget import Budget
from kvbench.kernels.packed_attention import attend_packed
from kvbench.methods.codecs.kivi import GrowingKivi, Kivi
from tests.support.answer_paths import assert_graph_answers_alike, read_drawn_tokens
from tests.support.gpu_models import make_llama
from tests.support.method_files import build_policy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
DEVICE = "cuda"
GREEDY = Sampling()
ANSWER = 300  # more than two residuals
CODECS = {"kivi": {"codec": "kivi"}} | {
    preset: {"codec": "hf_quantized", "preset": preset, "residual": 51}
    for preset in ("quanto4", "quanto2", "hqq4", "hqq2", "hqq8")
}
"""The first 153 tokens fill three residuals of 51, so some rows that are taken back had been rounded."""


@pytest.fixture(scope="module")
def exact() -> LlamaForCausalLM:
    return make_llama(torch.float32)


def read_prompt(
    model, method="full", allocator="uniform", batch=1, graphs=True, codec="kivi", **settings
) -> GenerationContext:
    made = build("codec", load_settings("codec", codec, settings))
    choice = choose_cache(*build_policy(method, allocator, "llama")[:2], made)
    budget = Budget(1.0 if method == "full" else 0.4)
    context = GenerationContext(model, choice, budget, None, (0,) * batch, compile=graphs)
    ids = torch.randint(3, 512, (batch, 700), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    context.prefill(ids)
    return context


@pytest.mark.cover
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "shape",  # dimension, bits, group, residual, queries of a head
    [(128, 2, 32, 128, 4), (128, 4, 32, 128, 4), (128, 2, 32, 32, 1), (64, 2, 64, 64, 8), (80, 4, 16, 32, 4),
     (256, 2, 32, 128, 8), (128, 2, 8, 24, 4), (96, 4, 24, 48, 3)],
)  # fmt: skip
def test_the_kernels_do_what_the_references_do(shape, dtype):
    """Outputs to 2^-7 of the largest value in bfloat16 (weights and outputs have 8 bits); packed rows to the bit."""
    dim, bits, group, residual, queries = shape
    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw(*size):
        return torch.randn(*size, generator=generator, device=DEVICE).to(dtype)

    lengths = torch.tensor([[5000, 4000 + residual - 2, 3], [residual, residual - 1, 700]], device=DEVICE)
    total, heads, tokens = int(lengths.sum()), 3, residual + 5
    held = Kivi("kivi", bits, group, residual).pack(draw(total, dim), draw(total, dim), lengths)
    mass = torch.randint(1, 900, (total,), generator=generator, device=DEVICE, dtype=torch.int16)
    angles = torch.ones(tokens, dim, device=DEVICE, dtype=dtype), torch.zeros(tokens, dim, device=DEVICE, dtype=dtype)
    growing = GrowingKivi(held, tokens, 16, mass if dim == 64 else None)
    growing.begin()
    share, read = {torch.bfloat16: 2**-7, torch.float16: 2**-9, torch.float32: 2**-16}[dtype], []
    for step in range(tokens):
        asked, keys, values = (draw(2, n * dim) for n in (heads * queries, heads, heads))
        count = torch.tensor(step, dtype=torch.int32, device=DEVICE)
        found = growing.attend(asked, keys, values, angles, count, dim**-0.5, None, "triton")
        asked = asked.view(2, heads * queries, 1, dim)
        expected = attend_packed(asked, growing.rows, dim**-0.5, count, implementation="reference")
        assert (found.float() - expected.float()).abs().max() <= 5 * share  # no drawn value is larger than 5
        read.append((keys.view(2, heads, dim), values.view(2, heads, dim)))
    rows = [torch.stack(own, 2).flatten(0, 2) for own in zip(*read, strict=True)]
    done, once = growing.finish(tokens, lengths + tokens), held.extend(*rows, lengths + tokens)
    assert all(torch.equal(one, other) for one, other in zip(done.tensors(), once.tensors(), strict=True))


@pytest.mark.cover
@pytest.mark.parametrize(("method", "allocator"), [("full", "uniform"), ("snapkv", "uniform"), ("snapkv", "ada")])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_graphs_decode_packed_rows_as_the_modules_do(exact, method, allocator, batch, codec):
    contexts = [read_prompt(exact, method, allocator, batch, graphs, **codec) for graphs in (False, True)]
    assert_graph_answers_alike(contexts, ANSWER)


def test_a_graph_in_bfloat16_gives_what_the_references_give():
    """The same tokens are read, so that logits can be compared: to 2^-5 of the largest; 99 % of the codes are equal."""
    model, found = make_llama(torch.bfloat16), []
    context = read_prompt(model, "snapkv", "ada")
    for name in (None, "reference"):
        with torch.no_grad(), context.branch():
            found.append(
                (
                    read_drawn_tokens(context, ANSWER, name),
                    [layer.rows.stored.tensors() for layer in context.own_layers],
                )
            )
    (logits, packed), (expected, own) = found
    assert (logits - expected).abs().max() <= 2**-5 * expected.abs().max()
    for one, other in zip(packed, own, strict=True):
        for part, same in zip(one, other, strict=True):
            if part.dtype == torch.uint8:
                shifts = torch.arange(0, 8, 2, device=DEVICE)  # four codes of two bits in a byte
                differ = (part[..., None] >> shifts & 3) != (same[..., None] >> shifts & 3)
                assert differ.float().mean() <= 0.01


@pytest.mark.parametrize("codec", [CODECS["kivi"], CODECS["hqq8"]])
def test_a_graph_takes_back_what_was_read_beyond_the_end(exact, codec):
    """Exactly: what is done again gives what it gave before."""
    found = []
    for planned in (150, 171):  # the second stops in the middle of a chunk, behind a packed block of keys
        context = read_prompt(exact, "snapkv", "ada", 2, **codec)
        answer = context.generate(planned, GREEDY, frozenset())
        tokens = torch.stack([next(answer) for _ in range(150)])
        answer.close()
        assert context.decoding == "graph" and context.bytes().headroom == 0
        found.append(
            (tokens, context.logits, *(own for layer in context.own_layers for own in layer.rows.stored.tensors()))
        )
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_answers_of_one_prompt_do_not_see_each_other(exact):
    context, answers = read_prompt(exact, "snapkv", "ada"), []
    context.reserve(ANSWER)
    for _ in range(2):
        with context.branch():
            answers.append(torch.stack(list(context.generate(ANSWER, GREEDY, frozenset()))))
    assert torch.equal(*answers) and context.decoding == "graph"

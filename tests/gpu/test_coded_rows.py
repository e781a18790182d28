"""Rows that are held as codes, on a GPU: answers in CUDA graphs, and every codec of such rows as on a CPU.

tests/kernels/test_coded_rows.py and tests/engine/test_decode_contract.py compare the kernels there too.
"""

import copy
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import kvbench
from kvbench.cache.policy import choose_cache
from kvbench.config.catalogue import build, load_settings
from kvbench.engine.generation import GenerationContext
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.budget import Budget
from kvbench.models.transformers_port import read_layout
from kvbench.training.kvquant_calibration import KVQuantRecipe, calibrate_model
from kvbench.training.recording import write_tensors
from tests.support.answer_paths import assert_graph_answers_alike
from tests.support.gpu_models import make_llama
from tests.support.method_files import build_policy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
DEVICE = "cuda"
GREEDY = Sampling()
ANSWER = 60
CODES = {
    "fp8": ("fp8", {}),
    "fp8 after the last cut": ("fp8", {"preset": "row", "rounding": "cut"}),
    "int8": ("int8", {"preset": "sglang"}),
    "int4 after the last cut": ("int4", {"preset": "quarot"}),
    "int4, turned": ("int4", {"preset": "vllm"}),
    "fp4": ("fp4", {"global_scale": 448}),
    "turboquant": ("turboquant", {"raw_layers": 0}),
}


@pytest.fixture(scope="module")
def exact() -> LlamaForCausalLM:
    return make_llama(torch.float32, device=DEVICE)


def draw_tokens(batch: int, tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 512, (batch, tokens), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def read_prompt(model, codec, method="snapkv", allocator="ada", batch=2, graphs=True) -> GenerationContext:
    name, args = CODES[codec]
    own = build_policy(method, allocator, "llama")
    choice = choose_cache(*own[:2], build("codec", load_settings("codec", name, args)))
    budget = Budget(1.0 if method == "full" else 0.4)
    context = GenerationContext(model, choice, budget, None, (0,) * batch, compile=graphs)
    context.prefill(draw_tokens(batch, 300))
    return context


@pytest.mark.cover
@pytest.mark.parametrize("codec", CODES)
@pytest.mark.parametrize(("method", "allocator"), [("full", "uniform"), ("snapkv", "ada")])
def test_graphs_decode_codes_as_the_modules_do(exact, codec, method, allocator):
    contexts = [read_prompt(exact, codec, method, allocator, graphs=graphs) for graphs in (False, True)]
    assert_graph_answers_alike(contexts, ANSWER)


@pytest.mark.cover
@pytest.mark.parametrize("codec", [own for own, (_, args) in CODES.items() if "cut" not in own])
@pytest.mark.parametrize("method", ["keydiff", "sink"])
def test_graphs_cut_codes_as_the_modules_do(exact, codec, method):
    """At every token. In float32 a tie may fall the other way, so a few rows may be others."""
    contexts = [read_prompt(exact, codec, method, "uniform", graphs=graphs) for graphs in (False, True)]
    answers = [torch.stack(list(own.generate(ANSWER, GREEDY, frozenset()))) for own in contexts]
    assert [own.decoding for own in contexts] == ["modules", "graph"]
    assert (answers[0] == answers[1]).float().mean() >= 0.8
    assert contexts[0].bytes() == contexts[1].bytes()
    for one, other in zip(*(context.own_layers for context in contexts), strict=True):
        assert torch.equal(one.rows.lengths, other.rows.lengths)


@pytest.mark.parametrize("codec", ["fp8", "int4 after the last cut"])
def test_a_graph_takes_back_what_was_read_beyond_the_end(exact, codec):
    """Exactly: an answer that is left, and one of so many tokens, leave the same codes, and so does a second turn."""
    found = []
    for planned in (41, 60):
        context = read_prompt(exact, codec)
        answer = context.generate(planned, GREEDY, frozenset())
        tokens = [next(answer) for _ in range(41)]
        answer.close()
        assert context.decoding == "graph" and context.bytes().headroom == 0
        context.extend(draw_tokens(2, 5, seed=3))
        tokens += list(context.generate(20, GREEDY, frozenset()))
        held = [own for layer in context.own_layers for own in layer.rows.stored.tensors()]
        found.append((torch.stack(tokens), context.logits, *(own.view(torch.uint8) for own in held)))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("codec", ["int8", "int4, turned"])
def test_answers_of_one_prompt_do_not_see_each_other(exact, codec):
    context, answers = read_prompt(exact, codec), []
    context.reserve(ANSWER)
    for _ in range(2):
        with context.branch():
            answers.append(torch.stack(list(context.generate(ANSWER, GREEDY, frozenset()))))
    assert torch.equal(*answers) and context.decoding == "graph"


ON_BOTH = {
    "fp8": {"preset": "row"},
    "int8": {},
    "int4": {"preset": "vllm"},
    "fp4": {"global_scale": 448},
    "turboquant": {"raw_layers": 0},
    "hf_quantized": {"residual": 8},
    "kvquant": {},
}


@pytest.mark.parametrize("codec", ON_BOTH)
def test_a_gpu_rounds_rows_as_a_cpu_does(exact, codec, tmp_path):
    """After a prompt in blocks, a question and some tokens, in float64, so that few numbers lie where codes meet.

    Angles of RoPE are float32 on both, so a few numbers get another code, and the logits behind them move.
    """
    there = copy.deepcopy(exact).cpu()
    args = ON_BOTH[codec]
    if codec == "kvquant":
        args = {"path": write_ranges(there, tmp_path / "file")}
    setup = dict(method="snapkv", budget=0.5, block_size=128, allocator="ada", codec=codec, codec_args=args)
    prompts, more, found = draw_tokens(2, 300), draw_tokens(2, 20, seed=2), []
    for device in (DEVICE, "cpu"):
        held = kvbench.prefill(copy.deepcopy(there).double().to(device), prompts.to(device), **setup)
        parts = more.to(device).split([5, *[1] * 15], dim=1)
        found.append((torch.cat([held.extend(part) for part in parts], 1).cpu(), held.bytes))
    (logits, size), (expected, expected_size) = found
    assert size.rows == expected_size.rows and size.state == expected_size.state
    assert ((logits - expected).abs() > 2e-3 * expected.abs().max()).float().mean() < 0.1


def write_ranges(model: LlamaForCausalLM, path: Path) -> str:
    """A file of KVQuant for a model on the CPU."""
    texts = [own.cpu() for own in draw_tokens(4, 40, seed=5)]
    recipe = KVQuantRecipe(0.05, weighed=False, length=40)
    write_tensors(path, calibrate_model(model, read_layout(model), recipe, texts), {})
    return str(path)

"""Latents of Palu on a GPU: the kernels at the size of real models, and answers in CUDA graphs.

`make test-gpu` on a machine with a GPU.
"""

from pathlib import Path

import pytest
import torch

from kvbench.engine.compressed_cache import choose_cache
from kvbench.engine.generation import GenerationContext
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.codec import join_angles
from kvbench.kernels.latent_attention import LatentRows, Side, append_latents, attend_latents
from kvbench.models.transformers_port import read_layout
from tests.support.answer_paths import assert_graph_answers_alike, read_drawn_tokens
from tests.support.gpu_models import make_llama
from tests.support.method_files import build_policy
from tests.support.palu_files import build_palu, draw_palu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
DEVICE = "cuda"
GREEDY = Sampling()
ANSWER = 150


@pytest.mark.cover
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "shape",  # heads, queries of each, dimension, ranks of keys and of values, whether other rows follow
    [(4, 4, 128, (256, 256), (256, 256), False), (4, 4, 128, (224, 256), (288, 512), True),
     (4, 7, 128, (192,), (320,), True), (2, 4, 64, (96, 64), (128, 96), True), (4, 1, 128, (384,), (512,), False),
     (4, 4, 96, (200, 136), (24, 8), True), (1, 4, 128, (64, 48), (64, 64), False)],
)  # fmt: skip
def test_the_kernels_do_what_the_references_do(shape, dtype):
    """Outputs to 2^-6 of the largest value in bfloat16: keys are rounded once here, and several times in PyTorch."""
    heads, each, dim, keys, values, more = shape
    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw(*size):
        return torch.randn(*size, generator=generator, device=DEVICE).to(dtype)

    groups, width, room = len(keys), heads * dim, 70
    counts = torch.randint(1, 5000, (groups, 3), generator=generator, device=DEVICE)
    counts[0, 0] = 5003
    if not more:
        counts.fill_(5003)
    total, seen, sides = int(counts.sum()), 20000 if more else 5003, []
    for ranks in (keys, values):
        sides.append(Side(
            tuple(draw(int(own.sum()), rank) for own, rank in zip(counts, ranks, strict=True)),
            tuple(draw(rank, width) / width**0.5 for rank in ranks),
            tuple(draw(width, rank) / rank**0.5 for rank in ranks),
            tuple(draw(width) for _ in ranks) if more else None,
            draw(groups, 3, room, max(ranks)),
        ))  # fmt: skip
    positions, marks = None, None
    starts = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)
    if more:
        flat = [torch.randperm(seen, generator=generator, device=DEVICE)[:own].sort()[0] for own in counts.flatten()]
        positions = torch.cat(flat).int()
        marks = torch.rand(total, heads, generator=generator, device=DEVICE) < 0.5
    rows = LatentRows(groups * heads, seen, *sides, counts, 5003, positions, starts, marks)
    angles = torch.outer(
        torch.arange(seen + room, device=DEVICE), 10000 ** -torch.linspace(0, 1, dim // 2, device=DEVICE)
    )
    angles = join_angles(*(part.repeat(1, 2).to(dtype) for part in (angles.cos(), angles.sin())))
    norm = (draw(dim), 1e-6) if more else None
    share = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 2**-16}[dtype]
    for step in (0, 1, 64, 69):
        count = torch.tensor(step, dtype=torch.int32, device=DEVICE)
        asked = [draw(3, n * groups * heads * dim) for n in (each, 1, 1)]
        found = []
        for name in ("reference", "triton"):
            queries = append_latents(*asked, *angles[:2], rows, count, norm=norm, implementation=name)
            appended = [side.more[:, :, step].clone() for side in sides]
            outputs = attend_latents(queries, angles.pairs, rows, dim**-0.5, count, norm=norm, implementation=name)
            found.append((queries, *appended, outputs))
        for one, other in zip(*found, strict=True):
            assert (one.float() - other.float()).abs().max() <= share * max(1, one.float().abs().max())


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    folder: Path = tmp_path_factory.mktemp("palu")
    return draw_palu(folder / "file", read_layout(make_llama(torch.float32)), 96)


def read_prompt(
    model, path, method="full", allocator="uniform", batch=1, graphs=True, bits=None, **more
) -> GenerationContext:
    choice = choose_cache(*build_policy(method, allocator, "llama", **more)[:2], build_palu(path, bits=bits))
    budget = Budget(1.0 if method == "full" else 0.4)
    context = GenerationContext(model, choice, budget, None, (0,) * batch, compile=graphs)
    ids = torch.randint(3, 512, (batch, 700), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    context.prefill(ids)
    return context


@pytest.mark.parametrize(("method", "allocator"), [("full", "uniform"), ("snapkv", "uniform"), ("snapkv", "ada")])
@pytest.mark.parametrize("batch", [1, 3])
def test_graphs_decode_latents_as_the_modules_do(path, method, allocator, batch):
    model = make_llama(torch.float32)
    contexts = [read_prompt(model, path, method, allocator, batch, graphs) for graphs in (False, True)]
    assert_graph_answers_alike(contexts, ANSWER)


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_graphs_decode_rounded_latents_as_the_modules_do(path, bits):
    contexts = [
        read_prompt(make_llama(torch.float32), path, "snapkv", "ada", 2, graphs, bits) for graphs in (False, True)
    ]
    assert_graph_answers_alike(contexts, ANSWER)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("every", [1, 5])
def test_graphs_cut_latents_as_the_modules_do(path, every, bits):
    """By positions, so that no rounding decides which rows stay."""
    model, more = make_llama(torch.float32), {"decoding": True, "decode_interval": every}
    contexts = [read_prompt(model, path, "sink", "uniform", 2, graphs, bits, **more) for graphs in (False, True)]
    assert_graph_answers_alike(contexts, ANSWER)


@pytest.mark.parametrize("bits", [None, 4])
def test_a_graph_in_bfloat16_gives_what_the_references_give(path, bits):
    """The same tokens are read, so that logits can be compared: to 2^-5 of the largest, and to 2^-4 if latents of a new
    token may get other codes.
    """
    context, found = read_prompt(make_llama(torch.bfloat16), path, "snapkv", "ada", bits=bits), []
    for name in (None, "reference"):
        with torch.no_grad(), context.branch():
            found.append(read_drawn_tokens(context, ANSWER, name))
    share = 2**-5 if bits is None else 2**-4
    assert (found[0] - found[1]).abs().max() <= share * found[1].abs().max()


def test_a_graph_takes_back_what_was_read_beyond_the_end(path):
    """Exactly: what is done again gives what it gave before."""
    model, found = make_llama(torch.float32), []
    for planned in (50, 71):
        context = read_prompt(model, path, "snapkv", "ada", 2)
        answer = context.generate(planned, GREEDY, frozenset())
        tokens = torch.stack([next(answer) for _ in range(50)])
        answer.close()
        assert context.decoding == "graph" and context.bytes().headroom == 0
        found.append(
            (tokens, context.logits, *(own for layer in context.own_layers for own in layer.rows.stored.tensors()))
        )
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))

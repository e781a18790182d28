"""A step over rows that a codec packs gives what the modules give, and leaves the rows that the codec would."""

import pytest
import torch

from kvbench.config.catalogue import build, load_settings
from kvbench.engine import generation
from kvbench.engine.appended_rows import AppendedRows, only_appends
from kvbench.engine.compressed_cache import choose_cache
from kvbench.engine.context import decodes_in_graph
from kvbench.engine.generation import GenerationContext
from kvbench.engine.graph_decoding import StepRows, find_angles
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.codec import Packing
from kvbench.kernels.attention import attend
from kvbench.kernels.rope_append.reference import rotate_projected
from kvbench.methods.codecs.kivi import GrowingKivi, Kivi
from kvbench.models.decoder_weights import collect_weights
from kvbench.validation import ContractError
from tests.support.answer_paths import CHUNK, assert_near_storage
from tests.support.method_files import build_policy
from tests.support.selection import only_in_full
from tests.support.tiny_models import ids, make_double, tiny

SMALL = dict(bits=2, group=8, residual=24)
ANSWER = 2 * CHUNK + 17  # more than two residuals
MERGING = {"decoding": False, "sinks": 4, "recents": 8}


def choice_of(method="snapkv", allocator="ada", codec=None, **more):
    codec = codec or build("codec", load_settings("codec", "kivi", SMALL))
    return choose_cache(*build_policy(method, allocator, "llama", **more)[:2], codec)


def read_prompt(choice, model, batch=1, stepped=True):
    """A context on a prompt that generates through the step, or through the modules."""
    budget = Budget(1.0 if choice.method.name == "full" else 0.5)
    context = GenerationContext(model, choice, budget, None, tuple(range(batch)))
    context.prefill(torch.cat([ids(90, seed) for seed in range(batch)]).to(next(model.parameters()).device))
    if stepped:
        context.weights = collect_weights(model)
        assert context.weights is not None
    return context


class DefinedRows(StepRows):
    """The same step by the definition: all rows are read back for each token, and the codec extends them by it."""

    def __init__(self, weights, answers, tokens, implementation):
        self.weights, (self.layers,), self.implementation = weights, answers, implementation
        self.indices = [layer.index for layer in self.layers]
        seen = self.layers[0].rows.seen
        self.angles = find_angles(weights.rotations[0], seen, seen + tokens, weights.embed)
        self.history, self.step = [[layer.rows for layer in self.layers]], torch.zeros((), dtype=torch.int32)

    def reader(self, cuts):
        return self.attend

    def attend(self, index, projected, norms):
        layer = self.layers[index]
        batch, dim = len(projected[0]), projected[1].shape[1] // layer.rows.shape[1]
        queries, keys, values = rotate_projected(*projected, *self.angles, batch, dim, self.step, norms)
        layer.rows = layer.rows.append(keys, values)
        outputs, _ = attend(queries, *layer.rows.attention_view(), self.weights.scaling, implementation="reference")
        layer.rows = layer.rows.pack_tail()
        return outputs

    def advance(self, cuts):
        self.step += 1
        self.history[int(self.step) :] = [[layer.rows for layer in self.layers]]

    def back(self, step):
        self.step.fill_(step)
        for layer, rows in zip(self.layers, self.history[step], strict=True):
            layer.rows = rows
        return step

    def finish(self, read, answer=0):
        pass


@pytest.mark.cover
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    ("allocator", "codec"),
    [only_in_full("uniform", SMALL), ("ada", SMALL), ("ada", dict(bits=4, group=32, residual=32))],
)
def test_the_layers_hold_afterwards_what_the_codec_packs_token_by_token(allocator, codec, batch, monkeypatch):
    choice = choice_of("snapkv", allocator, build("codec", load_settings("codec", "kivi", codec)), window=4)
    found = []
    for rows in (DefinedRows, AppendedRows):
        monkeypatch.setattr(generation, "AppendedRows", rows)
        context = read_prompt(choice, make_double("llama"), batch)
        lengths = context.own_layers[-1].rows.lengths
        assert allocator == "uniform" or len(set((lengths % codec["residual"]).flatten().tolist())) > 1
        answer = torch.stack(list(context.generate(ANSWER, Sampling(), frozenset(), read_last=True)))
        found.append((answer, context))
    assert torch.equal(found[0][0], found[1][0])
    for layer, another in zip(*(context.own_layers for _, context in found), strict=True):
        assert another.rows.seen == 90 + ANSWER
        for one, other in zip(layer.rows.stored.tensors(), another.rows.stored.tensors(), strict=True):
            if one.dtype == torch.float64:
                torch.testing.assert_close(other, one, rtol=0, atol=1e-12)
            else:
                assert torch.equal(one, other)


@pytest.mark.cover
@pytest.mark.parametrize("model", ["llama", "qwen3", only_in_full("phi3")])
@pytest.mark.parametrize(
    ("method", "allocator"), [only_in_full("full", "uniform"), ("snapkv", "ada"), ("centroidkv", "uniform")]
)
def test_the_step_gives_what_the_modules_give(method, allocator, model):
    choice = choice_of(method, allocator, **(MERGING if method == "centroidkv" else {}))
    modules, step = (read_prompt(choice, make_double(model), 2, stepped) for stepped in (False, True))
    assert method != "centroidkv" or step.own_layers[1].rows.mass.max() > 1
    answers = [list(context.generate(ANSWER, Sampling(), frozenset())) for context in (modules, step)]
    assert torch.equal(*map(torch.stack, answers))
    assert (modules.decoding, step.decoding) == ("modules", "graph")
    assert_near_storage(modules, step)
    more = ids(5, 9, batch=2)
    assert torch.allclose(modules.extend(more), step.extend(more), atol=1e-3)


def test_room_for_an_answer_is_counted_before_it_begins():
    modules, step = (read_prompt(choice_of(), tiny("llama"), stepped=stepped) for stepped in (False, True))
    for context in (modules, step):
        size = context.bytes()
        context.reserve(8)  # the modules read so few tokens
        assert context.bytes() == size
        context.reserve(ANSWER)
    heads, dim, raw = 2, 32, 4
    groups, values = (23 + ANSWER - 2) // 24 * 3, ANSWER - 2  # of the tokens that are read but the last
    packed = heads * dim * (groups * (8 * 2 // 8 + 4) + values * (2 / 8 + 4 / 8))
    ring = 2 * heads * (24 + CHUNK + 1) * dim * raw
    assert modules.bytes().headroom == 0 and step.bytes().headroom == 3 * (packed + ring)
    peak = step.memory.peak
    assert peak >= step.bytes().total
    reserved = [layer.rows.growing for layer in step.own_layers]
    answer = step.generate(ANSWER, Sampling(), frozenset())
    next(answer), next(answer)
    assert [layer.rows.growing for layer in step.own_layers] == reserved  # the answer uses what was reserved
    assert len(list(answer)) == ANSWER - 2 and step.bytes().headroom == 0


@pytest.mark.parametrize("grows", [True, False])
def test_no_room_is_made_for_what_the_modules_read(grows, monkeypatch):
    """By positions in the cache, or behind rows that cannot grow."""
    monkeypatch.setattr(Kivi, "packing", Packing(grows=grows))
    more = {"method": "sink", "decoding": False, "positions": "rolling"} if grows else {}
    choice = choice_of(allocator="uniform", **more)
    assert decodes_in_graph(choice)  # blocks of its prompt can be read in graphs
    context = read_prompt(choice, tiny("llama"))
    size = context.bytes()
    context.reserve(10)
    assert context.bytes() == size
    assert len(list(context.generate(10, Sampling(), frozenset()))) == 10 and context.decoding == "modules"


def test_a_codec_that_cannot_grow_is_read_by_the_modules():
    class Fixed(Kivi):
        packing = Packing()

    assert only_appends(choice_of()) and not only_appends(choice_of(codec=Fixed("fixed", 2, 8, 24)))
    assert not only_appends(choice_of("quest", "uniform"))


def test_a_codec_that_attends_wrongly_is_named(monkeypatch):
    def attend(growing, queries, *more):
        return queries

    def finish(growing, *more):
        raise RuntimeError("full")

    step = read_prompt(choice_of(), tiny("llama"))
    for hook, broken, message in (
        ("attend", attend, r"growing.attend of layer 0 returned a tensor of shape \(1, 192\)"),
        ("finish", finish, "growing.finish of layer 0 raised RuntimeError: full"),
    ):
        with monkeypatch.context() as patch, pytest.raises(ContractError, match=f"^codec=kivi: {message}"):
            patch.setattr(GrowingKivi, hook, broken)
            list(step.generate(20, Sampling(), frozenset()))
        step.path = None

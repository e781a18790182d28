"""A step over rows that a codec packs gives what the modules give, and leaves the rows that the codec would."""

import pytest
import torch

from kvbench.config.catalogue import build, load_settings
from kvbench.engine import generation
from kvbench.engine.compressed_cache import choose_cache
from kvbench.engine.context import decodes_in_graph
from kvbench.engine.generation import GenerationContext
from kvbench.engine.graph_decoding import CHUNK, GraphDecoder, only_appends
from kvbench.engine.packed_rows import PackedRows
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.budget import Budget
from kvbench.kernels.attention import attend
from kvbench.kernels.rope_append.reference import rotate_projected
from kvbench.methods.codecs.kivi import GrowingKivi, Kivi
from kvbench.models.decoder_weights import collect_weights
from kvbench.validation import ContractError
from tests.support.interrupted_answers import answer_both, answer_with_interruptions, assert_freed_at_once
from tests.support.method_files import build_policy
from tests.support.tiny_models import ids, make_double, tiny

SMALL = dict(bits=2, group=8, residual=24)
ANSWER = 3 * CHUNK + 8  # more than two residuals
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


class DefinedRows:
    """The same step by the definition: all rows are read back for each token, and the codec extends them by it."""

    def __init__(self, weights, layers, tokens, seen):
        self.weights, self.layers, self.left = weights, layers, tokens
        cos, sin = weights.rotation(torch.arange(seen, seen + tokens)[None])
        self.angles = cos[0].to(weights.embed.dtype), sin[0].to(weights.embed.dtype)
        self.history, self.step = [[layer.rows for layer in layers]], torch.zeros((), dtype=torch.int32)

    def cuts(self, number):
        return False

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

    def settle(self):
        pass

    def advance(self, cuts):
        self.step += 1
        self.history[int(self.step) :] = [[layer.rows for layer in self.layers]]

    def pack_due(self, number):
        pass

    def marked(self, tokens):
        return tokens

    def back(self, step):
        self.step.fill_(step)
        for layer, rows in zip(self.layers, self.history[step], strict=True):
            layer.rows = rows
        return step

    def keep(self, read):
        pass

    def finish(self, read):
        pass


def assert_counts(one, other):
    """Two contexts hold rows of the same positions in as many bytes, and have counted the same."""
    assert one.seen == other.seen and one.bytes() == other.bytes()
    for layer, another in zip(one.own_layers, other.own_layers, strict=True):
        assert layer.attended == another.attended
        for name in ("peak_attended", "peak_rows"):
            assert getattr(layer.tally, name) == getattr(another.tally, name), name
        rows, found = layer.rows, another.rows
        for name in ("shape", "seen", "longest", "even", "tail", "mean_rows"):
            assert getattr(rows, name) == getattr(found, name), name
        assert torch.equal(rows.places, found.places) and torch.equal(rows.lengths, found.lengths)
        assert torch.equal(rows.view().mass, found.view().mass) and found.growing is None


def assert_near(one, other):
    """And the same numbers. The modules norm in float32, so that now and then a code or a scale is the next one."""
    for layer, another in zip(one.own_layers, other.own_layers, strict=True):
        for held, found in zip(layer.rows.stored.read(), another.rows.stored.read(), strict=True):
            assert torch.isclose(held, found, atol=2e-3).double().mean() > 0.99


@pytest.mark.cover
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    ("allocator", "codec"), [("uniform", SMALL), ("ada", SMALL), ("ada", dict(bits=4, group=32, residual=32))]
)
def test_the_layers_hold_afterwards_what_the_codec_packs_token_by_token(allocator, codec, batch, monkeypatch):
    choice = choice_of("snapkv", allocator, build("codec", load_settings("codec", "kivi", codec)), window=4)
    found = []
    for rows in (DefinedRows, PackedRows):
        monkeypatch.setattr(generation, "PackedRows", rows)
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
@pytest.mark.parametrize("model", ["llama", "qwen3", "phi3"])
@pytest.mark.parametrize(("method", "allocator"), [("full", "uniform"), ("snapkv", "ada"), ("centroidkv", "uniform")])
def test_the_step_gives_what_the_modules_give(method, allocator, model):
    choice = choice_of(method, allocator, **(MERGING if method == "centroidkv" else {}))
    modules, step = (read_prompt(choice, make_double(model), 2, stepped) for stepped in (False, True))
    assert method != "centroidkv" or step.own_layers[1].rows.mass.max() > 1
    answers = [list(context.generate(ANSWER, Sampling(), frozenset())) for context in (modules, step)]
    assert torch.equal(*map(torch.stack, answers))
    assert (modules.decoding, step.decoding) == ("modules", "graph")
    assert_counts(modules, step)
    assert_near(modules, step)
    more = ids(5, 9, batch=2)
    assert torch.allclose(modules.extend(more), step.extend(more), atol=1e-3)


@pytest.mark.cover
@pytest.mark.parametrize("read_last", [False, True])
@pytest.mark.parametrize("end", [9, CHUNK, CHUNK + 3])
def test_what_was_decoded_beyond_the_end_is_as_if_it_never_was(end, read_last):
    modules, step = (read_prompt(choice_of(), make_double("llama"), stepped=stepped) for stepped in (False, True))
    answer_both((modules, step), end, read_last)
    assert step.decoding == "graph"
    assert_counts(modules, step)
    assert_near(modules, step)
    assert torch.allclose(modules.logits, step.logits, atol=1e-3)
    again = [list(context.generate(30, Sampling(), frozenset())) for context in (modules, step)]
    assert torch.equal(*map(torch.stack, again))
    assert_counts(modules, step)


def test_a_branch_leaves_nothing_behind():
    step = read_prompt(choice_of(), make_double("llama"))
    rows, size = [layer.rows for layer in step.own_layers], step.bytes()
    answers = []
    for _ in range(2):
        with step.branch():
            answers.append(torch.stack(list(step.generate(ANSWER, Sampling(), frozenset()))))
            with step.branch():
                list(step.generate(20, Sampling(), frozenset()))
            answers[-1] = torch.cat([answers[-1], torch.stack(list(step.generate(20, Sampling(), frozenset())))])
    with step.branch():
        answer = step.generate(40, Sampling(), frozenset())
        assert len([next(answer) for _ in range(CHUNK + 5)]) == CHUNK + 5
    answer.close()
    assert torch.equal(*answers) and step.bytes() == size
    assert all(layer.rows is own for layer, own in zip(step.own_layers, rows, strict=True))


@pytest.mark.parametrize("first", [5, CHUNK + 2])
def test_what_is_read_while_an_answer_is_under_way_comes_behind_what_it_has_read(first):
    found = []
    for stepped in (False, True):
        context = read_prompt(choice_of(), make_double("llama"), stepped=stepped)
        found.append((*answer_with_interruptions(context, first), context))
    assert torch.equal(found[0][0], found[1][0]) and torch.allclose(found[0][1], found[1][1], atol=1e-3)
    assert_counts(found[0][2], found[1][2])


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
    monkeypatch.setattr(Kivi, "grows", grows)
    more = {"method": "sink", "decoding": False, "positions": "rolling"} if grows else {}
    choice = choice_of(allocator="uniform", **more)
    assert decodes_in_graph(choice)  # blocks of its prompt can be read in graphs
    context = read_prompt(choice, tiny("llama"))
    size = context.bytes()
    context.reserve(ANSWER)
    assert context.bytes() == size
    assert len(list(context.generate(ANSWER, Sampling(), frozenset()))) == ANSWER and context.decoding == "modules"


def test_a_context_that_nobody_has_is_freed_at_once():
    assert_freed_at_once(lambda: read_prompt(choice_of(), tiny("llama")))


def test_a_codec_that_cannot_grow_is_read_by_the_modules():
    class Fixed(Kivi):
        grows = False

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


def test_the_kernels_take_the_same_step():
    """Steps of two layers through the interpreter, or on the GPU."""
    model = tiny("wide").to("cuda" if torch.cuda.is_available() else "cpu")
    try:
        context, found = read_prompt(choice_of(), model), []
        for name in ("reference", "triton"):
            with torch.no_grad(), context.branch():
                first = context.logits.argmax(-1)
                rows = PackedRows(context.weights, context.own_layers, 2, context.seen, name)
                draws = torch.zeros(1, 3, device=first.device)
                decoder = GraphDecoder(context.weights, rows, first, 2, Sampling().pick, draws, name)
                tokens = [int(decoder.next()[0]) for _ in range(2)]
                logits = decoder.close()
                found.append((tokens, logits, [layer.rows.stored.read() for layer in context.own_layers]))
        assert found[0][0] == found[1][0] and torch.allclose(found[0][1], found[1][1], atol=1e-4)
        for one, other in zip(found[0][2], found[1][2], strict=True):
            assert all(torch.allclose(own, same, atol=1e-4) for own, same in zip(one, other, strict=True))
    finally:
        model.to("cpu")

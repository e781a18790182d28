"""Two contexts on one prompt, of which one answers through the model's modules and one through kvbench's own step."""

from collections.abc import Sequence

import pytest
import torch
from torch.utils._pytree import tree_flatten

from kvbench.cache.policy import CachePolicy
from kvbench.engine.appended_rows import AppendedRows
from kvbench.engine.generation import WORTH, Answer, GenerationContext
from kvbench.engine.graph_decoding import GraphDecoder
from kvbench.engine.joint_decoding import Session, finish_answer, read_given, run_together
from kvbench.engine.sampling import Sampling, TokenChooser
from kvbench.interfaces.budget import Budget
from kvbench.models.decoder_weights import collect_weights
from tests.support.tiny_models import ids

CHUNK = 5
"""Tokens that are decoded before the host reads them, in tests/engine."""
LONG = CHUNK + 6
"""Tokens of an answer that is read ahead more than once."""
LENGTHS = (LONG, 7, 9)
"""A short answer, which the modules read, between two that a graph reads."""


def make_contexts(
    model: torch.nn.Module,
    choice: CachePolicy,
    budget: float | Budget = 0.3,
    batch: int = 1,
    stepped: bool = True,
    prompt: int = 60,
    block: int | None = None,
) -> list[GenerationContext]:
    """Two contexts that have read a prompt of `prompt` tokens. The second one has weights for the step if `stepped`."""
    made, device = [], next(model.parameters()).device
    own = budget if isinstance(budget, Budget) else Budget(budget)
    for step in (False, stepped):
        context = GenerationContext(model, choice, own, block, tuple(range(batch)), answer=40)
        context.prefill(torch.cat([ids(prompt, seed) for seed in range(batch)]).to(device))
        if step:
            context.weights = collect_weights(model)
            assert context.weights is not None
        made.append(context)
    return made


def assert_same(one: GenerationContext, other: GenerationContext) -> None:
    """Two contexts count the same, hold the same rows, and their methods remember the same."""
    assert (one.seen, one.since_cut) == (other.seen, other.since_cut)
    assert [port.seen for port in one.ports()] == [port.seen for port in other.ports()]
    for layer, another in zip(one.own_layers, other.own_layers, strict=True):
        assert layer.attended == another.attended
        assert layer.token_bytes == another.token_bytes
        for name in ("peak_attended", "peak_rows", "protected", "given_up"):
            assert getattr(layer.tally, name) == getattr(another.tally, name), name
        evicted = [torch.tensor(0) if own.tally.evicted is None else own.tally.evicted for own in (layer, another)]
        assert torch.equal(*evicted)
        held, rows = layer.rows.view(), another.rows.view()
        assert torch.equal(held.places, rows.places) and layer.rows.seen == another.rows.seen
        masses = [own.rows.mass for own in (layer, another)]
        assert len({None if mass is None else mass.dtype for mass in masses}) == 1
        torch.testing.assert_close(held.mass, rows.mass, atol=1e-4, rtol=1e-4)
        assert held.columns.keys() == rows.columns.keys()
        for name, column in held.columns.items():
            assert torch.allclose(column, rows.columns[name], atol=1e-4), name
        for remembered in ("layer", "shared"):
            known, found = (tree_flatten(getattr(own.state, remembered)) for own in (layer, another))
            assert known[1] == found[1]
            for value, other_value in zip(known[0], found[0], strict=True):
                if isinstance(value, torch.Tensor | int):
                    torch.testing.assert_close(value, other_value, atol=1e-4, rtol=1e-4)
        assert torch.allclose(held.keys, rows.keys, atol=1e-4) and torch.allclose(held.values, rows.values, atol=1e-4)
    for window, another in zip(one.sliding_layers(), other.sliding_layers(), strict=True):
        assert window.cumulative_length == another.cumulative_length == one.seen
        torch.testing.assert_close(window.keys, another.keys, rtol=0, atol=1e-4)
        torch.testing.assert_close(window.values, another.values, rtol=0, atol=1e-4)


def assert_same_storage(modules: GenerationContext, step: GenerationContext) -> None:
    """Two contexts hold the same numbers, packed in tensors of the same sizes, and have counted the same."""
    assert_same(modules, step)
    assert modules.bytes() == step.bytes()
    for layer, another in zip(modules.own_layers, step.own_layers, strict=True):
        assert another.rows.growing is None
        if layer.packs:
            for one, other in zip(layer.rows.stored.tensors(), another.rows.stored.tensors(), strict=True):
                assert one.dtype == other.dtype
                torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


def assert_near_storage(modules: GenerationContext, step: GenerationContext) -> None:
    """Two contexts hold rows of the same positions in as many bytes, almost the same numbers, and counted the same.

    The modules norm in float32, so that now and then a code or a scale is the next one.
    """
    assert modules.seen == step.seen and modules.bytes() == step.bytes()
    for layer, another in zip(modules.own_layers, step.own_layers, strict=True):
        assert layer.attended == another.attended
        for name in ("peak_attended", "peak_rows"):
            assert getattr(layer.tally, name) == getattr(another.tally, name), name
        rows, found = layer.rows, another.rows
        for name in ("shape", "seen", "longest", "even", "tail", "mean_rows"):
            assert getattr(rows, name) == getattr(found, name), name
        assert torch.equal(rows.places, found.places) and torch.equal(rows.lengths, found.lengths)
        assert torch.equal(rows.view().mass, found.view().mass) and found.growing is None
        for held, other in zip(rows.stored.read(), found.stored.read(), strict=True):
            assert torch.isclose(held, other, atol=2e-3).double().mean() > 0.99


def assert_same_answers(modules: GenerationContext, step: GenerationContext, lengths: Sequence[int] = LENGTHS) -> None:
    """The contexts give the same answers one after the other, of which the modules read those of few tokens."""
    for tokens in lengths:
        answers = [list(context.generate(tokens, Sampling(), frozenset(), True)) for context in (modules, step)]
        assert torch.equal(*map(torch.stack, answers))
        assert step.decoding == ("graph" if tokens >= WORTH else "modules")
        assert_same_storage(modules, step)
        torch.testing.assert_close(modules.logits, step.logits, rtol=0, atol=1e-9)


def tell(
    context: GenerationContext, tokens: int, stop: Sequence[int] = (), after: int | None = None,
    sampling: TokenChooser | None = None,
) -> Session[torch.Tensor]:  # fmt: skip
    """A session whose result is an answer, (n, B). With `after` it ends the answer after so many tokens."""
    answer, found = Answer(context, tokens, sampling or Sampling(), frozenset(stop)), []
    yield from finish_answer(answer, lambda token: found.append(token) or len(found) != after)
    return torch.stack(found)


def forget(context: GenerationContext, tokens: int, **more) -> Session[tuple[torch.Tensor, object]]:
    """A session whose result is an answer, and what its context has counted before it forgets the answer."""
    with context.branch():
        answer = yield from tell(context, tokens, **more)
        layers = [(list(own.attended), own.tally.peak_attended, own.rows.longest_head) for own in context.own_layers]
        return answer, (context.seen, context.since_cut, layers)


def read_given_both_ways(pairs: Sequence[Sequence[GenerationContext]], ids: torch.Tensor) -> None:
    """Of each pair, modules read the tokens into the first context one by one, and the second ones read together.

    All samples read the same tokens, (1, n).
    """
    for modules, _ in pairs:
        for token in ids.split(1, dim=1):
            modules.extend(token.repeat(len(modules.seeds), 1))
    run_together([read_given(joined, ids.repeat(len(joined.seeds), 1)) for _, joined in pairs])


def assert_graph_answers_alike(contexts: Sequence[GenerationContext], tokens: int) -> None:
    """Of two contexts on a GPU modules answer in the first and a graph in the second, with almost the same tokens."""
    answers = [torch.stack(list(context.generate(tokens, Sampling(), frozenset()))) for context in contexts]
    assert [context.decoding for context in contexts] == ["modules", "graph"]
    assert (answers[0] == answers[1]).float().mean() >= 0.9  # a rounded scale, or a logit, is now and then the next one
    assert contexts[0].bytes() == contexts[1].bytes()
    for one, other in zip(*(context.own_layers for context in contexts), strict=True):
        assert one.attended == pytest.approx(other.attended)
        assert torch.equal(one.rows.places, other.rows.places) and torch.equal(one.rows.lengths, other.rows.lengths)


def read_drawn_tokens(context: GenerationContext, tokens: int, implementation: str | None) -> torch.Tensor:
    """Let packed rows read drawn tokens, in a graph unless an implementation is named. Returns the last logits."""
    device = context.logits.device
    draws = torch.rand(1, tokens + 1, generator=torch.Generator().manual_seed(2)).to(device)
    rows = AppendedRows(context.weights, [context.own_layers], tokens, implementation)
    decoder = GraphDecoder(
        context.weights, rows, torch.full((1,), 7, device=device), tokens, pick_drawn, draws, implementation
    )
    assert bool(decoder.graphs) == (implementation is None)
    for _ in range(tokens):
        decoder.next()
    return decoder.close().float()


def pick_drawn(logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """A token that does not depend on the logits, so that they can be compared."""
    return (draws * logits.shape[1]).long()

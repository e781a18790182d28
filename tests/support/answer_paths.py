"""Two contexts on one prompt, of which one answers through the model's modules and one through kvbench's own step."""

import torch

from kvbench.cache.policy import CachePolicy
from kvbench.engine.generation import GenerationContext
from kvbench.interfaces.budget import Budget
from kvbench.models.decoder_weights import collect_weights
from tests.support.tiny_models import ids


def make_contexts(
    model: torch.nn.Module,
    choice: CachePolicy,
    budget: float = 0.3,
    batch: int = 1,
    stepped: bool = True,
    prompt: int = 60,
    block: int | None = None,
) -> list[GenerationContext]:
    """Two contexts that have read a prompt of `prompt` tokens. The second one has weights for the step if `stepped`."""
    made, device = [], next(model.parameters()).device
    for step in (False, stepped):
        context = GenerationContext(model, choice, Budget(budget), block, tuple(range(batch)), answer=40)
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
        assert held.columns.keys() == rows.columns.keys()
        for name, column in held.columns.items():
            assert torch.allclose(column, rows.columns[name], atol=1e-4), name
        for remembered in ("layer", "shared"):
            known, found = getattr(layer.state, remembered), getattr(another.state, remembered)
            torch.testing.assert_close(known, found, atol=1e-4, rtol=1e-4)
        assert torch.allclose(held.keys, rows.keys, atol=1e-4) and torch.allclose(held.values, rows.values, atol=1e-4)
    for window, another in zip(one.sliding_layers(), other.sliding_layers(), strict=True):
        assert window.cumulative_length == another.cumulative_length == one.seen
        torch.testing.assert_close(window.keys, another.keys, rtol=0, atol=1e-4)
        torch.testing.assert_close(window.values, another.values, rtol=0, atol=1e-4)

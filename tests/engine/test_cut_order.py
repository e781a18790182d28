"""The order of a cut stands in one place: every path of a cut follows each change of it."""

from dataclasses import dataclass

import pytest
import torch

from kvbench.cache.policy import CachePolicy, choose_cache
from kvbench.config.catalogue import build, load_settings
from kvbench.engine.generation import GenerationContext
from kvbench.engine.joint_decoding import read_given, run_together
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.method import Captured, Method
from kvbench.kernels import cut_order
from kvbench.kernels.cut_order import NEWEST, ORDER, RECENTS, SINKS, CutOrder
from kvbench.models.decoder_weights import collect_weights
from tests.support.cut_orders import ORDERS
from tests.support.tiny_models import ids, make_fresh

PROMPT, BLOCK, QUOTA, ANSWER = 44, 12, 8, 14
PROTECTED = {
    "kinds": (4, 6),
    "sinks": (9, 2),
    "scores": (2, 2),
    "ties": (2, 2),
}  # how many show that a step is reversed


@dataclass(frozen=True)
class Numbered(Method):
    """Protects the first and the newest positions. Other rows have one of five scores."""

    sinks: int = 0
    recents: int = 0

    captured = Captured(order_free=True)

    def protect_sinks(self, observation, rows, quota):
        return rows.places < self.sinks

    def protect(self, observation, rows, quota):
        return rows.places >= observation.tokens - self.recents

    def score(self, observation, rows, state):
        return (rows.places * 7 % 5).to(rows.keys.dtype)


def keep(places: list[int], tokens: int, order: CutOrder, sinks: int, recents: int) -> list[int]:
    """The rows that a head keeps of those at `places`, by a plain loop."""
    kinds = {SINKS: {p for p in places if p < sinks}, RECENTS: {p for p in places if p >= tokens - recents}}
    kept: list[int] = []
    claimed: set[int] = set()
    for kind, stays in order.protected:
        own = sorted(kinds[kind] - claimed, reverse=stays == NEWEST)
        kept += own[: max(QUOTA - order.scored - len(kept), 0)]
        claimed |= kinds[kind]

    def rank(place: int) -> tuple[int, int]:
        return (-1 if order.largest else 1) * (place * 7 % 5), place if order.earliest else -place

    others = sorted((place for place in places if place not in kept), key=rank)
    return sorted(kept + others[: QUOTA - len(kept)])


def expect(order: CutOrder, sinks: int, recents: int, interval: int) -> list[int]:
    """The places of the rows after the prompt and the answer's tokens, of which the last one is not read."""
    held: list[int] = []
    for stop in (*range(BLOCK, PROMPT, BLOCK), PROMPT):
        held += range(held[-1] + 1 if held else 0, stop)
        held = keep(held, stop, order, sinks, recents) if len(held) > QUOTA else held
    for number, place in enumerate(range(PROMPT, PROMPT + ANSWER - 1), 1):
        held = [*held, place]
        held = keep(held, place + 1, order, sinks, recents) if number % interval == 0 else held
    return held


def read(model: torch.nn.Module, choice: CachePolicy, stepped: bool) -> GenerationContext:
    context = GenerationContext(model, choice, Budget(QUOTA), BLOCK, (0,), compile=False, answer=ANSWER)
    if stepped:
        context.weights = collect_weights(model)
    context.prefill(ids(PROMPT))
    return context


@pytest.mark.parametrize("change", ORDERS)
def test_every_path_of_a_cut_follows_the_order(change, monkeypatch):
    model = make_fresh("short")
    order, (sinks, recents) = ORDERS[change], PROTECTED.get(change, (3, 6))
    for interval in (1, 5):
        method = Numbered("numbered", sinks=sinks, recents=recents, decoding=True, decode_interval=interval)
        choice = choose_cache(method, Allocator("uniform"), build("codec", load_settings("codec", "raw")))
        expected = expect(order, sinks, recents, interval)
        assert expected != expect(ORDER, sinks, recents, interval)
        monkeypatch.setattr(cut_order, "ORDER", order)
        modules, alone, *joined = (read(model, choice, stepped) for stepped in (False, True, True, True))
        *_, answer = [torch.stack(list(own.generate(ANSWER, Sampling(), frozenset()))) for own in (modules, alone)]
        run_together([read_given(context, answer[:-1].T) for context in joined])
        assert (modules.decoding, alone.decoding) == ("modules", "graph")
        assert [context.decoded_together for context in joined] == ([2, 2] if interval == 1 else [1, 1])
        for context in (modules, alone, *joined):
            for layer in context.own_layers:
                assert layer.rows.view().places.tolist() == [[expected] * 2]
                assert layer.tally.given_up == modules.own_layers[0].tally.given_up

"""Shares of the budget: what every allocator conserves, ada against its two sources; and what the contracts say that no
method of the catalogue shows.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from kvbench.config.catalogue import build, list_choices, load_settings
from kvbench.engine.compressed_cache import choose_cache
from kvbench.engine.generation import GenerationContext
from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.apportion import apportion
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.method import Method, fit_protected
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.methods.allocators.ada import Ada
from kvbench.methods.codecs.raw import Raw
from kvbench.methods.knorm import Knorm
from kvbench.validation import ContractError, SettingError, exact_share
from tests.support.dense_engine import DenseEngine
from tests.support.oracles import CLOSE
from tests.support.tiny_models import ids, tiny

# settle


@st.composite
def shares(draw, bound=True):
    count = draw(st.integers(1, 6))
    least = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    most = [low + draw(st.integers(0, 30)) for low in least]
    targets = draw(st.lists(st.floats(0, 50), min_size=count, max_size=count))
    return targets, least, most, draw(st.integers(0, 200))


@given(shares())
def test_settle_gives_exactly_the_total_within_bounds(drawn):
    targets, least, most, total = drawn
    counts = apportion(*drawn)
    assert sum(counts) == min(max(total, sum(least)), sum(most))
    assert all(low <= count <= high for low, count, high in zip(least, counts, most, strict=True))
    assert counts == apportion(*drawn)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8), st.sampled_from([1, 2, 4, 8]))
def test_settle_is_the_largest_remainder_where_no_bound_is_met(parts, divisor):
    assume(sum(parts) % divisor == 0)
    targets, count = [part / divisor for part in parts], len(parts)
    counts = apportion(targets, [0] * count, [2000] * count, sum(parts) // divisor)
    floors = [part // divisor for part in parts]
    order = sorted(range(count), key=lambda i: (-(parts[i] % divisor), i))
    for i in order[: sum(parts) // divisor - sum(floors)]:
        floors[i] += 1
    assert counts == floors


# ada


@st.composite
def layers(draw, ragged=True):
    """Scores (H, n) as the engine gives them, protected rows, quota."""
    heads, rows = draw(st.integers(1, 4)), draw(st.integers(2, 24))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    levels = draw(st.sampled_from([2, 5, 10**6]))  # few levels: many ties
    scores = torch.randint(levels, (heads, rows), generator=generator).float()
    scores *= torch.rand(heads, 1, generator=generator) * 3
    absent = [draw(st.integers(0, rows - 1)) if ragged else 0 for _ in range(heads)]
    present = torch.arange(rows) >= torch.tensor(absent)[:, None]
    quota = draw(st.integers(1, rows))
    wanted = (torch.arange(rows) >= rows - draw(st.integers(0, rows))).expand(heads, rows)
    mass = present.float()[None]
    held = Rows(torch.zeros(1, heads, rows, 1), torch.zeros(1, heads, rows, 1), mass.long(), mass)
    sinks = (torch.arange(rows) < draw(st.integers(0, 3))).expand(heads, rows)
    protected = fit_protected(sinks[None], wanted[None], held, quota).kept[0]
    scores = scores.masked_fill(protected, math.inf).masked_fill(~present, -math.inf)
    return scores[None], protected[None], quota


ALPHAS = st.sampled_from([0.0, 0.05, 0.2, 0.29, 0.5, 0.999, 1.0])
MODES = st.sampled_from(["interpolate", "safeguard"])


@given(layers(), ALPHAS, MODES)
def test_ada_conserves_the_total_within_bounds(layer, alpha, mode):
    scores, protected, quota = layer
    counts = Ada("ada", mode, alpha).heads(scores, protected, quota)
    available = (scores > -math.inf).sum(-1)
    assert counts.dtype == torch.int64 and counts.shape == available.shape
    assert counts.sum() == min(quota * scores.shape[1], int(available.sum()))
    assert (counts >= 1).all() and (counts <= available).all() and (counts >= protected.sum(-1)).all()


@given(layers(), ALPHAS, MODES)
def test_protected_rows_are_kept_whatever_the_share(layer, alpha, mode):
    scores, protected, quota = layer
    kept = Method("any").select(scores, Ada("ada", mode, alpha).heads(scores, protected, quota))
    assert (kept >= protected).all()
    present = scores > -math.inf
    lowest = scores.masked_fill(~kept, math.inf).amin(-1)
    highest = scores.masked_fill(kept | ~present, -math.inf).amax(-1)
    assert (lowest >= highest).all()


@given(layers(ragged=False), MODES)
def test_ada_with_alpha_1_is_uniform(layer, mode):
    scores, protected, quota = layer
    uniform = Allocator("uniform").heads(scores, protected, quota)
    assert torch.equal(Ada("ada", mode, 1.0).heads(scores, protected, quota), uniform)


@given(layers(ragged=False), ALPHAS)
def test_interpolation_is_the_official_one_to_one_row(layer, alpha):
    """FFY0/AdaKV: round(c·(1-α) + ⌊base·α⌋) rows and the window; its sum may be off, ours is not."""
    scores, protected, quota = layer
    own, (heads, rows) = int(protected[0, 0].sum()), scores.shape[1:]
    base = quota - own
    open_ = sorted((-float(s), h) for h in range(heads) for s in scores[0, h] if s < math.inf)
    won = [sum(h == head for _, h in open_[: heads * base]) for head in range(heads)]
    official = [round(c * (1 - alpha) + int(base * alpha)) + own for c in won]
    assume(all(2 <= count <= rows - 1 for count in official))
    counts = Ada("ada", "interpolate", alpha).heads(scores, protected, quota)[0].tolist()
    assert all(abs(a - b) <= 1 for a, b in zip(counts, official, strict=True))


@given(layers(ragged=False), ALPHAS)
def test_safeguard_is_that_of_kvpress(layer, alpha):
    """NVIDIA/kvpress: the top ⌊α·n⌋ rows of every head are raised above all, then one top-k over the layer."""
    scores, protected, quota = layer
    heads, rows = scores.shape[1:]
    raised = []
    for head in range(heads):
        own = scores[0, head].tolist()
        safe = sorted(range(rows), key=lambda j: (-own[j], j))[
            : max(1, exact_share(alpha, quota))
        ]  # a head keeps one row
        raised.extend((-math.inf if j in safe else -own[j], head, j) for j in range(rows))
    kept = sorted(raised)[: heads * quota]
    expected = [sum(head == h for _, h, _ in kept) for head in range(heads)]
    assert Ada("ada", "safeguard", alpha).heads(scores, protected, quota)[0].tolist() == expected


def test_ada_modes_differ():
    """The same α makes the safeguard's shares more extreme."""
    scores = torch.arange(40.0).view(1, 2, 20)
    none = torch.zeros(1, 2, 20, dtype=torch.bool)
    assert Ada("ada", "interpolate", 0.2).heads(scores, none, 10).tolist() == [[2, 18]]
    assert Ada("ada", "safeguard", 0.2).heads(scores, none, 10).tolist() == [[2, 18]]
    scores = torch.tensor([[[0.0] * 12 + [9.0] * 8, [1.0] * 20]])
    assert Ada("ada", "interpolate", 0.2).heads(scores, none, 10).tolist() == [[8, 12]]
    assert Ada("ada", "safeguard", 0.5).heads(scores, none, 10).tolist() == [[8, 12]]
    assert Ada("ada", "interpolate", 0.5).heads(scores, none, 10).tolist() == [[9, 11]]


@pytest.mark.parametrize("preset", ["official_code", "kvpress"])
def test_ada_presets(preset):
    own = build("allocator", load_settings("allocator", "ada", {"preset": preset}))
    assert (own.mode, own.alpha) == ({"official_code": "interpolate", "kvpress": "safeguard"}[preset], 0.2)
    with pytest.raises(SettingError, match="mode"):
        Ada("ada", "greedy", 0.2)
    for alpha in (-0.1, 1.1, math.nan):
        with pytest.raises(SettingError, match="alpha"):
            Ada("ada", "safeguard", alpha)


# What the contracts say: toys, run end to end. None of them is known to the engine.


def context_of(model, method, allocator=None, codec=None, budget=1.0, block=None, seeds=(0,)) -> GenerationContext:
    choice = choose_cache(method, allocator or Allocator("uniform"), codec or Raw("raw"))
    return GenerationContext(tiny(model), choice, Budget(budget), block, seeds)


def lengths(context: GenerationContext) -> list[int]:
    return [int(layer.rows.counts()[0, 0]) for layer in context.own_layers]


@dataclass(frozen=True)
class Last(Method):
    """A reader that looks at the newest rows only."""

    rows: int

    def read(self, request, rows, state):
        look = torch.zeros(*request.queries.shape[:2], len(rows()), dtype=torch.bool)
        look[..., -self.rows :] = True
        return look


def test_what_a_reader_does_not_look_at_is_as_if_evicted():
    context = context_of("mistral", Last("last", 10))
    context.prefill(ids(50))
    dense = DenseEngine("mistral")
    dense.prefill(ids(50), None)
    dense.held = {layer: [head.take(slice(-9, None)) for head in heads] for layer, heads in dense.held.items()}
    torch.testing.assert_close(context.extend(ids(1))[0].double(), dense.extend(ids(1)), **CLOSE)


def test_rows_attended_of_ragged_heads():
    """A reader that looks at everything attends what the heads hold."""

    @dataclass(frozen=True)
    class Everything(Knorm):
        attends_subset = False  # it evicts rows too

        def read(self, request, rows, state):
            return torch.ones(*request.queries.shape[:2], len(rows()), dtype=torch.bool)

    context = context_of("llama", Everything("all", ()), Ada("ada", "safeguard", 0.0), budget=20)
    context.prefill(ids(64))
    assert any(len(set(layer.rows.counts()[0].tolist())) > 1 for layer in context.own_layers)
    context.extend(ids(1))
    assert [layer.attended for layer in context.own_layers] == [[21.0]] * 3


@dataclass(frozen=True)
class OneBlock(Knorm):
    """KVzip: needs the prompt as one block."""

    refusals = {"block_size": "needs the prompt as one block"}


def test_room_for_methods_of_one_block():
    for block in (None, 30, 64):
        context_of("llama", OneBlock("zip", ()), budget=10, block=block).prefill(ids(30))
    with pytest.raises(SettingError, match="block_size=29: zip needs the prompt as one block"):
        context_of("llama", OneBlock("zip", ()), budget=10, block=29).prefill(ids(30))


def test_a_choice_that_breaks_an_even_share_is_not_mixed_up():
    @dataclass(frozen=True)
    class Uneven(Knorm):
        def select(self, scores, quotas):
            newer = torch.arange(scores.shape[-1]).expand_as(scores) - scores.shape[-1]
            return newer >= torch.tensor([-3, -5])[:, None]

    context = context_of("llama", Uneven("uneven", ()), budget=4)
    with pytest.raises(ContractError, match="select of layer 0 returned a number of rows that differs from the quota"):
        context.prefill(ids(20))


@dataclass(frozen=True)
class Remembering(Method):
    """What a method remembers per layer and over layers starts empty with every context and counts as bytes."""

    def update(self, observation: Observation, rows: Rows, state: State) -> dict:
        assert state.layer.get("tokens", 0) == observation.first
        state.layer |= {"tokens": observation.tokens, "moments": torch.zeros(100)}
        order = state.shared.setdefault("order", [])
        state.shared["order"] = [*order, observation.layer]
        return {}


def test_state_is_born_with_a_sample():
    for _ in range(2):
        context = context_of("llama", Remembering("memory"), block=8)
        context.prefill(ids(20))
        assert context.layers[0].state.shared["order"] == [0, 1, 2] * 3
        assert context.bytes().state == 3 * 400
        with context.branch():
            context.extend(ids(2))
            assert context.layers[1].state.layer["tokens"] == 22
            assert len(context.layers[1].state.shared["order"]) == 12
        assert context.layers[1].state.layer["tokens"] == 20
        assert len(context.layers[1].state.shared["order"]) == 9
        context.extend(ids(1))


def test_every_allocator_declares_a_name_and_is_found():
    for name in list_choices("allocator"):
        assert build("allocator", load_settings("allocator", name)).name == name

"""StreamingLLM's positions by slot, against an engine that keeps keys as they were before the rotation."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

import kvbench
from kvbench.cache.rerotation import rotate_by_slot
from kvbench.interfaces.rows import Rows
from kvbench.kernels.rerotation import rerotate
from tests.support.dense_engine import DenseEngine, Head, HeadView
from tests.support.selection import choose_quick, only_in_full
from tests.support.tiny_models import ids, make_double, tiny

MODELS = ["llama", "llama3", "yarn", "qwen2", "qwen3", "phi3"]


def angles(model: str, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n, r) cosines and sines of the model's own rotary embedding."""
    found = make_double(model).model.rotary_emb(torch.zeros(1, dtype=torch.float32), torch.from_numpy(places)[None])
    return tuple(part[0].double().numpy() for part in found)


def rotate(rows: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """RoPE of plain rows (n, d), pair by pair."""
    out, pairs = rows.copy(), cos.shape[1] // 2
    for i in range(pairs):
        one, other = rows[:, i], rows[:, i + pairs]
        out[:, i] = one * cos[:, i] - other * sin[:, i]
        out[:, i + pairs] = other * cos[:, i] + one * sin[:, i]
    return out


class Rolling(DenseEngine):
    """Every token is read at position 0, where nothing is rotated; attention rotates by slot."""

    def positions(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64)

    def attend(self, queries, rows, places, scaling, window) -> np.ndarray:
        slots = np.arange(len(rows.places))
        cos, sin = angles(self.name, slots)
        at_zero = angles(self.name, slots[:1])[0][0, 0]  # YaRN scales its cosines: what is read at 0 has it already
        cos, sin, last = cos / at_zero, sin / at_zero, slice(len(slots) - len(queries), None)
        turned = Head(rotate(rows.keys, cos, sin), rows.values, rows.places, rows.mass)
        return DenseEngine.attend(rotate(queries, cos[last], sin[last]), turned, places, scaling, window)


def streaming(sinks: int, quota: int) -> Callable[[list[HeadView]], list[Head]]:
    def cut(glances: list[HeadView]) -> list[Head]:
        kept = []
        for glance in glances:
            count = len(glance.rows.places)
            stay = [row for row in range(count) if row < sinks or row >= count - (quota - sinks)]
            kept.append(glance.rows.take(stay))
        return kept

    return cut


@pytest.mark.cover
@pytest.mark.parametrize("block", [None, 9, only_in_full(1)])
@pytest.mark.parametrize("model", choose_quick(MODELS, "llama"))
def test_keys_are_rotated_by_their_slot(model, block):
    """Prefill in blocks, a question as a block, decoding that evicts at every step."""
    dense = Rolling(model, streaming(4, 17), cuts_decoding=True)
    expected = dense.prefill(ids(30), block)
    held = kvbench.prefill(make_double(model), ids(30), "sink", 17, block)
    torch.testing.assert_close(held.logits[0], expected, rtol=1e-4, atol=1e-4)
    for part in ids(12, seed=1).split([1, 1, 5, 1, 1, 1, 1, 1], dim=1):
        torch.testing.assert_close(held.extend(part)[0], dense.extend(part), rtol=1e-4, atol=1e-4)
        assert held.places(0, 0).tolist() == [0, 1, 2, 3, *range(dense.seen - 13, dense.seen)]


@pytest.mark.parametrize("model", MODELS)
def test_positions_are_slots_and_the_query_stands_at_the_end(model):
    """Ragged heads: plain rows, placed with gaps, come out as if placed at 0, 1, 2, …; absent rows come first."""
    draw = torch.Generator().manual_seed(0)
    places = torch.tensor([[[-1, -1, 0, 1, 90, 91, 400], [0, 1, 2, 3, 4, 5, 400]]])
    dim, groups, tokens = 32, 3, 2
    plain = torch.randn(2, 7, dim, generator=draw, dtype=torch.float64).numpy()
    asking = torch.randn(2, groups, tokens, dim, generator=draw, dtype=torch.float64).numpy()
    numbers = places[0].numpy().clip(0)
    keys = np.stack([rotate(plain[h], *angles(model, numbers[h])) for h in range(2)])
    queries = np.stack(
        [[rotate(asking[h, g], *angles(model, numbers[h, -tokens:])) for g in range(groups)] for h in range(2)]
    )
    mass = (places >= 0).double()
    rows = Rows(torch.from_numpy(keys)[None], torch.zeros(1, 2, 7, dim), places, mass)
    rotation = make_double(model).model.rotary_emb
    turned, found = rotate_by_slot(
        torch.from_numpy(queries).reshape(1, 2 * groups, tokens, dim),
        rows,
        lambda where: rotation(torch.zeros(1, dtype=torch.float32), where),
    )
    for head, slots in enumerate(([0, 0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6])):
        here = mass[0, head].bool().numpy()
        expected = rotate(plain[head], *angles(model, np.array(slots)))
        np.testing.assert_allclose(found[0, head][here], expected[here], atol=1e-6)
        for group in range(groups):
            expected = rotate(asking[head, group], *angles(model, np.array(slots[-tokens:])))
            np.testing.assert_allclose(turned[0, head * groups + group], expected, atol=1e-6)
    assert torch.equal(found[0, 1, :6], rows.keys[0, 1, :6])  # where place and slot agree, to the bit


def test_only_differences_of_slots_matter():
    """The same tokens, read after evictions at another place: logits are those of a fresh cache of the same rows."""
    plain = torch.randn(1, 1, 9, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rotation = make_double("llama").model.rotary_emb

    def logits(places: list[int]) -> torch.Tensor:
        where = torch.tensor(places)[None]
        turn_in = [part[:, None].double() for part in rotation(torch.zeros(1, dtype=torch.float32), where)]
        zero = [torch.ones_like(turn_in[0]), torch.zeros_like(turn_in[0])]
        keys = rerotate(plain, zero, turn_in)
        rows = Rows(keys, keys, where[None], torch.ones(1, 1, 9, dtype=torch.float64))
        queries, keys = rotate_by_slot(
            keys[:, :, -1:], rows, lambda x: rotation(torch.zeros(1, dtype=torch.float32), x)
        )
        return queries @ keys.mT

    torch.testing.assert_close(logits([0, 1, 2, 3, 104, 105, 106, 107, 108]), logits(list(range(9))), atol=1e-5, rtol=0)
    torch.testing.assert_close(logits([0, 1, 2, 3, 204, 205, 306, 307, 308]), logits(list(range(9))), atol=1e-5, rtol=0)


def test_variants_differ_once_something_was_evicted():
    def read(positions: str, budget: float | int, more: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
        held = kvbench.prefill(tiny("llama"), ids(60), "sink", budget, method_args={"positions": positions})
        return held.logits, held.extend(ids(more, seed=1))

    for budget in (1.0, 100):
        assert all(map(torch.equal, read("rolling", budget), read("original", budget)))
    (first, rolling), (second, original) = read("rolling", 17), read("original", 17)
    assert torch.equal(first, second)  # a one-block prefill is read before anything is evicted
    assert (rolling - original).abs().max() > 1e-2
    presets = [
        kvbench.prefill(tiny("llama"), ids(60), "sink", 17, method_args={"preset": p}) for p in ("paper", "original")
    ]
    assert torch.equal(presets[0].extend(ids(3, seed=1)), rolling)
    assert torch.equal(presets[1].extend(ids(3, seed=1)), original)


@pytest.mark.parametrize("allocator", ["uniform", "ada"])
def test_rolling_over_packed_and_ragged_rows(allocator):
    """Kept keys are stored as written and turned at every step, so codecs and allocators need not know."""
    args = {"decoding": False}
    raw = kvbench.prefill(tiny("llama"), ids(200), "sink", 100, 64, allocator, method_args=args)
    packed = kvbench.prefill(tiny("llama"), ids(200), "sink", 100, 64, allocator, "kivi", args, codec_args={"bits": 4})
    assert torch.equal(raw.logits, packed.logits)
    assert torch.isfinite(packed.extend(ids(5))).all()


def test_turn_says_what_it_cannot_do():
    with pytest.raises(ValueError, match="^rerotate: 6 rotated channels of 4"):
        rerotate(torch.ones(1, 4), (torch.ones(1, 6),) * 2, (torch.ones(1, 6),) * 2)

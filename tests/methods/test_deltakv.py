"""DeltaKV's selection against its definition, in loops: what observation layers choose and who attends to it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

import kvbench
from kvbench.config.catalogue import build, load_settings
from kvbench.engine.context import decodes_in_graph
from kvbench.validation import SettingError
from tests.support.delta_files import build_delta
from tests.support.dense_engine import DenseEngine
from tests.support.selection import choose_quick, only_in_full
from tests.support.tiny_models import ids, make_double, tiny

SELECTS = dict(full_layers=[0], depth=None, sinks=3, recent=8)


@dataclass
class Oracle(DenseEngine):
    """Attends to what DeltaKV attends to, once `count` is set."""

    full: list[int] = field(default_factory=list)
    candidates: Callable[[int], range] = range
    """Number of rows held, the token's own included -> rows to choose among."""
    count: Callable[[int], int] | None = None
    """Number of candidates -> rows to choose."""
    smoothing: float = 0.0
    last: dict[int, dict[int, float]] = field(default_factory=dict)
    """Layer -> row -> its last score."""
    look: list[int] | None = None
    looked: list[int] = field(default_factory=list)

    def attention(self, module, query, key, value, mask, scaling, **kwargs):
        layer, held = module.layer_idx, self.seen + query.shape[2]
        outputs, _ = super().attention(module, query, key, value, mask, scaling, **kwargs)
        group = query.shape[1] // len(self.held[layer])
        selects = query.shape[2] == 1 and self.count is not None
        if selects and layer in self.full and layer + 1 not in self.full:
            rows = self.candidates(held)
            heads = [(q, self.held[layer][head // group].keys) for head, q in enumerate(query[0, :, 0].numpy())]
            scores = {row: max(q @ keys[row] for q, keys in heads) for row in rows}
            last = self.last.get(layer, {})
            scores = {
                row: own if row not in last else self.smoothing * last[row] + (1 - self.smoothing) * own
                for row, own in scores.items()
            }
            self.last[layer] = scores
            chosen = sorted(rows, key=lambda row: (-scores[row], row))[: self.count(len(rows))]
            self.look = sorted({*range(held)} - {*rows} | {*chosen})
        if not selects or layer in self.full or layer < self.full[0]:
            self.looked.append(held)
            return outputs, None
        self.looked.append(len(self.look))
        for index in range(query.shape[1]):
            rows = self.held[layer][index // group].take(self.look)
            found = self.attend(query[0, index].numpy(), rows, np.array([self.seen]), scaling, None)
            outputs[0, :, index] = torch.from_numpy(found)
        return outputs, None


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


QUESTION = [1, 1, 12, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.cover
@pytest.mark.parametrize("block", choose_quick([None, 1, 7, 13, 128], None, 7))
@pytest.mark.parametrize("budget", [0.3, 9])
@pytest.mark.parametrize("codec", ["raw", "delta"])
@pytest.mark.parametrize(
    "model, full",
    [
        *[("llama", [0]), ("llama", [0, 1]), ("llama", [1])],
        *[only_in_full("qwen3", [0]), only_in_full("phi3", [0])],
    ],
)
def test_deltakv(model, full, codec, budget, block):
    """Prefill dense, a question as one block, then token by token; an exact compressor."""
    oracle = Oracle(model, full=full)
    expected = oracle.prefill(ids(51), block)
    args, own = SELECTS | {"full_layers": full}, build_delta(model, full_layers=full) if codec == "delta" else "raw"
    held = kvbench.prefill(make_double(model), ids(51), "deltakv", budget, block, codec=own, method_args=args)
    close(held.logits[0], expected)
    done, waits = 40, 8  # compressed rows of the prompt, and those behind them
    oracle.count = lambda n: int(n * budget) if isinstance(budget, float) else min(n, budget)
    oracle.candidates = lambda rows: range(3, 3 + done) if codec == "delta" else range(3, rows - 8)
    oracle.looked.clear()
    for part in ids(sum(QUESTION), seed=1).split(QUESTION, dim=1):
        close(held.extend(part)[0], oracle.extend(part))
        waits += part.shape[1]
        if waits >= 16:
            step = (waits - 8) // 8 * 8
            done, waits = done + step, waits - step
    assert done == 56
    attended = np.array([layer.attended for layer in held.contexts[0].own_layers]).T.ravel()
    assert attended.tolist() == oracle.looked and min(oracle.looked) < 40
    assert held.evicted(0, 0) == 0 and decodes_in_graph(held.contexts[0].choice)


@pytest.mark.cover
@pytest.mark.parametrize("budget", [0.3, 9, 44])
@pytest.mark.parametrize("codec", ["raw", "delta"])
@pytest.mark.parametrize("full", [[0], [0, 1]])
def test_scores_are_smoothed_over_tokens(full, codec, budget):
    """Tokens one by one, a question between them, whose block scores nothing; 44 rows are all candidates at first."""
    oracle = Oracle("llama", full=full, smoothing=0.5)
    expected = oracle.prefill(ids(51), None)
    args = SELECTS | {"full_layers": full, "smoothing": 0.5}
    own = build_delta("llama", full_layers=full) if codec == "delta" else "raw"
    held = kvbench.prefill(make_double("llama"), ids(51), "deltakv", budget, codec=own, method_args=args)
    close(held.logits[0], expected)
    plain = kvbench.prefill(
        make_double("llama"), ids(51), "deltakv", budget, codec=own, method_args=args | {"smoothing": 0.0}
    )
    done, waits, differs = 40, 8, False
    oracle.count = lambda n: int(n * budget) if isinstance(budget, float) else min(n, budget)
    oracle.candidates = lambda rows: range(3, 3 + done) if codec == "delta" else range(3, rows - 8)
    for part in ids(sum(QUESTION), seed=1).split(QUESTION, dim=1):
        found = held.extend(part)[0]
        close(found, oracle.extend(part))
        differs |= not torch.equal(found, plain.extend(part)[0])
        waits += part.shape[1]
        if waits >= 16:
            step = (waits - 8) // 8 * 8
            done, waits = done + step, waits - step
    assert differs


def test_smoothed_scores_are_forgotten_with_a_branch_and_counted_as_state():
    args = SELECTS | {"smoothing": 0.5}
    held = kvbench.prefill(tiny("llama"), ids(51), "deltakv", 0.3, method_args=args)
    before, answers = held.bytes, []
    for _ in range(2):
        with held.branch():
            answers.append(torch.cat([held.extend(ids(1, seed=s)) for s in (1, 2, 3)], 1))
            assert held.bytes.state == before.state + 54 + 43 * 4  # the set that is handed on, and 43 scores
        assert held.bytes == before
    assert torch.equal(*answers)


def test_a_graph_does_not_read_smoothed_scores():
    method = build("method", load_settings("method", "deltakv", {"smoothing": 0.5}))
    assert method.captured.row_reader(method, None) is None


def test_reconstructed_rows_are_chosen_and_read():
    """With a compressor that loses much, the same rows are read as with none, but other numbers."""
    found = []
    for codec in (build_delta("llama"), build_delta("llama", "drawn")):
        held = kvbench.prefill(tiny("llama"), ids(51), "deltakv", 0.3, codec=codec, method_args=SELECTS)
        logits = held.extend(ids(1, seed=1))
        shared = held.contexts[0].own_layers[0].state.shared
        found.append((logits, shared["look"], [layer.attended for layer in held.contexts[0].own_layers]))
    assert torch.equal(found[0][1], found[1][1]) and found[0][2] == found[1][2] == [[52.0], [24.0], [24.0]]
    assert (found[0][0] - found[1][0]).abs().max() > 1e-2


def test_the_whole_budget_reads_all():
    for codec in ("raw", build_delta("llama", "drawn")):
        own = kvbench.prefill(tiny("llama"), ids(60), codec=codec).extend(ids(1, seed=1))
        for budget in (1.0, 60):
            held = kvbench.prefill(tiny("llama"), ids(60), "deltakv", budget, codec=codec, method_args=SELECTS)
            assert torch.equal(held.extend(ids(1, seed=1)), own)


def test_few_rows_leave_nothing_to_choose():
    """Of 11 rows none is a candidate, and a small ratio of some candidates may be none of them."""
    held = kvbench.prefill(tiny("llama"), ids(10), "deltakv", 0.3, method_args=SELECTS)
    held.extend(ids(1))
    assert [layer.attended for layer in held.contexts[0].own_layers] == [[11.0]] * 3
    held = kvbench.prefill(tiny("llama"), ids(12), "deltakv", 0.3, method_args=SELECTS)
    held.extend(ids(1))
    assert [layer.attended for layer in held.contexts[0].own_layers] == [[13.0], [11.0], [11.0]]


def test_a_branch_is_forgotten():
    held = kvbench.prefill(
        tiny("llama"), ids(51), "deltakv", 0.3, codec=build_delta("llama", "drawn"), method_args=SELECTS
    )
    before, answers = held.bytes, []
    for _ in range(2):
        with held.branch():
            answers.append(torch.cat([held.extend(ids(1, seed=s)) for s in (1, 2)], 1))
            assert held.bytes.state == before.state + 53  # the set that is handed on
        assert held.bytes == before
    assert torch.equal(*answers)


def test_observation_layers_with_a_sliding_window_choose_nothing():
    """Gemma 3 has rows in the layers 2 and 5. What layer 5 chose for a token is no choice for the next token."""
    for full, looks in (([0], False), ([2], True), ([0, 2], True), ([0, 5], False)):
        args = SELECTS | {"full_layers": full}
        held = kvbench.prefill(tiny("gemma3"), ids(80), "deltakv", 0.25, method_args=args)
        held.extend(ids(1))
        held.extend(ids(1, seed=1))
        attended = [layer.attended for layer in held.contexts[0].own_layers]
        assert attended == [[81.0, 82.0], [3 + 8 + 17.0, 3 + 8 + 17.0] if looks else [81.0, 82.0]]


def test_full_layers_scale_with_depth():
    paper = build("method", load_settings("method", "deltakv"))
    for layers, full in ((32, {0, 1, 2, 8, 18}), (28, {0, 1, 7, 15}), (6, {0, 1, 3})):
        assert paper.find_full_layers(layers) == full


def test_what_is_refused():
    with pytest.raises(SettingError, match="^allocator=ada: deltakv keeps every row"):
        kvbench.prefill(tiny("llama"), ids(60), "deltakv", 0.5, allocator="ada")
    for args, message in (
        (dict(full_layers=[]), r"method.full_layers=\[\]: layers from 0 on, in ascending order"),
        (dict(full_layers=[3, 1]), r"method.full_layers=\[3, 1\]: layers from 0 on"),
        (dict(full_layers=[3], depth=None), r"method.full_layers=\[3\]: the model has layers 0 to 2"),
        (dict(depth=18), "method.depth=18: a whole number of at least 19"),
        (dict(recent=0), "method.recent=0: a whole number of at least 1"),
        (dict(smoothing=1.0), r"method.smoothing=1.0: a share in \[0, 1\)"),
    ):
        with pytest.raises(SettingError, match=f"^{message}"):
            kvbench.prefill(tiny("llama"), ids(60), "deltakv", 0.5, method_args=args)

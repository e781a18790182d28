"""Quest against its formula: pages, bounds and choices in loops over the dense engine's rows, in float64."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

import kvbench
from kvbench.engine.sampling import Sampling
from kvbench.kernels.page_bounds import page_bounds, page_upper_bounds
from kvbench.validation import SettingError
from tests.support.branches import check_after_branches
from tests.support.dense_engine import DenseEngine
from tests.support.selection import choose_quick
from tests.support.tiny_models import ids, make_double, tiny

PAPER = dict(page=16, least=3, dense_layers=2, force_last=False)


def chosen_rows(query: np.ndarray, keys: np.ndarray, budget: int, page: int, least: int, force_last: bool) -> list[int]:
    """Rows that one query head looks at."""
    starts = range(0, len(keys), page)
    scores = []
    for start in starts:
        some = keys[start : start + page]
        scores.append(sum(max(q * min(column), q * max(column)) for q, column in zip(query, some.T, strict=True)))
    if force_last:
        scores[-1] = np.inf
    count = max(least, min(budget, len(keys)) // page)
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:count]
    return [row for index in order for row in range(starts[index], min(starts[index] + page, len(keys)))]


@dataclass
class Oracle(DenseEngine):
    """Looks at what Quest looks at, once `budget` is set."""

    budget: int | None = None
    args: dict = field(default_factory=dict)
    looked: list[float] = field(default_factory=list)

    def attention(self, module, query, key, value, mask, scaling, **kwargs):
        layer, args = module.layer_idx, {k: v for k, v in self.args.items() if k != "dense_layers"}
        sparse = self.budget is not None and query.shape[2] == 1 and layer >= self.args["dense_layers"]
        held = self.held.get(layer)
        outputs, _ = super().attention(module, query, key, value, mask, scaling, **kwargs)
        if not sparse:
            self.looked.append(self.seen + query.shape[2])
            return outputs, None
        counts = []
        for index in range(query.shape[1]):
            rows = self.held[layer][index // (query.shape[1] // len(held))]
            look = sorted(chosen_rows(query[0, index, 0].numpy(), rows.keys, self.budget, **args))
            counts.append(len(look))
            found = self.attend(query[0, index].numpy(), rows.take(look), np.array([self.seen]), scaling, None)
            outputs[0, :, index] = torch.from_numpy(found)
        self.looked.append(np.mean(counts))
        return outputs, None


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.cover
@pytest.mark.parametrize("model", choose_quick(["llama", "llama3", "yarn", "qwen3", "phi3", "mistral"], "llama"))
@pytest.mark.parametrize("block", [None, 21])
@pytest.mark.parametrize(
    "page, least, dense, budget, last", [(16, 3, 2, 70, False), (5, 1, 1, 11, True), (7, 2, 0, 9, 0)]
)
def test_quest(model, block, page, least, dense, budget, last):
    """Prefill dense, then token by token, which begin a page; rows attended per query head are those of the formula."""
    args = dict(page=page, least=least, dense_layers=min(dense, 1), force_last=bool(last))
    oracle = Oracle(model, args=args)
    expected = oracle.prefill(ids(126), block)
    held = kvbench.prefill(make_double(model), ids(126), "quest", budget, block, method_args=args)
    close(held.logits[0], expected)
    oracle.budget = budget
    oracle.looked.clear()
    for layer in held.contexts[0].own_layers:
        layer.attended.clear()
    for token in ids(5, seed=1).split(1, dim=1):
        close(held.extend(token)[0], oracle.extend(token))
    attended = [layer.attended for layer in held.contexts[0].own_layers]
    assert np.allclose(np.array(attended).T.ravel(), oracle.looked)
    assert held.resident_bytes == held.full_bytes and held.evicted(0, 0) == 0


def test_defaults_look_at_three_pages_at_least():
    """16 rows a page, the first two layers dense, a fraction of the prompt."""
    for budget, pages in ((2, 3), (0.1, 3), (0.4, 5), (80, 5), (95, 5)):
        held = kvbench.prefill(tiny("llama"), ids(200), "quest", budget)
        list(held.contexts[0].generate(3, Sampling(), frozenset()))
        attended = [layer.attended for layer in held.contexts[0].own_layers]
        assert attended[:2] == [[201.0, 202.0]] * 2
        assert all(pages * 16 - 15 < rows <= pages * 16 for rows in attended[2])


def test_a_budget_of_all_rows_looks_at_all():
    own = kvbench.prefill(tiny("llama"), ids(100)).extend(ids(1, seed=1))
    for budget in (1.0, 101, 500):
        held = kvbench.prefill(tiny("llama"), ids(100), "quest", budget, method_args=dict(dense_layers=0))
        assert torch.equal(held.extend(ids(1, seed=1)), own)
        assert held.contexts[0].layers[2].attended == [101.0]


def test_the_question_is_dense_or_token_by_token():
    """tokens: several give what they give one by one; dense: they give what the full cache gives."""
    question = ids(9, seed=1)

    def read(method: str, parts: list[int], **args) -> torch.Tensor:
        held = kvbench.prefill(tiny("llama"), ids(200), method, 48 if method == "quest" else 1.0, method_args=args)
        return torch.cat([held.extend(part) for part in question.split(parts, dim=1)], 1)

    full, tokens, dense = read("full", [9]), read("quest", [9]), read("quest", [9], preset="dense")
    assert torch.equal(dense, full)
    assert torch.equal(tokens, read("quest", [1] * 9)) and torch.equal(tokens, read("quest", [1] * 9, preset="dense"))
    assert (tokens - full).abs().max() > 1e-2


def test_presets_differ():
    """The newest page competes, or is always looked at."""
    found = {}
    for preset in ("paper", "dense", "cuda"):
        held = kvbench.prefill(tiny("llama"), ids(200), "quest", 48, method_args={"preset": preset, "dense_layers": 0})
        found[preset] = torch.cat([held.extend(token) for token in ids(9, seed=1).split(1, dim=1)], 1)
    assert torch.equal(found["paper"], found["dense"])  # differ for several known tokens only, as shown above
    assert (found["paper"] - found["cuda"]).abs().max() > 1e-2
    held = kvbench.prefill(tiny("llama"), ids(200), "quest", 20, method_args={"preset": "cuda", "dense_layers": 0})
    held.extend(ids(1))
    assert all(layer.attended == [9.0] for layer in held.contexts[0].own_layers)  # 201 rows: the last page has 9


@pytest.mark.parametrize("n, page, groups, dim", [(1, 16, 1, 3), (47, 16, 3, 5), (48, 16, 4, 8), (33, 7, 2, 1)])
def test_no_logit_of_a_page_exceeds_its_bound(n, page, groups, dim):
    draw = torch.Generator().manual_seed(n)
    for scale in (1, 100):
        keys = scale * torch.randn(2, 3, n, dim, generator=draw, dtype=torch.float64)
        queries = torch.randn(2, 3 * groups, dim, generator=draw, dtype=torch.float64)
        low, high = page_bounds(keys, page)
        above = page_upper_bounds(queries, low, high)
        assert above.shape == (2, 3 * groups, -(-n // page))
        logits = torch.einsum("bhgd,bhnd->bhgn", queries.view(2, 3, groups, dim), keys).flatten(1, 2)
        assert (logits <= above.repeat_interleave(page, -1)[..., :n] + 1e-9 * scale).all()
        exact = torch.maximum(
            queries[:, :, None] * low.repeat_interleave(groups, 1),
            queries[:, :, None] * high.repeat_interleave(groups, 1),
        ).sum(-1)
        torch.testing.assert_close(above, exact)


@pytest.mark.parametrize("block", [None, 21])
def test_bounds_are_kept_counted_and_forgotten(block):
    """Two vectors a page, 12.5 % of the keys; a branch leaves no trace; dense layers keep none."""
    held = kvbench.prefill(tiny("llama"), ids(118), "quest", 48, block)

    def check(rows: int) -> None:
        for layer in held.contexts[0].own_layers:
            keys = layer.rows.view().keys
            if layer.index < 2:
                assert layer.state.layer == {}
                continue
            low, high = page_bounds(keys, 16)
            assert torch.equal(layer.state.layer["low"], low) and torch.equal(layer.state.layer["high"], high)
        assert held.bytes.state == 2 * -(-rows // 16) * 2 * 32 * 4

    check_after_branches(held, check)


def test_quest_over_packed_rows():
    held = kvbench.prefill(tiny("llama"), ids(300), "quest", 64, codec="kivi")
    assert held.resident_bytes < 0.7 * held.full_bytes
    assert torch.isfinite(held.extend(ids(5))).all() and max(held.contexts[0].layers[2].attended) <= 64


def test_what_is_refused():
    with pytest.raises(SettingError, match="^allocator=ada: quest keeps every row, so there are none to share"):
        kvbench.prefill(tiny("llama"), ids(60), "quest", 0.5, allocator="ada")
    for args, message in (
        (dict(page=0), "method.page=0: a whole number"),
        (dict(question="some"), "method.question=some: choose one of dense, tokens"),
        (dict(force_last=3), "method.force_last=3: choose one of true, false"),
    ):
        with pytest.raises(SettingError, match=f"^{message}"):
            kvbench.prefill(tiny("llama"), ids(60), "quest", 0.5, method_args=args)

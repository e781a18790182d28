"""Attention Matching against its definition in loops and float64: what stays, its weights and its values."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.optimize
import torch

import kvbench
from kvbench.cache.refusals import find_refusal
from kvbench.cli import check_method
from kvbench.config.catalogue import build, load_settings
from kvbench.interfaces.codec import Packing
from kvbench.methods import attention_matching
from kvbench.methods.attention_matching import AttentionMatching, fit_bounded
from kvbench.runs import method_checks
from kvbench.validation import SettingError
from tests.support.dense_engine import DenseEngine, Head, HeadView
from tests.support.method_files import build_policy
from tests.support.oracles import find_top
from tests.support.selection import choose_quick
from tests.support.tiny_models import distinct, ids, make_double, tiny

FIRST, LATER, CHUNK = [5, 6, 7], [9, 8], 23
READS = {"first": FIRST, "later": LATER, "postfix": 4, "chunk": CHUNK}


def find_weights(powers: np.ndarray, target: np.ndarray, lowest: float, highest: float | None) -> np.ndarray:
    """argmin ‖powers·w - target‖ within the bounds, by scipy's active sets."""
    if highest is None:
        return lowest + scipy.optimize.nnls(powers, target - powers @ np.full(powers.shape[1], lowest))[0]
    found = scipy.optimize.lsq_linear(powers, target, (lowest, highest), method="bvls", tol=1e-14)
    return found.x


def fit_head(queries: np.ndarray, rows: Head, scaling: float, safe: int, quota: int, args: dict) -> Head:
    """What one KV head holds of `rows`; `queries` (N, d)."""
    free = rows.places >= safe
    logits = np.array([[key @ query * scaling for key in rows.keys[free]] for query in queries])
    logits += np.log(rows.mass[free])
    powers = np.exp(logits - logits.max(1, keepdims=True))
    p = powers / powers.sum(1, keepdims=True)
    score = np.zeros(len(rows.places))
    score[free] = p.max(0) if args["rank"] == "max" else np.sqrt((p**2).mean(0))
    score[~free] = np.inf
    index = find_top(score, quota)
    kept = rows.take(index)
    own = np.flatnonzero(kept.places >= safe)  # of the rows that stay
    chosen = [list(rows.places[free]).index(place) for place in kept.places[own]]
    bare = powers[:, chosen] / rows.mass[free][chosen]
    weights = find_weights(bare, powers.sum(1), args["lowest"], args["highest"])
    inside = logits[:, chosen] - np.log(rows.mass[free][chosen]) + np.log(weights)
    shares = np.exp(inside - inside.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    values = kept.values[own]
    size = np.sqrt(args["ridge"] * (shares**2).sum())
    stacked = np.concatenate([shares, size * np.eye(len(own))])
    wanted = np.concatenate([p @ rows.values[free] - shares @ values, np.zeros_like(values)])
    kept.mass[own] = weights
    kept.values[own] = values + np.linalg.lstsq(stacked, wanted, rcond=None)[0]
    return kept


def settings(**own: object) -> dict:
    return {"rank": "max", "lowest": 1e-12, "highest": None, "ridge": 1e-6} | own


def read_and_fit(model: str, prompt: torch.Tensor, quota: int, prefix: int, args: dict) -> DenseEngine:
    """An engine that has read the prompt, repeated it, and fitted its rows to the queries of these reads."""
    dense, queries, scalings = DenseEngine(model), {}, {}
    dense.prefill(prompt, None)
    before, tokens = (dense.held, dense.seen), prompt[0].tolist()

    def note(glances: list[HeadView]) -> list[Head]:
        for glance in glances:
            queries.setdefault((glance.layer, glance.head), []).append(glance.queries)
            scalings[glance.layer] = glance.scaling
        return [glance.rows for glance in glances]

    for start in range(prefix, len(tokens), CHUNK):
        asked = FIRST if start == prefix else LATER + tokens[max(prefix, start - 4) : start]
        dense.held, dense.seen = dict(before[0]), before[1]
        dense.cut, dense.cutting = note, True
        dense.read(torch.tensor([asked + tokens[start : start + CHUNK]]))
    dense.held, dense.seen, dense.cut = dict(before[0]), before[1], None
    for (layer, head), own in queries.items():
        heads = list(dense.held[layer])
        stacked = np.concatenate(own, 1).reshape(-1, own[0].shape[2])
        heads[head] = fit_head(stacked, heads[head], scalings[layer], prefix, quota, args)
        dense.held[layer] = heads
    return dense


def fit_blocks(model: str, quota: int, args: dict) -> DenseEngine:
    """An engine that fits its rows to all queries of the prompt after every block."""
    before: dict[tuple[int, int], list[np.ndarray]] = {}

    def cut(glances: list[HeadView]) -> list[Head]:
        found = []
        for glance in glances:
            own = before.setdefault((glance.layer, glance.head), [])
            own.append(glance.queries)
            stacked = np.concatenate(own, 1).reshape(-1, glance.queries.shape[2])
            fits = len(glance.rows.places) <= quota
            found.append(glance.rows if fits else fit_head(stacked, glance.rows, glance.scaling, 0, quota, args))
        return found

    return DenseEngine(model, cut)


def compare(held, dense: DenseEngine, tolerance: float = 1e-5) -> float:
    """The same rows; the largest difference of weights and values, in units of the largest value."""
    worst = 0.0
    for layer in set(dense.held) - set(held.sliding_layers):
        rows = held.contexts[0].layers[layer].rows.view()
        for head, own in enumerate(dense.held[layer]):
            assert held.places(layer, head).tolist() == own.places.tolist(), (layer, head)
            there = rows.present[0, head]
            for found, expected in ((rows.mass, own.mass), (rows.values, own.values)):
                difference = np.abs(found[0, head][there].double().numpy() - expected).max() / np.abs(expected).max()
                assert difference < tolerance, (layer, head, difference)
                worst = max(worst, difference)
    return worst


@pytest.mark.cover
@pytest.mark.parametrize("prefix", [0, 3])
@pytest.mark.parametrize("own", [{}, {"rank": "rms", "lowest": 0.05, "highest": 3.0}, {"ridge": 0.01}])
@pytest.mark.parametrize("model", choose_quick(["llama", "qwen3", "gemma3", "phi3"], "llama"))
def test_rows_weights_and_values_are_those_of_the_definition(model, own, prefix):
    """In float64, of every head, with the queries of the repeated prompt; and the answers that follow."""
    prompt, more = distinct(67).split([60, 7], dim=1)
    args = settings(**own)
    dense = read_and_fit(model, prompt, 13, prefix, args)
    held = kvbench.prefill(
        make_double(model), prompt, "attention_matching", 13, method_args=READS | args, prefix=prefix
    )
    compare(held, dense)
    for part in more.split([1, 6], dim=1):
        torch.testing.assert_close(held.extend(part)[0], dense.extend(part), rtol=1e-5, atol=1e-5)
    last = next(layer for layer in reversed(range(len(dense.held))) if layer not in held.sliding_layers)
    assert held.masses(last, 0)[-7:].tolist() == [1] * 7 and len(held.places(last, 0)) == 20


@pytest.mark.cover
@pytest.mark.parametrize("block", choose_quick([None, 1, 7, 128], None, 7))
@pytest.mark.parametrize("model", choose_quick(["llama", "qwen3"], "llama"))
def test_context_queries_in_blocks(model, block):
    """Every block is followed by a fit of the rows that are held, which weigh what earlier fits gave them."""
    prompt, more = distinct(37).split([30, 7], dim=1)
    args = settings(ridge=1e-3)
    dense = fit_blocks(model, 13, args)
    dense.prefill(prompt, block)
    held = kvbench.prefill(
        make_double(model), prompt, "attention_matching", 13, block, method_args=args | {"preset": "context"}
    )
    compare(held, dense, 1e-4)
    torch.testing.assert_close(held.extend(more)[0], dense.extend(more), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("preset, block", [("repeat", None), ("context", None), ("context", 7)])
def test_a_full_budget_gives_the_full_cache(preset, block):
    model, more = make_double("llama"), ids(9)
    held, full = (
        kvbench.prefill(model, distinct(60), name, 1.0, block, method_args=args)
        for name, args in (("attention_matching", READS | {"preset": preset}), ("full", {}))
    )
    torch.testing.assert_close(held.extend(more), full.extend(more), rtol=1e-9, atol=1e-9)


def make_head(seed: int, size: tuple[int, int, int, int]) -> list[torch.Tensor]:
    """Queries, keys and values of one head, and the t rows of most attention; `size` is (N, n, t, d)."""
    draw = torch.Generator().manual_seed(seed)
    count, rows, kept, dim = size
    queries = 2 * torch.randn(1, count, dim, generator=draw, dtype=torch.float64)
    keys, values = torch.randn(2, 1, rows, dim, generator=draw, dtype=torch.float64)
    p = (queries @ keys.mT * dim**-0.5).softmax(-1)
    return [queries, keys, values, p.amax(1).topk(kept).indices.sort().values]


def fit(queries, keys, values, index, **own) -> tuple[torch.Tensor, torch.Tensor]:
    method = build("method", load_settings("method", "attention_matching", READS | own))
    mass, there = torch.ones(keys.shape[:2], dtype=torch.float64), torch.ones_like(index, dtype=torch.bool)
    return method.fit(keys.shape[2] ** -0.5, queries, keys, values, mass, index, there)


@pytest.mark.parametrize("size", [(60, 30, 6, 8), (5, 30, 12, 4), (40, 12, 12, 3), (200, 50, 20, 16)])
def test_the_fit_is_never_worse_than_evicting_the_other_rows(size):
    """Evicting: the same keys with the same weights and their own values. That holds by construction."""
    for seed in range(12):
        queries, keys, values, index = make_head(seed, size)
        weights, fitted = fit(queries, keys, values, index)
        logits = queries @ keys.mT * keys.shape[2] ** -0.5
        wanted = logits.softmax(-1) @ values
        shares = (logits[..., index[0]] + weights[..., 0].log()[:, None]).softmax(-1)
        error, evicted = ((shares @ own - wanted).norm() for own in (fitted, values[:, index[0]]))
        assert error <= evicted * (1 + 1e-12) + 1e-12
        if size[2] < size[1]:
            assert error < 0.9 * evicted


@pytest.mark.parametrize("copies", [2, 5])
def test_equal_keys_are_merged_without_error(copies):
    """Of each key one row stays, which weighs as many tokens and has the mean of their values."""
    queries, keys, values, _ = make_head(0, (60, 6, 6, 8))
    repeated = keys.repeat(1, copies, 1)
    others = torch.randn(1, 6 * copies, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weights, fitted = fit(queries, repeated, others, torch.arange(6)[None], ridge=1e-10)
    torch.testing.assert_close(weights[0, :, 0], torch.full((6,), float(copies), dtype=torch.float64))
    torch.testing.assert_close(fitted[0], others.view(copies, 6, 8).mean(0), rtol=1e-6, atol=1e-6)
    again = torch.randn(1, 40, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))  # other queries
    full = (again @ repeated.mT * 8**-0.5).softmax(-1) @ others
    small = (again @ keys.mT * 8**-0.5 + weights[..., 0].log()[:, None]).softmax(-1) @ fitted
    torch.testing.assert_close(small, full, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("lowest, highest", [(1e-12, None), (0.05, 20.0), (0.9, 1.1)])
@pytest.mark.parametrize("count, size", [(40, 8), (9, 9), (300, 40)])
def test_weights_are_scipys(count, size, lowest, highest):
    """Together they are what each problem gives alone; the objective to 1e-9, weights to 1e-5."""
    draw = torch.Generator().manual_seed(count)
    logits = torch.randn(4, count, 5, generator=draw) @ torch.randn(4, 5, 2 * size, generator=draw)
    powers = (logits - logits.amax(-1, keepdim=True)).double().exp()
    target, chosen = powers.sum(-1), powers[..., :size]
    low = torch.full((4, size), lowest, dtype=torch.float64)
    high = torch.full_like(low, torch.inf if highest is None else highest)
    given = [chosen.mT @ chosen, (chosen.mT @ target[..., None])[..., 0], low, high]
    found = fit_bounded(*given)
    assert ((low <= found) & (found <= high)).all()
    for number in range(4):
        alone = fit_bounded(*(own[number : number + 1] for own in given))[0]
        torch.testing.assert_close(found[number], alone, rtol=1e-9, atol=1e-12)
        expected = find_weights(chosen[number].numpy(), target[number].numpy(), lowest, highest)
        its, wanted = chosen[number].numpy(), target[number].numpy()
        errors = [np.linalg.norm(its @ own - wanted) for own in (alone.numpy(), expected)]
        assert errors[0] <= errors[1] * (1 + 1e-9) + 1e-7 * np.linalg.norm(wanted)


def test_what_no_query_looks_at_keeps_its_weight_and_value():
    queries, keys, values, _ = make_head(0, (20, 8, 8, 4))
    keys[0, 3] = -1e6 * queries[0].mean(0)
    near = queries[:, (queries[0] @ keys[0, 3]) < -1e4]
    weights, fitted = fit(near, keys, values, torch.arange(8)[None])
    assert weights[0, 3, 0] == 1 and torch.equal(fitted[0, 3], values[0, 3])


def test_queries_are_a_random_part_of_whole_tokens(monkeypatch):
    seen = {}

    def note(self, observation, rows, state):
        seen[observation.layer] = state.layer["queries"].shape
        return rows.mass

    monkeypatch.setattr(AttentionMatching, "score", note)
    for count, room in ((10, 3), (1, 1), (1000, 60)):  # three query heads a KV head
        args = {"preset": "context", "queries": count}
        held = kvbench.prefill(tiny("llama"), distinct(60), "attention_matching", 13, method_args=args)
        assert {own[2] for own in seen.values()} == {room}
        assert held.bytes.state == 0  # forgotten after the cut
    monkeypatch.undo()

    def places(seed: int, block: int | None = None) -> list:
        args = {"preset": "context", "queries": 8}
        held = kvbench.prefill(
            tiny("llama"), distinct(60), "attention_matching", 13, block, method_args=args, seed=seed
        )
        return [held.places(layer, head).tolist() for layer in range(3) for head in range(2)]

    assert places(1) == places(1) != places(2)


def test_logits_in_chunks(monkeypatch):
    def read() -> torch.Tensor:
        held = kvbench.prefill(
            make_double("llama"), distinct(60), "attention_matching", 13, None, "ada", method_args=READS
        )
        return held.extend(ids(5))

    expected = read()
    monkeypatch.setattr(attention_matching, "LOGITS", 300)
    monkeypatch.setattr(attention_matching, "SCRATCH", 1)
    torch.testing.assert_close(read(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("allocator", ["ada", "pyramid"])
@pytest.mark.parametrize("preset, block", [("repeat", None), ("context", 20)])
def test_heads_of_different_sizes(allocator, preset, block):
    args = READS | {"preset": preset}
    held = kvbench.prefill(tiny("llama"), distinct(60), "attention_matching", 13, block, allocator, method_args=args)
    counts = [len(held.places(layer, head)) for layer in range(3) for head in range(2)]
    assert sum(counts) == 6 * 13 and len(set(counts)) > 1
    assert torch.isfinite(held.extend(ids(9))).all()


def test_weights_take_four_bytes_a_row_and_survive_kivi():
    args = READS | {"chunk": 50}
    held = kvbench.prefill(tiny("wide"), ids(300), "attention_matching", 75, method_args=args)
    plain = kvbench.prefill(tiny("wide"), ids(300), "knorm", 75)
    assert held.bytes.metadata - plain.bytes.metadata == 4 * 4 * 75 and held.resident_bytes == plain.resident_bytes
    packed = kvbench.prefill(
        tiny("wide"), ids(300), "attention_matching", 75, codec="kivi", codec_args={"residual": 32}, method_args=args
    )
    assert torch.equal(packed.masses(0, 0), held.masses(0, 0))
    assert torch.isfinite(packed.extend(ids(5))).all()


@pytest.mark.full
def test_context_keeps_the_laws(checkpoint, monkeypatch, capsys):
    for name, own in (("TOKENS", 40), ("BUDGETS", (0.5, 9)), ("BLOCKS", (None, 15))):
        monkeypatch.setattr(method_checks, name, own)
    command = ["attention_matching", "preset=context", "--model", str(checkpoint)]
    assert check_method.main(command) == 0, capsys.readouterr().out


@pytest.mark.parametrize("preset", ["repeat", "context"])
def test_a_cut_while_decoding_and_unrotated_keys_are_refused(preset):
    method = build("method", load_settings("method", "attention_matching", READS | {"preset": preset}))
    _, uniform, raw = build_policy("full", "uniform", "llama")
    assert find_refusal(method, uniform, raw) is None
    assert "attention_matching has queries of the prompt only" in find_refusal(
        replace(method, decoding=True), uniform, raw
    )

    class Unrotated(type(raw)):
        packing = Packing(takes_unrotated_keys=True)

    assert "stores keys before rotation" in find_refusal(method, uniform, Unrotated("raw"))


def test_presets_are_the_sources_own():
    text = {
        name: load_settings("method", "attention_matching", {"preset": name})
        for name in ("repeat", "context", "official")
    }
    names = ("reference", "rank", "highest", "queries")
    assert [[own[name] for name in names] for own in text.values()] == [
        ["repeat", "max", None, 10000], ["context", "max", None, 10000],
        ["repeat", "rms", pytest.approx(np.exp(3)), 10000],
    ]  # fmt: skip
    assert [own["lowest"] for own in text.values()] == [1e-12, 1e-12, pytest.approx(np.exp(-3), rel=1e-4)]


@pytest.mark.parametrize(
    "where, line",
    [
        ({"block_size": 8}, "^block_size=8: attention_matching needs the prompt as one block"),
        ({"allocator": "cake"}, "^allocator=cake: attention_matching has fitted rows"),
        ({"method_args": {"reference": "study"}}, "^method.reference=study: choose one of repeat, context"),
        ({"method_args": {"queries": 0}}, "^method.queries=0: a whole number of at least 1"),
        ({"method_args": {"rank": "mean"}}, "^method.rank=mean: choose one of max, rms"),
        ({"method_args": {"lowest": 0}}, "^method.lowest=0: a number above 0"),
        ({"method_args": {"lowest": 2.0, "highest": 1.0}}, "^method.highest=1.0: at least method.lowest=2.0, or null"),
        ({"method_args": {"ridge": 0}}, "^method.ridge=0: a number of at least 1e-10"),
        ({"method_args": {"first": [-1]}}, r"^method.first=\[-1\]: a text, or a list of token ids"),
    ],
)
def test_what_is_refused(where, line):
    with pytest.raises(SettingError, match=line):
        kvbench.prefill(tiny("llama"), ids(20), "attention_matching", 5, **where)

"""PQCache against its definition: k-means, codes and choices in loops over the dense engine's rows, in float64."""

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pytest
import torch

import kvbench
from kvbench.cache.policy import choose_cache
from kvbench.config.catalogue import build, load_settings
from kvbench.engine.generation import GenerationContext
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.observation import ReadRequest, State
from kvbench.interfaces.row_reader import CapturedAnswer
from kvbench.kernels.product_quantization import encode, find_centroids
from kvbench.kernels.product_quantization.reference import add_members, multiply_members
from kvbench.methods.pqcache import choose_first, find_different
from kvbench.validation import SettingError
from tests.support.answer_paths import assert_same, make_contexts
from tests.support.branches import check_after_branches
from tests.support.dense_engine import DenseEngine
from tests.support.method_files import build_policy
from tests.support.selection import choose_quick, only_in_full
from tests.support.tiny_models import ids, make_double, tiny

SMALL = dict(sinks=5, ratio=0.4, parts=4, bits=3, iterations=6, least=20)
CLOSE = 1e-9


def nearest(point: np.ndarray, centroids: list[np.ndarray]) -> int:
    return int(np.argmin((np.subtract(centroids, point) ** 2).sum(1)))


def lloyd(points: np.ndarray, first: list[np.ndarray], iterations: int) -> list[np.ndarray]:
    """Centroids of points (n, e)."""
    centroids = [*first]
    for _ in range(iterations):
        codes = [nearest(point, centroids) for point in points]
        distances = [((point - centroids[code]) ** 2).sum() for point, code in zip(points, codes, strict=True)]
        farthest = sorted(range(len(points)), key=lambda row: -distances[row])
        for index in range(len(centroids)):
            own = [point for point, code in zip(points, codes, strict=True) if code == index]
            centroids[index] = np.mean(own, 0) if own else points[farthest.pop(0)]
    return centroids


@dataclass
class Oracle(DenseEngine):
    """Attends to what PQCache attends to, once `counts` are set."""

    counts: tuple[int, int] | None = None
    """Numbers of recent and of chosen rows."""
    args: dict = field(default_factory=dict)
    prompt: int = 0
    books: dict = field(default_factory=dict)
    """(layer, KV head, part) -> centroids."""
    looked: list[int] = field(default_factory=list)

    def choose(self, layer: int, head: int, queries: np.ndarray, scaling: float) -> list[int]:
        """The rows that the query heads (G, d) of a KV head attend to."""
        keys, (recent, chosen), sinks = self.held[layer][head].keys, self.counts, self.args["sinks"]
        size = keys.shape[1] // self.args["parts"]
        candidates = range(sinks, len(keys) - 1 - recent)
        logits = np.zeros((len(queries), len(candidates)))
        for part in range(self.args["parts"]):
            own = slice(part * size, (part + 1) * size)
            if (layer, head, part) not in self.books:
                points = keys[sinks : self.prompt, own]
                order = torch.randperm(len(points), generator=torch.Generator().manual_seed(0)).tolist()
                self.books[layer, head, part] = lloyd(
                    points, [points[row] for row in order[: 2 ** self.args["bits"]]], self.args["iterations"]
                )
            book = self.books[layer, head, part]
            for column, row in enumerate(candidates):
                logits[:, column] += queries[:, own] @ book[nearest(keys[row, own], book)] * scaling
        weights = np.exp(logits - logits.max(1, keepdims=True))
        scores = (weights / weights.sum(1, keepdims=True)).sum(0)
        best = sorted(candidates, key=lambda row: (-scores[row - sinks], row))[:chosen]
        return sorted([*range(sinks), *best, *range(len(keys) - 1 - recent, len(keys))])

    def attention(self, module, query, key, value, mask, scaling, **kwargs):
        layer = module.layer_idx
        outputs, _ = super().attention(module, query, key, value, mask, scaling, **kwargs)
        if query.shape[2] > 1 or self.counts is None:
            self.looked.append(self.seen + query.shape[2])
            return outputs, None
        group = query.shape[1] // len(self.held[layer])
        for head, rows in enumerate(self.held[layer]):
            own = slice(head * group, (head + 1) * group)
            look = self.choose(layer, head, query[0, own, 0].numpy(), scaling)
            for index in range(*own.indices(query.shape[1])):
                found = self.attend(query[0, index].numpy(), rows.take(look), np.array([self.seen]), scaling, None)
                outputs[0, :, index] = torch.from_numpy(found)
        self.looked.append(len(look))
        return outputs, None


PARTS = [1, 1, 14, *[1] * 5]  # rows of the answer leave the recent ones, and are chosen among from then on


@pytest.mark.cover
@pytest.mark.parametrize("model", choose_quick(["llama", "qwen3", "phi3", "yarn"], "llama"))
@pytest.mark.parametrize("block", choose_quick([None, 1, 7, 21, 128], None, 21))
@pytest.mark.parametrize(
    "budget, counts, more",
    [
        (0.3, (13, 20), {}), only_in_full(31, (12, 18), {}), (0.2, (22, 0), {"ratio": 1.0}),
        (0.2, (0, 23), {"ratio": 0.0, "sinks": 0}),
    ],
)  # fmt: skip
def test_pqcache(model, block, budget, counts, more):
    """Prefill dense, then token by token, with a question between that is read as a block."""
    oracle = Oracle(model, args=SMALL | more, prompt=118)
    expected = oracle.prefill(ids(118), block)
    held = kvbench.prefill(make_double(model), ids(118), "pqcache", budget, block, method_args=SMALL | more)
    torch.testing.assert_close(held.logits[0], expected, rtol=0, atol=CLOSE)
    oracle.counts = counts
    oracle.looked.clear()
    for part in ids(sum(PARTS), seed=1).split(PARTS, dim=1):
        torch.testing.assert_close(held.extend(part)[0], oracle.extend(part), rtol=0, atol=CLOSE)
    attended = [layer.attended for layer in held.contexts[0].own_layers]
    assert np.array(attended).T.ravel().tolist() == oracle.looked
    for (number, head, part), book in oracle.books.items():  # logits hide small differences: norms round to float32
        found = held.contexts[0].own_layers[number].state.layer["codebook"][0, head, part]
        np.testing.assert_allclose(found, book, rtol=0, atol=1e-12)
    assert held.resident_bytes == held.full_bytes and held.evicted(0, 0) == 0


def make_method(**more):
    return build("method", load_settings("method", "pqcache", SMALL | more))


def list_exact(queries: torch.Tensor, keys: torch.Tensor, sinks: int, counts: tuple[int, int]) -> list[list[set[int]]]:
    """The rows that exact logits choose, for each sample and KV head; `keys` end with the token's own."""
    recent, chosen = counts
    stop = keys.shape[2] - 1 - recent
    group = queries.shape[1] // keys.shape[1]
    logits = queries.unflatten(1, (-1, group))[..., 0, :] @ keys[:, :, sinks:stop].mT / keys.shape[3] ** 0.5
    scores = logits.softmax(-1).sum(2)
    best = scores.argsort(dim=-1, descending=True, stable=True)[..., :chosen] + sinks
    always = {*range(sinks), *range(stop, keys.shape[2])}
    return [[always | {*own.tolist()} for own in sample] for sample in best]


def list_rows(method, queries: torch.Tensor, keys: torch.Tensor, book: torch.Tensor, counts: tuple[int, int]) -> list:
    """The rows that the codes of `keys` choose for the token behind them, for each sample and KV head."""
    own, last = {"codes": encode(keys, book), "codebook": book}, torch.tensor(keys.shape[2])
    listed = method.list_rows(queries, own, keys.shape[3] ** -0.5, counts, last)
    return [[{*head.tolist()} for head in sample] for sample in listed]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("distinct, rows", [(8, 90), (5, 90), (1, 40), (8, 8), (3, 200)])
def test_few_different_sub_vectors_are_chosen_exactly(distinct, rows, dtype):
    """Each has a centroid of its own, so the choice is that of exact logits. Whole numbers: bfloat16 is exact too."""
    draws = torch.Generator().manual_seed(rows + distinct)
    values = torch.randint(-8, 9, (2, 3, 4, distinct, 6), generator=draws).to(dtype)
    index = torch.randint(distinct, (2, 3, 4, rows), generator=draws)
    keys = values.gather(3, index[..., None].expand(-1, -1, -1, -1, 6)).transpose(2, 3).flatten(3)
    queries = torch.randint(-8, 9, (2, 6, 1, 24), generator=draws).to(dtype) / 4
    method = make_method(sinks=0, iterations=25)
    book = method.cluster(keys, (3, 4))
    codes = encode(keys, book)
    read = book.gather(3, codes.long()[..., None].expand(-1, -1, -1, -1, 6)).transpose(2, 3).flatten(3)
    assert torch.equal(read, keys) and book.shape[3] == min(8, rows) and codes.dtype == torch.uint8
    own = torch.cat([keys, keys[:, :, :1]], 2)
    counts = min(7, rows - 4), 4
    assert list_rows(method, queries, keys, book, counts) == list_exact(queries.double(), own.double(), 0, counts)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_few_different_sub_vectors_of_any_numbers_are_chosen_exactly(dtype):
    """Every row is another combination of 8 sub-vectors in each part, so that no two rows have equal scores."""
    draws = torch.Generator().manual_seed(1)
    values = torch.randn(2, 3, 4, 8, 6, generator=draws, dtype=dtype)
    index = torch.randperm(8**4, generator=draws)[:300, None] // 8 ** torch.arange(4) % 8
    keys = torch.cat([values[:, :, part, index[:, part]] for part in range(4)], -1)
    queries = torch.randn(2, 6, 1, 24, generator=draws, dtype=dtype)
    method = make_method(sinks=0, iterations=25)
    book = method.cluster(keys, (3, 4))
    assert (book.sort(3).values - values.sort(3).values).abs().max() < (1e-14 if dtype == torch.float64 else 1e-5)
    exact = list_exact(queries.double(), torch.cat([keys, keys[:, :, :1]], 2).double(), 0, (20, 30))
    assert list_rows(method, queries, keys, book, (20, 30)) == exact


def test_a_centroid_for_each_row_attends_to_the_best_rows():
    """Up to 2^b rows behind the sinks: what the model's own keys choose exactly is what is attended to."""
    args = SMALL | dict(bits=8, iterations=2)
    held = kvbench.prefill(make_double("llama"), ids(118), "pqcache", 0.3, method_args=args)
    layer = held.contexts[0].own_layers[0]
    own, attend = [], layer.run_attention

    def note(queries, scaling, look, *more):
        own.append((queries, look))
        return attend(queries, scaling, look, *more)

    layer.run_attention = note
    held.extend(ids(1, seed=1))
    queries, look = own[0]
    expected = list_exact(queries, layer.rows.view().keys, 5, (13, 20))
    assert [{*head.nonzero()[:, 0].tolist()} for head in look[0, ::3]] == expected[0]
    assert torch.equal(look[0], look[0, ::3].repeat_interleave(3, 0))
    assert layer.state.layer["codebook"].shape == (1, 2, 4, 113, 8)


def test_centroids_without_rows_move_to_the_farthest_rows():
    """Of the first centroids one is near the points, and the others are nobody's nearest."""
    points = torch.randn(3, 50, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first = torch.tensor([0.0, 90.0, 80.0, 70.0, 60.0, 50.0], dtype=torch.float64)[:, None].expand(3, 6, 4)
    for iterations in (0, 1, 2, 9):
        found = find_centroids(points[None], first[None, :, None], iterations)[0, :, 0]
        for own, start, centroids in zip(points.numpy(), first.numpy(), found, strict=True):
            np.testing.assert_allclose(centroids, lloyd(own, [*start], iterations), rtol=0, atol=1e-12)


def test_the_first_centroids_are_different_points():
    points = torch.tensor([[3.0, 1.0], [0.0, 2.0], [3.0, 1.0], [-0.0, 2.0], [1.0, 3.0], [5.0, 5.0]])
    for own in (points, points.double(), points.bfloat16()):
        assert find_different(own, 4).tolist() == [0, 1, 4, 5]
        assert find_different(own, 6).tolist() == [0, 1, 4, 5, 2, 3]


def test_the_first_centroids_are_chosen_among_some_rows(monkeypatch):
    points = torch.arange(300.0).view(1, 300, 1).expand(2, 300, 3) // 2
    order = torch.randperm(300, generator=torch.Generator().manual_seed(7))
    for rows in (4096, 100):
        monkeypatch.setattr("kvbench.methods.pqcache.LOOK", rows)
        numbers = dict.fromkeys((order[:rows] // 2).tolist())  # each once, in the order that the seed draws
        for found in choose_first(points, 7, 60):
            assert (found // 2).tolist() == [*numbers][:60]


def test_pieces_of_the_points_give_the_same_centroids(monkeypatch):
    points = torch.randn(3, 50, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given = points[None], points[None, :, None, :6], 5
    whole = find_centroids(*given)
    codes = torch.randint(6, (3, 50), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    added = add_members(points, codes, 6)
    monkeypatch.setattr("kvbench.kernels.product_quantization.centroids.DISTANCES", 3 * 6 * 7)
    torch.testing.assert_close(find_centroids(*given), whole, rtol=0, atol=1e-12)
    for found, expected in zip(multiply_members(points, codes, 6), added, strict=True):
        torch.testing.assert_close(found, expected.to(found.dtype), rtol=0, atol=1e-12)


@pytest.mark.parametrize("block", [None, 7])
def test_codes_depend_on_the_sample_and_its_seed_only(block):
    """Alone, in a batch, in another order: the same centroids and codes. Another seed gives others."""
    choice = choose_cache(*build_policy("pqcache", "uniform", "llama", **SMALL))
    texts = [ids(118, seed=1), ids(118, seed=2)]

    def read(samples: tuple[int, ...], seeds: tuple[int, ...]) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        context = GenerationContext(make_double("llama"), choice, Budget(0.3), block, seeds)
        context.prefill(torch.cat([texts[index] for index in samples]))
        states = [layer.state.layer for layer in context.own_layers]
        return [[(own["codebook"][i], own["codes"][i]) for own in states] for i in range(len(samples))]

    both, swapped = read((0, 1), (5, 6)), read((1, 0), (6, 5))
    for mine, other in ((both[0], swapped[1]), (both[1], swapped[0]), (both[0], read((0,), (5,))[0])):
        for (book, codes), (other_book, other_codes) in zip(mine, other, strict=True):
            torch.testing.assert_close(book, other_book, rtol=0, atol=1e-12)
            assert torch.equal(codes, other_codes)
    assert not any(torch.allclose(one[0], two[0]) for one, two in zip(both[0], read((0,), (6,))[0], strict=True))


def test_codes_are_kept_counted_and_forgotten():
    """A byte for each row and sub-vector, and the centroids; a branch leaves no trace."""
    held = kvbench.prefill(tiny("llama"), ids(118), "pqcache", 0.3, method_args=SMALL)

    def check(rows: int) -> None:
        for layer in held.contexts[0].own_layers:
            own = layer.state.layer
            assert torch.equal(own["codes"], encode(layer.rows.view().keys[:, :, 5:], own["codebook"]))
        assert held.bytes.state == 3 * 2 * ((rows - 5) * 4 + 8 * 32 * 4)

    check_after_branches(held, check)


def test_all_rows_are_attended_to_where_the_source_does_so_or_the_budget_has_them():
    """2^bits rows behind the 32 sinks are not clustered, one more is. A block of several tokens is dense."""
    for tokens, budget, args, looked in (
        (96, 0.3, {}, None), (97, 0.3, {}, 32 + 9 + 9 + 1), (20, 0.3, {}, None), (118, 1.0, SMALL, None),
        (48, 0.3, {"bits": 4}, None), (49, 0.3, {"bits": 4}, 32 + 2 + 2 + 1),
        (288, 0.3, {"preset": "infinitebench"}, None), (289, 0.3, {"preset": "infinitebench"}, 32 + 15 + 61 + 1),
        (118, 113, SMALL, None), (118, 500, SMALL, None), (118, 112, SMALL, 5 + 44 + 67 + 1),
    ):  # fmt: skip
        own = kvbench.prefill(tiny("llama"), ids(tokens))
        held = kvbench.prefill(tiny("llama"), ids(tokens), "pqcache", budget, method_args=args)
        question = ids(9, seed=1)
        assert torch.equal(held.extend(question), own.extend(question))
        same = torch.equal(held.extend(ids(1, seed=2)), own.extend(ids(1, seed=2)))
        for layer in held.contexts[0].own_layers:
            assert layer.attended == [tokens + 9.0, tokens + 10.0 if looked is None else looked]
        assert same == (looked is None) and (held.bytes.state > 0) == (tokens in (49, 97, 289) or args == SMALL)


@pytest.mark.parametrize("of", ["prompt", "seen"])
def test_the_numbers_of_rows_stay_for_the_whole_answer(of):
    choice = choose_cache(*build_policy("pqcache", "uniform", "llama", **SMALL))
    context = GenerationContext(tiny("llama"), choice, Budget(0.3, of), None, (0,))
    context.prefill(ids(118))
    list(context.generate(12, Sampling(), frozenset()))
    assert [{*layer.attended} for layer in context.own_layers] == [{5 + 13 + 20 + 1.0}] * 3


def test_presets_differ():
    found = []
    for preset, looked in (("paper", 32 + 13 + 13 + 1), ("infinitebench", 32 + 5 + 21 + 1)):
        held = kvbench.prefill(tiny("llama"), ids(300), "pqcache", 0.1, method_args={"preset": preset})
        found.append(held.extend(ids(1, seed=1)))
        assert [layer.attended for layer in held.contexts[0].own_layers] == [[float(looked)]] * 3
    assert (found[0] - found[1]).abs().max() > 1e-3


def test_pqcache_over_packed_rows():
    """The codes are those of the keys before they were packed."""
    raw = kvbench.prefill(tiny("llama"), ids(300), "pqcache", 0.1)
    held = kvbench.prefill(tiny("llama"), ids(300), "pqcache", 0.1, codec="kivi")
    for one, other in zip(*(own.contexts[0].own_layers for own in (raw, held)), strict=True):
        assert torch.equal(one.state.layer["codes"], other.state.layer["codes"])
    assert held.resident_bytes < 0.7 * held.full_bytes
    assert torch.isfinite(held.extend(ids(1))).all() and held.contexts[0].layers[2].attended == [32 + 13 + 13 + 1]


@pytest.mark.parametrize("parts", [2, 4])
def test_the_reader_lists_the_rows_that_read_marks(parts):
    """Drawn queries and keys in float64, token after token, and a token once more after it was undone."""
    draws, method = torch.Generator().manual_seed(2), make_method(bits=4, parts=parts)
    queries, keys = (torch.randn(2, h, 150, 32, generator=draws, dtype=torch.float64) for h in (6, 2))
    states = [State((3, 4)), State((3, 4))]
    for state in states:
        books = method.cluster(keys[:, :, 5:118], (3, 4))
        state.layer |= {"codebook": books, "codes": encode(keys[:, :, 5:118], books)}
    written = keys.clone()
    written[:, :, 118:] = torch.nan
    answer = CapturedAnswer(
        {0: written}, {0: states[0]}, 1, 6, 118, 32, 118, 35, Fraction(3, 10), 0.2, 4, lambda *_: None
    )
    reader = method.captured.row_reader(method, answer)
    if parts == 2:  # pairs of the rows from 5 to 105, which are never among the 13 newest
        pairs = states[0].layer["codes"][:, :, :, :100].long()
        expected = (16 * pairs[:, :, 0] + pairs[:, :, 1])[..., None] == torch.arange(256)
        assert reader.counted == 105 and torch.equal(reader.counts[0].long(), expected.sum(2))
    for row in (*range(118, 130), 128, 129, *range(130, 150)):
        written[:, :, row] = keys[:, :, row]
        own = queries[:, :, row : row + 1]
        found = reader.choose(torch.tensor(row))(0, own, written)
        assert (found.size, found.after) == (1, None) and found.blocks.shape == (2, 2, 5 + 13 + 20 + 1)
        states[1].layer["codes"] = states[1].layer["codes"][..., : row - 5]
        marked = method.read(ReadRequest(own, 0, 1, row, 118, 0.2, 35, Fraction(3, 10)), None, states[1])
        looked = torch.zeros(2, 2, row + 1).scatter_(2, found.blocks, 1.0).bool()
        assert torch.equal(looked.repeat_interleave(3, 1), marked)
        method.add_codes(keys[:, :, : row + 1], states[1])
    reader.finish(150)
    assert torch.equal(states[0].layer["codes"], states[1].layer["codes"])


GRAPHS = {
    "chosen and recent": (0.3, SMALL, 60),
    "whole numbers": (21, SMALL, 118),
    "recent only": (0.2, SMALL | {"ratio": 1.0}, 60),
    "chosen only": (0.2, SMALL | {"ratio": 0.0, "sinks": 0}, 60),
    "not clustered": (0.3, {"sinks": 32, "least": 64}, 60),
    "the whole budget": (1.0, SMALL, 60),
    "few rows": (0.2, SMALL | {"bits": 8, "least": 0}, 12),
}


@pytest.mark.parametrize("name", choose_quick(GRAPHS, "chosen and recent", "chosen only", "not clustered", "few rows"))
def test_a_graph_attends_to_the_rows_that_the_modules_choose(name):
    """In float64: equal tokens, rows attended to, states and bytes, also for tokens that follow."""
    budget, more, prompt = GRAPHS[name]
    choice = choose_cache(*build_policy("pqcache", "uniform", "llama", **more))
    modules, step = make_contexts(make_double("llama"), choice, budget, 2, prompt=prompt)
    for tokens in (20, 9):  # more and fewer than a graph decodes at once
        answers = [list(context.generate(tokens, Sampling(), frozenset(), True)) for context in (modules, step)]
        assert torch.equal(*map(torch.stack, answers)) and step.decoding == "graph"
        assert_same(modules, step)
        torch.testing.assert_close(modules.logits, step.logits, rtol=0, atol=1e-5)  # norms are computed in float32
        for one, other in zip(modules.own_layers, step.own_layers, strict=True):
            assert one.bytes().state == other.bytes().state
            assert one.state.layer.get("codes", torch.zeros(0)).equal(other.state.layer.get("codes", torch.zeros(0)))
    more_ids = ids(5, 9).repeat(2, 1)
    torch.testing.assert_close(modules.extend(more_ids), step.extend(more_ids), rtol=0, atol=1e-5)


def test_what_is_refused():
    with pytest.raises(SettingError, match="^allocator=ada: pqcache keeps every row, so there are none to share"):
        kvbench.prefill(tiny("llama"), ids(60), "pqcache", 0.5, allocator="ada")
    for args, message in (
        (dict(parts=3), "method.parts=3: a divisor of the model's head dimension, 32"),
        (dict(parts=0), "method.parts=0: a whole number of at least 1"),
        (dict(bits=9), r"method.bits=9: a whole number in \[1, 8\]"),
        (dict(ratio=1.5), r"method.ratio=1.5: a share in \[0, 1\]|method.ratio=1.5: a number in \[0, 1\]"),
        (dict(sinks=-1), "method.sinks=-1: a whole number of at least 0"),
        (dict(iterations=-1), "method.iterations=-1: a whole number of at least 0"),
        (dict(least=-1), "method.least=-1: a whole number of at least 0"),
    ):
        with pytest.raises(SettingError, match=f"^({message})"):
            kvbench.prefill(tiny("llama"), ids(60), "pqcache", 0.5, method_args=args)

"""`kvbench diagnose` beside a dense engine in float64, whose attention, cuts and masses are plain loops."""

from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
import pytest
import torch

from kvbench.cache.hook_table import check_shape
from kvbench.cache.policy import choose_cache
from kvbench.config.catalogue import list_choices
from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.method import Method
from kvbench.models.transformers_port import read_layout
from kvbench.studies.diagnosis import choose_references, list_lines
from kvbench.studies.watched_run import Reading, WatchedRun
from kvbench.validation import SettingError
from tests.support.dense_engine import DenseEngine, Head, HeadView
from tests.support.method_files import build_policy
from tests.support.tiny_models import distinct, make_exact, tiny

TOKENS, WINDOW, QUOTA = 50, 8, 11
PROMPT = distinct(TOKENS)
READING = Reading(tuple(PROMPT[0].tolist()), window=WINDOW, tokens=4, needles=(2, 3, 17, 40))


def choose(name: str, model: str = "llama", **settings):
    """A method of conf/method/ as a user of a tiny model gets it, with an even allocator and raw rows."""
    return choose_cache(*build_policy(name, "uniform", model, **settings))


def order(places, layer: int, head):
    """A number for each position, none twice, that differs between layers and heads."""
    return (places * 37 + layer * 13 + head * 29) % 101


@dataclass(frozen=True)
class Ordered(Method):
    """Keeps the rows whose number is largest, also those that another method would protect."""

    def update(self, observation, rows, state):
        state.layer["layer"] = observation.layer
        return {}

    def score(self, observation, rows, state):
        heads = torch.arange(rows.heads, device=rows.places.device)[:, None]
        return order(rows.places, state.layer["layer"], heads).to(rows.keys.dtype)


@dataclass
class Recorder:
    """Cuts a dense engine as `Ordered` does, and keeps what it shows: views and kept positions of each block."""

    quota: int | None
    views: list[tuple[HeadView, list[int]]] = field(default_factory=list)

    def __call__(self, views: list[HeadView]) -> list[Head]:
        kept = []
        for own in views:
            index = np.arange(len(own.rows.places))
            if self.quota is not None and own.tokens <= TOKENS:
                index = np.sort(np.argsort(-order(own.rows.places, own.layer, own.head))[: self.quota])
            kept.append(own.rows.take(index))
            self.views.append((own, kept[-1].places.tolist()))
        return kept

    def of(self, layer: int, head: int) -> list[tuple[HeadView, list[int]]]:
        return [own for own in self.views if (own[0].layer, own[0].head) == (layer, head)]


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def relative(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def join(blocks: list[tuple[HeadView, list[int]]]) -> dict[str, np.ndarray]:
    """Queries (G, n, d), outputs, and keys and values (n, d) as they were written, of all tokens of a KV head."""
    views = [own for own, _ in blocks]
    found = {name: np.concatenate([getattr(own, name) for own in views], 1) for name in ("queries", "outputs")}
    for name in ("keys", "values"):
        found[name] = np.concatenate([getattr(own.rows, name)[-own.queries.shape[1] :] for own in views])
    return found | {"scaling": np.asarray(views[0].scaling)}


def diagnose(full: Recorder, run: Recorder, layer: int, head: int, answer: int) -> dict[str, list[float]]:
    """The quantities of a KV head by their definition, a number for each of its query heads."""
    exact, own = join(full.of(layer, head)), join(run.of(layer, head))
    kept = next(places for view, places in run.of(layer, head) if view.tokens == TOKENS)
    tokens = {"prompt": range(TOKENS - WINDOW, TOKENS), "answer": range(TOKENS, TOKENS + answer)}
    found: dict[str, list[float]] = {}
    received = np.zeros(TOKENS)
    for group in exact["queries"]:
        for token in tokens["answer"]:
            received += softmax(group[token] @ exact["keys"][: token + 1].T * exact["scaling"])[:TOKENS]
    oracle = set(np.argsort(-received)[: len(kept)].tolist())
    share = np.sort(received)[::-1].cumsum() / received.sum()
    most = set(np.argsort(-received)[: int((share < READING.share).sum()) + 1].tolist())
    found["recall"], found["rows"] = [len(oracle & set(kept)) / len(kept)], [len(kept) / TOKENS]
    found["top_p_rows"] = [len(most) / TOKENS]
    for part, places in tokens.items():
        for group in range(len(own["queries"])):
            local, accumulated, dropped, top = [], [], [], {"top_k": [], "top_p": []}
            for token in places:
                p = softmax(own["queries"][group, token] @ own["keys"][: token + 1].T * own["scaling"])
                there = [place for place in range(token + 1) if place in kept or place >= TOKENS]
                output = sum((p[place] * own["values"][place] for place in there), np.zeros(32))
                output /= max(sum(p[place] for place in there), 1e-300)
                if part == "answer":
                    output = own["outputs"][group, token]
                local.append(relative(output, p @ own["values"][: token + 1]))
                accumulated.append(relative(own["outputs"][group, token], exact["outputs"][group, token]))
                dropped.append(1 - sum(p[place] for place in there))
                p = softmax(exact["queries"][group, token] @ exact["keys"][: token + 1].T * exact["scaling"])
                for name, chosen in (("top_k", oracle), ("top_p", most)):
                    there = [place for place in range(token + 1) if place in chosen or place >= TOKENS]
                    output = sum((p[place] * exact["values"][place] for place in there), np.zeros(32))
                    output /= max(sum(p[place] for place in there), 1e-300)
                    top[name].append(relative(output, exact["outputs"][group, token]))
            quantities = {"local": local, "accumulated": accumulated, "dropped": dropped}
            for name, values in (quantities | {f"{name}_local": own for name, own in top.items()}).items():
                found.setdefault(f"{name}_{part}", []).append(float(np.mean(values)))
    return found


def run(name: str, block: int | None, budget: Budget, reading: Reading = READING, **settings):
    """The lines of a method of conf/method/ on the tiny Llama, with its run and the full cache's."""
    full = WatchedRun(make_exact("llama"), choose("full"), Budget(1.0), None, reading, compared=True)
    answer = full.answer()
    own = WatchedRun(make_exact("llama"), choose(name, **settings), budget, block, reading)
    full.read(answer)
    own.read(answer)
    return list(list_lines(full, own, name, 0)), own, full


@pytest.mark.parametrize("block", [None, 16])
def test_every_quantity_is_that_of_a_dense_engine(block):
    full = WatchedRun(make_exact("llama"), choose("full"), Budget(1.0), block, READING, compared=True)
    answer = full.answer()
    own = WatchedRun(
        make_exact("llama"),
        choose_cache(Ordered("ordered"), Allocator("uniform"), choose("full").codec),
        Budget(QUOTA),
        block,
        READING,
    )
    full.read(answer)
    own.read(answer)
    lines = list(list_lines(full, own, "ordered", 0))
    recorders = Recorder(None), Recorder(QUOTA)
    for recorder in recorders:
        engine = DenseEngine("llama", recorder, cuts_decoding=True)
        engine.prefill(PROMPT, block)
        engine.extend(torch.tensor([answer]))
    sums: dict[str, list[float]] = {}
    for layer in range(3):
        heads = [diagnose(*recorders, layer, head, len(answer)) for head in range(2)]
        for name in heads[0]:
            expected = [value for head in heads for value in head[name]]
            mean = next(own.value for own in lines if (own.quantity, own.layer, own.head) == (name, layer, None))
            assert mean == pytest.approx(np.mean(expected), rel=1e-6, abs=1e-9), (name, layer)
            sums.setdefault(name, []).append(float(np.mean(expected)))
            if "top" not in name:
                found = [
                    own.value for own in lines if (own.quantity, own.layer) == (name, layer) and own.head is not None
                ]
                assert found == pytest.approx(expected, rel=1e-6, abs=1e-9), (name, layer)
        died = {}
        for head in range(2):
            for number, (view, kept) in enumerate(recorders[1].of(layer, head)[:-1], 1):
                for needle in READING.needles:
                    if needle < view.tokens and needle not in kept:
                        died.setdefault((head, needle), number)
        needles = {(own.head, own.x): own.value for own in lines if (own.quantity, own.layer) == ("needle", layer)}
        assert needles == died and died
        left = {own.x: own.value for own in lines if (own.quantity, own.layer) == ("needles_left", layer)}
        for number in left:
            read = [needle for needle in READING.needles if needle < number * (block or TOKENS)]
            alive = [died.get((head, needle), inf) > number for head in range(2) for needle in read]
            assert left[number] == pytest.approx(np.mean(alive))
        held = [all((head, needle) not in died for needle in READING.needles) for head in range(2)]
        [share] = [own.value for own in lines if (own.quantity, own.layer) == ("needles_held", layer)]
        assert share == np.mean(held)
    whole = {own.quantity: own.value for own in lines if own.layer is None}
    assert {name: whole[name] for name in sums} == pytest.approx({name: np.mean(own) for name, own in sums.items()})


@pytest.mark.parametrize(("name", "block"), [("full", None), ("snapkv", 16), ("quest", None)])
def test_a_full_budget_loses_nothing(name, block):
    lines, *_ = run(name, block, Budget(1.0))
    found = {own.quantity: own.value for own in lines if own.layer is None}
    assert {found["recall"], found["rows"]} == {1.0}
    lost = [
        value for quantity, value in found.items() if quantity.startswith(("local", "accumulated", "dropped", "top_k"))
    ]
    assert len(lost) >= 5 and lost == pytest.approx([0] * len(lost), abs=1e-9)
    assert not any(own.quantity == "needle" for own in lines)


def test_a_merged_row_attends_with_its_mass_and_its_tokens_are_not_dropped():
    lines, own, full = run("centroidkv", None, Budget(QUOTA))
    found = {own.quantity: own.value for own in lines if own.layer == 1 and own.head is None}
    assert not {"recall", "needles_held"} & found.keys()
    rows, ([keys], [values]) = own.begin[1].view(), full.list_rows(1, None)
    assert rows.mass.sum(-1).tolist() == [[TOKENS] * 2]
    errors, dropped = [], []
    for head in range(6):
        for number in range(WINDOW):
            token, query = TOKENS - WINDOW + number, own.layers[1].queries[0][head, number]
            logits = [float(query @ key) * 32**-0.5 for key in keys[head // 3, : token + 1]]
            there = [row for row in range(QUOTA) if rows.places[0, head // 3, row] <= token]
            biased = [
                float(query @ rows.keys[0, head // 3, row]) * 32**-0.5 + np.log(float(rows.mass[0, head // 3, row]))
                for row in there
            ]
            output = softmax(np.array(biased)) @ rows.values[0, head // 3, there].numpy()
            errors.append(relative(output, softmax(np.array(logits)) @ values[head // 3, : token + 1].numpy()))
            dropped.append(1 - np.exp(biased).sum() / np.exp(logits).sum())
    assert (found["local_prompt"], found["dropped_prompt"]) == pytest.approx((np.mean(errors), np.mean(dropped)))


def test_rows_that_are_read_are_those_of_each_token_and_query_head():
    lines, own, _ = run("quest", None, Budget(20), page=4, least=1)
    found = {line.quantity: line.value for line in lines if line.layer is None}
    assert not any(name.endswith("_prompt") or name.startswith("needle") for name in found)
    keys, values = own.context.layers[2].rows.attention_view()[:2]
    dropped = []
    for number, read in enumerate(own.layers[2].held):
        token = TOKENS + number
        assert bool((~read).any())
        for head in range(6):
            query = torch.cat(own.layers[2].queries, 1)[head, WINDOW + number]
            p = (keys[0, head // 3, : token + 1] @ query * 32**-0.5).softmax(0)
            chosen = p * read[head]
            output = chosen @ values[0, head // 3, : token + 1] / chosen.sum()
            torch.testing.assert_close(torch.cat(own.layers[2].outputs, 1)[head, WINDOW + number], output)
            dropped.append(1 - float(chosen.sum()))
    [mean] = [line.value for line in lines if (line.quantity, line.layer, line.head) == ("dropped_answer", 2, None)]
    assert mean == pytest.approx(np.mean(dropped))


@pytest.mark.full
@pytest.mark.parametrize("model", ["llama", "gemma3"])
@pytest.mark.parametrize("codec", ["raw", "kivi", "palu"])
@pytest.mark.parametrize("name", list_choices("method"))
def test_every_method_and_codec_is_diagnosed(name, codec, model):
    """Also with a hidden question, whose tokens the method reads behind the cut."""
    try:
        policy = choose_cache(*build_policy(name, "uniform", model, codec))
        check_shape(policy.method, policy.codec, read_layout(tiny(model)))
    except SettingError:
        pytest.skip("the method refuses this codec or this model")
    reading = replace(READING, ids=READING.ids[:40], question=READING.ids[40:], needles=(2, 17))
    budget = Budget(1.0 if name == "full" else None if policy.method.budget_setting else 0.5)
    full = WatchedRun(tiny(model), choose("full", model=model), Budget(1.0), None, reading, compared=True)
    answer = full.answer()
    own = WatchedRun(tiny(model), policy, budget, None, reading)
    full.read(answer)
    own.read(answer)
    lines = list(list_lines(full, own, name, 0))
    found = {line.quantity: line.value for line in lines if line.layer is None}
    assert {"local_answer", "accumulated_answer", "dropped_answer", "rows", "random_local_answer"} <= found.keys()
    assert all(np.isfinite(line.value) for line in lines)
    for quantity, value in found.items():
        if any(name in quantity for name in ("dropped", "rows", "recall")):
            assert -1e-5 <= value <= 1 + 1e-5, quantity
    if (name, codec) == ("full", "raw"):
        assert found["accumulated_answer"] == pytest.approx(0, abs=1e-5) and found["recall"] == 1


def test_references_keep_as_many_rows_as_the_method_and_are_drawn_with_the_seed():
    weights = torch.rand(2, 3, 4, 30, generator=torch.Generator().manual_seed(0))
    held = torch.zeros(2, 1, 1, 30, dtype=torch.bool)
    held[0, ..., :7], held[1, ..., 10:12] = True, True
    found, again, other = (choose_references(weights, held, 0.5, [seed]) for seed in (1, 1, 2))
    for name in ("top_k", "random"):
        assert found[name].sum(-1).flatten().tolist() == [7, 2]
    assert torch.equal(found["random"], again["random"]) and not torch.equal(found["random"], other["random"])
    importance = weights.sum((1, 2))
    assert bool((importance[found["top_k"][:, 0, 0]][:7].min() >= importance[0][~found["top_k"][0, 0, 0]]).all())
    shares = (importance * found["top_p"][:, 0, 0]).sum(1) / importance.sum(1)
    assert bool((shares >= 0.5).all()) and bool((shares < 0.5 + 2 / 30).all())

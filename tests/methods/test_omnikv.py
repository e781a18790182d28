"""OmniKV against its formula: what filter layers choose and who looks at it, in loops over the dense engine's rows."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

import kvbench
from kvbench.config.catalogue import build, load_settings
from kvbench.engine.compressed_cache import choose_cache
from kvbench.engine.generation import GenerationContext
from kvbench.interfaces.budget import Budget
from kvbench.validation import SettingError
from tests.support.dense_engine import DenseEngine
from tests.support.tiny_models import ids, make_double, tiny


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def chosen(queries: list[np.ndarray], keys: list[np.ndarray], selector, window, quota, prompt, decoded, scaling) -> set:
    """Rows of the prompt that a filter layer hands on. `queries` (Hq, d) of every token; `keys` of every head."""
    own = max(0, window - decoded) if selector in ("uniform", "exp") else 0
    scored = prompt - own

    def seen(query: np.ndarray, soft: bool) -> list[float]:
        group = len(query) // len(keys)
        logits = [[q @ keys[h // group][row] * scaling for row in range(scored)] for h, q in enumerate(query)]
        return [max(column) for column in zip(*(softmax(np.array(x)) if soft else x for x in logits), strict=True)]

    if selector in ("last", "softmax_last"):
        scores = seen(queries[-1], selector != "last")
    else:
        scores = np.zeros(scored)
        for age, query in enumerate(reversed(queries[-window:])):
            scores += np.array(seen(query, True)) * (2.0**-age if selector == "exp" else 1)
    order = sorted(range(scored), key=lambda row: (-scores[row], row))[: max(1, quota - own)]
    return {*order, *range(scored, prompt)}


@dataclass
class Oracle(DenseEngine):
    """Looks at what OmniKV looks at, once `quota` is set."""

    quota: int | None = None
    args: dict = field(default_factory=dict)
    prompt: int = 0
    queries: dict[int, list[np.ndarray]] = field(default_factory=dict)
    look: set = field(default_factory=set)
    looked: list[int] = field(default_factory=list)

    def attention(self, module, query, key, value, mask, scaling, **kwargs):
        layer, args, one = module.layer_idx, self.args, query.shape[2] == 1
        self.queries.setdefault(layer, []).extend(query[0].transpose(0, 1).numpy())
        outputs, _ = super().attention(module, query, key, value, mask, scaling, **kwargs)
        before = [f for f in args["filters"] if f <= layer]
        if layer in args["filters"] and one and self.quota is not None:
            keys = [rows.keys for rows in self.held[layer]]
            decoded = self.seen + 1 - self.prompt
            own = args["selector"], args["window"], self.quota, self.prompt, decoded, scaling
            self.look = chosen(self.queries[layer], keys, *own)
        if not one or self.quota is None or not before or layer <= before[-1] + args["wait"]:
            self.looked.append(self.seen + query.shape[2])
            return outputs, None
        look = sorted(self.look | set(range(self.prompt, self.seen + 1)))
        self.looked.append(len(look))
        for index in range(query.shape[1]):
            rows = self.held[layer][index // (query.shape[1] // len(self.held[layer]))].take(look)
            found = self.attend(query[0, index].numpy(), rows, np.array([self.seen]), scaling, None)
            outputs[0, :, index] = torch.from_numpy(found)
        return outputs, None


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.cover
@pytest.mark.parametrize("selector", ["last", "softmax_last", "uniform", "exp"])
@pytest.mark.parametrize(
    "model, filters, wait",
    [
        ("llama", [0], 0),
        ("llama", [0], 1),
        *((name, [0], 0) for name in ("llama3", "yarn", "qwen3", "phi3", "mistral")),
    ],
)
@pytest.mark.parametrize("quota, block", [(9, None), (4, 13)])
def test_omnikv(selector, model, filters, wait, quota, block):
    """Prefill dense, a question as one block, then token by token. A quota of 4 is less than the window of 5."""
    args = dict(filters=filters, wait=wait, selector=selector, window=5)
    oracle = Oracle(model, args=args, prompt=51)
    expected = oracle.prefill(ids(51), block)
    held = kvbench.prefill(make_double(model), ids(51), "omnikv", quota, block, method_args=args | {"depth": None})
    close(held.logits[0], expected)
    oracle.quota = quota
    oracle.looked.clear()
    for part in ids(11, seed=1).split([1, 1, 3, 1, 1, 1, 1, 1, 1], dim=1):
        close(held.extend(part)[0], oracle.extend(part))
    attended = np.array([layer.attended for layer in held.contexts[0].own_layers]).T.ravel()
    assert attended.tolist() == oracle.looked
    assert held.resident_bytes == held.full_bytes and held.evicted(0, 0) == 0


def test_selectors_differ():
    def read(**args) -> torch.Tensor:
        own = dict(filters=[0], depth=None, wait=0) | args
        held = kvbench.prefill(tiny("llama"), ids(80), "omnikv", 12, method_args=own)
        return torch.cat([held.extend(token) for token in ids(4, seed=1).split(1, dim=1)], 1)

    found = [read(selector=selector) for selector in ("last", "softmax_last", "uniform", "exp")]
    found += [read(wait=1), read(filters=[0, 1]), read(selector="uniform", window=5)]
    for index, one in enumerate(found):
        assert all((one - other).abs().max() > 1e-3 for other in found[:index])


def test_filters_scale_with_depth():
    """Chosen for a model of 32 layers; in another they stand at the same share of its depth."""
    paper = build("method", load_settings("method", "omnikv"))
    for layers, filters in ((32, [2, 8, 18]), (28, [1, 7, 15]), (6, [0, 1, 3]), (64, [4, 16, 36])):
        assert [i for i in range(layers) if paper.filter_of(i, layers) == i] == filters
    exact = build("method", load_settings("method", "omnikv", {"depth": None}))
    assert exact.filter_of(1, 32) is None and exact.filter_of(17, 32) == 8
    with pytest.raises(SettingError, match=r"^method.filters=\[2, 8, 18\]: the model has layers 0 to 2"):
        kvbench.prefill(tiny("llama"), ids(60), "omnikv", 0.5, method_args={"depth": None}).extend(ids(1))


def test_a_budget_of_the_prompt_looks_at_all():
    own = kvbench.prefill(tiny("llama"), ids(60)).extend(ids(1, seed=1))
    for budget in (1.0, 60):
        held = kvbench.prefill(tiny("llama"), ids(60), "omnikv", budget, method_args=dict(filters=[0], depth=None))
        assert torch.equal(held.extend(ids(1, seed=1)), own)


@pytest.mark.parametrize("selector", ["last", "uniform"])
def test_a_branch_is_forgotten_and_the_window_counted(selector):
    args = dict(filters=[0], depth=None, wait=0, selector=selector, window=5)
    held = kvbench.prefill(tiny("llama"), ids(80), "omnikv", 12, 30, method_args=args)
    before = held.bytes
    assert before.state == (0 if selector == "last" else 5 * 6 * 32 * 4)
    answers = []
    for _ in range(2):
        with held.branch():
            answers.append(torch.cat([held.extend(ids(1, seed=s)) for s in (1, 2)], 1))
            assert held.bytes.state == before.state + 80  # the set that is handed on
        assert held.bytes == before and "look" not in held.contexts[0].layers[0].state.shared
    assert torch.equal(*answers)


def test_filters_with_a_sliding_window_choose_nothing():
    for filters, looks in (([0], False), ([2], True), ([2, 3], True)):
        args = dict(filters=filters, depth=None, wait=0)
        held = kvbench.prefill(tiny("gemma3"), ids(80), "omnikv", 12, method_args=args)
        held.extend(ids(1))
        assert [layer.attended for layer in held.contexts[0].own_layers] == [[81.0], [13.0 if looks else 81.0]]


@pytest.mark.parametrize("selector", ["last", "exp"])
def test_a_batch_chooses_for_each_sample(selector):
    own = dict(filters=[0], depth=None, wait=0, selector=selector)
    choice = choose_cache(
        build("method", load_settings("method", "omnikv", own)),
        build("allocator", load_settings("allocator", "uniform")),
        build("codec", load_settings("codec", "raw")),
    )

    def read(samples: slice) -> torch.Tensor:
        prompts, more = ids(80, batch=2)[samples], ids(3, seed=1, batch=2)[samples]
        context = GenerationContext(make_double("llama"), choice, Budget(12), None, (0,) * len(prompts))
        context.prefill(prompts)
        return torch.cat([context.extend(token) for token in more.split(1, dim=1)], 1)

    close(read(slice(2)), torch.cat([read(slice(1)), read(slice(1, 2))]))


def test_what_is_refused():
    with pytest.raises(SettingError, match="^allocator=ada: omnikv keeps every row"):
        kvbench.prefill(tiny("llama"), ids(60), "omnikv", 0.5, allocator="ada")
    for args, message in (
        (dict(filters=[]), r"method.filters=\[\]: layers from 0 on, in ascending order"),
        (dict(filters=[3, 1]), r"method.filters=\[3, 1\]: layers from 0 on"),
        (dict(depth=18), "method.depth=18: a whole number of at least 19"),
        (dict(selector="first"), "method.selector=first: choose one of last, softmax_last, uniform, exp"),
    ):
        with pytest.raises(SettingError, match=f"^{message}"):
            kvbench.prefill(tiny("llama"), ids(60), "omnikv", 0.5, method_args=args)

"""KVzip against its formula in loops and float64: what is read, what it scores, what stays; and what it costs."""

import numpy as np
import pytest
import torch

import kvbench
from kvbench.config.catalogue import build, load_settings
from kvbench.interfaces.observation import PromptEncoder
from kvbench.kernels.max_attention import max_attention
from kvbench.methods.kvzip import KVzip
from kvbench.training import head_patterns
from kvbench.validation import SettingError
from tests.support.dense_engine import DenseEngine, HeadView
from tests.support.oracles import CLOSE, assert_same_rows, find_top
from tests.support.selection import choose_quick
from tests.support.tiny_models import distinct, ids, make_double, tiny

FIRST, LATER = [5, 6, 7], [9, 8]


def softmax_peaks(
    queries: np.ndarray, keys: np.ndarray, scaling: float, lengths: np.ndarray | None = None, hidden: object = None
) -> np.ndarray:
    """(n,) largest probability of each row; the queries (G, T, d) are those of the last T rows. KVzip+ multiplies it by
    the rows' `lengths` (G, n) and divides it by the lengths of the queries' `hidden` states (T, hidden).
    """
    most = np.zeros(len(keys))
    for g, own in enumerate(queries):
        for t, query in enumerate(own):
            logits = keys[: len(keys) - len(own) + t + 1] @ query * scaling
            weights = np.exp(logits - logits.max())
            p = weights / weights.sum()
            if lengths is not None:
                p = p * lengths[g, : len(p)] / np.sqrt((hidden[t] ** 2).sum())
            most[: len(p)] = np.maximum(most[: len(p)], p)
    return most


def project_lengths(model: str, glance: HeadView, values: np.ndarray) -> np.ndarray:
    """(G, n) lengths of the values after each query head's part of W_o."""
    weight = make_double(model).model.layers[glance.layer].self_attn.o_proj.weight.detach().numpy()
    groups, dim = len(glance.queries), values.shape[1]
    heads = range(glance.head * groups, (glance.head + 1) * groups)
    parts = [weight[:, head * dim : (head + 1) * dim] for head in heads]
    return np.array([[np.sqrt(((part @ value) ** 2).sum()) for value in values] for part in parts])


def requests(prompt: list[int], prefix: int, chunk: int, postfix: int) -> list[tuple[list[int], int, int]]:
    """Tokens read and the places that they are about."""
    found = []
    for start in range(prefix, len(prompt), chunk):
        stop = min(start + chunk, len(prompt))
        asked = FIRST if start == prefix else LATER + prompt[max(prefix, start - postfix) : start]
        found.append((asked + prompt[start:stop], start, stop))
    return found


def scored(
    model: str, prompt: torch.Tensor, prefix: int, safe: int, chunk: int, norms: bool = False, behind: bool = False
) -> tuple[DenseEngine, dict]:
    """An engine that has read the prompt, and the score of every row by layer and head."""
    dense, scores, hidden = DenseEngine(model), {}, {}

    def keep_hidden(layer, args, kwargs):
        states = args[0] if args else kwargs["hidden_states"]
        hidden[layer.self_attn.layer_idx] = (layer.input_layernorm(states) if behind else states)[0].numpy()

    dense.prefill(prompt, None)
    before = dense.held, dense.seen
    for tokens, start, stop in requests(prompt[0].tolist(), prefix, chunk, 4):

        def note(glances, start=start, stop=stop):
            for glance in glances:
                keys, new = glance.rows.keys, glance.queries.shape[1]
                before_chunk = min(safe, start)
                index = np.r_[:before_chunk, start:stop, len(keys) - new : len(keys)]
                more = ()
                if norms:
                    more = project_lengths(model, glance, glance.rows.values[index]), hidden[glance.layer]
                own = softmax_peaks(glance.queries, keys[index], glance.scaling, *more)[before_chunk:][: stop - start]
                scores.setdefault((glance.layer, glance.head), np.zeros(len(before[0][glance.layer][0].places)))
                scores[glance.layer, glance.head][start:stop] = own
            return [glance.rows for glance in glances]

        dense.held, dense.seen = dict(before[0]), before[1]
        dense.cut, dense.cutting = note, True
        layers = make_double(model).model.layers
        hooks = [layer.register_forward_pre_hook(keep_hidden, with_kwargs=True) for layer in layers]
        dense.read(torch.tensor([tokens]))
        for hook in hooks:
            hook.remove()
    dense.held, dense.seen, dense.cut = dict(before[0]), before[1], None
    sliding = getattr(tiny(model).config, "layer_types", None) or []
    return dense, {key: own for key, own in scores.items() if "sliding_attention" not in sliding[key[0] : key[0] + 1]}


def oracle(
    model: str, prompt: torch.Tensor, quota: int, prefix: int, safe: int, chunk: int, scope: str, **norms: bool
) -> DenseEngine:
    dense, scores = scored(model, prompt, prefix, safe, chunk, **norms)
    own = max(1, min(safe, quota - 1))
    raised = {key: np.where(np.arange(len(score)) < safe, np.inf, score) for key, score in scores.items()}
    counts = dict.fromkeys(scores, quota)
    if scope == "model":
        counts, rivals = dict.fromkeys(scores, own), []
        for number, (key, score) in enumerate(sorted(raised.items())):
            first = set(find_top(score, own))
            rivals += [(-scores[key][row], number, row, key) for row in range(len(score)) if row not in first]
        for *_, key in sorted(rivals)[: len(scores) * (quota - own)]:
            counts[key] += 1
    for (layer, head), score in raised.items():
        heads = list(dense.held[layer])
        heads[head] = heads[head].take(find_top(score, counts[layer, head]))
        dense.held[layer] = heads
    return dense


def held_by(model, prompt, quota, prefix=0, allocator="uniform", **args):
    own = {"first": FIRST, "later": LATER, "postfix": 4, "chunk": 23} | args
    return kvbench.prefill(tiny(model), prompt, "kvzip", quota, None, allocator, method_args=own, prefix=prefix)


@pytest.mark.cover
@pytest.mark.parametrize("scope", ["model", "head"])
@pytest.mark.parametrize(
    "prefix, sinks, chunk, quota",
    [(0, None, 23, 17), (3, None, 100, 9), (5, 2, 20, 17), (0, 4, 23, 17), (1, 4, 20, 17)],
)
@pytest.mark.parametrize(
    "model", choose_quick(["llama", "qwen3", "mistral", "gemma3", "llama3", "yarn", "phi3"], "llama")
)
def test_kvzip(model, prefix, sinks, chunk, quota, scope):
    prompt, more = distinct(67).split([60, 7], dim=1)
    safe = prefix if sinks is None else sinks
    dense = oracle(model, prompt, quota, prefix, safe, chunk, scope)
    held = held_by(model, prompt, quota, prefix, sinks=sinks, chunk=chunk, scope=scope)
    assert_same_rows(held, dense)
    total = sum(len(rows.places) for layer in set(dense.held) - set(held.sliding_layers) for rows in dense.held[layer])
    assert total == quota * sum(len(dense.held[layer]) for layer in set(dense.held) - set(held.sliding_layers))
    for part in more.split([1, 6], dim=1):
        torch.testing.assert_close(held.extend(part)[0].double(), dense.extend(part), **CLOSE)
    assert_same_rows(held, dense)


@pytest.mark.cover
@pytest.mark.parametrize("scope", ["model", "head"])
@pytest.mark.parametrize("prefix, sinks, chunk", [(0, 4, 23), (5, None, 20)])
@pytest.mark.parametrize("model", ["llama", "qwen3", "gemma3", "phi3"])
@pytest.mark.parametrize("preset", ["plus", "plus_kvpress"])
def test_kvzip_plus(preset, model, prefix, sinks, chunk, scope):
    prompt, more = distinct(67).split([60, 7], dim=1)
    safe = prefix if sinks is None else sinks
    dense = oracle(model, prompt, 17, prefix, safe, chunk, scope, norms=True, behind=preset == "plus_kvpress")
    held = held_by(model, prompt, 17, prefix, preset=preset, sinks=sinks, chunk=chunk, scope=scope)
    assert_same_rows(held, dense)
    for part in more.split([1, 6], dim=1):
        torch.testing.assert_close(held.extend(part)[0].double(), dense.extend(part), **CLOSE)


@pytest.mark.cover
@pytest.mark.parametrize("norms, behind", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("model", ["llama", "qwen3", "gemma3"])
def test_scores_are_those_of_the_equation(model, norms, behind, monkeypatch):
    """In float64, of every row."""
    found: dict[int, torch.Tensor] = {}
    monkeypatch.setattr(
        KVzip, "score", lambda self, seen, rows, state: found.setdefault(seen.layer, state.layer["scores"])
    )
    args = {"first": FIRST, "later": LATER, "postfix": 4, "chunk": 23, "sinks": 4, "scope": "head"}
    args |= {"norms": norms, "behind_norm": behind}
    kvbench.prefill(make_double(model), distinct(60), "kvzip", 17, method_args=args)
    expected = scored(model, distinct(60), 0, 4, 23, norms, behind)[1]
    assert {layer for layer, _ in expected} == set(found)
    for (layer, head), own in expected.items():
        np.testing.assert_allclose(found[layer][0, head].numpy(), own, rtol=1e-9, atol=1e-13)


def test_kvzip_plus_is_no_base_of_criticalkv():
    args = {"base": "kvzip", "base_args": {"preset": "plus", "first": FIRST, "later": LATER}}
    with pytest.raises(SettingError, match="^method.base=kvzip: values would count twice"):
        kvbench.prefill(tiny("llama"), ids(20), "criticalkv", 5, method_args=args)


def rows(held) -> list[list[int]]:
    return [held.places(layer, head).tolist() for layer in range(3) for head in range(2)]


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_head_scores_are_the_largest_of_their_rows(model):
    """The pattern that `kvbench.cli.calibrate duo_attention` writes: per text the largest, the mean over texts."""
    texts = [distinct(50, seed) for seed in (1, 2)]
    asked = {"first": FIRST, "later": LATER, "postfix": 4, "chunk": 23}
    found = head_patterns.compute_head_scores(tiny(model), [text[0] for text in texts], PromptEncoder(), 2, **asked)
    every = [scored(model, text, 2, 2, 23)[1] for text in texts]
    for layer, head in np.ndindex(*found.shape):
        if (layer, head) not in every[0]:
            assert found[layer, head].isnan()
        else:
            expected = np.mean([own[layer, head].max() for own in every])
            assert found[layer, head].item() == pytest.approx(expected, rel=1e-4)


def test_variants_differ():
    found = [
        rows(held_by("llama", distinct(60), 17, 6, **args))
        for args in (
            {},
            {"scope": "head"},
            {"sinks": 2},
            {"chunk": 12},
            {"chunk": 12, "postfix": 0},
            {"first": [9, 9]},
            {"norms": True},
            {"norms": True, "behind_norm": True},
        )
    ]
    assert len({str(own) for own in found}) == len(found)
    assert {len(own) for own in found[1]} == {17} < {len(own) for own in found[0]}
    assert all(own[:6] == list(range(6)) for own in found[0])
    lengths = [len(own) for own in rows(held_by("llama", distinct(60), 17, 6, allocator="ada", scope="head"))]
    assert [a + b for a, b in zip(lengths[::2], lengths[1::2], strict=True)] == [34] * 3 and len(set(lengths)) > 1


def test_presets_are_the_sources_own():
    names = ("paper", "uniform", "kvpress", "plus", "plus_kvpress")
    text = {name: load_settings("method", "kvzip", {"preset": name}) for name in names}
    settings = ("chunk", "sinks", "scope", "norms", "behind_norm")
    assert [tuple(own[key] for key in settings) for own in text.values()] == [
        (2000, None, "model", False, False), (2000, None, "head", False, False), (2048, 4, "model", False, False),
        (2048, 4, "model", True, False), (2048, 4, "model", True, True),
    ]  # fmt: skip
    assert text["paper"]["later"] == text["kvpress"]["later"] + " "


def test_a_tokenizer_reads_the_requests():
    said: list[str] = []

    def encode(text: str) -> list[int]:
        said.append(text)
        return [len(text)]

    method = build("method", load_settings("method", "kvzip", {"chunk": 30}))
    found = list(method.extra_reads(ids(70, batch=2), 4, PromptEncoder(encode, (11, 12))))
    assert [text.strip().split()[0] for text in said] == ["Repeat"] * 3
    assert [(own.start, own.stop) for own in found] == [(4, 34), (34, 64), (64, 70)]
    assert found[0].ids[:, 1:3].tolist() == [[11, 12]] * 2
    assert torch.equal(found[1].ids[:, 1:9], ids(70, batch=2)[:, 26:34])
    assert torch.equal(found[2].ids[:, -6:], ids(70, batch=2)[:, 64:])
    with pytest.raises(SettingError, match="^method.first: this text needs a tokenizer"):
        kvbench.prefill(tiny("llama"), ids(20), "kvzip", 5)


def test_what_was_read_is_forgotten_and_its_cost_known():
    """Only rows remain; the peak has the whole prompt, the longest reading and the scores."""
    held = held_by("llama", ids(200), 20)
    (context,) = held.contexts
    assert context.bytes().state == 0 and context.seen == 200 and context.progress.about is None
    assert context.bytes().rows == 6 * 20 * 2 * 32 * 4
    assert context.reread_tokens == sum(len(own) for own, *_ in requests(ids(200)[0].tolist(), 0, 23, 4))
    assert context.reread_ms > 0 and held.peak_rows_attended == 200 + 2 + 4 + 23
    full = kvbench.prefill(tiny("llama"), ids(200)).contexts[0].memory.peak
    assert full + 6 * 200 * 4 <= context.memory.peak <= 1.5 * full
    everything = held_by("llama", ids(200), 1.0).contexts[0]
    assert everything.reread_tokens == 0 and everything.seen == 200
    answer = held.generate(3, stop=frozenset())
    assert torch.equal(answer, held_by("llama", ids(200), 20).generate(3, stop=frozenset()))


@pytest.mark.parametrize("allocator", ["ada", "pyramid"])
def test_what_the_refusal_of_an_allocator_advises_works(allocator):
    with pytest.raises(SettingError, match=r"use method\.scope=head"):
        held_by("llama", distinct(60), 17, allocator=allocator)
    found = rows(held_by("llama", distinct(60), 17, allocator=allocator, scope="head"))
    assert sum(map(len, found)) == 6 * 17 and len({len(own) for own in found}) > 1


@pytest.mark.parametrize("scope", ["model", "head"])
def test_no_score_outlives_the_cut(scope):
    """Nor a tensor with a number per token of the prompt in what layers share, which no byte count looks into."""
    (context,) = held_by("llama", ids(200), 20, scope=scope).contexts
    shared = context.own_layers[0].state.shared
    tensors = [own for value in shared.values() for own in value.values()]
    assert set(shared) == ({"allotted"} if scope == "model" else set()) and all(own.numel() == 2 for own in tensors)
    assert not any(layer.state.layer for layer in context.own_layers)


@pytest.mark.parametrize("heads, groups, tokens, n", [(2, 3, 13, 29), (1, 1, 17, 17), (3, 4, 1, 7)])
@pytest.mark.parametrize("chunk", [1, 500, 1 << 20])
def test_peaks_are_the_largest_probabilities(monkeypatch, chunk, heads, groups, tokens, n):
    monkeypatch.setattr("kvbench.kernels.max_attention.reference.CHUNK", chunk)
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(2, heads * groups, tokens, 5, generator=generator, dtype=torch.float64)
    keys = torch.randn(2, heads, n, 5, generator=generator, dtype=torch.float64)
    found = max_attention(queries, keys, 0.7)
    for sample in range(2):
        for head in range(heads):
            own = queries[sample, head * groups : (head + 1) * groups].numpy()
            expected = softmax_peaks(own, keys[sample, head].numpy(), 0.7)
            np.testing.assert_allclose(found[sample, head].numpy(), expected, rtol=1e-12)
    lengths = torch.rand(2, tokens, 1, generator=generator, dtype=torch.float64) + 0.1
    found = max_attention(queries, keys, 0.7, weight=1 / lengths[..., 0], together=False)
    for sample, head, member in np.ndindex(2, heads, groups):
        own, one = queries[sample, head * groups + member][None].numpy(), np.ones((1, n))
        expected = softmax_peaks(own, keys[sample, head].numpy(), 0.7, one, lengths[sample].numpy())
        np.testing.assert_allclose(found[sample, head, member].numpy(), expected, rtol=1e-12)
    with pytest.raises(ValueError, match="max_attention"):
        max_attention(queries, keys, 0.7, weight=lengths)
    assert max_attention(queries.bfloat16(), keys.bfloat16(), 0.7).dtype == torch.float32
    with pytest.raises(ValueError, match="max_attention"):
        max_attention(queries, keys[:, :, : tokens - 1], 1.0)


@pytest.mark.parametrize(
    "where, word",
    [
        ({"block_size": 8}, "^block_size=8: kvzip needs the prompt as one block"),
        ({"allocator": "ada"}, "^allocator=ada: kvzip shares rows out itself; use method.scope=head or"),
        ({"allocator": "cake"}, "^allocator=cake: kvzip shares rows out itself; use allocator=uniform$"),
        (
            {"allocator": "cake", "method_args": {"scope": "head"}},
            "^allocator=cake: kvzip cuts after the model has read",
        ),
        ({"method_args": {"scope": "layer"}}, "^method.scope=layer: choose from model, head|^method.scope"),
        ({"method_args": {"chunk": 0}}, "^method.chunk=0"),
        ({"method_args": {"norms": 2}}, "^method.norms=2: choose one of true, false"),
        ({"method_args": {"first": [5, 10**6]}}, "^method: kvzip gives the model token ids above "),
        ({"method_args": {"first": [-1]}}, r"^method.first=\[-1\]: a text, or a list of token ids"),
    ],
)
def test_what_is_refused(where, word):
    with pytest.raises(SettingError, match=word):
        kvbench.prefill(tiny("llama"), ids(20), "kvzip", 5, **where)

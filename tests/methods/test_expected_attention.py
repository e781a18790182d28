"""expected_attention against its formula: queries taken from the model before their rotation, rotations as matrices, in
float64 and loops; and the closed form against samples of the Gaussian that it stands for.
"""

import copy
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
import torch

import kvbench
from kvbench.config.catalogue import build, load_settings
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.kernels.expected_attention import expected_logits, merge, moments
from kvbench.kernels.expected_attention.reference import undo_rotation
from kvbench.methods import expected_attention
from kvbench.methods.expected_attention import mean_rotation, rotations
from kvbench.models.transformers_port import make_rotations
from kvbench.validation import SettingError
from tests.support.dense_engine import DenseEngine, Head, HeadView
from tests.support.oracles import assert_engines_agree, assert_same_rows
from tests.support.selection import choose_quick, only_in_full
from tests.support.tiny_models import distinct, ids, make_double, tiny

CLOSE = dict(rtol=3e-4, atol=3e-4)
MODELS = ("llama", "llama3", "yarn", "qwen2", "qwen3", "mistral", "phi3", "gemma3")  # groups of 1 to 4 query heads


# The oracle.


def rotary(name: str) -> tuple[np.ndarray, float]:
    """Frequencies (r/2) of the full-attention layers and the scale of their rotation."""
    module = make_double(name).model.rotary_emb
    kind = "full_attention_" if hasattr(module, "full_attention_inv_freq") else ""
    return getattr(module, f"{kind}inv_freq").double().numpy(), float(getattr(module, f"{kind}attention_scaling"))


def matrix(name: str, place: int | np.ndarray, dim: int) -> np.ndarray:
    """(…, d, d): what the model does to a query of this place."""
    frequencies, scale = rotary(name)
    place = np.asarray(place)
    rotated = np.broadcast_to(np.eye(dim), (*place.shape, dim, dim)).copy()
    half = len(frequencies)
    for i, frequency in enumerate(frequencies):
        j = i + half
        rotated[..., i, i] = rotated[..., j, j] = scale * np.cos(place * frequency)
        rotated[..., j, i] = scale * np.sin(place * frequency)
        rotated[..., i, j] = -rotated[..., j, i]
    return rotated


@cache
def mean_matrix(name: str, first: int, count: int, dim: int) -> np.ndarray:
    return matrix(name, np.arange(first, first + count), dim).mean(0)


@dataclass
class Watch:
    """The queries of every layer before their rotation, (tokens, heads, d), as the model makes them."""

    name: str
    queries: dict[int, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))

    @contextmanager
    def watching(self):
        handles = []
        for index, layer in enumerate(make_double(self.name).model.layers):
            own = layer.self_attn
            source = getattr(own, "q_norm", None) or getattr(own, "q_proj", None) or own.qkv_proj
            handles.append(source.register_forward_hook(self.noter(index, own.head_dim)))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def noter(self, layer: int, dim: int):
        config = make_double(self.name).config

        def note(module, args, output):
            if output.dim() == 3:  # a projection, maybe with keys and values behind
                queries = output[0, :, : config.num_attention_heads * dim].unflatten(-1, (-1, dim))
            else:  # a norm, heads or tokens first
                queries = output[0] if output.shape[2] == config.num_attention_heads else output[0].transpose(0, 1)
            self.queries[layer].append(queries.detach().numpy())

        return note

    def head(self, layer: int, head: int) -> np.ndarray:
        return np.concatenate(self.queries[layer])[:, head]


@dataclass
class Oracle:
    """What a layer keeps, by the formula."""

    watch: Watch
    quota: int
    positions: int = 512
    sinks: int = 4
    epsilon: float = 0.01
    use_covariance: bool = True
    use_vnorm: bool = True
    prompt: int = 10**9
    buffer: int = 256
    interval: int = 1
    start: int | None = None  # of the places to come while decoding, None: where the text stands
    cuts: dict[int, int] = field(default_factory=dict)

    def cut(self, glances: list[HeadView]) -> list[Head]:
        decoding = glances[0].tokens > self.prompt
        if decoding and glances[0].tokens - max(self.cuts.get(glances[0].layer, 0), self.prompt) < self.interval:
            return [glance.rows for glance in glances]
        self.cuts[glances[0].layer] = glances[0].tokens
        return [self.keep(glance, decoding) for glance in glances]

    def keep(self, glance: HeadView, decoding: bool) -> Head:
        rows = glance.rows
        if len(rows.places) <= self.quota:
            return rows
        sink = rows.places < self.sinks
        room = self.quota - 1 if self.quota > 1 else 1
        safe = [row for row in range(len(sink)) if sink[row]][:room]
        scores = self.scores(glance, decoding)
        order = sorted((row for row in range(len(sink)) if row not in safe), key=lambda row: (-scores[row], row))
        return rows.take(np.array(sorted(safe + order[: self.quota - len(safe)])))

    def scores(self, glance: HeadView, decoding: bool) -> np.ndarray:
        rows, group = glance.rows, len(glance.queries)
        start = self.start if decoding and self.start is not None else glance.tokens
        mean_turn = mean_matrix(self.watch.name, start, self.positions, rows.keys.shape[1])
        shares = []
        for member in range(group):
            queries = self.watch.head(glance.layer, glance.head * group + member)[self.sinks :]
            queries = queries[-self.buffer :] if decoding else queries
            if len(queries) < 2:
                return rows.places.astype(float)
            mean = mean_turn @ queries.mean(0)
            covariance = mean_turn @ np.cov(queries.T, bias=True) @ mean_turn.T
            weights = np.zeros(len(rows.places))
            for row, key in enumerate(rows.keys):
                if rows.places[row] >= self.sinks:
                    square = key @ covariance @ key if self.use_covariance else 0.0
                    weights[row] = np.exp(glance.scaling * mean @ key + glance.scaling**2 * square / 2)
            shares.append(weights / weights.sum())
        share = sum(shares) / group
        if self.use_vnorm:
            share = (share + self.epsilon) * np.sqrt((rows.values**2).sum(-1))
        return np.where(rows.places < self.sinks, 0, share)


def agree(name: str, quota: int, block: int | None, tokens: int = 60, decode=False, start=None, **args):
    """Both engines hold the same rows after the prompt and after seven more tokens."""
    known = {key: value for key, value in args.items() if key in Oracle.__dataclass_fields__}
    with Watch(name).watching() as watch:
        oracle = Oracle(watch, quota, prompt=tokens, start=start, interval=args.get("decode_interval", 1), **known)
        settings = args | {"decoding": decode}
        return assert_engines_agree(
            name,
            oracle.cut,
            "expected_attention",
            quota,
            block,
            tokens,
            seed=4,
            dense_cuts=decode,
            parts=(1, 1, 1, 2, 1, 1),
            **settings,
        )


@pytest.mark.cover
@pytest.mark.parametrize("block", [None, only_in_full(1), 9])
@pytest.mark.parametrize("name", choose_quick(MODELS, "llama"))
def test_every_model_and_block(name, block):
    agree(name, 17, block, tokens=30 if block == 1 else 60)


@pytest.mark.cover
@pytest.mark.parametrize(
    "args",
    [
        {"epsilon": 0.0},
        {"use_covariance": False},
        {"use_vnorm": False},
        {"sinks": 0},
        {"sinks": 7, "positions": 3},
        {"epsilon": 5.0, "positions": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("block", [None, 9])
@pytest.mark.parametrize("name", choose_quick(["llama", "phi3"], "llama"))
def test_every_setting(name, block, args):
    agree(name, 17, block, **args)


@pytest.mark.parametrize("quota", [only_in_full(2), 3, only_in_full(5)])
def test_quotas_below_the_sinks(quota):
    agree("llama", quota, 9)


@pytest.mark.cover
@pytest.mark.parametrize("name", choose_quick(["llama", "yarn"], "llama"))
@pytest.mark.parametrize("interval, buffer", [(1, 6), (3, 5), (2, 256)])
def test_decoding_cuts_by_the_last_queries(name, interval, buffer):
    held = agree(name, 17, None, decode=True, decode_interval=interval, buffer=buffer)
    assert len(held.places(0, 0)) < 17 + interval
    assert agree(name, 17, None, decode_interval=interval, buffer=buffer).places(0, 0).shape == (24,)


def test_decoding_counts_positions_from_the_start_of_the_text():
    """kvpress starts at the buffer's length: that chooses other rows."""
    args = dict(decode=True, buffer=6, decode_interval=1)
    agree("llama", 17, None, **args)
    with pytest.raises(AssertionError, match="diff"):
        agree("llama", 17, None, **args, start=6)


# kvpress's DecodingPress around its ExpectedAttentionPress.


@dataclass
class DecodingPress:
    """The cache of every head in its order there: a cut leaves it sorted by score, and sinks are the first slots."""

    watch: Watch
    prompt: int
    rows: int | None  # that the prompt is cut to
    target: int
    interval: int
    size: int  # passes that the buffer keeps after each
    sinks: int = 4
    future: int = 512
    epsilon: float = 0.01
    steps: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    buffers: dict[int, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    slots: dict[tuple[int, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    lengths: list[int] = field(default_factory=list)  # of the buffers at cuts while decoding

    def cut(self, glances: list[HeadView]) -> list[Head]:
        layer, tokens = glances[0].layer, glances[0].queries.shape[1]
        for glance in glances:
            self.slots[layer, glance.head] += range(glance.tokens - tokens, glance.tokens)
        queries = self.watch.queries[layer][-1]  # (tokens, heads, d), before their rotation
        if glances[0].tokens == self.prompt:
            return [self.compress(glance, queries, self.rows or self.prompt) for glance in glances]
        self.buffers[layer].append(queries)
        self.steps[layer] += 1
        kept = [glance.rows for glance in glances]
        if self.steps[layer] >= self.interval or tokens >= self.target:
            queries = np.concatenate(self.buffers[layer])
            self.lengths.append(len(queries))
            kept = [self.compress(glance, queries, self.target) for glance in glances]
            self.steps[layer], self.buffers[layer] = 0, []
        self.buffers[layer] = self.buffers[layer][-self.size :]
        return kept

    def compress(self, glance: HeadView, queries: np.ndarray, target: int) -> Head:
        slots, rows = self.slots[glance.layer, glance.head], glance.rows
        if len(slots) <= target:
            return rows
        where = {place: row for row, place in enumerate(rows.places)}
        index = [where[place] for place in slots[self.sinks :]]
        keys, values, group = rows.keys[index], rows.values[index], len(glance.queries)
        turn = mean_matrix(self.watch.name, len(queries), self.future, keys.shape[1])
        total = np.zeros(len(keys))
        for member in range(group):
            own = queries[self.sinks :, glance.head * group + member]
            mean = own.mean(0)
            covariance = turn @ ((own - mean).T @ (own - mean) / len(own)) @ turn.T
            logits = keys @ (turn @ mean) / np.sqrt(keys.shape[1])
            logits += np.array([key @ covariance @ key for key in keys]) / keys.shape[1] / 2
            weights = np.exp(logits - logits.max())
            total += weights / weights.sum()
        scores = (total / group + self.epsilon) * np.sqrt((values**2).sum(-1))
        scores = np.concatenate([np.full(self.sinks, scores.max() + 1), scores])
        order = np.argsort(-scores, kind="stable")[:target]
        self.slots[glance.layer, glance.head] = [slots[slot] for slot in order]
        return rows.take(sorted(where[slots[slot]] for slot in order))


PASSES = [7, *[1] * 14, 20, *[1] * 10, 3, 1, 1]  # tokens of a question, an answer, more than a cut leaves, and so on


def beside_kvpress(name: str, rows: int | None, parts: list[int], **args) -> DecodingPress:
    """Both engines hold the same rows after every pass; the press."""
    prompt, *more = distinct(40 + sum(parts), seed=6).split([40, *parts], dim=1)
    method = {"preset": "decode_kvpress", "decode_size": 18, "decode_interval": 12, "buffer": 8} | args
    with Watch(name).watching() as watch:
        press = DecodingPress(watch, 40, rows, method["decode_size"], method["decode_interval"], method["buffer"])
        dense = DenseEngine(name, press.cut, cuts_decoding=True)
        expected = dense.prefill(prompt, None)
        held = kvbench.prefill(tiny(name), prompt, "expected_attention", rows or 1.0, method_args=method)
        torch.testing.assert_close(held.logits[0].double(), expected, **CLOSE)
        for part in more:
            torch.testing.assert_close(held.extend(part)[0].double(), dense.extend(part), **CLOSE)
            assert_same_rows(held, dense)
    return press


@pytest.mark.cover
@pytest.mark.parametrize("rows", [None, 21])
@pytest.mark.parametrize("name", choose_quick(["llama", "yarn", "qwen3"], "llama"))
def test_decode_kvpress_is_its_decoding_press(name, rows):
    """The prompt cut or not; passes of one token and of many. Two cuts come after 12 passes, with 9 of them in the
    buffer, one at once after a pass of 20 tokens.
    """
    press = beside_kvpress(name, rows, PASSES)
    layers = len(tiny(name).model.layers)
    assert [press.lengths[start] for start in range(0, len(press.lengths), layers)] == [9, 3 + 20, 7 + 3 + 1]
    if (name, rows) == ("llama", 21):
        with pytest.raises(AssertionError):
            beside_kvpress(name, rows, PASSES, decode_queries="text")


@pytest.mark.parametrize("interval, buffer", [(12, 5), only_in_full(512, 256)])
def test_decode_kvpress_has_the_sizes_of_kvpress(interval, buffer):
    own = build("method", load_settings("method", "expected_attention", {"preset": "decode_kvpress"}))
    assert (own.decode_interval, own.decode_size, own.buffer, own.sinks, own.positions) == (512, 2048, 256, 4, 512)
    assert own.decoding and own.epsilon == 0.01 and own.use_covariance and own.use_vnorm
    args = {"preset": "decode_kvpress", "decode_size": 16, "decode_interval": interval, "buffer": buffer}
    held = kvbench.prefill(tiny("llama"), ids(40), "expected_attention", 1.0, method_args=args)
    held.extend(ids(9))
    for token in ids(interval - 2, seed=1).split(1, dim=1):
        held.extend(token)
    assert len(held.places(0, 0)) == 40 + 9 + interval - 2  # a pass less than the interval
    held.extend(ids(1))
    state = held.contexts[0].layers[0].state.layer
    assert len(held.places(0, 0)) == 16 and state["recent"].shape[2] == len(state["passes"]) == buffer + 1
    held.extend(ids(1))
    assert held.contexts[0].layers[0].state.layer["passes"] == (1,)


def places(preset: str = "paper", budget: float = 0.3, **args) -> list:
    args = {"preset": preset} | args
    held = kvbench.prefill(tiny("llama"), ids(300, seed=5), "expected_attention", budget, method_args=args)
    return [held.places(layer, head).tolist() for layer in range(3) for head in range(2)]


def test_variants_differ():
    paper = places()
    assert places("paper_niah") != paper != places(use_covariance=False)
    assert places(use_vnorm=False) != paper != places(positions=1)
    assert places("kvpress") == paper and places("kvpress_class") == places("paper_niah")
    assert places("decode") == paper == places("decode_kvpress")


def test_the_decode_preset_cuts_every_512_tokens():
    held = kvbench.prefill(tiny("llama"), ids(40), "expected_attention", 16, method_args={"preset": "decode"})
    held.extend(ids(511, seed=1))
    assert len(held.places(0, 0)) == 16 + 511
    assert held.contexts[0].layers[0].state.layer["recent"].shape == (1, 6, 256, 32)
    held.extend(ids(1, seed=2))
    assert len(held.places(0, 0)) == 16
    plain = kvbench.prefill(tiny("llama"), ids(40), "expected_attention", 16)
    plain.extend(ids(512, seed=1))
    assert len(plain.places(0, 0)) == 16 + 512 and "recent" not in plain.contexts[0].layers[0].state.layer


@pytest.mark.parametrize("setting", [{"positions": 0}, {"sinks": -1}, {"epsilon": -0.1}, {"buffer": 1}], ids=str)
def test_settings_that_are_refused(setting):
    with pytest.raises(SettingError, match=f"^method.{next(iter(setting))}="):
        build("method", load_settings("method", "expected_attention", setting))


# The pieces.


def seen_of(name: str, queries: torch.Tensor, first: int) -> Observation:
    turn = make_rotations(tiny(name))[-1].again
    return Observation(queries, queries, None, 1.0, torch.zeros(1), turn, 0, 1, first, 10**6, False, False)


@pytest.mark.parametrize("places", [2, 16384])
@pytest.mark.parametrize("name", MODELS)
def test_queries_are_turned_back_and_rotations_averaged(name, places, monkeypatch):
    monkeypatch.setattr(expected_attention, "PLACES", places)
    dim = make_double(name).model.layers[0].self_attn.head_dim
    plain = torch.randn(1, 3, 5, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turns = matrix(name, np.arange(31, 36), dim)
    rotated = torch.from_numpy(np.einsum("tij,bhtj->bhti", turns, plain.numpy()))
    seen = seen_of(name, rotated, 31)
    turn = rotations(seen, 5)
    torch.testing.assert_close(undo_rotation(rotated, *turn), plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(undo_rotation(rotated.float(), *turn), plain.float(), rtol=1e-4, atol=1e-4)
    found, exact = moments(rotated, turn=turn), moments(plain)
    torch.testing.assert_close(found.mean, exact.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.scatter, exact.scatter, rtol=1e-4, atol=1e-4)
    mean = mean_matrix(name, 36, 512, dim)
    found = mean_rotation(seen, seen.tokens, 512, plain)
    np.testing.assert_allclose(found.numpy(), mean, atol=1e-4)
    half = len(rotary(name)[0])
    assert np.abs(np.linalg.svd(mean[: 2 * half, : 2 * half])[1]).min() < 0.1  # far from orthogonal
    assert (mean[2 * half :, 2 * half :] == np.eye(dim - 2 * half)).all()


def test_the_closed_form_is_the_mean_over_gaussian_queries():
    """E[exp(s·q·k)] over q ~ N(R̄μ, R̄ΣR̄ᵀ), i.e. queries turned by the *mean* rotation; turning every sample by a
    rotation of its own gives something else.
    """
    rng, dim, scaling = np.random.default_rng(0), 32, 32**-0.5
    root, mean, key = rng.normal(size=(dim, dim)) * 0.3, rng.normal(size=dim), rng.normal(size=dim)
    turns = matrix("llama", np.arange(40, 40 + 512), dim)
    turn = turns.mean(0)
    samples = mean + rng.normal(size=(100_000, dim)) @ root.T
    one = lambda array: torch.from_numpy(array)[None, None]  # noqa: E731
    found = expected_logits(one(turn @ mean), one(turn @ root @ root.T @ turn.T), one(key[None]), scaling)
    drawn = np.log(np.exp(scaling * samples @ turn.T @ key).mean())
    assert abs(found.item() - drawn) < 5e-3
    each = np.einsum("sij,sj->si", turns[rng.integers(512, size=4_000)], samples[:4_000])
    assert abs(found.item() - np.log(np.exp(scaling * each @ key).mean())) > 0.1


@pytest.mark.parametrize("heads, group", [(3, 1), (2, 3), (1, 4)])
def test_the_quadratic_form_in_parts(heads, group):
    """More keys than are taken at once, an odd count; float32 against float64 loops."""
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(2, heads * group, 24, generator=generator)
    root = torch.randn(2, heads * group, 24, 24, generator=generator) / 4
    keys = torch.randn(2, heads, 2051, 24, generator=generator)
    found = expected_logits(mean, root @ root.mT, keys, 0.3)
    assert found.dtype == torch.float32 and found.shape == (2, heads * group, 2051)
    for batch, head in ((0, 0), (1, heads * group - 1)):
        own = keys[batch, head // group].double().numpy()
        m, s = mean[batch, head].double().numpy(), (root @ root.mT)[batch, head].double().numpy()
        expected = [0.3 * m @ k + 0.09 * k @ s @ k / 2 for k in own]
        np.testing.assert_allclose(found[batch, head].numpy(), expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(
            expected_logits(mean, None, keys, 0.3)[batch, head].numpy(), 0.3 * own @ m, atol=1e-4
        )


def test_moments_of_parts_are_moments_of_all():
    """Also far from the origin, where E[qqᵀ] - μμᵀ in float32 has no digit left."""
    queries = 1000 + torch.randn(2, 3, 301, 8, generator=torch.Generator().manual_seed(2))
    exact = queries.double()
    found = moments(queries[:, :, :1])
    for part in queries[:, :, 1:].split([7, 200, 93], dim=2):
        found = merge(found, moments(part))
    apart = exact - exact.mean(2, keepdim=True)
    covariance = apart.mT @ apart / 301
    assert found.count == 301
    torch.testing.assert_close(found.mean.double(), exact.mean(2), rtol=1e-6, atol=1e-3)
    torch.testing.assert_close(found.covariance.double(), covariance, rtol=1e-2, atol=1e-2)
    raw = (queries.mT @ queries) / 301 - queries.mean(2)[..., None] * queries.mean(2)[..., None, :]
    assert (raw.double() - covariance).abs().max() > 0.1
    assert moments(queries.bfloat16(), scatter=False).mean.dtype == torch.float32
    assert moments(queries.double()).scatter.dtype == torch.float64
    assert merge(moments(queries, False), moments(queries, False)).covariance is None


def test_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match="moments"):
        moments(torch.zeros(1, 2, 0, 4))
    for mean, covariance in ((torch.zeros(1, 3, 4), None), (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4, 5))):
        with pytest.raises(ValueError, match="expected_logits"):
            expected_logits(mean, covariance, torch.zeros(1, 2, 5, 4), 1.0)


def test_the_score_is_pure():
    """Twice the same, state and rows untouched; and rows that stand for several tokens weigh as many."""
    method = build("method", load_settings("method", "expected_attention", {"sinks": 0, "use_vnorm": False}))
    generator = torch.Generator().manual_seed(3)
    rows = Rows(
        torch.randn(1, 2, 9, 32, generator=generator), torch.randn(1, 2, 9, 32, generator=generator),
        torch.arange(9).expand(1, 2, 9), torch.ones(1, 2, 9),
    )  # fmt: skip
    seen, state = seen_of("llama", torch.randn(1, 6, 9, 32, generator=generator), 0), State((0,))
    assert method.update(seen, rows, state) == {}
    before = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.layer.items()}
    once = method.score(seen, rows, state)
    assert torch.equal(once, method.score(seen, rows, state))
    assert all(torch.equal(torch.as_tensor(before[key]), torch.as_tensor(state.layer[key])) for key in before)
    torch.testing.assert_close(once.sum(-1), torch.ones(1, 2))
    mass = rows.mass.clone()
    mass[..., 4], mass[..., 0] = 3, 0
    heavy = method.score(seen, Rows(rows.keys, rows.values, rows.places, mass), state)
    assert (heavy[..., 0] == 0).all() and (heavy[..., 4] > once[..., 4]).all()


def test_places_to_come_leave_the_models_own_rotation_alone():
    """Dynamic scaling remembers the longest place; asking for later ones must not turn the model's next tokens."""
    config = copy.deepcopy(tiny("llama").config)
    config.max_position_embeddings = 64
    config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = type(tiny("llama"))(config).eval()
    module, places = model.model.rotary_emb, torch.arange(40)[None]
    before, turn = module.inv_freq.clone(), make_rotations(model)[0].again
    cos, _ = turn(places)
    turn(torch.arange(40, 40 + 512)[None])
    assert torch.equal(module.inv_freq, before) and torch.equal(turn(places)[0], cos)
    module(cos, torch.arange(40, 40 + 512)[None])  # what the model itself would do there
    assert not torch.equal(module.inv_freq, before)


def test_moments_are_gone_once_the_prompt_is_cut():
    """They are as large as hundreds of rows, and no cut while decoding looks at them."""
    held = kvbench.prefill(tiny("llama"), ids(60), "expected_attention", 17, 9)
    assert held.bytes.state == 0 and held.contexts[0].memory.total == held.bytes.total
    assert held.contexts[0].memory.peak > held.bytes.total + 3 * 6 * 32 * 32 * 4
    decoding = kvbench.prefill(tiny("llama"), ids(60), "expected_attention", 17, 9, method_args={"preset": "decode"})
    assert decoding.bytes.state == 3 * 6 * 56 * 32 * 4  # the queries since the sinks

"""Codecs that round each row on its own: an oracle in float64 that attends to what a formula says, and shared tests."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
import torch

import kvbench
from kvbench.cache.policy import CachePolicy, choose_cache
from kvbench.cache.refusals import find_refusal
from kvbench.config.catalogue import build, list_choices, load_settings, methods_available
from kvbench.engine import shared_prefill
from kvbench.engine.compressed_cache import CompressedCache
from kvbench.engine.generation import GenerationContext
from kvbench.engine.replicate import replicate
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.budget import Budget
from kvbench.models.decoder_weights import collect_weights
from kvbench.validation import SettingError
from tests.support.branches import read_on_in_branches
from tests.support.dense_engine import DenseEngine, Head
from tests.support.method_files import budget_for, build_policy, make_tiny_method_args
from tests.support.selection import only_in_full
from tests.support.tiny_models import ids, make_double, tiny

RoundRow = Callable[[np.ndarray], np.ndarray]
"""What a row (d,) is read back as."""
MODELS = ("llama", 13), only_in_full("qwen3", None), only_in_full("phi3", 7)
"""Models, and sizes of blocks."""
CLOSE = dict(rtol=1e-4, atol=1e-4)  # codecs compute in float32; another code would change more


@dataclass(frozen=True)
class Rounded:
    """A codec with settings, and what its source says of a row."""

    codec: str
    args: dict
    keys: RoundRow
    values: RoundRow
    bytes: int
    """Bytes of a key and a value of 32 channels."""

    @property
    def written(self) -> bool:
        """Whether rows are rounded as they are written."""
        return load_settings("codec", self.codec, self.args)["rounding"] == "written"

    def build(self) -> object:
        return build("codec", load_settings("codec", self.codec, self.args))

    def choose(self, method: str, allocator: str = "uniform", **more: object) -> CachePolicy:
        return choose_cache(*build_policy(method, allocator, "llama", **more)[:2], self.build())


def round_rows(one: RoundRow, rows: Iterable[np.ndarray]) -> np.ndarray:
    return np.stack([one(row) for row in rows])


@dataclass
class Oracle(DenseEngine):
    """Attends to rounded rows: those that are written, or those that the prompt's last cut left.

    `kept`: places that each (layer, head) keeps, from the end of the prompt on.
    """

    case: Rounded | None = None
    prompt: int = 0
    kept: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cut, self.cuts_decoding = self.leave, True

    def attention(self, module, query, key, value, mask, scaling, sliding_window=None, **kwargs):
        if self.case.written:
            for one, rows in ((self.case.keys, key), (self.case.values, value)):
                rows.copy_(torch.from_numpy(round_rows(one, rows.flatten(0, 2).numpy())).view(rows.shape))
        return super().attention(module, query, key, value, mask, scaling, sliding_window, **kwargs)

    def leave(self, glances):
        left = []
        for glance in glances:
            rows = glance.rows
            if glance.tokens >= self.prompt:
                if not self.case.written:
                    new = slice(None) if glance.tokens == self.prompt else slice(-1, None)
                    rows = Head(rows.keys.copy(), rows.values.copy(), rows.places, rows.mass)
                    rows.keys[new] = round_rows(self.case.keys, rows.keys[new])
                    rows.values[new] = round_rows(self.case.values, rows.values[new])
                if self.kept:
                    rows = rows.take(np.isin(rows.places, self.kept[glance.layer, glance.head]))
            left.append(rows)
        return left


def list_cuts(codec: str, cases: Iterable[str], quick: tuple[str, str]) -> list[object]:
    """A codec's cases with methods that cut while decoding, as parameters; all but one run in `make test-all` alone."""
    pairs = itertools.product(cases, ("tova", "h2o", "keydiff"))
    return [(codec, *pair) if pair == quick else only_in_full(codec, *pair) for pair in pairs]


def list_kept(held: object) -> dict[tuple[int, int], list[int]]:
    """The places of each layer and head of a cache of the tiny llama."""
    return {(layer, head): held.places(layer, head).tolist() for layer in range(3) for head in range(2)}


def check_the_full_cache(case: Rounded, model: str, block: int | None, tokens: int = 40) -> None:
    """The prompt in blocks, a block of two further tokens, and two single ones."""
    oracle = Oracle(model, case=case, prompt=tokens)
    expected = oracle.prefill(ids(tokens), block)
    held = kvbench.prefill(make_double(model), ids(tokens), block_size=block, codec=case.codec, codec_args=case.args)
    torch.testing.assert_close(held.logits[0], expected, **CLOSE)
    for part in ids(4, seed=1).split([2, 1, 1] if case.written else 1, dim=1):
        torch.testing.assert_close(held.extend(part)[0], oracle.extend(part), **CLOSE)
    heads = sum(len(places) for layer in oracle.held.values() for places in (head.places for head in layer))
    assert held.resident_bytes == heads * case.bytes
    raw = kvbench.prefill(make_double(model), ids(tokens)).extend(ids(1, seed=1))
    first = kvbench.prefill(make_double(model), ids(tokens), codec=case.codec, codec_args=case.args)
    assert (first.extend(ids(1, seed=1)) - raw).abs().max() > 1e-3


def check_rows_that_stay(case: Rounded, method: str, allocator: str = "uniform", **args: object) -> None:
    """Rows are evicted after the prompt, and while decoding if the method cuts then; heads may differ in length."""
    setup = dict(budget=0.5, allocator=allocator, method_args=args, codec=case.codec, codec_args=case.args)
    held = kvbench.prefill(make_double("llama"), ids(60), method, **setup)
    oracle = Oracle("llama", case=case, prompt=60, kept=list_kept(held))
    torch.testing.assert_close(held.logits[0], oracle.prefill(ids(60), None), **CLOSE)
    before = oracle.kept
    for token in ids(4, seed=1).split(1, dim=1):
        logits = held.extend(token)[0]
        oracle.kept = list_kept(held)
        torch.testing.assert_close(logits, oracle.extend(token), **CLOSE)
    lengths = {len(places) for places in oracle.kept.values()}
    assert (len(lengths) > 1) == (allocator == "ada")
    assert held.resident_bytes == sum(map(len, oracle.kept.values())) * case.bytes
    if build_policy(method, "uniform", "llama", **args)[0].decoding:
        assert any(set(before[head]) - set(places) for head, places in oracle.kept.items())


def check_samples_branches_and_shared_prefills(case: Rounded) -> None:
    """A batch, a replicated prompt, a branch and a shared prefill give what each gives alone."""
    choice, model = case.choose("full"), make_double("llama")
    both, *alone = (read_on_in_branches(model, choice, samples) for samples in (slice(2), slice(1), slice(1, 2)))
    torch.testing.assert_close(both[1], torch.cat([logits for _, logits in alone]), **CLOSE)
    assert both[0].bytes().rows == sum(context.bytes().rows for context, _ in alone)

    choices = [choice, case.choose("snapkv", "ada", window=4)]
    together, apart = (
        [
            GenerationContext(model, each, Budget(budget), None, (0,))
            for each, budget in zip(choices, (1.0, 0.5), strict=True)
        ]
        for _ in range(2)
    )
    shared_prefill.prefill(together, ids(60))
    for context, other in zip(together, apart, strict=True):
        other.prefill(ids(60))
        for layer, single in zip(context.own_layers, other.own_layers, strict=True):
            stored = [each.rows.stored.tensors() for each in (layer, single)]
            assert all(torch.equal(*pair) for pair in zip(*stored, strict=True))
    replicate(together[0], 2, 3)
    assert together[0].bytes().rows == 2 * apart[0].bytes().rows
    for context in (together[0], apart[0]):
        list(context.generate(3, Sampling(), frozenset()))
    expected = apart[0].logits.expand_as(together[0].logits)
    torch.testing.assert_close(together[0].logits, expected, **CLOSE)


def check_the_captured_step(
    case: Rounded, allocator: str, method: str = "snapkv", tokens: int = 12, **more: object
) -> None:
    """A step over memory for codes gives the tokens that the modules give, and leaves the same rows."""
    choice = case.choose(method, allocator, **(more or {"window": 4}))
    contexts, answers = [], []
    for stepped in (False, True):
        context = GenerationContext(make_double("llama"), choice, Budget(0.5), None, (0, 1))
        context.prefill(ids(60, batch=2))
        if stepped:
            context.weights = collect_weights(make_double("llama"))
        contexts.append(context)
        answers.append(torch.stack(list(context.generate(tokens, Sampling(), frozenset(), read_last=True))))
    assert [context.decoding for context in contexts] == ["modules", "graph"]
    assert torch.equal(*answers)
    for layers in zip(*(context.own_layers for context in contexts), strict=True):
        for one, other in zip(*(layer.rows.stored.read() for layer in layers), strict=True):
            assert len(one) == len(other) and torch.isclose(one, other, rtol=1e-4, atol=1e-4).double().mean() > 0.999
    others = ids(2, 9, batch=2)
    torch.testing.assert_close(*(context.extend(others) for context in contexts), rtol=1e-2, atol=1e-2)


@cache
def appends(method: str) -> bool:
    """Whether a method does not cut while decoding."""
    return not build_policy(method, "uniform", "llama")[0].decoding


PAIRS = list(itertools.product(methods_available(), list_choices("allocator")))


def is_refused(case: Rounded, method: str, allocator: str) -> bool:
    return find_refusal(*build_policy(method, allocator, "llama")[:2], case.build()) is not None


def list_accepted(case: Rounded) -> list[tuple[str, str]]:
    """The pairs of a method and an allocator that a codec accepts.

    If rows are rounded after the prompt's last cut, only those that cut while decoding: others see raw rows alone.
    """
    return [pair for pair in PAIRS if not is_refused(case, *pair) and (case.written or not appends(pair[0]))]


def list_refused(case: Rounded) -> list[tuple[str, str]]:
    """The pairs that it refuses."""
    return [pair for pair in PAIRS if is_refused(case, *pair)]


def read_pair(case: Rounded | None, method: str, allocator: str) -> CompressedCache:
    """A cache that a method and an allocator have cut, with a codec or with raw rows."""
    codec, codec_args = ("raw", {}) if case is None else (case.codec, case.args)
    args, size = make_tiny_method_args(method, "llama"), budget_for(method, 60)
    block = None if build_policy(method, allocator, "llama")[0].one_block else 50
    return kvbench.prefill(
        tiny("llama"), ids(90), method, size, block, allocator, codec, args, codec_args=codec_args
    )  # fmt: skip


@cache
def count_raw(method: str, allocator: str) -> tuple[int, int]:
    """The bytes and the number of the raw rows that a method and an allocator leave."""
    held = read_pair(None, method, allocator)
    return held.resident_bytes, sum(map(len, list_kept(held).values()))


def check_pair(case: Rounded, method: str, allocator: str, share: float) -> None:
    """A method and an allocator leave as many rows as with raw rows, in at most this share of the bytes."""
    held, (size, rows) = read_pair(case, method, allocator), count_raw(method, allocator)
    if budget_for(method, 60) is not None:
        assert held.resident_bytes <= share * size
        assert sum(map(len, list_kept(held).values())) == rows
    assert torch.isfinite(held.extend(ids(2))).all()


def check_refusal(case: Rounded, method: str, allocator: str) -> None:
    """What cannot be packed, or cut while it is packed, is refused by name."""
    with pytest.raises(SettingError, match=f"^codec={case.codec}: .*{method} merges|^allocator=|^method.decoding"):
        kvbench.prefill(
            tiny("llama"), ids(60), method, budget_for(method, 30), None, allocator, case.codec,
            make_tiny_method_args(method, "llama"), codec_args=case.args,
        )  # fmt: skip

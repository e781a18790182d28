"""What tests of codecs share that round each row to a format: transformers' own cache with an oracle, and crosses."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import kvbench
from kvbench.cache.refusals import find_refusal
from kvbench.config.catalogue import build, list_choices, load_settings, methods_available
from kvbench.validation import SettingError
from tests.support.method_files import budget_for, build_policy, make_tiny_method_args
from tests.support.tiny_models import ids, make_double, tiny

Oracle = Callable[[np.ndarray], np.ndarray]
"""Returns what rows (R, d) in float64 are read as."""
PAIRS = list(product(methods_available(), list_choices("allocator")))


def round_e4m3(x: np.ndarray) -> np.ndarray:
    """The nearest float with 3 bits of mantissa and a largest number of 448, the even one of two."""
    step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(x), 2.0**-6))) - 3)
    return np.clip(np.rint(x / step) * step, -448, 448)


class OracleCache(DynamicCache):
    """A cache of transformers that rounds rows as it takes them."""

    def __init__(self, keys: Oracle, values: Oracle, written: bool) -> None:
        """`written`: whether tokens attend to the rounded rows of their own block, or to its raw ones."""
        super().__init__()
        self.oracles, self.written = (keys, values), written

    def update(self, keys, values, layer, *args, **kwargs):
        raw, rounded = (keys, values), []
        for side, oracle in zip(raw, self.oracles, strict=True):
            flat = oracle(side.reshape(-1, side.shape[-1]).numpy())
            rounded.append(torch.from_numpy(flat).view_as(side))
        together = super().update(*rounded, layer, *args, **kwargs)
        if self.written:
            return together
        tokens = keys.shape[2]
        return tuple(torch.cat([all_[:, :, :-tokens], new], 2) for all_, new in zip(together, raw, strict=True))


def check_logits(codec: str, args: dict, keys: Oracle, values: Oracle, model: str = "llama", tokens: int = 40) -> None:
    """kvbench gives the logits of a model that attends to rows of the oracle, in the prompt and five tokens more."""
    written = build("codec", load_settings("codec", codec, args)).packing.before_attention
    cache, double = OracleCache(keys, values, written), make_double(model)
    prompt, more = ids(tokens), ids(5, seed=1)
    with torch.no_grad():
        expected = double(prompt, past_key_values=cache).logits[0, -1]
    held = kvbench.prefill(double, prompt, codec=codec, codec_args=args)
    torch.testing.assert_close(held.logits[0], expected, atol=1e-5, rtol=0)
    for token in more.split(1, dim=1):
        with torch.no_grad():
            expected = double(token, past_key_values=cache).logits[0]
        torch.testing.assert_close(held.extend(token)[0], expected, atol=1e-5, rtol=0)


def check_rows(codec: str, args: dict, keys: Oracle, values: Oracle, dim: int, row_bytes: float) -> None:
    """Rows of several sizes read as the oracle says, and take so many bytes (keys and values of a row together)."""
    made = build("codec", load_settings("codec", codec, args))
    draw = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1e-3, 1.0, 30.0, 0.0])[torch.arange(24) % 4]
    raw = [torch.randn(24, dim, generator=draw) * sizes[:, None] + shift for shift in (0.0, 0.01)]
    packed = made.pack(*raw, torch.tensor([[20, 4]]))
    for side, oracle, read in zip(raw, (keys, values), packed.read(), strict=True):
        expected = oracle(side.double().numpy())
        assert (np.abs(read.double().numpy() - expected) <= 4e-6 * np.abs(expected).max(1, keepdims=True)).all()
    assert sum(part.nbytes for part in packed.tensors()) == 24 * row_bytes


def list_refused(codec: str) -> list[tuple[str, str]]:
    """The pairs of method and allocator that the codec does not serve."""
    return [pair for pair in PAIRS if find_refusal(*build_policy(*pair, "llama", codec))]


def check_cross(codec: str, args: dict, row_bytes: int, method: str, allocator: str, **more: object) -> None:
    """A method, with `more` settings, evicts, and tokens are read. `row_bytes`: a row's, of 32 channels, both sides."""
    held = kvbench.prefill(
        tiny("llama"), ids(140), method, budget_for(method, 100), None, allocator, codec,
        make_tiny_method_args(method, "llama") | more, codec_args=args,
    )  # fmt: skip
    rows = sum(len(held.places(layer, head)) for layer in range(3) for head in range(2))
    assert rows <= 840 and held.resident_bytes == rows * row_bytes
    assert torch.isfinite(held.extend(ids(3))).all()


def check_refusal(codec: str, args: dict, method: str, allocator: str) -> None:
    """What cannot be packed is refused, with the reason."""
    reason = f"^codec={codec}: its rows are packed, and {method} merges rows|^allocator="
    with pytest.raises(SettingError, match=reason):
        kvbench.prefill(
            tiny("llama"), ids(140), method, budget_for(method, 100), None, allocator, codec,
            make_tiny_method_args(method, "llama"), codec_args=args,
        )  # fmt: skip


def check_parts(codec: str, args: dict) -> None:
    """Rows that come in parts are the rows that come at once, and a cut leaves the others as they are."""
    made = build("codec", load_settings("codec", codec, args))
    draw = torch.Generator().manual_seed(0)
    heads = [torch.randn(2, 9, 32, generator=draw) for _ in range(4)]

    def take(first: int, stop: int) -> list[torch.Tensor]:
        return [torch.cat([head[side, first:stop] for head in heads]) for side in range(2)]

    def view(rows: object) -> list[torch.Tensor]:
        return [part.view(torch.uint8) for part in rows.tensors()]

    counts = torch.ones(2, 2, dtype=torch.int64)
    whole = made.pack(*take(0, 9), counts * 9)
    grown = made.pack(*take(0, 0), counts * 0)
    for first, stop in ((0, 9),) if args.get("global_scale", 1) != 1 else ((0, 4), (4, 5), (5, 9)):
        grown = grown.extend(*take(first, stop), counts * stop)
    assert all(torch.equal(one, other) for one, other in zip(view(grown), view(whole), strict=True))
    if not made.packing.before_attention:
        return
    kept = torch.rand(36, generator=draw) < 0.5
    cut = whole.keep(kept)
    assert cut.lengths.flatten().tolist() == kept.view(4, 9).sum(1).tolist()
    for one, other in zip(cut.read(), whole.read(), strict=True):
        assert torch.equal(one, other[kept])

"""Keys made of codes and references, and attention to such rows: both against a loop over rows in float64."""

from dataclasses import dataclass, replace

import pytest
import torch

from kvbench.kernels.reconstruction import (
    Expansion,
    ReferencedRows,
    attend_compressed,
    rebuild_keys,
    take_codes,
)
from tests.support.compile_kernels import list_typed_kernel
from tests.support.kernel_checks import DEVICE, poison_memory

BOTH = pytest.mark.parametrize("implementation", ["reference", "triton"])


@dataclass(frozen=True)
class Case:
    """Rows of which 4 are sinks, 19 or none are compressed, and 11 or 3 wait; 8 are compressed together."""

    batch: int = 2
    heads: int = 2
    dim: int = 16
    turning: int = 16
    nearest: int = 4
    sinks: int = 4
    compressed: int = 19
    seen: int = 34
    begun: bool = True  # whether the sinks are complete
    refers: bool = True
    codes: tuple[int, int] | None = (16, 16)  # numbers that K and V are made of; all of them if they are equal
    stored: bool = True  # whether these lie where they are stored, and not in the order of the list
    biases: tuple[bool, bool] = (False, False)
    norm: torch.dtype | None = None
    numbers: torch.dtype = torch.int16
    dtype: torch.dtype = torch.float32

    def draw(self, *size: int, seed: int = 0) -> torch.Tensor:
        return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, self.dtype)


CASES = {
    "references and codes": Case(),
    "part of a head turns, three references": Case(dim=24, turning=12, nearest=3, heads=1, numbers=torch.int32),
    "normed": Case(norm=torch.float32, dim=80, turning=80, batch=1),
    "normed, bfloat16": Case(norm=torch.bfloat16, dtype=torch.bfloat16, batch=1),
    "bfloat16": Case(dtype=torch.bfloat16, heads=3),
    "float16": Case(dtype=torch.float16),
    "references alone": Case(codes=None, nearest=1),
    "codes alone": Case(refers=False),
    "codes of odd width and biases": Case(codes=(37, 37), biases=(True, True), heads=3),
    "codes of the listed rows": Case(codes=(70, 70), stored=False, dtype=torch.bfloat16),
    "K and V apart": Case(codes=(9, 21), biases=(False, True), dim=20, turning=12),
    "K and V apart, of the listed rows": Case(codes=(8, 16), biases=(True, False), stored=False, heads=1),
    "more rows than a program has": Case(codes=(24, 24), heads=1, compressed=240, seen=255, dtype=torch.bfloat16),
    "the size of a model": Case(codes=(512, 512), dim=128, turning=128, batch=1, dtype=torch.bfloat16),
    "sinks to come": Case(compressed=0, seen=3, begun=False),
}
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
STEPS = (0, 4, 5, 30)  # before and after a block is compressed, and after three more


class Made:
    """Memory as a codec leaves it: what no block has filled yet is NaN, or a number that no base has."""

    def __init__(self, case: Case, blocks: int):
        width, tokens = 2 * case.heads * case.dim, 40
        size, more = (case.batch, case.seen + tokens, width), 8 * blocks
        self.kv = case.draw(*size, seed=1)  # every row as it was projected
        known = case.sinks + 2 if case.begun else 0
        room = (0 if case.begun else case.sinks) + 2 * blocks
        bases = case.draw(case.batch, known + room, width, seed=2)
        bases[:, : case.sinks] = self.kv[:, : case.sinks]
        draw = torch.Generator().manual_seed(3)
        count = case.compressed + more
        numbers = torch.randint(known + room, (case.batch, count, case.nearest), generator=draw).to(DEVICE)
        numbers[:, : case.compressed] %= max(1, known)
        raw_from = case.sinks + case.compressed if case.begun else 0
        raw, at = self.kv[:, raw_from:].clone(), case.compressed
        spare = (case.batch, 16, width)
        self.bases, self.numbers = bases, numbers if case.refers else None
        nothing = torch.full((case.batch, 16, case.nearest), 9999, dtype=torch.int32, device=DEVICE)
        self.rows = ReferencedRows(
            case.sinks, 8, case.seen, case.compressed, raw_from, bases[:, :known].contiguous(),
            torch.cat([bases[:, known:], bases.new_full(spare, torch.nan)], 1),
            numbers[:, :at].to(case.numbers).contiguous() if case.refers else None,
            torch.cat([numbers[:, at:].int(), nothing], 1) if case.refers else None, raw,
        )  # fmt: skip


def list_some(case: Case, last: int, absent: int) -> torch.Tensor:
    """Rows of every kind in another order for each sample, and rows that do not exist, (B, n)."""
    draw, lists = torch.Generator().manual_seed(4), []
    for _ in range(case.batch):
        rows = torch.cat([torch.randperm(last + 1, generator=draw)[: 2 * last // 3], torch.tensor([last, absent])])
        lists.append(torch.cat([rows[: len(rows) // 2], torch.tensor([absent, last + 1]), rows[len(rows) // 2 :]]))
    return torch.stack(lists).to(DEVICE)


def draw_expansion(case: Case, more: int, listed: torch.Tensor) -> Expansion | None:
    """Numbers and matrices of f_d's last product. What no block has filled yet is NaN."""
    if case.codes is None:
        return None
    width, half = sum(case.codes) if case.codes[0] != case.codes[1] else case.codes[0], case.heads * case.dim
    weights = [case.draw(half, own, seed=8 + n) / own**0.5 for n, own in enumerate(case.codes)]
    biases = [case.draw(half, seed=10 + n) if own else None for n, own in enumerate(case.biases)]
    if not case.stored:
        return Expansion(case.draw(*listed.shape, width, seed=5), None, tuple(weights), tuple(biases))
    inner = case.draw(case.batch, case.compressed + more, width, seed=5)
    spare = torch.cat([inner[:, case.compressed :], inner.new_full((case.batch, 16, width), torch.nan)], 1)
    return Expansion(inner[:, : case.compressed].contiguous(), spare, tuple(weights), tuple(biases))


def decode(case: Case, expansion: Expansion, sample: int, entry: int, old: int) -> torch.Tensor:
    """f_d's last product of a compressed row in float64, (w,)."""
    inner, parts = expansion.inner[sample], []
    if expansion.more is not None:
        inner, entry = torch.cat([inner, expansion.more[sample]]), old
    inner, (first, last) = inner[entry].double(), case.codes
    for numbers, weight, bias in zip((inner[:first], inner[-last:]), expansion.weights, expansion.biases, strict=True):
        product = (weight.double() * numbers).sum(1)
        parts.append(product if bias is None else product + bias.double())
    return torch.cat(parts)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """One head in float64, pairs are channels i and i + r/2."""
    half, out = len(cos) // 2, x.clone()
    for i in range(half):
        out[i] = x[i] * cos[i] - x[i + half] * sin[i]
        out[i + half] = x[i + half] * cos[i + half] + x[i] * sin[i + half]
    return out


def expect(case, made, listed, expansion, compressed, last, cos, sin, norm):
    """Keys and values in float64, zeros where a row does not exist."""
    (batch, count), out = listed.shape, []
    for b in range(batch):
        for entry, row in enumerate(listed[b].tolist()):
            kv = made.kv.new_zeros(2, case.heads, case.dim, dtype=torch.float64)
            if row <= last:
                own = made.kv[b, row].double()
                if case.sinks <= row < case.sinks + compressed:
                    own = torch.zeros_like(own)
                    if made.numbers is not None:
                        own = made.bases[b, made.numbers[b, row - case.sinks]].double().mean(0)
                    if expansion is not None:
                        own = own + decode(case, expansion, b, entry, row - case.sinks)
                kv = own.view(2, case.heads, case.dim).clone()
                for h in range(case.heads):
                    if norm is not None:
                        mean = kv[0, h].square().mean() + norm[1]
                        kv[0, h] = kv[0, h] / mean.sqrt() * norm[0].double()
                    kv[0, h] = rotate(kv[0, h], cos[row].double(), sin[row].double())
            out.append(kv)
    return torch.stack(out).view(batch, count, 2, case.heads, case.dim).permute(2, 0, 3, 1, 4)


@pytest.mark.cover
@EVERY
@BOTH
@pytest.mark.parametrize("step", STEPS)
def test_keys_are_made_and_attended_to_as_defined(case, implementation, step, monkeypatch):
    waiting = case.seen - case.sinks - case.compressed + step
    blocks = max(0, waiting // 8 - 1)
    made, last = Made(case, blocks), case.seen + step - 1
    assert made.rows.count_compressed(step) == case.compressed + 8 * blocks
    listed = list_some(case, last, 10**6)
    expansion = draw_expansion(case, 8 * blocks, listed)
    angles = torch.randn(last + 2, case.turning // 2, generator=torch.Generator().manual_seed(6)).repeat(1, 2)
    cos, sin = (part.to(DEVICE, case.dtype) for part in (angles.cos(), angles.sin()))
    norm = None if case.norm is None else (case.draw(case.dim, seed=7).to(case.norm), 1e-6)
    on_device = torch.tensor(step, dtype=torch.int32, device=DEVICE)
    poison_memory(monkeypatch)
    given = listed, expansion, made.rows, cos, sin, on_device, case.heads
    keys = rebuild_keys(*given, norm=norm, implementation=implementation)
    everything = torch.cat([listed, listed.new_full((case.batch, 1), last + 1)], 1)  # with the token's own row
    if expansion is not None and expansion.more is None:
        longer = replace(expansion, inner=torch.cat([expansion.inner, expansion.inner[:, :1]], 1))
    else:
        longer = expansion
    total = case.compressed + 8 * blocks
    exact, values = expect(case, made, everything, longer, total, last + 1, cos, sin, norm)
    count, bound = listed.shape[1], {torch.float32: 1e-5, torch.float16: 2**-8, torch.bfloat16: 2**-4}[case.dtype]
    absent = (listed > last)[:, None, :, None]
    assert keys.dtype == case.dtype and keys.shape[2] == count + 1
    torch.testing.assert_close(
        keys[:, :, :count].double(), exact[:, :, :count].masked_fill(absent, 0), rtol=bound, atol=bound
    )
    keys[:, :, count] = exact[:, :, count]
    queries, group = case.draw(case.batch, 3 * case.heads, 1, case.dim, seed=9), 3
    counts = torch.tensor([7, 0], device=DEVICE), torch.tensor(1, device=DEVICE)
    found = attend_compressed(
        queries, keys, listed, expansion, made.rows, on_device, 0.4, counts=counts, implementation=implementation
    )
    logits = queries.double() @ keys.double().repeat_interleave(group, 1).mT * 0.4
    logits[..., :count] = logits[..., :count].masked_fill(absent.mT, -torch.inf)
    weights = logits.softmax(-1)
    assert found.dtype == case.dtype
    out = weights @ values.repeat_interleave(group, 1)
    torch.testing.assert_close(found.double(), out, rtol=bound, atol=bound / 2)
    attended = int((listed <= last).sum()) + case.batch
    assert counts[0].tolist() == [7, attended * 3 * case.heads]


@pytest.mark.cover
@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float16])
@pytest.mark.parametrize("width", [1, 5, 32])
def test_codes_are_those_of_compressed_rows(width, dtype, implementation, monkeypatch):
    case, step = Case(), 13
    made, draw = Made(case, 2), torch.Generator().manual_seed(8)
    codes = (100 * torch.rand(2, case.compressed + 16, width, generator=draw)).to(DEVICE, dtype)
    spare = codes.new_full((2, 8, width), 255)
    known, more = codes[:, : case.compressed].contiguous(), torch.cat([codes[:, case.compressed :], spare], 1)
    listed = list_some(case, case.seen + step, 10**6)
    poison_memory(monkeypatch)
    on_device = torch.tensor(step, dtype=torch.int32, device=DEVICE)
    found = take_codes(listed, known, more, made.rows, on_device, implementation=implementation)
    for b in range(2):
        for row, own in zip(listed[b].tolist(), found[b], strict=True):
            stored = 4 <= row < 4 + case.compressed + 16
            assert torch.equal(own, codes[b, row - 4] if stored else torch.zeros_like(own))


def test_what_does_not_fit_is_refused():
    case, step = Case(), torch.tensor(0, dtype=torch.int32)
    made = Made(case, 0)
    listed, codes, angles = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 19, 5), torch.zeros(50, 16)
    made_of = Expansion(codes, codes, (torch.zeros(32, 5),) * 2, (None, None))

    def rebuild_listed(expansion):
        return rebuild_keys(listed, expansion, made.rows, angles, angles, step, 2)

    for message, call in (
        ("take_codes: codes", lambda: take_codes(listed, codes[:, :3], codes, made.rows, step)),
        ("take_codes: codes", lambda: take_codes(listed, codes, codes[..., :2], made.rows, step)),
        ("take_codes: listed", lambda: take_codes(listed[:1], codes, codes, made.rows, step)),
        ("rebuild_keys: numbers", lambda: rebuild_listed(replace(made_of, more=None))),
        ("rebuild_keys: numbers", lambda: rebuild_listed(replace(made_of, inner=codes[:, :3]))),
        ("rebuild_keys: numbers", lambda: rebuild_listed(replace(made_of, weights=(torch.zeros(31, 5),) * 2))),
        ("expansion: numbers", lambda: replace(made_of, inner=codes[0])),
        ("expansion: numbers", lambda: replace(made_of, more=codes[..., :4])),
        ("expansion: numbers", lambda: replace(made_of, more=codes.double())),
        ("expansion: numbers", lambda: replace(made_of, weights=(torch.zeros(32, 5), torch.zeros(32, 6)))),
        ("expansion: numbers", lambda: replace(made_of, weights=(torch.zeros(32, 5), torch.zeros(31, 5)))),
        ("rebuild_keys: 64 numbers", lambda: rebuild_keys(listed, None, made.rows, angles, angles, step, 5)),
        ("rebuild_keys: 64 numbers", lambda: rebuild_keys(listed, None, made.rows, angles, angles, step, 4)),
        ("rebuild_keys: listed", lambda: rebuild_keys(listed.float(), None, made.rows, angles, angles, step, 2)),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            call()
    alone = replace(made.rows, references=None, more_references=None)
    with pytest.raises(ValueError, match="neither references nor codes"):
        rebuild_keys(listed, None, alone, angles, angles, step, 2)
    for change in ({"references": None}, {"block": 0}, {"compressed": 18}, {"raw": made.rows.raw[..., :3]}):
        with pytest.raises(ValueError, match="^referenced rows: "):
            replace(made.rows, **change)


def ahead():
    from kvbench.kernels.reconstruction.attention import _finish, _gather, _spread, _weigh
    from kvbench.kernels.reconstruction.triton import COLUMNS, STAGES, TILE, WARPS, _rebuild, _take

    int64, int32, single = "*i64", "*i32", "fp32"
    for dtype, norm, change in (
        ("bf16", False, {}),
        ("bf16", False, {"NEAREST": 0, "BIAS": True}),
        ("bf16", False, {"INNER": 0}),
        ("bf16", True, {"INNER": 2}),
        ("fp32", True, {}),
    ):
        floats = ("inner", "more_inner", "weight", "bias", "bases", "more_bases", "raw", "cos", "sin", "scale", "keys")
        kinds = dict.fromkeys(floats, f"*{dtype}") | {"listed": int64, "step": int32}
        numbers = int32 if norm else "*i16"
        kinds |= {"references": numbers, "more_references": int32, "epsilon": single}
        exact = dtype == "fp32"
        constants = {"NEAREST": 4, "INNER": 1, "BIAS": norm, "NORM": norm, "REST": norm, "CAST": False} | change
        constants |= {"ROWS": 32 if exact else TILE, "HALF": 48 if norm else 64, "H": 64, "R": 32, "K": COLUMNS}
        yield list_typed_kernel(_rebuild, kinds, constants | {"num_warps": 4 if exact else WARPS, "num_stages": STAGES})
        tile, inner, nearest = 32 if exact else 64, constants["INNER"], constants["NEAREST"]
        floats = ("queries", "keys", "inner", "more_inner", "bases", "more_bases", "raw", "weight", "bias", "outputs")
        sums = ("logits", "part_most", "part_norm", "part_sum", "part_out")
        kinds |= dict.fromkeys(floats, f"*{dtype}") | dict.fromkeys(sums, "*fp32") | {"scale": single}
        kinds |= dict.fromkeys(("cleared", "counts", "number", "base_weights"), int64)
        run, of_head = {"num_warps": 4, "num_stages": 3}, {"M": 16, "N": tile, "D": 128, "CAST": False}
        yield list_typed_kernel(_weigh, kinds, {"COUNT": True} | of_head | run)
        one = {"NEAREST": nearest, "INNER": inner, "M": 32, "N": tile, "Z": 128, "S": 32, "CAST": False}
        yield list_typed_kernel(_spread, kinds, one | run)
        yield list_typed_kernel(_gather, kinds, {"NEAREST": nearest, "S": 32} | of_head | run)
        one = {"INNER": inner, "BIAS": norm, "BLOCK": 32, "Z": 128, "S": 32}
        yield list_typed_kernel(_finish, kinds, one | {"num_warps": 4})
    for dtype in ("*bf16", "*u8"):
        kinds = dict.fromkeys(("codes", "more", "out"), dtype) | {"listed": int64, "step": int32}
        yield list_typed_kernel(_take, kinds, {"ROWS": 16, "W": 512, "num_warps": 4, "num_stages": 3})

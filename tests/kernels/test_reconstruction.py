"""Attention to rows of which some are codes and references, against a loop over rows in float64."""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from kvbench.kernels.reconstruction import (
    Expansion,
    ReferencedRows,
    attend_compressed,
    reserve_weights,
    take_codes,
)
from kvbench.kernels.softmax_extras import SoftmaxExtras
from tests.support.compile_kernels import list_typed_kernel
from tests.support.kernel_checks import BOTH, DEVICE, poison_memory
from tests.support.selection import only_in_full


@dataclass(frozen=True)
class Case:
    """Rows of which 4 are sinks, 19 or none are compressed, and 11 or 3 wait; 8 are compressed together."""

    batch: int = 2
    heads: int = 2
    dim: int = 16
    turning: int = 16
    group: int = 3  # query heads of a KV head
    nearest: int = 4
    sinks: int = 4
    compressed: int = 19
    seen: int = 34
    begun: bool = True  # whether the sinks are complete
    refers: bool = True
    codes: int | None = 16  # numbers that V is made of
    apart: bool = False  # whether these are a part of each row's numbers
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
    "normed, part of a head turns": Case(norm=torch.float32, dim=24, turning=12),
    "bfloat16": Case(dtype=torch.bfloat16, heads=3),
    "float16": Case(dtype=torch.float16),
    "references alone": Case(codes=None, nearest=1),
    "codes alone": Case(refers=False),
    "codes of odd width": Case(codes=37, heads=3),
    "more codes than a program sums": Case(codes=140, dtype=torch.bfloat16),
    "more codes than are multiplied at once": Case(codes=520, batch=1, dim=24, turning=24),
    "more heads than a program has": Case(heads=5, group=1, batch=1, dtype=torch.bfloat16),
    "K and V apart": Case(codes=21, apart=True, dim=20, turning=12),
    "one query for each head": Case(group=1),
    "more queries than heads of a tile": Case(group=20, heads=1),
    "more rows than a program has": Case(codes=24, heads=1, compressed=240, seen=255, batch=1, dtype=torch.bfloat16),
    "the size of a model": Case(codes=512, dim=128, turning=128, batch=1, dtype=torch.bfloat16),
    "many bases": Case(sinks=150, compressed=40, seen=200, heads=1, batch=1, dtype=torch.bfloat16),
    "sinks to come": Case(compressed=0, seen=3, begun=False),
}
FULL = (
    "bfloat16", "codes of odd width", "one query for each head",
    "part of a head turns, three references", "normed, part of a head turns", "more codes than a program sums",
    "more queries than heads of a tile", "the size of a model",
)  # fmt: skip
EVERY = pytest.mark.parametrize(
    "case", [only_in_full(own) if name in FULL else own for name, own in CASES.items()], ids=CASES
)
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


def draw_expansion(case: Case, listed: torch.Tensor) -> Expansion | None:
    """What f_d gives for the listed rows. Numbers of the values are some of those of a row."""
    if case.codes is None:
        return None
    half = case.heads * case.dim
    keys, inner = case.draw(*listed.shape, half, seed=5), case.draw(*listed.shape, case.codes + 3, seed=6)
    weight = case.draw(half, case.codes, seed=8) / case.codes**0.5
    return Expansion(keys, inner[..., 3:] if case.apart else inner[..., 3:].contiguous(), weight)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """One head in float64, pairs are channels i and i + r/2."""
    half, out = len(cos) // 2, x.clone()
    for i in range(half):
        out[i] = x[i] * cos[i] - x[i + half] * sin[i]
        out[i + half] = x[i + half] * cos[i + half] + x[i] * sin[i + half]
    return out


def expect(case, made, listed, expansion, compressed, last, cos, sin, norm):
    """Keys and values of the listed rows and of row `last`, in float64, and which of them are attended to."""
    rows, look, out = [], [], []
    for b in range(case.batch):
        for entry, row in enumerate([*listed[b].tolist(), last]):
            kv = made.kv.new_zeros(2, case.heads * case.dim, dtype=torch.float64)
            look.append(row < last or entry == listed.shape[1])
            if look[-1]:
                kv = made.kv[b, row].double().view(2, -1)
                if case.sinks <= row < case.sinks + compressed:
                    kv = torch.zeros_like(kv)
                    if made.numbers is not None:
                        kv = made.bases[b, made.numbers[b, row - case.sinks]].double().mean(0).view(2, -1)
                    if expansion is not None:
                        values = (expansion.weight.double() * expansion.inner[b, entry].double()).sum(1)
                        kv = kv + torch.stack([expansion.keys[b, entry].double(), values])
                kv = kv.view(2, case.heads, case.dim).clone()
                for h in range(case.heads):
                    if norm is not None:
                        mean = kv[0, h].square().mean() + norm[1]
                        kv[0, h] = kv[0, h] / mean.sqrt() * norm[0].double()
                    kv[0, h] = rotate(kv[0, h], cos[row].double(), sin[row].double())
            out.append(kv.view(2, case.heads, case.dim))
            rows.append(row)
    made_rows = torch.stack(out).view(case.batch, -1, 2, case.heads, case.dim).permute(2, 0, 3, 1, 4)
    return *made_rows, torch.tensor(look, device=DEVICE).view(case.batch, 1, 1, -1)


@pytest.mark.cover
@EVERY
@BOTH
@pytest.mark.parametrize("step", STEPS)
def test_rows_are_attended_to_as_defined(case, implementation, step, monkeypatch):
    waiting = case.seen - case.sinks - case.compressed + step
    blocks = max(0, waiting // 8 - 1)
    made, last = Made(case, blocks), case.seen + step
    assert made.rows.count_compressed(step) == case.compressed + 8 * blocks
    listed = list_some(case, last - 1, 10**6)
    expansion = draw_expansion(case, listed)
    angles = torch.randn(last + 1, case.turning // 2, generator=torch.Generator().manual_seed(6)).repeat(1, 2)
    cos, sin = (part.to(DEVICE, case.dtype) for part in (angles.cos(), angles.sin()))
    norm = None if case.norm is None else (case.draw(case.dim, seed=7).to(case.norm), 1e-6)
    queries = case.draw(case.batch, case.group * case.heads, 1, case.dim, seed=9)
    counts = torch.tensor([7, 0], device=DEVICE), torch.tensor(1, device=DEVICE)
    on_device = torch.tensor(step, dtype=torch.int32, device=DEVICE)
    poison_memory(monkeypatch)
    given = queries, listed, expansion, made.rows, cos, sin, on_device, 0.4
    found = attend_compressed(*given, norm=norm, counts=counts, implementation=implementation)
    room = reserve_weights(made.rows, queries.shape[1], implementation=implementation)
    assert torch.equal(found, attend_compressed(*given, norm=norm, weights=room, implementation=implementation))
    given = case, made, listed, expansion, case.compressed + 8 * blocks, last, cos, sin, norm
    keys, values, look = expect(*given)
    logits = queries.double() @ keys.repeat_interleave(case.group, 1).mT * 0.4
    weights = logits.masked_fill(~look, -torch.inf).softmax(-1)
    bound = {torch.float32: 1e-5, torch.float16: 2**-8, torch.bfloat16: 2**-4}[case.dtype]
    assert found.dtype == case.dtype
    exact = weights @ values.repeat_interleave(case.group, 1)
    torch.testing.assert_close(found.double(), exact, rtol=bound, atol=bound)
    assert counts[0].tolist() == [7, int(look.sum()) * case.group * case.heads]


EXTRAS = (
    "references and codes", "normed", "more heads than a program has", "more rows than a program has", "sinks to come",
)  # fmt: skip
"""Cases with several samples, heads, tiles of heads and programs for the rows of a head, and one without codes."""


@pytest.mark.parametrize(
    "case", [own if name in EXTRAS else only_in_full(own) for name, own in CASES.items()], ids=CASES
)
def test_sinks_and_caps(case):
    """As in the reference, which `test_references` compares with the definition."""
    made, listed = Made(case, 0), list_some(case, case.seen - 1, 10**6)
    angles = torch.randn(case.seen + 1, case.turning // 2, generator=torch.Generator().manual_seed(6)).repeat(1, 2)
    norm = None if case.norm is None else (case.draw(case.dim, seed=7).to(case.norm), 1e-6)
    queries = case.draw(case.batch, case.group * case.heads, 1, case.dim, seed=9)
    sinks = torch.linspace(-2, 5, queries.shape[1], device=DEVICE, dtype=case.dtype)
    cos, sin = (part.to(DEVICE, case.dtype) for part in (angles.cos(), angles.sin()))
    step = torch.tensor(0, dtype=torch.int32, device=DEVICE)
    given = queries, listed, draw_expansion(case, listed), made.rows, cos, sin, step, 0.4
    plain, found, expected = (
        attend_compressed(*given, norm=norm, extras=extras, implementation=name).double()
        for name, extras in [
            ("reference", None),
            *((name, SoftmaxExtras(sinks, 0.7)) for name in ("triton", "reference")),
        ]
    )
    bound = {torch.float32: 1e-5, torch.float16: 2**-8, torch.bfloat16: 2**-4}[case.dtype]
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
    assert (found - plain).abs().max() > bound


@BOTH
def test_many_equal_weights_add_up(implementation):
    """200 rows share one base. Their weights do not overflow half precision, whose numbers end at 65,504."""
    case = Case(dtype=torch.float16, compressed=240, seen=255, codes=None, nearest=1, batch=1, heads=1)
    made, step = Made(case, 0), torch.tensor(0, dtype=torch.int32, device=DEVICE)
    made.rows.references[:, :200] = 5
    listed, angles = torch.arange(255, device=DEVICE)[None], torch.zeros(300, 16, dtype=torch.float16, device=DEVICE)
    queries = torch.zeros(1, 2, 1, 16, dtype=torch.float16, device=DEVICE)
    given = queries, listed, None, made.rows, angles + 1, angles, step, 1.0
    values = made.kv[:, :256, 16:].double()
    values[:, 4:244] = made.rows.bases[0, made.rows.references[0, :, 0].long(), 16:].double()
    found = attend_compressed(*given, implementation=implementation)
    torch.testing.assert_close(found[0, 0].double(), values.mean(1), rtol=2e-3, atol=2e-4)


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


@BOTH
def test_small_weights_add_up(implementation):
    """In half precision 12 rows with the weight 2^-16 and large values count beside one of weight 1 and value 0."""
    case = Case(dtype=torch.float16, compressed=240, seen=255, codes=None, nearest=1, batch=1, heads=1)
    made, step = Made(case, 0), torch.tensor(0, dtype=torch.int32, device=DEVICE)
    listed = torch.tensor([[0, *range(244, 255)]], device=DEVICE)  # none of them is compressed
    made.rows.raw[0, :11, :16] = made.rows.bases[0, 0, :16] = made.rows.raw[0, 11, :16] = 0
    made.rows.raw[0, :12, 0] = -16 * 0.6931  # the logit of one, with a query of 1; the last one is the token's own row
    made.rows.bases[0, 0, 16:], made.rows.raw[0, :12, 16:] = 0, 4096
    queries = torch.zeros(1, 1, 1, 16, dtype=torch.float16, device=DEVICE)
    queries[..., 0] = 1
    angles = torch.zeros(300, 16, dtype=torch.float16, device=DEVICE)
    found = attend_compressed(
        queries, listed, None, made.rows, angles + 1, angles, step, 1.0, implementation=implementation
    )
    exact = 12 * 4096 * 2**-16 / (1 + 12 * 2**-16)
    torch.testing.assert_close(found, torch.full_like(found, exact), rtol=1e-2, atol=0)


@BOTH
@pytest.mark.parametrize("codes", [16, None])
def test_a_number_that_is_none_is_seen(codes, implementation):
    """A key that is not a number reaches the outputs of its head, and no others."""
    case, step = Case(batch=1, codes=codes), torch.tensor(0, dtype=torch.int32, device=DEVICE)
    made = Made(case, 0)
    listed, angles = torch.arange(34, device=DEVICE)[None], torch.ones(40, 16, device=DEVICE)
    expansion = draw_expansion(case, listed)
    made.rows.raw[0, 2, 3] = torch.nan
    queries = case.draw(1, 4, 1, 16, seed=9)
    given = queries, listed, expansion, made.rows, angles, angles, step, 1.0
    found = attend_compressed(*given, implementation=implementation)
    assert found[0, :2].isnan().all() and found[0, 2:].isfinite().all()


def test_what_does_not_fit_is_refused():
    case, step = Case(), torch.tensor(0, dtype=torch.int32, device=DEVICE)
    made = Made(case, 0)
    zeros = partial(torch.zeros, device=DEVICE)
    listed, codes, angles = zeros(2, 3, dtype=torch.int64), zeros(2, 19, 5), zeros(50, 16)
    queries, expansion = zeros(2, 4, 1, 16), Expansion(codes[..., :3], codes, zeros(3, 5))

    alone = replace(made.rows, references=None, more_references=None)

    def attend(*, queries=queries, listed=listed, expansion=None, rows=made.rows, cos=angles, sin=angles, **more):
        return attend_compressed(queries, listed, expansion, rows, cos, sin, step, 1.0, **more)

    for message, call in (
        ("take_codes: codes", lambda: take_codes(listed, codes[:, :3], codes, made.rows, step)),
        ("take_codes: codes", lambda: take_codes(listed, codes, codes[..., :2], made.rows, step)),
        ("take_codes: listed", lambda: take_codes(listed[:1], codes, codes, made.rows, step)),
        ("expansion: keys", lambda: replace(expansion, keys=codes[:, :3, :3])),
        ("expansion: keys", lambda: replace(expansion, inner=codes[..., :4])),
        ("expansion: keys", lambda: replace(expansion, weight=zeros(4, 5))),
        ("attend_compressed: keys", lambda: attend(expansion=expansion)),
        ("attend_compressed: queries", lambda: attend(queries=queries[:1])),
        ("attend_compressed: queries", lambda: attend(queries=queries[:, :3])),
        ("attend_compressed: queries", lambda: attend(queries=queries[..., :15])),
        ("attend_compressed: queries", lambda: attend(queries=queries.expand(2, 4, 2, 16))),
        ("attend_compressed: cos", lambda: attend(cos=angles[:, :4])),
        ("attend_compressed: cos", lambda: attend(cos=angles.repeat(1, 2), sin=angles.repeat(1, 2))),
        ("attend_compressed: listed", lambda: attend(listed=listed.float())),
        ("attend_compressed: compressed rows", lambda: attend(rows=alone)),
        ("attend_compressed: weights", lambda: attend(weights=listed[None], implementation="triton")),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            call()
    for change in ({"references": None}, {"block": 0}, {"compressed": 18}, {"raw": made.rows.raw[..., :3]}):
        with pytest.raises(ValueError, match="^referenced rows: "):
            replace(made.rows, **change)


def ahead():
    from kvbench.kernels.reconstruction.triton import _finish, _gather, _spread, _take, _weigh

    int64, int32, single = "*i64", "*i32", "fp32"
    for dtype, norm, change in (
        ("bf16", False, {}),
        ("bf16", False, {"NEAREST": 0}),
        ("bf16", False, {"DECODED": False}),
        ("bf16", True, {}),
        ("fp32", True, {}),
    ):
        floats = ("queries", "decoded", "inner", "bases", "more_bases", "raw", "cos", "sin", "scale", "weight")
        kinds = dict.fromkeys((*floats, "outputs"), f"*{dtype}")
        kinds |= dict.fromkeys(("logits", "part_sum", "part_out", "sums"), "*fp32")
        kinds |= dict.fromkeys(("listed", "counted", "counts", "number", "part_total"), int64) | {"step": int32}
        kinds |= {"references": int32 if norm else "*i16", "more_references": int32}
        kinds |= {"factor": single, "epsilon": single}
        tile, run = 32 if dtype == "fp32" else 64, {"num_warps": 4, "num_stages": 3}
        both, decoded = {"NEAREST": change.get("NEAREST", 4), "CAST": False}, change.get("DECODED", True)
        one = {"DECODED": decoded, "NORM": norm, "REST": norm, "COUNT": True, "HEADS": 4, "M": 16, "N": 32}
        one["CAP"] = 50.0 if norm else None
        halves = {"HALF": 48 if norm else 64, "H": 64, "R": 32}
        yield list_typed_kernel(_weigh, kinds, both | one | halves | run | {"num_stages": 1})
        yield list_typed_kernel(_spread, kinds, both | {"M": 32, "N": 4, "L": 32, "Z": 128, "SHARE": 4} | run)
        one = {"DIM": 128, "M": 16, "G": 4, "N": tile, "D": 128, "Z": 128, "S": 128}
        yield list_typed_kernel(_gather, kinds, both | one | run)
        one = {"NEAREST": both["NEAREST"], "DECODED": decoded, "C": 32, "Z": 512, "S": 32}
        kinds["sinks"], one = f"*{dtype}", one | ({} if norm else {"sinks": None})
        yield list_typed_kernel(_finish, kinds, one | {"num_warps": 4})
    for dtype in ("*bf16", "*u8"):
        kinds = dict.fromkeys(("codes", "more", "out"), dtype) | {"listed": int64, "step": int32}
        yield list_typed_kernel(_take, kinds, {"ROWS": 16, "W": 512, "num_warps": 4, "num_stages": 3})

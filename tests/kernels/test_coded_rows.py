"""Rows as codes: rounding against its formulas, and attention over codes against rows that are read back."""

import math
from dataclasses import dataclass, replace

import pytest
import torch

from kvbench.kernels.coded_rows import (
    CodedRows,
    CodedSide,
    Form,
    append_newest,
    attend_coded,
    decode,
    encode,
    make_hadamard,
    round_in_place,
)
from kvbench.kernels.rope_append import append
from kvbench.kernels.softmax_extras import SoftmaxExtras
from tests.support.compile_kernels import list_kernel
from tests.support.kernel_checks import BOTH, DTYPES
from tests.support.selection import choose_quick

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NORMAL = (0.128, 0.388, 0.657, 0.942, 1.256, 1.618, 2.069, 2.733)
LEVELS = {  # about those of normal numbers, and some that are not the same for both signs
    4: tuple(n / 6 for n in (*(-size for size in reversed(NORMAL)), *NORMAL)),
    3: (-0.4, -0.25, -0.1, -0.05, 0.02, 0.1, 0.3, 0.5),
    2: (-0.3, -0.1, 0.1, 0.3),
}
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
FORMS = {
    "fp8": Form("e4m3"),
    "fp8 of rows": Form("e4m3", "largest", least=1e-6),
    "int8": Form("int8", "largest", least=1e-6),
    "int8 around the middle": Form("int8", "middle", stored=torch.float16),
    "int4": Form("uint4", "range", least=1e-5, stored=torch.float16),
    "int4 in groups": Form("uint4", "range", group=16, least=1e-5, stored=torch.float16),
    "int8 in groups": Form("int8", "largest", group=8, least=1e-6),
    "int8 truncated": Form("int8", "largest", least=1e-6, rounding="cut"),
    "int4 with a point": Form("uint4", "point", least=15e-6, rounding="up"),
    "int4 with points": Form("uint4", "point", group=8, least=15e-6, rounding="up", clip=0.9),
    "int4 clipped": Form("uint4", "range", clip=0.8, stored=torch.float16),
    "e5m2": Form("e5m2", "largest", least=1e-6, stored=torch.float16),
    "nvfp4": Form("e2m1", "largest", group=16, stored=E4M3, wide=True),
    "nvfp4 of 32": Form("e2m1", "largest", group=32, stored=E4M3),
    "mxfp4": Form("e2m1", "power_below", group=32, least=2.0**-124, stored=E8M0, wide=True),
    "sglang": Form("e2m1", "power", group=16, least=1e-10, stored=E8M0, rounding="up"),
    "e2m1 in groups": Form("e2m1", "largest", group=8, stored=torch.float16),
    "e2m1 of rows": Form("e2m1", "largest", least=1e-6),
    "int8 by powers": Form("int8", "power", group=16, least=1e-6, stored=E8M0),
    "fp8 of rows by e4m3": Form("e4m3", "largest", stored=E4M3),
    "fp8 of rows by a power": Form("e4m3", "power", least=1e-6, stored=E8M0),
    "16 levels": Form("levels", "norm", stored=torch.float16, rounds_by_stored=False, levels=LEVELS[4], normed=True),
    "16 levels as they are": Form("levels", "norm", stored=torch.float16, rounds_by_stored=False, levels=LEVELS[4]),
    "8 levels": Form("levels", "norm", stored=torch.float16, rounds_by_stored=False, levels=LEVELS[3], normed=True),
    "8 levels in groups": Form("levels", "norm", group=16, stored=torch.float16, levels=LEVELS[3], normed=True),
    "4 levels": Form("levels", "norm", stored=torch.float16, levels=LEVELS[2]),
    "3 bits": Form("uint3", "range", least=1e-7, stored=torch.float16, rounds_by_stored=False, rounding="up"),
    "3 bits in groups": Form("uint3", "range", group=8, least=1e-7, stored=torch.float16),
    "2 bits": Form("uint2", "range", stored=torch.float16, wide=True),
    "8 bits in groups": Form("uint8", "range", group=16, stored=torch.float16, wide=True),
    "int4 in pairs": Form("uint4", "range", group=2, least=1e-5, stored=torch.float16),
}


QUICK = "sinks and a cap", "int4, turned", "int8", "odd bytes"


def draw(*size: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def make_turn(kind: str | None, dim: int) -> torch.Tensor | None:
    """A Hadamard matrix, one of random "signs", or a random "rotation"."""
    if kind == "rotation":
        return torch.linalg.qr(draw(dim, dim, seed=7).double().cpu())[0].to(
            DEVICE, torch.float32
        )  # columns first in memory
    return kind and make_hadamard(dim, 5 if kind == "signs" else None, torch.device(DEVICE))


@dataclass(frozen=True)
class Case:
    """Heads of several lengths, the forms of keys and values, and the tokens that follow."""

    keys: str = "fp8"
    values: str = "fp8"
    lengths: tuple[tuple[int, ...], ...] = ((40, 3),)
    queries: int = 2
    dim: int = 32
    tokens: int = 2
    rounds: bool = False
    turned: str | None = None
    merged: bool = False
    factor: float | tuple[float, ...] = 1.0
    """Of all rows, or of the rows of each head, flat (B·H,)."""
    extras: SoftmaxExtras | None = None
    dtype: torch.dtype = torch.float32


CASES = {
    "sinks and a cap": Case(factor=(0.5, 0.03), extras=SoftmaxExtras(torch.linspace(-1, 2, 4, device=DEVICE), 1.5)),
    "fp8": Case(factor=0.5),
    "fp8 of heads": Case(lengths=((70, 3), (129, 64)), tokens=3, factor=(0.5, 0.03, 2.0, 0.3)),
    "fp8 of heads, rounded": Case(factor=(0.5, 0.03), rounds=True, dim=48, dtype=torch.bfloat16),
    "fp8 of rows, rounded": Case("fp8 of rows", "fp8 of rows", rounds=True, dim=48),
    "int8": Case("int8", "int8 around the middle", merged=True),
    "int4, turned": Case("int4", "int4", turned="hadamard", rounds=True, queries=3),
    "int4 and fp8": Case("int4", "fp8", dtype=torch.bfloat16, dim=64),
    "groups": Case("int4 in groups", "int8 in groups", ((66, 3),), turned="rotation", dtype=torch.bfloat16),
    "points": Case("int4 with a point", "int4 with a point", turned="signs", rounds=True, factor=0.5),
    "points of groups": Case("int4 with points", "int4 with points", rounds=True, merged=True),
    "e5m2": Case("e5m2", "e5m2", dim=48, dtype=torch.bfloat16),
    "odd bytes": Case("int4", "int4", ((9, 3),), dim=18),
    "groups of values": Case("int8 in groups", "int4 in groups", rounds=True),
}
WAITING = {  # forms of codecs that round many rows at once; test_raw_windows.py has their cases
    "2 bits, shifted": Form("uint2", "shift", stored=torch.float16),
    "2 bits in groups of 64": Form("uint2", "range", group=64, stored=torch.float16),
    "8 bits, shifted": Form("uint8", "shift", stored=torch.float16),
    "8 bits in groups of 64": Form("uint8", "shift", group=64, stored=torch.float16),
}
CASES |= {
    "nvfp4": Case("nvfp4", "nvfp4", dim=64, factor=(0.5, 0.03), rounds=True),
    "nvfp4 in 16 bits": Case("nvfp4", "nvfp4", dim=128, dtype=torch.bfloat16, merged=True),
    "nvfp4 of 32": Case("nvfp4 of 32", "nvfp4", dim=96, queries=3),
    "mxfp4": Case("mxfp4", "mxfp4", dim=64, merged=True),
    "mxfp4 in 16 bits": Case("mxfp4", "sglang", ((66, 3),), dim=64, dtype=torch.bfloat16),
    "sglang": Case("sglang", "sglang", dim=80, extras=SoftmaxExtras(torch.linspace(-1, 2, 4, device=DEVICE), 1.5)),
    "e2m1": Case("e2m1 in groups", "e2m1 of rows", dtype=torch.bfloat16),
    "scales of 8 bits": Case("fp8 of rows by e4m3", "fp8 of rows by a power"),
    "powers": Case("int8 by powers", "fp8 of rows by a power", dtype=torch.bfloat16),
    "16 levels": Case("16 levels", "16 levels", dim=64, turned="hadamard", rounds=True),
    "16 levels in 16 bits": Case("16 levels", "16 levels as they are", dim=128, dtype=torch.bfloat16, turned="signs"),
    "16 levels as they are": Case("16 levels as they are", "int4", dim=72, merged=True),
    "8 levels": Case("8 levels", "8 levels", dim=64, turned="signs"),
    "8 levels in 16 bits": Case("8 levels", "3 bits", dim=128, dtype=torch.bfloat16),
    "8 levels in groups": Case("8 levels in groups", "8 levels in groups", dim=80, queries=3),
    "4 levels": Case("4 levels", "4 levels", dim=32),
    "3 bits": Case("fp8", "3 bits", dim=72, factor=(0.5, 0.03)),
    "3 bits in groups": Case("3 bits in groups", "3 bits in groups", dim=40),
    "pairs": Case("int4 in pairs", "int4 in pairs"),
    "2 and 8 bits": Case("2 bits", "8 bits in groups"),
}


def round_newest(queries: torch.Tensor, rows: CodedRows, step: torch.Tensor, implementation: str) -> torch.Tensor:
    """What `append_newest` does with keys, values and queries (B, Hq, 1, d) that are not to be rotated."""
    keys, values = (side.flatten(1).clone() for side in rows.newest)
    cos, sin = queries.new_ones(int(step) + 1, 2), queries.new_zeros(int(step) + 1, 2)
    return append_newest(queries.flatten(1), keys, values, cos, sin, rows, step, implementation=implementation)


class Run:
    """Rows as codes with memory for further tokens."""

    def __init__(self, case: Case):
        self.case, self.lengths = case, torch.tensor(case.lengths, device=DEVICE)
        count, (batch, heads) = int(self.lengths.sum()), self.lengths.shape
        turn = make_turn(case.turned, case.dim)
        self.raw = [draw(count, case.dim, seed=side, dtype=case.dtype) for side in range(2)]
        sides, factors = [], case.factor
        if isinstance(factors, tuple):
            factors = torch.tensor(factors, device=DEVICE).view(batch, heads)
        for name, raw in zip((case.keys, case.values), self.raw, strict=True):
            form = FORMS[name]
            held = encode(raw, form, self.spread(factors), turn)
            more = tuple(part.new_zeros(batch, heads, case.tokens, *part.shape[1:]) for part in held)
            sides.append(CodedSide(form, held, more, factors, turn))
        starts = (self.lengths.flatten().cumsum(0) - self.lengths.flatten()).view_as(self.lengths)
        mass = torch.arange(1, count + 1, device=DEVICE) if case.merged else None
        newest = torch.empty(2, batch, heads, case.dim, device=DEVICE, dtype=case.dtype)
        self.rows = CodedRows(*sides, self.lengths, starts, int(self.lengths.max()), mass, newest, case.rounds)

    def spread(self, factors: float | torch.Tensor) -> float | torch.Tensor:
        """The factor of each row."""
        if isinstance(factors, float):
            return factors
        return factors.flatten().repeat_interleave(self.lengths.flatten())[:, None]

    def attend(self, step: int, implementation: str) -> torch.Tensor:
        batch, heads = self.lengths.shape
        queries = draw(batch, heads * self.case.queries, 1, self.case.dim, seed=90 + step, dtype=self.case.dtype)
        self.rows.newest.copy_(draw(*self.rows.newest.shape, seed=50 + step, dtype=self.case.dtype))
        count = torch.tensor(step, dtype=torch.int32, device=DEVICE)
        queries = round_newest(queries, self.rows, count, implementation)
        return attend_coded(queries, self.rows, 0.3, count, extras=self.case.extras, implementation=implementation)

    def expect(self, step: int) -> torch.Tensor:
        """The outputs in float64 over the rows that are read back, without turns."""
        case, (batch, heads) = self.case, self.lengths.shape
        queries = draw(batch, heads * case.queries, 1, case.dim, seed=90 + step, dtype=case.dtype).double()
        new = [draw(2, batch, heads, case.dim, seed=50 + token, dtype=case.dtype) for token in range(step + 1)]
        outputs = torch.empty_like(queries)
        for b in range(batch):
            for h in range(heads):
                start, length = int(self.rows.starts[b, h]), int(self.lengths[b, h])
                rows = []
                for number, side in enumerate((self.rows.keys, self.rows.values)):
                    raw = torch.cat(
                        [self.raw[number][start : start + length], *(token[number, b, h][None] for token in new)]
                    )
                    factor = side.factor if isinstance(side.factor, float) else float(side.factor[b, h])
                    read = decode(
                        encode(raw, side.form, factor, side.turn), side.form, torch.float64, factor, side.turn
                    )
                    rows.append(read if case.rounds else torch.cat([read[:-1], raw[-1:].double()]))
                heads_of = slice(h * case.queries, (h + 1) * case.queries)
                logits = queries[b, heads_of, 0] @ rows[0].T * 0.3
                if case.extras is not None:
                    logits = case.extras.cap * (logits / case.extras.cap).tanh()
                if self.rows.mass is not None:
                    logits[:, :length] += self.rows.mass[start : start + length].double().log()
                weights = logits.softmax(-1)
                if case.extras is not None:  # a further row without a value
                    sinks = case.extras.sinks[heads_of].double()[:, None]
                    weights = torch.cat([logits, sinks], 1).softmax(-1)[:, :-1]
                outputs[b, heads_of, 0] = weights @ rows[1]
        return outputs


@BOTH
@pytest.mark.parametrize("name", choose_quick(CASES, *QUICK))
def test_a_token_attends_to_what_codes_stand_for(implementation, name):
    case = CASES[name]
    run = Run(case)
    last = 0 if case.dtype == torch.float32 else torch.finfo(case.dtype).eps  # of an output
    tolerance = (
        2e-5 if case.dtype == torch.float32 else 3e-2 if case.turned else 1e-2
    )  # turned outputs are rounded twice
    for step in range(case.tokens):
        torch.testing.assert_close(
            run.attend(step, implementation).double(),
            run.expect(step),
            atol=tolerance,
            rtol=last,
            msg=lambda m, step=step: f"step {step}: {m}",
        )


@pytest.mark.parametrize("keys, values", [([*FORMS][i], [*FORMS][i - 1]) for i in range(0, len(FORMS), 2)])
def test_every_form_is_read(keys, values):
    run = Run(Case(keys, values, lengths=((9,),)))
    run.attend(0, "reference")
    torch.testing.assert_close(run.attend(1, "triton").double(), run.expect(1), atol=2e-5, rtol=0)


@BOTH
@pytest.mark.parametrize("name", FORMS)
def test_a_token_is_rounded_as_held_rows_are(implementation, name):
    """The codes, scales and zeros are the same numbers."""
    run = Run(Case(name, name, lengths=((5,),)))
    new = draw(*run.rows.newest.shape, seed=51)
    run.rows.newest.copy_(new)
    round_newest(draw(1, 2, 1, 32, seed=9), run.rows, torch.tensor(1, device=DEVICE), implementation)
    for number, side in enumerate((run.rows.keys, run.rows.values)):
        expected = encode(new[number].flatten(0, 1), side.form)
        for got, part in zip(side.more, expected, strict=True):
            assert torch.equal(got[:, :, 1].flatten(0, 1), part)


@pytest.mark.cover
@pytest.mark.parametrize(
    "name, dim",
    [(name, dim) for name, form in FORMS.items() for dim in (48, 32) if not form.group or dim % form.group == 0],
)
def test_rows_are_rounded_as_by_the_definition(name, dim):
    """Codes, scales and zeros are the same bits, and so is what they are read as; sums may differ by their last bit."""
    form = FORMS[name]
    rows = draw(19, dim, seed=3) * torch.logspace(-6, 2, 19, device=DEVICE)[:, None]
    rows[7], rows[9, :16] = 0, torch.linspace(-5, 6, 16)  # 6 is the largest e2m1
    rows[7, ::2] = -0.0
    factors = 0.1 + torch.rand(19, 1, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    last = dict(rtol=1e-6, atol=1e-7)
    for given, factor in ((rows.bfloat16(), 0.3), (rows, factors)):
        expected = encode(given, form, factor, implementation="reference")
        for part, wanted in zip(encode(given, form, factor, implementation="triton"), expected, strict=True):
            torch.testing.assert_close(part.float(), wanted.float(), rtol=1e-3 if form.scale == "norm" else 0, atol=0)
        read = [decode(expected, form, torch.float32, factor, implementation=name) for name in ("reference", "triton")]
        torch.testing.assert_close(*read, **(last if form.normed else dict(rtol=0, atol=0)))


@pytest.mark.parametrize("broken", choose_quick([torch.nan, torch.inf, -torch.inf], torch.nan))
@pytest.mark.parametrize("name", FORMS)
def test_rows_with_numbers_that_are_none_read_as_by_the_definition(name, broken, recwarn):  # numpy warns of them
    form, rows = FORMS[name], draw(3, 32, seed=3)
    rows[1, 5] = broken
    parts = [encode(rows, form, implementation=which) for which in ("triton", "reference")]
    read = [decode(part, form, torch.float32, implementation="reference") for part in parts]
    torch.testing.assert_close(*read, rtol=1e-3, atol=0, equal_nan=True)
    assert read[0].isnan().any(1).tolist() == [False, bool(read[1][1].isnan().any()), False]
    assert not math.isnan(broken) or read[0][1].isnan().any()


@pytest.mark.parametrize("name", ["2 bits", "8 bits in groups"])
def test_shifted_codes_are_read(name):
    form, rows = FORMS[name], draw(5, 32, seed=3)
    shifted = replace(form, scale="shift")
    parts = encode(rows, form, implementation="reference")
    read = [decode(parts, shifted, torch.float32, implementation=which) for which in ("triton", "reference")]
    torch.testing.assert_close(*read, rtol=0, atol=0)
    with pytest.raises(ValueError, match="encode: rows with a shift are rounded by their codec"):
        encode(rows, shifted)


@pytest.mark.parametrize("name", ["nvfp4", "sglang"])
def test_every_scale_of_8_bits_is_read(name):
    form = FORMS[name]
    codes = torch.full((256, 8), 0xA2, dtype=torch.uint8, device=DEVICE)
    scales = torch.arange(256, device=DEVICE).to(torch.uint8)[:, None].view(form.stored)
    read = [decode((codes, scales), form, torch.float32, implementation=which) for which in ("triton", "reference")]
    torch.testing.assert_close(*read, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "name, turned, dtype",
    [
        *(("int4", turned, dtype) for turned in ("hadamard", "signs", "rotation") for dtype in DTYPES),
        *((name, "signs", torch.bfloat16) for name in ("fp8", "int4 with points", "nvfp4", "16 levels")),
    ],
)
def test_turned_rows_have_other_codes_at_borders_only(name, turned, dtype):
    """The order of a turn's sums may move a number over a border, and its code then is the next one."""
    form, turn, factor = FORMS[name], make_turn(turned, 32), 0.3
    rows = draw(70, 32, seed=4, dtype=dtype)
    exact = rows.double() @ turn.double()
    parts = [encode(rows, form, factor, turn, implementation=which) for which in ("reference", "triton")]
    reference, triton = (decode(part, form, torch.float64, factor) for part in parts)
    for wrong in ((exact - reference).abs(), (exact - triton).abs()):
        assert wrong.max() < 2 * exact.abs().max()
    moved = (reference - triton).abs() > 1e-5 * exact.abs().max()
    away = ((exact - reference).abs() - (exact - triton).abs()).abs()
    assert moved.double().mean() < 0.01 and (away[moved] < 1e-5 * exact.abs().max()).all()
    read = [decode(parts[0], form, torch.float32, factor, turn, implementation=w) for w in ("reference", "triton")]
    torch.testing.assert_close(*read, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["16 levels", "int8"])
def test_rows_narrower_than_a_product_are_turned(name):
    """A product of tensor cores has 16 channels; what it fills up is no part of a row's norm or largest size."""
    form, rows, turn = FORMS[name], draw(5, 8, seed=1), make_turn("signs", 8)
    parts = [encode(rows, form, 1.0, turn, implementation=which) for which in ("reference", "triton")]
    assert torch.equal(parts[0][0], parts[1][0])
    torch.testing.assert_close(parts[0][1], parts[1][1], rtol=1e-3, atol=0)


def test_groups_without_a_tile_are_the_definition():
    form, rows = Form("int8", "largest", group=24), draw(5, 48, seed=1)
    with pytest.raises(ValueError, match="encode: implementation triton needs groups of a power of two, not of 24"):
        encode(rows, form, implementation="triton")
    parts = encode(rows, form)
    assert parts[1].shape == (5, 2) and (decode(parts, form, torch.float32) - rows).abs().max() < 0.02


def test_rows_wider_than_tiles_are_turned_before(monkeypatch):
    from kvbench.kernels.coded_rows import rounding

    monkeypatch.setattr(rounding, "WIDEST", 16)
    form, rows, turn = FORMS["int8"], draw(5, 32, seed=1, dtype=torch.bfloat16), make_turn("signs", 32)
    parts = encode(rows, form, 1.0, turn, implementation="triton")
    for part, wanted in zip(parts, encode(rows, form, 1.0, turn, implementation="reference"), strict=True):
        assert torch.equal(part, wanted)
    both = [decode(parts, form, torch.float32, 1.0, turn, implementation=name) for name in ("triton", "reference")]
    assert torch.equal(*both)


@BOTH
@pytest.mark.parametrize("name", choose_quick(FORMS, "int4"))
@pytest.mark.parametrize("rounds", choose_quick([True, False], True))
def test_a_row_with_nan_stays_so(implementation, name, rounds):
    """A number that is none must not become one: it marks the outputs of its head, and of no other."""
    run = Run(Case(name, name, lengths=((5, 3), (6, 4)), rounds=rounds))
    for side in (0, 1):
        run.rows.newest.copy_(draw(*run.rows.newest.shape, seed=51))
        run.rows.newest[side, 1, 0, 5] = torch.nan
        queries = draw(2, 4, 1, 32, seed=9)
        count = torch.tensor(0, dtype=torch.int32, device=DEVICE)
        round_newest(queries, run.rows, count, implementation)
        parts = tuple(part[:, :, 0].flatten(0, 1) for part in (run.rows.keys, run.rows.values)[side].more)
        assert decode(parts, FORMS[name], torch.float32).isnan().any(1).tolist() == [False, False, True, False]
        run.rows.newest.zero_()
        outputs = attend_coded(queries, run.rows, 0.3, count + 1, implementation=implementation)
        assert outputs.isnan().flatten(2).any(2).tolist() == [[False] * 4, [True, True, False, False]]


@BOTH
@pytest.mark.parametrize("name", choose_quick(["nvfp4", "mxfp4", "16 levels", "3 bits"], "mxfp4"))
@pytest.mark.parametrize("side", [0, 1])
def test_a_row_with_nan_is_read_so(implementation, name, side):
    run = Run(Case(name, name, lengths=((9, 3),), dim=64, tokens=1))
    row = run.raw[side][4:5]
    row[0, 7] = torch.nan
    for held, part in zip((run.rows.keys, run.rows.values)[side].held, encode(row, FORMS[name]), strict=True):
        held[4:5] = part
    outputs = run.attend(0, implementation)
    assert outputs.isnan().flatten(2).any(2).tolist() == [[True, True, False, False]]


@BOTH
@pytest.mark.parametrize("case", ["fp8 of rows, rounded", "int4, turned", "groups"])
def test_a_token_is_rounded_in_place_to_what_is_read_back(implementation, case):
    run = Run(CASES[case])
    new = draw(*run.rows.newest.shape, seed=51, dtype=run.case.dtype)
    run.rows.newest.copy_(new)
    step = torch.tensor([1], device=DEVICE)
    round_in_place(run.rows, step, implementation=implementation)
    for number, side in enumerate((run.rows.keys, run.rows.values)):
        parts = encode(new[number].flatten(0, 1), side.form, side.factor, side.turn, implementation="reference")
        read = decode(parts, side.form, torch.float64, side.factor, side.turn)
        tolerance = 1e-5 if run.case.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(run.rows.newest[number].flatten(0, 1).double(), read, atol=tolerance, rtol=tolerance)
        for memory, part in zip(side.more, parts, strict=True):
            wrong = memory[:, :, 1].flatten(0, 1).double() - part.double()
            assert (wrong.abs() > 1e-3).double().mean() < 0.02  # a turned number on a border


@BOTH
@pytest.mark.parametrize("turned", [None, "signs", "rotation"])
@pytest.mark.parametrize("normed", [True, False])
def test_a_projected_token_is_rotated_and_rounded(implementation, turned, normed):
    """As if `append` wrote it raw, and it was rounded then."""
    case = Case("int4", "fp8", ((5, 3), (6, 4)), queries=3, tokens=3, rounds=normed, turned=turned)
    one, two = Run(case), Run(case)
    queries, keys, values = (draw(2, heads * 32, seed=heads) for heads in (6, 2, 12))
    values = values[:, :64]  # of a wider tensor
    cos, sin = draw(3, 16, seed=1).cos(), draw(3, 16, seed=1).sin()
    norms = (draw(32, seed=5), draw(32, seed=6), 1e-5) if normed else None
    step = torch.tensor(2, dtype=torch.int32, device=DEVICE)
    newest, slots = one.rows.newest[:, :, :, None], torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)
    asking = append(
        queries, keys, values, cos, sin, newest[0], newest[1], 0, step,
        slots=slots, norms=norms, implementation="reference",
    )  # fmt: skip
    asking = round_newest(asking, one.rows, step, "reference")
    given = append_newest(queries, keys, values, cos, sin, two.rows, step, norms=norms, implementation=implementation)
    torch.testing.assert_close(given, asking, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(two.rows.newest, one.rows.newest, rtol=1e-5, atol=1e-5)
    for side, other in ((one.rows.keys, two.rows.keys), (one.rows.values, two.rows.values)):
        for part, wanted in zip(other.more, side.more, strict=True):
            torch.testing.assert_close(part.float(), wanted.float(), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="coded rows: queries, keys, values"):
        append_newest(queries, keys[:, 1:], values, cos, sin, two.rows, step, implementation=implementation)


@BOTH
def test_a_rotated_key_is_rounded_from_the_dtype_that_it_has_in_other_caches(implementation):
    run = Run(Case("int8", "int8", ((5, 3), (6, 4)), dtype=torch.bfloat16))
    queries, keys, values, cos, sin = (draw(2, n, seed=n, dtype=torch.bfloat16) for n in (128, 64, 65, 30, 31))
    append_newest(
        queries, keys, values[:, :64], cos[:, :30], sin[:, :30], run.rows,
        torch.tensor(1, dtype=torch.int32, device=DEVICE), implementation=implementation,
    )  # fmt: skip
    for side, newest in zip((run.rows.keys, run.rows.values), run.rows.newest, strict=True):
        for part, wanted in zip(side.more, encode(newest.flatten(0, 1), side.form), strict=True):
            assert torch.equal(part[:, :, 1].flatten(0, 1), wanted)


def ahead():
    from kvbench.kernels.coded_rows import attend as reading

    kinds = {
        torch.uint8: "*u8",
        torch.int16: "*i16",
        torch.int32: "*i32",
        torch.float16: "*fp16",
        torch.float32: "*fp32",
    }

    def find_types(kernel, constants, dtype):
        special = {"step": "*i32", "lengths": "*i64", "starts": "*i64", "mass": "*i32", "scale": "fp32"}
        special |= {"key_factor": "fp32", "value_factor": "fp32", "queries": f"*{dtype}", "newest": f"*{dtype}"}
        special |= dict.fromkeys(constants, "constexpr") | dict.fromkeys(("part_acc", "part_max", "part_norm"), "*fp32")
        return {name: special.get(name, "i32") for name in kernel.arg_names}

    for name, other, dtype, dim in (
        ("fp8", "fp8", "bf16", 128), ("int8", "int8 around the middle", "bf16", 128), ("int4", "int4", "bf16", 128),
        ("int4 in groups", "int4 with points", "bf16", 128), ("int4", "int4", "fp32", 64),
        ("int4 with a point", "e5m2", "bf16", 128), ("nvfp4", "nvfp4", "bf16", 128), ("mxfp4", "sglang", "bf16", 128),
        ("e2m1 in groups", "e2m1 of rows", "bf16", 128), ("16 levels", "16 levels as they are", "bf16", 128),
        ("8 levels", "3 bits", "bf16", 128), ("8 levels in groups", "3 bits in groups", "bf16", 80),
        ("nvfp4", "8 levels", "fp32", 64), ("fp8", "mxfp4", "fp32", 64),
        ("2 bits, shifted", "2 bits in groups of 64", "bf16", 128),
        ("8 bits, shifted", "8 bits in groups of 64", "bf16", 128),
    ):  # fmt: skip
        made, types, waits = [], {}, name in WAITING
        for form in ((FORMS | WAITING)[name], (FORMS | WAITING)[other]):
            rows = torch.zeros(1, dim, device=DEVICE)
            held = encode(rows, replace(form, scale="range") if waits else form)
            side = CodedSide(form, held, held, 1.0, None)
            made.append(reading.make_reading(side, dim, dtype == "bf16"))
            given = tuple(kinds[part.dtype] for part in reading.list_words(side, True, made[-1]))
            types |= {f"{more}{('keys', 'values')[len(made) - 1]}": given for more in ("", "more_")}
        constants = {"KEY": made[0], "VALUE": made[1], "LIFT": 16.0, "MASS": True, "CAP": 2.0, "M": 16, "N": 64}
        constants |= {"LIKE": reading.tl.float32 if dtype == "fp32" else reading.tl.float16, "STAGES": 3}
        constants |= {"DIM": dim, "D": 128 if dim > 64 else 64, "EVERY": 128 if waits else 0}
        types = find_types(reading._attend, constants, dtype) | types
        yield reading._attend, types, constants, {"num_warps": 2, "num_stages": 3}
    yield from list_rounding()


def list_rounding():
    """The kernels that round: their types, and sides of the forms that codecs have."""
    from kvbench.kernels.coded_rows import rounding, turning

    f16, e4m3, e8m0 = torch.float16, torch.float8_e4m3fn, torch.float8_e8m0fnu
    sides = [
        (Form("uint4", "range", stored=f16), "hadamard", "*fp16"), (Form("uint4", "point", group=32), "none", "*fp32"),
        (Form("uint3", "range", stored=f16), "none", "*fp16"), (Form("e4m3"), "none", "*u8"),
        (Form("e2m1", "largest", group=16, stored=e4m3), "none", "*u8"),
        (Form("e2m1", "power", group=32, stored=e8m0, rounding="up"), "none", "*u8"),
        (FORMS["16 levels"], "matrix", "*fp16"),
    ]  # fmt: skip
    pointers = {"matrix": "*fp32", "codes": "*u8", "step": "*i32", "epsilon": "fp32"}
    read = ("rows", "out", "newest", "queries", "keys", "values", "cos", "sin", "query_norm", "key_norm")
    for form, turn, stored in sides:
        for dtype in ("*bf16", "*fp32") if turn != "none" else ("*bf16",):
            pointers |= dict.fromkeys(read, dtype) | {"scales": stored, "zeros": stored}
            each = form.code == "e4m3"
            pointers["factor"] = "*fp32" if each else "fp32"
            side = (*rounding.name_form(form, 128), ("turn", turn), ("factor", "each" if each else "all"))
            for kernel in (rounding._encode, rounding._decode):
                tile, warps = rounding.choose_rows(turn, 128, kernel is rounding._decode)
                yield list_kernel(kernel, pointers, {"SIDE": side, "DIM": 128, "D": 128, "N": tile}, num_warps=warps)
            both = {f"{which}_{name}": kind for name, kind in pointers.items() for which in ("key", "value")}
            sizes = {"KEY": side, "VALUE": side, "ROTATES": True, "NORM": True, "ROUNDS": True, "BACK": True}
            sizes, warps = sizes | {"DIM": 128, "D": 128}, turning.count_warps(turn)
            yield list_kernel(rounding._round_newest, pointers | both, sizes, num_warps=warps)
            if turn != "none":
                sizes = {"TURN": turn, "DIM": 128, "D": 128}
                yield list_kernel(turning._turn_back, pointers, sizes, num_warps=warps)

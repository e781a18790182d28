"""Attention over codes and over the newest rows, which are still raw, against the formulas in float64."""

from dataclasses import dataclass

import pytest
import torch

from kvbench.kernels.coded_rows import CodedRows, CodedSide, Form, RawWindow, attend_coded, encode, pack_codes
from kvbench.kernels.softmax_extras import SoftmaxExtras
from tests.support.kernel_checks import BOTH
from tests.support.selection import choose_quick

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = torch.tensor([[37, 0], [66, 5]])


@dataclass(frozen=True)
class Case:
    """How rows are rounded, and what else there is."""

    form: Form
    dim: int = 32
    queries: int = 2
    waiting: int = 0
    every: int = 5
    merged: bool = False
    extras: SoftmaxExtras | None = None
    dtype: torch.dtype = torch.float32


CASES = {
    "2 bits": Case(Form("uint2", "range", 16), waiting=3),
    "2 bits of rows, shifted": Case(Form("uint2", "shift"), dim=48, merged=True),
    "groups of a byte": Case(Form("uint2", "range", 4), dim=24, extras=SoftmaxExtras(torch.linspace(-1, 1, 4), 2.0)),
    "4 bits, shifted": Case(Form("uint4", "shift", 16), waiting=4, queries=3),
    "4 bits of rows, shifted": Case(Form("uint4", "shift"), every=2),
    "8 bits, shifted": Case(Form("uint8", "shift", 16), dtype=torch.bfloat16, every=70, waiting=69),
    "8 bits": Case(Form("uint8", "range"), dim=18, waiting=1),
}


def draw(*size: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


class Side:
    """Keys or values: codes with random steps, and the numbers that they stand for."""

    def __init__(self, case: Case, seed: int, tokens: int) -> None:
        draws, form, dim = torch.Generator().manual_seed(seed), case.form, case.dim
        (batch, heads), room = LENGTHS.shape, (case.waiting + tokens) // case.every * case.every
        count, groups = int(LENGTHS.sum()) + batch * heads * room, form.count_groups(dim)
        codes = torch.randint(0, 2**form.bits, (count, dim), generator=draws).to(torch.uint8)
        scale = (torch.rand(count, groups, generator=draws) + 0.1).to(case.dtype) / 2 ** (form.bits - 1)
        zero = torch.randn(count, groups, generator=draws)
        zero = (zero * 2 ** (form.bits - 2) if form.scale == "shift" else zero).to(case.dtype)
        numbers = codes.double().view(count, groups, dim // groups)
        if form.scale == "shift":
            numbers = (numbers - zero.double()[..., None]) * scale.double()[..., None]
        else:
            numbers = numbers * scale.double()[..., None] + zero.double()[..., None]
        split = [int(LENGTHS.sum()), batch * heads * room]
        held, more = zip(
            *(part.to(DEVICE).split(split) for part in (pack_codes(codes, form.bits), scale, zero)), strict=True
        )
        more = tuple(part.view(batch, heads, room, part.shape[1]) for part in more)
        self.side = CodedSide(form, held, more, 1.0, None)
        old, new = numbers.view(count, dim).to(DEVICE).split(split)
        self.held, self.more = old.split(LENGTHS.flatten().tolist()), new.view(batch * heads, room, dim)


@BOTH
@pytest.mark.parametrize("name", choose_quick(CASES, "2 bits", "groups of a byte", "8 bits, shifted"))
def test_a_token_attends_to_codes_and_to_the_raw_rows_behind_them(implementation, name):
    """Before, between and after two times that rows become codes, while the ring wraps."""
    case = CASES[name]
    (batch, heads), tokens = LENGTHS.shape, 2 * case.every + 1
    keys, values = (Side(case, seed, tokens) for seed in range(2))
    extras = case.extras and SoftmaxExtras(case.extras.sinks.to(DEVICE), case.extras.cap)
    raw = draw(2, batch, heads, case.waiting + tokens, case.dim, seed=5, dtype=case.dtype)
    window = RawWindow(torch.full_like(raw[:, :, :, : case.every + 2], torch.nan), case.waiting, case.every)
    lengths = LENGTHS.to(DEVICE)
    starts = (lengths.flatten().cumsum(0) - lengths.flatten()).view_as(lengths)
    mass = torch.arange(1, int(LENGTHS.sum()) + 1, device=DEVICE) if case.merged else None
    rows = CodedRows(keys.side, values.side, lengths, starts, int(LENGTHS.max()), mass, raw[:, :, :, 0], False, window)
    for row in range(case.waiting):
        window.ring[:, :, :, row % window.ring.shape[3]] = raw[:, :, :, row]
    for step in range(tokens):
        newest = case.waiting + step
        window.ring[:, :, :, newest % window.ring.shape[3]] = raw[:, :, :, newest]
        if step not in (0, case.every - case.waiting, 2 * case.every):
            continue
        queries = draw(batch, heads * case.queries, 1, case.dim, seed=90 + step, dtype=case.dtype)
        count = torch.tensor(step, dtype=torch.int32, device=DEVICE)
        outputs = attend_coded(queries, rows, 0.3, count, extras=extras, implementation=implementation)
        rounded = newest // case.every * case.every
        for head in range(batch * heads):
            b, h = divmod(head, heads)
            both = [
                torch.cat([side.held[head], side.more[head, :rounded], raw[n, b, h, rounded : newest + 1].double()])
                for n, side in enumerate((keys, values))
            ]
            which = slice(h * case.queries, (h + 1) * case.queries)
            logits = queries[b, which, 0].double() @ both[0].T * 0.3
            if extras is not None:
                logits = extras.cap * (logits / extras.cap).tanh()
            if mass is not None:
                length = int(lengths[b, h])
                logits[:, :length] += mass[int(starts[b, h]) :][:length].double().log()
            if extras is not None:  # a further row without a value
                logits = torch.cat([logits, extras.sinks[which].double()[:, None]], 1)
            weights = logits.softmax(-1)[:, : len(both[1])]
            expected, tolerance = weights @ both[1], 1e-4 if case.dtype == torch.float32 else 5e-2
            torch.testing.assert_close(outputs[b, which, 0].double(), expected, atol=tolerance, rtol=tolerance)


def test_rows_with_a_shift_are_rounded_by_their_codec():
    with pytest.raises(ValueError, match="^encode: rows with a shift"):
        encode(torch.zeros(2, 8), Form("uint4", "shift"))


def ahead():
    from kvbench.kernels.coded_rows.window import _attend_window

    special = dict.fromkeys(("part_acc", "part_max", "part_norm"), "*fp32") | {"step": "*i32", "scale": "fp32"}
    for dtype, cap in (("*bf16", None), ("*fp32", 2.0)):
        constants = {"EVERY": 128, "RING": 145, "CAP": cap, "CAST": False, "M": 16, "N": 32, "DIM": 96, "D": 128}
        types = special | {"queries": dtype, "ring": dtype} | dict.fromkeys(constants, "constexpr")
        types = {name: types.get(name, "i32") for name in _attend_window.arg_names}
        yield _attend_window, types, constants, {"num_warps": 4}

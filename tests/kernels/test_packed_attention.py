"""One token over quantized rows: both implementations against the definition in float64, while residuals fill."""

from dataclasses import dataclass, replace

import pytest
import torch

from kvbench.kernels.packed_attention import PackedRows, append_packed, attend_packed
from kvbench.kernels.packed_attention import triton as own
from kvbench.kernels.rope_append import append
from kvbench.kernels.softmax_extras import SoftmaxExtras
from kvbench.methods.codecs.kivi import GrowingKivi, Kivi
from tests.support.compile_kernels import list_typed_kernel
from tests.support.kernel_checks import BOTH, poison_memory
from tests.support.selection import only_in_full

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
AHEAD = 3


@dataclass(frozen=True)
class Case:
    """Heads of several lengths and what they are packed with. `tokens` further ones fill the residual."""

    lengths: tuple[tuple[int, ...], ...] = ((13, 16), (20, 31))
    queries: int = 1
    dim: int = 16
    bits: int = 2
    group: int = 8
    residual: int = 16
    tokens: int = 4
    merged: bool = False
    dtype: torch.dtype = torch.float32

    def draw(self, *size: int, seed: int) -> torch.Tensor:
        return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, self.dtype)


CASES = {
    "2 bits": Case(),
    "4 bits, bytes": Case(bits=4, group=2, residual=4, lengths=((13, 1),), tokens=5, queries=4),
    "words of 32 bits": Case(group=32, residual=32, dim=64, lengths=((70, 31),), tokens=2, queries=4),
    "4 bits, 32 rows": Case(bits=4, group=32, residual=64, dim=32, lengths=((130,), (63,)), tokens=2, queries=8),
    "merged": Case(merged=True, lengths=((40, 20),), tokens=2),
    "bfloat16": Case(dtype=torch.bfloat16, group=16, residual=32, dim=80, lengths=((70, 31),), tokens=2),
}
FULL = {
    "more words of 32 bits": Case(group=32, residual=32, dim=64, lengths=((150, 31),), tokens=2, queries=4),
    "4 bits, more than 32 rows": Case(
        bits=4, group=32, residual=64, dim=32, lengths=((190,), (63,)), tokens=3, queries=8
    ),
    "residual of 128": Case(group=32, residual=128, dim=128, lengths=((300, 127),), tokens=3, queries=4),
    "256 channels": Case(group=32, residual=32, dim=256, lengths=((100, 31),), tokens=2, queries=17),
    "24 rows": Case(bits=4, group=24, residual=48, dim=96, lengths=((200, 47),), tokens=3, queries=3),
    "three times the residual": Case(lengths=((3, 50),), group=4, residual=4, tokens=13),
    "float16": Case(dtype=torch.float16, queries=2),
}
EVERY = pytest.mark.parametrize(
    "case",
    [*CASES.values(), *map(only_in_full, FULL.values())],
    ids=[*CASES, *FULL],
)


def round_groups(x: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Numbers (…, n) rounded in groups along the last dimension, in float64."""
    grouped, top = x.double().unflatten(-1, (-1, group)), 2**bits - 1
    zero = grouped.amin(-1, True).half().double()
    scale = ((grouped.amax(-1, True) - grouped.amin(-1, True)) / top).half().double()
    return (((grouped - zero) / scale).clamp(0, top).round() * scale + zero).flatten(-2)


def pack_as_defined(keys: torch.Tensor, values: torch.Tensor, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """What a head's rows (n, d) are attended as, in float64 but for the rounding to the model's dtype."""
    count = len(keys)
    of_keys, of_values = count - count % case.residual, max(0, count - case.residual)
    packed = (
        round_groups(keys[:of_keys].mT, case.bits, case.group).mT,
        round_groups(values[:of_values], case.bits, case.group),
    )
    rounded = [part.float().to(case.dtype).double() for part in packed]
    return torch.cat([rounded[0], keys[of_keys:].double()]), torch.cat([rounded[1], values[of_values:].double()])


class Run:
    """Rows in memory for further tokens, and the same rows raw, by head."""

    def __init__(self, case: Case):
        self.case, lengths = case, torch.tensor(case.lengths, device=DEVICE)
        self.heads = [
            case.draw(2, length, case.dim, seed=index) for index, length in enumerate(lengths.flatten().tolist())
        ]
        codec = Kivi("kivi", case.bits, case.group, case.residual)
        self.held = codec.pack(*(torch.cat([head[part] for head in self.heads]) for part in range(2)), lengths)
        total = int(lengths.sum())
        self.mass = None
        if case.merged:
            draw = torch.Generator().manual_seed(5)
            self.mass = torch.randint(1, 900, (total,), generator=draw, dtype=torch.int16).to(DEVICE)
        self.growing = GrowingKivi(self.held, case.tokens, AHEAD, self.mass)
        self.growing.begin()
        self.lengths = lengths
        turns = torch.randint(4, (case.tokens, case.dim // 4), generator=torch.Generator().manual_seed(6)).repeat(1, 2)
        exact = torch.tensor([[1, 0, -1, 0], [0, 1, 0, -1]], device=DEVICE, dtype=case.dtype)  # nothing is rounded
        self.angles = tuple(exact[:, turns.to(DEVICE)])  # cosines and sines of quarter turns

    def project(self, step: int) -> list[torch.Tensor]:
        batch, heads = self.lengths.shape
        widths = (heads * self.case.queries, heads, heads)
        return [self.case.draw(batch, n * self.case.dim, seed=50 + 3 * step + i) for i, n in enumerate(widths)]

    def attend(self, step: int, implementation: str, extras: SoftmaxExtras | None = None) -> torch.Tensor:
        count = torch.tensor(step, dtype=torch.int32, device=DEVICE)
        return self.growing.attend(*self.project(step), self.angles, count, 0.3, None, implementation, extras)

    def expect(self, step: int) -> torch.Tensor:
        """The outputs by the definition, which reads the token behind the raw rows."""
        (batch, heads), dim = self.lengths.shape, self.case.dim
        tail = [torch.empty(batch, heads, 1, dim, dtype=self.case.dtype, device=DEVICE) for _ in range(2)]
        none = torch.zeros((), dtype=torch.int32, device=DEVICE)
        angles = [part[step : step + 1] for part in self.angles]
        queries = append(*self.project(step), *angles, *tail, 0, none, implementation="reference")
        asked, found = queries.double().view(batch * heads, -1, dim), []
        starts = (self.lengths.flatten().cumsum(0) - self.lengths.flatten()).tolist()
        for index, new in enumerate(torch.stack(tail).flatten(1, 2).unbind(1)):
            keys, values = pack_as_defined(*self.heads[index], self.case)
            keys, values = torch.cat([keys, new[0].double()]), torch.cat([values, new[1].double()])
            logits = asked[index] @ keys.mT * 0.3
            if self.mass is not None:
                length = self.lengths.flatten()[index]
                logits[:, :length] += self.mass[starts[index] : starts[index] + length].double().log()
            found.append(logits.softmax(-1) @ values)
            self.heads[index] = torch.cat([self.heads[index], new], 1)
        return torch.stack(found).view(batch, -1, 1, dim)


def bound(case: Case) -> float:
    """bfloat16: weights, outputs and read numbers are rounded to 8 bits each, which the interpreter cuts off."""
    return {torch.float32: 3e-5, torch.float16: 2**-8, torch.bfloat16: 2**-4}[case.dtype]


def share_rows(monkeypatch: pytest.MonkeyPatch, case: Case, programs: int = 4, always: bool = False) -> None:
    """Let so many programs share the rows of a head in the interpreter, which runs them after each other."""
    if always or DEVICE == "cpu":
        word, heads = own.choose_word(case.group * case.bits // 8), len(case.lengths) * len(case.lengths[0])
        shape = own.choose_shape(case.dim, case.bits, word, case.dtype == torch.float32)
        monkeypatch.setattr(own, "WARPS", programs * heads * shape["num_warps"])


@EVERY
def test_sinks_and_caps(case, monkeypatch):
    """As in the reference, which `test_references` compares with the definition."""
    share_rows(monkeypatch, case)
    heads = len(case.lengths[0]) * case.queries
    extras = SoftmaxExtras(torch.linspace(-2, 5, heads, device=DEVICE, dtype=case.dtype), 0.7)
    found, expected = (Run(case).attend(0, name, extras).double() for name in ("triton", "reference"))
    torch.testing.assert_close(found, expected, rtol=0, atol=bound(case))
    assert (found - Run(case).attend(0, "reference").double()).abs().max() > 2 * bound(case)


@EVERY
@BOTH
def test_every_token_attends_to_what_the_definition_packs(case, implementation, monkeypatch):
    poison_memory(monkeypatch)
    share_rows(monkeypatch, case)
    run = Run(case)
    for step in range(case.tokens):
        found, expected = run.attend(step, implementation), run.expect(step)
        assert found.dtype == case.dtype and found.shape == expected.shape
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=bound(case))
    done = run.growing.finish(case.tokens, run.lengths + case.tokens)
    keys, values = (torch.cat([head[part] for head in run.heads]) for part in range(2))
    once = run.held.codec.pack(keys, values, run.lengths + case.tokens)
    for one, other in zip(done.tensors(), once.tensors(), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    assert torch.equal(done.lengths, once.lengths)


@BOTH
def test_steps_that_are_done_again_write_and_give_the_same(implementation, monkeypatch):
    """As far back as the rings reach."""
    case = Case(lengths=((15, 19),), tokens=3)  # the second token completes a residual of 16
    share_rows(monkeypatch, case, 2)
    (run, straight), found = (Run(case) for _ in range(2)), []
    for step in range(3):
        found.append(straight.attend(step, implementation))
        assert torch.equal(run.attend(step, implementation), found[step])
        for again in range(max(0, step + 1 - AHEAD), step + 1):
            assert torch.equal(run.attend(again, implementation), found[again])
    done = [own.growing.finish(3, own.lengths + 3) for own in (run, straight)]
    assert all(torch.equal(one, other) for one, other in zip(*(rows.tensors() for rows in done), strict=True))


def test_a_second_answer_begins_where_the_first_did():
    case = Case(lengths=((13, 19),), tokens=20)  # once round the rings
    run = Run(case)
    before = [tensor.clone() for tensor in run.held.tensors()]
    found = []
    for _ in range(2):
        run.growing.begin()
        found.append([run.attend(step, "reference") for step in range(20)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(before, run.held.tensors(), strict=True))


@pytest.mark.parametrize("programs", [2, 6, 40])
def test_programs_share_the_tiles(programs, monkeypatch):
    """Of a head. With 40 programs two of them read its raw rows, which are more than a tile of each kind."""
    case = Case(lengths=((200, 190),), group=4, residual=64, tokens=1)  # tiles of 32 rows
    expected = Run(case).expect(0)
    share_rows(monkeypatch, case, programs, always=True)
    torch.testing.assert_close(Run(case).attend(0, "triton").double(), expected, rtol=0, atol=1e-5)


def test_heads_are_normed_as_when_raw_rows_are_appended():
    run, case = Run(Case()), Case()
    norms = (case.draw(16, seed=1), case.draw(16, seed=2), 1e-6)
    step = torch.tensor(1, dtype=torch.int32, device=DEVICE)
    tail = [torch.zeros(2, 2, 2, 16, device=DEVICE) for _ in range(2)]
    expected = append(*run.project(0), *run.angles, *tail, 0, step, norms=norms, implementation="reference")
    for name in ("reference", "triton"):
        rows = run.growing.rows
        found = append_packed(*run.project(0), *run.angles, rows, step, norms=norms, implementation=name)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        slots = ((run.lengths + 1) % rows.ring_keys.shape[2])[..., None, None].expand(2, 2, 1, 16)
        for ring, raw in zip((rows.ring_keys, rows.ring_values), tail, strict=True):
            torch.testing.assert_close(ring.gather(2, slots), raw[:, :, 1:], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"bits": 8}, "8 bits"),
        ({"group": 3}, "group 3"),
        ({"residual": 20}, "residual 20"),
        ({"residual": 24}, "ring of"),
    ],
)
def test_rows_that_do_not_fit_are_refused(change, word):
    with pytest.raises(ValueError, match=word):
        replace(Run(Case()).growing.rows, **change)


def test_arguments_that_do_not_fit_are_refused():
    run = Run(Case())
    queries, keys, values = run.project(0)
    step, rows = torch.tensor(0, dtype=torch.int32, device=DEVICE), run.growing.rows
    assert isinstance(rows, PackedRows)
    for message, call in (
        ("append: queries", lambda: append_packed(queries, keys[:, :16], values, *run.angles, rows, step)),
        ("append: 1 queries", lambda: append_packed(queries[:1], keys, values, *run.angles, rows, step)),
        ("attend: queries", lambda: attend_packed(queries.view(2, 2, 1, 16)[:1], rows, 0.3, step)),
        (
            "attend: implementation",
            lambda: attend_packed(queries.view(2, 2, 1, 16), rows, 0.3, step, implementation="x"),
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def ahead():
    int64, int32, half, single = "*i64", "*i32", "*fp16", "*fp32"
    model = ("queries", "keys", "values", "cos", "sin", "query_norm", "key_norm", "out", "ring_keys", "ring_values")
    for dim, bits, mass, dtype in (
        (128, 2, False, "bf16"), (128, 4, True, "bf16"), (64, 2, True, "fp32"), (256, 2, False, "fp16"),
    ):  # fmt: skip
        common = {"BITS": bits, "GROUP": 32, "RESIDUAL": 128, "RING": 145, "DIM": dim}
        shape = own.choose_shape(dim, bits, own.choose_word(32 * bits // 8), dtype == "fp32")
        reading = {**common, "MASS": mass, "M": 16, "CAST": False, "CAP": 50.0 if mass else None, **shape}
        writing = {**common, "NORM": True, "D": dim, "BYTES": 32 * bits // 8, "GROUPS": dim // 32}
        for kernel, codes, constants in (
            (own._attend, int32, reading),
            (own._append, "*u8", writing | {"num_warps": 2, "num_stages": 3}),
        ):
            types = {name: half for name in kernel.arg_names if name.endswith(("scale", "zero"))}
            types |= {name: codes for name in kernel.arg_names if name.endswith("codes")}
            types |= dict.fromkeys(("lengths", "starts", "key_starts", "value_starts"), int64)
            types |= dict.fromkeys(("part_acc", "part_max", "part_norm"), single) | dict.fromkeys(model, f"*{dtype}")
            types |= {"scale": "fp32", "epsilon": "fp32", "step": int32, "shifts": int32, "mass": "*i16"}
            yield list_typed_kernel(kernel, types, constants)

"""One token over latents of groups of heads: both implementations against the definition, in loops in float64."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

import pytest
import torch

from kvbench.interfaces.codec import join_angles
from kvbench.kernels.latent_attention import (
    LatentRows,
    Rounding,
    Side,
    append_latents,
    attend_latents,
    round_latents,
)
from kvbench.kernels.latent_attention import triton as own
from kvbench.kernels.latent_attention.rounding import LARGEST, LEAST
from kvbench.kernels.softmax_extras import SoftmaxExtras
from tests.support.compile_kernels import list_typed_kernel
from tests.support.kernel_checks import BOTH, poison_memory
from tests.support.selection import only_in_full

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALING = 0.3


@dataclass(frozen=True)
class Case:
    """Rows of some samples: how many tokens each group holds, and what their latents are."""

    counts: tuple[tuple[int, ...], ...] = ((70,), (70,))
    """(G, B)"""
    heads: int = 2
    """KV heads of a group."""
    each: int = 2
    """Queries of a KV head."""
    dim: int = 16
    keys: tuple[int, ...] = (8, 8)
    """Ranks of the groups."""
    values: tuple[int, ...] = (16, 16)
    turning: int | None = None
    """Channels that are rotated; None for all."""
    tokens: int = 2
    evicted: bool = False
    """Whether positions have gaps."""
    uneven: bool = False
    """Whether heads of a group hold different rows. Then rows are evicted too."""
    bias: tuple[bool, bool] = (False, False)
    normed: bool = False
    dtype: torch.dtype = torch.float32
    bits: int | None = None
    """Bits of a code of rounded latents."""
    clip: float = 1.0

    @property
    def groups(self) -> int:
        return len(self.counts)

    @property
    def batch(self) -> int:
        return len(self.counts[0])

    def draw(self, *size: int, seed: int) -> torch.Tensor:
        return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, self.dtype)


UNEVEN = dict(counts=((37, 3), (20, 70)), evicted=True, uneven=True)
WIDE = dict(heads=4, each=4, keys=(24, 16), values=(8, 48))
CASES = {
    "one group, odd numbers": Case(((67,),), 3, 1, 24, (40,), (23,), tokens=2),
    "uneven heads, two samples": Case(
        ((34, 3), (20, 40)), 3, 2, keys=(24, 16), values=(8, 48), evicted=True, uneven=True
    ),
    "biases and norms": Case(((35, 33),), 2, 3, 16, (8,), (8,), bias=(True, True), normed=True),
    "half of the channels turn": Case(((33,),), 1, 1, 32, (8,), (8,), turning=16, bias=(True, False)),
    "4 bits": Case(((35,), (33,)), each=1, bits=4),
    "3 bits, uneven": Case(
        ((34,), (20,)), 3, 1, keys=(24, 16), values=(8, 48), evicted=True, uneven=True, bits=3, clip=0.9
    ),
    "bfloat16, cut alike": Case(((33,), (33,)), 1, 2, 32, evicted=True, dtype=torch.bfloat16),
}
FULL = {
    "two groups": Case(),
    "one group, odd numbers, several tiles": Case(((129,),), 3, 1, 24, (40,), (23,), tokens=3),
    "more uneven heads, two samples": Case(**UNEVEN, **WIDE),
    "cut alike": Case(((50, 50), (50, 50)), evicted=True),
    "biases and norms of more rows": Case(((65, 65),), 2, 3, 16, (8,), (8,), bias=(True, True), normed=True),
    "4 bits of more rows": Case(bits=4, tokens=3),
    "3 bits, more uneven heads": Case(**UNEVEN, **WIDE, bits=3, clip=0.9),
    "bfloat16, uneven": Case(**UNEVEN, **WIDE, dim=32, dtype=torch.bfloat16),
    "more tiles of uneven heads": Case(
        **UNEVEN | {"counts": ((67, 3), (40, 130))}, heads=4, each=4, keys=(24, 16), values=(8, 48), bits=3, clip=0.9
    ),
    "bfloat16, as Llama 3.1": Case(((200,), (200,)), 4, 4, 128, (256, 224), (256, 288), dtype=torch.bfloat16),
    "bfloat16, as Qwen 2.5": Case(
        ((150, 90),), 4, 7, 128, (192,), (320,), bias=(True, True), evicted=True, dtype=torch.bfloat16
    ),
    "float16, nothing removed": Case(((70,),), 2, 2, 64, (128,), (128,), normed=True, dtype=torch.float16),
    "more queries than a program takes": Case(((70,),), 4, 20, 16, (8,), (8,)),
    "bfloat16, 4 bits, as Llama 3.1": Case(
        ((200,), (200,)), 4, 4, 128, (256, 136), (256, 256), dtype=torch.bfloat16, bits=4
    ),
    "bfloat16, 2 bits": Case(((200,),), 4, 4, 64, (128,), (136,), bits=2, dtype=torch.bfloat16),
    "4 bits, with norms": Case(
        ((70,),), 2, 2, 64, (128,), (128,), bias=(True, True), normed=True, bits=4, clip=0.8, dtype=torch.float16
    ),
    "ranks of one": Case(((70,),), 1, 1, 16, (1,), (1,), bias=(False, True)),
    "a memory of many tiles": Case(((3,),), 1, 2, 16, (8,), (8,), tokens=70),
}
EVERY = pytest.mark.parametrize("case", [*CASES.values(), *map(only_in_full, FULL.values())], ids=[*CASES, *FULL])


class Run:
    """Rows with memory for further tokens, and what they are made of."""

    def __init__(self, case: Case):
        self.case = case
        width, groups, batch = case.heads * case.dim, case.groups, case.batch
        counts = torch.tensor(case.counts, device=DEVICE)
        self.seen = int(counts.max()) * (3 if case.evicted else 1)
        generator = torch.Generator().manual_seed(9)
        self.places = [
            [torch.randperm(self.seen, generator=generator)[:count].sort().values.tolist() for count in own]
            for own in case.counts
        ]
        self.held = [
            [torch.rand(count, case.heads, generator=generator) < (0.5 if case.uneven else 2) for count in own]
            for own in case.counts
        ]
        for held in chain.from_iterable(self.held):  # every row has a head that holds it
            held[:, 0] |= ~held.any(1)
        sides = []
        for number, (ranks, bias) in enumerate(zip((case.keys, case.values), case.bias, strict=True)):
            ups = [case.draw(width, rank, seed=10 + 50 * number + g) / rank**0.5 for g, rank in enumerate(ranks)]
            downs = [case.draw(rank, width, seed=20 + 50 * number + g) / width**0.5 for g, rank in enumerate(ranks)]
            latents = [
                case.draw(int(total), rank, seed=30 + 50 * number + g)
                for g, (rank, total) in enumerate(zip(ranks, counts.sum(1), strict=True))
            ]
            biases = tuple(case.draw(width, seed=40 + 50 * number + g) for g in range(groups)) if bias else None
            more, rounding = case.draw(groups, batch, case.tokens, max(ranks), seed=0) * torch.nan, None
            if case.bits is not None:
                latents, steps, zeros = zip(*(round_latents(own, case.bits, case.clip) for own in latents), strict=True)
                more = torch.full((*more.shape[:3], max(ranks) * case.bits // 8), 255, dtype=torch.uint8, device=DEVICE)
                memory = (torch.zeros(more.shape[:3], dtype=own[0].dtype, device=DEVICE) for own in (steps, zeros))
                rounding = Rounding(case.bits, case.clip, steps, zeros, *memory)
            sides.append(Side(tuple(latents), tuple(downs), tuple(ups), biases, more, rounding))
        flat = torch.tensor([p for own in self.places for places in own for p in places], dtype=torch.int32)
        starts = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)
        marks = torch.cat([held for own in self.held for held in own]).to(DEVICE)
        self.rows = LatentRows(
            groups * case.heads, self.seen, *sides, counts, int(counts.max()),
            flat.to(DEVICE) if case.evicted else None, starts, marks if case.uneven else None,
        )  # fmt: skip
        turning = case.turning or case.dim
        angles = torch.outer(torch.arange(self.seen + case.tokens), 1.3 ** -torch.arange(turning // 2)).repeat(1, 2)
        self.angles = join_angles(angles.cos().to(DEVICE, case.dtype), angles.sin().to(DEVICE, case.dtype))
        self.norms = [case.draw(case.dim, seed=seed) for seed in (1, 2)] if case.normed else None
        self.appended: list[list[torch.Tensor]] = []  # of each token: keys and values, (B, H·d)

    def project(self, step: int) -> list[torch.Tensor]:
        case, heads = self.case, self.rows.heads
        sizes = (heads * case.each, heads, heads)
        return [case.draw(case.batch, n * case.dim, seed=200 + 3 * step + i) for i, n in enumerate(sizes)]

    def find_norm(self, number: int) -> tuple[torch.Tensor, float] | None:
        return None if self.norms is None else (self.norms[number], 1e-6)

    def attend(self, step: int, implementation: str, extras: SoftmaxExtras | None = None) -> torch.Tensor:
        count = torch.tensor(step, dtype=torch.int32, device=DEVICE)
        queries = append_latents(
            *self.project(step),
            *self.angles[:2],
            self.rows,
            count,
            norm=self.find_norm(0),
            implementation=implementation,
        )
        return attend_latents(
            queries, self.angles.pairs, self.rows, SCALING, count,
            norm=self.find_norm(1), extras=extras, implementation=implementation,
        )  # fmt: skip

    def turn(self, x: torch.Tensor, place: int, number: int) -> torch.Tensor:
        """Norm and rotate one head (d,) as a query (0) or as a key (1)."""
        if self.norms is not None:
            x = x / (x.square().mean() + 1e-6).sqrt() * self.norms[number].cpu().double()
        turning = self.angles[0].shape[1]
        cos, sin = (part[place, : turning // 2].cpu().double() for part in self.angles[:2])
        one, two, rest = x[: turning // 2], x[turning // 2 : turning], x[turning:]
        return torch.cat([one * cos - two * sin, two * cos + one * sin, rest])

    def make(self, side: Side, group: int, latent: torch.Tensor) -> torch.Tensor:
        """What a latent (r,) stands for, (w,)."""
        made = side.up[group].cpu().double() @ latent
        return made if side.bias is None else made + side.bias[group].cpu().double()

    def read_held(self, side: Side, group: int, row: int) -> torch.Tensor:
        """The latents (r,) of a row that was there before the first token."""
        own, rounding = side.latents[group][row].tolist(), side.rounding
        if rounding is None:
            return torch.tensor(own, dtype=torch.float64)
        bits = rounding.bits
        codes = [
            sum((own[latent // 8 * bits + bit] >> latent % 8 & 1) << bit for bit in range(bits))
            for latent in range(side.ranks[group])
        ]
        zero, unit = int(rounding.zeros[group][row]), float(rounding.steps[group][row])
        return torch.tensor([(code - zero) * unit for code in codes], dtype=torch.float64)

    def round(self, latents: torch.Tensor) -> torch.Tensor:
        """What is left of a token's latents (r,), by the source's rule."""
        if self.case.bits is None:
            return latents
        low, high, most = self.case.clip * latents.min(), self.case.clip * latents.max(), 2**self.case.bits - 1
        unit = ((high - low) / most).half().double()
        zero = (-low / unit).round().clamp(0, most)
        return (((latents / unit).round() + zero).clamp(0, most) - zero) * unit

    def expect(self, step: int) -> torch.Tensor:
        """The outputs by the definition."""
        case, rows = self.case, self.rows
        asked, keys, values = (own.cpu().double() for own in self.project(step))
        self.appended.append([keys, values])
        found = []
        for b in range(case.batch):
            for group in range(case.groups):
                own = []
                for side, number in ((rows.keys, 0), (rows.values, 1)):
                    start = int(rows.starts[group, b])
                    latents = [self.read_held(side, group, row) for row in range(start, start + case.counts[group][b])]
                    for token in self.appended:
                        x = token[number][b].chunk(case.groups)[group]
                        less = x if side.bias is None else x - side.bias[group].cpu().double()
                        latents.append(self.round(side.down[group].cpu().double() @ less))
                    own.append([self.make(side, group, latent) for latent in latents])
                places = self.places[group][b] if case.evicted else [*range(case.counts[group][b])]
                places = places + [self.seen + token for token in range(step + 1)]
                for head in range(case.heads):
                    here = slice(head * case.dim, (head + 1) * case.dim)
                    held = [*self.held[group][b][:, head].tolist(), *[True] * (step + 1)]
                    ks = [self.turn(x[here], p, 1) for x, p, h in zip(own[0], places, held, strict=True) if h]
                    vs = [x[here] for x, h in zip(own[1], held, strict=True) if h]
                    for query in range(case.each):
                        at = (group * case.heads + head) * case.each + query
                        q = self.turn(asked[b, at * case.dim : (at + 1) * case.dim], self.seen + step, 0)
                        logits = torch.stack(ks) @ q * SCALING
                        found.append(logits.softmax(0) @ torch.stack(vs))
        return torch.stack(found).view(case.batch, -1, 1, case.dim)


def bound(case: Case) -> float:
    """bfloat16: queries, latents, keys and outputs are rounded to 8 bits each, which the interpreter cuts off."""
    return {torch.float32: 3e-5, torch.float16: 2**-7, torch.bfloat16: 2**-3}[case.dtype]


@cache
def expect_tokens(case: Case) -> list[torch.Tensor]:
    """The outputs of every token by the definition, once for both implementations."""
    run = Run(case)
    return [run.expect(step) for step in range(case.tokens)]


EXTRAS = ("one group, odd numbers", "biases and norms", "3 bits, uneven")
"""Cases that read sinks and caps in every way: of groups and samples, beside biases, of heads that hold other rows."""


@pytest.mark.parametrize(
    "case", [own if name in EXTRAS else only_in_full(own) for name, own in (CASES | FULL).items()], ids=[*CASES, *FULL]
)
def test_sinks_and_caps(case):
    """As in the reference, which `test_references` compares with the definition. A bias of values gets their share."""
    sinks = torch.linspace(-2, 5, case.groups * case.heads * case.each, device=DEVICE, dtype=case.dtype)
    extras = SoftmaxExtras(sinks, 0.7)
    found, expected = (Run(case).attend(0, name, extras).double() for name in ("triton", "reference"))
    torch.testing.assert_close(found, expected, rtol=0, atol=bound(case))
    assert case.dtype != torch.float32 or (found - Run(case).attend(0, "reference").double()).abs().max() > 0.01


@EVERY
@BOTH
def test_every_token_attends_to_what_the_definition_makes(case, implementation, monkeypatch):
    poison_memory(monkeypatch)
    run = Run(case)
    for step, expected in enumerate(expect_tokens(case)):
        found = run.attend(step, implementation)
        assert found.dtype == case.dtype and found.shape == expected.shape
        torch.testing.assert_close(found.cpu().double(), expected, rtol=0, atol=bound(case))


@BOTH
@pytest.mark.parametrize("bits", [None, 4], ids=["numbers", "codes"])
def test_steps_that_are_done_again_write_and_give_the_same(implementation, bits):
    case = Case(((7,), (13,)), each=1, evicted=True, uneven=True, tokens=2, bits=bits)
    (run, straight), found = (Run(case) for _ in range(2)), []
    for step in range(case.tokens):
        found.append(straight.attend(step, implementation))
        for again in range(step + 1):
            assert torch.equal(run.attend(again, implementation), found[again])
    for one, other in ((run.rows.keys, straight.rows.keys), (run.rows.values, straight.rows.values)):
        assert all(map(torch.equal, one.own_tensors, other.own_tensors)) and not one.more.isnan().any()
        assert one.rounding is None or (one.rounding.more_steps > 0).all()


@pytest.mark.parametrize("programs", [1, 3, 40])
def test_programs_share_the_tiles(programs, monkeypatch):
    """Also with more programs than tiles of a group."""
    case = Case(((40, 100), (33, 1)), 1, 1, evicted=True)  # tiles of 32 rows
    expected = Run(case).expect(0)
    monkeypatch.setattr(own, "CORES", programs * 2)
    torch.testing.assert_close(Run(case).attend(0, "triton").cpu().double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kept, wide", [(1 << 9, 256), (1 << 17, 16), (1 << 17, 32)])
def test_programs_take_one_or_several_heads_and_keep_u_or_read_it_again(kept, wide, monkeypatch):
    """Two bytes a number, also of float32 numbers in the interpreter."""
    case = Case(**UNEVEN, heads=3, keys=(24, 16), dtype=torch.float16)
    monkeypatch.setattr(own, "KEPT", kept)
    monkeypatch.setattr(own, "WIDE", wide)
    shape = own.choose_shape(24, 3, 2, 16, False, False)
    assert (shape["KEEP"], shape["HEADS"]) == (kept > 1 << 9, 2 if kept > 1 << 9 and wide > 16 else 1)
    run = Run(case)
    torch.testing.assert_close(run.attend(0, "triton").cpu().double(), run.expect(0), rtol=0, atol=bound(case))


@pytest.mark.parametrize("latents", [16, 32])
def test_programs_make_keys_of_some_latents(latents, monkeypatch):
    """Their logits are added, and the bias counts once. Keys that are normed need all latents, and so do programs that
    read U again.

    Of codes of 4 bits a program takes twice as many latents if no more of them are padding then.
    """
    monkeypatch.setattr(own, "LATENTS", latents)
    some = 48 // latents + latents // 32
    assert own.choose_shape(40, 2, 2, 16, False, False, 3)["PARTS"] == some
    for normed, bits, kept, parts in (
        (False, None, own.KEPT, some), (True, None, own.KEPT, 1), (False, 4, own.KEPT, {16: 3, 32: 1}[latents]),
        (False, None, 1 << 8, 1), (False, 4, 1 << 8, 1),
    ):  # fmt: skip
        monkeypatch.setattr(own, "KEPT", kept)
        case = Case(((20, 3),), 2, 2, 16, (40,), (8,), bias=(True, True), normed=normed, dtype=torch.float16, bits=bits)
        assert own.choose_shape(40, 2, 2, 16, False, normed, bits or 0)["PARTS"] == parts
        run = Run(case)
        torch.testing.assert_close(run.attend(0, "triton").cpu().double(), run.expect(0), rtol=0, atol=bound(case))


def change_side(side: Side, **more: object) -> Side:
    return replace(side, **more)


def make_rounding(side: Side, bits: int, dtype: torch.dtype = torch.float16) -> Rounding:
    """Memory for s and z of a side's rows."""
    steps, zeros = (
        tuple(torch.zeros(len(own), 1, dtype=kind, device=DEVICE) for own in side.latents)
        for kind in (dtype, torch.uint8)
    )
    memory = (torch.zeros(side.more.shape[:3], dtype=kind, device=DEVICE) for kind in (dtype, torch.uint8))
    return Rounding(bits, 1.0, steps, zeros, *memory)


def round_side(side: Side, bits: int, dtype: torch.dtype = torch.float16) -> Side:
    codes = tuple(torch.zeros(len(x), x.shape[1] * bits // 8, dtype=torch.uint8, device=DEVICE) for x in side.latents)
    more = torch.zeros(*side.more.shape[:3], side.more.shape[3] * bits // 8, dtype=torch.uint8, device=DEVICE)
    return replace(side, latents=codes, more=more, rounding=make_rounding(side, bits, dtype))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda rows: {"heads": 3}, "3 heads in 2 groups"),
        (lambda rows: {"keys": change_side(rows.keys, up=rows.keys.down)}, "of 2 groups of 8 numbers"),
        (lambda rows: {"keys": change_side(rows.keys, more=rows.keys.more[..., :4].contiguous())}, "for ranks"),
        (lambda rows: {"keys": change_side(rows.keys, more=rows.keys.more.half())}, "one dtype"),
        (lambda rows: {"values": change_side(rows.values, more=rows.values.more[:, :, :1].contiguous())}, "memory"),
        (lambda rows: {"keys": change_side(rows.keys, rounding=make_rounding(rows.keys, 3))}, "groups of"),
        (lambda rows: {"keys": round_side(rows.keys, 4)}, "keys of 4 bits and values of 0"),
        (lambda rows: {"keys": round_side(rows.keys, 4, torch.float32)}, "of s or z"),
        (lambda rows: {"marks": torch.ones(140, 2, dtype=torch.bool)}, "marks"),
    ],
)
def test_rows_that_do_not_fit_are_refused(change, word):
    rows = Run(Case()).rows
    fields = ("heads", "seen", "keys", "values", "counts", "longest", "positions", "places", "marks")
    given = {name: getattr(rows, name) for name in fields}
    with pytest.raises(ValueError, match=word):
        LatentRows(**given | change(rows))


def test_arguments_that_do_not_fit_are_refused():
    run = Run(Case())
    queries, keys, values = run.project(0)
    step, rows = torch.tensor(0, dtype=torch.int32, device=DEVICE), run.rows
    both, pairs = run.angles[:2], run.angles.pairs
    asking = queries.view(1, 8, 1, 16)
    for message, call in (
        ("append: queries", lambda: append_latents(queries, keys[:, :16], values, *both, rows, step)),
        ("append: cos", lambda: append_latents(queries, keys, values, *(part[:9] for part in both), rows, step)),
        ("attend: queries", lambda: attend_latents(asking[:, :7], pairs, rows, 0.3, step)),
        ("attend: pairs", lambda: attend_latents(asking, pairs[:9], rows, 0.3, step)),
        ("attend: pairs", lambda: attend_latents(asking, pairs[..., 0], rows, 0.3, step)),
        ("attend: pairs", lambda: attend_latents(asking, pairs.double(), rows, 0.3, step)),
        ("attend: pairs", lambda: attend_latents(asking, pairs.mT.contiguous().mT, rows, 0.3, step)),
        ("attend: pairs", lambda: attend_latents(asking, pairs.repeat(1, 2, 1), rows, 0.3, step)),
        (
            "attend: implementation",
            lambda: attend_latents(asking, pairs, rows, 0.3, step, implementation="x"),
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def ahead():
    """Llama 3.1 at 50 %; the same cut, with norms and biases; nothing removed; heads of 64; float32."""
    table = dict.fromkeys(("addresses", "counts", "starts", "places"), "*i64")
    table |= dict.fromkeys(("step", "ranks", "positions"), "*i32")
    table |= dict.fromkeys(("logits", "part_acc", "part_max", "part_norm"), "*fp32")
    table |= {"marks": "*i8", "scale": "fp32", "epsilon": "fp32"}
    model = ("keys", "values", "cos", "sin", "query_norm", "key_norm", "out", "outputs", "like")
    memory = ("more_keys", "more_values", "more_steps", "more_zeros")
    for rank, dim, more, dtype, bits, heads in (
        (256, 128, False, "bf16", 0, 4), (256, 128, True, "bf16", 0, 4), (512, 128, True, "fp16", 0, 4),
        (128, 64, False, "bf16", 0, 4), (256, 128, False, "fp32", 0, 4), (256, 128, False, "bf16", 4, 4),
        (256, 128, True, "bf16", 3, 4), (64, 128, False, "bf16", 0, 4), (64, 128, False, "bf16", 0, 1),
    ):  # fmt: skip
        exact = dtype == "fp32"
        kinds = table | dict.fromkeys(model, f"*{dtype}")
        kinds |= dict.fromkeys(memory, "*u8" if bits else f"*{dtype}") | ({"more_steps": "*fp16"} if bits else {})
        pitch = rank * bits // 8 if bits else rank
        asked = kinds | {"queries": f"*{dtype}"}
        shape = own.choose_shape(rank, heads, 4, dim, exact, more, bits)
        terms = shape.pop("PARTS")
        eights, laid = {"BITS": bits, "EIGHT": 8}, {"BY_ROW": rank > 64}
        flags = {"NORM": more, "BIAS": more, "PLACES": more, "MARKS": more, "CAST": False, "STILL": int(more)}
        asked |= {"angles": "*i64" if exact else "*i32"}
        yield list_typed_kernel(own._weigh, asked, flags | {"UNIT": 16, "RK": pitch} | eights | laid | shape)
        summing = {"UNIT": 16, "PARTS": terms, "R": rank, "RV": pitch, "M": 16, "N": shape["N"], "CAST": False}
        summing |= eights | laid | {"CAP": 50.0 if more else None}
        yield list_typed_kernel(own._sum, kinds, summing | own.choose_stages(rank, 16, exact, bits))
        small = {"num_warps": 4, "num_stages": 3}
        joining = {"BIAS": more, "R": rank, "BLOCK": own.BLOCK, "JOINED": own.JOINED // rank}
        kinds["sinks"] = f"*{dtype}"
        yield list_typed_kernel(own._join, kinds, joining | small | ({} if more else {"sinks": None}))
        appending = {"NORM": more, "KEY_BIAS": more, "VALUE_BIAS": False, "RK": rank, "RV": rank, "D": dim, "W": 256}
        appending |= {"BLOCK": own.BLOCK, "BLOCKS": rank // own.BLOCK, "ROUNDED": bits > 0}
        raw = dict.fromkeys(memory[:2], f"*{dtype}")  # what `_round` reads
        yield list_typed_kernel(own._append, asked | raw, appending | small)
        if bits:
            stored = {"more_keys": "*u8", "more_values": "*u8", "key_steps": "*fp16", "value_steps": "*fp16"}
            stored |= {"key_zeros": "*u8", "value_zeros": "*u8", "key_clip": "fp32", "value_clip": "fp32"}
            rounding = {
                "RK": rank,
                "RV": rank,
                "R": rank,
                "LEAST": LEAST,
                "LARGEST": LARGEST,
                "EVEN": own.EVEN,
            } | eights
            yield list_typed_kernel(own._round, kinds | stored, rounding | small)

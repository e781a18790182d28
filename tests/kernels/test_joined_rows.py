"""Rows of several contexts at once: both implementations against one context after the other."""

from dataclasses import dataclass, replace

import pytest
import torch

from kvbench.kernels.attention import RaggedRows, attend_ragged
from kvbench.kernels.joined_rows import Part, append_joined, attend_joined, join_parts, rows
from kvbench.kernels.rope_append import append
from kvbench.kernels.softmax_extras import SoftmaxExtras
from tests.support.compile_kernels import list_kernel
from tests.support.kernel_checks import BOTH, DEVICE, poison_memory
from tests.support.selection import only_in_full

STEPS = (0, 2)


@dataclass(frozen=True)
class Case:
    """For each part the held rows of its heads (none: no held part), rows of the tail, and whether rows have mass."""

    parts: tuple[tuple[tuple[int, ...], int, int, bool], ...] = (
        ((13, 0, 70, 5), 2, 3, False),  # 2 samples
        ((), 1, 9, False),
        ((40, 41), 1, 0, True),
    )
    heads: int = 2
    group: int = 3
    dim: int = 32
    normed: bool = False

    @property
    def samples(self) -> int:
        return sum(samples for _, samples, _, _ in self.parts)


CASES = {
    "ragged": Case(),
    "no mass": Case(parts=(((300, 2), 1, 1, False), ((), 2, 20, False)), dim=96),
    "QK norms": Case(normed=True, dim=80, group=1),
    "masses": Case(parts=(((9, 7, 0), 1, 0, True), ((0, 0, 0), 1, 5, False), ((64, 3, 40), 1, 2, True)), heads=3),
    "narrow rows": Case(dim=20, parts=(((7,), 1, 1, False), ((19,), 1, 2, True)), heads=1),
}
FULL = {
    "long": Case(parts=(((2500, 900), 1, 8, True), ((), 3, 700, False)), dim=128, group=4),
    "many queries": Case(group=17, dim=16),
    "256 channels": Case(dim=256, group=2),
}
EVERY = pytest.mark.parametrize("case", [*CASES.values(), *map(only_in_full, FULL.values())], ids=[*CASES, *FULL])


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    poison_memory(monkeypatch)


class Draw:
    """Rows of a case, in tails that are views of more memory, and what is projected from its tokens."""

    def __init__(self, case: Case, dtype: torch.dtype):
        self.case, self.dtype = case, dtype
        self.generator = torch.Generator().manual_seed(case.dim + case.samples)
        self.parts = [self.make_part(*own) for own in case.parts]
        angles = self.normal(40, case.dim // 4, dtype=torch.float32).repeat(1, 2)
        self.angles = angles.cos().to(dtype), angles.sin().to(dtype)
        self.places = torch.randint(0, 30, (case.samples,), generator=self.generator).to(DEVICE)
        self.norms = (self.normal(case.dim), self.normal(case.dim), 1e-6) if case.normed else None

    def normal(self, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator).to(DEVICE, dtype or self.dtype)

    def make_part(self, lengths: tuple[int, ...], samples: int, tail: int, merged: bool) -> Part:
        case, held, room = self.case, None, tail + max(STEPS) + 2
        if lengths:
            total, counts = sum(lengths), torch.tensor(lengths)
            mass = torch.randint(1, 900, (total,), generator=self.generator, dtype=torch.int16) if merged else None
            held = RaggedRows(
                self.normal(total, case.dim), self.normal(total, case.dim), mass if mass is None else mass.to(DEVICE),
                (counts.cumsum(0) - counts).to(DEVICE), counts.to(DEVICE), max(lengths),
            )  # fmt: skip
        tails = [self.normal(samples, case.heads, room + 1, case.dim)[:, :, :room] for _ in range(2)]
        for own in tails:
            own[:, :, tail:] = float("nan")
        return Part(held, *tails, tail)

    def project(self) -> list[torch.Tensor]:
        case = self.case
        return [self.normal(case.samples, n * case.dim) for n in (case.heads * case.group, case.heads, case.heads)]

    def copy_parts(self) -> list[Part]:
        return [
            replace(own, tail_keys=own.tail_keys.clone(), tail_values=own.tail_values.clone()) for own in self.parts
        ]


def expect(
    draw: Draw, parts: list[Part], projected: list[torch.Tensor], step: torch.Tensor, scaling: float, extras=None
):
    """Rotated queries as `append` gives them, and outputs in float64, sample by sample. Writes into `parts`."""
    queries, outputs, sample = [], [], 0
    for part in parts:
        first = sample
        for own in range(len(part.tail_keys)):
            cos, sin = (x[draw.places[sample] :] for x in draw.angles)
            some, tails = (x[sample, None] for x in projected), (part.tail_keys[own, None], part.tail_values[own, None])
            given = *some, cos, sin, *tails, part.tail, step
            queries.append(append(*given, norms=draw.norms, implementation="reference"))
            sample += 1
        held = part.held
        if held is not None:
            held = replace(held, keys=held.keys.double(), values=held.values.double())
        both = part.tail_keys.double(), part.tail_values.double()
        asked = torch.cat(queries[first:]).double()
        outputs.append(
            attend_ragged(
                asked, held, *both, scaling, tail=part.tail + 1, step=step, extras=extras, implementation="reference"
            )[0]
        )  # fmt: skip
    return torch.cat(queries), torch.cat(outputs)


@pytest.mark.cover
@pytest.mark.parametrize("least", [16, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@BOTH
@EVERY
def test_it_does_what_each_context_does_alone(case, implementation, dtype, least, monkeypatch):
    monkeypatch.setattr(rows, "LEAST", least)
    draw, scaling = Draw(case, dtype), case.dim**-0.5
    parts, exact_parts = draw.copy_parts(), draw.copy_parts()
    layer = join_parts(parts)
    if least == 16:
        assert len(layer.programs) > len(layer.table)
    bound = 2e-6 if dtype == torch.float32 else 2**-7
    for number in range(max(STEPS) + 1):
        step, projected = torch.tensor(number, dtype=torch.int32, device=DEVICE), draw.project()
        queries = append_joined(
            *projected, *draw.angles, draw.places, layer, step, norms=draw.norms, implementation=implementation
        )
        asked, exact = expect(draw, exact_parts, projected, step, scaling)
        # the interpreter cuts off where a GPU rounds to bfloat16
        rounding = 1e-5 if dtype == torch.float32 else 2**-5 * float(asked.abs().max())
        torch.testing.assert_close(queries, asked, rtol=0, atol=rounding)
        for part, other in zip(parts, exact_parts, strict=True):
            for one, another in ((part.tail_keys, other.tail_keys), (part.tail_values, other.tail_values)):
                torch.testing.assert_close(one, another, rtol=0, atol=rounding, equal_nan=True)
                one.copy_(another)  # what follows reads the same rows
        found = attend_joined(asked, layer, scaling, step, implementation=implementation)
        assert found.dtype == dtype and found.shape == asked.shape
        everything = [part.tail_values.nan_to_num() for part in parts]
        everything += [part.held.values for part in parts if part.held is not None]
        largest = float(torch.cat([own.flatten() for own in everything]).abs().max())
        assert float((found - exact).abs().max()) <= largest * bound


@BOTH
@EVERY
def test_sinks_and_caps(case, implementation):
    draw, scaling = Draw(case, torch.float32), case.dim**-0.5
    extras = SoftmaxExtras(torch.linspace(-2, 5, case.heads * case.group, device=DEVICE), 0.7)
    parts, exact_parts = draw.copy_parts(), draw.copy_parts()
    layer, step, projected = join_parts(parts), torch.tensor(0, dtype=torch.int32, device=DEVICE), draw.project()
    append_joined(*projected, *draw.angles, draw.places, layer, step, norms=draw.norms, implementation="reference")
    asked, exact = expect(draw, exact_parts, projected, step, scaling, extras)
    found = attend_joined(asked, layer, scaling, step, extras=extras, implementation=implementation)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)
    assert (attend_joined(asked, layer, scaling, step, implementation=implementation) - found).abs().max() > 0.01


def make_plain(*lengths: int, dim: int = 16, dtype: torch.dtype = torch.float32) -> list[Part]:
    """Parts of one sample and one head, each with so many rows in its tail."""
    return [
        Part(None, *torch.zeros(2, 1, 1, length, dim, dtype=dtype, device=DEVICE), length - 1) for length in lengths
    ]


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        ({}, [1, 4, 1]),  # LEAST is 256
        ({"LEAST": 100}, [3, 10, 1]),
        ({"LEAST": 1, "MOST": 5}, [2, 5, 1]),
        ({"LEAST": 1, "PROGRAMS": 6}, [2, 5, 1]),
        ({"LEAST": 1, "PROGRAMS": 1}, [1, 1, 1]),
    ],
)
def test_programs_share_the_rows(change, counts, monkeypatch):
    for name, own in change.items():
        monkeypatch.setattr(rows, name, own)
    layer = join_parts(make_plain(256, 1000, 3))
    assert layer.programs.tolist() == [head for head, count in enumerate(counts) for _ in range(count)]
    assert layer.table[:, 7].tolist() == counts and layer.table[:, 6].tolist() == [0, counts[0], sum(counts[:2])]


def test_loads_are_told_what_divides_the_distances():
    for dim, dtype, expected in ((32, torch.float32, 4), (24, torch.bfloat16, 8), (20, torch.bfloat16, 1)):
        assert join_parts(make_plain(9, 5, dim=dim, dtype=dtype)).align == expected
    moved = torch.zeros(1 + 9 * 32, device=DEVICE)[1:].view(1, 1, 9, 32)
    one, other = make_plain(9, 9, dim=32)
    for parts in ([replace(one, tail_keys=moved), other], [one, replace(other, tail_values=moved)]):
        assert join_parts(parts).align == 1


def make_held(**change: torch.Tensor) -> RaggedRows:
    count = torch.tensor([5], device=DEVICE)
    own = {"keys": torch.zeros(5, 16, device=DEVICE), "values": torch.zeros(5, 16, device=DEVICE), "mass": None}
    return RaggedRows(**{**own, "starts": count - 5, "lengths": count, "longest": 5, **change})


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"tail_values": torch.zeros(1, 1, 8, 16)}, "tails"),
        ({"tail_keys": torch.zeros(1, 2, 9, 16), "tail_values": torch.zeros(1, 2, 9, 16)}, "tails"),
        ({"tail": 10}, "10 rows in a tail with room for 9"),
        ({"tail_keys": torch.zeros(1, 1, 9, 16, dtype=torch.bfloat16)}, "rows are torch.float32"),
        ({"tail_keys": torch.zeros(1, 1, 9, 32, device=DEVICE)[..., :16]}, "one behind the other"),
        ({"held": make_held(values=torch.zeros(4, 16, device=DEVICE))}, "held rows"),
        ({"held": make_held(mass=torch.ones(4, device=DEVICE))}, "held rows"),
        ({"held": make_held(keys=torch.zeros(16, 5, device=DEVICE).mT)}, "one behind the other"),
    ],
)
def test_rows_that_cannot_be_joined_are_refused(change, word):
    change = {name: own.to(DEVICE) if isinstance(own, torch.Tensor) else own for name, own in change.items()}
    one, other = make_plain(9, 9)
    with pytest.raises(ValueError, match=word):
        join_parts([one, replace(other, **change)])


def test_arguments_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="no parts"):
        join_parts([])
    layer = join_parts(make_plain(9, 9))
    step, places = (torch.zeros(size, dtype=kind) for size, kind in (((), torch.int32), (2, torch.int64)))
    x, angles = torch.zeros(2, 16), torch.zeros(9, 16)
    for word, call in (
        ("queries", lambda: append_joined(x, x[:1], x[:1], angles, angles, places, layer, step)),
        ("1 queries", lambda: append_joined(x[:1], x, x, angles, angles, places, layer, step)),
        ("places", lambda: append_joined(x, x, x, angles, angles, places[:1], layer, step)),
        ("attend", lambda: attend_joined(x.view(1, 2, 1, 16), layer, 1.0, step)),
        ("implementation", lambda: attend_joined(x.view(2, 1, 1, 16), layer, 1.0, step, implementation="sdpa")),
    ):
        with pytest.raises(ValueError, match=word):
            call()


def ahead():
    from kvbench.kernels.joined_rows import triton as own

    numbers = dict.fromkeys(("places", "table", "starts", "lengths", "programs"), "*i64") | {"step": "*i32"}
    sums = dict.fromkeys(("part_acc", "part_max", "part_norm", "mass"), "*fp32")
    for dtype, dim, mass in (("bf16", 128, False), ("fp32", 64, True), ("bf16", 256, True)):
        model = ("queries", "keys", "values", "cos", "sin", "query_norm", "key_norm", "tail_keys", "tail_values", "out")
        pointers = numbers | sums | dict.fromkeys((*model, "outputs"), f"*{dtype}")
        pointers |= {"scale": "fp32", "epsilon": "fp32"}
        exact = dtype == "fp32"
        yield list_kernel(own._append_joined, pointers, {"NORM": mass, "D": dim}, num_warps=2)
        sizes = {"MASS": mass, "ALIGN": 4 if exact else 8, "M": 16, "N": 32 if exact or dim > 128 else 64, "D": dim}
        sizes |= {"WHOLE": True, "CAST": False, "CAP": 50.0 if exact else None}
        yield list_kernel(own._attend_joined, pointers, sizes, num_warps=4, num_stages=2 if exact else 3)
        joining = {"S": own.AT_ONCE, "D": dim}
        yield list_kernel(own._combine_joined, pointers, joining | {"sinks": None}, num_warps=4)
        yield list_kernel(own._combine_joined, pointers | {"sinks": f"*{dtype}"}, joining, num_warps=4)

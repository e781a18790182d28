"""Attention over ragged rows and a tail: Triton against the equation in float64."""

from dataclasses import replace

import pytest
import torch

from kvbench.kernels.attention import RaggedRows, attend, attend_ragged, choose_cudnn
from kvbench.kernels.attention.sdpa import attend_windowed, attend_windowed_extras
from kvbench.kernels.softmax_extras import SoftmaxExtras
from tests.support.selection import only_in_full

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# batch, KV heads, group, tokens, tail, longest held, dim
SHAPES = [
    (1, 1, 1, 1, 1, 0, 16), (2, 2, 3, 1, 5, 37, 32), (1, 3, 4, 1, 1, 300, 64), (2, 1, 1, 3, 9, 70, 96),
    (1, 1, 2, 150, 150, 0, 32), (1, 2, 4, 7, 40, 130, 64),
    *map(only_in_full, [(1, 2, 8, 1, 700, 0, 32), (1, 2, 3, 50, 61, 300, 16), (1, 2, 3, 130, 201, 90, 16)]),
]  # fmt: skip


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that nothing was written to holds NaN."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))


def made(shape, merged, dtype):
    batch, heads, group, tokens, tail, longest, dim = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def normal(*size):
        return torch.randn(*size, generator=generator).to(DEVICE, dtype)

    queries = normal(batch, tokens, heads * group, dim).transpose(1, 2) * 2
    room = [normal(batch, heads, tail + 3, dim) for _ in range(2)]
    for part in room:
        part[:, :, tail:] = float("nan")
    keys, values = (part[:, :, :tail] for part in room)
    held = None
    if longest:
        lengths = torch.randint(0, longest + 1, (batch * heads,), generator=generator)
        lengths[-1] = longest
        rows = int(lengths.sum())
        mass = torch.randint(1, 900, (rows,), generator=generator, dtype=torch.int32).to(DEVICE) if merged else None
        starts = (lengths.cumsum(0) - lengths).to(DEVICE)
        held = RaggedRows(normal(rows, dim), normal(rows, dim), mass, starts, lengths.to(DEVICE), longest)
    return queries, held, keys, values


def as_double(held):
    return None if held is None else RaggedRows(
        held.keys.double(), held.values.double(), held.mass, held.starts, held.lengths, held.longest
    )  # fmt: skip


@pytest.mark.cover
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("enough", [0, 10**6], ids=["many", "few"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triton_agrees_with_the_equation(shape, enough, merged, dtype, monkeypatch):
    monkeypatch.setattr("kvbench.kernels.attention.triton.ENOUGH", enough)
    monkeypatch.setattr("kvbench.kernels.attention.triton.FEW", 0)
    queries, held, keys, values = made(shape, merged, dtype)
    scaling = shape[-1] ** -0.5
    exact, sums = attend_ragged(queries.double(), as_double(held), keys.double(), values.double(), scaling, lse=True)
    found, own = attend_ragged(queries, held, keys, values, scaling, lse=True, implementation="triton")
    assert found.dtype == dtype
    largest = values.abs().max() if held is None else max(values.abs().max(), held.values.abs().max())
    # bfloat16: p and the output are rounded to 8 bits each; q, k and v are what they are
    assert (found - exact).abs().max() <= largest * (2e-6 if dtype == torch.float32 else 2**-7)
    assert (own - sums).abs().max() <= 2e-5
    without, none = attend_ragged(queries, held, keys, values, scaling, implementation="triton")
    assert none is None and torch.equal(without, found)


@pytest.mark.cover
@pytest.mark.parametrize("sinks, cap", [(True, None), (False, 1.5), (True, 1.5)])
@pytest.mark.parametrize("programs", [1, 512], ids=["single", "split"])
@pytest.mark.parametrize("enough", [0, 10**6], ids=["many", "few"])
@pytest.mark.parametrize("shape", [(2, 2, 3, 1, 5, 37, 32), (2, 1, 3, 5, 9, 70, 16)], ids=str)
def test_sinks_and_caps(shape, enough, programs, sinks, cap, monkeypatch):
    monkeypatch.setattr("kvbench.kernels.attention.triton.ENOUGH", enough)
    monkeypatch.setattr("kvbench.kernels.attention.triton.PROGRAMS", dict.fromkeys((16, 32, 64, 128), programs))
    monkeypatch.setattr("kvbench.kernels.attention.triton.FEW", 0)
    queries, held, keys, values = made(shape, True, torch.float32)
    one_each = torch.tensor([40.0, -3.0, 0.0, 1.0, -40.0, 2.0], device=DEVICE)[: queries.shape[1]]
    extras = SoftmaxExtras(one_each if sinks else None, cap)
    exact, sums = attend_ragged(
        queries.double(), as_double(held), keys.double(), values.double(), 0.2, lse=True, extras=extras
    )
    found, own = attend_ragged(queries, held, keys, values, 0.2, lse=True, extras=extras, implementation="triton")
    largest = max(values.abs().max(), held.values.abs().max())
    assert (found - exact).abs().max() <= largest * 2e-6 and (own - sums).abs().max() <= 2e-5
    plain, _ = attend_ragged(queries, held, keys, values, 0.2, implementation="triton")
    assert (found - plain).abs().max() > 0.1


@pytest.mark.cover
@pytest.mark.parametrize("window", [1, 20, 300])
@pytest.mark.parametrize("tokens, rows", [(70, 70), (66, 140), (1, 19)])
@pytest.mark.parametrize("enough", [0, 10**6], ids=["many", "few"])
def test_windows_with_sinks_and_caps(enough, tokens, rows, window, monkeypatch):
    monkeypatch.setattr("kvbench.kernels.attention.triton.ENOUGH", enough)
    monkeypatch.setattr("kvbench.kernels.attention.triton.FEW", 0)
    queries, _, keys, values = made((1, 1, 2, tokens, rows, 0, 16), False, torch.float32)
    sinks = torch.tensor([2.0, -1.0], device=DEVICE)
    exact = [x.double() for x in (queries, keys, values)]
    expected = attend_windowed(*exact, 0.2, window, SoftmaxExtras(sinks.double(), 1.5))
    extras = SoftmaxExtras(sinks, 1.5)
    found = attend_windowed_extras(queries, keys, values, 0.2, window, extras, implementation="triton")
    assert (found - expected).abs().max() <= values.abs().max() * 2e-6


@pytest.mark.parametrize("enough", [0, 10**6], ids=["many", "few"])
def test_masses_may_be_weights(enough, monkeypatch):
    """Numbers with a fraction, from almost nothing on, as methods that weigh rows store them."""
    monkeypatch.setattr("kvbench.kernels.attention.triton.ENOUGH", enough)
    monkeypatch.setattr("kvbench.kernels.attention.triton.FEW", 0)
    queries, held, keys, values = made((2, 2, 3, 5, 9, 37, 32), True, torch.float32)
    held = replace(held, mass=10 ** torch.linspace(-12, 3, len(held.mass), device=DEVICE))
    exact, sums = attend_ragged(queries.double(), as_double(held), keys.double(), values.double(), 0.2, lse=True)
    found, own = attend_ragged(queries, held, keys, values, 0.2, lse=True, implementation="triton")
    largest = max(values.abs().max(), held.values.abs().max())
    assert (found - exact).abs().max() <= largest * 2e-6 and (own - sums).abs().max() <= 2e-5


@pytest.mark.skipif(DEVICE == "cpu", reason="cuDNN's attention needs a GPU")
@pytest.mark.cover
@pytest.mark.parametrize("longest", [0, 300])
@pytest.mark.parametrize("tail", [512, 700])
def test_two_calls_joined_are_one_attention(monkeypatch, longest, tail):
    monkeypatch.setattr("kvbench.kernels.attention.PLANNED", 1)
    queries, held, keys, values = made((2, 2, 4, 512, tail, longest, 64), False, torch.bfloat16)
    if held is not None:
        rows = torch.randn(2 * 2 * longest, 64, device=DEVICE).bfloat16()
        full = torch.full((4,), longest, device=DEVICE)
        held = RaggedRows(rows, rows.flip(0), None, full.cumsum(0) - full, full, longest, even=True)
    exact, sums = attend_ragged(queries.double(), as_double(held), keys.double(), values.double(), 0.125, lse=True)
    found, own = attend_ragged(queries, held, keys, values, 0.125, lse=True, implementation="cudnn")
    chosen, _ = attend_ragged(queries, held, keys, values, 0.125)
    assert torch.equal(found, chosen)
    assert (found - exact).abs().max() <= exact.abs().max() * 2**-6 and (own - sums).abs().max() <= 2e-4
    extras = SoftmaxExtras(torch.linspace(-1, 6, 8, device=DEVICE).bfloat16())
    given = as_double(held), keys.double(), values.double(), 0.125
    exact, sums = attend_ragged(queries.double(), *given, lse=True, extras=extras)
    found, own = attend_ragged(queries, held, keys, values, 0.125, lse=True, extras=extras, implementation="cudnn")
    assert (found - exact).abs().max() <= exact.abs().max() * 2**-6 and (own - sums).abs().max() <= 2e-4


def test_a_single_earlier_row_is_not_cudnns(monkeypatch):
    """What a small share of a short first block leaves: cuDNN takes no keys of one row."""
    monkeypatch.setattr("kvbench.kernels.attention.cudnn_serves", lambda queries, keys: True)
    monkeypatch.setattr("kvbench.kernels.attention.PLANNED", 1)
    queries, keys = torch.zeros(1, 2, 600, 16), torch.zeros(1, 1, 700, 16)
    for longest, tail, chosen in (
        (1, 600, None),
        (2, 600, "cudnn"),
        (0, 601, None),
        (0, 600, "cudnn"),
        (1, 601, "cudnn"),
    ):
        rows, count = torch.zeros(longest, 16), torch.tensor([longest])
        held = RaggedRows(rows, rows, None, count - longest, count, longest, even=True) if longest else None
        assert choose_cudnn(queries, held, keys, tail, None) == chosen


@pytest.mark.parametrize(("tokens", "earlier", "chosen"), [(512, 0, None), (2**15, 0, "cudnn"), (512, 2**17, None)])
def test_cudnn_is_chosen_for_work_that_is_worth_a_plan(monkeypatch, tokens, earlier, chosen):
    monkeypatch.setattr("kvbench.kernels.attention.cudnn_serves", lambda queries, keys: True)
    queries, keys = (torch.empty(1, *shape, 128, device="meta") for shape in ((32, tokens), (8, tokens + earlier)))
    assert choose_cudnn(queries, None, keys, tokens + earlier, None) == chosen


@pytest.mark.skipif(DEVICE == "cpu", reason="torch chooses cuDNN on a GPU only")
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("masked", [False, True])
def test_no_length_needs_a_plan_of_cudnn(tokens, masked):
    """A token of an answer would wait for a plan, because it attends to one more row than the last."""
    queries, keys = (torch.randn(1, heads, n, 64, device=DEVICE).bfloat16() for heads, n in ((4, tokens), (2, 40)))
    mass = torch.ones(1, 2, 40, device=DEVICE) if masked else None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as seen:
        attend(queries, keys, keys, mass, 0.125)
    assert not [event.key for event in seen.key_averages() if "cudnn" in event.key]


def test_one_query_of_many_samples_reads_a_heads_rows_once(monkeypatch):
    """However many heads there are, the query heads of a group share a program."""
    from kvbench.kernels.attention import triton as own

    monkeypatch.setattr(own, "_many", None)
    monkeypatch.setattr(own, "ENOUGH", 1)
    queries, held, keys, values = made((3, 2, 4, 1, 3, 9, 16), False, torch.float32)
    found, expected = (
        attend_ragged(queries, held, keys, values, 0.25, implementation=name)[0] for name in ("triton", "reference")
    )
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("enough", [4, only_in_full(10**6)])
def test_a_prompt_is_rounded_alike_whatever_the_batch(enough, monkeypatch):
    """By the batch, two samples would share fewer splits, or be read by the other kernel."""
    monkeypatch.setattr("kvbench.kernels.attention.triton.ENOUGH", enough)
    monkeypatch.setattr("kvbench.kernels.attention.triton.PROGRAMS", dict.fromkeys((16, 32, 64, 128), 10))
    queries, _, keys, values = made((2, 1, 2, 70, 70, 0, 16), False, torch.float32)
    together = attend_ragged(queries, None, keys, values, 0.25, implementation="triton")[0]
    for sample in range(2):
        part = (own[sample : sample + 1] for own in (queries, keys, values))
        alone = attend_ragged(next(part), None, *part, 0.25, implementation="triton")[0]
        assert torch.equal(together[sample], alone[0])


@pytest.mark.parametrize("longest", [only_in_full(0), 40])
def test_samples_whose_ranges_need_much_memory_are_read_after_each_other(longest, monkeypatch):
    queries, held, keys, values = made((2, 2, 3, 22, 40, longest, 16), False, torch.float32)
    given = queries, held, keys, values, 0.25
    together = attend_ragged(*given, lse=True, implementation="triton")
    monkeypatch.setattr("kvbench.kernels.attention.triton.SCRATCH", 1)
    apart = attend_ragged(*given, lse=True, implementation="triton")
    assert all(map(torch.equal, together, apart))


@pytest.mark.parametrize("group", [3, 1])
def test_a_query_attends_to_ragged_rows_without_a_tail(group):
    """As to the same rows, of which the last are a tail."""
    queries, held, keys, values = made((2, 2, group, 1, 4, 37, 32), False, torch.float32)
    both = [
        torch.cat([torch.cat([own[start : start + length], more]) for start, length, more in zip(
            held.starts.tolist(), held.lengths.tolist(), tail.flatten(0, 1), strict=True)])
        for own, tail in ((held.keys, keys), (held.values, values))
    ]  # fmt: skip
    lengths = held.lengths + 4
    together = RaggedRows(*both, None, lengths.cumsum(0) - lengths, lengths, held.longest + 4)
    for name in ("reference", "triton"):
        expected, sums = attend_ragged(queries, held, keys, values, 0.2, lse=True, implementation=name)
        none = keys[:, :, :0], values[:, :, :0]
        found, own = attend_ragged(queries, together, *none, 0.2, lse=True, implementation=name)
        assert torch.allclose(found, expected, atol=1e-6) and torch.allclose(own, sums, atol=1e-5)
    with pytest.raises(ValueError, match="1 tokens of 0 rows"):
        attend_ragged(queries, None, *none, 0.2)


def test_a_step_counts_further_rows_of_the_tail():
    queries, held, keys, values = made((2, 2, 3, 1, 9, 37, 32), True, torch.float32)
    step = torch.tensor(4, dtype=torch.int32, device=DEVICE)
    expected, _ = attend_ragged(queries, held, keys, values, 0.2, implementation="reference")
    for name in ("reference", "triton"):
        found, _ = attend_ragged(queries, held, keys, values, 0.2, tail=5, step=step, implementation=name)
        assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    "group, held_rows, many, dtype",
    [
        (1, 0, True, torch.float32),
        (4, 37, False, torch.bfloat16),
        (20, 0, True, torch.bfloat16),
        (40, 5, False, torch.float32),
        only_in_full(1, 0, True, torch.bfloat16),
        only_in_full(4, 37, False, torch.float32),
        only_in_full(20, 0, True, torch.float32),
        only_in_full(40, 5, False, torch.bfloat16),
    ],
)
def test_the_largest_products_come_along(group, held_rows, many, dtype, monkeypatch):
    """Rows behind the last one may get any number. 40 queries of a head are more than one program has in float32."""
    if not many:  # samples one after the other, as with more than FEW queries of a head
        monkeypatch.setattr("kvbench.kernels.attention.triton.FEW", 0)
        monkeypatch.setattr("kvbench.kernels.attention.triton.SCRATCH", 1)
    queries, held, keys, values = made((2, 2, group, 1, 100, 37, 32), False, dtype)
    held = held if held_rows else None
    step = torch.tensor(4, dtype=torch.int32, device=DEVICE)
    plain, _ = attend_ragged(queries, held, keys, values, 0.2, tail=90, step=step, implementation="triton")
    exact = (queries[:, :, 0].unflatten(1, (2, group)).double() @ keys.double().mT).amax(2)[..., :94]
    for name in ("reference", "triton"):
        largest = torch.full(keys.shape[:3], torch.nan, device=DEVICE)
        given = {"tail": 90, "step": step, "largest": largest, "implementation": name}
        found, _ = attend_ragged(queries, held, keys, values, 0.2, **given)
        assert torch.allclose(largest[..., :94].double(), exact, atol=1e-5 if dtype == torch.float32 else 1e-4)
        assert name == "reference" or torch.equal(found, plain)


def test_the_reference_is_attention_over_the_rows_padded():
    queries, held, keys, values = made((1, 1, 2, 3, 9, 37, 32), True, torch.float64)
    both = torch.cat([held.keys[None, None], keys], 2), torch.cat([held.values[None, None], values], 2)
    mass = torch.cat([held.mass.double(), torch.ones(9).to(DEVICE)])[None, None]
    expected, _ = attend(queries, *both, mass, 0.2, implementation="reference")
    assert torch.allclose(attend_ragged(queries, held, keys, values, 0.2)[0], expected)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"implementation": "flash"}, "reference, triton"),
        ({"tail": 2}, "3 tokens of 2 rows"),
        ({"dim": 16}, "queries"),
        ({"largest": torch.zeros(1, 1, 9)}, "largest .* of 3 tokens"),
    ],
)
def test_what_does_not_fit_is_refused(change, word):
    queries, held, keys, values = made((1, 1, 2, 3, 9, 37, 32), False, torch.float32)
    tail = change.pop("tail", 9)
    keys, values = keys[:, :, :tail], values[:, :, :tail]
    queries = queries[..., : change.pop("dim", 32)]
    with pytest.raises(ValueError, match=word):
        attend_ragged(queries, held, keys, values, 0.2, **change)


def ahead_of_time(kind, dtype, dim, extras):
    from kvbench.kernels.attention import triton as own

    kernel = getattr(own, kind)
    real = {
        "scale": "fp32",
        "starts": "*i64",
        "lengths": "*i64",
        "step": "*i32",
        "held_mass": "*i32",
        "lse": "*fp32",
        "largest": "*fp32",
    }
    constants = {
        "D": dim, "WHOLE": True, "HELD": True, "MASS": True, "LSE": True, "CAST": False, "STEP": True,
        "SINGLE": False, "LARGEST": True, "M": 128 if kind == "_many" else 16, "N": 64, "S": 64,
        **({"CAP": 50.0, "WINDOW": 128} if extras else {"CAP": None, "WINDOW": None, "sinks": None}),
    }  # fmt: skip
    pointers = ("queries", "keys", "values", "outputs", "sinks")
    types = {}
    for name in kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name.startswith("part_"):
            types[name] = "*fp32"
        else:
            types[name] = real.get(name, f"*{dtype}" if name.endswith(pointers) else "i32")
    chosen = {name: value for name, value in constants.items() if name in kernel.arg_names}
    return kernel, types, chosen, {"num_warps": 8 if kind == "_many" else 4, "num_stages": 3}


def ahead():
    for kind in ("_few", "_many", "combine_splits"):
        for dim in (64, 128):
            for extras in (True, False):
                yield ahead_of_time(kind, "bf16", dim, extras)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_narrower_values_give_the_first_numbers_of_the_outputs(implementation):
    """Each number of an output depends on one number of the values alone."""
    queries, held, keys, values = made((1, 2, 2, 3, 9, 20, 32), True, torch.float32)
    wide, sums = attend_ragged(queries, held, keys, values, 0.3, lse=True, implementation=implementation)
    narrow = replace(held, values=held.values[:, :24])
    outputs, lse = attend_ragged(queries, narrow, keys, values[..., :24], 0.3, lse=True, implementation=implementation)
    torch.testing.assert_close(outputs, wide[..., :24])
    torch.testing.assert_close(lse, sums)

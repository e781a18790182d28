"""Kernels against loops in float64, over odd sizes, groups, ragged heads, merged rows and masks."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from kvbench.cache.storage import StoredRows
from kvbench.interfaces.rows import Rows
from kvbench.kernels.accumulated_attention import accumulated_attention
from kvbench.kernels.attention import attend, attend_ragged
from kvbench.kernels.attention import reference as attend_reference
from kvbench.kernels.attention import sdpa as attend_sdpa
from kvbench.kernels.max_attention import max_attention
from kvbench.kernels.row_selection import gather_rows
from kvbench.kernels.soft_matching import even_rows, match
from kvbench.kernels.soft_matching import reference as match_reference
from kvbench.kernels.softmax_extras import SoftmaxExtras
from kvbench.kernels.window_attention import window_probabilities
from kvbench.kernels.window_attention.pooling import pool

# batch, KV heads, query heads of a group, tokens, rows, dimension
SHAPES = [(1, 1, 1, 1, 1, 8), (2, 2, 3, 5, 5, 16), (1, 3, 1, 1, 37, 8), (2, 2, 4, 7, 33, 24), (1, 1, 3, 13, 130, 32)]
MASSES = ("all", "ones", "ragged", "merged")


def made(shape, mass="all", look=False, seed=0):
    """Queries, keys, values, mass and look in float64. Absent rows stand on the left and never reach the block."""
    batch, heads, group, tokens, rows, dim = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    queries, keys, values = (
        normal(batch, heads * group, tokens, dim) * 2,
        normal(batch, heads, rows, dim),
        normal(batch, heads, rows, dim),
    )
    masses = None if mass == "all" else torch.ones(batch, heads, rows, dtype=torch.float64)
    if mass == "merged":
        masses[..., : rows - tokens] = torch.randint(
            1, 900, (batch, heads, rows - tokens), generator=generator
        ).double()
    if mass in ("ragged", "merged"):
        absent = torch.randint(0, rows - tokens + 1, (batch, heads, 1), generator=generator)
        masses = masses.masked_fill(torch.arange(rows) < absent, 0)
    seen = None
    if look:
        seen = torch.rand(batch, heads * group, rows, generator=generator) < 0.5
        seen[..., rows - tokens :] = True
    return queries, keys, values, masses, seen


def by_loops(queries, keys, values, mass, scaling, look=None, sliding=None, sinks=None, cap=None):
    """Outputs and log-sum-exps, one query and one row at a time."""
    batch, query_heads, tokens, _ = queries.shape
    heads, rows = keys.shape[1:3]
    outputs, sums = torch.zeros_like(queries), queries.new_zeros(queries.shape[:3])
    for b in range(batch):
        for q in range(query_heads):
            h = q // (query_heads // heads)
            for t in range(tokens):
                last = rows - tokens + t
                weights = {}
                for j in range(last + 1):
                    m = 1.0 if mass is None else float(mass[b, h, j])
                    hidden = look is not None and not look[b, q, j]
                    if m == 0 or hidden or (sliding is not None and j <= last - sliding):
                        continue
                    logit = float(queries[b, q, t] @ keys[b, h, j]) * scaling
                    weights[j] = m * math.exp(logit if cap is None else cap * math.tanh(logit / cap))
                total = sum(weights.values()) + (0 if sinks is None else math.exp(float(sinks[q])))
                for j, weight in weights.items():
                    outputs[b, q, t] += weight / total * values[b, h, j]
                sums[b, q, t] = math.log(total)
    return outputs, sums


@pytest.mark.cover
@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("mass", MASSES)
@pytest.mark.parametrize("shape", SHAPES)
def test_attend(shape, mass, look):
    inputs = made(shape, mass, look)
    scaling = 0.7 * shape[-1] ** -0.5
    expected, sums = by_loops(*inputs[:4], scaling, inputs[4])
    outputs, lse = attend(*inputs[:4], scaling, look=inputs[4], lse=True, implementation="reference")
    torch.testing.assert_close(outputs, expected, rtol=1e-10, atol=1e-12)
    assert lse.dtype == torch.float64
    torch.testing.assert_close(lse, sums, rtol=1e-10, atol=1e-12)
    single = [x if x is None or x.dtype == torch.bool else x.float() for x in inputs]
    # a logit of size s is off by s·2^-24·√d at most, which moves weights by as much
    tolerance = 2.0**-24 * 8 * shape[-1] * float(expected.abs().max())
    for implementation in ("reference", "sdpa"):
        outputs, none = attend(*single[:4], scaling, look=single[4], implementation=implementation)
        assert none is None and outputs.dtype == torch.float32
        torch.testing.assert_close(outputs.double(), expected, rtol=0, atol=tolerance)
    outputs, none = attend(*inputs[:4], scaling, look=inputs[4], implementation="sdpa")
    torch.testing.assert_close(outputs, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("cap", [None, 0.9])
@pytest.mark.parametrize("sinks", [None, (0.5, -2.0, 3.0, 90.0, 1.0, -90.0, 0.0, 2.0)])
@pytest.mark.parametrize("shape, mass, look", [(SHAPES[3], "merged", True), (SHAPES[1], "all", False)])
def test_sinks_and_caps(shape, mass, look, sinks, cap):
    """A sink is one more term of the denominator, and a cap bends logits before the mass."""
    *inputs, seen = made(shape, mass, look)
    logits = None if sinks is None else torch.tensor(sinks, dtype=torch.float64)[: inputs[0].shape[1]]
    extras = SoftmaxExtras(logits, cap)
    expected, sums = by_loops(*inputs, 0.3, seen, sinks=logits, cap=cap)
    outputs, lse = attend(*inputs, 0.3, look=seen, lse=True, extras=extras, implementation="reference")
    torch.testing.assert_close((outputs, lse), (expected, sums), rtol=1e-10, atol=1e-12)
    without_lse, none = attend(*inputs, 0.3, look=seen, extras=extras)
    assert none is None
    torch.testing.assert_close(without_lse, expected, rtol=1e-10, atol=1e-12)
    if shape[3] == shape[4]:
        outputs, lse = attend(*(x if x is None else x.float() for x in inputs), 0.3, lse=True, extras=extras)
        torch.testing.assert_close((outputs.double(), lse.double()), (expected, sums), rtol=1e-5, atol=1e-5)


def test_sdpa_refuses_a_cap():
    queries, keys, values, *_ = made(SHAPES[1])
    with pytest.raises(ValueError, match="attend: implementation 'sdpa'"):
        attend(queries, keys, values, None, 0.3, extras=SoftmaxExtras(cap=1.0), implementation="sdpa")


@pytest.mark.cover
@pytest.mark.parametrize("mass", MASSES)
@pytest.mark.parametrize("chunk", [1, 500])
def test_attend_in_steps_writes_every_output(chunk, mass, monkeypatch):
    """With few logits at once, and with memory that was NaN before."""
    inputs = made(SHAPES[3], mass, look=True)
    expected = by_loops(*inputs[:4], 0.3, inputs[4])
    monkeypatch.setattr(attend_reference, "CHUNK", chunk)
    monkeypatch.setattr(attend_sdpa, "CHUNK", chunk)
    monkeypatch.setattr(torch, "empty_like", lambda like, **_: torch.full_like(like, math.nan))
    for implementation in ("reference", "sdpa"):
        outputs, _ = attend(*inputs[:4], 0.3, look=inputs[4], implementation=implementation)
        torch.testing.assert_close(outputs, expected[0], rtol=1e-9, atol=1e-11)
    _, lse = attend(*inputs[:4], 0.3, look=inputs[4], lse=True)
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-6, atol=1e-6)


def test_attend_takes_views_as_models_make_them():
    """Queries whose heads and tokens were swapped, and slices of a larger block."""
    queries, keys, values, mass, _ = made(SHAPES[3], "merged")
    expected, _ = by_loops(queries, keys, values, mass, 0.3)
    swapped = queries.transpose(1, 2).contiguous().transpose(1, 2)
    sliced = torch.cat([queries, queries], 2)[:, :, -queries.shape[2] :]
    for view in (swapped, sliced):
        for implementation in ("reference", "sdpa"):
            found, _ = attend(view, keys, values, mass, 0.3, implementation=implementation)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(
        window_probabilities(sliced, keys, mass, 0.3), window_probabilities(queries, keys, mass, 0.3)
    )


@pytest.mark.parametrize("implementation", ["reference", "sdpa"])
def test_a_mass_of_n_is_a_row_n_times(implementation):
    queries, keys, values, _, _ = made((1, 2, 3, 1, 9, 16))
    counts = torch.tensor([3, 1, 7, 2, 1, 1, 40, 1, 1])
    repeated = (x.repeat_interleave(counts, dim=2) for x in (keys, values))
    expected, _ = by_loops(queries, *repeated, None, 0.25)
    found, _ = attend(queries, keys, values, counts.double().expand(1, 2, 9), 0.25, implementation=implementation)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("implementation", ["reference", "sdpa"])
def test_absent_rows_hold_anything_finite(implementation):
    """Their content changes no bit; storage gives zeros there, so NaN never stands beside a weight of 0."""
    queries, keys, values, mass, _ = (x if x is None else x.float() for x in made(SHAPES[3], "ragged"))
    absent = mass == 0
    assert absent.any()
    before, _ = attend(queries, keys, values, mass, 0.3, implementation=implementation)
    probabilities = window_probabilities(queries, keys, mass, 0.3)
    keys[absent], values[absent] = 1e4, -1e30
    after, _ = attend(queries, keys, values, mass, 0.3, implementation=implementation)
    assert torch.equal(before, after)
    assert torch.equal(window_probabilities(queries, keys, mass, 0.3), probabilities)


def test_storage_fills_absent_rows_with_zeros_and_keeps_the_rest():
    generator = torch.Generator().manual_seed(3)
    keys, values = torch.randn(2, 2, 2, 9, 4, generator=generator).unbind()
    rows = StoredRows().append(keys, values)
    view = rows.view()
    mass = torch.ones(2, 2, 9)
    mass[0, 0, :5] = mass[1, 1, 1:8] = 0
    mass[0, 1, 3] = 4
    kept = Rows(keys.masked_fill(mass[..., None] == 0, math.nan), values, view.places, mass)
    rows = rows.keep(kept, even=False, merged=True)
    view = rows.view()
    assert rows.counts().tolist() == [[4, 9], [9, 2]] and len(view) == 9
    assert view.places[0, 0].tolist() == [-1] * 5 + [5, 6, 7, 8] and view.places[1, 1].tolist() == [-1] * 7 + [0, 8]
    assert view.mass[0, 0].tolist() == [0] * 5 + [1] * 4 and view.mass[0, 1, 3] == 4
    assert (view.keys[0, 0, :5] == 0).all() and (view.values[1, 1, :7] == 0).all()
    assert torch.equal(view.keys[0, 0, 5:], keys[0, 0, 5:]) and torch.equal(view.values[1, 1, 8], values[1, 1, 8])
    assert torch.equal(view.keys[1, 0], keys[1, 0])


@pytest.mark.cover
@pytest.mark.parametrize("sliding", [None, 1, 4, 50])
@pytest.mark.parametrize("chunk", [1, 1 << 24])
@pytest.mark.parametrize("shape", SHAPES[1:])
def test_attend_windowed(shape, chunk, sliding, monkeypatch):
    monkeypatch.setattr(attend_sdpa, "CHUNK", chunk)
    queries, keys, values, _, _ = made(shape)
    expected, _ = by_loops(queries, keys, values, None, 0.3, sliding=sliding)
    found = attend_sdpa.attend_windowed(queries, keys, values, 0.3, sliding)
    assert found.transpose(1, 2).is_contiguous()  # as models view it
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    sinks = torch.linspace(-2, 4, queries.shape[1], dtype=torch.float64)
    expected, _ = by_loops(queries, keys, values, None, 0.3, sliding=sliding, sinks=sinks, cap=0.9)
    found = attend_sdpa.attend_windowed(queries, keys, values, 0.3, sliding, SoftmaxExtras(sinks, 0.9))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("width", [3, 11])
@pytest.mark.parametrize("shape", SHAPES[1:3])
def test_values_may_have_another_width(shape, width):
    """A kernel of one width fills the narrower part with zeros."""
    queries, keys, values, mass, _ = made(shape, "ones")
    values = torch.cat([values, values.flip(2), values], -1)[..., :width]
    parts = [values[..., [column] * queries.shape[3]] for column in range(width)]
    expected = torch.stack([by_loops(queries, keys, part, None, 0.3)[0][..., 0] for part in parts], -1)
    for call in (
        lambda: attend(queries, keys, values, mass, 0.3)[0],
        lambda: attend_ragged(queries, None, keys, values, 0.3, implementation="reference")[0],
        lambda: attend_sdpa.attend_windowed(queries, keys, values, 0.3, None),
    ):
        torch.testing.assert_close(call(), expected, rtol=1e-9, atol=1e-11)
    with pytest.raises(ValueError, match="attend"):
        attend(queries[..., :-1], keys, values, None, 0.3)
    index = torch.arange(keys[..., 0].numel())
    gathered = gather_rows(index, keys, values)
    assert torch.equal(gathered[0], keys.flatten(0, 2)) and torch.equal(gathered[1], values.flatten(0, 2))


@pytest.mark.parametrize("chunk", [3, 50])
@pytest.mark.parametrize("shape", SHAPES[1:])
def test_attend_within_chunks(shape, chunk, monkeypatch):
    """The first row is at position 4, so that a chunk begins before it."""
    monkeypatch.setattr(attend_sdpa, "CHUNK", 1)
    queries, keys, values, _, _ = made(shape)
    tokens, rows = queries.shape[2], keys.shape[2]
    expected = torch.empty_like(queries)
    for token in range(tokens):
        position = rows - tokens + token
        seen = [row for row in range(position + 1) if (4 + row) // chunk == (4 + position) // chunk]
        part, _ = by_loops(queries[:, :, token : token + 1], keys[:, :, seen], values[:, :, seen], None, 0.3)
        expected[:, :, token : token + 1] = part
    found = attend_sdpa.attend_windowed(queries, keys, values, 0.3, None, chunk=chunk, first=4)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_attend_refuses_what_does_not_fit():
    queries, keys, values, mass, _ = made(SHAPES[3], "ones")
    wrong = [
        (queries[:1], keys, values, mass),
        (queries, keys, values[:, :, :-1], mass),
        (queries[..., :-1], keys, values, mass),
        (queries[:, :7], keys, values, mass),
        (queries, keys[:, :, :6], values[:, :, :6], mass[:, :, :6]),
        (queries, keys, values, mass[:, :, :-1]),
        (queries, keys, values, mass[:, :1]),
    ]
    for arguments in wrong:
        with pytest.raises(ValueError, match="attend"):
            attend(*arguments, 1.0)
    for more in ({"implementation": "triton"}, {"implementation": "sdpa", "lse": True}):
        with pytest.raises(ValueError, match="implementation"):
            attend(queries, keys, values, mass, 1.0, **more)


@pytest.mark.cover
@pytest.mark.parametrize("mass", MASSES[1:])
@pytest.mark.parametrize("shape", SHAPES)
def test_window(shape, mass):
    queries, keys, _, masses, _ = made(shape, mass)
    batch, heads, group, tokens, rows, _ = shape
    found = window_probabilities(queries, keys, masses, 0.4)
    assert found.shape == (batch, heads, group, tokens, rows)
    ones = torch.eye(rows, dtype=torch.float64).expand(batch, heads, rows, rows)
    wide = torch.cat([keys, torch.zeros(batch, heads, rows, rows - keys.shape[-1])], -1) if rows > shape[-1] else None
    if wide is not None:  # values that are the rows' own unit vectors make outputs of probabilities
        padded = torch.cat([queries, torch.zeros(batch, heads * group, tokens, rows - shape[-1])], -1)
        expected, _ = by_loops(padded, wide, ones, masses, 0.4)
        torch.testing.assert_close(found.flatten(1, 2), expected, rtol=1e-9, atol=1e-12)
    assert (found[(masses == 0)[:, :, None, None].expand_as(found)] == 0).all()
    torch.testing.assert_close(found.sum(-1), torch.ones_like(found[..., 0]))
    single = window_probabilities(queries.float(), keys.float(), masses.float(), 0.4)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), found, rtol=1e-4, atol=1e-6)
    assert window_probabilities(queries.bfloat16(), keys.bfloat16(), masses.float(), 0.4).dtype == torch.float32


@pytest.mark.parametrize("sinks, cap", [(True, None), (False, 0.9), (True, 0.9)])
def test_probabilities_with_sinks_and_caps(sinks, cap):
    """Values that are unit vectors make outputs of probabilities."""
    shape = 2, 2, 2, 5, 33, 33
    queries, keys, _, masses, _ = made(shape, "merged")
    logits = torch.tensor([1.0, 6.0, -3.0, 0.0], dtype=torch.float64) if sinks else None
    extras, eye = SoftmaxExtras(logits, cap), torch.eye(33, dtype=torch.float64).expand(2, 2, 33, 33)

    def expect(mass):
        outputs, sums = by_loops(queries, keys, eye, mass, 0.4, sinks=logits, cap=cap)
        return outputs.unflatten(1, (2, 2)), sums

    expected, sums = expect(masses)
    torch.testing.assert_close(window_probabilities(queries, keys, masses, 0.4, extras=extras), expected)
    votes = accumulated_attention(queries, keys, masses, sums, 0.4, extras=extras)
    torch.testing.assert_close(votes, expected.sum(3))
    peaks = max_attention(queries, keys, 0.4, together=False, extras=extras)
    torch.testing.assert_close(peaks, expect(None)[0].amax(3))


def test_window_refuses_what_does_not_fit():
    queries, keys, _, mass, _ = made(SHAPES[3], "ones")
    for arguments in ((queries[:, :7], keys, mass), (queries, keys[:, :, :6], mass[:, :, :6])):
        with pytest.raises(ValueError, match="window"):
            window_probabilities(*arguments, 1.0)


@pytest.mark.cover
@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize("kernel", [1, 3, 7, 21])
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 40])
def test_pool(rows, kernel, pooling):
    scores = torch.rand(2, 3, rows, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = pool(scores, kernel, pooling)
    assert found.shape == scores.shape
    for index in range(rows):
        near = scores[..., max(0, index - kernel // 2) : index + kernel // 2 + 1]
        expected = near.amax(-1) if pooling == "max" else near.sum(-1) / kernel
        torch.testing.assert_close(found[..., index], expected)


@pytest.mark.cover
@pytest.mark.parametrize("chunk", [None, 2, 3, 7, 8, 100])
@pytest.mark.parametrize("held", [1, 100, 1 << 21])
@pytest.mark.parametrize("rows", [1, 2, 3, 9, 16, 29])
def test_match(rows, chunk, held, monkeypatch):
    monkeypatch.setattr(match_reference, "CHUNK", held)
    keys = torch.randn(2, 3, rows, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    similar, partner = match(keys, chunk)
    size = chunk or rows
    proposing = [j for j in range(rows) if j % size % 2 == 0]
    assert even_rows(rows, chunk, keys.device).tolist() == proposing
    assert similar.shape == partner.shape == (2, 3, len(proposing))
    for b in range(2):
        for h in range(3):
            for edge, j in enumerate(proposing):
                start = j // size * size
                odd = list(range(start + 1, min(start + size, rows), 2))
                if not odd:
                    assert similar[b, h, edge] == -math.inf
                    continue
                cosines = [float(normalize(keys[b, h, j], dim=0) @ normalize(keys[b, h, i], dim=0)) for i in odd]
                assert similar[b, h, edge].item() == pytest.approx(max(cosines), abs=1e-12)
                assert partner[b, h, edge] == odd[cosines.index(max(cosines))]


def test_match_refuses_a_chunk_without_pairs():
    for chunk in (1, 0, -3):
        with pytest.raises(ValueError, match="chunk"):
            match(torch.zeros(1, 1, 4, 2), chunk)


@pytest.mark.parametrize("dtype, spread", [(torch.bfloat16, 4.0), (torch.float16, 60.0)])
def test_half_precision_is_that_of_the_inputs_only(dtype, spread):
    """Logits, probabilities and sums of bfloat16 and float16 inputs are those of float64 arithmetic on them, also where
    a product of float16 rows exceeds its range.
    """
    generator = torch.Generator().manual_seed(3)
    queries = (spread * torch.randn(2, 6, 9, 64, generator=generator)).to(dtype)
    keys = (spread * torch.randn(2, 2, 40, 64, generator=generator)).to(dtype)
    values = torch.randn(2, 2, 40, 64, generator=generator).to(dtype)
    scaling, mass = 0.3 / spread**2, torch.ones(2, 2, 40)
    exact = [x.double() for x in (queries, keys, values)]
    if dtype == torch.float16:
        assert (exact[0].unflatten(1, (2, 3)) @ exact[1][:, :, None].mT).abs().max() > torch.finfo(dtype).max / 2
    wanted, sums = attend(*exact, mass.double(), scaling, lse=True, implementation="reference")
    outputs, lse = attend(queries, keys, values, mass, scaling, lse=True, implementation="reference")
    torch.testing.assert_close(lse, sums.float(), rtol=0, atol=1e-4)
    torch.testing.assert_close(outputs.double(), wanted, rtol=0, atol=2 * torch.finfo(dtype).eps)
    close = dict(rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(
        window_probabilities(queries, keys, mass, scaling),
        window_probabilities(*exact[:2], mass.double(), scaling).float(),
        **close,
    )
    torch.testing.assert_close(
        accumulated_attention(queries, keys, mass, lse, scaling),
        accumulated_attention(*exact[:2], mass.double(), sums, scaling).float(),
        **close,
    )
    torch.testing.assert_close(
        max_attention(queries, keys, scaling), max_attention(*exact[:2], scaling).float(), **close
    )

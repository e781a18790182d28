"""What the last queries saw, and DropKV's and AnDPro's scores: Triton against float64, on a GPU where there is one and
else in the interpreter. A logit is a sum of d products in float32, so it is off by some 2^-21 of their absolute sum;
p is off by that factor, and every tolerance below follows from it.
"""

import math
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.kernels import window_attention as window_package
from kvbench.kernels.removal_scores import andpro, dropkv
from kvbench.kernels.removal_scores.reference import dropkv_reference
from kvbench.kernels.softmax_extras import SoftmaxExtras
from kvbench.kernels.window_attention import REDUCTIONS, window_probabilities, window_statistics
from kvbench.kernels.window_attention import pooling as pool_module
from kvbench.kernels.window_attention.pooling import pool_group
from kvbench.methods.allocators.cake import Cake as CakeShares
from kvbench.methods.andpro import AnDPro
from kvbench.methods.cake import Cake
from kvbench.methods.dropkv import DropKV
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.tova import TOVA
from tests.support.selection import only_in_full

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALING = 0.3
TRITON = dict(implementation="triton")
pytestmark = [  # of the interpreter's numpy: loops over run-time ranges, and numbers that are none
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

# batch, KV heads, query heads of a group, queries, rows, dimension, mass, programs to aim at
CASES = [
    (1, 1, 1, 1, 1, 16, "ones", 1056),
    (2, 2, 3, 5, 5, 24, "none", 1056),
    (1, 2, 4, 8, 129, 128, "ragged", 1056),
    (1, 1, 4, 8, 300, 64, "merged", 2),  # several tiles a program
    (2, 1, 8, 5, 77, 96, "merged", 1056),
    (1, 2, 1, 32, 150, 32, "none", 3),
    (1, 1, 4, 64, 131, 16, "ragged", 1056),  # several tiles of queries
    (1, 1, 16, 1, 40, 256, "ragged", 1056),
]


@dataclass
class Made:
    """Inputs as a model makes them: views, with numbers that are none wherever nothing may be read."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    outputs: Tensor
    mass: Tensor | None

    def double(self) -> "Made":
        """The same numbers as float64, rows that do not exist as zeros."""
        keys, values, mass = self.keys.double(), self.values.double(), self.mass
        if mass is not None:
            absent = (mass == 0)[..., None]
            keys, values, mass = keys.masked_fill(absent, 0), values.masked_fill(absent, 0), mass.double()
        return Made(self.queries.double(), keys, values, self.outputs.double(), mass)

    @property
    def looked(self) -> tuple:
        return self.queries, self.keys, self.mass, SCALING

    @property
    def all(self) -> tuple:
        return self.queries, self.keys, self.values, self.outputs, self.mass, SCALING


def made(case, dtype, sink: float = 0.0) -> Made:
    """`sink`: what is added to every query's logit of the first row that exists; outputs are then attention's own."""
    batch, heads, group, tokens, rows, dim, mass, _ = case
    draw = torch.Generator().manual_seed(rows)

    def queried() -> Tensor:
        whole = torch.randn(batch, tokens + 3, heads * group, dim, generator=draw).to(DEVICE, dtype)
        return whole.transpose(1, 2)[:, :, -tokens:]

    def held() -> Tensor:
        buffer = torch.full((batch, heads, rows + 7, dim), math.nan)
        buffer[:, :, :rows] = torch.randn(batch, heads, rows, dim, generator=draw)
        return buffer.to(DEVICE, dtype)[:, :, :rows]

    queries, outputs, keys, values = queried(), queried(), held(), held()
    masses = None if mass == "none" else torch.ones(batch, heads, rows)
    if mass == "merged":
        masses[..., : rows - tokens] = torch.randint(1, 900, (batch, heads, rows - tokens), generator=draw).float()
    absent = torch.zeros(batch, heads, 1, dtype=torch.int64)
    if mass in ("ragged", "merged"):
        absent = torch.randint(0, rows - tokens + 1, (batch, heads, 1), generator=draw)
        gone = torch.arange(rows) < absent
        masses = masses.masked_fill(gone, 0).to(DEVICE)
        keys[gone.to(DEVICE)], values[gone.to(DEVICE)] = math.nan, math.inf
    elif masses is not None:
        masses = masses.to(DEVICE)
    inputs = Made(queries, keys, values, outputs, masses)
    if sink:
        mean = queries.float().unflatten(1, (heads, group)).mean((2, 3))
        queries.sub_(mean.repeat_interleave(group, 1)[:, :, None].to(dtype))
        queries[..., 0] = 1
        first = absent.to(DEVICE)[..., None].expand(-1, -1, -1, dim)
        loud = torch.zeros_like(first, dtype=dtype)
        loud[..., 0] = sink / SCALING
        keys.scatter_(2, first, loud)
        exact = inputs.double()
        outputs.copy_((window_probabilities(*exact.looked) @ exact.values[:, :, None]).flatten(1, 2))
    return inputs


def blur(exact: Made) -> float:
    """Relative error that a float32 p may have."""
    queries = exact.queries.unflatten(1, (exact.keys.shape[1], -1)).abs()
    return 2.0**-20 * (1 + SCALING * float((queries @ exact.keys.abs()[:, :, None].mT).max()))


@pytest.fixture(autouse=True)
def memory_that_was_nan(monkeypatch):
    """New tensors hold NaN."""
    empty, new_empty = torch.empty, Tensor.new_empty

    def poisoned(make):
        def make_poisoned(*args, **options):
            tensor = make(*args, **options)
            return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

        return make_poisoned

    monkeypatch.setattr(torch, "empty", poisoned(empty))
    monkeypatch.setattr(Tensor, "new_empty", poisoned(new_empty))


@pytest.fixture
def programs(monkeypatch):
    """Sets how many programs a launch aims at."""
    from kvbench.kernels.window_attention import triton

    return lambda count: monkeypatch.setattr(triton, "PROGRAMS", count)


def close(found: Tensor, expected: Tensor, tolerance: Tensor) -> None:
    assert found.dtype == torch.float32 and found.shape == expected.shape
    over = (found.double() - expected).abs() - tolerance
    assert not found.isnan().any() and over.max() <= 0, f"{over.max()} over the tolerance"


@pytest.mark.cover
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_glance(case, dtype, programs):
    inputs = made(case, dtype)
    programs(case[-1])
    exact = inputs.double()
    p, off = window_probabilities(*exact.looked), blur(exact)
    expected = window_statistics(*exact.looked, REDUCTIONS)
    mean, variance, entropy = window_statistics(*inputs.looked, REDUCTIONS, **TRITON)
    close(mean, expected[0], off * p.mean(-2))
    close(variance, expected[1], 4 * off * p.square().sum(-2) / max(1, case[3] - 1))
    close(entropy, expected[2], off * (p * (2 + p.clamp(min=1e-30).log().abs())).sum(-2) + 1e-9)
    (alone,) = window_statistics(*inputs.looked, **TRITON)
    close(alone, expected[0], off * p.mean(-2))
    if inputs.mass is not None:
        absent = (inputs.mass == 0)[:, :, None].expand_as(mean)
        assert (mean[absent] == 0).all() and (alone[absent] == 0).all()


ONE_QUERY, FIVE_QUERIES = (2, 2, 3, 1, 70, 24, "none", 3), (1, 2, 3, 5, 77, 32, "merged", 1056)


@pytest.mark.parametrize(
    ("case", "sinks", "cap"),
    [
        (ONE_QUERY, False, 1.5), (ONE_QUERY, True, 1.5), (FIVE_QUERIES, True, None), (FIVE_QUERIES, True, 1.5),
        only_in_full(ONE_QUERY, True, None), only_in_full(FIVE_QUERIES, False, 1.5),
    ],
)  # fmt: skip
def test_sinks_and_caps(case, sinks, cap, programs):
    """In statistics, for one query and for several, and in the scores of `removal_scores`."""
    inputs = made(case, torch.float32)
    programs(case[-1])
    exact = inputs.double()
    logits = torch.tensor([0.0, 6.0, -4.0, 90.0, 1.0, 2.0], device=DEVICE) if sinks else None
    more = dict(extras=SoftmaxExtras(logits, cap))
    p, off = window_probabilities(*exact.looked, **more), blur(exact)
    assert p.sum(-1).min() < 0.01 if sinks else torch.allclose(p.sum(-1), torch.ones_like(p[..., 0]))
    for of in (("mean",), REDUCTIONS):
        expected = window_statistics(*exact.looked, of, **more)
        found = window_statistics(*inputs.looked, of, **more, **TRITON)
        close(found[of.index("mean")], expected[of.index("mean")], off * p.mean(-2) + 1e-37)
    for score in (andpro, partial(dropkv, epsilon=1e-3, rounded=False)):
        expected, found = score(*exact.all, **more), score(*inputs.all, **more, **TRITON)
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-5)
        assert not torch.allclose(found.double(), score(*exact.all), rtol=0.1)


@pytest.mark.parametrize("tokens", [1, 5])
def test_glance_of_a_row_far_above_those_before_it(tokens, programs):
    """Sums relative to the first rows' maximum would be infinite."""
    inputs = made((1, 1, 2, tokens, 300, 16, "none", 1), torch.float32)
    programs(1)
    inputs.queries[..., 0], inputs.keys[:, :, :, 0] = 8, 0
    inputs.keys[:, :, 250, 0] = 90
    exact = inputs.double()
    (expected,), (found,) = window_statistics(*exact.looked), window_statistics(*inputs.looked, **TRITON)
    assert expected.max() > 0.99
    close(found, expected, blur(exact) * expected + 1e-37)


def test_glance_gives_what_is_asked_for_the_same_every_time():
    inputs = made(CASES[2], torch.bfloat16)
    every = dict(zip(REDUCTIONS, window_statistics(*inputs.looked, REDUCTIONS, **TRITON), strict=True))
    for of in (("variance",), ("entropy", "mean"), ("mean", "mean")):
        found, again = (window_statistics(*inputs.looked, of, **TRITON) for _ in range(2))
        assert len(found) == len(of) and all(map(torch.equal, found, again))
        for name, own in zip(of, found, strict=True):
            torch.testing.assert_close(own, every[name])


def test_reductions_by_loops():
    exact = made(CASES[1], torch.float32).double()
    p = window_probabilities(*exact.looked).cpu()
    mean, variance, entropy = (x.cpu() for x in window_statistics(*exact.looked, REDUCTIONS))
    single = window_statistics(exact.queries[:, :, -1:], *exact.looked[1:], ("variance",))[0]
    assert (single == 0).all()
    for place in torch.cartesian_prod(*map(torch.arange, mean.shape)).tolist():
        b, h, g, j = place
        own = [float(p[b, h, g, t, j]) for t in range(p.shape[3])]
        middle = sum(own) / len(own)
        assert mean[b, h, g, j].item() == pytest.approx(middle, rel=1e-12)
        assert variance[b, h, g, j].item() == pytest.approx(sum((x - middle) ** 2 for x in own) / (len(own) - 1))
        assert entropy[b, h, g, j].item() == pytest.approx(-sum(x * math.log(x + 1e-10) for x in own))


def bounds(exact: Made, epsilon: float, rounded: bool) -> tuple[Tensor, Tensor]:
    """The least and most that DropKV's score may be: weights grow with p, whose error is `blur`; a distance is off by
    float32's rounding of it where p is over a quarter, else of ‖a‖² + ‖v‖².
    """
    p, off = window_probabilities(*exact.looked), blur(exact)
    anchors = exact.outputs.reshape(*p.shape[:2], -1, 1, exact.outputs.shape[-1])
    values = exact.values[:, :, None]
    distances = (anchors - values).square().sum(-1)
    lengths = anchors.square().sum(-1) + values.square().sum(-1)
    slack = 1e-5 * distances + torch.where(p.flatten(2, 3) > 0.25, 0, 2.0**-19 * lengths)
    both = []
    for sign in (-1, 1):
        moved = (p * (1 + sign * off)).clamp(max=1).flatten(2, 3)
        if rounded:
            moved = moved.bfloat16().double()
        weights = (moved / (1 - moved + epsilon)).square()
        both.append((weights * (distances + sign * slack).clamp(min=0)).sum(2) / p.shape[2])
    return both[0], both[1]


def within(found: Tensor, least: Tensor, most: Tensor) -> None:
    """Sums over many queries add some rounding, and squares of small p may underflow."""
    assert found.dtype == torch.float32 and found.shape == least.shape
    under, over = least * (1 - 1e-5) - 1e-36 - found.double(), found.double() - most * (1 + 1e-5) - 1e-36
    assert under.max() <= 0 and over.max() <= 0, (under.max(), over.max())


@pytest.mark.cover
@pytest.mark.parametrize("dtype, rounded", [(DTYPES[0], False), (DTYPES[1], True), (DTYPES[2], False)])
@pytest.mark.parametrize("case", CASES)
def test_dropkv(case, dtype, rounded, programs):
    inputs = made(case, dtype)
    programs(case[-1])
    least, most = bounds(inputs.double(), 1e-6, rounded)
    found = dropkv(*inputs.all, 1e-6, rounded, **TRITON)
    within(found, least, most)
    if inputs.mass is not None:
        assert (found[inputs.mass == 0] == 0).all()


@pytest.mark.cover
@pytest.mark.parametrize("sink, rounded", [(6.0, False), (11.0, True), (20.0, True), (-40.0, True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dropkv_of_a_sink_keeps_the_digits_of_its_distance(dtype, sink, rounded):
    """Where p is near 1, the output is near the sink's value and its weight near 1/ε²."""
    inputs = made((2, 1, 8, 5, 77, 96, "ragged", 1056), dtype, sink)
    exact = inputs.double()
    if sink > 0:
        assert window_probabilities(*exact.looked).max() > 0.6
    least, most = bounds(exact, 1e-6, rounded)
    found = dropkv(*inputs.all, 1e-6, rounded, **TRITON)
    within(found, least, most)
    if rounded and sink == 20.0:  # p is 1 for sure, and only the distance can be wrong
        largest = found.double().amax(-1)
        torch.testing.assert_close(largest, dropkv(*exact.all, 1e-6, rounded).amax(-1), rtol=1e-4, atol=0)


def test_dropkv_by_loops():
    exact = made(CASES[1], torch.float32).double()
    p = window_probabilities(*exact.looked).cpu()
    queries, _, values, outputs, *_ = (x.cpu() if isinstance(x, Tensor) else x for x in exact.all)
    batch, heads, group, tokens, rows = p.shape
    found = dropkv_reference(*exact.all, 1e-3, False).cpu()
    along = andpro(*exact.all).cpu()
    for b, h, j in torch.cartesian_prod(*map(torch.arange, (batch, heads, rows))).tolist():
        removed = projected = 0.0
        for g in range(group):
            for t in range(tokens):
                own, anchor = float(p[b, h, g, t, j]), outputs[b, h * group + g, t]
                removed += (own / (1 - own + 1e-3)) ** 2 * float((anchor - values[b, h, j]).square().sum())
                projected += own * float(anchor @ values[b, h, j])
        assert found[b, h, j].item() == pytest.approx(removed / group, rel=1e-9)
        assert along[b, h, j].item() == pytest.approx(projected / group, rel=1e-9)


@pytest.mark.cover
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [own if place in (1, 3, 4) else only_in_full(own) for place, own in enumerate(CASES)])
def test_andpro(case, dtype, programs):
    inputs = made(case, dtype)
    programs(case[-1])
    exact = inputs.double()
    p, anchors = (
        window_probabilities(*exact.looked).flatten(2, 3),
        exact.outputs.unflatten(1, (case[1], -1)).flatten(2, 3),
    )
    size = (p * (anchors.abs() @ exact.values.abs().mT)).sum(2) / case[2]
    close(andpro(*inputs.all, **TRITON), andpro(*exact.all), 2 * blur(exact) * size)


@pytest.mark.cover
@pytest.mark.parametrize("group", ["after", "before"])
@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize("kernel", [1, 11])
@pytest.mark.parametrize("shape", [(2, 2, 3, 700), (1, 1, 1, 1), (1, 3, 4, 37)])
def test_pool_group(shape, kernel, pooling, group):
    draw = torch.Generator().manual_seed(0)
    scores, hidden = torch.randn(shape, generator=draw), torch.rand(*shape[:2], shape[3], generator=draw) < 0.3
    for mask in (None, hidden):
        expected = pool_group(scores.double(), mask, kernel, pooling, group)
        own = None if mask is None else mask.to(DEVICE)
        found = pool_group(scores.to(DEVICE), own, kernel, pooling, group, **TRITON)
        close(found.cpu(), expected, torch.full_like(expected, 2.0**-20))
        order = torch.rand(*shape[:2], shape[3], generator=draw).argsort(-1)  # the same rows as they may lie in memory
        mixed = torch.empty_like(scores).scatter_(-1, order[:, :, None].expand(shape), scores).to(DEVICE)
        own = None if mask is None else torch.empty_like(mask).scatter_(-1, order, mask).to(DEVICE)
        for implementation in ("reference", "triton"):
            ordered = {"order": order.to(DEVICE), "implementation": implementation}
            again = pool_group(mixed, own, kernel, pooling, group, **ordered)
            close(again.gather(-1, ordered["order"]).cpu(), expected, torch.full_like(expected, 2.0**-20))
    scores[0, 0, 0, 0] = math.nan
    assert pool_group(scores.to(DEVICE), None, kernel, pooling, group, **TRITON)[0, 0, 0].isnan()


def shown(case, dtype, tokens: int) -> tuple[Observation, Rows]:
    """A block of `tokens` that a layer read, and its rows."""
    inputs = made(case, dtype)
    rows = case[4]
    mass = torch.ones(inputs.keys.shape[:3], device=DEVICE) if inputs.mass is None else inputs.mass
    places = torch.arange(rows, device=DEVICE).expand(mass.shape).masked_fill(mass == 0, -1)
    held = Rows(
        inputs.keys.nan_to_num(0).masked_fill((mass == 0)[..., None], 0),
        inputs.values.nan_to_num(0, 0, 0).masked_fill((mass == 0)[..., None], 0),
        places,
        mass,
    )
    queries, outputs = inputs.queries[:, :, -tokens:], inputs.outputs[:, :, -tokens:]
    weight = queries.new_zeros(1)
    return Observation(queries, outputs, None, SCALING, weight, None, 0, 1, rows - tokens, rows, True, False), held


METHODS = [
    SnapKV("snapkv", window=8, kernel=7, pooling="max", group="after"),
    SnapKV("snapkv", window=6, kernel=5, pooling="avg", group="before"),
    TOVA("tova", scope="layer", recent=0),
    TOVA("tova", scope="group", recent=0),
    Cake("cake", window=5, kernel=5, gamma=200.0),
    DropKV("dropkv", window=8, kernel=11, pooling="max", epsilon=1e-6, p_dtype="fp32"),
    AnDPro("andpro", window=8, kernel=1, chunk=1, first=0, anchor="output"),
    AnDPro("andpro", window=8, kernel=1, chunk=4, first=1, anchor="output"),
]


@pytest.mark.cover
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("tokens", [8, 3])
def test_methods_score_alike_with_and_without_kernels(method, tokens, monkeypatch):
    seen, rows = shown(CASES[3], torch.float32, tokens)
    scores = {}
    for name in ("reference", "triton"):
        for module in (window_package, pool_module):
            monkeypatch.setattr(module, "choose_implementation", lambda *_, name=name: name)
        scores[name] = method.score(seen, rows, State((0,)))
    size = float(scores["reference"].abs().max())
    torch.testing.assert_close(scores["triton"], scores["reference"], rtol=1e-4, atol=1e-6 * size)


def test_cake_shares_alike_with_and_without_kernels(monkeypatch):
    seen, rows = shown(CASES[3], torch.float32, 8)
    allocator, found = CakeShares("cake", tau1=1.6, tau2=0.4, window=5, cascade=False), {}
    for name in ("reference", "triton"):
        monkeypatch.setattr(window_package, "choose_implementation", lambda *_, name=name: name)
        found[name] = allocator.preference(seen, rows)
    torch.testing.assert_close(found["triton"], found["reference"], rtol=1e-5, atol=0)


def test_what_does_not_fit_is_refused():
    inputs = made(CASES[2], torch.float32)
    queries, keys, values, outputs, mass, scaling = inputs.all
    short = (keys[:, :, :7], mass[:, :, :7])
    for wrong in (
        dict(queries=queries[:, :7]), dict(queries=queries[..., :16]), dict(queries=queries[:, :, :0]),
        dict(mass=mass[..., 1:]), dict(keys=short[0], mass=short[1]),
    ):  # fmt: skip
        arguments = dict(queries=queries, keys=keys, mass=mass, scaling=scaling) | wrong
        for op in (window_probabilities, window_statistics):
            with pytest.raises(ValueError, match=f"^{op.__name__}: queries"):
                op(**arguments)
    for wrong in (dict(values=values[:, :, 1:]), dict(outputs=outputs[:, :, 1:])):
        arguments = dict(queries=queries, keys=keys, values=values, outputs=outputs, mass=mass, scaling=scaling) | wrong
        with pytest.raises(ValueError, match="^andpro: keys"):
            andpro(**arguments)
        with pytest.raises(ValueError, match="^dropkv: keys"):
            dropkv(**arguments, epsilon=1e-6, rounded=True)
    with pytest.raises(ValueError, match="^window_statistics: of"):
        window_statistics(*inputs.looked, ("median",))
    with pytest.raises(ValueError, match="^pool_group: scores"):
        pool_group(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3), 1, "max")
    long, apart = torch.zeros(1, 8, 65, 128, device=DEVICE), queries.mT.contiguous().mT
    for other in (long, apart, queries.bfloat16()):
        with pytest.raises(ValueError, match="^window_statistics: implementation triton supports at most 64 queries"):
            window_statistics(other, keys, mass, scaling, **TRITON)
    clean = inputs.double().keys.float()
    for other in (long, apart):  # nothing was asked for by name
        assert window_statistics(other, clean, None, scaling)[0].isfinite().all()


def ahead():
    """The kernels for bfloat16 at the shapes that are measured, float32, and the widest rows."""
    from kvbench.kernels.removal_scores.triton import score_kernel
    from kvbench.kernels.window_attention.triton import join_kernel, partial_kernel, reduce_kernel, share_kernel, tiles
    from kvbench.kernels.window_attention.triton_pooling import pool_kernel

    def entry(kernel, constants, name, **options):
        floats = ("maxima", "sums", "mean", "variance", "entropy", "scores", "pooled", "mass", "held", "top", "share")
        types = {}
        for argument in kernel.arg_names:
            if argument in constants:
                types[argument] = "constexpr"
            elif argument in ("queries", "keys", "values", "outputs", "sinks"):
                types[argument] = f"*{name}"
            elif argument in floats:
                types[argument] = "*fp32"
            else:
                types[argument] = {"hidden": "*u8", "order": "*i64", "scale": "fp32", "epsilon": "fp32"}.get(
                    argument, "i32"
                )
        return kernel, types, constants, options

    removal, along = (dict(REMOVAL=own, ROUNDED=own) for own in (True, False))
    every = dict(MEAN=True, VARIANCE=True, ENTROPY=True)
    one, many = dict(HOLD=True, AGAIN=False), dict(HOLD=False, AGAIN=True)
    for name, group, tokens, dim, kernels in [
        ("bf16", 4, 1, 128, ((partial_kernel, 1, one),)),
        ("bf16", 4, 8, 128, ((partial_kernel, 1, many), (reduce_kernel, 1, every), (score_kernel, 2, removal))),
        ("bf16", 4, 32, 128, ((partial_kernel, 1, many), (reduce_kernel, 1, every), (score_kernel, 2, along))),
        ("bf16", 4, 64, 256, ((score_kernel, 2, removal),)),
        ("fp32", 3, 5, 64, ((partial_kernel, 1, many), (score_kernel, 2, removal))),
    ]:
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[name]
        for kernel, products, more in kernels:
            cut = tiles(group, tokens, dim, dtype, products)
            shape = dict(GT=cut.heads, WT=cut.width, N=cut.rows, D=cut.depth, DIM=dim, MASS=True, CAST=False)
            shape["CAP"] = 50.0 if tokens == 8 else None
            yield entry(kernel, shape | more, name, **cut.options)
    yield entry(join_kernel, dict(GT=4, WT=32, SPLITS=128), "bf16", num_warps=8)
    yield entry(join_kernel, dict(GT=4, WT=32, SPLITS=128, sinks=None), "fp32", num_warps=8)
    yield entry(share_kernel, dict(GT=4, WT=4, N=1024), "fp32")
    yield entry(pool_kernel, dict(N=512, KERNEL=11, LARGEST=True, BEFORE=False, HIDDEN=True, ORDER=True), "fp32")

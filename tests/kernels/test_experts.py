"""Mixtures of experts: both implementations against the equations in float64, and what a mistake would change."""

import numpy as np
import pytest
import torch
from torch.nn.functional import gelu, silu

from kvbench.kernels.experts import Routing, gated_experts, route, sum_experts
from kvbench.kernels.fused_linear import rms_norm
from tests.support.kernel_checks import BOTH, DEVICE, poison_memory

STEP = 2**-8 if DEVICE == "cuda" else 2**-7  # of rounding to bfloat16; the interpreter cuts off instead
EXPERTS, HIDDEN, WIDTH = 6, 40, 20
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    poison_memory(monkeypatch)


def made(*size, dtype=torch.float32, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed + sum(size))).to(DEVICE, dtype)


def close(result, exact, steps):
    """Within float32's rounding, or that of `steps` results in bfloat16 of about the size of the largest."""
    bound = 1e-5 if result.dtype == torch.float32 else steps * STEP
    assert (result.double() - exact).abs().max() <= bound * exact.abs().max()


def choose_slowly(logits, routing, correction):
    """Choose the experts of one token by the definition, from logits (E,) in float64. Returns shares by expert."""
    scores = logits.softmax(0) if routing.scores == "softmax" else logits.sigmoid()
    choice = scores if correction is None else scores + correction
    size = len(logits) // routing.groups
    best_two = [float(choice[first : first + size].sort().values[-2:].sum()) for first in range(0, len(logits), size)]
    kept = sorted(range(routing.groups), key=best_two.__getitem__)[-routing.kept_groups :]
    allowed = [expert for group in kept for expert in range(group * size, group * size + size)]
    chosen = sorted(allowed, key=lambda expert: float(choice[expert]))[-routing.count :]
    shares = {expert: float(scores[expert]) for expert in chosen}
    total = sum(shares.values()) if routing.normalized else 1.0
    return {expert: share / total * routing.factor for expert, share in shares.items()}


@pytest.mark.parametrize(
    ("routing", "biased", "corrected"),
    [
        (Routing(3), False, False),
        (Routing(2, normalized=False), True, False),
        (Routing(2, "sigmoid", wide=True), False, True),
        (Routing(3, "sigmoid", factor=2.5, groups=3, kept_groups=2, wide=True), False, True),
    ],
    ids=["softmax", "unnormalized", "sigmoid", "groups"],
)
@BOTH
def test_a_router_chooses_by_its_scores(implementation, routing, biased, corrected):
    x, weight, scale = made(3, HIDDEN), made(EXPERTS, HIDDEN) / 8, made(HIDDEN)
    bias = made(EXPERTS, seed=1) if biased else None
    correction = made(EXPERTS, seed=2) if corrected else None
    given = {"norm": (scale, 1e-5), "bias": bias, "correction": correction, "implementation": implementation}
    normed, experts, shares = route(x, weight, routing, **given)
    torch.testing.assert_close(normed, rms_norm(x, scale, 1e-5, implementation="reference"))
    logits = normed.double() @ weight.double().T + (0 if bias is None else bias.double())
    for token in range(3):
        expected = choose_slowly(logits[token], routing, correction)
        result = dict(zip(experts[token].tolist(), shares[token].tolist(), strict=True))
        assert result == pytest.approx(expected, rel=1e-5)


@BOTH
def test_sparsemixer_is_that_of_phimoe(implementation):
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    x, weight = made(5, HIDDEN), made(EXPERTS, HIDDEN) / 8
    _, experts, shares = route(x, weight, Routing(2, "sparsemixer", jitter=0.2), implementation=implementation)
    expected, chosen = sparsemixer(x @ weight.T, 0.2, training=False)
    assert torch.equal(experts.long(), chosen)
    assert shares.min() < 0.999  # some other expert counts too
    torch.testing.assert_close(shares, expected)


@BOTH
def test_logits_are_rounded_unless_the_router_is_wide(implementation):
    x, weight = made(4, HIDDEN, dtype=torch.bfloat16), made(EXPERTS, HIDDEN, dtype=torch.bfloat16)
    for wide in (False, True):
        routing = Routing(EXPERTS, "sigmoid", normalized=False, wide=wide)
        _, experts, shares = route(x, weight, routing, implementation=implementation)
        logits = shares.double().logit()
        exact = (x.double() @ weight.double().T).gather(1, experts.long())
        assert ((logits - exact).abs() < 1e-3).double().mean() == 1 if wide else not torch.allclose(logits, exact)


@BOTH
def test_the_first_of_equal_experts_is_chosen_and_nan_stays_in_bounds(implementation):
    weight = torch.ones(EXPERTS, HIDDEN, device=DEVICE)
    x = torch.ones(2, HIDDEN, device=DEVICE)
    x[1, 3] = float("nan")
    with np.errstate(invalid="ignore"):  # of the interpreter
        _, experts, shares = route(x, weight, Routing(2), implementation=implementation)
    assert shares[0].tolist() == [0.5, 0.5] and shares[1].isnan().all()
    assert int(experts.min()) >= 0 and int(experts.max()) < EXPERTS
    assert implementation == "reference" or sorted(experts[0].tolist()) == [0, 1]


def draw_experts(tokens, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(EXPERTS, generator=generator)[:count] for _ in range(tokens)]).int().to(DEVICE)


def activate_slowly(gate, up, activation):
    if activation == "clamped":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    return (silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")) * up


@pytest.mark.cover
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "across", "interleaved", "biased", "activation"),
    [
        (1, False, False, False, "silu"),
        (1, True, True, True, "clamped"),
        (1, True, False, False, "gelu_tanh"),
        (5, False, False, True, "silu"),
        (5, True, True, True, "clamped"),
        (5, True, False, False, "gelu_tanh"),
    ],
)
@BOTH
def test_experts_read_their_tokens(implementation, tokens, across, interleaved, biased, activation, dtype):
    x, gate_up = made(tokens, HIDDEN, dtype=dtype), made(EXPERTS, 2 * WIDTH, HIDDEN, dtype=dtype)
    bias = made(EXPERTS, 2 * WIDTH, dtype=dtype) if biased else None
    experts = draw_experts(tokens, 3)
    if activation != "clamped":  # which needs products beyond its bounds
        gate_up /= 8
    if across:
        gate_up = gate_up.mT.contiguous().mT
    inner = gated_experts(
        x, gate_up, experts, bias=bias, activation=activation, interleaved=interleaved, implementation=implementation
    )
    assert inner.shape == (tokens, 3, WIDTH) and inner.dtype == dtype
    products = torch.einsum("bh,bknh->bkn", x.double(), gate_up.double()[experts.long()])
    products += 0 if bias is None else bias.double()[experts.long()]
    rows = torch.arange(2 * WIDTH, device=DEVICE)
    gates, ups = (rows[::2], rows[1::2]) if interleaved else rows.chunk(2)
    close(inner, activate_slowly(products[..., gates], products[..., ups], activation), steps=6)


@pytest.mark.cover
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "across", "biased", "added"),
    [
        (1, False, False, True),
        (1, False, True, False),
        (1, True, True, True),
        (5, False, True, True),
        (5, True, False, False),
    ],
)
@BOTH
def test_what_experts_make_is_summed_by_their_shares(implementation, tokens, across, biased, added, dtype):
    inner, down = made(tokens, 3, WIDTH, dtype=dtype), made(EXPERTS, HIDDEN, WIDTH, dtype=dtype)
    bias = made(EXPERTS, HIDDEN, dtype=dtype) if biased else None
    residual = made(tokens, HIDDEN, dtype=dtype) if added else None
    experts, shares = draw_experts(tokens, 3), made(tokens, 3).abs()
    if across:
        down = down.mT.contiguous().mT
    result = sum_experts(inner, down, experts, shares, bias=bias, residual=residual, implementation=implementation)
    assert result.dtype == dtype
    products = torch.einsum("bkn,bkhn->bkh", inner.double(), down.double()[experts.long()])
    products += 0 if bias is None else bias.double()[experts.long()]
    exact = (products * shares[..., None]).sum(1) + (0 if residual is None else residual.double())
    close(result, exact, steps=3)


@pytest.mark.parametrize("parts", [0, 1, 3])
def test_inputs_of_an_expert_are_divided_among_programs(monkeypatch, parts):
    """Of 40 inputs in blocks of 16, the last of 3 parts has half a block."""
    triton = pytest.importorskip("kvbench.kernels.experts.triton")
    tile = triton.Tile(16, 64 if parts == 0 else 16, 2, 4, parts)
    monkeypatch.setattr(triton, "DOWN", dict.fromkeys(triton.DOWN, tile))
    inner, down, bias, residual = made(1, 3, 40), made(EXPERTS, 24, 40), made(EXPERTS, 24), made(1, 24)
    experts, shares = draw_experts(1, 3), made(1, 3)
    results = [
        sum_experts(inner, down, experts, shares, bias=bias, residual=residual, implementation=implementation)
        for implementation in ("triton", "reference")
    ]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_tokens_beyond_those_that_share_reads_are_read_too():
    tokens = 70
    x, gate_up, down = made(tokens, 8), made(EXPERTS, 8, 8), made(EXPERTS, 8, 4)
    experts, shares = draw_experts(tokens, 2), made(tokens, 2)
    results = []
    for implementation in ("triton", "reference"):
        inner = gated_experts(x, gate_up, experts, implementation=implementation)
        results.append(sum_experts(inner, down, experts, shares, implementation=implementation))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused():
    x, weight = made(2, HIDDEN), made(EXPERTS, HIDDEN)
    for routing in (Routing(EXPERTS + 1), Routing(0), Routing(2, "tanh"), Routing(2, groups=4), Routing(4, groups=2)):
        with pytest.raises(ValueError, match="route: Routing"):
            route(x, weight, routing)
    with pytest.raises(ValueError, match="route: x"):
        route(x, weight, Routing(2), bias=made(EXPERTS + 1))
    experts, gate_up, down = draw_experts(2, 2), made(EXPERTS, 8, HIDDEN), made(EXPERTS, HIDDEN, 4)
    with pytest.raises(ValueError, match="gate_up"):
        gated_experts(x[:1], gate_up, experts)
    with pytest.raises(ValueError, match="gate_up"):
        gated_experts(x[:, ::2], gate_up[..., ::2], experts)
    with pytest.raises(ValueError, match="activation 'relu'"):
        gated_experts(x, gate_up, experts, activation="relu")
    with pytest.raises(ValueError, match="bias"):
        gated_experts(x, gate_up, experts, bias=made(EXPERTS, 4))
    inner, shares = made(2, 2, 4), made(2, 2)
    with pytest.raises(ValueError, match="down"):
        sum_experts(inner[..., :3], down, experts, shares)
    with pytest.raises(ValueError, match="residual"):
        sum_experts(inner, down, experts, shares, residual=x[:1])
    with pytest.raises(ValueError, match="bias"):
        sum_experts(inner, down, experts, shares, bias=made(EXPERTS, 4))


def ahead():
    from kvbench.kernels.experts import triton as kernels

    flags = dict.fromkeys(("NORM", "BIAS", "RESIDUAL", "CORRECTED", "NORMALIZED"), True)
    constants = flags | {
        "WIDE": False,
        "SCORES": "sigmoid",
        "ACTIVATION": "clamped",
        "COUNT": 8,
        "GROUPS": 4,
        "KEPT": 2,
    }
    constants |= {"INTERLEAVED": True, "BY_SLOT": False, "CAST": False, "C": 8, "G": 4, "E": 32, "M": 16, "S": 128}
    constants |= {"N": 32, "K": 64, "STAGES": 3, "PARTS": 2}
    types = {"epsilon": "fp32", "factor": "fp32", "jitter": "fp32", "chosen": "*i32"}
    types |= dict.fromkeys(("correction", "shares", "logits", "products"), "*fp32")
    types |= dict.fromkeys(("columns", "rows", "each", "tokens", "stride_e", "stride_n", "stride_k"), "i32")
    names = ("_logits", "_choose", "_gated", "_gated_shared", "_down", "_down_shared", "_combine")
    for name in names:
        kernel = getattr(kernels, name)
        for change in ({}, {"INTERLEAVED": False, "SCORES": "softmax", "GROUPS": 1, "G": 1, "E": 128, "BY_SLOT": True}):
            given = {key: part for key, part in (constants | change).items() if key in kernel.arg_names}
            kinds = {key: "constexpr" if key in given else types.get(key, "*bf16") for key in kernel.arg_names}
            if "experts" in kinds:
                kinds["experts"] = "i32" if name == "_logits" else "*i32"
            if name == "_logits" or name == "_down_shared":
                kinds["out"] = "*fp32"
            yield kernel, kinds, given, {"num_warps": 1 if name == "_choose" else 4}

"""Mixtures of experts in Triton. Derivation: README.md."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.dispatch import is_interpreting
from kvbench.kernels.experts.routing import MOST_TOKENS, Routing


@dataclass(frozen=True)
class Tile:
    """How a product is divided."""

    rows: int
    """Outputs of a program."""
    columns: int
    """Inputs that are read at once. Where a program serves all experts, of all of them together."""
    stages: int
    """Such parts that are being loaded at a time."""
    warps: int
    parts: int = 0
    """Programs that the inputs of each expert are divided among. 0 if a program serves all experts of a token."""


# "across" is for weights whose outputs follow one another in memory. Tiles were chosen by trial on an H200 (README.md).
LOGITS = Tile(2, 1024, 2, 4)
GATED = {"along": Tile(16, 256, 3, 4), "across": Tile(32, 128, 2, 4)}
DOWN = {"along": Tile(4, 1024, 3, 4), "across": Tile(64, 128, 2, 4, parts=2)}
GATED_SHARED = {"along": Tile(32, 128, 3, 4), "across": Tile(32, 64, 3, 4)}  # several tokens
DOWN_SHARED = {"along": Tile(64, 128, 3, 4), "across": Tile(64, 128, 3, 4)}


@triton.jit
def _logits(
    x,
    scale,
    weight,
    bias,
    normed,
    out,
    columns,
    experts,
    epsilon,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    WIDE: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Norm the hidden states of a token and compute N of the router's logits."""
    block, token = tl.program_id(0), tl.program_id(1)
    x += token.to(tl.int64) * columns
    inverse = 1.0
    if NORM:
        normed += token.to(tl.int64) * columns
        squares = tl.zeros([K], tl.float32)
        for first in range(0, columns, K):
            at = first + tl.arange(0, K)
            part = tl.load(x + at, mask=at < columns, other=0.0).to(tl.float32)  # (K,)
            squares += part * part
        inverse = 1.0 / tl.sqrt(tl.sum(squares, 0) / columns + epsilon)
    row = block * N + tl.arange(0, N)
    there = row < experts
    total = tl.zeros([N, K], tl.float32)
    for first in tl.range(0, columns, K, num_stages=STAGES):
        at = first + tl.arange(0, K)
        here = at < columns
        part = tl.load(x + at, mask=here, other=0.0)  # (K,)
        if NORM:
            factor = tl.load(scale + at, mask=here, other=0.0)  # (K,)
            rounded = (part.to(tl.float32) * inverse).to(factor.dtype)
            part = (rounded.to(tl.float32) * factor.to(tl.float32)).to(part.dtype)
            tl.store(normed + at, part, mask=here & (block == 0))
        where = there[:, None] & here[None]
        w = tl.load(weight + row[:, None] * columns + at[None], mask=where, other=0.0)  # (N, K)
        total += w.to(tl.float32) * part.to(tl.float32)[None]
    sums = tl.sum(total, 1)
    if BIAS:
        sums += tl.load(bias + row, mask=there, other=0.0).to(tl.float32)  # (N,)
    if not WIDE:
        sums = sums.to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + token * experts + row, sums, mask=there)


@triton.jit
def _choose(
    logits,
    correction,
    chosen,
    shares,
    each,
    factor,
    jitter,
    SCORES: tl.constexpr,
    CORRECTED: tl.constexpr,
    NORMALIZED: tl.constexpr,
    COUNT: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    C: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
):
    """Choose COUNT of GROUPS·each experts for a token. Of equal ones the first is chosen."""
    token = tl.program_id(0)
    flat = tl.arange(0, G * E)
    expert = flat // E * each + flat % E  # (G·E,)
    there = (flat // E < GROUPS) & (flat % E < each)
    logit = tl.load(logits + token * GROUPS * each + expert, mask=there, other=float("-inf"))  # (G·E,)
    left, score = logit, logit
    if SCORES == "softmax":
        score = tl.exp(logit - tl.max(logit, 0))
        score /= tl.sum(score, 0)
        left = score
    if SCORES == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-logit))
        left = score
    if CORRECTED:
        left += tl.load(correction + expert, mask=there, other=0.0)
    left = tl.where(there, left, float("-inf"))
    if GROUPS > 1:
        grouped, member = tl.reshape(left, [G, E]), tl.arange(0, E)[None]
        best = tl.max(grouped, 1)
        first = tl.min(tl.where(grouped == best[:, None], member, E), 1)
        best += tl.max(tl.where(member == first[:, None], float("-inf"), grouped), 1)  # (G,)
        group = tl.arange(0, G)
        kept = group < 0
        for _ in range(KEPT):
            first_group = tl.min(tl.where(best == tl.max(best, 0), group, G), 0)
            kept = kept | (group == first_group)
            best = tl.where(group == first_group, float("-inf"), best)
        left = tl.reshape(tl.where(kept[:, None], grouped, float("-inf")), [G * E])
    slot = tl.arange(0, C)
    experts, parts = tl.zeros([C], tl.int32), tl.zeros([C], tl.float32)
    for place in range(COUNT):
        top = tl.max(left, 0)
        best_expert = tl.min(tl.where(left == top, expert, GROUPS * each - 1), 0)  # the last one among NaN
        if SCORES == "sparsemixer":
            near = tl.where(there, logit, 1.0)
            far = (top - near) / tl.maximum(tl.abs(near), top) > 2 * jitter
            share = 1.0 / tl.sum(tl.where(far, 0.0, tl.exp(left - top)), 0)
        else:
            share = tl.sum(tl.where(there & (expert == best_expert), score, 0.0), 0)
        left = tl.where(expert == best_expert, float("-inf"), left)
        experts = tl.where(slot == place, best_expert, experts)
        parts = tl.where(slot == place, share, parts)
    if NORMALIZED:
        parts /= tl.sum(parts, 0) + 1e-20
    tl.store(chosen + token * COUNT + slot, experts, mask=slot < COUNT)
    tl.store(shares + token * COUNT + slot, parts * factor, mask=slot < COUNT)


@triton.jit
def _activate(gate, up, DTYPE: tl.constexpr, ACTIVATION: tl.constexpr):
    """Return f(gate)·up of float32 numbers, rounded to DTYPE after each step. All f are gate·σ(z)."""
    gate, up = gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
    z = gate
    if ACTIVATION == "gelu_tanh":
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2√(2/π)
    if ACTIVATION == "clamped":
        gate = tl.where(gate > 7.0, 7.0, gate)  # NaN stays
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
        z = 1.702 * gate
    return (gate / (1.0 + tl.exp(-z))).to(DTYPE).to(tl.float32) * up


@triton.jit
def _gated(
    x,
    weight,
    bias,
    experts,
    out,
    columns,
    rows,
    each,
    stride_e,
    stride_n,
    stride_k,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BIAS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute N outputs of one expert of a token."""
    block, slot = tl.program_id(0), tl.program_id(1)
    expert = tl.load(experts + slot).to(tl.int64)
    x += (slot // each).to(tl.int64) * columns
    weight += expert * stride_e
    bias += expert * rows * 2
    row = block * N + tl.arange(0, N)
    if INTERLEAVED:
        both = block * N * 2 + tl.arange(0, 2 * N)
        there = both < 2 * rows
        total = tl.zeros([2 * N, K], tl.float32)
        for first in tl.range(0, columns, K, num_stages=STAGES):
            at = first + tl.arange(0, K)
            here = at < columns
            part = tl.load(x + at, mask=here, other=0.0).to(tl.float32)  # (K,)
            offset, where = both[:, None] * stride_n + at[None] * stride_k, there[:, None] & here[None]
            total += tl.load(weight + offset, mask=where, other=0.0).to(tl.float32) * part[None]  # (2·N, K)
        sums = tl.sum(total, 1)
        if BIAS:
            sums += tl.load(bias + both, mask=there, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(sums, [N, 2]))
    else:
        there = row < rows
        one, two = tl.zeros([N, K], tl.float32), tl.zeros([N, K], tl.float32)
        ups = weight + rows.to(tl.int64) * stride_n
        for first in tl.range(0, columns, K, num_stages=STAGES):
            at = first + tl.arange(0, K)
            here = at < columns
            part = tl.load(x + at, mask=here, other=0.0).to(tl.float32)  # (K,)
            offset, where = row[:, None] * stride_n + at[None] * stride_k, there[:, None] & here[None]
            one += tl.load(weight + offset, mask=where, other=0.0).to(tl.float32) * part[None]  # (N, K)
            two += tl.load(ups + offset, mask=where, other=0.0).to(tl.float32) * part[None]  # (N, K)
        gate, up = tl.sum(one, 1), tl.sum(two, 1)
        if BIAS:
            gate += tl.load(bias + row, mask=there, other=0.0).to(tl.float32)
            up += tl.load(bias + rows + row, mask=there, other=0.0).to(tl.float32)
    inner = _activate(gate, up, out.dtype.element_ty, ACTIVATION)
    tl.store(out + slot.to(tl.int64) * rows + row, inner, mask=row < rows)


@triton.jit
def _find_slots(experts, slot, each, tokens, M: tl.constexpr, S: tl.constexpr):
    """Return the expert of a slot, whether an earlier slot has it too, and for each of M tokens its slot or -1."""
    expert = tl.load(experts + slot)
    all_slots = tl.arange(0, S)
    earlier = tl.load(experts + all_slots, mask=all_slots < slot, other=-1)  # (S,)
    taken = tl.sum((earlier == expert).to(tl.int32), 0) > 0
    token = tl.arange(0, M)
    mine = tl.zeros([M], tl.int32) - 1
    for place in range(each):
        at = token * each + place
        other = tl.load(experts + at, mask=token < tokens, other=-1)  # (M,)
        mine = tl.where(other == expert, at, mine)
    return expert.to(tl.int64), taken, mine


@triton.jit
def _add_product(part, w, total, CAST: tl.constexpr):
    """Return total + part·w. The interpreter cannot multiply bfloat16, and casts it."""
    if CAST:
        part, w = part.to(tl.float32), w.to(tl.float32)
    return tl.dot(part, w, total, input_precision="ieee")


@triton.jit(do_not_specialize=["tokens"])
def _gated_shared(
    x,
    weight,
    bias,
    experts,
    out,
    tokens,
    columns,
    rows,
    each,
    stride_e,
    stride_n,
    stride_k,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BIAS: tl.constexpr,
    CAST: tl.constexpr,
    M: tl.constexpr,
    S: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute N outputs of an expert for each of M tokens that chose it. The expert's first slot does the work."""
    block, slot, start = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64) * M
    left = tl.minimum(tokens - start, M)
    if slot < left * each:
        x += start * columns
        out += start * each * rows
        expert, taken, mine = _find_slots(experts + start * each, slot, each, left, M, S)
        if not taken:
            weight += expert * stride_e
            bias += expert * rows * 2
            token, row = tl.arange(0, M), block * N + tl.arange(0, N)
            if INTERLEAVED:
                both = block * N * 2 + tl.arange(0, 2 * N)
                there = both < 2 * rows
                total = tl.zeros([M, 2 * N], tl.float32)
                for first in tl.range(0, columns, K, num_stages=STAGES):
                    at = first + tl.arange(0, K)
                    here = at < columns
                    near = (mine >= 0)[:, None] & here[None]
                    part = tl.load(x + token[:, None] * columns + at[None], mask=near, other=0.0)  # (M, K)
                    offset, where = at[:, None] * stride_k + both[None] * stride_n, here[:, None] & there[None]
                    w = tl.load(weight + offset, mask=where, other=0.0)  # (K, 2·N)
                    total = _add_product(part, w, total, CAST)
                if BIAS:
                    total += tl.load(bias + both, mask=there, other=0.0).to(tl.float32)[None]
                gate, up = tl.split(tl.reshape(total, [M, N, 2]))
            else:
                there = row < rows
                ups = weight + rows.to(tl.int64) * stride_n
                gate, up = tl.zeros([M, N], tl.float32), tl.zeros([M, N], tl.float32)
                for first in tl.range(0, columns, K, num_stages=STAGES):
                    at = first + tl.arange(0, K)
                    here = at < columns
                    near = (mine >= 0)[:, None] & here[None]
                    part = tl.load(x + token[:, None] * columns + at[None], mask=near, other=0.0)  # (M, K)
                    offset, where = at[:, None] * stride_k + row[None] * stride_n, here[:, None] & there[None]
                    w = tl.load(weight + offset, mask=where, other=0.0)  # (K, N)
                    gate = _add_product(part, w, gate, CAST)
                    w = tl.load(ups + offset, mask=where, other=0.0)  # (K, N)
                    up = _add_product(part, w, up, CAST)
                if BIAS:
                    gate += tl.load(bias + row, mask=there, other=0.0).to(tl.float32)[None]
                    up += tl.load(bias + rows + row, mask=there, other=0.0).to(tl.float32)[None]
            inner = _activate(gate, up, out.dtype.element_ty, ACTIVATION)
            there_too = (mine >= 0)[:, None] & (row < rows)[None]
            tl.store(out + mine[:, None] * rows + row[None], inner, mask=there_too)


@triton.jit
def _down(
    inner,
    weight,
    bias,
    experts,
    shares,
    residual,
    out,
    columns,
    rows,
    each,
    stride_e,
    stride_n,
    stride_k,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute N outputs of a token. With PARTS, those of a part of one expert's inputs, without share and bias."""
    block, number = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = block * N + tl.arange(0, N)
    there = row < rows
    start, end = 0, columns
    slot = number * each + tl.arange(0, C)
    taken = tl.arange(0, C) < each
    if PARTS:
        width = tl.cdiv(tl.cdiv(columns, K), PARTS) * K
        start = number % PARTS * width
        end = tl.minimum(start + width, columns)
        slot = number // PARTS + tl.arange(0, C)
        taken = tl.arange(0, C) < 1
    # numbers of all experts are read before the loop, so that no address in it waits for another read
    expert = tl.load(experts + slot, mask=taken, other=0).to(tl.int64)  # (C,)
    inner += slot[:, None] * columns
    weight += expert[:, None, None] * stride_e + row[None, :, None] * stride_n
    total = tl.zeros([C, N, K], tl.float32)
    for first in tl.range(start, end, K, num_stages=STAGES):
        at = first + tl.arange(0, K)
        here = taken[:, None] & (at < columns)[None]
        part = tl.load(inner + at[None], mask=here, other=0.0).to(tl.float32)  # (C, K)
        where = here[:, None] & there[None, :, None]
        w = tl.load(weight + at[None, None] * stride_k, mask=where, other=0.0)  # (C, N, K)
        total += w.to(tl.float32) * part[:, None]
    products = tl.sum(total, 2)  # (C, N)
    if PARTS:
        sums = tl.sum(products, 0)
    else:
        if BIAS:
            where_bias = bias + expert[:, None] * rows + row[None]
            products += tl.load(where_bias, mask=taken[:, None] & there[None], other=0.0).to(tl.float32)
        sums = tl.sum(tl.load(shares + slot, mask=taken, other=0.0)[:, None] * products, 0)
        if RESIDUAL:
            sums = sums.to(out.dtype.element_ty).to(tl.float32)
            sums += tl.load(residual + number * rows + row, mask=there, other=0.0).to(tl.float32)  # (N,)
    tl.store(out + number * rows + row, sums, mask=there)


@triton.jit(do_not_specialize=["tokens"])
def _down_shared(
    inner,
    weight,
    experts,
    out,
    tokens,
    columns,
    rows,
    each,
    stride_e,
    stride_n,
    stride_k,
    CAST: tl.constexpr,
    M: tl.constexpr,
    S: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute N outputs of an expert for each of M tokens that chose it, like `_gated_shared`."""
    block, slot, start = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64) * M
    left = tl.minimum(tokens - start, M)
    if slot < left * each:
        inner += start * each * columns
        out += start * each * rows
        expert, taken, mine = _find_slots(experts + start * each, slot, each, left, M, S)
        if not taken:
            weight += expert * stride_e
            row = block * N + tl.arange(0, N)
            there = row < rows
            total = tl.zeros([M, N], tl.float32)
            for first in tl.range(0, columns, K, num_stages=STAGES):
                at = first + tl.arange(0, K)
                here = at < columns
                near = (mine >= 0)[:, None] & here[None]
                part = tl.load(inner + mine[:, None] * columns + at[None], mask=near, other=0.0)  # (M, K)
                offset, where = at[:, None] * stride_k + row[None] * stride_n, here[:, None] & there[None]
                w = tl.load(weight + offset, mask=where, other=0.0)  # (K, N)
                total = _add_product(part, w, total, CAST)
            where_to = out + mine[:, None] * rows + row[None]
            tl.store(where_to, total, mask=(mine >= 0)[:, None] & there[None])


@triton.jit
def _combine(
    products,
    bias,
    experts,
    shares,
    residual,
    out,
    rows,
    each,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    N: tl.constexpr,
):
    """Sum N products of all experts of a token, in PARTS each."""
    row, token = tl.program_id(0) * N + tl.arange(0, N), tl.program_id(1).to(tl.int64)
    there = row < rows
    sums = tl.zeros([N], tl.float32)
    for slot in range(token * each, token * each + each):
        product = tl.zeros([N], tl.float32)
        for part in tl.static_range(PARTS):
            product += tl.load(products + (slot * PARTS + part) * rows + row, mask=there, other=0.0)  # (N,)
        if BIAS:
            expert = tl.load(experts + slot).to(tl.int64)
            product += tl.load(bias + expert * rows + row, mask=there, other=0.0).to(tl.float32)  # (N,)
        sums += tl.load(shares + slot) * product
    if RESIDUAL:
        sums = sums.to(out.dtype.element_ty).to(tl.float32)
        sums += tl.load(residual + token * rows + row, mask=there, other=0.0).to(tl.float32)  # (N,)
    tl.store(out + token * rows + row, sums, mask=there)


def route_triton(
    x: Tensor,
    weight: Tensor,
    routing: Routing,
    norm: tuple[Tensor, float] | None,
    bias: Tensor | None,
    correction: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, experts = len(x), len(weight)
    normed = x if norm is None else torch.empty_like(x)
    logits = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
    scale, epsilon = norm or (x, 0.0)
    _logits[(triton.cdiv(experts, LOGITS.rows), tokens)](
        x,
        scale,
        weight,
        bias,
        normed,
        logits,
        x.shape[1],
        experts,
        epsilon,
        NORM=norm is not None,
        BIAS=bias is not None,
        WIDE=routing.wide,
        N=LOGITS.rows,
        K=LOGITS.columns,
        STAGES=LOGITS.stages,
        num_warps=LOGITS.warps,
    )
    chosen = torch.empty(tokens, routing.count, dtype=torch.int32, device=x.device)
    shares = torch.empty(tokens, routing.count, dtype=torch.float32, device=x.device)
    each = experts // routing.groups
    _choose[(tokens,)](
        logits,
        correction,
        chosen,
        shares,
        each,
        routing.factor,
        routing.jitter,
        SCORES=routing.scores,
        CORRECTED=correction is not None,
        NORMALIZED=routing.normalized and routing.scores != "sparsemixer",
        COUNT=routing.count,
        GROUPS=routing.groups,
        KEPT=routing.kept_groups,
        C=triton.next_power_of_2(max(2, routing.count)),
        G=triton.next_power_of_2(routing.groups),
        E=triton.next_power_of_2(max(2, each)),
        num_warps=1,
    )
    return normed, chosen, shares


def find_direction(weight: Tensor) -> str:
    """Return the key of a product's `Tile`."""
    return "along" if weight.stride(2) == 1 else "across"


def count_shared(tokens: int, each: int) -> tuple[int, int, int]:
    """Return how many tokens share reads, the next power of 2 of their slots, and the number of such reads."""
    shared = min(MOST_TOKENS, triton.next_power_of_2(max(16, tokens)))
    return shared, triton.next_power_of_2(shared * each), triton.cdiv(tokens, shared)


def gated_experts_triton(
    x: Tensor, gate_up: Tensor, experts: Tensor, bias: Tensor | None, activation: str, interleaved: bool
) -> Tensor:
    (tokens, each), rows = experts.shape, gate_up.shape[1] // 2
    out = torch.empty(tokens, each, rows, dtype=x.dtype, device=x.device)
    common = {"ACTIVATION": activation, "INTERLEAVED": interleaved, "BIAS": bias is not None}
    sizes = x.shape[1], rows, each, *gate_up.stride()
    given = x, gate_up, gate_up if bias is None else bias, experts, out
    if tokens == 1:
        tile = GATED[find_direction(gate_up)]
        _gated[(triton.cdiv(rows, tile.rows), each)](
            *given, *sizes, **common, N=tile.rows, K=tile.columns, STAGES=tile.stages, num_warps=tile.warps
        )
        return out
    tile, (shared, slots, reads) = GATED_SHARED[find_direction(gate_up)], count_shared(tokens, each)
    _gated_shared[(triton.cdiv(rows, tile.rows), min(tokens, shared) * each, reads)](
        *given,
        tokens,
        *sizes,
        **common,
        CAST=is_interpreting() and x.dtype == torch.bfloat16,
        M=shared,
        S=slots,
        N=tile.rows,
        K=tile.columns,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    return out


def sum_experts_triton(
    inner: Tensor, down: Tensor, experts: Tensor, shares: Tensor, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    (tokens, each), rows = experts.shape, down.shape[1]
    out = torch.empty(tokens, rows, dtype=inner.dtype, device=inner.device)
    sizes = inner.shape[2], rows, each, *down.stride()
    common = {"BIAS": bias is not None, "RESIDUAL": residual is not None}
    tile = DOWN[find_direction(down)]
    parts = tile.parts if tokens == 1 else 1
    served = 1 if parts else triton.next_power_of_2(each)
    products = torch.empty(tokens * each * parts, rows, dtype=torch.float32, device=inner.device) if parts else out
    if tokens == 1:
        _down[(triton.cdiv(rows, tile.rows), each * parts if parts else 1)](
            inner,
            down,
            bias,
            experts,
            shares,
            residual,
            products,
            *sizes,
            **common,
            PARTS=parts,
            C=served,
            N=tile.rows,
            K=max(16, tile.columns // served),
            STAGES=tile.stages,
            num_warps=tile.warps,
        )
    else:
        tile, (shared, slots, reads) = DOWN_SHARED[find_direction(down)], count_shared(tokens, each)
        _down_shared[(triton.cdiv(rows, tile.rows), min(tokens, shared) * each, reads)](
            inner,
            down,
            experts,
            products,
            tokens,
            *sizes,
            CAST=is_interpreting() and inner.dtype == torch.bfloat16,
            M=shared,
            S=slots,
            N=tile.rows,
            K=tile.columns,
            STAGES=tile.stages,
            num_warps=tile.warps,
        )
    if parts:
        given = products, bias, experts, shares, residual, out
        _combine[(triton.cdiv(rows, 256), tokens)](*given, rows, each, **common, PARTS=parts, N=256, num_warps=4)
    return out

"""Mixtures of experts in PyTorch."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from kvbench.kernels.experts.routing import Routing
from kvbench.kernels.fused_linear.reference import ACTIVATIONS

CLAMP, SLOPE = 7.0, 1.702  # of the clamped gate


def widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def route_reference(
    x: Tensor, weight: Tensor, routing: Routing, bias: Tensor | None, correction: Tensor | None
) -> tuple[Tensor, Tensor]:
    logits = linear(widen(x), widen(weight), None if bias is None else widen(bias))  # (B, E)
    if not routing.wide:
        logits = widen(logits.to(x.dtype))
    if routing.scores == "sparsemixer":
        return mix_sparsely(logits, routing)
    scores = logits.softmax(-1) if routing.scores == "softmax" else logits.sigmoid()
    choice = scores if correction is None else scores + correction
    if routing.groups > 1:
        grouped = choice.unflatten(-1, (routing.groups, -1))
        best = grouped.topk(2).values.sum(-1).topk(routing.kept_groups).indices  # (B, kept groups)
        dropped = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
        choice = grouped.masked_fill(dropped[..., None], -torch.inf).flatten(-2)
    experts = choice.topk(routing.count).indices
    shares = scores.gather(-1, experts)
    if routing.normalized:
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
    return experts.int(), shares * routing.factor


def mix_sparsely(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    experts, shares, left = [], [], logits
    for _ in range(routing.count):
        best, expert = left.max(-1, keepdim=True)
        far = (best - logits) / logits.abs().maximum(best) > 2 * routing.jitter
        experts.append(expert)
        shares.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(-1, expert))
        left = left.scatter(-1, expert, -torch.inf)
    return torch.cat(experts, -1).int(), torch.cat(shares, -1)


def activate(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    if activation != "clamped":
        return ACTIVATIONS[activation](gate) * up
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return (up + 1) * (gate * torch.sigmoid(gate * SLOPE))


def gated_experts_reference(
    x: Tensor, gate_up: Tensor, experts: Tensor, bias: Tensor | None, activation: str, interleaved: bool
) -> Tensor:
    inner = x.new_empty(*experts.shape, gate_up.shape[1] // 2)  # (B, k, I)
    for expert in experts.unique().tolist():
        here = experts == expert
        products = linear(x[here.nonzero()[:, 0]], gate_up[expert], None if bias is None else bias[expert])
        gate, up = products.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else products.chunk(2, -1)
        inner[here] = activate(gate, up, activation)
    return inner


def sum_experts_reference(
    inner: Tensor, down: Tensor, experts: Tensor, shares: Tensor, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    products = widen(inner.new_empty(*experts.shape, down.shape[1]))  # (B, k, H)
    for expert in experts.unique().tolist():
        here = experts == expert
        products[here] = widen(linear(inner[here], down[expert], None if bias is None else bias[expert]))
    sums = (products * shares[..., None]).sum(1).to(inner.dtype)
    return sums if residual is None else residual + sums

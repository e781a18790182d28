"""Read a mixture of experts from the modules of a decoder layer.

What a router does is recognised by what it chooses for a few random rows, because models name their settings in many
ways. So is the activation of the experts. All tensors and modules of the mixture must be known by name.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import gelu, silu

from kvbench.kernels.experts import Routing, route
from kvbench.models.decoder_parts import GatedMlp, Linear, Mlp
from kvbench.models.expert_parts import Experts, Mixture, SharedExpert
from kvbench.models.part_reader import (
    PartReader,
    UnknownPart,
    find_kernel_activation,
    list_children,
    read_mlp,
    split_linear,
)

ROUTERS = ("gate", "router")
SHARED = ("shared_experts", "shared_expert")
SHARED_GATE = "shared_expert_gate"
CORRECTIONS = ("e_score_correction_bias", "expert_bias")
SCALES = ("routed_scaling_factor", "router_scaling_factor", "route_scale")  # the factor of the shares
WEIGHTS = {"gate_up_proj", "down_proj"}
BIASES = {"gate_up_proj_bias", "down_proj_bias"}
GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # the activations that `gated_experts` has kernels for
    "silu": lambda gate, up: silu(gate) * up,
    "gelu_tanh": lambda gate, up: gelu(gate, approximate="tanh") * up,
    "clamped": lambda gate, up: (up.clamp(-7, 7) + 1) * gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7)),
}
ROWS = 8  # random rows of each size that a router reads
SIZES = (1.0, 0.3, 0.1)  # near 0 shares are alike, unless they are not normalised
AGREEING = 0.75  # least part of the rows whose experts are the same: of equal scores either may be chosen


def read_feed_forward(reader: PartReader, modules: Sequence[Module]) -> Mlp:
    """Read what stands behind a layer's attention: an MLP, a mixture of experts, or a mixture and a shared MLP.

    Raises:
        UnknownPart: The step does not compute it.
    """
    first, *others = modules
    if "experts" not in list_children(first):
        if others:
            raise UnknownPart(f"{type(first).__name__} beside {type(others[0]).__name__}")
        return read_mlp(reader, first)
    mixture = read_mixture(reader, first)
    if not others:
        return mixture
    if len(others) > 1 or mixture.shared is not None:
        raise UnknownPart(f"{type(first).__name__} with several shared experts")
    return replace(mixture, shared=SharedExpert(read_joined_mlp(reader, others[0])))


def read_joined_mlp(reader: PartReader, mlp: Module) -> Mlp:
    """Read a shared MLP whose gate and up stand in one matrix (Granite).

    Raises:
        UnknownPart: The step does not compute it.
    """
    if list_children(mlp) != {"activation", "input_linear", "output_linear"}:
        return read_mlp(reader, mlp)
    (both,), (down,) = reader.linears(mlp, "input_linear"), reader.linears(mlp, "output_linear")
    gate, up = split_linear(both, [len(both.weight) // 2] * 2)
    activation = mlp.get_submodule("activation")
    reader.read.add(id(activation))
    return GatedMlp(gate, up, down, find_kernel_activation(activation) or activation)


def read_mixture(reader: PartReader, block: Module) -> Mixture:
    """Read a router, its experts and a shared expert.

    Raises:
        UnknownPart: The step does not compute them.
    """
    names = list_children(block)
    routers, shared_names = [name for name in ROUTERS if name in names], [name for name in SHARED if name in names]
    known = {"experts", SHARED_GATE, *routers, *shared_names}
    if len(routers) != 1 or len(shared_names) > 1 or not names <= known:
        raise UnknownPart(f"{type(block).__name__} with {', '.join(sorted(names))}")
    router_module = block.get_submodule(routers[0])
    router, correction = read_router(reader, block, router_module)
    routing = find_routing(block, router_module, router, correction)
    experts = read_experts(reader, block.get_submodule("experts"))
    if experts.gate_up.weight.shape[::2] != router.weight.shape:
        raise UnknownPart(f"{type(block).__name__} whose experts do not fit its router")
    shared = None
    if shared_names:
        gate = reader.linears(block, SHARED_GATE)[0] if SHARED_GATE in names else None
        shared = SharedExpert(read_mlp(reader, block.get_submodule(shared_names[0])), gate)
    reader.read.add(id(block))
    scale = getattr(block, SCALES[0], 1.0)  # Laguna multiplies the sum
    mixture = Mixture(router, replace(routing, factor=routing.factor * scale), experts, correction, shared)
    key = type(block), mixture.routing
    if key not in reader.kinds:
        check_mixture(block, mixture)
        reader.kinds[key] = 0
    return mixture


def check_mixture(block: Module, mixture: Mixture) -> None:
    """Check that a mixture computes what a module does for random rows.

    Raises:
        UnknownPart: It does not, in too many rows.
    """
    x = draw_rows(mixture.router.weight)
    returned = block(x[None])
    expected = returned[0] if isinstance(returned, tuple) else returned  # gpt-oss returns shares too
    errors = (mixture(x, None, None, "reference") - expected.view_as(x)).double().norm(dim=-1)
    bound = 16 * max(torch.finfo(x.dtype).eps, 1e-6) * expected.view_as(x).double().norm(dim=-1)
    if float((errors <= bound).double().mean()) < AGREEING:
        raise UnknownPart(f"{type(block).__name__} computes something else than router, experts and shared expert")


def read_router(reader: PartReader, block: Module, router: Module) -> tuple[Linear, Tensor | None]:
    """Read a router's projection and the correction of its scores.

    Raises:
        UnknownPart: They or the block have other tensors.
    """
    corrections = list[Tensor]()
    for module in (block, router, *router.children()):
        tensors = {**module._parameters, **module._buffers}
        held = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        corrections += [held[name] for name in CORRECTIONS if name in held]
        if others := set(held) - {*CORRECTIONS, *(() if module is block else ("weight", "bias"))}:
            raise UnknownPart(f"{type(module).__name__} with {', '.join(sorted(others))}")
    inner = getattr(router, "gate", router)  # AFMoE
    weight = inner._parameters.get("weight")
    if weight is None or len(corrections) > 1 or list_children(router) - {"gate", "moe_statics"}:
        raise UnknownPart(f"{type(router).__name__} as router")
    reader.read.update(id(module) for module in (router, *router.children()))
    correction = corrections[0].detach().flatten().float() if corrections else None
    return Linear(weight, inner._parameters.get("bias")), correction


def find_routing(block: Module, router: Module, linear: Linear, correction: Tensor | None) -> Routing:
    """Return how a router chooses: the first way that chooses what it does for random rows.

    Raises:
        UnknownPart: The step knows no such way.
    """
    x = draw_rows(linear.weight)
    experts, shares, logits = run_router(block, router, x)
    wide = logits is not None and not torch.equal(logits, logits.to(x.dtype).to(logits.dtype))
    for routing in list_routings(router, experts.shape[1], wide):
        try:
            _, given, parts = route(
                x, linear.weight, routing, bias=linear.bias, correction=correction, implementation="reference"
            )
        except ValueError:  # the router has settings that do not fit
            continue
        if agree(experts, shares, given, parts, torch.finfo(x.dtype).eps):
            return routing
    raise UnknownPart(f"{type(router).__name__} chooses experts in another way than the step")


def draw_rows(like: Tensor) -> Tensor:
    """Return random rows of several sizes, (n, hidden), for a weight (E, hidden)."""
    rows = torch.randn(len(SIZES), ROWS, like.shape[1], generator=torch.Generator().manual_seed(0))
    return (rows * torch.tensor(SIZES)[:, None, None]).flatten(0, 1).to(like)


def run_router(block: Module, router: Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the experts (n, k) and shares that a module chooses for rows x, and its logits (n, E) if it returns them.

    Raises:
        UnknownPart: It returns something else.
    """
    experts: Any = block.get_submodule("experts")
    if hasattr(experts, "route_tokens_to_experts"):  # Aria
        returned = experts.route_tokens_to_experts(router(x))
    else:
        held = next((getattr(block, name) for name in CORRECTIONS if hasattr(block, name)), None)
        rows = x[None] if hasattr(router, "gate") else x
        returned = router(rows) if held is None else router(rows, held)
    parts = list(returned) if isinstance(returned, tuple) else []
    whole = [part for part in parts if not part.is_floating_point()]
    if len(whole) != 1 or whole[0].shape[0] != len(x):
        raise UnknownPart(f"{type(router).__name__} that returns no experts")
    floating = [part for part in parts if part.is_floating_point()]
    shares = [part for part in floating if part.shape == whole[0].shape]
    if len(shares) != 1:
        raise UnknownPart(f"{type(router).__name__} that returns no shares")
    return whole[0], shares[0], next((part for part in floating if part is not shares[0]), None)


def list_routings(router: Any, count: int, wide: bool) -> Iterator[Routing]:
    """Yield the ways in which a router with these settings may choose."""
    factor = 1.0
    for name in SCALES:
        factor *= getattr(router, name, 1.0)
    groups, kept = getattr(router, "num_group", 1) or 1, getattr(router, "topk_group", 1) or 1
    for scores, normalized in product(("softmax", "sigmoid"), (True, False)):
        yield Routing(count, scores, normalized, factor, groups, kept if groups > 1 else 1, wide)
    yield Routing(count, "sparsemixer", wide=wide, jitter=getattr(router, "router_jitter_noise", 0.0))


def agree(experts: Tensor, shares: Tensor, given: Tensor, parts: Tensor, epsilon: float) -> bool:
    """Return whether the same experts (n, k) have the same shares, in most rows."""
    order, other = experts.sort(-1), given.long().sort(-1)
    same = (order.values == other.values).all(-1)
    one, two = shares.gather(1, order.indices).to(parts.dtype)[same], parts.gather(1, other.indices)[same]
    bound = 4 * max(epsilon, 1e-6)
    return float(same.double().mean()) >= AGREEING and torch.allclose(one, two, rtol=bound, atol=bound / 64)


def read_experts(reader: PartReader, experts: Any) -> Experts:
    """Read the weights of all experts.

    Raises:
        UnknownPart: They are kept or computed in another way than the step knows.
    """
    kind, held = type(experts).__name__, {name for name, tensor in experts._parameters.items() if tensor is not None}
    if list_children(experts) == {"fc1", "fc2"} and hasattr(experts, "route_tokens_to_experts"):  # Aria
        weights = [module._parameters.get("weight") for module in (experts.fc1, experts.fc2)]
        if weights[0] is None or weights[1] is None:
            raise UnknownPart(f"{kind} without weights")
        reader.read.update(id(module) for module in experts.modules())
        return Experts(Linear(weights[0].mT), Linear(weights[1].mT), "silu", False)
    settings = [getattr(experts, name, None) for name in ("has_gate", "has_bias", "is_transposed", "is_concatenated")]
    gated, biased, transposed, concatenated = settings
    if held != (WEIGHTS | BIASES if biased else WEIGHTS) or not gated or None in settings:
        raise UnknownPart(f"{kind} with {', '.join(sorted(held))}")
    if not list_children(experts) <= {"act_fn"} or any(experts.buffers()):
        raise UnknownPart(f"{kind} with {', '.join(sorted(list_children(experts)))}")
    linears = []
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name)
        linears.append(
            Linear(weight.mT if transposed else weight, getattr(experts, f"{name}_bias") if biased else None)
        )
    reader.read.update(id(module) for module in experts.modules())
    return Experts(linears[0], linears[1], find_activation(experts), not concatenated)


def find_activation(experts: Any) -> str:
    """Return the name of what experts make of gate and up.

    Raises:
        UnknownPart: The step does not compute it.
    """
    gate, up = 5 * torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(0))
    both = torch.cat((gate, up), -1) if experts.is_concatenated else torch.stack((gate, up), -1).flatten(-2)
    given = experts._apply_gate(both)
    for name, compute in GATED.items():
        if torch.allclose(compute(gate, up), given, rtol=1e-5, atol=1e-5):
            return name
    raise UnknownPart(f"{type(experts).__name__} with another activation")

"""Read the parts of a decoder layer from its modules.

Modules are recognised by what they have and by what they compute, not by the names of their classes. A reader notes
every module that it has read. If a layer has another one, or a parameter that belongs to none of them, then nothing
says that the step computes what the layer does, and the layer is refused.
"""

from collections.abc import Callable, Sequence
from math import inf, prod

import torch
from torch import Tensor
from torch.nn import Dropout, Identity, Module
from torch.nn.functional import gelu, sigmoid, silu, softplus

from kvbench.interfaces.layout import Layout
from kvbench.kernels.softmax_extras import SoftmaxExtras
from kvbench.models.decoder_parts import (
    Around,
    Attention,
    Block,
    Gate,
    GatedMlp,
    HeadLayerNorm,
    HeadNorms,
    LayerNorm,
    Linear,
    Mlp,
    Norm,
    PlainMlp,
    ProjectedNorm,
    RmsNorm,
)
from kvbench.models.int4 import Int4Weight

NORMS = (  # the names of a layer's norms: before and after attention, before and after the MLP
    ("input_layernorm", None, "post_attention_layernorm", None),  # Llama
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),  # Gemma
    ("input_layernorm", None, "pre_feedforward_layernorm", None),  # VaultGemma
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),  # GLM-4
    ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),  # AFMoE
    ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2"),  # HyperCLOVA X
    ("attention_layernorm", None, "feedforward_layernorm", None),  # Apertus
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),  # OLMo 2, EXAONE 4
)
PARALLEL_NORMS = {"input_layernorm"}  # of a layer whose MLP reads what its attention reads
HEAD_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))  # of queries and keys, before they are rotated
MLPS = ("mlp", "block_sparse_moe", "shared_mlp")  # the last two: Granite's experts and the MLP beside them
PLAIN_MLPS = (("up_proj", "down_proj"), ("c_fc", "c_proj"), ("fc1", "fc2"))
ACTIVATIONS = ("act_fn", "act", "activation_fn")
GATES: dict[str, Callable[[Tensor], Tensor]] = {  # of the outputs of attention: AFMoE, Laguna
    "gate_proj": sigmoid,
    "g_proj": lambda logits: softplus(logits.float()).to(logits.dtype),
}
KERNEL_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # those that `rms_norm_glu` has a kernel for
    "silu": silu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
}
EPSILONS = ("variance_epsilon", "eps", "epsilon")  # a norm's attribute
DEFAULT_EPSILON = 1e-5  # of norms without one (OLMo)
OUTPUTS = ("o_proj", "dense")  # names of W_o
FACTORS = (  # attributes that are read elsewhere, or change nothing
    *("scaling", "attn_logit_softcapping", "residual_multiplier", "embedding_multiplier", "logit_scale"),
    *("logits_scaling", "scalar_embed_scale", "partial_rotary_factor", "norm_type"),
    *("routed_scaling_factor", "router_scaling_factor", "route_scale", "alpha", "limit"),  # `expert_reader`
    *("jitter_noise", "router_jitter_noise", "input_jitter_noise", "router_aux_loss_coef", "norm_min"),
)
ROUNDING = 1e-6  # transformers computes norms in float32 also in a model in float64


class UnknownPart(Exception):
    """A module computes something that the step does not. The message names it."""


class PartReader:
    """Reads modules and notes which ones it has read."""

    def __init__(self, like: Tensor) -> None:
        """Begin to read a model whose weights have the dtype and device of `like`."""
        self.like = like
        self.read: set[int] = set()  # ids of modules
        self.kinds: dict[object, int] = {}  # which formula the norms of a class follow

    def linear(self, module: object) -> Linear:
        """Read torch's own linear layer, whose weight may be in int4. One with an adapter is another class."""
        if type(module) is not torch.nn.Linear:
            raise UnknownPart(f"{type(module).__name__} in place of a linear layer")
        self.read.add(id(module))
        return Linear(module.weight, module.bias)

    def linears(self, parent: Module, *names: str) -> list[Linear]:
        """Read linear layers that are projected to together, and so have a bias all or none."""
        linears = [self.linear(getattr(parent, name)) for name in names]
        if len({linear.bias is None for linear in linears}) > 1:
            raise UnknownPart(f"{type(parent).__name__} with biases of some projections")
        return linears

    def norm(self, module: Module, width: int) -> Norm:
        """Read a norm of `width` numbers by what it computes of a few of them."""
        weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
        if any(part is not None and part.shape != (width,) for part in (weight, bias)):
            raise UnknownPart(f"{type(module).__name__} with weights of another shape than {width}")
        epsilon = read_epsilon(module)
        candidates = list_norms(weight, bias, epsilon, self.like.new_ones(width))
        key = type(module), width, weight is None, bias is None
        if key not in self.kinds:
            self.kinds[key] = self.choose(module, candidates, (width,), epsilon)
        self.read.add(id(module))
        return candidates[self.kinds[key]]

    def choose(self, module: Module, candidates: Sequence[ProjectedNorm], shape: Sequence[int], epsilon: float) -> int:
        """Return the number of the norm that computes what a module does, the first of several."""
        sample = draw_sample(self.like, prod(shape), epsilon)
        expected = module(sample.unflatten(-1, shape)).reshape(sample.shape)
        errors = [find_error(norm.apply(sample, None, "reference"), expected) for norm in candidates]
        least = min(errors, default=inf)
        if least > 4 * max(torch.finfo(sample.dtype).eps, ROUNDING):
            raise UnknownPart(f"{type(module).__name__} is no norm that the step computes")
        return errors.index(least)

    def head_layer_norm(self, module: Module, heads: int, dim: int) -> HeadLayerNorm:
        """Read a layer norm of each head with weights of its own."""
        parts = getattr(module, "norms", None)
        if isinstance(parts, torch.nn.ModuleList):  # StableLM
            norms = [norm for part in parts if isinstance(norm := self.norm(part, dim), LayerNorm)]
            weights = [norm.weight for norm in norms if norm.weight is not None and norm.bias is None]
            if len(weights) != heads:
                raise UnknownPart(f"{type(module).__name__} as QK norm")
            return HeadLayerNorm(torch.stack(weights), norms[0].epsilon)
        weight, epsilon = module._parameters.get("weight"), read_epsilon(module)
        if weight is None or weight.shape != (heads, dim):
            raise UnknownPart(f"{type(module).__name__} as QK norm")
        head_norm = HeadLayerNorm(weight, epsilon)
        self.choose(module, [head_norm], (heads, dim), epsilon)
        self.read.add(id(module))
        return head_norm

    def activation(self, parent: Module) -> Module:
        """Read the activation of an MLP."""
        modules = [module for name in ACTIVATIONS if isinstance(module := getattr(parent, name, None), Module)]
        if len(modules) != 1:
            raise UnknownPart(f"{type(parent).__name__} with {len(modules)} activations")
        self.read.update(id(part) for part in modules[0].modules())
        return modules[0]

    def check_all_read(self, layer: Module) -> None:
        """Check that what a layer computes was read: each module that holds something or has no parts of its own.

        Raises:
            UnknownPart: A module was not read, or has a factor that the step does not know.
        """
        for name, module in layer.named_modules():
            holds = any(part is not None for part in (*module._parameters.values(), *module._buffers.values()))
            computes = holds or not (any(module.children()) or isinstance(module, Dropout | Identity))
            if computes and id(module) not in self.read:
                raise UnknownPart(f"{name} ({type(module).__name__})")
            check_factors(module)


def check_factors(module: Module) -> None:
    """Check that a module has no factor as an attribute that the step does not know.

    Raises:
        UnknownPart: It has one.
    """
    for name, value in vars(module).items():
        known = name in FACTORS or name in EPSILONS or "dropout" in name or name.startswith("_")
        if isinstance(value, float) and value not in (0.0, 1.0) and not known:
            raise UnknownPart(f"{type(module).__name__} with {name}={value}")


def list_norms(weight: Tensor | None, bias: Tensor | None, epsilon: float, ones: Tensor) -> list[Norm]:
    """Return the norms that a module with these parameters may be."""
    given, norms = ones if weight is None else weight, list[Norm]()
    if bias is None:
        norms += [RmsNorm(scale, epsilon) for scale in (given, given.float(), 1.0 + given.float())]
    norms.append(LayerNorm(weight, bias, epsilon))
    if weight is not None:
        norms.append(LayerNorm(weight + 1.0, bias, epsilon))
    return norms


def read_epsilon(module: Module) -> float:
    """Return the ε of a norm."""
    values = (getattr(module, name, None) for name in EPSILONS)
    return next((value for value in values if isinstance(value, float)), DEFAULT_EPSILON)


def draw_sample(like: Tensor, width: int, epsilon: float) -> Tensor:
    """Return rows with a mean, (4, width), of which two are so small that ε counts."""
    rows = torch.randn(4, width, generator=torch.Generator().manual_seed(0), dtype=torch.float32) + 0.5
    rows[2:] *= epsilon**0.5
    return rows.to(like)


def find_error(given: Tensor, expected: Tensor) -> float:
    """Return the mean difference as a part of the mean size, of the row where it is largest, at least `ROUNDING`."""
    difference = (given - expected).abs().double().mean(-1) / expected.abs().double().mean(-1)
    return max(float(difference.max().nan_to_num(inf)), ROUNDING)


def read_block(
    reader: PartReader, layer: Module, layout: Layout, read_mlps: Callable[[PartReader, Sequence[Module]], Mlp]
) -> Block:
    """Read a decoder layer.

    Args:
        reader: Notes what is read.
        layer: The layer.
        layout: The layout of the model.
        read_mlps: Reads the modules behind attention, which are added up.

    Raises:
        UnknownPart: It has a part that the step does not compute.
    """
    parts = list_children(layer)
    mlps = [name for name in MLPS if name in parts]
    if "self_attn" not in parts or not mlps:
        raise UnknownPart(f"{type(layer).__name__} without self_attn and mlp")
    names = parts - {"self_attn", *mlps}
    around = next((row for row in NORMS if names == {name for name in row if name is not None}), None)
    if around is None and names != PARALLEL_NORMS:
        raise UnknownPart(f"{type(layer).__name__} with {', '.join(sorted(names))}")
    norms = [
        None if name is None else reader.norm(getattr(layer, name), layout.hidden)
        for name in around or ("input_layernorm", None, None, None)
    ]
    factor = getattr(layer, "residual_multiplier", None)
    block = Block(
        read_attention(reader, layer.get_submodule("self_attn"), layout),
        read_mlps(reader, [layer.get_submodule(name) for name in mlps]),
        Around(*norms[:2]),
        Around(*norms[2:]),
        parallel=around is None,
        factor=None if factor == 1 else factor,
    )
    reader.check_all_read(layer)
    return block


def list_children(module: Module) -> set[str]:
    """Return the names of a module's children that compute something."""
    return {name for name, child in module.named_children() if not isinstance(child, Dropout | Identity)}


def read_attention(reader: PartReader, attention: Module, layout: Layout) -> Attention:
    """Read what stands around the attention of a layer.

    Raises:
        UnknownPart: It has a part that the step does not compute.
    """
    names = list_children(attention)
    output = next((name for name in OUTPUTS if name in names), None)
    if output is None or not ({"q_proj", "k_proj", "v_proj"} <= names or "qkv_proj" in names):
        raise UnknownPart(f"{type(attention).__name__} with {', '.join(sorted(names))}")
    rows = [heads * layout.dim for heads in (layout.query_heads, layout.heads, layout.heads)]
    if "qkv_proj" in names:  # Phi-3
        three = split_linear(reader.linears(attention, "qkv_proj")[0], rows)
    else:
        three = reader.linears(attention, "q_proj", "k_proj", "v_proj")
    if [len(linear.weight) for linear in three] != rows:
        raise UnknownPart(f"{type(attention).__name__} projects to other heads")
    gates = [name for name in GATES if name in names]
    head_norms, projected_norms = read_head_norms(reader, attention, layout)
    inner = "attn_sub_norm" if "attn_sub_norm" in names else None
    return Attention(
        (three[0], three[1], three[2]),
        reader.linears(attention, output)[0],
        head_norms,
        projected_norms,
        clip=getattr(getattr(attention, "config", None), "clip_qkv", None),
        gate=Gate(reader.linears(attention, gates[0])[0], GATES[gates[0]]) if gates else None,
        norm=reader.norm(getattr(attention, inner), rows[0]) if inner else None,
        extras=read_extras(reader, attention, layout),
    )


def read_extras(reader: PartReader, attention: Module, layout: Layout) -> SoftmaxExtras | None:
    """Read sinks and cap of the softmax of an attention module; None if it is plain.

    Raises:
        UnknownPart: It has another parameter of its own.
    """
    given = {name: part for name, part in attention._parameters.items() if part is not None}
    sinks = given.pop("sinks", None)
    if given:
        raise UnknownPart(f"{type(attention).__name__} with {', '.join(sorted(given))}")
    reader.read.add(id(attention))
    if sinks is None and layout.softcap is None:
        return None
    return SoftmaxExtras(None if sinks is None else sinks.detach(), layout.softcap)


def split_linear(linear: Linear, rows: Sequence[int]) -> list[Linear]:
    """Return the matrices that stand in one, with these numbers of rows.

    Raises:
        UnknownPart: It has another number of rows, or is in int4, whose rows cannot be taken apart.
    """
    if isinstance(linear.weight, Int4Weight):
        raise UnknownPart("matrices in int4 that stand in one")
    if len(linear.weight) != sum(rows):
        raise UnknownPart(f"a matrix of {len(linear.weight)} rows in place of {sum(rows)}")
    weights = linear.weight.split(list(rows))
    biases = [None] * len(rows) if linear.bias is None else linear.bias.split(list(rows))
    return [Linear(weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def read_head_norms(
    reader: PartReader, attention: Module, layout: Layout
) -> tuple[HeadNorms, tuple[ProjectedNorm, ProjectedNorm] | None]:
    """Read the QK norm: over the dimensions of a head, over other ones, or neither (None each).

    Raises:
        UnknownPart: The step does not compute it.
    """
    names = list_children(attention)
    pair = next((pair for pair in HEAD_NORMS if set(pair) <= names), None)
    if pair is None:
        return None, None
    modules, heads = [getattr(attention, name) for name in pair], (layout.query_heads, layout.heads)
    weights = [module._parameters.get("weight") for module in modules]
    if all(weight is None or weight.shape == (layout.dim,) for weight in weights) and not hasattr(modules[0], "norms"):
        queries, keys = (reader.norm(module, layout.dim) for module in modules)
        if isinstance(queries, RmsNorm) and isinstance(keys, RmsNorm) and queries.epsilon == keys.epsilon:
            return (queries.weight, keys.weight, queries.epsilon), None
        raise UnknownPart(f"{type(modules[0]).__name__} as QK norm")
    if all(weight is not None and weight.dim() == 1 for weight in weights):  # OLMo 2
        wide = [reader.norm(module, count * layout.dim) for module, count in zip(modules, heads, strict=True)]
        return None, (wide[0], wide[1])
    each = [reader.head_layer_norm(module, count, layout.dim) for module, count in zip(modules, heads, strict=True)]
    return None, (each[0], each[1])


def read_mlp(reader: PartReader, mlp: Module) -> Mlp:
    """Read an MLP.

    Raises:
        UnknownPart: The step does not compute it.
    """
    names, activation = list_children(mlp), reader.activation(mlp)
    plain = next((pair for pair in PLAIN_MLPS if set(pair) <= names), None)
    if "gate_up_proj" in names:  # Phi-3, GLM
        (both,), (down,) = reader.linears(mlp, "gate_up_proj"), reader.linears(mlp, "down_proj")
        gate, up = split_linear(both, [len(both.weight) // 2] * 2)
    elif {"gate_proj", "up_proj", "down_proj"} <= names:
        (gate, up), (down,) = reader.linears(mlp, "gate_proj", "up_proj"), reader.linears(mlp, "down_proj")
    elif plain is not None:
        (up,), (down,) = (reader.linears(mlp, name) for name in plain)
        return PlainMlp(up, down, activation)
    else:
        raise UnknownPart(f"{type(mlp).__name__} with {', '.join(sorted(names))}")
    inner = getattr(mlp, "ffn_sub_norm", None)
    norm = None if inner is None else reader.norm(inner, down.weight.shape[1])
    kernel = None if gate.bias is not None else find_kernel_activation(activation)
    return GatedMlp(gate, up, down, kernel or activation, norm)


def find_kernel_activation(activation: Module) -> str | None:
    """Return the name of the kernel's activation that computes what a module does, or None."""
    if any(activation.parameters()):
        return None
    x = torch.linspace(-6, 6, 97, dtype=torch.float32)
    given = activation(x)
    return next((name for name, f in KERNEL_ACTIVATIONS.items() if torch.allclose(f(x), given, atol=1e-6)), None)

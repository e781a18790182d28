"""Weights of linear layers in int4: 4 bits each, with a scale and a zero point for every 128 inputs of an output.

A group of weights w lies between its least and its greatest one. With s = (max − min) / 15 and z = min + 8 s, both in
bfloat16, a weight is stored as q = round((w − z) / s) + 8 in 0 … 15, and it stands for (q − 8) s + z. On a GPU the
products of few rows are torch's own (`aten::_weight_int4pack_mm`, known as tinygemm), which read the 4 bits. Products
of many rows, and those on a CPU, are computed with weights that are made dense for the time of the product.

No other package is needed. On a GPU, torchao multiplies with the same operator, and its weights are as exact as these.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import Linear, Parameter
from torch.nn.functional import linear as multiply_dense
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only

from kvbench.models.transformers_port import list_decoder_layers
from kvbench.validation import SettingError

GROUP = 128  # weights that share a scale and a zero point
FEW = 64  # rows up to which a product reads the 4 bits; more rows pay for dense weights
TILE_ROWS, INNER = 8, 8  # of torch's packing: 8 outputs and 8 · 16 inputs lie together
NEWEST = (8, 0)  # the least compute capability that torch's operator supports
ROUTERS = frozenset(["gate", "router", "shared_expert_gate"])  # they choose experts, and stay as they are
LEAST = 0.5  # of a decoder's weights must lie in linear layers


class Int4Weight(Tensor):
    """The weight of a linear layer in int4.

    `torch.nn.functional.linear` multiplies with it. Every other operation is given the dense weight that it stands for,
    so that hashes and checks of weights, and methods that read W_o, need not know of it.

    Attributes:
        packed: q, two in a byte, (outputs, groups · 64) uint8 with even inputs in the higher bits; or on a GPU in
            torch's tiles, (outputs / 8, groups, 32, 4) int32. The last group is filled up with q = 8.
        scales: The scale and the zero point of each group, (groups, outputs, 2) bfloat16.
    """

    packed: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, packed: Tensor, scales: Tensor, width: int, dtype: torch.dtype) -> Self:
        """Make a weight.

        Args:
            packed: As the attribute.
            scales: Likewise.
            width: Number of inputs.
            dtype: The dtype of the dense weight.
        """
        shape = (scales.shape[1], width)
        made: Self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=packed.device)
        made.packed, made.scales = packed, scales
        return made

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of memory that the weight takes."""
        return self.packed.nbytes + self.scales.nbytes

    def name_parts(self, name: str) -> dict[str, Tensor]:
        """Return the tensors that hold a weight of this name."""
        return {f"{name} (int4)": self.packed, f"{name} (scales)": self.scales}

    def make_dense(self) -> Tensor:
        """Return the weight that this one stands for, (outputs, inputs)."""
        groups, outputs, _ = self.scales.shape
        if self.packed.dim() == 4:
            halves = self.packed.view(torch.uint8).view(outputs // TILE_ROWS, groups, -1)
            whole = torch.stack([halves & 15, halves >> 4], -1).flatten(2)
            numbers = whole.index_select(2, find_order(self.packed.device)).view(-1, groups, TILE_ROWS, GROUP)
            numbers, scales = numbers.transpose(1, 2), self.scales.view(groups, -1, TILE_ROWS, 2).permute(1, 2, 0, 3)
        else:
            numbers = torch.stack([self.packed >> 4, self.packed & 15], -1).view(outputs, groups, GROUP)
            scales = self.scales.transpose(0, 1)
        scale, zero = scales.to(self.dtype)[..., None, :].unbind(-1)
        dense = torch.addcmul(zero, numbers.to(self.dtype) - 8, scale)  # rounded once, as torch's operator does
        return dense.reshape(outputs, groups * GROUP)[:, : self.shape[1]].contiguous()

    def project(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return inputs · Wᵀ + bias.

        Args:
            inputs: (..., inputs)
            bias: (outputs,)
        """
        rows = inputs.reshape(-1, self.shape[1])
        differentiable = torch.is_grad_enabled() and inputs.requires_grad  # torch's operator is not
        if self.packed.dim() < 4 or len(rows) > FEW or inputs.dtype != torch.bfloat16 or differentiable:
            return multiply_dense(inputs, self.make_dense(), bias)
        filled = pad(rows, (0, len(self.scales) * GROUP - rows.shape[1])).contiguous()
        outputs = torch.ops.aten._weight_int4pack_mm(filled, self.packed, GROUP, self.scales)
        outputs = outputs.view(*inputs.shape[:-1], self.shape[0])
        return outputs if bias is None else outputs + bias

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is multiply_dense:
            return take_linear(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():  # results are plain tensors
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            weight = args[0]
            return cls(weight.packed, weight.scales, weight.shape[1], weight.dtype)
        dense = partial(tree_map_only, cls, cls.make_dense)
        return func(*dense(args), **dense(kwargs or {}))


def take_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # named as torch's
    """Compute `torch.nn.functional.linear` for a weight in int4."""
    return weight.project(input, bias) if isinstance(weight, Int4Weight) else multiply_dense(input, weight, bias)


def quantize(weight: Tensor) -> Int4Weight:
    """Return a weight in int4, on its device.

    Args:
        weight: (outputs, inputs). Numbers that are not finite stay so.
    """
    outputs, width = weight.shape
    missing = -width % GROUP
    # copies of the last column change neither the least nor the greatest weight of the last group
    filled = torch.cat([weight, weight[:, -1:].expand(-1, missing)], 1) if missing else weight
    groups = filled.detach().float().view(outputs, -1, GROUP)
    least, most = groups.aminmax(dim=2, keepdim=True)
    scale = ((most - least) / 15).bfloat16().float()
    zero = (least + 8 * scale).bfloat16().float()
    numbers = ((groups - zero) / scale.where(scale != 0, 1.0)).round_().add_(8).clamp_(0, 15)
    numbers = numbers.view(outputs, -1).to(torch.uint8)
    numbers[:, width:] = 8
    halves = numbers[:, ::2] << 4 | numbers[:, 1::2]
    scales = torch.stack([scale[..., 0], zero[..., 0]], -1).bfloat16().transpose(0, 1).contiguous()
    packed = halves
    if can_pack_tiles(weight):
        packed = pack_tiles(halves)
        find_order(packed.device)  # read now, because the host waits for it, which a CUDA graph forbids
    return Int4Weight(packed, scales, width, weight.dtype)


def can_pack_tiles(weight: Tensor) -> bool:
    """Return whether torch's operator can multiply with a weight."""
    return weight.is_cuda and len(weight) % TILE_ROWS == 0 and torch.cuda.get_device_capability(weight.device) >= NEWEST


def pack_tiles(halves: Tensor) -> Tensor:
    """Return packed numbers in the tiles of torch's operator."""
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack(halves, INNER)
    return packed


@cache
def find_order(device: torch.device) -> Tensor:
    """Return where torch's packing puts the numbers of a tile, as `read_order` does."""
    return read_order(pack_tiles, device)


def read_order(pack: Callable[[Tensor], Tensor], device: torch.device) -> Tensor:
    """Return where a packing puts the numbers of a tile, (8 · 128,) int64: the place of each of them in the tile.

    The order is not documented, and depends on the machine. It is therefore read from what is packed: the index of each
    number has three digits to the base 16, each of which is packed alone.

    Args:
        pack: Packs numbers, two in a byte, (8, 64) uint8.
        device: Where it packs them.

    Raises:
        RuntimeError: The packing does not put each number into one place.
    """
    index = torch.arange(TILE_ROWS * GROUP, device=device)
    places = torch.zeros_like(index)
    for shift in (0, 4, 8):
        digits = (index >> shift & 15).to(torch.uint8).view(TILE_ROWS, GROUP)
        halves = pack(digits[:, ::2] << 4 | digits[:, 1::2]).contiguous().view(torch.uint8).flatten()
        places += torch.stack([halves & 15, halves >> 4], -1).flatten().long() << shift
    order = places.argsort()
    if not torch.equal(places[order], index):
        raise RuntimeError("torch packs int4 weights in an unknown way")
    return order


def list_linear_layers(model: torch.nn.Module) -> Iterator[tuple[str, Linear]]:
    """Yield the linear layers of a decoder that are kept in int4, with their names in the model.

    Routers of experts and their parts are left out, and so is what lies outside the decoder's layers, such as the head.
    """
    inside = {id(module) for layer in list_decoder_layers(model) for module in layer.modules()}
    for name, module in model.named_modules():
        if type(module) is Linear and id(module) in inside and ROUTERS.isdisjoint(name.split(".")):
            yield name, module


def find_linear_share(model: torch.nn.Module) -> float:
    """Return which part of the weights of a decoder's layers can be kept in int4. They need not be loaded."""
    linear = sum(layer.weight.numel() for _, layer in list_linear_layers(model))
    return linear / sum(weight.numel() for layer in list_decoder_layers(model) for weight in layer.parameters())


def check_linear_share(model: torch.nn.Module, label: str) -> None:
    """Raise a SettingError if most weights of a decoder's layers lie outside of linear layers, as experts do.

    Args:
        model: The model; its weights need not be loaded.
        label: What the message begins with.
    """
    if (share := find_linear_share(model)) < LEAST:
        raise SettingError(
            f"{label}: {share:.0%} of its layers' weights lie in linear layers (experts do not), and only "
            "these can be kept in int4; use model.weights=null"
        )


def count_quantized_bytes(layer: Linear) -> int:
    """Return the bytes that a linear layer's weight takes in int4: 4 bits each, and 4 bytes a group."""
    return layer.out_features * -(-layer.in_features // GROUP) * (GROUP // 2 + 4)


@torch.no_grad()
def move_quantized(model: torch.nn.Module, device: str) -> torch.nn.Module:
    """Quantise a model that is on the CPU, and move it to a device. One dense weight at a time is on the device.

    Args:
        model: The model, which is changed. Weights that files are mapped into take no memory of the CPU.
        device: "cpu" or "cuda".
    """
    weights = {}
    for _, layer in list_linear_layers(model):
        weights[layer] = quantize(layer.weight.to(device))
        layer.register_parameter("weight", None)
    model.to(device)
    for layer, weight in weights.items():
        layer.weight = Parameter(weight, requires_grad=False)
    return model


@torch.no_grad()
def fill_quantized(model: Any, device: str) -> torch.nn.Module:
    """Draw the weights of a model of transformers that is on the meta device, and quantise its linear layers.

    One dense weight of a linear layer at a time is on the device.

    Args:
        model: The model, which is changed.
        device: "cpu" or "cuda".

    Raises:
        SettingError: A tensor gets no numbers when each module is told to draw its own.
    """
    drawn = {}
    for _, layer in list_linear_layers(model):
        biased = layer.bias is not None
        dense = Linear(layer.in_features, layer.out_features, biased, device=device, dtype=layer.weight.dtype)
        model._init_weights(dense)
        drawn[layer] = quantize(dense.weight), dense.bias
    others = [module for module in model.modules() if module not in drawn]
    for module in others:
        module.to_empty(device=device, recurse=False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
    model.tie_weights()
    for module in others:
        model._init_weights(module)
    check_drawn(model)
    for layer, (weight, bias) in drawn.items():
        layer.weight, layer.bias = Parameter(weight, requires_grad=False), bias
    assert isinstance(model, torch.nn.Module)
    return model


def check_drawn(model: torch.nn.Module) -> None:
    """Raise a SettingError if a tensor that has memory holds NaN."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and tensor.numel() and not tensor.is_meta and tensor.amax().isnan():
            kind = type(model).__name__
            raise SettingError(f"model.weights=int4: cannot draw {name} of {kind} alone; use model.weights=null")

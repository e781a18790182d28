"""The projections of Palu: the matrix U of each group of KV heads, and the file that holds them.

Source: the Palu paper (arXiv 2407.21118); shadowpa0327/Palu bb22666, palu/model/modules/svd_linear.py. Symbols: x what
enters a layer's projection; W_g the rows of W_k or W_v of a group of KV heads, w of them; b their bias; S with
S Sᵀ = mean of x xᵀ over a text; r the group's rank.

Palu cuts the singular value decomposition W_g S = U_r Σ_r V_rᵀ + … at rank r and replaces the projection by two:

    h = VT x,    k̂ = U h + b,    with U = U_r Σ_r^½ (w, r) and VT = Σ_r^½ V_rᵀ S⁻¹ (r, hidden)

Since W_g S Sᵀ W_gᵀ is the mean of (k − b)(k − b)ᵀ over the same text, with k the group's keys (or values) before RoPE
and before the norm of keys, U_r are its r first eigenvectors and Σ_r² their eigenvalues. So

    h = Σ_r^-½ U_rᵀ (k − b) = U⁺ (k − b),    k̂ = U U⁺ (k − b) + b

U⁺ is the pseudo-inverse of U, and k̂ an orthogonal projection. U alone says everything, and it acts on keys and values,
whatever came before them.

A file is a safetensors file with the names of the authors' checkpoints: model.layers.{i}.self_attn.k_proj.U.{g}.weight
and .bias, and the same of v_proj. Files of `python -m kvbench calibrate palu` also have all eigenvalues, and the
identity of the model in their metadata. A folder that the authors' compress.py wrote (`config.head_wise_ranks`,
`….VT.weight`) is read too: kvbench takes U and the bias. VT x is then U⁺ (k − b) as above, but not if VT was trained
further.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from kvbench.interfaces.layout import Layout
from kvbench.interfaces.tensor_files import BYTES, IDENTITY, Shape, open_weights, require_finite, require_place
from kvbench.validation import SettingError

SIDES = ("k", "v")
RANKS = "head_wise_ranks"  # key of an official config.json
ENTRY = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.self_attn\.(?P<side>[kv])_proj\."
    r"(?:U\.(?P<group>\d+)\.(?P<what>weight|bias)|(?P<other>VT\.weight|eigenvalues))"
)
Place = tuple[int, str]  # layer, "k" or "v"


@dataclass(frozen=True)
class PaluFile:
    """What a file of projections says about itself, without its weights."""

    ranks: Mapping[Place, tuple[int, ...]]
    """The rank of each group, r, for the keys and the values of each layer."""
    width: int
    """Keys or values of a group, w."""
    bytes: int
    """Size of U and the biases of all layers in bytes, as stored."""
    identity: str | None
    """Identity of the model that it was made for. None if the file does not say it, as the authors' do not."""
    metadata: Mapping[str, str]
    """The file's metadata: of a file of `kvbench calibrate palu` also how it was made."""

    @property
    def layers(self) -> list[int]:
        """The layers that have projections, in ascending order."""
        return sorted({layer for layer, _ in self.ranks})

    @property
    def groups(self) -> int:
        """Number of groups of a layer."""
        return len(next(iter(self.ranks.values())))


@dataclass(frozen=True, eq=False)
class Projection:
    """The projection of one group of KV heads."""

    down: Tensor
    """U⁺, (r, w)."""
    up: Tensor
    """U, (w, r)."""
    bias: Tensor | None
    """b, (w,)."""

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Self:
        """Return a copy on a device and in a dtype."""
        bias = None if self.bias is None else self.bias.to(device, dtype)
        return replace(self, down=self.down.to(device, dtype), up=self.up.to(device, dtype), bias=bias)

    def encode(self, rows: Tensor) -> Tensor:
        """Return the latents h, (n, r), of keys or values of a group (n, w)."""
        return (rows if self.bias is None else rows - self.bias) @ self.down.T

    def decode(self, latents: Tensor) -> Tensor:
        """Return what latents (n, r) stand for, (n, w)."""
        return torch.nn.functional.linear(latents, self.up, self.bias)


@dataclass(frozen=True, eq=False)
class LayerProjections:
    """The projections of one layer."""

    each: tuple[Projection, ...]
    """Of the keys of each group, and then of the values."""

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Self:
        """Return a copy on a device and in a dtype."""
        return replace(self, each=tuple(projection.to(device, dtype) for projection in self.each))


def list_files(path: object) -> list[Path]:
    """Return the safetensors files of a path: the file itself, or those in a folder.

    Raises:
        SettingError: The path is no path, or the folder has none.
    """
    place = require_place(path, "codec.path", "Palu's projections", "palu")
    if not place.is_dir():
        return [place]
    files = sorted(place.glob("*.safetensors"))
    if not files:
        raise SettingError(f"codec.path={path}: no *.safetensors there")
    return files


def read_official_ranks(path: object) -> dict[Place, tuple[int, ...]] | None:
    """Return the ranks that the config.json of a folder states, or None if it states none.

    Raises:
        SettingError: The file cannot be read.
    """
    file = Path(str(path)).expanduser() / "config.json"
    if not file.is_file():
        return None
    try:
        stated = json.loads(file.read_text(encoding="utf-8")).get(RANKS)
        if stated is None:
            return None
        named = {re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.([kv])_proj", name): name for name in stated}
        return {(int(match[1]), match[2]): tuple(map(int, stated[name])) for match, name in named.items() if match}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise SettingError(f"codec.path={path}: config.json cannot be read ({error})") from None


def peek_projections(path: object) -> PaluFile:
    """Read the shapes and the metadata of a file of projections, but no weights.

    Args:
        path: A safetensors file, or a folder with such files.

    Raises:
        SettingError: The file is missing, truncated or pickled, or it does not hold projections of groups of equal
            width for the keys and the values of each of its layers.
    """
    where, official = f"codec.path={path}", read_official_ranks(path)
    shapes: dict[tuple[Place, int, str], Shape] = {}
    metadata: dict[str, str] = {}
    size = 0
    for file in list_files(path):
        with open_weights(file, where, "projections") as opened:
            metadata |= opened.metadata() or {}
            for key in opened.keys():  # noqa: SIM118  (no mapping)
                entry = ENTRY.fullmatch(key)
                if entry is None and official is None:
                    raise SettingError(f"{where}: {key} is no weight of a projection")
                if entry is None or entry["other"]:
                    continue
                tensor = opened.get_slice(key)
                if tensor.get_dtype() not in BYTES:
                    raise SettingError(f"{where}: {key} has dtype {tensor.get_dtype()}, allowed are {', '.join(BYTES)}")
                shape = tuple(tensor.get_shape())
                size += BYTES[tensor.get_dtype()] * torch.Size(shape).numel()
                shapes[(int(entry["layer"]), entry["side"]), int(entry["group"]), entry["what"]] = shape
    ranks, width = describe_groups(where, shapes)
    if official is not None and official != ranks:
        place = min(
            layer_side
            for layer_side in official.keys() | ranks.keys()
            if official.get(layer_side) != ranks.get(layer_side)
        )
        raise SettingError(f"{where}: {name_place(place)} has not the ranks of {RANKS} in config.json")
    return PaluFile(ranks, width, size, metadata.get(IDENTITY), metadata)


def describe_groups(
    where: str, shapes: Mapping[tuple[Place, int, str], Shape]
) -> tuple[dict[Place, tuple[int, ...]], int]:
    """Check the shapes of all U and biases, and return the ranks of each layer's keys and values, and w."""
    weights = {(place, group): shape for (place, group, what), shape in shapes.items() if what == "weight"}
    if not weights:
        raise SettingError(f"{where}: the file holds no projections")
    width, ranks = next(iter(weights.values()))[0], dict[Place, tuple[int, ...]]()
    groups = 1 + max(group for _, group in weights)
    for layer in sorted({layer for (layer, _), _ in weights}):
        for side in SIDES:
            place = layer, side
            looked_up = [weights.get((place, group)) for group in range(groups)]
            if any(shape is None for shape in looked_up):
                raise SettingError(f"{where}: {name_place(place)} has no U.{looked_up.index(None)}.weight")
            group_shapes = [shape for shape in looked_up if shape is not None]
            if any(len(shape) != 2 or shape[0] != width or not 1 <= shape[1] <= width for shape in group_shapes):
                raise SettingError(
                    f"{where}: {name_place(place)} has U of shapes {group_shapes}, expected ({width}, 1–{width})"
                )
            ranks[place] = tuple(shape[1] for shape in group_shapes)
    for (place, group, what), shape in shapes.items():
        if what == "bias" and ((place, group) not in weights or shape != (width,)):
            raise SettingError(f"{where}: {name_place(place)} has U.{group}.bias of shape {shape}, expected ({width},)")
    return ranks, width


def name_place(place: Place) -> str:
    """Return "layer 3, k_proj"."""
    return f"layer {place[0]}, {place[1]}_proj"


def compare_model(described: PaluFile, path: object, layout: Layout) -> None:
    """Check that a file of projections fits a model.

    Args:
        described: What `peek_projections` returned.
        path: Its path, for messages.
        layout: The model's layout. Layers that hold no rows need no projections.

    Raises:
        SettingError: The file was made for another model.
    """
    where, groups, width = f"codec.path={path}", described.groups, described.width
    layers, heads, dim = layout.layers, layout.heads, layout.dim
    if width % dim or groups * width != heads * dim:
        raise SettingError(
            f"{where}: the projections have {groups} groups of {width} numbers, the model {heads} KV heads of {dim}"
        )
    if any(layer >= layers for layer in described.layers):
        raise SettingError(f"{where}: there are projections of layer {described.layers[-1]}, the model has {layers}")
    missing = sorted(set(layout.held) - set(described.layers))
    if missing:
        raise SettingError(f"{where}: the projections of layer {missing[0]} are missing")


def compare_identity(described: PaluFile, path: object, identify: Callable[[], str]) -> None:
    """Raise a SettingError if a file says that it was made for another model than the one that `identify` names."""
    if described.identity is not None and described.identity != (model := identify()):
        raise SettingError(
            f"codec.path={path}: the projections were made for the model {described.identity}, this one is {model}"
        )


def is_of_projection(name: str) -> bool:
    """Return whether kvbench reads a tensor of this name: a matrix U or its bias."""
    entry = ENTRY.fullmatch(name)
    return entry is not None and entry["other"] is None


def check_numbers(path: object) -> None:
    """Raise a SettingError if a projection in a file, or in a folder of files, is not finite."""
    for file in list_files(path):
        require_finite(file, f"codec.path={path}", "projections", is_of_projection)


def read_projections(path: object, rotated: bool) -> dict[int, LayerProjections]:
    """Read the projections of all layers, on the CPU in float64.

    Args:
        path: A safetensors file, or a folder with such files.
        rotated: Whether latents are rotated by `make_rotation`.

    Raises:
        SettingError: `peek_projections` refuses the file, or a weight is not finite.
    """
    described, weights, where = peek_projections(path), dict[str, Tensor](), f"codec.path={path}"
    check_numbers(path)
    for file in list_files(path):
        with open_weights(file, where, "projections") as opened:
            weights |= {key: opened.get_tensor(key).double() for key in filter(is_of_projection, opened.keys())}

    def make(place: Place, group: int, rank: int) -> Projection:
        name = name_group(place, group)
        up = weights[f"{name}.weight"]
        up = up @ make_rotation(rank) if rotated else up
        return Projection(torch.linalg.pinv(up).contiguous(), up, weights.get(f"{name}.bias"))

    return {
        layer: LayerProjections(
            tuple(
                make((layer, side), group, rank)
                for side in SIDES
                for group, rank in enumerate(described.ranks[layer, side])
            )
        )
        for layer in described.layers
    }


def name_group(place: Place, group: int) -> str:
    """Return the beginning of the names of a group's weights."""
    return f"{name_module(place)}.U.{group}"


def name_module(place: Place) -> str:
    """Return the name of a projection of the model."""
    return f"model.layers.{place[0]}.self_attn.{place[1]}_proj"


def make_rotation(rank: int) -> Tensor:
    """Return an orthogonal matrix (r, r) in float64 that spreads each latent over all.

    For a power of two it is the Hadamard matrix over √r, as in the source. Otherwise, with r = m·2^a and odd m, it is
    the Kronecker product of the cosine transform of size m and the Hadamard matrix of size 2^a. The source takes
    Hadamard matrices of sizes such as 12, 20 and 28 from tables instead.
    """
    size = rank & -rank
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < size:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    odd = rank // size
    number = torch.arange(odd, dtype=torch.float64)
    cosines = torch.cos(math.pi / odd * number[:, None] * (number + 0.5)) * math.sqrt(2 / odd)
    cosines[0] /= math.sqrt(2)
    return torch.kron(cosines, hadamard) / math.sqrt(size)

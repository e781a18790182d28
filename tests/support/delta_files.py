"""Files of DeltaKV's compressors with weights that a test chooses."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from kvbench.config.catalogue import build, load_settings
from kvbench.interfaces.networks import Network
from kvbench.methods.codecs.delta import Delta
from kvbench.methods.codecs.delta_compressors import Compressor, name_weights
from kvbench.models.transformers_port import read_layout
from tests.support.method_files import FOLDER
from tests.support.tiny_models import tiny

SMALL = dict(full_layers=[0], depth=None, sinks=3, recent=8, stride=4, nearest=2)
"""Settings of the codec for a short text and a tiny model."""


def draw_compressor(width: int, code: int, seed: int) -> Compressor:
    """f_c as published, with two matrices; f_d linear. In float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(outputs: int, inputs: int) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=generator, dtype=torch.float64) * 2 / inputs**0.5

    down = Network("mlp_swiglu", (draw(2 * code, width), draw(code, code)), (None, None))
    return Compressor((down,), (Network("linear", (draw(width, code),), (None,)),))


def draw_apart(width: int, code: int, seed: int) -> Compressor:
    """f_c and f_d with two matrices and a bias, for K and V apart, whose codes have different widths. In float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(outputs: int, *inputs: int) -> torch.Tensor:
        return torch.randn(outputs, *inputs, generator=generator, dtype=torch.float64) / (inputs or (4,))[0] ** 0.5

    def draw_network(inputs: int, outputs: int, bias: bool) -> Network:
        inner = inputs + outputs
        return Network(
            "mlp_gelu", (draw(inner, inputs), draw(outputs, inner)), (draw(inner), draw(outputs) if bias else None)
        )

    sizes, half = (code // 3, code - code // 3), width // 2
    down = tuple(draw_network(half, own, True) for own in sizes)
    return Compressor(down, tuple(draw_network(own, half, own == sizes[0]) for own in sizes))


def make_linear(down: torch.Tensor, up: torch.Tensor) -> Compressor:
    """f_c and f_d as these matrices."""
    return Compressor((Network("linear", (down,), (None,)),), (Network("linear", (up,), (None,)),))


def make_identity(width: int) -> Compressor:
    """f_c and f_d that change nothing."""
    eye = torch.eye(width, dtype=torch.float64)
    return make_linear(eye, eye.clone())


def make_zero(width: int, code: int) -> Compressor:
    """f_c and f_d that give 0."""
    return make_linear(torch.zeros(code, width).double(), torch.zeros(width, code).double())


def write_compressors(path: Path, compressors: list[Compressor]) -> str:
    """Write the compressors of the layers 0, 1, … and return the path."""
    save_file(name_weights(compressors), str(path))
    return str(path)


def width_of(model: torch.nn.Module) -> int:
    """Numbers of a token in one layer, 2·d_k."""
    shape = read_layout(model)
    return 2 * shape.heads * shape.dim


def write_for(path: Path, model: torch.nn.Module, kind: str = "drawn", code: int = 12) -> str:
    """A file for a model: "drawn", "apart", "identity" or "zero"."""
    width, layers = width_of(model), read_layout(model).layers
    made = {
        "drawn": lambda layer: draw_compressor(width, code, layer),
        "apart": lambda layer: draw_apart(width, code, layer),
        "identity": lambda layer: make_identity(width),
        "zero": lambda layer: make_zero(width, code),
    }
    return write_compressors(path, [made[kind](layer) for layer in range(layers)])


def build_delta(model: str, kind: str = "identity", **args: object) -> Delta:
    """The codec for a tiny model, with the settings of `SMALL` and further ones, and compressors as of `write_for`."""
    path = Path(FOLDER.name) / f"deltakv-{kind}-{model}"
    own = str(path) if path.exists() else write_for(path, tiny(model), kind)
    return build("codec", load_settings("codec", "delta", SMALL | {"path": own} | args))

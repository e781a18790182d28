"""Low-rank factors of a base model: what their file holds. No tensor is read here, and torch is not imported.

The file is a safetensors file with two tensors for each projection of all layers: `q_proj.a`, shape (layers, rank,
inputs), and `q_proj.b`, shape (layers, outputs, rank). The merged weight of a layer is W + alpha / rank * b a (LoRA, Hu
et al. 2021, arXiv 2106.09685). The metadata name the base by the identity of its weights, and say which base of RoPE
and which length the merged model has.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from kvbench.models import local_models
from kvbench.models.local_models import check_fetched, identify_converted
from kvbench.validation import SettingError, is_number, summarize

PROJECTIONS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn"),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp"),
}  # projection -> its module in a layer
BASE = "model"  # keys of the metadata: the identity of the base's weights
NUMBERS = ("alpha", "theta", "longest")


@dataclass(frozen=True)
class FactorsFile:
    """What a file of factors says about itself. Its tensors are not read."""

    path: Path
    setting: str
    """The setting and its value, with which messages begin."""
    base: str
    """Identity of the weights that the factors were trained for."""
    alpha: float
    theta: float
    """Base of RoPE of the merged model."""
    longest: int
    """Tokens that the merged model reads."""
    shapes: Mapping[str, tuple[int, ...]]
    metadata: Mapping[str, str]

    @property
    def rank(self) -> int:
        """The rank of the factors."""
        return self.shapes["q_proj.a"][1]

    def check_base(self, name: str) -> None:
        """Raise a SettingError unless the factors were trained for this downloaded model. No weights are read."""
        check_fetched(name)
        identity = identify_converted(local_models.MODELS / name)
        if identity != self.base:
            raise SettingError(f"{self.setting}: the factors are of the base {self.base}, and {name} is {identity}")


def read_factors_file(path: Path, setting: str) -> FactorsFile:
    """Read the header of a file of factors.

    Args:
        path: The file.
        setting: The setting that names it, for messages.

    Raises:
        SettingError: The file is missing, damaged or truncated, or holds something else.
    """
    where = f"{setting}={path}"
    if not path.is_file():
        raise SettingError(f"{where}: no such file of low-rank factors; `kvbench dev tune` makes one")
    try:
        with safe_open(str(path), "numpy") as file:
            metadata = dict(file.metadata() or {})
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise SettingError(f"{where}: cannot read low-rank factors there ({summarize(error)})") from None
    check_shapes(where, shapes)
    try:
        alpha, theta, longest = (float(metadata[name]) for name in NUMBERS)
        base = metadata[BASE]
    except (KeyError, ValueError) as error:
        raise SettingError(f"{where}: its metadata lack a number or the base ({summarize(error)})") from None
    if not (is_number(alpha) and is_number(theta) and is_number(longest) and theta > 1 and longest >= 1):
        raise SettingError(f"{where}: alpha={alpha}, theta={theta} and longest={longest} make no model")
    return FactorsFile(path, where, base, alpha, theta, int(longest), shapes, metadata)


def check_shapes(where: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise a SettingError unless tensors have the names and the number of dimensions of factors, and one rank."""
    expected = {f"{name}.{part}" for name in PROJECTIONS for part in "ab"}
    if other := sorted(expected ^ shapes.keys()):
        raise SettingError(f"{where}: holds no low-rank factors of a Llama ({other[0]} is missing, or too many)")
    if wrong := sorted(name for name in expected if len(shapes[name]) != 3 or 0 in shapes[name]):
        raise SettingError(f"{where}: {wrong[0]} has the shape {list(shapes[wrong[0]])}; [layers, rank, inputs] for a")
    sizes = {(shapes[name][0], shapes[name][1 if name.endswith("a") else 2]) for name in expected}
    if len(sizes) > 1:
        raise SettingError(f"{where}: its tensors have different layers or ranks")

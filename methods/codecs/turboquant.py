"""turboquant: rotated keys by the best levels for normal numbers, with a norm for each row (TurboQuant).

Sources: arXiv 2504.19874, Algorithms 1 and 2; vLLM, model_executor/layers/quantization/turboquant (config.py,
centroids.py) and v1/attention/ops/triton_turboquant_store.py; tonbistudio/turboquant-pytorch, compressors.py.
Symbols: d channels, b bits, H the Hadamard matrix over √d.

* Keys of 3 or 4 bits: ν = ‖k‖; each number of (k/ν)·H gets the nearest of 2^b levels, of two the larger one. A row is
  read as ν·c·H, with c the levels, over ‖c‖ if `norm_correction`. The levels are those of Lloyd and Max for N(0, 1/d).
* Keys of 8 bits: e4m3 without a scale. Numbers beyond 448 become 448.
* values=affine: s = max((max - min)/(2^b - 1), 1e-8); v is read as s·q + min, with q = ⌊(v - min)/s + 1/2⌋. Rows are
  rounded by s, min and ν in float32. Float16 numbers of them are stored, and rows are read by these.
* raw_layers: as many first and last layers stay raw. vLLM's 2 are not optional there, but for models with layers of
  another kind than attention, where all layers are rounded; kvbench takes the setting as it is.
* The paper's form: a random rotation in the place of H; values=levels, by the same rule as keys; no norm correction.
  `residual` (Algorithm 2) leaves b - 1 bits for the levels and stores the signs of S·r, r being the row less what its
  levels stand for, and ‖r‖ in float16. A row is read with ‖r‖·√(π/2)/d·Sᵀ·signs added, so that its products with
  queries are right in the mean. The rotation comes from the QR decomposition of a normal matrix, and the numbers of S
  are normal. All layers share both, which `seed` draws. The levels are those of N(0, 1/d), where the paper has those of
  the density of a coordinate on the sphere. The paper's splits of channels by outliers (2.5 and 3.5 bits) are left out.
  With `residual` tokens are decoded through the model's modules, without it in a CUDA graph.

Bytes of a row: keys d for 8 bits, else d·b/8 + 2, with `residual` d·b/8 + 4; values d·b/8 + 4, by levels d·b/8 + 2.
vLLM fills a row up to an even number of bytes. Rows are rounded as they are written, as servers do. The first block of
a prompt attends to its rounded rows, where vLLM lets it attend to raw ones. A row with NaN reads as NaN, which ends the
run.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvbench.interfaces.codec import Codec
from kvbench.interfaces.layout import Layout
from kvbench.interfaces.row_codec import Parts
from kvbench.interfaces.settings import setting
from kvbench.kernels.coded_rows import Form, decode, encode, make_hadamard, pack_codes, unpack_codes
from kvbench.methods.codecs.coded_rows import RoundingCodec
from kvbench.validation import SettingError


@dataclass(frozen=True)
class TurboQuant(RoundingCodec):
    """Store rotated keys by levels, and values between their smallest and largest number or as keys."""

    key_bits: int = setting(choices=(3, 4, 8))
    """Bits of a number of a key, b. 8 stores e4m3."""
    value_bits: int = setting(choices=(3, 4))
    """Bits of a number of a value."""
    values: str = setting(choices=("affine", "levels"))
    """Whether values are spread between their smallest and largest number, or rounded as keys."""
    norm_correction: bool = setting()
    """Whether levels are divided by their norm when they are read."""
    rotation: str = setting(choices=("hadamard", "random"))
    """What rows are multiplied with before they are rounded to levels."""
    residual: bool = setting()
    """Whether a bit of each number of a key goes to the signs of what the levels leave."""
    raw_layers: int = setting(minimum=0)
    """Number of first layers, and of last ones, whose rows stay raw."""
    seed: int = setting(minimum=0, maximum=2**32 - 1)
    """Draws the random rotation and the matrix S of the residual part."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.residual and self.key_bits == 8:
            raise SettingError("codec.residual=true: not with codec.key_bits=8, which has no levels; false")
        if self.residual and self.norm_correction:
            raise SettingError("codec.residual=true: not with codec.norm_correction=true, which no source has; false")

    @property
    def decodes_codes(self) -> bool:
        return not self.residual

    def check(self, layout: Layout) -> None:
        dim = layout.dim
        rotates = self.key_bits != 8 or self.values == "levels"
        if rotates and self.rotation == "hadamard" and dim & (dim - 1):
            raise SettingError(
                f"codec.rotation=hadamard: heads of {dim} channels, and the matrix needs a power of two; random"
            )
        if dim % 8:
            raise SettingError(f"codec={self.name}: {dim} channels per head do not fill whole bytes, 8 would")
        if 2 * self.raw_layers >= layout.layers:
            raise SettingError(
                f"codec.raw_layers={self.raw_layers}: the model has {layout.layers} layers, and all would stay raw"
            )

    def of_layer(self, layer: int, layers: int) -> Codec:
        return self if self.raw_layers <= layer < layers - self.raw_layers else Codec("raw")

    @property
    def forms(self) -> tuple[Form, Form]:
        return self.find_forms(1)

    def find_forms(self, dim: int) -> tuple[Form, Form]:
        keys = Form("e4m3", wide=True) if self.key_bits == 8 else self.make_levels(self.key_bits - self.residual, dim)
        if self.values == "levels":
            return keys, self.make_levels(self.value_bits, dim)
        least = 1e-8 * (2**self.value_bits - 1)
        return keys, Form(
            f"uint{self.value_bits}",
            "range",
            least=least,
            stored=torch.float16,
            rounds_by_stored=False,
            rounding="up",
            wide=True,
        )

    def make_levels(self, bits: int, dim: int) -> Form:
        """Return the form of rows of `dim` channels that are rounded to levels of so many bits."""
        levels = tuple(level / dim**0.5 for level in find_levels(bits))
        return Form(
            "levels",
            "norm",
            stored=torch.float16,
            rounds_by_stored=False,
            levels=levels,
            normed=self.norm_correction,
            wide=True,
        )

    def make_turns(self, dim: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        if self.rotation == "hadamard":
            turn = make_hadamard(dim, None, device)
        else:
            turn = draw_rotation(dim, self.seed, device)
        return None if self.key_bits == 8 else turn, turn if self.values == "levels" else None

    def encode(self, rows: Tensor) -> Parts:
        if not self.residual:
            return super().encode(rows)
        dim = rows.shape[1]
        form, turn = self.find_forms(dim)[0], self.make_turns(dim, rows.device)[0]
        parts, wide = encode(rows, form, turn=turn), torch.promote_types(rows.dtype, torch.float32)
        rest = rows.to(wide) - decode(parts, form, wide, turn=turn)
        signs = rest @ draw_normal(dim, self.seed, rows.device).T.to(wide) >= 0
        return *parts, pack_codes(signs.to(torch.uint8), 1), rest.norm(dim=-1, keepdim=True).half()

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        if not self.residual:
            return super().decode(parts, dtype)
        *coded, packed, norms = parts
        wide = torch.promote_types(dtype, torch.float32)
        signs = unpack_codes(packed, 1).to(wide) * 2 - 1
        dim = signs.shape[1]
        factor = norms.to(wide) * (torch.pi / 2) ** 0.5 / dim
        rest = signs @ draw_normal(dim, self.seed, signs.device).to(wide) * factor
        return (self.decode_side(0, tuple(coded), wide) + rest).to(dtype)


@cache
def find_levels(bits: int) -> tuple[float, ...]:
    """Return the 2^bits levels of Lloyd and Max for N(0, 1), as vLLM computes them.

    They begin evenly in ±3.5. Each round moves a level to the mean between its borders, by the trapezoid rule in 200
    steps. There are at most 200 rounds. vLLM computes with N(0, 1/d) and stops when levels move by less than 1e-10.
    """
    count = 2**bits
    levels = -3.5 + 7 * (torch.arange(count, dtype=torch.float64) + 0.5) / count
    ends = torch.tensor([10.5], dtype=torch.float64)
    share = torch.linspace(0, 1, 201, dtype=torch.float64)
    for _ in range(200):
        edges = torch.cat([-ends, (levels[1:] + levels[:-1]) / 2, ends])
        points = edges[:-1, None] + (edges[1:] - edges[:-1])[:, None] * share
        density = (-(points**2) / 2).exp()
        moved = torch.trapezoid(points * density, points) / torch.trapezoid(density, points)
        if (moved - levels).abs().max() < 1e-10:
            break
        levels = moved
    return tuple(levels.tolist())


@cache
def draw_rotation(dim: int, seed: int, device: torch.device) -> Tensor:
    """Return the transpose of a random rotation, (d, d) float32."""
    draw = torch.randn(dim, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    rotation, upper = torch.linalg.qr(draw)
    return (rotation * upper.diagonal().sign()).T.to(device, torch.float32).contiguous()


@cache
def draw_normal(dim: int, seed: int, device: torch.device) -> Tensor:
    """Return S, (d, d) float32, another draw than that of the rotation."""
    generator = torch.Generator().manual_seed(seed + 10000)
    return torch.randn(dim, dim, dtype=torch.float64, generator=generator).to(device, torch.float32)

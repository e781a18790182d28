"""What fp8, int8 and int4 say of a row, in float64, by the formulas of their sources."""

from dataclasses import dataclass

import numpy as np
import torch
from scipy.linalg import hadamard


def divide(x: np.ndarray, scale: float) -> np.ndarray:
    """x/s as sources compute it, in float32: some numbers lie on the border of two codes, such as a row's largest."""
    return (np.float32(x) / np.float32(scale)).astype(float)


E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)  # bits of the mantissa, the smallest normal power, the largest number


def to_float(x: np.ndarray, mantissa: int, lowest: int, largest: float) -> np.ndarray:
    """The nearest floats, of two the one with an even mantissa; beyond the largest one that."""
    size = np.minimum(np.abs(x), largest)
    power = np.maximum(np.frexp(size)[1] - 1, lowest)
    step = 2.0 ** (power - mantissa)
    return np.copysign(np.rint(size / step) * step, x)


def by_scale(scale: float, form=E4M3):
    return lambda x: to_float(divide(x, scale), *form) * scale


def by_row(x: np.ndarray, form=E4M3) -> np.ndarray:
    scale = max(divide(np.abs(x).max(), form[2]), np.float32(1e-6))
    return to_float(divide(x, scale), *form) * scale


def round_symmetric(x: np.ndarray, to_whole=np.rint) -> np.ndarray:
    scale = max(divide(np.abs(x).max(), 127), np.float32(1e-6))
    codes = np.clip(to_whole(divide(x, scale)), -128, 127)
    return (np.float32(codes) * np.float32(scale)).astype(float)  # the next layer cuts off what depends on it


def round_truncating(x: np.ndarray) -> np.ndarray:
    return round_symmetric(x, np.trunc)


def round_around_the_middle(x: np.ndarray) -> np.ndarray:
    zero, scale = float(np.float16((x.min() + x.max()) / 2)), float(np.float16((x.max() - x.min()) / 255))
    return np.clip(np.rint(divide(x - zero, scale or 1)), -128, 127) * scale + zero


@dataclass(frozen=True)
class QuaRot:
    """Between the smallest and the largest number of each group of a row, which is turned before."""

    turned: bool = True
    group: int = 32
    clip: float = 1.0

    def __call__(self, x: np.ndarray) -> np.ndarray:
        matrix = hadamard(len(x)) / len(x) ** 0.5 if self.turned else np.eye(len(x))
        y = matrix @ x
        for start in range(0, len(x), self.group):
            part = y[start : start + self.group]
            low, high = self.clip * part.min(), self.clip * part.max()
            scale, zero = float(np.float16(divide(max(high - low, 1e-5), 15))), float(np.float16(low))
            part[:] = np.clip(np.rint(divide(part - zero, scale)), 0, 15) * scale + zero
        return matrix.T @ y


def round_as_vllm(x: np.ndarray) -> np.ndarray:
    """y = H D x, and a zero that is a code, in the lowest bits of the scale."""
    half = torch.full((len(x),), 0.5)
    signs = 2 * torch.bernoulli(half, generator=torch.Generator().manual_seed(0x9E3779B9)).numpy() - 1
    y = hadamard(len(x)) @ (signs * x)
    scale = max((y.max() - y.min()) / 15, 1e-6)
    zero = np.clip(np.floor(-y.min() / scale + 0.5), 0, 15)
    codes = np.clip(np.floor(y / scale + zero + 0.5), 0, 15)
    stored = (np.float32(scale).view(np.int32) & np.int32(-16)).view(np.float32)
    return signs * (hadamard(len(x)) @ ((codes - zero) * float(stored))) / len(x)

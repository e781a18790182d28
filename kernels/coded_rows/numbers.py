"""What codes and the scales beside them stand for, in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.coded_rows.form import Parts

STORED = {torch.float8_e4m3fn: "e4m3", torch.float8_e8m0fnu: "e8m0"}  # scales of 8 bits


@triton.jit
def base_number(code, CODE: tl.constexpr, like: tl.constexpr):
    """Return what codes stand for, without scale, in the dtype `like`, float16 or float32. It is exact.

    A float of 8 bits becomes a wider one by a shift, which leaves the difference of their exponents' biases.
    So no hardware with such floats is needed.
    """
    if CODE == "e4m3":
        word = code.to(tl.int32)
        if like == tl.float16:
            number = (((word & 0x80) << 8) | ((word & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True) * 256.0
        else:
            raised = (((word & 0x80) << 24) | ((word & 0x7F) << 20)).to(tl.float32, bitcast=True)
            number = raised * 18446744073709551616.0 * 72057594037927936.0  # 2^120 in two steps, within the exponents
        number = tl.where((word & 0x7F) == 0x7F, float("nan"), number)
    elif CODE == "e5m2":
        number = (code.to(tl.int32) << 8).to(tl.int16).to(tl.float16, bitcast=True)
    elif CODE == "int8":
        number = code.to(tl.int8, bitcast=True)
    elif CODE == "e2m1":
        word = code.to(tl.int32)
        raised = (((word & 8) << 28) | ((word & 7) << 22)).to(tl.float32, bitcast=True)
        number = raised * 18446744073709551616.0 * 4611686018427387904.0  # 2^126 in two steps
    else:
        number = code
    return number.to(like)


@triton.jit
def read_stored(step, STORED: tl.constexpr):
    """Return stored scales or zeros as float32."""
    if STORED == "e4m3":
        step = base_number(step, STORED, tl.float32)
    elif STORED == "e8m0":
        power = step.to(tl.int32)
        step = tl.where(power == 0, 0x400000, power << 23).to(tl.float32, bitcast=True)
        step = tl.where(power == 255, float("nan"), step)
    return step.to(tl.float32)


@triton.jit
def read_point(scale):
    """Return the scales that have a point in their 4 lowest bits, without it, and zeros."""
    bits = scale.to(tl.int32, bitcast=True)
    size = (bits & -16).to(tl.float32, bitcast=True)
    return size, -(bits & 15).to(tl.float32) * size


def list_memory(parts: Parts) -> list[Tensor]:
    """Return codes, scales and zeros, those of 8 bits as bytes. Codes stand for what a form lacks."""
    memory = [part.view(torch.uint8) if part.dtype in STORED else part for part in parts]
    return memory + [memory[0]] * (3 - len(memory))

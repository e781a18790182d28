"""The variants of Triton kernels that a computation would compile on a GPU, found without one.

Triton compiles a kernel anew for every set of constants and options, and for integers that are 1 or divisible by 16
unless the kernel says that they do not matter. `record_variants` notes what Triton would tell apart, with the rules of
its CUDA backend, and runs no kernel: operations take their references (`kvbench.kernels.dispatch.announce_launches`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import JITFunction
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import create_function_from_signature

from kvbench.engine import context
from kvbench.kernels.dispatch import announce_launches

Variants = dict[str, dict[str, dict[str, object]]]


@cache
def make_binder(kernel: InterpretedFunction) -> tuple[JITFunction, Callable]:
    """The kernel as Triton compiles it, and what tells its variants apart."""
    jitted = JITFunction(kernel.fn, **kernel.kwargs)
    backend = make_backend(GPUTarget("cuda", 90, 32))
    return jitted, create_function_from_signature(jitted.signature, jitted.params, backend)


@contextmanager
def record_variants() -> Iterator[Variants]:
    """Yield what the launches inside would compile: for each kernel the variants, and each by the arguments' names.

    Tensors count as a GPU's. No kernel runs.
    """
    found: Variants = defaultdict(dict)

    def note(kernel: InterpretedFunction, *args: object, grid: object, warmup: bool, **named: object) -> None:
        jitted, bind = make_binder(kernel)
        _, values, options = bind(*args, **named)
        variants = found[f"{kernel.fn.__module__.removeprefix('kvbench.kernels.')}.{kernel.fn.__name__}"]
        if (key := f"{values} {options}") not in variants:
            variants[key] = dict(zip(jitted.arg_names, values, strict=True)) | options

    with pytest.MonkeyPatch.context() as patch, announce_launches():
        patch.setattr(InterpretedFunction, "run", note)
        patch.setattr(torch.Tensor, "is_cuda", True, raising=False)
        patch.setattr(context, "can_capture", lambda model: True)
        yield found


def describe_new(known: Variants, found: Variants) -> list[str]:
    """A line for each variant of `found` that is not in `known`: what is different from the most similar one there."""
    lines = []
    for kernel, variants in found.items():
        for key in variants.keys() - known.get(kernel, {}).keys():
            own, others = variants[key], list(known.get(kernel, {}).values())
            differences = [{name: own[name] for name in own if own[name] != other[name]} for other in others]
            lines.append(f"{kernel}: {min(differences, key=len, default=own)}")
    return sorted(lines)

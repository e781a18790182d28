"""Triton kernels compiled for sm_90 where there is no GPU.

A test module that tests kernels has a function `ahead()`: for each one the kernel, the types of its arguments by name
("*bf16", "i32", "constexpr"), its constants by name and options such as num_warps.
`python -m tests.support.compile_kernels every MODULE…` compiles them, in a process of its own since the tests' process
interprets kernels; with `first` only the first entry of each kernel.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import chain

from tests.support.repository import ROOT

SHARED = 227 * 1024  # bytes of shared memory that a block may have on sm_90


def main(which: str, modules: Sequence[str]) -> None:
    """Print a line for each entry; raises where one does not compile or takes too much shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    done = set()
    for kernel, types, constants, options in chain.from_iterable(import_module(own).ahead() for own in modules):
        if which == "first" and kernel.__name__ in done:
            continue
        done.add(kernel.__name__)
        assert set(types) == set(kernel.arg_names), f"{kernel.__name__}: {set(types) ^ set(kernel.arg_names)}"
        source = ASTSource(kernel, types, constants)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert made.metadata.shared <= SHARED, f"{kernel.__name__}: {made.metadata.shared} bytes of shared memory"
        print(kernel.__name__, made.metadata.shared)


def list_kernel(kernel: object, pointers: dict[str, str], constants: dict[str, int], **options: int) -> tuple:
    """An entry of `ahead()`: arguments that are neither `pointers`, as {"keys": "*bf16"}, nor constants are "i32"."""
    types = {name: pointers.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
    return kernel, types, constants, options


def list_typed_kernel(kernel, kinds, constants):
    """A kernel with the types of all arguments, integers where nothing else is said, its constants and options."""
    options = {key: constants.pop(key) for key in ("num_warps", "num_stages", "maxnreg") if key in constants}
    names = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in kernel.arg_names}
    return kernel, names, constants, options


def compile_all(which: str, modules: Sequence[str]) -> str:
    """What `main` prints, from a process that does not interpret."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    command = [sys.executable, "-m", __name__, which, *modules]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

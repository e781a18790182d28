"""Triton kernels compiled for sm_90 where there is no GPU.

A test module that tests kernels has a function `ahead()`: for each one the kernel, the types of its arguments by name
("*bf16", "i32", "constexpr"), its constants by name and options such as num_warps.
`python -m tests.support.compile_kernels MODULE…` compiles them, in a process of its own since the tests' process
interprets kernels. `translate_all` does the first step of a compilation for the first entry of each kernel.
"""

import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import chain

from tests.support.repository import ROOT

SHARED = 227 * 1024  # bytes of shared memory that a block may have on sm_90


def list_entries(modules: Sequence[str]) -> Iterator[tuple]:
    """What the functions `ahead()` of the modules give."""
    for kernel, types, constants, options in chain.from_iterable(import_module(own).ahead() for own in modules):
        assert set(types) == set(kernel.arg_names), f"{kernel.__name__}: {set(types) ^ set(kernel.arg_names)}"
        yield kernel, types, constants, options


def main(modules: Sequence[str]) -> None:
    """Print a line for each entry; raises where one does not compile or takes too much shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for kernel, types, constants, options in list_entries(modules):
        source = ASTSource(kernel, types, constants)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert made.metadata.shared <= SHARED, f"{kernel.__name__}: {made.metadata.shared} bytes of shared memory"
        print(kernel.__name__, made.metadata.shared)


def translate(modules: Sequence[str]) -> None:
    """Make Triton's intermediate code of the first entry of each kernel; raises where types or shapes do not fit."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    target, done = GPUTarget("cuda", 90, 32), set()
    backend = make_backend(target)
    for kernel, types, constants, options in list_entries(modules):
        if kernel not in done:
            done.add(kernel)
            source, context = ASTSource(kernel, types, constants), ir.context()
            ir.load_dialects(context)
            backend.load_dialects(context)
            given = backend.parse_options({**options, **source.parse_options()})
            functions = backend.get_codegen_implementation(given)
            assert source.make_ir(target, given, functions, backend.get_module_map(), context).verify()


def translate_all(modules: Sequence[str]) -> str:
    """The traceback of `translate`, or nothing, from a fork of this process.

    The fork forgets Triton and the kernels, which it has as interpreted functions, and imports them again.
    """
    reading, writing = os.pipe()
    if (process := os.fork()) == 0:
        try:
            os.environ["TRITON_INTERPRET"] = "0"
            for name in [f"{module}." for module in sys.modules]:
                if name.startswith(("triton.", "kvbench.kernels.", "tests.kernels.")) and "._C." not in name:
                    del sys.modules[name[:-1]]
            translate(modules)
        except BaseException:
            os.write(writing, traceback.format_exc()[-9999:].encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        found = file.read()
    assert os.waitpid(process, 0)[1] == 0
    return found


def list_kernel(kernel: object, pointers: dict[str, str], constants: dict[str, int], **options: int) -> tuple:
    """An entry of `ahead()`: arguments that are neither `pointers`, as {"keys": "*bf16"}, nor constants are "i32"."""
    types = {name: pointers.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
    return kernel, types, constants, options


def list_typed_kernel(kernel, kinds, constants):
    """A kernel with the types of all arguments, integers where nothing else is said, its constants and options."""
    options = {key: constants.pop(key) for key in ("num_warps", "num_stages", "maxnreg") if key in constants}
    names = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in kernel.arg_names}
    return kernel, names, constants, options


def compile_all(modules: Sequence[str]) -> str:
    """What `main` prints, from a process that does not interpret."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    done = subprocess.run([sys.executable, "-m", __name__, *modules], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


if __name__ == "__main__":
    main(sys.argv[1:])

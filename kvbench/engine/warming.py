"""Compile GPU kernels before anything is timed.

Triton compiles a variant of a kernel at its first launch, one after the other. `compile_ahead` lets a computation
announce its launches (`kvbench.kernels.dispatch.announce_launches`), and compiles what it would launch on all
processors at once. Triton keeps the results on disk, and beside them kvbench notes what was compiled ahead, so this
takes time only once on a machine. Of several processes, such as the workers of a sweep, one compiles while the others
wait.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvbench.atomic import lock_file
from kvbench.kernels.dispatch import announce_launches
from kvbench.threads import count_processors


@dataclass
class Compilations:
    """What was compiled.

    Attributes:
        kernels: The name of each kernel.
        seconds: Time that it took.
    """

    kernels: list[str] = field(default_factory=list)
    seconds: float = 0.0


@contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Count the kernels that are compiled inside, not those in Triton's cache, and how long this thread compiled."""
    from triton import knobs

    done, thread = Compilations(), threading.get_ident()

    def note(*, src: Any, times: Any, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            done.kernels.append(src.name)
            if threading.get_ident() == thread:
                done.seconds += times.total / 1e6

    before, knobs.compilation.listener = knobs.compilation.listener, note
    try:
        yield done
    finally:
        knobs.compilation.listener = before


@contextmanager
def hold_compiler(key: str) -> Iterator[Path]:
    """Let only one process at a time compile into Triton's cache. The others wait here.

    Args:
        key: Identifies what is compiled.

    Yields:
        The file that notes that it was compiled. Whoever has compiled it makes this file.
    """
    from triton import knobs

    folder = Path(knobs.cache.dir)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "kvbench.lock").open("w") as file:
        lock_file(file)
        yield folder / f"kvbench-{key}.compiled"


def compile_ahead(key: str, work: Callable[[], None]) -> None:
    """Compile the kernels that `work` launches on the current GPU, as many at once as there are processors.

    None of them runs. A kernel that cannot be compiled is left out, and its first launch raises the error. Other
    processes wait meanwhile if they want to compile into the same cache. If that was done before, nothing happens.

    Args:
        key: Identifies `work`, the sources of its kernels, the GPU and the versions.
        work: The computation. Its operations take their reference implementations.

    Raises:
        OSError: The folder of Triton's cache cannot be written.
    """
    with hold_compiler(key) as note:
        if not note.exists() and compile_announced(work):
            note.touch()


def compile_announced(work: Callable[[], None]) -> bool:
    """Compile what `work` would launch, as `compile_ahead` says. Return whether every kernel could be compiled."""
    from triton import AsyncCompileMode
    from triton.runtime import JITFunction

    launch = JITFunction.run

    def announce(kernel: object, *args: object, warmup: bool, **named: object) -> None:
        launched = launch(kernel, *args, warmup=True, **named)
        if hasattr(launched, "future") and launched.future.done():
            launched.result(ignore_errors=True)  # now Triton knows the variant, and finds it sooner

    threads, gpu = count_processors(), torch.cuda.current_device()
    with ThreadPoolExecutor(threads, initializer=partial(torch.cuda.set_device, gpu)) as pool:
        compiling = AsyncCompileMode(pool, ignore_errors=True)
        JITFunction.run = announce
        try:
            with compiling, announce_launches():
                work()
        finally:
            JITFunction.run = launch
        kernels = [future.kernel for future in compiling.future_kernels.values() if future.kernel is not None]
        for loading in [pool.submit(getattr, kernel, "run") for kernel in kernels]:  # compiles what launches it
            loading.exception()  # its first launch raises it
    return len(kernels) == len(compiling.future_kernels)

"""The process that workers are forked from. It imports what they need once, while this process still plans its sweep.

Importing torch and transformers can take longer than planning a sweep, and every worker would do it again. Nothing in
this module imports them.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext
from threading import current_thread, main_thread

from kvbench.stops import ignore_interrupts

PARENT = "KVBENCH_PARENT"  # environment variable with the number of the process that started the server
FIRST = "kvbench.runs.end_with_parent"
IMPORTED = ("kvbench.runs.import_ahead",)


def start_fork_server() -> ForkServerContext:
    """Start the process, unless it runs already, and return the context that makes processes from it.

    It ends with this process, on Linux even while it imports. It imports from the same
    folders as this process, whatever the current folder has. It must not start CUDA, which forked processes could not
    use then, so torch asks the driver's management library which GPUs there are. Threads of an operation sleep while
    they wait for each other, unless OMP_WAIT_POLICY says otherwise, because all processes share the processors.
    """
    context = get_context("forkserver")
    first = [FIRST] if current_thread() is main_thread() else []  # other threads may end before this process does
    context.set_forkserver_preload([*first, *IMPORTED])
    variables = {
        PARENT: str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONSAFEPATH": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    with set_environment({"OMP_WAIT_POLICY": "PASSIVE"} | os.environ | variables), ignore_interrupts():
        forkserver.ensure_running()
    return context


@contextmanager
def set_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Have these environment variables, and no others, inside."""
    before = dict(os.environ)
    replace_environment(variables)
    try:
        yield
    finally:
        replace_environment(before)


def replace_environment(variables: Mapping[str, str]) -> None:
    """Have these environment variables and no others."""
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)

"""The process that workers are forked from. It imports what they need once, while this process still plans its sweep.

Importing torch and transformers can take longer than planning a sweep, and every worker would do it again. Nothing in
this module imports them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext

from kvbench.validation import ignore_interrupts

IMPORTED = ("kvbench.runs.workers",)


def start_fork_server() -> ForkServerContext:
    """Start the process, unless it runs already, and return the context that makes processes from it.

    It ends with this process. It must not start CUDA, which forked processes could not use then, so torch asks the
    driver's management library which GPUs there are.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    with set_environment({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}), ignore_interrupts():
        forkserver.ensure_running()
    return context


@contextmanager
def set_environment(own: dict[str, str]) -> Iterator[None]:
    """Set environment variables inside."""
    before = dict(os.environ)
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name)
        os.environ.update({name: value for name, value in before.items() if name in own})

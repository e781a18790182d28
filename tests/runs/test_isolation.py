"""A process that executes a stranger's runs reaches no network and takes no more memory than it may."""

import os
import resource
import socket
import sys
from collections.abc import Callable

import pytest

from kvbench.runs import isolation


def ask_child(work: Callable[[], str]) -> str:
    """What a function returns in a forked process, because nothing in this one may be closed for ever."""
    reader, writer = os.pipe()
    if (process := os.fork()) == 0:
        try:
            os.write(writer, work().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        said = pipe.read()
    os.waitpid(process, 0)
    return said


@pytest.mark.parametrize("namespaces", [True, False])
def test_no_server_is_reached(monkeypatch, namespaces):
    """The fallback closes the sockets of Python where there are no namespaces."""
    if not namespaces:
        monkeypatch.setattr(isolation, "unshare", lambda flags: False)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def call() -> str:
            said = isolation.close_network()
            try:
                socket.create_connection(server.getsockname(), timeout=1).close()
            except OSError:
                return f"{said}: {os.environ['HF_HUB_OFFLINE']}"
            return "reached"

        said = ask_child(call)
    known = ["without network: 1"] if namespaces and os.getuid() == 0 else []
    assert said in (
        known or ["without network: 1", "no network namespace here, so only Python's sockets are closed: 1"]
    )


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not enforce the limit")
def test_memory_ends_at_the_limit(monkeypatch):
    monkeypatch.setattr(isolation, "SHARE", 1e-9)  # less than the process has already

    def take() -> str:
        said = isolation.limit_memory(on_cpu=True)
        try:
            bytearray(100_000_000)
        except MemoryError:
            return said
        return "taken"

    assert ask_child(take) == "with at most 0.0 GB of memory"
    before = resource.getrlimit(resource.RLIMIT_DATA)
    assert isolation.limit_memory(on_cpu=False) == "no limit on memory, because a GPU is used"
    assert resource.getrlimit(resource.RLIMIT_DATA) == before

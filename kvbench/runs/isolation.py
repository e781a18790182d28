"""Close the network of this process and limit its memory, before it executes runs that somebody else described.

Both depend on the system. Each function returns what it did and what it cannot guarantee, as a part of a line.
"""

import ctypes
import os
import resource
import sys

NEW_NETWORK, NEW_USER = 0x40000000, 0x10000000  # CLONE_NEWNET and CLONE_NEWUSER of Linux
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
SOCKETS = ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto", "socket.sendmsg")
SHARE = 0.8  # of the machine's memory


def close_network() -> str:
    """Close the network for this process and those that it starts, for ever.

    Linux gives the process a network of its own, without any device. A process without the rights of root needs a user
    namespace for that, which exists on most systems and only while the process has a single thread. Otherwise only the
    sockets that Python opens are closed. Libraries of Hugging Face are told that there is no network.
    """
    os.environ |= dict.fromkeys(OFFLINE, "1")
    user, group = os.getuid(), os.getgid()
    if unshare(NEW_NETWORK):
        return "without network"
    if unshare(NEW_NETWORK | NEW_USER):
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        return "without network"
    sys.addaudithook(refuse_sockets)
    return "no network namespace here, so only Python's sockets are closed"


def unshare(flags: int) -> bool:
    """Return whether Linux gives this process new namespaces."""
    call = getattr(ctypes.CDLL(None), "unshare", None)
    return call is not None and call(flags) == 0


def refuse_sockets(event: str, arguments: object) -> None:
    """Raise a PermissionError if Python is about to use a socket."""
    if event in SOCKETS:
        raise PermissionError(f"{event}: there is no network here")


def limit_memory(on_cpu: bool) -> str:
    """Limit the memory of this process and of those that it starts, for ever.

    Args:
        on_cpu: Whether models run on the CPU. CUDA reserves much more memory than it uses, so a limit would stop it.
    """
    if not on_cpu:
        return "no limit on memory, because a GPU is used"
    if sys.platform != "linux":
        return f"no limit on memory, which {sys.platform} does not enforce"
    most = int(SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    return f"with at most {most / 1e9:.1f} GB of memory"

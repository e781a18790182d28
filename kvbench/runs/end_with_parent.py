"""Importing this module lets the kernel end this process as soon as the thread that started it has ended (Linux).

If the process that started it has already ended, it ends now.
"""

import ctypes
import os
import signal
import sys

from kvbench.runs.fork_server import PARENT

PR_SET_PDEATHSIG = 1  # linux/prctl.h

if sys.platform == "linux":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.environ[PARENT] != str(os.getppid()):
        os._exit(1)

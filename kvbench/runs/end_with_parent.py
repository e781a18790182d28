"""Importing this module lets the kernel end this process as soon as the thread that started it has ended (Linux).

KVBENCH_PARENT in the environment is the number of the process that started it. If that one has already ended, this
one ends now.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h

if sys.platform == "linux":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.environ["KVBENCH_PARENT"] != str(os.getppid()):
        os._exit(1)

"""A whole SLURM on this machine's loopback, everything of it in one folder: munged, slurmctld, slurmd, and a sacct that
reads the controller's memory, since without one the launcher waits for ever for a job that was killed.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel", "sinfo")
CONFIGURATION = """\
ClusterName=kvbench
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={state}/munge/socket
SlurmctldPort={controller}
SlurmdPort={node}
SlurmctldPidFile={state}/slurmctld.pid
SlurmdPidFile={state}/slurmd.pid
SlurmctldLogFile={state}/slurmctld.log
SlurmdLogFile={state}/slurmd.log
StateSaveLocation={state}/save
SlurmdSpoolDir={state}/spool
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,requeue_delay=0
ReturnToService=2
MailProg=/bin/true
MinJobAge=86400
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=debug Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""
SACCT = """\
#!{python}
import re, subprocess, sys
asked = [sys.argv[i + 1] for i, word in enumerate(sys.argv) if word == "-j"]
print("JobID|State|NodeList")
for job in asked:
    shown = subprocess.run(["scontrol", "-o", "show", "job", job], capture_output=True, text=True).stdout
    for line in shown.splitlines():
        own = dict(re.findall(r"(\\w+)=(\\S*)", line))
        name = own["JobId"]
        if "ArrayJobId" in own:
            task = own["ArrayTaskId"]
            name = f"{{own['ArrayJobId']}}_" + (f"[{{task}}]" if set(task) & set(",-") else task)
        print(f"{{name}}|{{own['JobState']}}|{{own.get('NodeList', '')}}")
"""


def find_missing_programs() -> list[str]:
    """Programs of SLURM that are not installed."""
    return [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]


@contextmanager
def run_cluster() -> Iterator[dict[str, str]]:
    """The environment in which sbatch and its kin reach it. Whatever was started is stopped in the end."""
    state = Path(tempfile.mkdtemp(prefix="kvbench-slurm-", dir="/tmp"))  # a socket's path must be short
    path = f"{state}/bin:{os.environ['PATH']}:/usr/sbin:/sbin"
    environment = os.environ | {"SLURM_CONF": f"{state}/slurm.conf", "PATH": path}
    for name, mode in (("munge", 0o711), ("save", 0o755), ("spool", 0o755), ("bin", 0o755)):
        (state / name).mkdir(mode=mode)
    state.chmod(0o755)
    key = state / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    host = socket.gethostname().split(".")[0]
    (state / "slurm.conf").write_text(
        CONFIGURATION.format(
            state=state, host=host, controller=find_free_port(), node=find_free_port(), cpus=os.cpu_count()
        )
    )
    sacct = state / "bin" / "sacct"
    sacct.write_text(SACCT.format(python=sys.executable))
    sacct.chmod(0o755)
    log = (state / "daemons.log").open("wb")
    daemons: list[subprocess.Popen] = []

    def start(*command: str) -> None:
        daemons.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

    try:
        own = [f"--{name}={state}/munge/{name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
        start("munged", "--foreground", "--force", f"--key-file={key}", *own)
        wait_until(lambda: (state / "munge" / "socket").exists())
        start("slurmctld", "-D", "-c")
        start("slurmd", "-D", "-N", host)
        wait_until(lambda: b"idle" in subprocess.run(["sinfo", "-h"], env=environment, capture_output=True).stdout)
        yield environment
    finally:
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(["scancel", "--user=root"], env=environment, capture_output=True, timeout=20)
        for daemon in reversed(daemons):  # munged last
            daemon.terminate()
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        log.close()
        shutil.rmtree(state, ignore_errors=True)


def wait_until(ready, seconds: float = 60.0) -> None:
    """Until `ready()`; TimeoutError after `seconds`."""
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError(f"not ready after {seconds:g} s")
        time.sleep(0.2)


def find_free_port() -> int:
    """A free one."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]

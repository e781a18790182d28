"""The task of a run that measures, how many tokens it times, and the machine that it measures.

The task is tasks/efficiency.py, whose settings conf/task/efficiency.yaml describes.

A method or a codec may work only now and then, as at a cut every 128 tokens. The median of the tokens' times does not
contain this work. The mean does, if enough tokens are timed. So an answer has INTERVALS intervals of such work, each of
LEAST_INTERVAL tokens at least, unless task.new_tokens gives another number. A graph's chunk of tokens, after which the
host reads them, is shorter than that.
"""

import torch

from kvbench.efficiency.roofline import Machine, load_machines
from kvbench.runs.spec import RunSpec
from kvbench.store.efficiency_csv import INTERVALS
from kvbench.store.published_runs import make_folder_name
from kvbench.tasks.efficiency import LEAST_SPLIT, Efficiency

WARMED = 8  # first steps of an answer that are not timed; half of a short answer
LEAST_INTERVAL = 128  # tokens of an interval, also where work returns more often


def read_task(run: RunSpec) -> Efficiency:
    """Return the task of a run that measures."""
    assert isinstance(run.task, Efficiency)  # callers have asked `RunSpec.measures`
    return run.task


def find_period(run: RunSpec) -> int:
    """Return the number of tokens after which a run's method or codec does again what it does now and then."""
    if read_task(run).baseline != "none":
        return 1
    method, codec = (choice := run.choice()).method, choice.codec
    return max(method.decode_interval if method.decoding else 1, codec.packing.interval)


def find_interval(run: RunSpec) -> int:
    """Return the number of tokens of an interval of a run's periodic work."""
    return max(LEAST_INTERVAL, find_period(run))


def list_ends(run: RunSpec) -> tuple[int, ...]:
    """Return the numbers of answer tokens after which the time is taken, ascending; the last is that of the answer."""
    task = read_task(run)
    if task.measure == "scoring" or task.measure == "latency" and not task.answers:
        return task.ends or (1,)
    return task.ends or (1 + WARMED + INTERVALS * find_interval(run),)


def count_split(run: RunSpec) -> int:
    """Return the number of tokens of an answer whose time is split into regions: a whole period, behind the first."""
    return min(max(list_ends(run)), LEAST_SPLIT + find_period(run) - 1)


def machine_name(device: str) -> str:
    """Return the GPU's name for a file, such as nvidia-h200, or cpu."""
    return make_folder_name(torch.cuda.get_device_name() if device != "cpu" else "cpu")


def find_machine(run: RunSpec) -> Machine | None:
    """Return the speeds of a run's machine, which its task gives, or conf/efficiency/machines.yaml for some GPUs.

    None if neither says them. There are no floors then.
    """
    task, known = read_task(run), load_machines().get(machine_name(run.device), {})
    bandwidth, flops = task.bandwidth or known.get("bandwidth"), task.flops or known.get("flops")
    return None if bandwidth is None or flops is None else Machine(bandwidth, flops)

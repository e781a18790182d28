"""The task of a run that measures, and the machine that it measures.

The task is tasks/efficiency.py, whose settings conf/task/efficiency.yaml describes.
"""

import torch

from kvbench.efficiency.roofline import Machine, load_machines
from kvbench.runs.spec import RunSpec
from kvbench.tasks.efficiency import Efficiency


def read_task(run: RunSpec) -> Efficiency:
    """Return the task of a run that measures."""
    assert isinstance(run.task, Efficiency)  # `RunSpec.measures`
    return run.task


def machine_name(device: str) -> str:
    """Return the GPU's name for a file, such as nvidia-h200, or cpu."""
    name = torch.cuda.get_device_name() if device != "cpu" else "cpu"
    return "-".join("".join(char if char.isalnum() else " " for char in name.lower()).split())


def find_machine(run: RunSpec) -> Machine | None:
    """Return the speeds of a run's machine, which its task gives, or conf/efficiency/machines.yaml for some GPUs.

    None if neither says them. There are no floors then.
    """
    task, known = read_task(run), load_machines().get(machine_name(run.device), {})
    bandwidth, flops = task.bandwidth or known.get("bandwidth"), task.flops or known.get("flops")
    return None if bandwidth is None or flops is None else Machine(bandwidth, flops)

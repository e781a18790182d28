"""The task of a run that measures: tasks/efficiency.py, whose settings conf/task/efficiency.yaml describes."""

from kvbench.runs.spec import RunSpec
from kvbench.tasks.efficiency import Efficiency


def read_task(run: RunSpec) -> Efficiency:
    """Return the task of a run that measures."""
    assert isinstance(run.task, Efficiency)  # `RunSpec.measures`
    return run.task

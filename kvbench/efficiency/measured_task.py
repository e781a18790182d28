"""The settings of task=efficiency, as the measurements read them."""

from typing import Protocol, cast

from kvbench.runs.spec import RunSpec


class MeasuredTask(Protocol):
    """The task of a run that measures (tasks/efficiency.py). conf/task/efficiency.yaml describes the settings."""

    measure: str
    baseline: str
    length: int
    batch: int
    repeats: int
    answers: int
    warmup: int
    rows: int | None
    fill: str
    most_batch: int | None
    implementation: str | None
    bandwidth: float
    flops: float

    @property
    def ends(self) -> tuple[int, ...]:
        """Numbers of answer tokens after which the end-to-end time is taken, ascending."""


def read_task(run: RunSpec) -> MeasuredTask:
    """Return the task of a run that measures."""
    return cast(MeasuredTask, run.task)

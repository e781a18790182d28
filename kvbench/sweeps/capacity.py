"""Whether this machine can hold a preset's runs: weights, and the full cache of the longest prompt if the task says it.

    bytes = weights + 2 · layers · KV heads · dimensions · tokens · size

are compared with the memory of the GPU (of all GPUs with model.device_map=auto), or of the machine. The weights are not
loaded for it. A sliding-window layer counts with all tokens. What a prefill needs besides is not counted, so that a
preset that passes may still be too large.
"""

from collections.abc import Iterable

from kvbench.runs.devices import count_device_bytes
from kvbench.runs.spec import RunSpec
from kvbench.validation import SettingError


def count_needed_bytes(run: RunSpec) -> int:
    """Return the bytes of the weights and of the full cache."""
    from kvbench.models.loading import count_weight_bytes

    checkpoint, shape = run.checkpoint, run.checkpoint.layout()
    weights = count_weight_bytes(checkpoint.config(), run.torch_dtype, checkpoint.weights_format)
    rows = shape.layers * shape.row_numbers * (run.task.length or 0)
    return weights + run.torch_dtype.itemsize * rows


def count_available_bytes(run: RunSpec) -> int:
    """Return the bytes of memory that the run's device has."""
    return count_device_bytes(run.device, run.checkpoint.device_map is not None)


def select_largest(runs: Iterable[RunSpec]) -> list[RunSpec]:
    """Return one run for each model, length of prompts, dtype and device, without those that measure cost."""
    return list(
        {(run.checkpoint, run.task.length, run.dtype, run.device): run for run in runs if not run.measures}.values()
    )


def check_capacity(preset: str, runs: Iterable[RunSpec]) -> None:
    """Raise a SettingError if a preset's runs need more memory than this machine has.

    Args:
        preset: Its name, for the message.
        runs: The runs of its cells that are not refused.
    """
    for run in select_largest(runs):
        if (wanted := count_needed_bytes(run)) > (there := count_available_bytes(run)):
            what = f"preset={preset}: model={run.checkpoint.name} needs {wanted / 1e9:.1f} GB"
            has = f"this machine has {there / 1e9:.1f} GB ({run.device})"
            raise SettingError(f"{what} for weights and full cache, {has}")


def describe_memory(runs: Iterable[RunSpec]) -> list[str]:
    """Return a line for each model and length of prompts: the memory that it needs, and that this machine has."""
    lines = []
    for run in select_largest(runs):
        length = "" if run.task.length is None else f", prompts of at most {run.task.length} tokens"
        what = "weights" if run.task.length is None else "weights and full cache"
        lines.append(
            f"model={run.checkpoint.name}{length}: {count_needed_bytes(run) / 1e9:.2f} GB for {what}; this machine has "
            f"{count_available_bytes(run) / 1e9:.1f} GB ({run.device})"
        )
    return lines

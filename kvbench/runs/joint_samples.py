"""Choose how many samples are read, and how many answers are decoded, as one batch.

Every batch pays once for capturing a graph and, at each step, for launching its kernels, so more answers cost little
more. Memory limits them: the contexts of all answers are held at once.
"""

from collections.abc import Sequence
from math import ceil

from kvbench.runs.devices import count_device_bytes
from kvbench.runs.spec import RunSpec

MOST = 16  # samples whose answers are decoded as one batch
ROOM = 0.5  # share of a process's memory for the rows of all contexts, beside weights and a prompt's activations


def find_batch_size(runs: Sequence[RunSpec]) -> int:
    """Return how many samples of one length are read as one batch.

    A CPU reads samples one by one, because a sample would give other results in a batch than alone. So does a method
    that decides how many rows stay, because records divide the bytes of a batch evenly.
    """
    alone = runs[0].device == "cpu" or any(run.budget.value is None for run in runs)
    return 1 if alone else runs[0].max_batch


def choose_joint_batches(runs: Sequence[RunSpec], prompt: int, answer: int, processes: int) -> int:
    """Return how many batches' answers in all `runs` are decoded as one batch: at least 1, and at most MOST samples.

    Args:
        runs: Runs of one model whose answers are decoded together.
        prompt: Tokens of the longest prompt.
        answer: Tokens of the longest answer.
        processes: Number of processes that share the device.
    """
    first, size = runs[0], find_batch_size(runs)
    shape = first.checkpoint.layout()
    row = shape.layers * shape.row_numbers * first.torch_dtype.itemsize  # bytes, in all layers and heads
    needed = row * size * sum(count_rows(run, prompt, answer) for run in runs)
    room = int(ROOM * count_device_bytes(first.device, first.checkpoint.device_map is not None)) // processes
    return max(1, min(MOST // size, room // max(1, needed)))


def count_rows(run: RunSpec, prompt: int, answer: int) -> int:
    """Return how many rows per layer and KV head a run's context needs memory for, in tokens of prompt and answer.

    A method that cuts while decoding has its rows twice: as the prompt left them, and in slots that an answer replaces.
    """
    quota, method = run.budget.rows(prompt, prompt), run.choice().method
    if quota is None or not method.cuts:
        return prompt + answer
    held = min(quota, prompt)
    return 2 * held if method.decoding else held + answer


def limit_claim(most: int, size: int, left: int, processes: int) -> int:
    """Return how many batches a process claims at once, so that the others get as many, from 1 to `most`.

    Args:
        most: Batches whose answers it decodes together.
        size: Samples of a batch at most.
        left: Samples without a record that no other process has claimed.
        processes: Number of processes that share the samples.
    """
    return max(1, min(most, ceil(left / (size * processes))))

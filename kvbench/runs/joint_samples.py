"""Choose how many samples' answers are decoded as one batch.

Every batch pays once for capturing a graph and, at each step, for launching its kernels, so more answers cost little
more. Memory limits them: the contexts of all answers are held at once.
"""

from collections.abc import Collection
from math import ceil

from kvbench.runs.devices import count_device_bytes
from kvbench.runs.spec import RunSpec

MOST = 16  # samples
ROOM = 0.5  # share of a process's memory for the rows of all contexts, beside weights and a prompt's activations


def choose_joint_samples(runs: Collection[RunSpec], longest: int, processes: int) -> int:
    """Return how many samples' answers in all `runs` are decoded as one batch, from 1 to MOST.

    Args:
        runs: Runs of one model whose answers are decoded together.
        longest: Tokens of the longest prompt.
        processes: Number of processes that share the device.
    """
    first = next(iter(runs))
    shape = first.checkpoint.layout()
    row = 2 * shape.layers * shape.heads * shape.dim * first.torch_dtype.itemsize  # bytes, in all layers and heads
    needed = row * sum(count_rows(run, longest) for run in runs)
    room = int(ROOM * count_device_bytes(first.device, first.checkpoint.device_map is not None)) // processes
    return max(1, min(MOST, room // max(1, needed)))


def count_rows(run: RunSpec, tokens: int) -> int:
    """Return how many rows per layer and KV head a run's context needs memory for, of a prompt with so many tokens.

    A method that cuts while decoding has its rows twice: as the prompt left them, and in slots that an answer replaces.
    """
    quota, method = run.budget.rows(tokens, tokens), run.choice().method
    rows = tokens if quota is None or not method.cuts else min(quota, tokens)
    return 2 * rows if method.decoding else rows


def limit_claim(most: int, left: int, processes: int) -> int:
    """Return how many batches a process claims at once, so that the others get as many, from 1 to `most`.

    Args:
        most: Batches whose answers it decodes together.
        left: Samples without a record.
        processes: Number of processes that share the samples.
    """
    return max(1, min(most, ceil(left / processes)))

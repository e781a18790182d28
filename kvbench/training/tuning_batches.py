"""Draw the batches of a tuning in worker processes, in an order that depends on nothing but the seed.

A batch has a number, from which its length and the numbers of its samples follow. So a tuning that goes on after an
interruption reads the same batches as one that was never interrupted, with any number of workers.
"""

import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kvbench.training.tuning_recipe import TuningRecipe

TEXT = "text"  # the kind of samples that are plain text
AHEAD = 4  # batches that each worker makes ahead


class DrawnSample(Protocol):
    """A sample, as `kvbench.training.tuning_data` draws it."""

    @property
    def kind(self) -> str:
        """The kind of task, or `TEXT`."""

    @property
    def ids(self) -> Sequence[int]:
        """Token ids, at most as many as the length that was asked for."""

    @property
    def answers(self) -> Sequence[tuple[int, int]]:
        """Half-open spans of `ids` that count in the loss."""


class SampleSource(Protocol):
    """What draws samples."""

    def draw(self, seed: int, number: int, length: int) -> DrawnSample:
        """Return the sample of a number, which always is the same one."""


@dataclass(frozen=True)
class Batch:
    """Rows of equal length, filled up with zeros at their ends, and the tokens that count in the loss."""

    ids: Tensor
    """Token ids, (rows, length), int32."""
    places: Tensor
    """Where a token that counts is predicted: the position before it in the flattened ids, (n,), int64. Rising."""
    targets: Tensor
    """The tokens that count, (n,), int64."""
    rows: Tensor
    """The row of each of them, (n,), int64."""
    kinds: tuple[str, ...]
    """The kind of each row."""

    @property
    def text_rows(self) -> list[int]:
        """The rows that are plain text."""
        return [row for row, kind in enumerate(self.kinds) if kind == TEXT]


def choose_length(recipe: TuningRecipe, number: int) -> int:
    """Return the length of the samples of a batch."""
    shares = recipe.shares
    draw = random.Random(f"kvbench tuning/{recipe.seed}/{number}")
    return draw.choices(list(shares), list(shares.values()))[0]


def make_batch(source: SampleSource, recipe: TuningRecipe, number: int) -> Batch:
    """Draw the samples of a batch.

    Args:
        source: Draws them.
        recipe: The recipe.
        number: Number of the batch.

    Raises:
        ValueError: A sample is longer than it may be, or none of its tokens counts.
    """
    length = choose_length(recipe, number)
    rows, most_rows = recipe.batch // length, recipe.batch // min(recipe.shares)
    ids = torch.zeros(rows, length, dtype=torch.int32)
    places: list[int] = []
    targets: list[int] = []
    owners: list[int] = []
    kinds: list[str] = []
    for row in range(rows):
        sample = source.draw(recipe.seed, number * most_rows + row, length)
        counted = sorted({place for begin, end in sample.answers for place in range(max(begin, 1), end)})
        if len(sample.ids) > length or not counted or counted[-1] >= len(sample.ids):
            raise ValueError(f"{sample.kind}: {len(sample.ids)} of {length} tokens, answers {list(sample.answers)}")
        ids[row, : len(sample.ids)] = torch.tensor(sample.ids, dtype=torch.int32)
        places += [row * length + place - 1 for place in counted]
        targets += [sample.ids[place] for place in counted]
        owners += [row] * len(counted)
        kinds.append(sample.kind)
    return Batch(ids, torch.tensor(places), torch.tensor(targets), torch.tensor(owners), tuple(kinds))


class Batches(Dataset[Batch]):
    """The batches by their numbers, for `DataLoader`.

    Args:
        make_source: Makes what draws samples. Each worker calls it once.
        recipe: The recipe.
        numbers: Numbers of the batches, in the order in which they are read.
    """

    def __init__(self, make_source: Callable[[], SampleSource], recipe: TuningRecipe, numbers: Sequence[int]) -> None:
        self.make_source, self.recipe, self.numbers = make_source, recipe, numbers
        self.source: SampleSource | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Batch:
        if self.source is None:
            self.source = self.make_source()
        return make_batch(self.source, self.recipe, self.numbers[index])


def start_worker(worker: int) -> None:
    """Prepare a worker process: on Ctrl-C the process that started it ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def read_batches(
    make_source: Callable[[], SampleSource], recipe: TuningRecipe, numbers: Sequence[int], workers: int
) -> Iterator[Batch]:
    """Yield batches in the order of their numbers.

    Args:
        make_source: Makes what draws samples; a function that can be pickled.
        recipe: The recipe.
        numbers: Numbers of the batches.
        workers: Number of processes that make them; 0 makes them in this one.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    batches = Batches(make_source, recipe, numbers)
    if not workers:
        yield from (batches[index] for index in range(len(batches)))
        return
    yield from DataLoader(
        batches,
        batch_size=None,
        num_workers=workers,
        worker_init_fn=start_worker,
        multiprocessing_context="spawn",  # CUDA may run already, and threads of the compiler do
        prefetch_factor=AHEAD,
    )

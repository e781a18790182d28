"""Answer the samples of several runs on one prefill.

Runs that differ only in method, allocator, codec or budget read the same prompts. A prompt is read once for all of
them, and each run then generates from its own compressed cache. Unless sweep.share_decoding=false, their answers are
decoded as one batch.

If the group does not fit in memory, it is split in half and retried. A run that fails is dropped with a warning, and
the others continue.
"""

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TypeVar

import torch
from tqdm import tqdm

from kvbench.engine.cuts_in_turn import ContextFailed
from kvbench.engine.generation import GenerationContext
from kvbench.engine.joint_decoding import Session, run_alone, run_together, separate_memory
from kvbench.engine.shared_prefill import prefill
from kvbench.engine.spending import spend
from kvbench.engine.timing import clear, forget_peak
from kvbench.interfaces.task import Sample
from kvbench.runs.prompt import Prompt
from kvbench.runs.responder import Responder
from kvbench.runs.spec import RunSpec
from kvbench.store.run_folder import RunFolder
from kvbench.validation import ContractError, NumericalError, format_value

Batch = Sequence[tuple[Sample, Prompt]]
T = TypeVar("T")


class RunGroup:
    """Runs that share their prefills.

    In a group, a run that fails is dropped with a warning. If the group was made of a single run, its error propagates.

    Attributes:
        runs: The runs by the folders of their records.
        readers: The responders of the runs that have not been dropped.
        most: How many runs one prefill serves.
        most_answers: How many answers are decoded as one batch.
    """

    def __init__(
        self,
        runs: Mapping[RunFolder, RunSpec],
        make: Callable[[RunSpec], Responder],
        reload: Callable[[], None],
        batches: int = 1,
    ) -> None:
        """Make a responder for each run.

        Args:
            runs: The runs by the folders of their records.
            make: Makes a run's responder.
            reload: Makes the next responders get a freshly loaded model.
            batches: Most batches of samples whose answers are decoded as one batch. Counts only if the runs share
                their decoding.
        """
        self.runs, self.make, self.reload = runs, make, reload
        self.most = len(runs)
        self.most_answers = batches * len(runs) if next(iter(runs.values())).shares_decoding else 1
        self.readers: dict[RunFolder, Responder] = {}
        for folder in runs:
            with self._leave_on_failure(folder):
                self.readers[folder] = make(runs[folder])

    def answer(self, folders: Sequence[RunFolder], batches: Sequence[Batch]) -> Iterator[tuple[RunFolder, list[dict]]]:
        """Answer batches in some of the runs.

        Args:
            folders: The folders of the runs.
            batches: Samples with their prompts. With several batches, no two of them share a context.

        Yields:
            (folder, records) as soon as a run is done with a batch. A run that fails yields nothing.
        """
        left = list(folders)
        while left:
            some, left = left[: self.most], left[self.most :]
            self._drop_others(some)
            done = set()
            for folder, number, records in self._answer_together(some, batches):
                done.add((folder, number))
                yield folder, records
            for number, batch in enumerate(batches):
                yield from self._answer_apart([folder for folder in some if (folder, number) not in done], batch)

    def _answer_apart(self, folders: Sequence[RunFolder], batch: Batch) -> Iterator[tuple[RunFolder, list[dict]]]:
        """Answer a batch in one run after the other. Yields what `answer` does.

        If the model fails on a sample, the others of the batch are answered alone before the error is raised.
        """
        try:
            yield from self._answer_in_turn(folders, batch)
        except NumericalError:
            if len(batch) == 1 or batch[0][0].conversation:
                raise
            failed: NumericalError | None = None
            for one in batch:
                try:
                    yield from self._answer_in_turn(folders, [one])
                except NumericalError as error:
                    failed = error
            if failed is not None:
                raise failed from None

    def _answer_in_turn(self, folders: Sequence[RunFolder], batch: Batch) -> Iterator[tuple[RunFolder, list[dict]]]:
        """Answer a batch in one run after the other. Yields what `answer` does."""
        left = list(folders)
        while left:
            some, left = left[: self.most], left[self.most :]
            alone, count = len(some) == 1, len(some)
            self._drop_others(some)
            spent = self._open(some, batch)
            while some and spent is not None:
                records = self._answer(some[0], batch, alone)
                if records is None:
                    break
                folder = some.pop(0)
                for record in records:
                    record["seconds"] += spent.get(folder, 0.0) / 1000
                if records:
                    yield folder, records
            if some:
                self._read_for_fewer(count)
                left = some + left

    def _drop_others(self, folders: Sequence[RunFolder]) -> None:
        for folder in self.readers.keys() - set(folders):
            self.readers[folder].drop()

    @property
    def most_batches(self) -> int:
        """How many batches `answer` should get at once."""
        return max(1, self.most_answers // max(1, len(self.readers)))

    def rehearse(self, batches: Sequence[Batch]) -> None:
        """Read batches in all runs and begin their answers, together if they will be decoded so, and keep nothing.

        If memory does not suffice, the samples' records will say so. If the model fails on a sample, its answer will.

        Args:
            batches: Batches as `answer` gets them. Only the first one is read if answers are decoded alone.
        """
        batch, together = batches[0], self.most_answers > 1 and not batches[0][0][0].conversation
        if together:
            pairs = [(folder, number) for number in range(len(batches)) for folder in self.readers]
            try:
                run_together(self._begin(pairs, batches, [], Responder.rehearse))
            except Exception as error:  # read one after the other, the runs show whose error it is
                together = False
                if spoils_model(error):
                    self._renew_model(error)
        if not together or len(self.readers) == 1:  # the last sample of a run may be answered alone
            self._open(list(self.readers), batch)
            for folder, reader in list(self.readers.items()):
                with self._leave_on_failure(folder), suppress(torch.cuda.OutOfMemoryError, NumericalError):
                    reader.blame_model(partial(rehearse_alone, reader, batch))
                reader.drop()
        self._drop_others(())
        clear(next(iter(self.runs.values())).device)

    def _open(self, folders: Sequence[RunFolder], batch: Batch) -> dict[RunFolder, float] | None:
        """Read the batch's shared prefix into all contexts that lack it, if several do.

        Returns:
            The milliseconds of each run; None if memory does not suffice.
        """
        while True:
            readers = {folder: self.readers[folder] for folder in folders if folder in self.readers}
            lacking = {folder: reader for folder, reader in readers.items() if not reader.has_read(batch)}
            if len(lacking) < 2:
                return {}
            spent = None
            try:
                with suppress(torch.cuda.OutOfMemoryError):
                    spent = prefill_together(list(lacking.values()), batch)
            except ContextFailed as failed:
                self._leave(list(lacking)[failed.number], failed.__cause__ or failed)
                continue
            return None if spent is None else dict(zip(lacking, spent, strict=True))

    def _answer_together(
        self, folders: Sequence[RunFolder], batches: Sequence[Batch]
    ) -> Iterator[tuple[RunFolder, int, list[dict]]]:
        """Answer batches in several runs, with as many answers decoded as one batch as fit into memory.

        If a run fails, all that are left answer in turn, which tells whose error it is. Turns of a conversation do so
        too, because they may continue the model's own answers.

        Yields:
            (folder, number of the batch, records)
        """
        left = [(folder, number) for number in range(len(batches)) for folder in folders if folder in self.readers]
        if batches[0][0][0].conversation:
            return
        while min(len(left), self.most_answers) > 1:
            self._drop_others([folder for folder, _ in left[: self.most_answers]])
            some, started, measured = left[: self.most_answers], time.perf_counter(), None
            begun: list[tuple[RunFolder, int]] = []
            try:
                with suppress(torch.cuda.OutOfMemoryError):
                    measured = run_together(self._begin(some, batches, begun, Responder.begin))
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                tqdm.write(f"kvbench: {len(some)} answers are decoded alone: {reason}", file=sys.stderr)
                if spoils_model(error):
                    self._renew_model(error)
                return
            if measured is None:  # not in an except block, whose error would keep tensors alive
                self.most_answers = (len(some) + 1) // 2
                line = f"kvbench: no memory for {len(some)} answers at once: {self.most_answers} from now on"
                tqdm.write(line, file=sys.stderr)
                clear(self.runs[folders[0]].device)
                continue
            left = left[len(some) :]
            seconds = (time.perf_counter() - started) / max(1, len(begun))
            for (folder, number), measurements in zip(begun, measured, strict=True):
                records = None
                if folder in self.readers:
                    with self._leave_on_failure(folder):
                        records = self.readers[folder].make_records(batches[number], measurements, seconds)
                if records is not None:
                    yield folder, number, records

    def _begin(
        self,
        pairs: Sequence[tuple[RunFolder, int]],
        batches: Sequence[Batch],
        begun: list[tuple[RunFolder, int]],
        begin: Callable[[Responder, Batch], Session[T]],
    ) -> Iterator[Session[T]]:
        """Read each batch into the contexts of its runs, and yield a session of each run before the next batch is read.

        Args:
            pairs: Runs, and the numbers of their batches in ascending order.
            batches: The batches.
            begun: Gets the pair of each session.
            begin: Makes the session of a run: `Responder.begin` or `Responder.rehearse`.

        Raises:
            torch.cuda.OutOfMemoryError: Memory does not suffice.
            RuntimeError: A run failed while sessions of the others were under way, so the model may be another one now.
        """
        used: set[int] = set()
        for number, group in groupby(pairs, key=itemgetter(1)):
            folders = [folder for folder, _ in group]
            if self._open(folders, batches[number]) is None:
                raise torch.cuda.OutOfMemoryError("no memory for all contexts")
            if begun and any(folder not in self.readers for folder in folders):
                raise RuntimeError("a run failed while it read a prompt")
            contexts = [
                (folder, self.readers[folder].open(batches[number])) for folder in folders if folder in self.readers
            ]
            with spend("reading"):
                for _, context in contexts:
                    separate_memory(context, used)
            for folder, _ in contexts:
                begun.append((folder, number))
                yield begin(self.readers[folder], batches[number])

    def _answer(self, folder: RunFolder, batch: Batch, alone: bool) -> list[dict] | None:
        """Return a run's records: none if it is dropped, None if memory does not suffice beside the other runs."""
        if folder in self.readers:
            with self._leave_on_failure(folder):
                reader = self.readers[folder]
                return reader.answer(batch) if alone else reader.attempt(batch)
        return []

    def _renew_model(self, error: BaseException) -> None:
        """Load the weights again, which the cause of an error has changed, for all runs that are left."""
        others = list(self.readers)
        self.readers.clear()  # the old weights must be freed before the new ones are loaded
        clear_frames(error)
        self.reload()
        clear(next(iter(self.runs.values())).device)
        for other in others:
            with self._leave_on_failure(other):
                self.readers[other] = self.make(self.runs[other])

    def _read_for_fewer(self, count: int) -> None:
        """Halve the number of runs that one prefill serves, because memory did not suffice for `count`."""
        self.most = (count + 1) // 2
        tqdm.write(f"kvbench: no memory for {count} runs at once: {self.most} from now on", file=sys.stderr)
        for reader in self.readers.values():
            reader.drop()
        clear(next(iter(self.runs.values())).device)

    @contextmanager
    def _leave_on_failure(self, folder: RunFolder) -> Iterator[None]:
        """Drop the run if the body raises; a single run's error propagates."""
        try:
            yield
        except Exception as error:
            if len(self.runs) == 1:
                if spoils_model(error):
                    self.reload()
                raise
            self._leave(folder, error)

    def _leave(self, folder: RunFolder, error: BaseException) -> None:
        """Drop a run that failed. The others read the sample again, as the run may have changed what they share."""
        self.readers.pop(folder, None)
        for reader in self.readers.values():
            reader.drop()
        if spoils_model(error):
            self._renew_model(error)
        if isinstance(error, ContractError):  # when the run is executed alone, it raises this error
            return
        groups = self.runs[folder].groups
        label = " ".join(f"{group}={settings['name']}" for group, settings in groups.items())
        budget = format_value(self.runs[folder].budget.value)
        reason = f"{type(error).__name__}: {error}"
        tqdm.write(f"kvbench: {label} budget={budget} is left to its own cell: {reason}", file=sys.stderr)


def rehearse_alone(reader: Responder, batch: Batch) -> None:
    """Read a batch in one run and begin its answers alone."""
    run_alone(reader.rehearse(batch))


def clear_frames(error: BaseException | None) -> None:
    """Free what the frames of an error and of its causes hold."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def spoils_model(error: BaseException | None) -> bool:
    """Whether the error says that the model's weights were changed."""
    return isinstance(error, ContractError) and error.spoils_model


@spend("reading")
def prefill_together(readers: Sequence[Responder], batch: Batch) -> list[float]:
    """Read the batch's shared prefix into new contexts of all readers; return the milliseconds of each."""
    for reader in readers:
        reader.drop()  # freed before the new ones grow
    forget_peak(readers[0].run.device)
    opening = readers[0].find_prefix(batch)
    contexts: list[GenerationContext] = []
    for reader in readers:
        contexts.append(reader.make_context(opening, contexts[-1] if contexts else None))
    spent = prefill(contexts, torch.tensor(opening.ids, device=next(readers[0].model.parameters()).device))
    for reader, context, milliseconds in zip(readers, contexts, spent, strict=True):
        reader.keep_context(opening, context, milliseconds, len(readers))
    return spent

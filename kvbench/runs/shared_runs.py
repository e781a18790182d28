"""Readers of runs that differ only in what they keep of a prompt: it is read once for all of them, and each answers
from its own rows. Where there is no room for all beside each other there may be for half as many, and so on.
"""

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
from tqdm import tqdm

from kvbench.engine.shared_prefill import ContextFailed, prefill
from kvbench.engine.timing import clear, forget_peak
from kvbench.interfaces.task import Sample
from kvbench.runs.prompt import Prompt
from kvbench.runs.responder import Responder
from kvbench.runs.spec import RunSpec
from kvbench.store.run_folder import RunFolder
from kvbench.validation import ContractError

Batch = Sequence[tuple[Sample, Prompt]]


class RunGroup:
    """The readers of `runs`, which `make` gives, by the folders of their records. Of several, one that fails leaves;
    what one that was alone from the beginning raises is raised.
    """

    def __init__(
        self, runs: Mapping[RunFolder, RunSpec], make: Callable[[RunSpec], Responder], reload: Callable[[], None]
    ) -> None:
        """`make` gives the reader of a run; `reload`: the next that are made get a model that is loaded anew."""
        self.runs, self.make, self.reload = runs, make, reload
        self.most = len(runs)  # how many prompts are read for at once
        self.readers: dict[RunFolder, Responder] = {}
        for folder in runs:
            with self._leave_on_failure(folder):
                self.readers[folder] = make(runs[folder])

    def answer(self, folders: Sequence[RunFolder], batch: Batch) -> Iterator[tuple[RunFolder, list[dict]]]:
        """The records of these runs, of each as soon as they are made; of one that leaves none."""
        left = [folder for folder in folders if folder in self.readers]
        while left:
            some, left = left[: self.most], left[self.most :]
            alone, count = len(some) == 1, len(some)
            for folder in self.readers.keys() - set(some):
                self.readers[folder].drop()
            spent = self._open(some, batch)
            while some and spent is not None:
                found = self._answer(some[0], batch, alone)
                if found is None:
                    break
                folder = some.pop(0)
                for record in found:
                    record["seconds"] += spent.get(folder, 0.0) / 1000
                if found:
                    yield folder, found
            if some:
                self._read_for_fewer(count)
                left = some + left

    def _open(self, folders: Sequence[RunFolder], batch: Batch) -> dict[RunFolder, float] | None:
        """Read what the batch begins with into all contexts that lack it, where several do: milliseconds of each. None
        where there is not memory enough.
        """
        while True:
            own = {folder: self.readers[folder] for folder in folders if folder in self.readers}
            lacking = {folder: reader for folder, reader in own.items() if not reader.has_read(batch)}
            if len(lacking) < 2:
                return {}
            spent = None
            try:
                with suppress(torch.cuda.OutOfMemoryError):
                    spent = prefill_together(list(lacking.values()), batch)
            except ContextFailed as failed:
                self._leave(list(lacking)[failed.number], failed.__cause__)
                continue
            return None if spent is None else dict(zip(lacking, spent, strict=True))

    def _answer(self, folder: RunFolder, batch: Batch, alone: bool) -> list[dict] | None:
        """A run's records, none if it leaves or has left; None where there is not memory enough beside the others."""
        if folder in self.readers:
            with self._leave_on_failure(folder):
                reader = self.readers[folder]
                return reader.answer(batch) if alone else reader.attempt(batch)
        return []

    def _read_for_fewer(self, count: int) -> None:
        """There was not memory enough for so many."""
        self.most = (count + 1) // 2
        tqdm.write(f"kvbench: no memory for {count} runs at once: {self.most} from now on", file=sys.stderr)
        for reader in self.readers.values():
            reader.drop()
        clear(next(iter(self.runs.values())).device)

    @contextmanager
    def _leave_on_failure(self, folder: RunFolder) -> Iterator[None]:
        """The run whose part fails inside leaves."""
        try:
            yield
        except Exception as error:
            if len(self.runs) == 1:
                if spoils_model(error):
                    self.reload()
                raise
            self._leave(folder, error)

    def _leave(self, folder: RunFolder, error: BaseException) -> None:
        """Go on without a run that failed. The others read the sample again: it may have spoiled what they share."""
        self.readers.pop(folder, None)
        for reader in self.readers.values():
            reader.drop()
        if spoils_model(error):
            others = list(self.readers)
            self.readers.clear()  # nobody holds the old weights when the new ones are loaded
            clear_frames(error)
            self.reload()
            clear(self.runs[folder].device)
            for other in others:
                with self._leave_on_failure(other):
                    self.readers[other] = self.make(self.runs[other])
        if isinstance(error, ContractError):  # its own cell says it, and once is enough
            return
        groups = self.runs[folder].groups
        label = " ".join(f"{group}={own['name']}" for group, own in groups.items())
        budget = self.runs[folder].budget.value
        reason = f"{type(error).__name__}: {error}"
        tqdm.write(f"kvbench: {label} budget={budget} is left to its own cell: {reason}", file=sys.stderr)


def clear_frames(error: BaseException | None) -> None:
    """Let go of what the frames of an error and of its causes hold."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def spoils_model(error: BaseException | None) -> bool:
    """Whether the weights of the model are not what they were."""
    return isinstance(error, ContractError) and error.spoils_model


def prefill_together(readers: Sequence[Responder], batch: Batch) -> list[float]:
    """Read what the batch begins with into new contexts of all readers: milliseconds of each."""
    for reader in readers:
        reader.drop()  # freed before the new ones grow
    forget_peak(readers[0].run.device)
    opening = readers[0].find_prefix(batch)
    contexts = [reader.make_context(opening) for reader in readers]
    spent = prefill(contexts, torch.tensor(opening.ids, device=next(readers[0].model.parameters()).device))
    for reader, context, own in zip(readers, contexts, spent, strict=True):
        reader.keep_context(opening, context, own, len(readers))
    return spent

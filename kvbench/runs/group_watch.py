"""Watch a group of runs: no method in it may change what the others depend on.

While the runs are executed and when they end, the model's weights and kvbench's own code are compared with what they
were (`kvbench.runs.integrity`). If they differ, the records since the last comparison cannot be trusted. They are set
aside, weights and code are put back, and the group ends. Each of its runs is then executed alone, which tells whose
fault it was.

On a CPU, one sample in a hundred is also read again alone in one of the runs, which must give the same record (law 7).
If a class of the group is not kvbench's, at least one sample is. A GPU adds up numbers of 16 bits in other orders when
runs share a prompt, so there this is left out.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from hashlib import sha256
from types import TracebackType

from tqdm import tqdm

from kvbench.engine.spending import spend
from kvbench.runs.integrity import Definitions
from kvbench.runs.resources import Resources
from kvbench.runs.responder import Responder, list_turns
from kvbench.runs.spec import RunSpec
from kvbench.store.run_folder import RunFolder, to_json_value
from kvbench.store.runs import name_some
from kvbench.validation import ContractError, format_value

SHARE = 0.005  # part of a group's time that comparisons may take; the last comparison is always made
ALONE = 100  # one sample in this many is read again alone
COMPARED = ("output", "score", "rows_held", "rows_held_end", "survived")  # fields that law 7 is about


class Untrusted(ContractError):
    """Records of a group of runs were set aside. The message names the method, if only one may have done it."""


class GroupWatch:
    """A context manager around the execution of a group of runs.

    Args:
        runs: The runs by the folders of their records.
        bench: Their model. The accused runs are noted there.
    """

    def __init__(self, runs: Mapping[RunFolder, RunSpec], bench: Resources) -> None:
        self.runs, self.bench = runs, bench
        self.definitions, self.model = Definitions(), bench.loaded.get("model")
        self.last, self.cost = time.perf_counter(), 0.0
        first = next(iter(runs.values()))
        self.rereads = len(runs) > 1 and first.device == "cpu" and first.dtype in ("float32", "float64")
        self.made: list[str] = []  # samples that this process has answered
        self.reread = False

    @spend("comparing")
    def look(self, again: bool = False) -> None:
        """Compare weights and code, unless that was done a short time ago.

        Args:
            again: Compare in any case.

        Raises:
            Untrusted: They changed.
        """
        begin = time.perf_counter()
        if not again and begin - self.last < self.cost / SHARE:
            return
        if changed := self._find_changed():
            raise self.end(f"{name_some(changed)} changed while it ran")
        for folder in self.runs:
            folder.trust_records()
        self.model, self.last = self.bench.loaded.get("model"), time.perf_counter()
        self.cost = self.last - begin

    def compare_alone(self, readers: Mapping[RunFolder, Responder], uids: Sequence[str], last: bool = False) -> None:
        """Read samples that are drawn by their names again alone, and compare the records.

        Args:
            readers: The responders of the runs that are left.
            uids: The samples that were just answered.
            last: Whether no further ones follow.

        Raises:
            Untrusted: A record differs.
        """
        if not self.rereads:
            return
        self.made += uids
        drawn = [uid for uid in uids if self._rank(uid) % ALONE == 0]
        if last and self.made and not self.reread and not all(run.is_of_kvbench for run in self.runs.values()):
            drawn = [min(self.made, key=self._rank)]
        for uid in drawn:
            others = [folder for folder in readers if folder.record(uid) and not self.runs[folder].full]
            others = [folder for folder in others if self.runs[folder].is_of_kvbench] or list(readers)
            folder = min(others, key=lambda candidate: self._rank(uid + candidate.hash))
            then, prompts = folder.record(uid), self.bench.prompts
            if then is None or then["error"]:
                continue
            self.reread = True
            readers[folder].drop()
            batch = [prompts[other] for other in list_turns(uid, prompts) or [uid]]
            [now] = [to_json_value(record) for record in readers[folder].answer(batch) if record["uid"] == uid]
            readers[folder].drop()
            if differ := [name for name in COMPARED if then.get(name) != now.get(name)]:
                run = self.runs[folder]
                label = f"{run.choice().owners} budget={format_value(run.budget.value)}"
                raise self.end(f"{label}: {', '.join(differ)} of {uid} is not what it is alone", everything=True)

    def _rank(self, text: str) -> int:
        """Return a number that stands for a text in this group of runs, whichever process asks."""
        return int(sha256(" ".join([text, *sorted(folder.hash for folder in self.runs)]).encode()).hexdigest(), 16)

    def end(self, fault: str, everything: bool = False) -> Untrusted:
        """Set records aside, and return the error that ends the group.

        Args:
            fault: What is wrong, as the end of a sentence about a method.
            everything: Set all records aside that this process has made, also those that were compared.
        """
        moved = sum(folder.set_records_aside(everything) for folder in self.runs)
        runs = self.runs.values()
        strangers = {run.choice_name: run for run in runs if not run.is_of_kvbench}
        suspects = strangers or {run.choice_name: run for run in runs}
        names = " or ".join(dict.fromkeys(run.choice().owners for run in suspects.values()))
        line = f"{names}: {fault}; {moved} records are set aside in untrusted-*.jsonl"
        if len(suspects) == 1:
            self.bench.accused |= dict.fromkeys(suspects, line)
        self.bench.predictions.clear()
        return Untrusted(line)

    def _find_changed(self) -> list[str]:
        """Return the names of what changed, and put it back."""
        changed = self.definitions.find_changed(restore=True)
        model = self.bench.loaded.get("model")
        if self.model is not None and model is not self.model and any(folder.untrusted for folder in self.runs):
            changed.append("weights, which were loaded again,")
        if model is not None and (weights := self.bench.weights.find_changed()):
            changed += weights
            self.bench.reload_model()
        return changed

    def __enter__(self) -> "GroupWatch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, Untrusted):
            return
        try:
            self.look(again=True)
        except Untrusted as untrusted:
            if isinstance(error, Exception):
                raise
            tqdm.write(f"kvbench: {untrusted}", file=sys.stderr)  # the stop, such as Ctrl-C, goes on

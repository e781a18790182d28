"""Log runs to Weights & Biases (logger=wandb) when they are finished or have failed.

A run never fails because of W&B and never waits for it longer than `logger.seconds`: a process of its own talks to W&B
and is killed at the limit. Whatever goes wrong there is one line on stderr. After a timeout the same process does not
ask that hub again, so that a hub which does not answer costs a sweep the limit once.

A run whose state was logged to the same place already is not logged again, except by `results wandb-sync`.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event
from typing import Any

from kvbench.config import catalogue
from kvbench.integrations.wandb_run import REASON, LoggedRun, hold_lock, send_run
from kvbench.integrations.worker import Worker
from kvbench.validation import SettingError, escape, is_number, require_choice, require_writable

FORBIDDEN = "/\\#?%:"  # characters that W&B does not take in names of projects and entities
UNANSWERED = ("not done after", "CommError")  # how an error of a hub that does not answer begins: ours, W&B's
LONGEST = {"project": 128, "entity": 128, "group": 128, "tags": 64}  # characters of a name


@dataclass(frozen=True)
class WandbLogger:
    """Logs the runs of a results folder to one place of W&B. Nothing is written or imported before the first run.

    Attributes:
        results: The results folder.
        settings: Checked settings of conf/logger/wandb.yaml.
    """

    results: Path
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, settings: Mapping[str, Any], results: Path) -> "WandbLogger":
        """Check settings and make a logger of them.

        Raises:
            SettingError: W&B would not take a setting, or the folder cannot be written.
        """
        chosen = {name: settings[name] for name in ("mode", "project", "entity", "group", "tags", "dir", "seconds")}
        require_choice("logger.mode", chosen["mode"], ("online", "offline"))
        for name in ("project", "entity", "group"):
            if chosen[name] is not None or name == "project":
                check_name(name, chosen[name])
        if isinstance(chosen["tags"], str) or not isinstance(chosen["tags"], Sequence):
            raise SettingError(f"logger.tags={chosen['tags']}: a list of texts, such as [a,b]")
        for tag in chosen["tags"]:
            check_name("tags", tag)
        if not is_number(chosen["seconds"]) or chosen["seconds"] <= 0:
            raise SettingError(f"logger.seconds={chosen['seconds']}: a number of seconds over 0")
        if not isinstance(chosen["dir"], str | None):
            raise SettingError(f"logger.dir={chosen['dir']}: a folder that can be written, or null")
        folder = Path(chosen["dir"] or results).expanduser().absolute()
        if settings["dir"] is not None:
            require_writable("logger.dir", folder)
        return cls(Path(results).absolute(), chosen | {"dir": str(folder), "tags": list(chosen["tags"])})

    @property
    def where(self) -> str:
        """The place as text: all settings but the time limit. Marks in run folders name it."""
        return " ".join(f"{name}={setting}" for name, setting in self.settings.items() if name != "seconds" and setting)

    def finished(self, runs: Sequence[Any]) -> None:
        """Log finished runs that were not logged yet.

        Args:
            runs: Objects with a ``value``; the full cache's run comes first.
        """
        self._quietly(lambda: self._log_new(self._list_subjects(runs)))

    def failed(self, runs: Sequence[Any], error: BaseException) -> None:
        """Log that the first unfinished one of the runs stopped with `error`; log the finished runs before it too."""
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:1000]

        def subjects() -> Iterator[LoggedRun]:
            for subject in self._list_subjects(runs):
                if subject.folder.finished:
                    yield subject
                    continue
                if subject.folder.path.is_dir():
                    (subject.folder.path / REASON).write_text(
                        f"{reason}\n", encoding="utf-8", errors="backslashreplace"
                    )
                yield LoggedRun(
                    subject.results,
                    subject.value,
                    subject.baseline,
                    reason.encode("utf-8", "backslashreplace").decode(),
                )
                return

        self._quietly(lambda: self._log_new(list(subjects())))

    def send(self, subjects: Sequence[LoggedRun], again: bool) -> Iterator[str | None]:
        """Log runs in a process of their own.

        Args:
            subjects: The runs.
            again: Whether to log a run whose state was logged there already.

        Yields:
            For each run, what went wrong, or None. When the time is over or the process ends, the last item says so,
            and the remaining runs have none.
        """
        limit = self.settings["seconds"]
        end = time.monotonic() + limit
        with Worker(
            _log_runs, [replace(subject) for subject in subjects], dict(self.settings), self.where, again
        ) as worker:
            for _ in subjects:
                try:
                    yield worker.receive(end - time.monotonic())
                except TimeoutError:
                    yield f"{UNANSWERED[0]} {limit:g} s (logger.seconds)"
                    return
                except EOFError:
                    yield "the process that logs ended"
                    return
                end = time.monotonic() + limit

    def _list_subjects(self, runs: Sequence[Any]) -> list[LoggedRun]:
        values = [run.value for run in runs]
        return [LoggedRun(self.results, value, values[0] if index else None) for index, value in enumerate(values)]

    def _log_new(self, subjects: Sequence[LoggedRun]) -> Iterator[str | None]:
        if get_stop_event(self.where).is_set():
            return
        fresh = [subject for subject in subjects if not subject.is_logged(self.where)]
        for wrong in self.send(fresh, again=False) if fresh else ():
            if wrong and wrong.startswith(UNANSWERED):
                get_stop_event(self.where).set()
                wrong += "; this process logs no more runs there"
            yield wrong
            if get_stop_event(self.where).is_set():
                return

    def _quietly(self, work: Callable[[], Iterable[str | None]]) -> None:
        """Print whatever goes wrong as one line and go on."""
        try:
            for wrong in filter(None, work()):
                self.say(wrong)
        except Exception as error:
            self.say(f"{type(error).__name__}: {error}")

    def say(self, wrong: str) -> None:
        """Print one line on stderr: what went wrong, and how to log the runs later."""
        wrong = escape(" ".join(wrong.split())[:300])
        later = f"kvbench results wandb-sync --results {self.results}"
        print(f"kvbench: logger=wandb: {wrong}; later: {later}", file=sys.stderr)


@cache
def get_stop_event(where: str) -> Event:
    """Return the event that is set once this process has given up logging there."""
    return Event()


def check_name(name: str, value: object) -> None:
    """Raise a SettingError unless W&B takes this as a name."""
    barred = FORBIDDEN if name in ("project", "entity") else ""
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST[name] or any(char in barred for char in value):
        also = f" without any of {' '.join(barred)}" if barred else ""
        raise SettingError(f"logger.{name}={value}: a text of 1 to {LONGEST[name]} characters{also}")


def _log_runs(
    pipe: Connection, subjects: Sequence[LoggedRun], settings: Mapping[str, Any], where: str, again: bool
) -> None:
    """Log runs and send, for each, what went wrong or None; runs in a process of its own."""
    for subject in subjects:
        error = None
        try:
            with hold_lock(subject.folder.path):
                if again or not subject.is_logged(where):
                    send_run(subject, settings)
                    subject.mark_logged(where)
        except (Exception, SystemExit) as failure:
            error = f"{type(failure).__name__}: {failure}"
        pipe.send(error)


def load_settings(overrides: Mapping[str, str]) -> dict[str, Any]:
    """Read conf/logger/wandb.yaml and change some of its settings.

    Args:
        overrides: New values by name, as typed in YAML.

    Raises:
        SettingError: There is no such setting, or a value is not YAML.
    """
    import yaml

    changes = {}
    for name, text in overrides.items():
        try:
            changes[name] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise SettingError(f"logger.{name}={text}: not a value that a setting can have") from None
    return catalogue.load_settings("logger", "wandb", changes)

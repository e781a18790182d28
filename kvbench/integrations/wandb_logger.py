"""logger=wandb: what the store holds about a run goes to Weights & Biases once it is finished, or has failed.

A run never waits longer than `logger.seconds` and never fails for it: another process talks to W&B
(kvbench.integrations.wandb_process), is killed at the limit, and whatever goes wrong there is one line on stderr. A hub
that does not answer in time is not asked again by the same process, so that it costs a sweep `logger.seconds` once.
What was logged to the same place already is not logged again, but for `wandb_log`, which always does.
"""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from threading import Event
from typing import Any

from kvbench.config.paths import CONF, make_environment
from kvbench.integrations.wandb_process import REASON, LoggedRun
from kvbench.validation import SettingError, escape, is_number, require_choice, require_writable

FORBIDDEN = "/\\#?%:"  # in W&B's names of projects and entities
UNANSWERED = ("not done after", "CommError")  # what is said of a hub that does not answer, by us and by W&B
LONGEST = {"project": 128, "entity": 128, "group": 128, "tags": 64}


@dataclass(frozen=True)
class WandbLogger:
    """Where runs of a results folder are logged, checked. Nothing is written or imported yet."""

    results: Path
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, settings: Mapping[str, Any], results: Path) -> "WandbLogger":
        """SettingError for a setting that W&B would not take."""
        own = {name: settings[name] for name in ("mode", "project", "entity", "group", "tags", "dir", "seconds")}
        require_choice("logger.mode", own["mode"], ("online", "offline"))
        for name in ("project", "entity", "group"):
            if own[name] is not None or name == "project":
                check_name(name, own[name])
        if isinstance(own["tags"], str) or not isinstance(own["tags"], Sequence):
            raise SettingError(f"logger.tags={own['tags']}: a list of texts, such as [a,b]")
        for tag in own["tags"]:
            check_name("tags", tag)
        if not is_number(own["seconds"]) or own["seconds"] <= 0:
            raise SettingError(f"logger.seconds={own['seconds']}: a number of seconds over 0")
        if not isinstance(own["dir"], str | None):
            raise SettingError(f"logger.dir={own['dir']}: a folder that can be written, or null")
        own["dir"] = str(Path(own["dir"] or results).expanduser().absolute())
        if settings["dir"] is not None:
            require_writable("logger.dir", Path(own["dir"]))
        return cls(Path(results).absolute(), own | {"tags": list(own["tags"])})

    @property
    def where(self) -> str:
        """The place, as text, and what marks runs there."""
        return " ".join(f"{name}={own}" for name, own in self.settings.items() if name != "seconds" and own)

    def finished(self, runs: Sequence[Any]) -> None:
        """Log those of the runs (each with its `value`), the full cache's first, that nobody has logged yet."""
        self._quietly(lambda: self._log_new(self._list_subjects(runs)))

    def failed(self, runs: Sequence[Any], error: BaseException) -> None:
        """Log that the first of the runs that is not finished stopped with `error`, and those before it."""
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:1000]

        def subjects() -> Iterator[LoggedRun]:
            for own in self._list_subjects(runs):
                if own.folder.finished:
                    yield own
                    continue
                if own.folder.path.is_dir():
                    (own.folder.path / REASON).write_text(f"{reason}\n", encoding="utf-8", errors="backslashreplace")
                yield LoggedRun(
                    own.results, own.value, own.baseline, reason.encode("utf-8", "backslashreplace").decode()
                )
                return

        self._quietly(lambda: self._log_new(list(subjects())))

    def send(self, subjects: Sequence[LoggedRun], again: bool) -> Iterator[str | None]:
        """For each subject what went wrong, None if nothing did; ends early, with why, when the time is over."""
        request = {
            "results": str(self.results), "settings": dict(self.settings), "where": self.where, "again": again,
            "subjects": [{"value": own.value, "baseline": own.baseline, "failure": own.failure} for own in subjects],
        }  # fmt: skip
        command = [sys.executable, "-P", "-m", "kvbench.integrations.wandb_process"]
        with TemporaryFile() as file:  # a pipe would be waited for until the process reads it
            file.write(json.dumps(request).encode())
            file.seek(0)
            process = subprocess.Popen(
                command, env=make_environment(), stdin=file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        end = time.monotonic() + self.settings["seconds"]
        try:
            for _ in subjects:
                line = read_line(process.stdout.fileno(), end)
                if line is None:
                    yield f"{UNANSWERED[0]} {self.settings['seconds']:g} s (logger.seconds)"
                    return
                if not line:
                    yield "the process that logs ended"
                    return
                yield json.loads(line)["error"]
                end = time.monotonic() + self.settings["seconds"]
        finally:
            process.kill()  # what it started sees that and ends
            process.wait()
            process.stdout.close()

    def _list_subjects(self, runs: Sequence[Any]) -> list[LoggedRun]:
        values = [own.value for own in runs]
        return [LoggedRun(self.results, own, values[0] if index else None) for index, own in enumerate(values)]

    def _log_new(self, subjects: Sequence[LoggedRun]) -> Iterator[str | None]:
        if get_stop_event(self.where).is_set():
            return
        fresh = [own for own in subjects if not own.is_logged(self.where)]
        for wrong in self.send(fresh, again=False) if fresh else ():
            if wrong and wrong.startswith(UNANSWERED):
                get_stop_event(self.where).set()
                wrong += "; this process logs no more runs there"
            yield wrong
            if get_stop_event(self.where).is_set():
                return

    def _quietly(self, work: Any) -> None:
        """Whatever goes wrong is one line."""
        try:
            for wrong in filter(None, work()):
                self.say(wrong)
        except Exception as error:
            self.say(f"{type(error).__name__}: {error}")

    def say(self, wrong: str) -> None:
        """One line on stderr."""
        wrong = escape(" ".join(wrong.split())[:300])
        print(f"kvbench: logger=wandb: {wrong}; later: make wandb-sync RESULTS={self.results}", file=sys.stderr)


@cache
def get_stop_event(where: str) -> Event:
    """Whether this process has given up logging there."""
    return Event()


def check_name(name: str, value: object) -> None:
    """SettingError unless W&B takes this as a name."""
    barred = FORBIDDEN if name in ("project", "entity") else ""
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST[name] or any(char in barred for char in value):
        also = f" without any of {' '.join(barred)}" if barred else ""
        raise SettingError(f"logger.{name}={value}: a text of 1 to {LONGEST[name]} characters{also}")


def read_line(pipe: int, end: float) -> bytes | None:
    """A line from a pipe, b"" if nobody writes to it any more, None if it is not there at the time `end`. One line is
    on its way at a time, or several: they are read byte by byte.
    """
    text = b""
    while not text.endswith(b"\n"):
        if not select.select([pipe], [], [], max(end - time.monotonic(), 0))[0]:
            return None
        part = os.read(pipe, 1)
        if not part:
            return b""
        text += part
    return text


def load_settings(overrides: Mapping[str, str]) -> dict[str, Any]:
    """conf/logger/wandb.yaml with these; SettingError for one that it does not have."""
    import yaml

    own = yaml.safe_load((CONF / "logger" / "wandb.yaml").read_text())
    for name, text in overrides.items():
        require_choice("logger setting", name, [key for key in own if key not in ("_target_", "name")])
        try:
            own[name] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise SettingError(f"logger.{name}={text}: not a value that a setting can have") from None
    return own

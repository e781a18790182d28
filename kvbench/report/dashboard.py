"""The report page, served to this machine while sweeps run: `make dashboard`.

    /                    the report page, told to ask for what follows every SECONDS and to take in what changed
    /progress.js         how far the newest sweeps are, and which page there is
    /data.js             the data of that page
    /report/<file>.js    what lies beside it

Nothing is done while nobody looks, but for one look at the beginning: a look at the newest sweeps reads their runs
where these changed, and starts to make the page anew, in a process of its own, where finished runs changed. Both wait
PATIENCE times as long as they take before the next, so that what runs keeps the machine. Nothing is written but the
report's files.
"""

import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from kvbench.config.paths import make_environment
from kvbench.report.labels import describe_error, shorten
from kvbench.report.page import FOLDER, content_security_policy, render_html
from kvbench.report.panels import DATA_ERRORS, gather_found
from kvbench.report.samples import to_embedded_json
from kvbench.store.runs import FoundRuns, list_folders
from kvbench.sweeps.status import (
    STATES,
    RecordCounter,
    SampleTimes,
    estimate_left,
    list_sweeps,
    read_cells,
    read_states,
)
from kvbench.validation import SettingError

SECONDS = 2.0  # between two looks
TIMING_SECONDS = 15.0  # between two looks at how long samples take
PATIENCE = 10
SWEEPS = 3  # that are shown
PORT = 8765
HOST = re.compile(r"(127\.0\.0\.1|localhost)(:\d{1,5})?", re.ASCII)  # any port: it may be forwarded
FILE = re.compile(r"/report/((?:samples|part)-[0-9a-f-]+\.js)", re.ASCII)
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",  # another site's page must not read the scripts
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass
class Throttle:
    """When something may be done again: not before `least` seconds, nor before PATIENCE times what it took."""

    least: float
    after: float = 0.0
    begun: float = 0.0

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self.after

    def begin(self) -> None:
        self.begun = time.monotonic()

    def end(self) -> None:
        now = time.monotonic()
        self.after = now + max(self.least, PATIENCE * (now - self.begun))


@dataclass
class Dashboard:
    """What is known of a results folder; asked by several threads at once."""

    results: Path
    lock: Lock = field(default_factory=Lock)
    counts: RecordCounter = field(default_factory=RecordCounter)
    look: Throttle = field(default_factory=lambda: Throttle(SECONDS))
    make: Throttle = field(default_factory=lambda: Throttle(SECONDS))
    timing: Throttle = field(default_factory=lambda: Throttle(TIMING_SECONDS))
    said: dict[str, Any] = field(default_factory=dict)
    times: SampleTimes | None = None
    made_of: object = None  # the finished runs that the page was last made of
    maker: subprocess.Popen | None = None
    made: bool = False  # by this dashboard
    problem: str = ""

    def progress(self) -> dict[str, Any]:
        """How far the sweeps are, looked at now if it is time; the page is made anew if it has to be."""
        with self.lock:
            if self.look.is_due:
                self.look.begin()
                self._update_page()
                if self.timing.is_due:
                    self.timing.begin()
                    self.times = SampleTimes(self.results)
                    self.timing.end()
                sweeps = [self._read_sweep(folder) for folder in list_sweeps(self.results)[:SWEEPS]]
                now = datetime.now(UTC).strftime("%H:%M:%S UTC")
                self.said = {"at": now, "sweeps": sweeps, "problem": self.problem, "making": self.maker is not None}
                self.look.end()
            return self.said | {"page": self.version()}

    def page(self) -> str:
        """The report page as it was last made, or one that has nothing yet."""
        return self.path.read_text(encoding="utf-8") if self.version() else self._empty_page

    @property
    def path(self) -> Path:
        return self.results / "report.html"

    def version(self) -> str:
        """Of the page: another one where it was made anew."""
        return str(self.path.stat().st_mtime_ns) if self.made and self.path.is_file() else ""

    def close(self) -> None:
        """End what was begun."""
        if self.maker is not None:
            self.maker.terminate()
            self.maker.communicate()

    @cached_property
    def _empty_page(self) -> str:
        return render_html(gather_found(FoundRuns(), datetime.now(UTC)).page | {"files": [], "folder": FOLDER})

    def _update_page(self) -> None:
        """Take in the page that was made; begin to make one where it is time and finished runs changed."""
        if self.maker is not None and self.maker.poll() is not None:
            reason = self.maker.communicate()[1].strip().splitlines()
            self.problem = (
                shorten(f"the page cannot be made: {(reason or ['?'])[-1]}", 300) if self.maker.returncode else ""
            )
            if self.maker.returncode:
                self.made_of = None  # it is tried again
            else:
                self.made = True
            self.maker = None
            self.make.end()
        finished = read_stamps(self.results)
        if self.maker is None and self.make.is_due and finished and finished != self.made_of:
            self.make.begin()
            self.made_of = finished
            command = [sys.executable, "-P", "-m", "kvbench", "report", str(self.results.resolve())]
            self.maker = subprocess.Popen(
                command, env=make_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
            )  # fmt: skip

    def _read_sweep(self, folder: Path) -> dict[str, Any]:
        """A sweep as the page takes it."""
        try:
            found = list(read_states(self.results, folder, self.counts))
            known = [
                (cell.get("value"), cell["readings"], state)
                for cell, (_, state) in zip(read_cells(folder), found, strict=True)
            ]
            cells = [
                asdict(state) | {"cell": shorten(label), "reason": shorten(state.reason, 300), "left": seconds}
                for (label, state), seconds in zip(found, estimate_left(self.times, known), strict=True)
            ]
            counts = {name: sum(state.name == name for _, state in found) for name in STATES}
        except (OSError, *DATA_ERRORS) as error:
            return {"name": shorten(folder.name), "wrong": describe_error(error), "counts": {}, "cells": []}
        return {"name": shorten(folder.name), "wrong": "", "counts": counts, "cells": cells}


def read_stamps(results: Path) -> dict[str, list[tuple]]:
    """What tells whether the page would be another: of finished runs all files, of others that they are there."""
    found = {}
    for path in list_folders(results):
        try:
            files = list(os.scandir(path))
            done = any(file.name == "done" for file in files)
            own = [file for file in files if done or file.name == "run.yaml"]
            found[path.name] = sorted((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in own)
        except OSError:
            continue  # it goes while we look: the next look tells
    return found


class RequestHandler(BaseHTTPRequestHandler):
    """A request."""

    server: "Server"
    server_version, sys_version = "kvbench", ""
    timeout = 20  # seconds that a client may take

    def do_GET(self) -> None:
        """The same for HEAD, without the body."""
        if not HOST.fullmatch(self.headers.get("Host", "")) or len(self.headers.get_all("Host")) > 1:
            # a name that was made to point here
            self._send(403, "text/plain", "This address is not the dashboard's.\n")
        elif (found := self._find_answer(self.path.partition("?")[0])) is None:
            self._send(404, "text/plain", "Not here.\n")
        else:
            self._send(200, *found)

    do_HEAD = do_GET

    def refuse(self) -> None:
        self._send(405, "text/plain", "GET and HEAD only.\n")

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = refuse

    def _find_answer(self, path: str) -> tuple[str, str] | None:
        """Kind and text of what the path means."""
        board = self.server.board
        if path == "/":
            live = f'<body data-live="{SECONDS:g}" data-page="{board.version()}">'
            return "text/html", board.page().replace("<body>", live, 1)
        if path == "/progress.js":
            return "text/javascript", f"kvbenchProgress({to_embedded_json(board.progress())});\n"
        if path == "/data.js":
            data = board.page().partition('id="data">')[2].partition("</script>")[0]
            return "text/javascript", f"kvbenchData({data});\n"
        name = FILE.fullmatch(path)
        file = name and board.results / FOLDER / name[1]
        if not file or file.is_symlink() or not file.is_file():
            return None
        return "text/javascript", file.read_text(encoding="utf-8")

    def _send(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if status == 405:
            self.send_header("Allow", "GET, HEAD")
        if kind == "text/html":
            self.send_header("Content-Security-Policy", content_security_policy())
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """What is asked for is nobody's concern."""


class Server(ThreadingHTTPServer):
    """Of a dashboard, on the loopback; SettingError for a port that cannot be had."""

    daemon_threads = True

    def __init__(self, results: Path, port: int) -> None:
        if not results.is_dir():
            raise SettingError(f"results={results}: no such folder")
        if not 0 <= port <= 65535:
            raise SettingError(f"port={port}: a whole number from 0 (any that is free) to 65535")
        self.board = Dashboard(results)
        try:
            super().__init__(("127.0.0.1", port), RequestHandler)
        except OSError as error:
            raise SettingError(f"port={port}: {error.strerror}; --port N takes another, 0 any that is free") from None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that leaves is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        super().server_close()
        self.board.close()

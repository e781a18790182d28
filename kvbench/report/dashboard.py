"""Serve the report page to this machine while sweeps run: `kvbench results dashboard`.

    /                    the report page, which asks for /progress.js every SECONDS and updates itself
    /progress.js         progress of the newest sweeps, and the version of the page
    /data.js             the data of the page
    /report/<file>.js    files next to the page

The server is idle unless a page asks for progress. It then reads the runs of the newest sweeps that changed. If
finished runs changed, it rebuilds the page in a process of its own. After each of these it pauses for PATIENCE times as
long as the work took, so that running jobs keep the machine. It writes nothing but the report's files.
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
from socket import socket
from threading import Lock
from typing import Any

from kvbench.analysis.run_labels import describe_error, shorten
from kvbench.config.paths import make_environment
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

SECONDS = 2.0  # time between two requests of the page
TIMING_SECONDS = 15.0  # time after which it is read again how long samples take
PATIENCE = 10
SWEEPS = 3  # that are shown
PORT = 8765
HOST = re.compile(r"(127\.0\.0\.1|localhost)(:\d{1,5})?", re.ASCII)  # any port: it may be forwarded
FILE = re.compile(r"/report/((?:samples|part|prompts)-[0-9a-f-]+\.js)", re.ASCII)
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",  # another site's page must not read the scripts
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass
class Throttle:
    """Limit how often work is repeated: wait at least `least` seconds, and PATIENCE times as long as the work took."""

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
    """The state of a results folder. Several threads may use it at once."""

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
        """Return the progress of the sweeps. If it is time, read it again and rebuild the page if needed."""
        with self.lock:
            if self.look.is_due:
                self.look.begin()
                self._update_page()
                times = self.times
                if times is None or self.timing.is_due:
                    self.timing.begin()
                    self.times = times = SampleTimes(self.results)
                    self.timing.end()
                sweeps = [self._read_sweep(folder, times) for folder in list_sweeps(self.results)[:SWEEPS]]
                now = datetime.now(UTC).strftime("%H:%M:%S UTC")
                self.said = {"at": now, "sweeps": sweeps, "problem": self.problem, "making": self.maker is not None}
                self.look.end()
            return self.said | {"page": self.version()}

    def page(self) -> str:
        """Return the last report page, or an empty one if there is none yet."""
        return self.path.read_text(encoding="utf-8") if self.version() else self._empty_page

    @property
    def path(self) -> Path:
        return self.results / "report.html"

    def version(self) -> str:
        """Return the version of the page, which changes when the page is rebuilt; "" if there is none."""
        return str(self.path.stat().st_mtime_ns) if self.made and self.path.is_file() else ""

    def close(self) -> None:
        """Stop the process that builds the page, if there is one."""
        if self.maker is not None:
            self.maker.terminate()
            self.maker.communicate()

    @cached_property
    def _empty_page(self) -> str:
        return render_html(
            gather_found(FoundRuns(), datetime.now(UTC)).page | {"files": [], "prompts": [], "folder": FOLDER}
        )

    def _update_page(self) -> None:
        """Note a finished build of the page, and start another if it is time and finished runs changed."""
        if self.maker is not None and self.maker.poll() is not None:
            reason = self.maker.communicate()[1].strip().splitlines()
            self.problem = (
                shorten(f"the page cannot be made: {(reason or ['?'])[-1]}", 300) if self.maker.returncode else ""
            )
            if self.maker.returncode:
                self.made_of = None  # so that the build is repeated
            else:
                self.made = True
            self.maker = None
            self.make.end()
        finished = read_stamps(self.results)
        if self.maker is None and self.make.is_due and finished and finished != self.made_of:
            self.make.begin()
            self.made_of = finished
            command = [sys.executable, "-P", "-m", "kvbench", "results", "report"]
            command += ["--results", str(self.results.resolve())]
            self.maker = subprocess.Popen(
                command,
                env=make_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )

    def _read_sweep(self, folder: Path, times: SampleTimes) -> dict[str, Any]:
        """Return a sweep's progress as the page shows it."""
        try:
            states = list(read_states(self.results, folder, self.counts))
            known = [
                (cell.get("value"), cell["readings"], state)
                for cell, (_, state) in zip(read_cells(folder), states, strict=True)
            ]
            cells = [
                asdict(state) | {"cell": shorten(label), "reason": shorten(state.reason, 300), "left": seconds}
                for (label, state), seconds in zip(states, estimate_left(times, known), strict=True)
            ]
            counts = {name: sum(state.name == name for _, state in states) for name in STATES}
        except (OSError, *DATA_ERRORS) as error:
            return {"name": shorten(folder.name), "wrong": describe_error(error), "counts": {}, "cells": []}
        return {"name": shorten(folder.name), "wrong": "", "counts": counts, "cells": cells}


def read_stamps(results: Path) -> dict[str, list[tuple]]:
    """Return what the page depends on: all files of finished runs, and the existence of the other runs."""
    stamps = {}
    for path in list_folders(results):
        try:
            files = list(os.scandir(path))
            done = any(file.name == "done" for file in files)
            read_files = [file for file in files if done or file.name == "run.yaml"]
            stamps[path.name] = sorted((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in read_files)
        except OSError:
            continue  # the folder is being deleted; the next call sees the result
    return stamps


class RequestHandler(BaseHTTPRequestHandler):
    """Answer the requests of a page."""

    server: "Server"
    server_version, sys_version = "kvbench", ""
    timeout = 20  # seconds that a client may take

    def do_GET(self) -> None:
        """Answer a GET request, or a HEAD request without the body."""
        if not HOST.fullmatch(self.headers.get("Host", "")) or len(self.headers.get_all("Host", [])) > 1:
            # another site's name that points to this address (DNS rebinding)
            self._send(403, "text/plain", "This address is not the dashboard's.\n")
        elif (answer := self._find_answer(self.path.partition("?")[0])) is None:
            self._send(404, "text/plain", "Not here.\n")
        else:
            self._send(200, *answer)

    do_HEAD = do_GET

    def refuse(self) -> None:
        self._send(405, "text/plain", "GET and HEAD only.\n")

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = refuse

    def _find_answer(self, path: str) -> tuple[str, str] | None:
        """Return the content type and the text of a path; None if there is no such path."""
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
        """Log nothing."""


class Server(ThreadingHTTPServer):
    """The server of a dashboard, on the loopback interface.

    Raises:
        SettingError: The results folder does not exist, or the port cannot be used.
    """

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

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: object) -> None:
        """Print an error, unless the client closed the connection."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        super().server_close()
        self.board.close()

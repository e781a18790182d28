"""The dashboard: what it says of sweeps, what it serves and what it refuses, and how it begins and ends."""

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

from kvbench.cli.dashboard import main
from kvbench.cli.report import main as report
from kvbench.report.dashboard import Server
from kvbench.report.page import content_security_policy
from kvbench.store.run_folder import format_line
from kvbench.sweeps import status
from tests.support.browser import CHROMIUM, SIZES, draw_charts
from tests.support.command_line import run_cli
from tests.support.report_store import VALUE, make_records, write_run
from tests.support.repository import ROOT
from tests.support.selection import only_in_full

DEADLINE = 120  # seconds; a process that makes the page imports much, and others may use the machine


class PageThread:
    """Makes the page in a thread, where the dashboard starts a process. Without the fixture `pages` it makes none."""

    returncode: int | None = None
    work = staticmethod(lambda arguments: 0)

    def __init__(self, command: list[str], **more: object) -> None:
        self.said, self.results = io.StringIO(), command[-1]
        self.thread = Thread(target=self.make)
        self.thread.start()

    def make(self) -> None:
        with redirect_stderr(self.said), redirect_stdout(io.StringIO()):
            try:
                code = self.work(["--results", self.results])
            except OSError as error:  # `kvbench results report` says it in a line
                print(error, file=self.said)
                code = 2
        self.returncode = code

    def poll(self) -> int | None:
        return self.returncode

    def communicate(self) -> tuple[None, str]:
        self.thread.join()
        return None, self.said.getvalue()

    def terminate(self) -> None:
        """Do nothing: `communicate` waits for the page."""


@pytest.fixture(params=["thread", only_in_full("process")])
def served(request, tmp_path, monkeypatch):
    """A dashboard of an empty folder, in a thread."""
    if request.param == "thread":
        own = SimpleNamespace(**vars(subprocess) | {"Popen": PageThread})
        monkeypatch.setattr("kvbench.report.dashboard.subprocess", own)
        if "chromium" not in request.fixturenames:  # which draws charts
            monkeypatch.setattr("kvbench.report.page.build_charts", dict)
            monkeypatch.setattr("kvbench.report.page.load_scripts", lambda: ("", ""))
            monkeypatch.setattr("kvbench.report.excerpts.COMMAND", ["true"])  # makes no prompts
    monkeypatch.setattr("kvbench.report.dashboard.SECONDS", 0.1)
    monkeypatch.setattr("kvbench.report.dashboard.PATIENCE", 0)
    monkeypatch.setattr("kvbench.report.dashboard.TIMING_SECONDS", 0)
    with Server(tmp_path, 0) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def pages(monkeypatch):
    """Lets the dashboard of `served` make its page."""
    monkeypatch.setattr(PageThread, "work", staticmethod(report))


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, dict, str]:
    """Status, headers and body."""
    connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    found = connection.getresponse()
    body = found.read().decode()
    connection.close()
    return found.status, dict(found.getheaders()), body


def called(server: Server, path: str, name: str) -> dict:
    """What a script file hands over."""
    status, _, text = ask(server, path)
    assert status == 200 and text.startswith(f"{name}(") and text.endswith(");\n")
    return json.loads(text[len(name) + 1 : -3])


def until(server: Server, wanted) -> dict:
    """The progress as soon as it is `wanted`."""
    end = time.monotonic() + DEADLINE
    while not wanted(said := called(server, "/progress.js", "kvbenchProgress")):
        assert time.monotonic() < end, said
        time.sleep(0.1)
    return said


def begun(results: Path, value: dict, count: int, error: str | None = None) -> Path:
    """A run of 24 samples, of which it has some; its folder."""
    own = dict(list(make_records(value["budget"], 50, seconds=30.0, error=error).items())[:count])
    path = write_run(results, own, finish=False, **value)
    (path / "samples").write_text("24\n")
    return path


def some(results: Path) -> Path:
    """A sweep with a cell of each state; the folder of the run that is to run."""
    full = VALUE | {"method": {"name": "full"}}
    write_run(results, make_records(1.0, 100, seconds=30.0), method=full["method"])
    write_run(results, make_records(0.05, 50, seconds=30.0), budget=0.05)
    values = {f"budget={own}": VALUE | {"budget": own} for own in (0.05, 0.1, 0.2, 0.3, 0.4)}
    folder = results / "sweeps" / "2026-01-02_03-04-05"
    cells = [status.SweepCell(label, value, full) for label, value in values.items()]
    status.write_cells(
        folder, [*cells, status.SweepCell("method=kvzip", refused="block_size=8: \x1b[31mnot with kvzip")]
    )
    running, _ = (begun(results, {"budget": budget}, 10) for budget in (0.1, 0.2))
    (folder / "3").mkdir()
    (folder / "3" / "failed").write_text("RuntimeError: the disk is <b>full</b>\n")
    return running


@pytest.fixture
def running(tmp_path):
    """`some`, and another process that holds a sample."""
    path = some(tmp_path)
    code = "import fcntl, sys\nfile = open(sys.argv[1], 'r+')\nfcntl.lockf(file, fcntl.LOCK_EX, 1, 77)\n"
    code += "print(flush=True)\nsys.stdin.readline()"
    arguments = [sys.executable, "-c", code, str(path / "claims.lock")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        other.stdout.readline()
        yield path
        other.communicate("\n")


def test_every_cell_with_its_state(served, running):
    [own] = until(served, lambda said: True)["sweeps"]
    assert own["name"] == "2026-01-02_03-04-05"
    assert own["counts"] == dict.fromkeys(status.STATES, 1)
    told = {cell["name"]: cell for cell in own["cells"]}
    assert (told["running"]["records"], told["running"]["total"]) == (10, 24)
    assert [told[name]["left"] for name in status.STATES] == [0, 14 * 30, 14 * 30, 0, 0, 24 * 30]
    assert told["failed"]["reason"] == "RuntimeError: the disk is <b>full</b>"
    assert told["refused"]["reason"] == "block_size=8: \\x1b[31mnot with kvzip"
    file = next(running.glob("records*.jsonl"))
    file.write_bytes(file.read_bytes() + format_line({"uid": "eleventh", "error": "out_of_memory"}) + b'{"uid": "torn')
    until(served, lambda said: said["sweeps"][0]["cells"][1]["records"] == 11)


def test_a_damaged_sweep_is_named_and_the_rest_shown(served, running):
    sweeps = running.parents[1] / "sweeps"
    (sweeps / "2026-01-03").mkdir()
    (sweeps / "2026-01-03" / "cells.json").write_text("[{")
    for name in ("2025-01-01", "2025-01-02"):
        shutil.copytree(sweeps / "2026-01-02_03-04-05", sweeps / name)
    said = until(served, lambda said: True)
    assert [own["name"] for own in said["sweeps"]] == ["2026-01-03", "2026-01-02_03-04-05", "2025-01-02"]
    assert "no cells.json there" in said["sweeps"][0]["wrong"] and said["sweeps"][1]["counts"]["done"] == 1


@pytest.mark.full
def test_a_damaged_run_is_named_and_the_page_is_made_again(served, pages, running):
    said = until(served, lambda said: said["page"])
    bad = write_run(running.parents[1], make_records(0.5, 50), budget=0.5)
    (bad / "run.yaml").write_text("format: [")
    until(served, lambda now: now["page"] not in ("", said["page"]) and not now["making"])
    data = called(served, "/data.js", "kvbenchData")
    assert any(name == bad.name and "cannot be read" in why for name, why in data["damaged"])
    assert [own["label"] for own in data["panels"][0]["series"]] == ["snapkv"]


def test_a_sweep_is_followed(served, pages, checkpoint, tmp_path, monkeypatch, capsys):
    said = until(served, lambda said: True)
    assert (said["sweeps"], said["page"], said["problem"]) == ([], "", "") and not list(tmp_path.iterdir())
    assert called(served, "/data.js", "kvbenchData")["panels"] == []
    quick = ["task.subtasks=niah_single_1", "task.samples=1", "task.length=256", f"results={tmp_path}"]
    quick += ["model=hf", f"model.path={checkpoint}"]
    run_cli(["-m", "method=sink,kvzip", "block_size=128", "budget=0.2", *quick], monkeypatch, capsys)
    said = until(served, lambda said: said["page"] and not said["making"])
    [own] = said["sweeps"]
    assert (own["counts"]["done"], own["counts"]["refused"]) == (1, 1)
    assert "block_size=128: kvzip needs the prompt as one block" in own["cells"][1]["reason"]
    data = called(served, "/data.js", "kvbenchData")
    assert [run["series"] for run in data["runs"]] == ["full cache", "sink · block 128"]
    assert data["runs"][0]["code"].startswith(("git ", "version "))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for _ in range(5):  # nothing changed: nothing is made
        assert until(served, lambda said: True)["page"] == said["page"]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_only_the_reports_files_are_served(served, pages, tmp_path):
    write_run(tmp_path, make_records(1.0, 100), method={"name": "full"})
    write_run(tmp_path, make_records(0.5, 50), budget=0.5)
    (tmp_path / "report").mkdir()
    (tmp_path / "secret.js").write_text("secret")
    (tmp_path / "report" / "notes.txt").write_text("secret")
    (tmp_path / "report" / "samples-00-1.js").symlink_to(tmp_path / "secret.js")
    until(served, lambda said: said["page"])
    status, headers, text = ask(served, "/")
    assert (
        status == 200
        and "<body data-live=" in text
        and headers["Content-Security-Policy"] == content_security_policy() in text
    )
    assert headers["X-Frame-Options"] == "DENY" and headers["Cross-Origin-Resource-Policy"] == "same-origin"
    own = called(served, "/data.js", "kvbenchData")["files"][0]["names"][0]
    status, headers, text = ask(served, f"/report/{own}")
    assert status == 200 and text == (tmp_path / "report" / own).read_text()
    assert headers["Content-Type"].startswith("text/javascript")
    status, headers, body = ask(served, f"/report/{own}", "HEAD")
    assert (status, body, int(headers["Content-Length"])) == (200, "", len(text))
    run = next((tmp_path / "runs").iterdir()).name
    for path in (
        "/secret.js", "/report/../secret.js", "/report/%2e%2e/secret.js", "/report/..%2fsecret.js", "//secret.js",
        "/report/samples-00-1.js", "/report/notes.txt", "/report/", "/report", "/runs/", f"/runs/{run}/run.yaml",
        f"/report/../runs/{run}/run.yaml", "/../../etc/passwd", "/etc/passwd", "/report/samples-00-9.js",
        f"http://127.0.0.1/report/../runs/{run}/run.yaml", f"/report/{own}%00", f"/report/{own}/", "/report.html",
    ):  # fmt: skip
        status, _, body = ask(served, path)
        assert status == 404 and "secret" not in body and "value" not in body, path
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"):
        status, headers, _ = ask(served, "/", method)
        assert (status, headers["Allow"]) == (405, "GET, HEAD")
    assert ask(served, "/", "BREW")[0] == 501


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:80", "localhost.evil", "", "[::1]", "127.0.0.1:x"]
)
def test_a_name_that_points_here_is_refused(served, host):
    for path in ("/", "/progress.js", "/data.js"):
        assert ask(served, path, Host=host)[0] == 403


def test_names_of_this_machine_are_taken(served):
    for host in ("127.0.0.1", "localhost:9000", f"127.0.0.1:{served.server_address[1]}"):
        assert ask(served, "/progress.js", Host=host)[0] == 200
    with socket.create_connection(served.server_address[:2]) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert b" 403 " in client.recv(100)
    with socket.create_connection(served.server_address[:2]) as client:
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert b" 403 " in client.recv(100)


def test_a_page_that_cannot_be_made_is_said(served, pages, running):
    results = served.board.results
    (results / "report").write_text("in the way")
    said = until(served, lambda said: said["problem"])
    assert said["problem"].startswith("the page cannot be made: ") and said["sweeps"][0]["counts"]["done"] == 1
    assert "<body data-live=" in ask(served, "/")[2]
    (results / "report").unlink()
    assert until(served, lambda said: said["page"])["problem"] == ""  # it was tried again


def test_what_cannot_be_served_is_one_line(tmp_path, capsys):
    assert (
        main(["--results", str(tmp_path / "nowhere")]) == 2
        and main(["--results", str(tmp_path), "--port", "70000"]) == 2
    )
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["--results", str(tmp_path), "--port", str(port)]) == 2
    nowhere, large, taken = capsys.readouterr().err.splitlines()
    assert nowhere == f"kvbench: results={tmp_path}/nowhere: no such folder"
    assert large.startswith("kvbench: port=70000: a whole number from 0")
    assert taken.startswith(f"kvbench: port={port}: Address already in use; ")
    assert not list(tmp_path.iterdir())


def test_ctrl_c_ends_it(tmp_path):
    write_run(tmp_path, make_records(1.0, 100), method={"name": "full"})
    code = (  # as in a terminal: what a shell starts in the background ignores Ctrl-C, and so do its children
        "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from kvbench.cli.dashboard import main\nsys.exit(main(sys.argv[1:]))"
    )
    arguments = [sys.executable, "-c", code, "--results", str(tmp_path), "--port", "0"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("http://127.0.0.1:")
            os.kill(process.pid, signal.SIGINT)  # while the page is being made
            out, err = process.communicate(timeout=DEADLINE)
        finally:
            process.kill()
    assert (process.returncode, out.strip(), err) == (0, "", "")


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: make test-browser")
@pytest.mark.parametrize("width", SIZES)
def test_the_page_follows_a_sweep(served, pages, running, chromium, width):
    page = chromium.new_page(viewport={"width": width, "height": SIZES[width]})
    page.set_default_timeout(1000 * DEADLINE)
    wrong, asked = [], []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda call: asked.append(call.url))
    page.goto(served.address)  # before there is a page
    page.wait_for_selector("#progress .sweep table")
    shown = page.locator("#progress").inner_text()
    assert "10 of 24" in shown and "the disk is <b>full</b>" in shown and "left on one worker" in shown
    page.wait_for_selector("#leaderboard table")
    page.select_option("[data-pick=run]", label="ruler · question visible · snapkv · 5\u202f%")
    page.wait_for_selector(".sample")
    page.click("text=Show more")
    page.locator(".sample").nth(22).evaluate("node => node.scrollIntoView()")
    link, where = page.url, "document.querySelectorAll('.sample')[22].getBoundingClientRect().top"
    before = page.evaluate(where)
    write_run(served.board.results, make_records(0.6, 50), budget=0.6)
    page.wait_for_function("document.querySelector('#runs summary').textContent === '4 runs'")
    page.wait_for_timeout(300)
    assert page.url == link and page.locator(".sample").count() == 24
    assert page.evaluate(where) == pytest.approx(before, abs=3)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert wrong == [] and all(url.startswith((served.address, "data:")) for url in asked)
    page.evaluate("scrollTo(0, 0)")
    draw_charts(page)
    if folder := os.environ.get("KVBENCH_SHOTS"):
        page.screenshot(path=Path(folder) / f"dashboard-{width}.png")
    page.close()

"""The process that workers are forked from imports from the folders of its parent, and hands over its environment."""

import os
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest

import kvbench
from kvbench.config.imports import read_source
from kvbench.runs import fork_server
from kvbench.runs.fork_server import replace_environment, set_environment, start_fork_server
from tests.support.repository import ROOT

SLEEP = "import time\ntime.sleep(60)"


@pytest.fixture
def server(monkeypatch):
    """No server runs before and after a test, and one imports little."""
    monkeypatch.setattr(fork_server, "IMPORTED", ("kvbench.runs.fork_server",))
    forkserver._forkserver._stop()
    yield
    forkserver._forkserver._stop()


@pytest.mark.parametrize("foreign", [False, True])
def test_a_checkout_in_the_current_folder_is_not_imported(foreign, server, tmp_path, monkeypatch):
    if foreign:
        (tmp_path / "kvbench").mkdir()
        (tmp_path / "kvbench" / "__init__.py").write_text("raise RuntimeError('another checkout')")
    monkeypatch.chdir(tmp_path)
    with start_fork_server().Pool(1) as pool:
        assert pool.apply(eval, ("'kvbench.runs.fork_server' in __import__('sys').modules",))
        assert pool.apply(eval, ("__import__('kvbench').__file__",)) == kvbench.__file__


@pytest.mark.full  # it imports torch and transformers
def test_workers_find_packages_imported_and_sources_read(server, monkeypatch):
    monkeypatch.undo()
    with start_fork_server().Pool(1) as pool:
        assert pool.apply(eval, ("'kvbench.runs.workers' in __import__('sys').modules",))
        assert pool.apply(count_sources) > 100


def count_sources() -> int:
    """The sources that this process has read."""
    return read_source.cache_info().currsize


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the server ends after its imports")
def test_the_server_ends_with_its_parent_while_it_imports(tmp_path):
    (tmp_path / "slow.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'begun')!r}).touch()\n{SLEEP}")
    text = f"""
import time
from pathlib import Path
from multiprocessing import forkserver
from kvbench.runs import fork_server
fork_server.IMPORTED = ("slow",)
fork_server.start_fork_server()
print(forkserver._forkserver._forkserver_pid, flush=True)
while not Path({str(tmp_path / "begun")!r}).exists():
    time.sleep(0.01)
"""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", text], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    while has_process(int(done.stdout)):
        assert time.monotonic() < begin + 30  # the import takes a minute
        time.sleep(0.01)


def has_process(number: int) -> bool:
    """Whether the process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_this_process_keeps_its_environment(server, monkeypatch):
    monkeypatch.setenv("KVBENCH_TEST", "1")
    before = dict(os.environ)
    start_fork_server()
    assert dict(os.environ) == before
    with set_environment({"PATH": "here"}):
        assert dict(os.environ) == {"PATH": "here"}
    assert dict(os.environ) == before
    replace_environment(before | {"KVBENCH_TEST": "2"})
    assert os.environ["KVBENCH_TEST"] == "2"


@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_threads_of_workers_sleep_while_they_wait(given, server, monkeypatch):
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    else:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    with start_fork_server().Pool(1) as pool:
        assert pool.apply(os.getenv, ("OMP_WAIT_POLICY",)) == (given or "PASSIVE")

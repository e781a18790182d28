"""The process that workers are forked from imports from the folders of its parent, and hands over its environment."""

import os
from multiprocessing import forkserver

import pytest

import kvbench
from kvbench.runs import fork_server
from kvbench.runs.fork_server import replace_environment, set_environment, start_fork_server


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

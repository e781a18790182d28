"""A server that does not answer is given up within a limit, and so is what should be downloaded from it."""

import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from time import perf_counter

import pytest
from huggingface_hub import constants

from kvbench import network
from kvbench.models.configuration import load_configuration
from kvbench.network import is_reachable
from kvbench.tasks.common.dataset_rows import fetch_hub_file
from kvbench.tasks.ruler.lm_eval_port import RulerLmEval
from kvbench.tasks.ruler.sources import download_file, fetch_column
from kvbench.validation import SettingError


@pytest.fixture
def silent(monkeypatch) -> Iterator[str]:
    """The URL of a hub that accepts connections and never answers."""
    monkeypatch.setattr(network, "SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
        yield url


@pytest.mark.parametrize(
    "fetch",
    [
        lambda _: RulerLmEval(1, subtasks="niah_single_2").check(),
        lambda _: fetch_column("task.haystack_path", "owner/essays", "text"),
        lambda _: fetch_hub_file("task.path", "owner/rows", "main", "rows.zip"),
        lambda url: download_file("task.qa_path", f"{url}/squad.json"),
        lambda _: load_configuration("owner/model"),
    ],
    ids=["lm-eval's essays", "a column", "a file of the hub", "a file", "a model"],
)
def test_a_server_that_never_answers_costs_the_limit(fetch, silent, monkeypatch):
    """Nothing of lm-eval's is loaded for it: its list of words alone takes seconds."""
    monkeypatch.setattr("kvbench.tasks.ruler.lm_eval_port._module", lambda name: pytest.fail(f"{name} was loaded"))
    start = perf_counter()
    with pytest.raises(SettingError, match="out of reach|cannot read a model there") as error:
        fetch(silent)
    assert perf_counter() - start < 20 and "\n" not in str(error.value)  # of the minutes that the libraries would take
    assert not constants.HF_HUB_OFFLINE


def test_every_answer_counts():
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        Thread(target=server.handle_request, daemon=True).start()
        assert is_reachable(url)
    assert not is_reachable(f"{url}/closed") and not is_reachable("no URL") and not is_reachable("http://a b")

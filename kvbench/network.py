"""Find out quickly whether a server can be reached. Without a network, libraries that download retry for minutes."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.client import HTTPException
from threading import Event, Thread
from urllib.error import HTTPError
from urllib.request import Request, urlopen

SECONDS = 2.0  # that a server may take to answer


@cache
def is_reachable(url: str) -> bool:
    """Whether a server answers within SECONDS, whatever it answers. A process asks each server once.

    A thread asks, because looking up a name has no time limit. It uses the proxies of the environment.
    """
    answered = Event()

    def ask() -> None:
        try:
            urlopen(Request(url, method="HEAD"), timeout=SECONDS).close()
        except HTTPError as error:  # an answer
            error.close()
        except (OSError, ValueError, HTTPException):
            return
        answered.set()

    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return answered.is_set()


def require_reachable(url: str) -> None:
    """Raise a ConnectionError if the server does not answer."""
    if not is_reachable(url):
        raise ConnectionError(f"no answer from {url} within {SECONDS:g} s")


@contextmanager
def use_hub() -> Iterator[None]:
    """Let the hub's libraries look into their caches only while the hub cannot be reached."""
    from datasets import config
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE
    if not constants.HF_HUB_OFFLINE and not is_reachable(constants.ENDPOINT):
        constants.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE = before

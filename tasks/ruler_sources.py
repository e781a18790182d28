"""Where official texts come from: a file, or the hub. Every failure is a SettingError that names the setting."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvbench.settings import SettingError


def read(setting: str, given: str, path: Path) -> bytes:
    """The file's bytes; `given` is what the user typed."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingError(f"{setting}={given}: a readable file, but {path.name} is not ({error.strerror})") from None


def dataset(setting: str, name: str, column: str) -> list[str]:
    """A column of a dataset on the hub."""

    def fetch() -> list[str]:
        from datasets import load_dataset

        return list(load_dataset(name, split="train")[column])

    return _reach(setting, name, fetch)


def download(setting: str, url: str) -> Path:
    """A file of the web, kept in the cache of `datasets`."""

    def fetch() -> Path:
        from datasets import DownloadManager

        return Path(DownloadManager().download(url))

    return _reach(setting, url, fetch)


def short_hash(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:12]


def _reach(setting: str, source: str, fetch: Callable[[], Any]) -> Any:
    try:
        return fetch()
    except Exception as error:  # whatever the network's libraries raise
        reason = type(error).__name__
        raise SettingError(f"{setting}=hub: {source} is out of reach ({reason}); give a path, or null") from error

"""Read official texts from a file, the hub or the web. Every failure is a SettingError that names the setting."""

import hashlib
from codecs import BOM_UTF8
from pathlib import Path

from kvbench.network import require_reachable, use_hub
from kvbench.tasks.common.dataset_rows import try_fetch
from kvbench.validation import SettingError


def read_source(setting: str, given: str, path: Path) -> bytes:
    """Read the bytes of a file without a byte-order mark; `given` is what the user typed as the setting's value."""
    try:
        return path.read_bytes().removeprefix(BOM_UTF8)
    except OSError as error:
        raise SettingError(f"{setting}={given}: a readable file, but {path.name} is not ({error.strerror})") from None


def fetch_column(setting: str, name: str, column: str) -> list[str]:
    """Fetch a column of the split `train` of a data set on the hub."""

    def fetch() -> list[str]:
        from datasets import load_dataset

        with use_hub():
            return list(load_dataset(name, split="train")[column])

    return try_fetch(setting, name, fetch, "give a path, or null")


def download_file(setting: str, url: str) -> Path:
    """Download a file into the cache of `datasets`."""

    def fetch() -> Path:
        from datasets import DownloadManager

        require_reachable(url)
        return Path(DownloadManager().download(url))

    return try_fetch(setting, url, fetch, "give a path, or null")


def short_hash(raw: bytes) -> str:
    """Return 12 hex digits of the SHA-256 of some bytes."""
    return hashlib.sha256(raw).hexdigest()[:12]

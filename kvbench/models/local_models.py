"""The folder that holds downloaded and converted models: `.models` in a checkout, else one in the user's cache.

Each model is a folder with a file `conversion.json`, which names the model's source and the size of each file. A folder
gets its name only when it is complete. A folder that has lost a file since is made again.
"""

import fcntl
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvbench.atomic import lock_file
from kvbench.config.paths import MODELS
from kvbench.validation import SettingError, name_file_in_errors

FETCHED_MODELS = ("smollm2",)  # names of the models that `make model` downloads
VERSION = 1  # of the conversion; folders of other versions are made again
NOTE = "conversion.json"


def read_samples(path: Path) -> Iterator[bytes]:
    """Yield pieces of 1 MiB: all of a file up to 64 MiB, or 64 pieces at equal distances of a larger file."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        for start in range(0, size, max(1 << 20, size // 64)):
            stream.seek(start)
            yield stream.read(1 << 20)


def hash_file(path: Path) -> str:
    """Return 16 hex digits over a file's size and 64 samples of 1 MiB."""
    digest = sha256(f"{path.stat().st_size}\n".encode())
    for sample in read_samples(path):
        digest.update(sample)
    return digest.hexdigest()[:16]


def name_folder(source: Path, source_hash: str) -> Path:
    """Return the folder that a file with this hash is converted into."""
    return MODELS / f"{source.stem}-{source_hash[:8]}"


def read_note(folder: Path) -> dict[str, Any] | None:
    """Return the content of `conversion.json` if the folder is complete and of this version, otherwise None."""
    try:
        said = json.loads((folder / NOTE).read_text())
        whole = all((folder / name).stat().st_size == size for name, size in said["files"].items())
        return said if whole and said["version"] == VERSION else None
    except (OSError, ValueError, KeyError):
        return None


def is_converted(folder: Path, source_hash: str | None = None) -> bool:
    """Return whether a folder is complete, of this version, and made from the file with this hash (None: any file)."""
    said = read_note(folder)
    return said is not None and source_hash in (None, said["source"])


def check_fetched(name: str) -> None:
    """Raise a SettingError unless the model was downloaded."""
    if not is_converted(MODELS / name):
        raise SettingError(f"model={name}: it is not here yet; `make model` downloads it (93 MB) and converts it")


def identify_converted(folder: Path) -> str | None:
    """Return 16 hex digits that identify a converted model, or None for any other folder.

    They cover the weights, the file that they were made from and the version of the conversion.
    """
    said = read_note(folder)
    if said is None:
        return None
    return sha256(f"{said['weights']} {said['source']} {said['version']}".encode()).hexdigest()[:16]


@contextmanager
def hold_lock(name: str) -> Iterator[None]:
    """Let only one process at a time make the folder `name` of MODELS. The others print a line and wait.

    Raises:
        OSError: MODELS cannot be written.
    """
    MODELS.mkdir(parents=True, exist_ok=True)
    with (MODELS / f".{name}.lock").open("w") as file:
        try:
            with name_file_in_errors(file.name):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"kvbench: waiting for another process that makes {MODELS / name}", file=sys.stderr)
            lock_file(file)
        yield

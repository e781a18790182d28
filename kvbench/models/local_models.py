"""The folder in which downloaded and converted models lie: `.models` in a checkout, else one in the user's cache.

Each model is a folder with a file `conversion.json`, which says what it was made of and how large its files are. A
folder appears under its name only when it is complete, and one that has lost a file since is made again.
"""

import fcntl
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvbench.config.paths import MODELS
from kvbench.validation import SettingError

FETCHED_MODELS = ("smollm2",)  # names of the models that `make model` downloads
VERSION = 1  # of the conversion: a folder that another version made is made again
NOTE = "conversion.json"


def read_note(folder: Path) -> dict[str, Any] | None:
    """Return what `conversion.json` says of a folder that is whole and of this version, None for any other folder."""
    try:
        said = json.loads((folder / NOTE).read_text())
        whole = all((folder / name).stat().st_size == size for name, size in said["files"].items())
        return said if whole and said["version"] == VERSION else None
    except (OSError, ValueError, KeyError):
        return None


def is_converted(folder: Path, source_hash: str | None = None) -> bool:
    """Whether `folder` is whole and what this version makes of the file with this hash, None: of any file."""
    said = read_note(folder)
    return said is not None and source_hash in (None, said["source"])


def check_fetched(name: str) -> None:
    """Raise a SettingError unless the model was downloaded."""
    if not is_converted(MODELS / name):
        raise SettingError(f"model={name}: is not here yet; `make model` downloads it (93 MB) and converts it")


def identify_converted(folder: Path) -> str | None:
    """Return what a converted model is known by: 16 hex digits over its weights, the file that they were made of and
    the version of the conversion. None for a folder that is no converted model.
    """
    said = read_note(folder)
    if said is None:
        return None
    return sha256(f"{said['weights']} {said['source']} {said['version']}".encode()).hexdigest()[:16]


@contextmanager
def hold_lock(name: str) -> Iterator[None]:
    """One process at a time is inside for a folder `name` of MODELS; the others wait and say so.

    Raises:
        OSError: MODELS cannot be written.
    """
    MODELS.mkdir(parents=True, exist_ok=True)
    with (MODELS / f".{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"kvbench: waiting for another process that makes {MODELS / name}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield

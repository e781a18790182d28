"""Write a file, or append to it, completely or not at all."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from kvbench.stops import waiting
from kvbench.validation import name_file_in_errors


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Replace a file so that readers see the old one or the new one, also after a crash of the machine.

    The caller writes to the draft inside. At the end the draft is forced onto the disk and renamed, and so is the new
    name. After an error the draft is removed and the file is unchanged. If two processes write at once, the last one
    wins.

    Args:
        path: The file.

    Yields:
        The path of the draft.

    Raises:
        OSError: The file cannot be written. The error names it.
    """
    draft = path.with_name(f"{path.name}.draft.{os.getpid()}")
    try:
        with name_file_in_errors(draft):
            yield draft
            force_to_disk(draft)
            os.replace(draft, path)
            force_to_disk(path.parent)
    except BaseException:
        with suppress(OSError):  # the draft is in nobody's way
            draft.unlink()
        raise


def lock_file(file: IO[Any]) -> None:
    """Wait until no other process holds the lock of an open file, and hold it until the file is closed.

    Raises:
        OSError: The file system has no locks. The error names the file.
    """
    with name_file_in_errors(file.name), waiting():
        fcntl.flock(file, fcntl.LOCK_EX)


def append_whole(descriptor: int, data: bytes, end: int) -> None:
    """Append to a file and wait until that is on the disk. After an error the file is cut back to what it was.

    Args:
        descriptor: The file, opened for appending and locked by the caller.
        data: What is appended. A system may write it in several parts.
        end: The size of the file.

    Raises:
        OSError: The disk took none of it, or only a part.
    """
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    except BaseException:
        with suppress(OSError):  # the torn line is then cut off by the next writer
            os.ftruncate(descriptor, end)
        raise


def force_to_disk(path: Path) -> None:
    """Wait until a file's content is on the disk, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with name_file_in_errors(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)

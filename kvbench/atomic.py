"""Write a file whole or not at all: under another name beside its place first, then renamed into it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvbench.validation import name_file_in_errors


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Let a file be written so that readers see the old one or the new one, also after a crash of the machine.

    Inside, the caller writes to the path that this gives. At the end the file is forced onto the disk and renamed to
    `path`. After an error the draft is gone, and `path` is what it was. Of two processes that write at once, the last
    wins.

    Raises:
        OSError: The file cannot be written. The error names it.
    """
    draft = path.with_name(f"{path.name}.draft.{os.getpid()}")
    try:
        with name_file_in_errors(draft):
            yield draft
            descriptor = os.open(draft, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)

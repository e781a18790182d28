"""Write a file completely or not at all: write a draft beside it, then rename the draft."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvbench.validation import name_file_in_errors


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Replace a file so that readers see the old one or the new one, also after a crash of the machine.

    The caller writes to the draft inside. At the end the draft is forced onto the disk and renamed. After an error the
    draft is removed and the file is unchanged. If two processes write at once, the last one wins.

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
            descriptor = os.open(draft, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)

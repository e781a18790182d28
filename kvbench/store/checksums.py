"""Checksums of published files, in a text file beside them that `sha256sum -c` reads."""

import hashlib
import re
from pathlib import Path

from kvbench.atomic import replace_file
from kvbench.validation import SettingError

CHECKSUMS = "SHA256SUMS"
LINE = re.compile(r"([0-9a-f]{64}) [ *]([^/\\]+)")


def read_checksums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file that the checksums of a folder list, by name; {} if the folder has none.

    Raises:
        SettingError: The file of checksums cannot be read, or a line is none of `sha256sum`.
    """
    path = folder / CHECKSUMS
    if not path.exists():
        return {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{path}: cannot be read ({type(error).__name__}); get it again") from None
    checksums = {}
    for number, line in enumerate(lines, 1):
        parts = LINE.fullmatch(line)
        if parts is None or parts[2] in checksums:
            raise SettingError(f"{path}: line {number} is no checksum of another file; get it again")
        checksums[parts[2]] = parts[1]
    return checksums


def verify_checksums(folder: Path) -> dict[str, str]:
    """Return the checksums of a folder (`read_checksums`) once its files have them.

    Raises:
        SettingError: As `read_checksums`; or a file is missing or has another checksum.
    """
    checksums = read_checksums(folder)
    for name, digest in checksums.items():
        path = folder / name
        if not path.is_file():
            raise SettingError(f"{path}: {CHECKSUMS} names it, and it is missing; get it again")
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise SettingError(f"{path}: is not the file that {CHECKSUMS} names; get both again, or measure again")
    return checksums


def check_name(path: Path) -> None:
    """Raise a SettingError if no line of checksums can name this file."""
    if LINE.fullmatch(f"{'0' * 64}  {path.name}") is None or not path.name.isprintable():
        raise SettingError(f"{path}: {CHECKSUMS} cannot name it; leave out \\ and control characters")


def write_checksum(path: Path) -> None:
    """Write the SHA-256 of a file into the checksums of its folder. The lines of other files stay.

    Raises:
        SettingError: As `read_checksums` and `check_name`.
        OSError: The checksums cannot be written.
    """
    check_name(path)
    checksums = read_checksums(path.parent) | {path.name: hashlib.sha256(path.read_bytes()).hexdigest()}
    with replace_file(path.parent / CHECKSUMS) as draft:
        draft.write_text("".join(f"{digest}  {name}\n" for name, digest in sorted(checksums.items())), encoding="utf-8")

"""Read CSV files that the repository holds packed.

`x.csv.gz` stands for `x.csv` where there is no file of that name. Commands write `x.csv`, so it is the newer one where
both are there. `make pack` packs the large ones before they are committed. It writes neither name nor time into a
packed file, so equal lines give equal bytes.
"""

import gzip
import shutil
import zlib
from pathlib import Path

from kvbench.atomic import lock_file, replace_file
from kvbench.validation import SettingError

ENDING = ".gz"


def name_packed(path: Path) -> Path:
    """Return the path of the packed file that stands for a CSV file."""
    return path.with_name(path.name + ENDING)


def find_csv(folder: Path) -> list[Path]:
    """Return the paths of all CSV files of a folder, as if none was packed, sorted."""
    return sorted({*folder.glob("*.csv"), *(path.with_suffix("") for path in folder.glob(f"*.csv{ENDING}"))})


def read_csv_text(path: Path) -> str:
    """Return the text of a CSV file, packed or not.

    Raises:
        OSError: The file does not exist, or cannot be read.
        SettingError: The packed file is damaged. The message names it.
        ValueError: The text is not UTF-8.
    """
    packed = name_packed(path)
    if path.exists() or not packed.exists():
        return path.read_text(encoding="utf-8")
    try:
        with gzip.open(packed, "rt", encoding="utf-8") as file:
            return file.read()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SettingError(f"{packed}: is damaged ({error})") from None


def unpack_csv(path: Path) -> None:
    """Write a CSV file from the packed one that stands for it, if one does, so that lines can be appended."""
    packed = name_packed(path)
    if path.exists() or not packed.exists():
        return
    with packed.open("rb") as file:
        lock_file(file)
        if not path.exists():  # another process may have unpacked it meanwhile, and appended lines
            with replace_file(path) as draft, gzip.open(file) as text, draft.open("wb") as out:
                shutil.copyfileobj(text, out)

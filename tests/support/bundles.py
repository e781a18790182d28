"""Bundles taken apart and put together again, also in ways that kvbench never writes."""

import hashlib
import io
import json
import warnings
import zipfile
from collections.abc import Mapping

from kvbench.analysis.bundle import MANIFEST


def unpacked(path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def pack(
    files: Mapping[str, bytes],
    method: int = zipfile.ZIP_DEFLATED,
    mode: Mapping[str, int] | None = None,
    twice: str | None = None,
) -> bytes:
    """An archive with a bundle's checksum. `mode`: of the files of this name; `twice`: a name that is there twice."""
    stream = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(stream, "w") as archive:
        warnings.simplefilter("ignore")  # zipfile warns of a name that is there twice
        for name in [*files, *filter(None, [twice])]:
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (mode or {}).get(name, 0) << 16
            archive.writestr(entry, files[name], method)
        archive.comment = b"0" * 64
    body = stream.getvalue()[:-64]
    return body + hashlib.sha256(body).hexdigest().encode()


def signed(files: Mapping[str, bytes]) -> bytes:
    """An archive whose manifest has the checksums of these files: a forgery."""
    manifest = json.loads(files[MANIFEST])
    others = {name: content for name, content in files.items() if name != MANIFEST}
    manifest["files"] = {name: hashlib.sha256(content).hexdigest() for name, content in others.items()}
    return pack({MANIFEST: json.dumps(manifest).encode(), **others})

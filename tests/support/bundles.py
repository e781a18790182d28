"""Take bundles apart, and forge others from their files."""

import hashlib
import json
import zipfile

from kvbench.analysis.bundle import MANIFEST, pack


def unpacked(path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def signed(files: dict[str, bytes]) -> bytes:
    """An archive whose manifest has the checksums of these files: a forgery."""
    manifest = json.loads(files[MANIFEST])
    others = {name: content for name, content in files.items() if name != MANIFEST}
    manifest["files"] = {name: hashlib.sha256(content).hexdigest() for name, content in others.items()}
    return pack({MANIFEST: json.dumps(manifest).encode(), **others})

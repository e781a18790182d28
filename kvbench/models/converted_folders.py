"""Make the folders of converted models (`kvbench.models.local_models`): complete, or not at all."""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open

from kvbench.models.local_models import NOTE, VERSION, hash_file, hold_lock, is_converted, name_folder
from kvbench.validation import SettingError, name_file_in_errors

ROOM = 64 << 20  # bytes on the disk that a conversion needs besides the weights


def hash_weights(folder: Path) -> str:
    """Return a SHA-256 over names, shapes, dtypes and bytes of all tensors in a folder's safetensors files."""
    tensors: dict[str, Path] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors |= dict.fromkeys(file.keys(), path)
    digest = hashlib.sha256()
    for name in sorted(tensors):
        with safe_open(tensors[name], "pt") as file:
            tensor = file.get_tensor(name)
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def make_folder(
    source: Path,
    source_hash: str,
    target: Path,
    weights: int,
    fill: Callable[[Path], None],
    weights_hash: str | None = None,
) -> None:
    """Make a folder, which gets its name when it is complete. The caller holds the folder's lock.

    Args:
        source: The file that it is made from.
        source_hash: The hash of the file, which is written into the folder's `conversion.json`.
        target: The folder.
        weights: Number of weights, in bfloat16.
        fill: Writes the model's files into an empty folder.
        weights_hash: The value that `hash_weights` of the folder must have. None allows any value.

    Raises:
        SettingError: The disk is full, the weights have another hash, or `fill` raises it.
        OSError: The folder cannot be written.
    """
    need, free = 2 * weights + ROOM, shutil.disk_usage(target.parent).free
    if free < need:
        raise SettingError(f"{target.parent}: has {free / 1e6:.0f} MB free; the converted model needs {need / 1e6:.0f}")
    print(f"kvbench: converting {source.name} into {target}, once", file=sys.stderr)
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # left by an interrupted conversion
    try:
        part.mkdir()
        fill(part)
        converted_hash = hash_weights(part)
        if weights_hash not in (None, converted_hash):
            raise SettingError(
                f"{source.name}: converts to other weights ({converted_hash}) than the known ones ({weights_hash})"
            )
        sizes = {path.name: path.stat().st_size for path in sorted(part.iterdir())}
        said = {"source": source_hash, "version": VERSION, "weights": converted_hash, "files": sizes}
        with name_file_in_errors(part):
            (part / NOTE).write_text(json.dumps(said, indent=2) + "\n")
        shutil.rmtree(target, ignore_errors=True)  # made by another version
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def find_folder(source: Path, setting: str, make: Callable[[str, Path], None]) -> Path:
    """Return the folder that a file was converted into. Convert the file if the folder is missing.

    Args:
        source: The file.
        setting: The setting that names it, for messages.
        make: Converts the file; it is given the file's hash and the folder, whose lock is held.

    Raises:
        SettingError: There is no such file, it cannot be converted, or the disk is full.
    """
    if not source.is_file():
        raise SettingError(f"{setting}={source}: no such file")
    known = hash_file(source)
    target = name_folder(source, known)
    if not is_converted(target, known):
        try:
            with hold_lock(target.name):
                if not is_converted(target, known):
                    make(known, target)
        except OSError as error:
            raise SettingError(f"{setting}={source}: cannot be converted into {target} ({error.strerror})") from None
    return target

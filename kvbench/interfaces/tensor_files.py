"""Read the safetensors files that methods and codecs need beside a model, made for that model.

Pickled weights are never opened, because they can run code.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvbench.validation import SettingError, summarize

IDENTITY = "model"  # key of a file's metadata: the identity of the model that it was made for
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # of a number, by its dtype in a safetensors file
Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ModelFile:
    """A file that a method or a codec needs beside a model, and that was made for one model."""

    path: str
    """The value of the setting `path`."""
    nbytes: int
    """Size of what is read from it, in bytes."""
    identity: str | None = None
    """Identity of the model that it was made for. None if the file does not say it, as files of other projects."""
    setting: str = field(default="method.path", kw_only=True)
    """Name of the setting, for messages."""

    def check_identity(self, identify: Callable[[], str]) -> None:
        """Check that the file was made for the model of a run. A file that does not say its model is taken.

        Args:
            identify: Returns a text that identifies the model's weights, which may take time.

        Raises:
            SettingError: The file was made for another model.
        """
        if self.identity is not None and self.identity != (model := identify()):
            raise SettingError(
                f"{self.setting}={self.path}: the file was made for the model {self.identity}, this one is {model}"
            )


@dataclass(frozen=True, eq=False)
class TensorFile(ModelFile):
    """The tensors of a method's or a codec's file."""

    tensors: Mapping[str, Tensor] = field(kw_only=True)
    """The tensors by their names, on the CPU."""

    @classmethod
    def of(
        cls, path: object, tensors: Mapping[str, Tensor], identity: str | None = None, setting: str = "method.path"
    ) -> Self:
        """Return what was read from a file at `path`: tensors, and the identity of the model they were made for."""
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        return cls(str(path), nbytes, identity, tensors=tensors, setting=setting)

    @cached_property
    def copies(self) -> dict[tuple[str, torch.device, torch.dtype], Tensor]:
        """The tensors on the devices and in the dtypes that were asked for."""
        return {}

    def like(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor of the file with another tensor's device and dtype. It is copied once."""
        key = name, tensor.device, tensor.dtype
        if key not in self.copies:
            self.copies[key] = self.tensors[name].to(tensor)
        return self.copies[key]


def find_weights(path: object, setting: str, what: str, method: str) -> Path:
    """Return the safetensors file of a path, which may be a folder that has one as model.safetensors.

    Arguments and errors are those of `require_place`.
    """
    file = require_place(path, setting, what, method)
    return file / "model.safetensors" if file.is_dir() else file


def require_place(path: object, setting: str, what: str, method: str) -> Path:
    """Return the file or the folder that a setting names.

    Args:
        path: The value of the setting.
        setting: Name of the setting, for messages.
        what: What the file holds, for messages.
        method: The name with which `kvbench calibrate` makes such a file.

    Raises:
        SettingError: The path is no path.
    """
    if path is None:
        raise SettingError(
            f"{setting}=null: give a safetensors file of {what}; make one with "
            f"python -m kvbench calibrate {method} --model MODEL --out FILE"
        )
    if not isinstance(path, str | Path):
        raise SettingError(f"{setting}={path}: a path")
    return Path(path).expanduser()


@dataclass(frozen=True)
class Header:
    """What a safetensors file says about itself."""

    shapes: Mapping[str, Shape]
    """Shape of each tensor by its name."""
    bytes: int
    """Size of all tensors, as stored."""
    metadata: Mapping[str, str]
    """The file's metadata."""

    @property
    def identity(self) -> str | None:
        """Identity of the model that the file was made for, or None if it does not say it."""
        return self.metadata.get(IDENTITY)


def read_header(file: Path, where: str, what: str) -> Header:
    """Read the shapes and the metadata of a file, but no weights.

    Args:
        file: The file.
        where: The setting and its value, with which messages begin.
        what: What the file holds, for messages.

    Raises:
        SettingError: The file is missing, truncated or pickled, or a tensor is of no floating-point type.
    """
    shapes, size = {}, 0
    with open_weights(file, where, what) as opened:
        metadata = dict(opened.metadata() or {})
        for key in opened.keys():  # noqa: SIM118  (no mapping)
            tensor = opened.get_slice(key)
            if tensor.get_dtype() not in BYTES:
                raise SettingError(f"{where}: {key} has dtype {tensor.get_dtype()}, allowed are {', '.join(BYTES)}")
            shapes[key] = tuple(tensor.get_shape())
            size += BYTES[tensor.get_dtype()] * torch.Size(shapes[key]).numel()
    return Header(shapes, size, metadata)


def read_weights(file: Path, where: str, what: str) -> dict[str, Tensor]:
    """Read all tensors of a file. Arguments are those of `read_header`.

    Raises:
        SettingError: The file cannot be read, or a number in it is not finite.
    """
    with open_weights(file, where, what) as opened:
        weights = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    require_finite(file, where, what)
    return weights


def is_any(name: str) -> bool:
    """Return True: tensors of all names are read."""
    return True


def require_finite(file: Path, where: str, what: str, is_read: Callable[[str], bool] = is_any) -> None:
    """Check that all numbers in a file are finite. The file is read once, until it changes.

    Args:
        file: The file, whose header `read_header` or `open_weights` has read.
        where: The setting and its value, with which messages begin.
        what: What the file holds, for messages.
        is_read: Whether a tensor of this name is read. Others may hold anything.

    Raises:
        SettingError: A number is not finite, or the file cannot be read.
    """
    about = file.stat()
    name = find_wrong_numbers(file, where, what, is_read, about.st_mtime_ns, about.st_size)
    if name is not None:
        raise SettingError(f"{where}: {name} is not finite")


@lru_cache(maxsize=64)
def find_wrong_numbers(
    file: Path, where: str, what: str, is_read: Callable[[str], bool], changed: int, size: int
) -> str | None:
    """Return the first tensor of a file that has a number that is not finite, or None if there is none."""
    with open_weights(file, where, what) as opened:
        names = filter(is_read, opened.keys())
        return next((name for name in names if not torch.isfinite(opened.get_tensor(name)).all()), None)


@contextmanager
def open_weights(file: Path, where: str, what: str) -> Iterator[Any]:
    """Open a safetensors file, and raise a SettingError of one line if it cannot be read."""
    try:
        with safe_open(str(file), framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        if is_pickled(file):
            raise SettingError(f"{where}: pickled weights are not read; give a safetensors file") from None
        raise SettingError(f"{where}: cannot read the {what} ({summarize(error)})") from None


def read_tensors(
    path: object, names: Mapping[str, Sequence[str]], what: str, method: str, setting: str = "method.path"
) -> TensorFile:
    """Read tensors of a method's or a codec's file.

    Args:
        path: The value of the setting.
        names: Names of the tensors, each with the names of its dimensions.
        what: What the file holds, for messages.
        method: The name with which `kvbench calibrate` makes such a file.
        setting: Name of the setting, for messages.

    Raises:
        SettingError: The file is missing, truncated or pickled, or lacks a tensor; or a tensor has other dimensions, or
            a number that is not finite.
    """
    with open_weights(find_weights(path, setting, what, method), f"{setting}={path}", what) as opened:
        identity = (opened.metadata() or {}).get(IDENTITY)
        tensors = {name: opened.get_tensor(name) for name in names}
    check_tensors(path, tensors, names, setting)
    return TensorFile.of(path, tensors, identity, setting)


def check_tensors(
    path: object, tensors: Mapping[str, Tensor], names: Mapping[str, Sequence[str]], setting: str = "method.path"
) -> None:
    """Raise a SettingError unless tensors have so many dimensions as `names` says, and only finite numbers."""
    for name, dimensions in names.items():
        tensor = tensors[name]
        if tensor.dim() != len(dimensions) or not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise SettingError(f"{setting}={path}: {name} must be a finite tensor ({', '.join(dimensions)})")


def is_pickled(file: Path) -> bool:
    """Whether a file begins as those of `torch.save` do.

    A safetensors file may begin with the byte of a pickle too, because the length of its header comes first.
    """
    with suppress(OSError), file.open("rb") as opened:
        begin = opened.read(9)
        return begin[:4] == b"PK\x03\x04" or (begin[:1] == b"\x80" and begin[8:] != b"{")
    return False

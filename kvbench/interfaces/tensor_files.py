"""Read the tensors that a method needs beside the model from a safetensors file that was made for the model."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvbench.validation import SettingError, summarize

IDENTITY = "model"  # key of the metadata: the identity of the model that the file was made for


@dataclass(frozen=True, eq=False)
class TensorFile:
    """The tensors of a method's file."""

    path: str
    """The value of the setting `path`."""
    tensors: Mapping[str, Tensor]
    """The tensors by their names, on the CPU."""
    identity: str | None
    """Identity of the model that they were made for. None if the file does not say it, as files of other projects."""

    @property
    def nbytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(own.nbytes for own in self.tensors.values())

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

    def check_identity(self, identify: Callable[[], str]) -> None:
        """See `Method.check_identity`. A file that does not say its model is taken."""
        if self.identity is not None and self.identity != (own := identify()):
            raise SettingError(
                f"method.path={self.path}: the file was made for the model {self.identity}, this one is {own}"
            )


def find_file(path: object, what: str, method: str) -> Path:
    """Return the file of the setting `method.path`.

    Args:
        path: The value of the setting.
        what: What the file holds, for messages.
        method: The name with which `kvbench calibrate` makes such a file.

    Raises:
        SettingError: The setting is no path.
    """
    if path is None:
        raise SettingError(
            f"method.path=null: give a safetensors file of {what}; make one with "
            f"python -m kvbench calibrate {method} --model MODEL --out FILE"
        )
    if not isinstance(path, str | Path):
        raise SettingError(f"method.path={path}: a path")
    return Path(path).expanduser()


def read_tensors(path: object, names: Mapping[str, Sequence[str]], what: str, method: str) -> TensorFile:
    """Read tensors of a safetensors file. Pickled files are never opened.

    Args:
        path: The value of the setting `method.path`.
        names: Names of the tensors, each with the names of its dimensions.
        what: What the file holds, for messages.
        method: The name with which `kvbench calibrate` makes such a file.

    Raises:
        SettingError: The file is missing, truncated or pickled, or lacks a tensor; or a tensor has other dimensions, or
            a number that is not finite.
    """
    file = find_file(path, what, method)
    try:
        with safe_open(str(file), framework="pt") as opened:
            identity = (opened.metadata() or {}).get(IDENTITY)
            tensors = {name: opened.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        reason = "it is pickled; give a safetensors file" if is_pickled(file) else summarize(error)
        raise SettingError(f"method.path={path}: cannot read the {what} ({reason})") from None
    check_tensors(path, tensors, names)
    return TensorFile(str(path), tensors, identity)


def check_tensors(path: object, tensors: Mapping[str, Tensor], names: Mapping[str, Sequence[str]]) -> None:
    """Raise a SettingError unless tensors have so many dimensions as `names` says, and only finite numbers."""
    for name, dimensions in names.items():
        own = tensors[name]
        if own.dim() != len(dimensions) or not own.is_floating_point() or not torch.isfinite(own).all():
            raise SettingError(f"method.path={path}: {name} must be a finite tensor ({', '.join(dimensions)})")


def is_pickled(file: Path) -> bool:
    """Whether a file begins as those of `torch.save` do.

    A safetensors file may begin with the byte of a pickle too, because the length of its header comes first.
    """
    with suppress(OSError), file.open("rb") as opened:
        begin = opened.read(9)
        return begin[:4] == b"PK\x03\x04" or (begin[:1] == b"\x80" and begin[8:] != b"{")
    return False

"""Choose the device and the dtype of a run. This imports torch only if it is built for GPUs."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from kvbench.validation import SettingError


def has_gpu() -> bool:
    """Return whether torch can use a GPU.

    A build of torch for CPUs is recognised by its version file, because importing torch takes seconds.
    """
    if "torch" not in sys.modules and not is_built_for_gpus():
        return False
    import torch

    return torch.cuda.is_available()


def is_built_for_gpus() -> bool:
    """Return whether torch/version.py names a version of CUDA or ROCm; True if the file is missing."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    if file is None or not file.is_file():
        return True
    names: dict[str, object] = {}
    exec(compile(file.read_bytes(), str(file), "exec"), names)
    return names.get("cuda") is not None or names.get("hip") is not None


def choose_device(asked: str) -> str:
    """Return "cpu" or "cuda" for the setting `device`.

    Raises:
        SettingError: `asked` is "cuda" and there is no GPU.
    """
    if asked == "cuda" and not has_gpu():
        raise SettingError("device=cuda: there is no CUDA device here; use device=cpu or device=auto")
    return asked if asked != "auto" else "cuda" if has_gpu() else "cpu"


def choose_dtype(asked: str, device: str) -> str:
    """Return the name of a dtype for the setting `dtype`: "auto" is float32 on a CPU and bfloat16 on a GPU."""
    return asked if asked != "auto" else "float32" if device == "cpu" else "bfloat16"


def count_device_bytes(device: str, all_gpus: bool) -> int:
    """Return the bytes of memory that the device has in all.

    Args:
        device: "cpu" or "cuda".
        all_gpus: Whether to count the memory of all GPUs.
    """
    if device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    import torch

    count = torch.cuda.device_count() if all_gpus else 1
    return sum(torch.cuda.get_device_properties(index).total_memory for index in range(count))


def name_gpu() -> str:
    """Return the name of the current GPU."""
    import torch

    return torch.cuda.get_device_name()

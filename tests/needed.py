"""Settings that a method cannot do without: files, made for a model by the project's own calibration."""

import atexit
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from models import ids, tiny
from safetensors.torch import save_file

from kvbench.calibrate import query_filters

FOLDER = tempfile.TemporaryDirectory()
atexit.register(FOLDER.cleanup)


def filters(model: torch.nn.Module, sequences: Sequence[torch.Tensor], path: Path) -> None:
    """Query filters."""
    save_file({"q_filters": query_filters(model, sequences, count=200)}, str(path))


MAKE = {"qfilters": filters}


def made(method: str, name: str, model: torch.nn.Module, sequences: Sequence[torch.Tensor]) -> dict:
    """`method_args` for a method on a model of this name, its file made once from `sequences` (tokens,)."""
    if method not in MAKE:
        return {}
    path = Path(FOLDER.name) / f"{method}-{name}"
    if not path.exists():
        MAKE[method](model, sequences, path)
    return {"path": str(path)}


def needed(method: str, name: str) -> dict:
    """The same for a tiny model of tests/models.py."""
    return made(method, name, tiny(name), [ids(100, seed)[0] for seed in range(4)])

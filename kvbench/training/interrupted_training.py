"""Keep the files from which an interrupted training goes on.

Beside the output OUT lie OUT.training, the state, and OUT.log.jsonl, a line of losses for each step that is logged.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvbench.atomic import replace_file
from kvbench.validation import SettingError

HEADERS = 12_000  # bytes of a state for the names and shapes of a layer's tensors, at most
LINE = 128  # bytes of a line of the log, at most
Settings = Mapping[str, str | int | float]


def name_state(out: Path) -> Path:
    """Return the file from which the training of `out` goes on."""
    return out.with_name(f"{out.name}.training")


def name_log(out: Path) -> Path:
    """Return the file with the losses of the training of `out`."""
    return out.with_name(f"{out.name}.log.jsonl")


def check_room(out: Path, layers: int, weights: int, steps: int) -> None:
    """Raise a SettingError unless the disk has room for what a training, new or interrupted, is still to write.

    It needs the most room for two states, one of which is being written, and the log. The output is smaller than a
    state, and is written after the last one.

    Args:
        out: The output.
        layers: Number of layers.
        weights: Number of weights of all compressors. A state holds three numbers of float32 for each.
        steps: Number of steps.
    """
    folder = next(path for path in out.absolute().parents if path.exists())
    written = sum(file.stat().st_size for file in (name_state(out), name_log(out)) if file.exists())
    need = 2 * (12 * weights + HEADERS * layers) + LINE * steps - written
    free = shutil.disk_usage(folder).free
    if free < need:
        raise SettingError(f"--out={out}: the training needs {need / 1e6:,.1f} MB there, {free / 1e6:,.1f} MB are free")


def load_state(out: Path, settings: Settings) -> dict[str, Any] | None:
    """Load the state of an interrupted training, or return None if there is none.

    Args:
        out: The output.
        settings: Value of each option, as this training uses it. Those that are not known yet can be left out.

    Raises:
        SettingError: There is an output already, the state cannot be read, or the training was begun with other
            settings.
    """
    file = name_state(out)
    if not file.exists():
        if out.exists():
            raise SettingError(f"--out={out}: there is a file; delete it or give another name")
        return None
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        begun = dict(state["settings"])
    except Exception as error:  # a damaged file can raise any of them
        raise SettingError(f"--out={out}: {file.name} is damaged ({type(error).__name__}); delete it") from None
    compare_settings(out, begun, settings)
    return state


def compare_settings(out: Path, begun: Settings, settings: Settings) -> None:
    """Raise a SettingError if a training was begun with other settings.

    Args:
        out: The output.
        begun: Value of each option that the state of the training holds.
        settings: Value of options, as this training uses them.
    """
    for name, value in settings.items():
        if begun.get(name) != value:
            raise SettingError(
                f"--{name}: {value}, but the training in {name_state(out).name} was begun with {begun.get(name)}; give "
                "the same, or delete that file"
            )


def write_state(out: Path, state: dict[str, Any]) -> None:
    """Write the state from which a training goes on.

    Args:
        out: The output.
        state: What `load_state` will return. It has the options under `settings`.

    Raises:
        OSError: The state cannot be written, and the one before is unchanged. The error names the file.
    """
    with replace_file(name_state(out)) as draft, draft.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch raises it while it handles an error of the disk or Ctrl-C
            raise (error.__context__ or error) from None

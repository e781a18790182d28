"""Whether this machine can hold a preset's runs: weights, and the full cache of the longest prompt if the task says it.

    bytes = parameters · size + 2 · layers · KV heads · dimensions · tokens · size

of a model whose weights are not loaded, against the memory of the GPU (of all of them with model.device_map=auto), or
of the machine. A sliding-window layer counts with all tokens. What a prefill needs besides is not counted, so what
passes may still be too large.
"""

import os
from itertools import chain
from typing import Any

from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

from kvbench.config import catalogue
from kvbench.sweeps.compose import SweepOverrides
from kvbench.validation import SettingError

SIZES = ("model", "task")  # settings that decide how much a run needs


def count_needed_bytes(run: Any) -> int:
    """Bytes of weights and full cache."""
    from kvbench.models.checkpoint import count_parameters
    from kvbench.models.transformers_port import read_config_layout
    from kvbench.runs.spec import DTYPES

    config, size = run.checkpoint.config(), DTYPES[run.dtype].itemsize
    shape = read_config_layout(config)
    return size * (count_parameters(config) + 2 * shape.layers * shape.heads * shape.dim * (run.task.length or 0))


def count_available_bytes(run: Any) -> int:
    """Bytes that there are for them."""
    if run.device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    import torch

    spread = run.checkpoint.device_map is not None
    count = torch.cuda.device_count() if spread else 1
    return sum(torch.cuda.get_device_properties(index).total_memory for index in range(count))


def check_capacity(asked: SweepOverrides) -> None:
    """SettingError if a preset that a sweep is asked for has runs that the machine cannot hold.

    What cannot be composed is left to the sweep, which refuses it cell by cell.
    """
    preset = asked.config.hydra.runtime.choices.get("preset")
    if preset is None:
        return
    from kvbench.runs.spec import RunSpec  # imports torch, for presets only

    named = any(line.startswith("model=") for line in [*asked.fixed, *(axis.input_line for axis in asked.axes)])
    deciding = SIZES if named else (*SIZES, "row")  # a row may bring its model
    axes = [axis for axis in asked.axes if axis.key_or_group.split(".")[0] in deciding]
    with initialize_config_dir(str(catalogue.CONF), version_base="1.3"):
        for chosen in chain(*BasicSweeper.split_arguments(axes, None)):
            try:
                run = RunSpec.from_config(catalogue.compose_overrides([*asked.fixed, *chosen]))
            except SettingError:
                continue
            if (wanted := count_needed_bytes(run)) > (there := count_available_bytes(run)):
                what = f"preset={preset}: model={run.checkpoint.name} needs {wanted / 1e9:.1f} GB"
                has = f"this machine has {there / 1e9:.1f} GB ({run.device})"
                raise SettingError(f"{what} for weights and full cache, {has}")

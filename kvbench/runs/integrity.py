"""Notice that a method changed what every run depends on: the model's weights, or kvbench's own functions and classes.

The guards (`kvbench.cache.guard`) watch what a hook is handed, and compare copies before a first sample only. A method
can still do harm at a later sample: it can write into weights around PyTorch's counters, or replace `Knorm.score`. The
runner therefore compares both with what they were (`kvbench.runs.group_watch`).
"""

import sys
from functools import cached_property
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from kvbench.models.int4 import Int4Weight
from kvbench.models.transformers_port import read_layout

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers by their bytes
OF_PYTHON = {"__annotations__", "__annotations_cache__", "__doc__"}  # names in classes that Python sets when asked
INNER = {staticmethod: "__func__", classmethod: "__func__", property: "fget", cached_property: "func"}
ABSENT = object()


class WeightHashes:
    """A hash of each weight of a model, computed on the weight's device.

    The bits of a weight are read as 64-bit integers in a matrix. Its row sums, its column sums (both modulo 2^64) and
    the row sums of the numbers themselves are mixed, multiplied by random odd factors and added. PyTorch's reductions
    read the weights at about the speed of memory and allocate next to nothing. The numbers' own sums are there because
    an even count of changed signs may leave a sum modulo 2^64 as it is. A change goes unseen by chance
    with a probability of about 2^-30 (an estimate), unless somebody makes it to go unseen.

    Args:
        model: The model. Buffers count too, unless its rotary frequencies follow the length of the text.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.factors = model, dict[tuple[str, int], Tensor]()
        self.known = self._compute()

    def find_changed(self) -> list[str]:
        """Return the names of the weights that are not what they were when this object was made."""
        now = self._compute()
        return sorted(name for name in self.known.keys() | now.keys() if self.known.get(name) != now.get(name))

    def _compute(self) -> dict[str, int]:
        named: dict[str, Tensor] = {}
        for name, weight in self.model.named_parameters():
            named |= weight.name_parts(name) if isinstance(weight, Int4Weight) else {name: weight}
        if read_layout(self.model).rope_switch is None:
            named |= dict(self.model.named_buffers())
        with torch.no_grad():
            hashes = [self._hash(weight.detach()) for weight in named.values()]
            devices = {digest.device for digest in hashes}
            by_device = {
                device: iter(torch.stack([digest for digest in hashes if digest.device == device]).tolist())
                for device in devices
            }
        return {name: next(by_device[digest.device]) for name, digest in zip(named, hashes, strict=True)}

    def _hash(self, weight: Tensor) -> Tensor:
        dense = weight.contiguous()
        rows = dense.view(len(dense), -1) if dense.dim() > 1 else dense.view(1, -1)
        aligned = rows.shape[1] * dense.itemsize % 8 == 0 and dense.storage_offset() * dense.itemsize % 8 == 0
        words = rows.view(torch.int64 if aligned else WORDS[dense.itemsize])
        sums = [words.sum(0, dtype=torch.int64), words.sum(1, dtype=torch.int64)]
        if dense.dtype.is_floating_point and dense.itemsize > 1:
            sums.append(rows.sum(1).view(WORDS[dense.itemsize]).long())
        mixed = torch.cat(sums)
        return ((mixed ^ (mixed >> 31)) * self._draw(dense.device, len(mixed))).sum()

    def _draw(self, device: torch.device, count: int) -> Tensor:
        """Return so many random odd factors, the same ones each time."""
        size = 1 << count.bit_length()
        key = str(device), size
        if key not in self.factors:
            generator = torch.Generator().manual_seed(size)
            self.factors[key] = torch.randint(-(2**62), 2**62, (size,), generator=generator).to(device) * 2 + 1
        return self.factors[key][:count]


class Definitions:
    """The functions of kvbench's modules, and all that its classes define, as they are when this object is made."""

    def __init__(self) -> None:
        self.owners: list[tuple[str, Any, dict[str, Any]]] = []  # full name, module or class, what it defines
        functions: dict[FunctionType, None] = {}
        for module, loaded in [one for one in sys.modules.items() if one[0].split(".")[0] == "kvbench"]:
            defined = {name: value for name, value in vars(loaded).items() if isinstance(value, (FunctionType, type))}
            self.owners.append((module, loaded, defined))
            for name, value in defined.items():
                if isinstance(value, type) and value.__module__ == module:
                    self.owners.append((f"{module}.{name}", value, dict(vars(value))))
        for _, _, defined in self.owners:
            for value in defined.values():
                function = getattr(value, INNER[kind]) if (kind := type(value)) in INNER else value
                if type(function) is FunctionType:
                    functions[function] = None
        self.functions = [(function, read_function(function)) for function in functions]

    def find_changed(self, restore: bool = False) -> list[str]:
        """Return the full names of what was replaced, removed or added since.

        Args:
            restore: Whether to undo that.
        """
        changed = [
            f"{function.__module__}.{function.__qualname__}"
            for function, parts in self.functions
            if read_function(function) != parts
        ]
        if restore:
            for function, parts in self.functions:
                function.__code__, function.__defaults__, function.__kwdefaults__ = parts
        for label, owner, before in self.owners:
            now = vars(owner)
            names = [name for name, value in before.items() if now.get(name, ABSENT) is not value]
            if isinstance(owner, type) and len(now) != len(before):
                names += now.keys() - before.keys()
            for name in sorted({*names} - OF_PYTHON):
                changed.append(f"{label}.{name}")
                if restore:
                    setattr(owner, name, before[name]) if name in before else delattr(owner, name)
        return list(dict.fromkeys(changed))


def read_function(function: FunctionType) -> tuple[Any, ...]:
    """Return what a function consists of and what others can replace."""
    return function.__code__, function.__defaults__, function.__kwdefaults__

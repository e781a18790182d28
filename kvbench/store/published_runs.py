"""The part of a run that kvbench publishes for each sample: what its tables and pictures are computed from.

`publish` reduces a finished run of a store to this part, and kvbench.store.published_file writes it and reads it back.
Numbers that are published are computed from published runs only (kvbench.analysis.result_lines), so they follow from
the file alone, and those of a researcher's own store come by the same functions. Prompts, answers and times are left
out. `nll` and `kl` are rounded to BITS bits, because all their bits would take most of the file.

This module does not import pyarrow, which a machine that only measures may lack.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import frexp, isfinite, ldexp
from typing import Any

from kvbench.store.runs import StoredRun
from kvbench.validation import SettingError

FIELDS: dict[str, type] = {  # field of a record -> its type in the file
    "uid": str,
    "subtask": str,
    "group": str,
    "turn": int,
    "prompt_hash": str,
    "target_hash": str,
    "tokens_in": int,
    "tokens_out": int,
    "stop": str,
    "error": str,
    "score": float,
    "resident_bytes": int,
    "full_bytes": int,
    "metadata_bytes": int,
    "state_bytes": int,
    "weights_bytes": int,
    "rows_held": float,
    "rows_seen": int,
    "rows_attended": float,
    "rows_seen_decoding": float,
}
MAPPINGS: dict[str, dict[str, type]] = {  # field of a record -> its keys that are published, and their types
    "fidelity": {"nll": float, "kl": float},
    "meta": {"data": str, "haystack": str, "qa": str},
}
BITS = 13  # of the numbers of `fidelity` that are kept: an error of at most one part in 8,192
ORIGIN = ("code", "replay")  # what is published of a run's machines: the revision of the code, hash of tests/replay


@dataclass(frozen=True)
class PublishedRun(StoredRun):
    """A finished run without a folder.

    Attributes:
        samples: Its records by uid, with FIELDS and MAPPINGS only. A field that a record lacks is None.
        origin: The values of ORIGIN. Those of several machines are joined by " and ".
    """

    samples: dict[str, dict[str, Any]]
    origin: Mapping[str, str]

    @property
    def records(self) -> dict[str, dict[str, Any]]:
        return self.samples

    @property
    def damage(self) -> list[str]:
        return []

    @property
    def finished(self) -> bool:
        return True

    @property
    def planned(self) -> int:
        return len(self.samples)

    @property
    def machines(self) -> list[dict[str, Any]]:
        return [dict(self.origin)]

    def restrict(self, records: Mapping[str, dict[str, Any]]) -> "PublishedRun":
        return replace(self, samples=dict(records))


def publish(run: StoredRun) -> PublishedRun:
    """Return the published part of a finished run."""
    samples = {uid: reduce_record(record) for uid, record in run.records.items()}
    return PublishedRun(run.hash, run.value, run.folder, samples, describe_machines(run))


def reduce_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the published part of a record."""
    reduced: dict[str, Any] = {name: record.get(name) for name in FIELDS}
    for name, keys in MAPPINGS.items():
        given = record.get(name, {})
        reduced[name] = {key: round_number(given.get(key)) for key in keys}
    return reduced


def round_number(value: Any) -> Any:
    """Return a float rounded to BITS binary digits, to even where it is between two, and any other value as it is."""
    if not isinstance(value, float) or not isfinite(value):
        return value
    fraction, exponent = frexp(value)
    return ldexp(round(fraction * (1 << BITS)), exponent - BITS)


def describe_machines(run: StoredRun) -> dict[str, str]:
    """Return the values of ORIGIN of a run's machines."""
    machines = run.machines
    return {name: " and ".join(sorted({str(machine.get(name) or "") for machine in machines})) for name in ORIGIN}


def name_machine(device: Mapping[str, Any]) -> str:
    """Return the name of the folder for results of a machine, such as nvidia-h200, or cpu.

    Args:
        device: The setting `device` of a run.
    """
    return make_folder_name(str(device.get("gpu") or device["type"]))


def make_folder_name(machine: str) -> str:
    """Return the name of a machine in small letters and digits, with hyphens between the words."""
    return "-".join("".join(char if char.isalnum() else " " for char in machine.lower()).split())


def has_pyarrow() -> bool:
    """Return whether files of published runs can be read and written here."""
    return find_spec("pyarrow") is not None


def require_pyarrow(what: object) -> None:
    """Raise a SettingError that begins with `what` if pyarrow is not installed."""
    if not has_pyarrow():
        raise SettingError(f"{what}: needs pyarrow, which is not installed; pip install pyarrow installs it")

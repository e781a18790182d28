"""Check that all runs of a tier (kvbench.config.tiers) come from one kind of machine and one state of the code.

Scores of other runs are not exactly comparable. A store that holds runs of the tier from elsewhere is refused before
anything runs.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvbench.store.run_folder import run_hash
from kvbench.store.runs import StoredRun, find_runs, name_some
from kvbench.sweeps.plan import Sweep
from kvbench.validation import SettingError

ELSEWHERE = ("device", "sources")  # settings of a run that say where and by which code it was made


def list_values(sweeps: Iterable[Sweep]) -> dict[str, Mapping[str, Any]]:
    """Return hash -> settings of the runs of sweeps, those of the full cache included."""
    runs = [
        run
        for sweep in sweeps
        for planned in sweep.cells
        if planned.run
        for run in (planned.run.baseline(), planned.run)
    ]
    return {run_hash(run.value): run.value for run in runs}


def check_store(tier: str, values: Mapping[str, Mapping[str, Any]], results: Path) -> None:
    """Refuse a store with runs of a tier that another kind of GPU, other versions or other code made.

    Args:
        tier: Name of the tier.
        values: Its runs on this machine, as `list_values` returns them.
        results: The folder of results.

    Raises:
        SettingError: There are such runs. The message says what differs and what to do.
    """
    expected = {hash_experiment(value): value for value in values.values()}
    others = [
        run for run in find_runs(results).runs if run.hash not in values and hash_experiment(run.value) in expected
    ]
    if not others:
        return
    run = others[0]
    there, here = run.value, expected[hash_experiment(run.value)]
    said = f"{len(others)} runs of tier {tier} ({name_some([own.hash for own in others])})"
    if there["device"] != here["device"]:
        why = f"were made on {describe_device(there['device'])}, and this is {describe_device(here['device'])}"
        do = "go on there"
    else:
        why = f"were made by {describe_code(run)}, whose code may give other results than this one's"
        do = "check that code out to go on"
    raise SettingError(f"results={results}: {said} {why}; {do}, or give another folder with --results")


def hash_experiment(value: Mapping[str, Any]) -> str:
    """Return a hash of all settings of a run but those of ELSEWHERE."""
    return run_hash({name: setting for name, setting in value.items() if name not in ELSEWHERE})


def describe_device(device: Mapping[str, Any]) -> str:
    """Return a device with its dtype and the versions, as a run's settings hold them."""
    parts = [device.get("gpu") or device["type"], device.get("dtype", "")]
    parts += [f"{name} {device[name]}" for name in ("torch", "transformers") if device.get(name)]
    parts += [f"{name}={device[name]}" for name in ("max_batch", "compile", "device_map") if name in device]
    return ", ".join(map(str, parts))


def describe_code(run: StoredRun) -> str:
    """Return the revision of the code that made a run."""
    codes = {str(machine["code"]) for machine in run.machines if machine.get("code")}
    return " and ".join(sorted(codes)) or "an unknown revision"

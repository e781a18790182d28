"""Check that all runs of a part (kvbench.config.study_parts) come from one kind of machine and one state of the code.

Scores of other runs are not exactly comparable. A store that holds runs of the part from elsewhere is refused before
anything runs (`check_store`). A store that another machine made is read by `collect_runs`, which asks of the runs that
they come from one kind of machine and one state of the code, whichever these are.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.config.provenance import find_revision
from kvbench.store.run_folder import run_hash
from kvbench.store.runs import StoredRun, count_things, find_runs, name_some
from kvbench.sweeps.plan import Sweep
from kvbench.validation import SettingError

COMMIT = re.compile(r"git ([0-9a-f]+)")
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


def check_store(part: str, values: Mapping[str, Mapping[str, Any]], results: Path) -> None:
    """Refuse a store with runs of a part that another kind of GPU, other versions or other code made.

    Args:
        part: Name of the part.
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
    said = f"{count_things(len(others), 'run')} of part {part} ({name_some([own.hash for own in others])})"
    if there["device"] != here["device"]:
        why = f"were made on {describe_device(there['device'])}, and this is {describe_device(here['device'])}"
        do = "go on there"
    else:
        codes = list_codes(other for other in others if other.value["device"] == here["device"])
        why = (
            f"were made by {' and '.join(codes) or 'an unknown revision'}, whose code may give other results than this"
        )
        do = describe_return(codes, find_revision())
    raise SettingError(f"results={results}: {said} {why}; {do}, or give another folder with --results to begin anew")


def collect_runs(part: str, values: Mapping[str, Mapping[str, Any]], results: Path) -> list[StoredRun]:
    """Return the runs of a part in a store, finished or not, whatever kind of machine made them.

    Args:
        part: Name of the part.
        values: Its runs on this machine, as `list_values` returns them.
        results: The folder of results.

    Raises:
        SettingError: There is none, they come from several kinds of machines or states of the code, or a cell has two.
    """
    sources = {hash_experiment(value): value["sources"] for value in values.values()}
    store = find_runs(results)
    store.print_damage()
    runs = [run for run in store.runs if hash_experiment(run.value) in sources]
    if not runs:
        raise SettingError(f"results={results}: the folder contains no run of part {part}")
    devices = {describe_device(run.value["device"]): run for run in runs}
    changed = any(run.value["sources"] != sources[hash_experiment(run.value)] for run in runs)
    codes = {" and ".join(list_codes([run])) or "an unknown revision": run for run in runs} if changed else {}
    for what, kinds in (("machines", devices), ("states of the code", codes)):
        if len(kinds) > 1:
            said = ", ".join(f"{run.hash} by {kind}" for kind, run in sorted(kinds.items()))
            raise SettingError(
                f"results={results}: the runs of part {part} were made by several {what} ({said}); move those of all "
                "but one into another folder"
            )
    cells: dict[str, list[str]] = {}
    for run in runs:
        cells.setdefault(hash_experiment(run.value), []).append(run.hash)
    for hashes in cells.values():
        if len(hashes) > 1:
            raise SettingError(
                f"results={results}: {name_some(hashes)} are runs of one cell of part {part}; move all but one away"
            )
    return runs


def hash_experiment(value: Mapping[str, Any]) -> str:
    """Return a hash of all settings of a run but those of ELSEWHERE."""
    return run_hash({name: setting for name, setting in value.items() if name not in ELSEWHERE})


def describe_device(device: Mapping[str, Any]) -> str:
    """Return a device with its dtype and the versions, as a run's settings hold them."""
    parts = [device.get("gpu") or device["type"], device.get("dtype", "")]
    parts += [f"{name} {device[name]}" for name in ("torch", "transformers") if device.get(name)]
    parts += [f"{name}={device[name]}" for name in ("max_batch", "compile", "device_map") if name in device]
    return ", ".join(map(str, parts))


def list_codes(runs: Iterable[StoredRun]) -> list[str]:
    """Return the revisions of the code that made some runs, each once."""
    return sorted({str(machine["code"]) for run in runs for machine in run.machines if machine.get("code")})


def describe_return(codes: Sequence[str], here: str) -> str:
    """Return how to go on with runs that other code made.

    Args:
        codes: Its revisions, as machine.json holds them (`kvbench.config.provenance.find_revision`).
        here: The revision of this code.
    """
    known = [match[1] for code in codes if (match := COMMIT.fullmatch(code))]
    if len(known) == len(codes) == 1:
        if here == f"{codes[0]} dirty":
            return "undo the uncommitted changes that `git status` shows to go on with them"
        return f"`git checkout {known[0]}` first to go on with them"
    if len(codes) == 1 and codes[0].startswith("version "):
        return f"install kvbench {codes[0].removeprefix('version ')} to go on with them"
    return "bring that code back to go on with them"  # several revisions, or changes that were not committed

"""Measure what a cache costs in time, memory and throughput: task=efficiency.

    python run.py task=efficiency model=random model.like=llama31_8b method=dropkv budget=0.05 task.length=32768

A run is measured on random tokens, which cost as much as any others. It gives lines of results/efficiency/<gpu>.csv,
one for each quantity (kvbench.store.efficiency_csv). `task.measure` chooses latency, decoding, throughput, scoring or
regions.
Each is a module of this package.

Out of memory is a result. A run that was measured with the same settings and sources is not measured again.
"""

import json
import platform
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from kvbench.config import catalogue
from kvbench.config.paths import IS_CHECKOUT
from kvbench.config.provenance import replay_hash, source_hash
from kvbench.efficiency.decoding_time import measure_decoding
from kvbench.efficiency.latency import measure_latency
from kvbench.efficiency.measured_task import find_machine, list_ends, machine_name, read_task
from kvbench.efficiency.region_time import measure_regions
from kvbench.efficiency.scoring_time import measure_scoring
from kvbench.efficiency.throughput import measure_throughput
from kvbench.engine import timing
from kvbench.runs.spec import RunSpec
from kvbench.store.efficiency_csv import (
    COLUMNS,
    COLUMNS_OF_MEDIANS,
    LAST_QUANTITY,
    Line,
    append_lines,
    check_columns,
    find_whole_cells,
    make_out_of_memory_line,
    read_header,
)
from kvbench.validation import SettingError


def measure_once(run: RunSpec, results: Path) -> tuple[Path, list[Line]]:
    """Measure a run and append its lines, unless that was done before.

    Returns:
        The file, and the new lines.
    """
    run = simplify_run(run)
    path = find_file(run, results)
    if hash_cell(run) in find_whole_cells(path):
        return path, []
    begin = time.perf_counter()
    lines = measure_run(run)
    return path, save_lines(run, path, lines, time.perf_counter() - begin)


def measure_run(run: RunSpec) -> list[Line]:
    """Measure a run and return all of its lines."""
    kinds = {
        "latency": measure_latency,
        "decoding": measure_decoding,
        "throughput": measure_throughput,
        "scoring": measure_scoring,
        "regions": measure_regions,
    }
    task = read_task(run)
    lines = list(kinds[task.measure](run))
    if task.baseline == "static_compiled":
        torch.compiler.reset()  # its graphs hold memory
    timing.clear(run.device)
    return lines


def save_lines(run: RunSpec, path: Path, lines: list[Line], seconds: float) -> list[Line]:
    """Append the lines of a cell, with its settings and versions, and return them."""
    about = {**collect_settings(run), **collect_versions(run)} | {"cell": hash_cell(run), "status": "ok"}
    whole = [about | line for line in [*lines, {"quantity": LAST_QUANTITY, "unit": "s", "value": seconds}]]
    append_lines(path, whole)
    return whole


def append_failure(run: RunSpec, results: Path, error: Exception) -> None:
    """Keep a failure, so that the run is not tried again before the sources change."""
    run = simplify_run(run)
    quantity = read_task(run).measure
    if timing.is_shortage(error):
        line = make_out_of_memory_line(quantity, timing.describe_shortage(error))
    else:
        line = {"quantity": quantity, "status": "failed", "note": f"{type(error).__name__}: {error}"[:300]}
    save_lines(run, find_file(run, results), [line], 0.0)


def find_file(run: RunSpec, results: Path) -> Path:
    """Return the file of the run's machine; SettingError if it has another format."""
    path = results / "efficiency" / f"{machine_name(run.device)}.csv"
    if read_header(path):
        check_columns(path, COLUMNS, COLUMNS_OF_MEDIANS)
    return path


def summarize_lines(path: Path, lines: list[Line]) -> str:
    """Summarize for people what was measured and where it is kept."""
    if not lines:
        return f"measured already with these settings and sources: {path}"
    first = lines[0]
    subject = first["method"] if first["baseline"] == "none" else first["baseline"]
    head = f"{subject}, {first['model']}, {first['length']} tokens, budget {first['budget']}, on {first['gpu']}"
    rows = [head]
    for line in lines:
        value = line["status"] if line.get("value") is None else f"{line['value']:,.4g}"
        if isinstance(line.get("value"), int):
            value = f"{line['value']:,}"
        between = (
            f"  [{line['quartile_1']:,.4g}, {line['quartile_3']:,.4g}]"
            if line.get("count", 0) > 1 and "least" in line
            else ""
        )
        rows.append(
            f"  {line['quantity']:<28} {value:>16} {line.get('unit', '')}{between} {line.get('note', '')}".rstrip()
        )
    quantities = {line["quantity"] for line in lines}
    bounded = first["measure"] != "throughput" and bool(quantities & {"tpot_ms", "scoring_bytes"})
    if first["gpu"] != "cpu" and bounded and not any("floor" in quantity for quantity in quantities):
        rows.append("  no floors: they need task.bandwidth and task.flops, or the GPU in conf/efficiency/machines.yaml")
    return "\n".join([*rows, f"  appended to {path}"])


def simplify_run(run: RunSpec) -> RunSpec:
    """Drop the settings that do not matter to a measurement: transformers' caches have no method and no budget.

    Raises:
        SettingError: The machine, or a method that scores nothing, makes the measurement impossible.
    """
    task = read_task(run)
    if task.implementation is not None and task.measure == "latency":
        if task.baseline != "none" or not run.choice().method.overrides("score"):
            raise SettingError(
                f"task.implementation={task.implementation}: needs a method that scores rows, and task.baseline=none; "
                "otherwise null"
            )
        if run.block_size is not None:  # a CUDA graph may read blocks, and cannot run the reference
            raise SettingError(
                f"task.implementation={task.implementation}: times a prompt of one block; block_size=null"
            )
    if task.baseline == "none":
        return run
    if task.baseline == "static_compiled" and run.device == "cpu":
        raise SettingError("task.baseline=static_compiled: needs a GPU")
    return run.baseline()


def collect_settings(run: RunSpec) -> Line:
    """Return the columns that hold a run's settings."""
    task, method = read_task(run), run.groups["method"]
    default = catalogue.load_settings(
        "method", method["name"], {"preset": method["preset"]} if "preset" in method else None
    )
    changed = {key: value for key, value in method.items() if value != default.get(key)}
    for group in ("allocator", "codec"):  # their presets have no column, so what differs from the default is named
        part = run.groups[group]
        usual = catalogue.load_settings(group, part["name"])
        changed |= {f"{group}.{key}": part[key] for key in part if key != "preset" and part[key] != usual.get(key)}
    return {
        "gpu": machine_name(run.device), "measure": task.measure, "model": run.checkpoint.name,
        "weights": run.checkpoint.identity(), "method": method["name"], "preset": method.get("preset", ""),
        "changed": json.dumps(changed, sort_keys=True) if changed else "",
        "allocator": run.groups["allocator"]["name"], "codec": run.groups["codec"]["name"],
        "budget": run.budget.value, "budget_of": run.budget.of, "block_size": run.block_size or "",
        "baseline": task.baseline, "compile": "" if run.compile else "off",
        "implementation": task.implementation or "", "length": task.length,
        "batch": "" if task.measure == "throughput" else task.batch, "rows": task.rows or "",
        "fill": task.fill if task.measure == "throughput" else "", "new_tokens": " ".join(map(str, list_ends(run))),
        "repeats": task.repeats, "device": run.device, "dtype": run.dtype,
    }  # fmt: skip


def hash_cell(run: RunSpec) -> str:
    """Hash a cell: its settings, the machine, the versions, and the sources that can change what is measured."""
    value = run.value | {"sources": hash_sources(run), "speeds": repr(find_machine(run))}
    return sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def hash_sources(run: RunSpec) -> str:
    """Hash the sources that can change what is measured."""
    return source_hash(["kvbench.efficiency.measure", *run.modules()])


def collect_versions(run: RunSpec) -> Mapping[str, Any]:
    """Return the columns that hold versions, date, sources, commit and driver."""
    columns = {name: version(name) if find_spec(name) else "" for name in ("torch", "transformers", "triton")}
    columns |= {"date": datetime.now(UTC).isoformat(timespec="seconds"), "python": platform.python_version()}
    columns |= {"cuda": torch.version.cuda or "", "sources": hash_sources(run), "replay": replay_hash()}
    columns |= {"commit": "", "driver": ""}
    asked = {"commit": ["git", "rev-parse", "--short=12", "HEAD"]} if IS_CHECKOUT else {}
    if run.device != "cpu":
        asked["driver"] = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    for name, command in asked.items():
        with suppress(OSError, subprocess.SubprocessError):
            completed = subprocess.run(command, capture_output=True, text=True, timeout=10, cwd=Path(__file__).parent)
            columns[name] = completed.stdout.strip() if completed.returncode == 0 else ""
    return columns

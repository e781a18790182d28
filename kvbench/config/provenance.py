"""Hash the sources that can change a result, and find the revision of the checkout.

The hash of a run contains:

* The modules of the run's method, allocator, codec, task and kind of model, the runner, and whatever these import:
  modules of kvbench; files that no installer put there, such as files beside a method, on PYTHONPATH or in an editable
  install; and modules of the distribution that installed the method, if kvbench does not depend on it. So a change of a
  method's file renames the runs of that method, and of methods that import it.
* All modules of each of `FOLDERS` in which one of these lies.
* All files of each kernel's package that one of these imports, except its prose, because its `__init__.py` may choose
  the implementation by name at run time. So a change of a kernel that one method uses renames the runs of that method.
* Other installed packages by name and version, except the dependencies in pyproject.toml. A run's settings hold the
  versions of torch and transformers, and machine.json those of the others that numbers depend on.

Python sources are hashed as syntax without comments, docstrings and messages (`kvbench.config.syntax`), so rewording
one keeps the names of all runs. The hash leaves out Python itself, the modules in `UNCOUNTED` and data files that a
package reads.
"""

import hashlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import kvbench
from kvbench.config.imports import (
    find_owner,
    find_unfollowed,
    hash_text,
    list_files,
    list_imports,
    list_members,
    look_up_once,
    normalise,
    read_source,
    sources_unchanging,
)
from kvbench.config.paths import IS_CHECKOUT, REPLAY, ROOT
from kvbench.validation import SettingError

FOLDERS = {"kvbench.cache", "kvbench.engine", "kvbench.interfaces", "kvbench.models", "kvbench.runs"}  # hashed whole
CODE = ("kvbench", "kernels", "methods", "tasks", "conf", "run.py")  # paths whose changes make a checkout "dirty"
UNCOUNTED = {  # modules that a run imports but that change no number in its record -> the reason
    "kvbench.atomic": "renames files into place",
    "kvbench.threads": "does work in threads, in order",
    "kvbench.stops": "stops the work on a signal",
    "kvbench.network": "finds out whether data can be downloaded; the run's fingerprint covers the data",
    "kvbench.analysis.solvable_subtasks": "chooses subtasks for tables of existing records",
    "kvbench.runs.checks": "refuses settings; the accepted ones are in the run's identity",
    "kvbench.models.gguf": "converts weights; the model's identity covers them",
    "kvbench.models.local_models": "names the folder of converted models",
    "kvbench.store.record": "names the fields of a record and refuses others",
    "kvbench.config.provenance": "names runs",
    "kvbench.config.imports": "names runs",
    "kvbench.store.run_folder": "writes records; a change of a file's format changes the format's number",
    "kvbench.config.paths": "names folders",
}
_hashes: dict[object, tuple[dict[str, object], dict[str, str]]] = {}  # request -> stamps of its files, hashes
_reported: set[str] = set()  # places that cannot be followed and were printed: each once in a process


def source_hash(modules: Iterable[str]) -> str:
    """Return 16 hex digits over the sources of some modules and everything that they import.

    Args:
        modules: Full names, such as "kvbench.methods.snapkv".

    Raises:
        SettingError: A module does not exist or belongs to a dependency.
    """
    return hash_text("".join(f"{name} {digits}\n" for name, digits in source_hashes(modules).items()))


def source_hashes(modules: Iterable[str]) -> dict[str, str]:
    """Return the parts of `source_hash`: one entry for each module and each installed package.

    The hash of a module depends on its name and its syntax, not on the folder of the checkout. The result is cached
    until the size, inode or time of one of the files changes.

    Args:
        modules: Full names, such as "kvbench.methods.snapkv".

    Returns:
        Module name -> 16 hex digits, followed by "package version" -> "". Modules and packages are sorted.

    Raises:
        SettingError: A module does not exist or belongs to a dependency.
    """
    with sources_unchanging():
        return dict(_hash_request((tuple(sorted(set(modules))), tuple(sys.path), tuple(kvbench.__path__))))


@look_up_once
def _hash_request(request: tuple[tuple[str, ...], ...]) -> dict[str, str]:
    modules, (stamps, hashes) = request[0], _hashes.get(request, ({}, {}))
    if not stamps or any(_stamp(path) != stamp for path, stamp in stamps.items()):
        followed = follow_imports(modules)
        counted = set(followed)
        for folder in FOLDERS & {".".join(module.split(".")[:2]) for module in followed}:
            counted |= {f"{folder}.{name}" for name in list_members(folder)} - UNCOUNTED.keys()
        imported = set().union(*(list_imports(module) for module in counted - {"kvbench"}))
        packages = find_packages(imported) - find_packages(modules)
        hashes = {name: _hash_module(name) for name in sorted(counted)} | dict.fromkeys(sorted(packages), "")
        files = {file for module in counted for file in list_files(module)}
        paths = {str(path) for file in files for path in (file, file.parent)}
        _hashes[request] = {path: _stamp(path) for path in paths}, hashes
        if new := [place for place in find_unfollowed(followed) if place not in _reported]:
            _reported.update(new)
            line = f"kvbench: a run's hash does not cover the code that these execute: {', '.join(new)}"
            print(line, file=sys.stderr)
    return hashes


def follow_imports(modules: Iterable[str]) -> set[str]:
    """Return `modules` and all sources that they import, directly or not, with the packages that contain them.

    Sources are the modules of kvbench without those of `UNCOUNTED`, modules that nobody installed, and modules of the
    distributions that installed `modules`.

    Raises:
        SettingError: A module does not exist or belongs to a dependency.
    """
    followed: set[str] = set()
    waiting = list(modules)
    with sources_unchanging():
        owners = {"", *find_packages(waiting)}
        for module in waiting:
            if not list_files(module) or find_owner(module) not in owners:
                raise SettingError(f"{module}: a module of kvbench, or of a package that kvbench does not depend on")
        while waiting:
            if (module := waiting.pop()) not in followed:
                followed.add(module)
                # Every module imports its parent `kvbench`. What that loads lazily counts where it is imported by name.
                names = list_imports(module) - followed - UNCOUNTED.keys() if module != "kvbench" else ()
                waiting += [name for name in names if list_files(name) and find_owner(name) in owners]
    return followed


def find_packages(modules: Iterable[str]) -> set[str]:
    """Return "name version" of the distributions that installed these modules, without kvbench's dependencies."""
    with sources_unchanging():
        owners = {owner for module in modules if (owner := find_owner(module))}
    return {owner for owner in owners if owner.split()[0] not in read_dependencies()}


@look_up_once
def _hash_module(module: str) -> str:
    """Return the hash of a module's files: of the syntax of Python's, of every byte of others."""
    parts = []
    for file in list_files(module):
        content = file.read_bytes()
        digest = read_source(content).digest if file.suffix == ".py" else hashlib.sha256(content).hexdigest()
        parts.append(f"{file.name}\n{digest}\n")
    return hash_text("".join(parts))


@look_up_once
def _stamp(path: str) -> object:
    """Return a value that changes when the file, or the list of names in the folder, changes; None if it is missing."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def replay_hash() -> str:
    """Return 16 hex digits over the data of the replay net (tests/replay), or "" if this copy does not include it.

    The data changes only when kvbench computes something else. A published result carries this hash beside the hash of
    its sources. As long as this hash is the same, moving or renaming files has not affected the result.
    """
    files = [REPLAY / name for name in ("cells.jsonl", "runs.jsonl")]
    if not all(file.is_file() for file in files):
        return ""
    return hash_text("".join(hashlib.sha256(file.read_bytes()).hexdigest() for file in files))


def content_hash(path: Path) -> str:
    """Return 16 hex digits over a file, or over the names and contents of the files in a folder, without subfolders."""
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file()):
        content = file.read_bytes()
        name = "" if file == path else file.name
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


find_installed_version = cache(version)  # version of a package; reads its metadata once


@cache
def find_revision(root: Path = ROOT) -> str:
    """Return the revision of the code in `root`.

    Returns:
        "git <40 hex digits>" in a checkout, with " dirty" appended if its code has uncommitted changes; "version <n>"
        if `root` is not a checkout or git is missing.
    """
    try:
        top, commit = _git(root, "rev-parse", "--show-toplevel", "HEAD").split("\n")
        if Path(top) == root:
            return f"git {commit}{' dirty' if _git(root, 'status', '--porcelain', '--', *CODE) else ''}"
    except (OSError, subprocess.CalledProcessError):
        pass
    return f"version {find_version(root)}"


def find_version(root: Path = ROOT) -> str:
    """Return the version of kvbench: from pyproject.toml in a checkout, from the package's metadata otherwise."""
    return read_project(root)["version"] if IS_CHECKOUT else version("kvbench")


def _git(root: Path, *arguments: str) -> str:
    """Return git's output for the folder `root`.

    The call works if another user owns the folder, and ignores a repository that the environment names.
    """
    command = ["git", "--no-optional-locks", "-c", f"safe.directory={root}", "-C", str(root), *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


@cache
def read_dependencies() -> frozenset[str]:
    """Return the packages that kvbench requires without its extras, with names normalised as in Python packaging.

    They come from pyproject.toml in a checkout and from the package's metadata in a wheel.
    """
    if IS_CHECKOUT:
        lines = read_project(ROOT)["dependencies"]
    else:
        lines = [line for line in requires("kvbench") or [] if "extra ==" not in line]
    return frozenset(normalise(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in lines)


def read_project(root: Path) -> dict[str, Any]:
    """Return the table `[project]` of a checkout's pyproject.toml."""
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]

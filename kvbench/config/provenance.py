"""Which sources can change a result: a hash of modules and of all that they import; and the revision of all of them.

A Python source counts by what it does, not by what it says (kvbench.config.syntax): rewording a docstring, a comment or
an error keeps every run's name. Modules of `UNCOUNTED` do not count, since they compute nothing that a record holds.

The walk is static (ast; nothing is imported) and covers imports inside functions. It follows kvbench's own modules and
every other module that is not installed: files beside the method, on PYTHONPATH, in an editable install. The standard
library and the dependencies that pyproject.toml names do not count (machine.json has their versions); any other
installed package counts by name and version. A kernel's package counts with all its files but its prose, since its
`__init__.py` may choose the implementation by name at run time. Any other package counts with its `__init__.py` and
the modules that are imported, Python or compiled; the walk does not look for data files that it reads. One line on
stderr names the places that a static walk cannot follow, such as `importlib.import_module(name)`.
"""

import ast
import hashlib
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, requires, version
from importlib.util import find_spec, resolve_name
from pathlib import Path
from pkgutil import iter_modules
from site import getsitepackages, getusersitepackages
from typing import Any, TypeVar, cast

import kvbench
from kvbench.config.paths import IS_CHECKOUT, REPLAY, ROOT
from kvbench.config.syntax import canonicalize

NO_SOURCE = (".md", ".pyc")
CODE = ("kvbench", "kernels", "methods", "tasks", "conf", "run.py")  # of a checkout
STANDARD = tuple({Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")})
SITES = tuple(Path(folder).resolve() for folder in (*getsitepackages(), getusersitepackages()))
UNFOLLOWED = {  # calls that execute sources which no import statement names
    *("exec", "eval", "__import__", "import_module", "run_path", "run_module", "spec_from_file_location"),
    *("SourceFileLoader", "SourcelessFileLoader", "ExtensionFileLoader", "zipimporter"),
    *("CDLL", "PyDLL", "LoadLibrary", "load_library", "load_inline"),
}
# one loads files of lm-eval, a dependency; the other looks for data, which a run's fingerprint counts
KNOWN = {"kvbench.tasks.ruler.lm_eval_port", "kvbench.tasks.ruler.sentences"}

Found = TypeVar("Found")

UNCOUNTED = {  # modules that runs import and that change no number of a record -> why
    "kvbench.atomic": "renames files into place",
    "kvbench.analysis.solvable_subtasks": "chooses subtasks for tables of records that are there",
    "kvbench.runs.checks": "refuses settings; those that are accepted are in the run's value",
    "kvbench.models.gguf": "converts weights, which the model's identity counts",
    "kvbench.models.local_models": "names the folder of converted models",
    "kvbench.store.record": "names the fields of a record and refuses others",
    "kvbench.config.provenance": "names runs",
    "kvbench.store.run_folder": "writes records; a file that it writes otherwise has another format's number",
    "kvbench.config.syntax": "names runs",
    "kvbench.config.paths": "names folders",
}
_hashes: dict[object, tuple[dict[Path, object], dict[str, str]]] = {}  # what was asked for -> files' stamps, hashes
_unchanging: dict[Any, Any] | None = None  # inside `sources_unchanging`: what was found
_reported: set[str] = set()  # places that a line on stderr has named


@contextmanager
def sources_unchanging() -> Iterator[None]:
    """Inside, every source is read once, because a sweep asks for the hashes of hundreds of runs at one moment."""
    global _unchanging
    before, _unchanging = _unchanging, {} if _unchanging is None else _unchanging
    try:
        yield
    finally:
        _unchanging = before


def _read_once(read: Callable[[str], Found]) -> Callable[[str], Found]:
    """Decorate a function of a module's name so that it is asked once a module inside `sources_unchanging`."""

    @wraps(read)
    def asked(module: str) -> Found:
        if _unchanging is None:
            return read(module)
        if (key := (read, module)) not in _unchanging:
            _unchanging[key] = read(module)
        return cast(Found, _unchanging[key])

    return asked


def source_hash(modules: Iterable[str]) -> str:
    """Return 16 hex digits over the sources of `modules` (e.g. "kvbench.methods.snapkv") and what they import.

    Raises:
        ValueError: A module is not there or is installed.
    """
    return _short("".join(f"{name} {own}\n" for name, own in source_hashes(modules).items()))


def source_hashes(modules: Iterable[str]) -> dict[str, str]:
    """Return what `source_hash` is made of: names of modules, and of installed packages with their versions, in order,
    each with 16 hex digits ("" for a package).

    A module's name and what it does count, the place of the checkout does not. The hashes are made anew only where a
    file has changed since, by its size, inode or time.
    """
    asked = tuple(sorted(set(modules))), tuple(sys.path), tuple(kvbench.__path__)
    stamps, found = _hashes.get(asked, ({}, {}))
    if stamps and _unchanging is not None and asked in _unchanging:
        return dict(found)
    if not stamps or any(_stamp(path) != own for path, own in stamps.items()):
        files, followed = set(), map_imports(asked[0])
        found = {}
        for module in sorted(followed):
            parts = []
            for file in _files(module):
                parts.append(f"{file.name}\n{_content(file)}\n")
                files |= {file, file.parent}
            found[module] = _short("".join(parts))
        found |= dict.fromkeys(sorted(find_packages(set().union(*followed.values()))), "")
        _hashes[asked] = {path: _stamp(path) for path in files}, found
        _report_unfollowed(followed)
    if _unchanging is not None:
        _unchanging[asked] = None
    return dict(found)


def replay_hash() -> str:
    """Return 16 hex digits over the data of the replay net (tests/replay), "" where that is not part of the copy.

    The data changes only with what kvbench computes. A published result carries this hash beside that of its sources:
    while it stays, a later move or renaming of files has changed nothing that the result depends on.
    """
    files = [REPLAY / name for name in ("cells.jsonl", "runs.jsonl")]
    if not all(file.is_file() for file in files):
        return ""
    return _short("".join(hashlib.sha256(file.read_bytes()).hexdigest() for file in files))


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _content(file: Path) -> str:
    """What counts of a file: of Python what it does, of anything else every byte."""
    content = file.read_bytes()
    return _canonical(content) if file.suffix == ".py" else hashlib.sha256(content).hexdigest()


@cache
def _canonical(source: bytes) -> str:
    return _short(canonicalize(source))


def _stamp(path: Path) -> object:
    """What changes with a file, or with the names in a folder."""
    try:
        own = path.stat()
    except OSError:
        return None
    return own.st_mtime_ns, own.st_size, own.st_ino


def _report_unfollowed(followed: Iterable[str]) -> None:
    """Name what cannot be followed, each place once a process."""
    new = [place for place in find_unfollowed(followed) if place not in _reported]
    if new:
        _reported.update(new)
        print(f"kvbench: what these execute is not part of a run's hash: {', '.join(new)}", file=sys.stderr)


def content_hash(path: Path) -> str:
    """16 hex digits over a file, or over the files right in a folder and their names."""
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file()):
        content = file.read_bytes()
        name = "" if file == path else file.name
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


find_installed_version = cache(version)  # a package's version; its metadata is read once


@cache
def find_revision(root: Path = ROOT) -> str:
    """`git <40 hex digits>` of the checkout, with ` dirty` behind it where its code has changed since; `version <n>`
    where it is none, or git is missing.
    """
    try:
        top, commit = _git(root, "rev-parse", "--show-toplevel", "HEAD").split("\n")
        if Path(top) == root:
            return f"git {commit}{' dirty' if _git(root, 'status', '--porcelain', '--', *CODE) else ''}"
    except (OSError, subprocess.CalledProcessError):
        pass
    return f"version {find_version(root)}"


def find_version(root: Path = ROOT) -> str:
    """Return the version of kvbench: from pyproject.toml in a checkout, else from what pip wrote down."""
    return read_project(root)["version"] if IS_CHECKOUT else version("kvbench")


def _git(root: Path, *arguments: str) -> str:
    """What git says of the folder `root`, whoever owns it, and whatever repository the environment names."""
    command = ["git", "--no-optional-locks", "-c", f"safe.directory={root}", "-C", str(root), *arguments]
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(command, env=own, capture_output=True, text=True, check=True).stdout.strip()


def follow_imports(modules: Iterable[str]) -> set[str]:
    """`modules`, the modules that they import from kvbench or from files that are not installed, and so on; with them
    every package that they lie in. Modules of `UNCOUNTED` are only there if they are among `modules`.
    """
    return set(map_imports(modules))


def map_imports(modules: Iterable[str]) -> dict[str, set[str]]:
    """The same, with what each module imports."""
    found: dict[str, set[str]] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module in found:
            continue
        if not _files(module):
            raise ValueError(f"{module} is no module of kvbench, nor of files that are not installed")
        found[module] = set()
        if module != "kvbench":  # every module's parent; what it offers on demand belongs to whoever asks for it
            found[module] = list_imports(module)
            waiting += [name for name in found[module] - UNCOUNTED.keys() if _files(name)]
    return found


def find_packages(names: Iterable[str]) -> set[str]:
    """ "name version" of the installed packages that these modules belong to, but for kvbench's dependencies."""
    found = {_owner(file) for name in {_installed_as(own) for own in names} if (file := _origin(name)) is not None}
    return {owner for owner in found if owner is not None and owner.split()[0] not in read_dependencies()}


@cache
def read_dependencies() -> frozenset[str]:
    """Return the packages that kvbench requires without its extras, as packaging normalises names.

    A checkout names them in pyproject.toml, a wheel in its metadata.
    """
    if IS_CHECKOUT:
        lines = read_project(ROOT)["dependencies"]
    else:
        lines = [line for line in requires("kvbench") or [] if "extra ==" not in line]
    return frozenset(_normalise(re.match(r"[\w.-]+", line)[0]) for line in lines)


def read_project(root: Path) -> dict[str, Any]:
    """Return what a checkout's pyproject.toml says of the project."""
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


def find_unfollowed(modules: Iterable[str]) -> list[str]:
    """The places in methods, tasks and files outside of kvbench where something is executed that no import names."""
    found = []
    for module in sorted(set(modules) - KNOWN):
        if module.split(".")[0] == "kvbench" and module.split(".")[1:2] not in (["methods"], ["tasks"]):
            continue
        for file in _files(module):
            if file.suffix == ".py":
                content = file.read_bytes()
                found += [f"{call}() in {file.name}, line {line}" for line, call in _find_references(content).calls]
                tried = _find_references(content).tried
                package = _package(module)
                origins = {origin for origin, _ in _resolve_imports(content, package)} - tried
                found += [f"import {name} in {file.name}" for name in sorted(origins) if _is_missing(name)]
            elif file.suffix == ".pyc":
                found.append(str(file.name))
    return found


@_read_once
def list_imports(module: str) -> set[str]:
    """What a followed module imports directly, by full name ("kvbench.interfaces.rows", "torch.nn").

    For a kernel's package: what any of its files imports. Importing a.b.c imports a and a.b too.
    """
    names: set[str] = set()
    for file in _files(module):
        if file.suffix != ".py":
            continue
        for origin, parts in _resolve_imports(file.read_bytes(), _package(module)):
            names.add(origin)
            parts = _modules_in(origin) if "*" in parts else parts
            names.update(f"{origin}.{part}" for part in parts if _files(f"{origin}.{part}"))
    for name in [module, *names]:
        parts = name.split(".")
        names.update(".".join(parts[:end]) for end in range(1, len(parts)))
    return {name for name in names if name != module and (name.split(".")[0] != "kvbench" or _files(name))}


@dataclass(frozen=True)
class SourceReferences:
    """What a source says of other sources."""

    imports: tuple[tuple[int, str, tuple[str, ...]], ...]  # dots in front, origin, and for `from` what of it
    tried: frozenset[str]  # imports that may fail, inside `try`
    calls: tuple[tuple[int, str], ...]  # line, name: what cannot be followed


@cache
def _find_references(source: bytes) -> SourceReferences:
    found: list[tuple[int, str, tuple[str, ...]]] = []
    calls: list[tuple[int, str]] = []
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    inside = [own for node in nodes if isinstance(node, ast.Try) for line in node.body for own in ast.walk(line)]
    aliases = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(0, alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or "", tuple(alias.name for alias in node.names)))
            aliases |= {alias.asname: alias.name for alias in node.names if alias.asname}
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        called = aliases.get(called, called)
        if called not in UNFOLLOWED or called in ("eval", "exec") and isinstance(node.func, ast.Attribute):
            continue  # model.eval()
        names = [own.value for own in node.args[:1] if isinstance(own, ast.Constant)]
        if called in ("__import__", "import_module") and names and str(names[0])[:1] != ".":
            found.append((0, str(names[0]), ()))
        else:
            calls.append((node.lineno, called))
    tried = {name for node in inside if isinstance(node, ast.Import) for name in (own.name for own in node.names)}
    tried |= {node.module for node in inside if isinstance(node, ast.ImportFrom) and node.module}
    return SourceReferences(tuple(found), frozenset(tried), tuple(calls))


def _resolve_imports(source: bytes, package: str) -> list[tuple[str, tuple[str, ...]]]:
    """What a source in this package imports: full names, and for `from` what of it."""
    return [
        (resolve_name("." * level + origin, package) if level else origin, parts)
        for level, origin, parts in _find_references(source).imports
    ]


def _package(module: str) -> str:
    return module if _is_package(module) else module.rpartition(".")[0]


def _is_package(module: str) -> bool:
    return any(file.name == "__init__.py" for file in _files(module))


@_read_once
def _files(module: str) -> list[Path]:
    """The files of a followed module: one, or all of a kernel's package; none for what is not followed, and for a
    folder without `__init__.py`.
    """
    first, *rest = module.split(".")
    if first != "kvbench":
        file = _origin(_installed_as(module))
        if file is None or not _is_own(file):  # torch, and so torch.nn
            return []
        file = _origin(module)
        return [file] if file is not None and _is_own(file) else []
    for root in map(Path, kvbench.__path__):
        path = root.joinpath(*rest)
        if path.with_suffix(".py").is_file() and rest:
            return [path.with_suffix(".py")]
        if (path / "__init__.py").is_file():
            if rest[:1] != ["kernels"]:
                return [path / "__init__.py"]  # its modules count by name
            files = (file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
            return sorted(file for file in files if file.suffix not in NO_SOURCE)
    return []


def _installed_as(module: str) -> str:
    """The package that decides whether a module below it is installed; a namespace's modules decide for themselves."""
    top, _, rest = module.partition(".")
    return module if rest and _origin(top) is None and _spec(top) is not None else top


def _spec(module: str) -> ModuleSpec | None:
    """Where a module lies, as an import would find it; no module is imported for that."""
    known = getattr(sys.modules.get(module), "__spec__", None)
    if known is not None:
        return known
    parent, _, last = module.rpartition(".")
    try:
        if not parent:
            return find_spec(module)
        above = _spec(parent)
        folders = above and above.submodule_search_locations
        return PathFinder.find_spec(last, list(folders)) if folders else None
    except (ImportError, ValueError, AttributeError):
        return None


def _origin(module: str) -> Path | None:
    """The file of a module outside of kvbench; None for one that is built in, not there, or a namespace."""
    spec = None if module.split(".")[0] == "kvbench" else _spec(module)
    return Path(spec.origin) if spec is not None and spec.has_location and Path(spec.origin).is_file() else None


def _modules_in(package: str) -> list[str]:
    """Modules that `from package import *` may import: all that lie in it."""
    spec = None if package.split(".")[0] == "kvbench" else _spec(package)
    if spec is None or not spec.submodule_search_locations or not _files(package):
        return []
    return [own.name for own in iter_modules(list(spec.submodule_search_locations))]


def _is_missing(module: str) -> bool:
    """Whether an import finds nothing, unless a path is added first."""
    return module.split(".")[0] not in ("kvbench", "__main__") and _spec(module) is None


@cache
def _is_own(file: Path) -> bool:
    """Whether a file is part of neither the standard library nor an installed package."""
    standard = any(file.resolve().is_relative_to(folder) for folder in STANDARD)
    return not (standard and not {"site-packages", "dist-packages"} & set(file.parts)) and _owner(file) is None


@cache
def _owner(file: Path) -> str | None:
    """ "name version" of the distribution that installed a file; an editable install lists none of its modules."""
    for folder in file.parents:
        relative = file.relative_to(folder).as_posix()
        top = _normalise(relative.split("/")[0].split(".")[0])
        for info in sorted(_infos(folder), key=lambda path: not _normalise(path.name).startswith(top)):
            record, names = info / "RECORD", info / "top_level.txt"
            if record.is_file():
                holds = f"\n{relative}," in f"\n{record.read_text()}"
            else:  # Debian's packages list no files
                holds = (
                    folder.resolve() in SITES and names.is_file() and top in map(_normalise, names.read_text().split())
                )
            if holds:
                found = Distribution.at(info)
                return f"{_normalise(found.name)} {found.version}"
    return None


@cache
def _infos(folder: Path) -> tuple[Path, ...]:
    """What the installer wrote of the packages in a folder."""
    return tuple(sorted(path for path in folder.glob("*-info") if path.suffix in (".dist-info", ".egg-info")))


def _normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()

"""Hash the sources that can change a result, and find the revision of the checkout.

`source_hash` walks from a run's modules to everything that they import and hashes the sources that it meets. The walk
is static: it parses files with `ast`, imports nothing, and includes imports inside functions. A line on stderr names
calls that it cannot follow, such as `importlib.import_module(name)`.

What the hash contains:

* Modules of kvbench; every other module that is not installed: files beside a method, on PYTHONPATH or in an editable
  install; and the installed package that contains a run's method, task or model, if kvbench does not depend on it.
  In a namespace, which has no `__init__.py`, that is what the same distribution installed.
  Python sources are hashed as syntax without comments, docstrings and messages (`kvbench.config.syntax`), so rewording
  one keeps the names of all runs.
* All files of a kernel's package except its prose, because its `__init__.py` may choose the implementation by name at
  run time. Of any other package: `__init__.py` and the imported modules, Python or compiled.
* Other installed packages by name and version, except the dependencies in pyproject.toml, whose versions are in
  machine.json.

It leaves out the standard library, the modules in `UNCOUNTED`, which compute nothing that a record contains, and data
files that a package reads.
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
from kvbench.validation import SettingError

NO_SOURCE = (".md", ".pyc")
CODE = ("kvbench", "kernels", "methods", "tasks", "conf", "run.py")  # paths whose changes make a checkout "dirty"
STANDARD = tuple({Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")})
SITES = tuple(Path(folder).resolve() for folder in (*getsitepackages(), getusersitepackages()))
UNFOLLOWED = {  # calls that can execute a source without an import statement that names it
    *("exec", "eval", "__import__", "import_module", "run_path", "run_module", "spec_from_file_location"),
    *("SourceFileLoader", "SourcelessFileLoader", "ExtensionFileLoader", "zipimporter"),
    *("CDLL", "PyDLL", "LoadLibrary", "load_library", "load_inline"),
}
# These two have calls that cannot be followed but need no report: the first loads files of lm-eval, a dependency; the
# second searches for data, which the run's fingerprint covers.
KNOWN = {"kvbench.tasks.ruler.lm_eval_port", "kvbench.tasks.ruler.sentences"}

Found = TypeVar("Found")

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
    "kvbench.store.run_folder": "writes records; a change of a file's format changes the format's number",
    "kvbench.config.syntax": "names runs",
    "kvbench.config.paths": "names folders",
}
_hashes: dict[object, tuple[dict[Path, object], dict[str, str]]] = {}  # request -> stamps of its files, hashes
_unchanging: dict[Any, Any] | None = None  # cache of `_read_once` and `source_hashes` inside `sources_unchanging`
# installed packages whose modules the walk enters (`enter_packages`): top package, and the distribution in a namespace
_own: frozenset[tuple[str, str | None]] = frozenset()
_reported: set[str] = set()  # places that `_report_unfollowed` has printed


@contextmanager
def sources_unchanging() -> Iterator[None]:
    """Read every source only once inside this context.

    A hash asks for most modules many times, and a sweep computes hundreds of hashes at once. Sources must not change in
    the meantime.
    """
    global _unchanging
    before, _unchanging = _unchanging, {} if _unchanging is None else _unchanging
    try:
        yield
    finally:
        _unchanging = before


def _read_once(read: Callable[[str], Found]) -> Callable[[str], Found]:
    """Cache a function of a module's name inside `sources_unchanging`."""

    @wraps(read)
    def read_cached(module: str) -> Found:
        if _unchanging is None:
            return read(module)
        if (key := (read, module, _own)) not in _unchanging:
            _unchanging[key] = read(module)
        return cast(Found, _unchanging[key])

    return read_cached


@contextmanager
def enter_packages(modules: Iterable[str]) -> Iterator[None]:
    """Enter the installed packages of these modules inside this context, but none that kvbench depends on.

    Inside, the walk treats their modules like those of kvbench, so that the sources of a method count wherever it lies.
    Several distributions may share a namespace, a top package without `__init__.py`. The walk then enters only what the
    module's own distribution installed.
    """
    global _own
    own = set()
    for module in modules:
        top = module.partition(".")[0]
        file = _origin(_installed_as(module))
        owner = None if file is None else _owner(file)
        if top != "kvbench" and owner is not None and owner.split()[0] not in read_dependencies():
            own.add((top, owner if _is_namespace(top) else None))
    before, _own = _own, _own | own
    try:
        yield
    finally:
        _own = before


def source_hash(modules: Iterable[str]) -> str:
    """Return 16 hex digits over the sources of some modules and everything that they import.

    Args:
        modules: Full names, such as "kvbench.methods.snapkv".

    Raises:
        SettingError: A module does not exist or belongs to a dependency.
    """
    return _short("".join(f"{name} {digits}\n" for name, digits in source_hashes(modules).items()))


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
    request = tuple(sorted(set(modules))), tuple(sys.path), tuple(kvbench.__path__)
    stamps, hashes = _hashes.get(request, ({}, {}))
    if stamps and _unchanging is not None and request in _unchanging:
        return dict(hashes)
    if not stamps or any(_stamp(path) != stamp for path, stamp in stamps.items()):
        with sources_unchanging(), enter_packages(request[0]):
            files, followed = set(), map_imports(request[0])
            hashes = {}
            for module in sorted(followed):
                parts = []
                for file in _files(module):
                    parts.append(f"{file.name}\n{_content(file)}\n")
                    files |= {file, file.parent}
                hashes[module] = _short("".join(parts))
            hashes |= dict.fromkeys(sorted(find_packages(set().union(*followed.values()))), "")
            _hashes[request] = {path: _stamp(path) for path in files}, hashes
            _report_unfollowed(followed)
    if _unchanging is not None:
        _unchanging[request] = None
    return dict(hashes)


def replay_hash() -> str:
    """Return 16 hex digits over the data of the replay net (tests/replay), or "" if this copy does not include it.

    The data changes only when kvbench computes something else. A published result carries this hash beside the hash of
    its sources. As long as this hash is the same, moving or renaming files has not affected the result.
    """
    files = [REPLAY / name for name in ("cells.jsonl", "runs.jsonl")]
    if not all(file.is_file() for file in files):
        return ""
    return _short("".join(hashlib.sha256(file.read_bytes()).hexdigest() for file in files))


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _content(file: Path) -> str:
    """Return the hash of a file: of its syntax if it is Python, of every byte otherwise."""
    content = file.read_bytes()
    return _read_source(content)[0] if file.suffix == ".py" else hashlib.sha256(content).hexdigest()


@cache
def _read_source(source: bytes) -> tuple[str, "SourceReferences"]:
    """Return the hash of a source's syntax, and its references to other sources. Both need the tree, parsed once."""
    tree = ast.parse(source)
    return _short(canonicalize(tree)), _find_references(tree)


def _stamp(path: Path) -> object:
    """Return a value that changes when the file, or the list of names in the folder, changes; None if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _report_unfollowed(followed: Iterable[str]) -> None:
    """Print the places that cannot be followed, each place once in a process."""
    new = [place for place in find_unfollowed(followed) if place not in _reported]
    if new:
        _reported.update(new)
        print(f"kvbench: a run's hash does not cover the code that these execute: {', '.join(new)}", file=sys.stderr)


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


def follow_imports(modules: Iterable[str]) -> set[str]:
    """Return `modules` and all modules that they import, directly or not, with the packages that contain them.

    The walk enters modules of kvbench and files that are not installed. It enters a module of `UNCOUNTED` only if
    `modules` names it.

    Raises:
        SettingError: A module does not exist or belongs to a dependency.
    """
    return set(map_imports(modules))


def map_imports(modules: Iterable[str]) -> dict[str, set[str]]:
    """Return, for each module of `follow_imports`, the full names that it imports.

    Raises:
        SettingError: A module does not exist or belongs to a dependency.
    """
    imports: dict[str, set[str]] = {}
    waiting = list(modules)
    with enter_packages(waiting):
        while waiting:
            module = waiting.pop()
            if module in imports:
                continue
            if not _files(module):
                raise SettingError(f"{module}: a module of kvbench, or of a package that kvbench does not depend on")
            imports[module] = set()
            # Every module imports its parent `kvbench`. What that loads lazily counts where it is imported by name.
            if module != "kvbench":
                imports[module] = list_imports(module)
                waiting += [name for name in imports[module] - UNCOUNTED.keys() if _files(name)]
    return imports


def find_packages(names: Iterable[str]) -> set[str]:
    """Return "name version" of the installed packages of these modules, without kvbench's dependencies."""
    others = [module for module in names if not _is_entered(module)]
    files = [_origin(name) for name in {_installed_as(module) for module in others}]
    owners = {_owner(file) for file in files if file is not None}
    return {owner for owner in owners if owner is not None and owner.split()[0] not in read_dependencies()}


@cache
def read_dependencies() -> frozenset[str]:
    """Return the packages that kvbench requires without its extras, with names normalised as in Python packaging.

    They come from pyproject.toml in a checkout and from the package's metadata in a wheel.
    """
    if IS_CHECKOUT:
        lines = read_project(ROOT)["dependencies"]
    else:
        lines = [line for line in requires("kvbench") or [] if "extra ==" not in line]
    return frozenset(_normalise(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in lines)


def read_project(root: Path) -> dict[str, Any]:
    """Return the table `[project]` of a checkout's pyproject.toml."""
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


def find_unfollowed(modules: Iterable[str]) -> list[str]:
    """Return the places that may execute a source which the walk cannot find, as text for a message.

    Only methods, tasks and files outside of kvbench are searched, because users write those.
    """
    places = []
    for module in sorted(set(modules) - KNOWN):
        if module.split(".")[0] == "kvbench" and module.split(".")[1:2] not in (["methods"], ["tasks"]):
            continue
        for file in _files(module):
            if file.suffix == ".py":
                content = file.read_bytes()
                references = _read_source(content)[1]
                places += [f"{call}() in {file.name}, line {line}" for line, call in references.calls]
                package = _package(module)
                origins = {origin for origin, _ in _resolve_imports(content, package)} - references.tried
                places += [f"import {name} in {file.name}" for name in sorted(origins) if _is_missing(name)]
            elif file.suffix == ".pyc":
                places.append(str(file.name))
    return places


@_read_once
def list_imports(module: str) -> set[str]:
    """Return the full names that a module imports directly, such as "kvbench.interfaces.rows" and "torch.nn".

    An import of a.b.c also imports a and a.b. For a kernel's package, the result covers all of its files.
    """
    names: set[str] = set()
    for file in _files(module):
        if file.suffix != ".py":
            continue
        for origin, parts in _resolve_imports(file.read_bytes(), _package(module)):
            names.add(origin)
            members = _modules_in(origin) if "*" in parts else parts
            inside = [f"{origin}.{member}" for member in members]
            # a namespace has no file that could count for the modules inside
            names.update(name for name in inside if _files(name) or _origin(name) is not None and _is_namespace(origin))
    for name in [module, *names]:
        levels = name.split(".")
        names.update(".".join(levels[:end]) for end in range(1, len(levels)))
    return {name for name in names if name != module and (name.split(".")[0] != "kvbench" or _files(name))}


@dataclass(frozen=True)
class SourceReferences:
    """The imports and the calls of a source that lead to other sources."""

    imports: tuple[tuple[int, str, tuple[str, ...]], ...]
    """(number of leading dots, module, names); `names` is empty for `import module`."""
    tried: frozenset[str]
    """Modules that are imported inside `try`, where the import may fail."""
    calls: tuple[tuple[int, str], ...]
    """(line, function) of the calls in `UNFOLLOWED`."""


def _find_references(tree: ast.Module) -> SourceReferences:
    imports: list[tuple[int, str, tuple[str, ...]]] = []
    calls: list[tuple[int, str]] = []
    nodes = list(ast.walk(tree))
    inside = [child for node in nodes if isinstance(node, ast.Try) for line in node.body for child in ast.walk(line)]
    aliases: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            imports += [(0, alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imports.append((node.level, node.module or "", tuple(alias.name for alias in node.names)))
            aliases |= {alias.asname: alias.name for alias in node.names if alias.asname}
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        called = aliases.get(called, called)
        if called not in UNFOLLOWED or called in ("eval", "exec") and isinstance(node.func, ast.Attribute):
            continue  # model.eval()
        names = [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
        if called in ("__import__", "import_module") and names and str(names[0])[:1] != ".":
            imports.append((0, str(names[0]), ()))
        else:
            calls.append((node.lineno, called))
    tried = {alias.name for node in inside if isinstance(node, ast.Import) for alias in node.names}
    tried |= {node.module for node in inside if isinstance(node, ast.ImportFrom) and node.module}
    return SourceReferences(tuple(imports), frozenset(tried), tuple(calls))


def _resolve_imports(source: bytes, package: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return (full name of the module, imported names) for each import of a source that belongs to `package`."""
    return [
        (resolve_name("." * level + origin, package) if level else origin, parts)
        for level, origin, parts in _read_source(source)[1].imports
    ]


def _package(module: str) -> str:
    return module if _is_package(module) else module.rpartition(".")[0]


def _is_package(module: str) -> bool:
    return any(file.name == "__init__.py" for file in _files(module))


@_read_once
def _files(module: str) -> list[Path]:
    """Return the files of a module that the walk enters.

    A module has one file, a kernel's package all of its files. The list is empty for other modules, such as torch, and
    for a folder without `__init__.py`.
    """
    first, *rest = module.split(".")
    if first != "kvbench":
        entered = _is_entered(module)
        if not entered:
            file = _origin(_installed_as(module))
            if file is None or not _is_uninstalled(file):  # torch, and so torch.nn
                return []
        file = _origin(module)
        return [file] if file is not None and (entered or _is_uninstalled(file)) else []
    for root in map(Path, kvbench.__path__):
        path = root.joinpath(*rest)
        if path.with_suffix(".py").is_file() and rest:
            return [path.with_suffix(".py")]
        if (path / "__init__.py").is_file():
            if rest[:1] != ["kernels"]:
                return [path / "__init__.py"]  # the modules inside have names of their own
            files = (file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
            return sorted(file for file in files if file.suffix not in NO_SOURCE)
    return []


def _is_entered(module: str) -> bool:
    """Return whether a module belongs to the installed packages that the walk enters."""
    top = module.partition(".")[0]
    owners = {owner for name, owner in _own if name == top}
    if not owners or None in owners:
        return bool(owners)
    return (file := _origin(module)) is not None and _owner(file) in owners


def _is_namespace(top: str) -> bool:
    """Return whether a top package has no file of its own, so that several distributions may share it."""
    return _origin(top) is None and _spec(top) is not None


def _installed_as(module: str) -> str:
    """Return the module whose file tells whether `module` is installed: the top package, or itself in a namespace."""
    top, _, rest = module.partition(".")
    return module if rest and _is_namespace(top) else top


def _spec(module: str) -> ModuleSpec | None:
    """Return the spec by which an import would find a module, without importing anything."""
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
    """Return the file of a module outside of kvbench; None if it is built in, missing or a namespace."""
    spec = None if module.split(".")[0] == "kvbench" else _spec(module)
    if spec is None or spec.origin is None or not spec.has_location:
        return None
    return path if (path := Path(spec.origin)).is_file() else None


def _modules_in(package: str) -> list[str]:
    """Return the modules that `from package import *` may import: all modules of the package."""
    spec = None if package.split(".")[0] == "kvbench" else _spec(package)
    if spec is None or not spec.submodule_search_locations or not _files(package):
        return []
    return [info.name for info in iter_modules(list(spec.submodule_search_locations))]


def _is_missing(module: str) -> bool:
    """Return whether an import of the module fails as `sys.path` is now."""
    return module.split(".")[0] not in ("kvbench", "__main__") and _spec(module) is None


@cache
def _is_uninstalled(file: Path) -> bool:
    """Return whether a file belongs to neither the standard library nor an installed package."""
    standard = any(file.resolve().is_relative_to(folder) for folder in STANDARD)
    return not (standard and not {"site-packages", "dist-packages"} & set(file.parts)) and _owner(file) is None


@cache
def _owner(file: Path) -> str | None:
    """Return "name version" of the distribution that installed a file, or None.

    Files of an editable install have no owner, because its metadata lists none of its modules.
    """
    for folder in file.parents:
        relative = file.relative_to(folder).as_posix()
        top = _normalise(relative.split("/")[0].split(".")[0])
        for info in sorted(_infos(folder), key=lambda path: not _normalise(path.name).startswith(top)):
            record, names = info / "RECORD", info / "top_level.txt"
            if record.is_file():
                contains = f"\n{relative}," in f"\n{record.read_text()}"
            else:  # Debian's packages have no list of files
                contains = (
                    folder.resolve() in SITES and names.is_file() and top in map(_normalise, names.read_text().split())
                )
            if contains:
                distribution = Distribution.at(info)
                return f"{_normalise(distribution.name)} {distribution.version}"
    return None


@cache
def _infos(folder: Path) -> tuple[Path, ...]:
    """Return the folders of metadata that installers wrote beside the packages of a folder."""
    return tuple(sorted(path for path in folder.glob("*-info") if path.suffix in (".dist-info", ".egg-info")))


def _normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()

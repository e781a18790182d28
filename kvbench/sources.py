"""Which sources can change a result: a hash of modules and of all that they import from kvbench; and the revision of
all of them.

The walk is static (ast; nothing is imported) and covers imports inside functions. A package counts with all its
files but its prose, since a kernel's `__init__.py` may choose its implementation by name at run time.
"""

import ast
import hashlib
import os
import subprocess
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

import kvbench

NO_SOURCE = (".md", ".pyc")
ROOT = Path(__file__).resolve().parents[1]
CODE = ("kvbench", "kernels", "methods", "tasks", "conf", "run.py")  # of a checkout


def source_hash(modules: Iterable[str]) -> str:
    """16 hex digits over the sources of `modules` (e.g. "kvbench.methods.snapkv") and what they import, transitively.

    A module's name and its bytes count, the place of the checkout does not.
    """
    digest = hashlib.sha256()
    for module in sorted(closure(modules)):
        for file in _files(module):
            content = file.read_bytes()
            digest.update(f"{module} {file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def content_hash(path: Path) -> str:
    """16 hex digits over a file, or over the files right in a folder and their names."""
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file()):
        content = file.read_bytes()
        name = "" if file == path else file.name
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


@cache
def revision(root: Path = ROOT) -> str:
    """`git <40 hex digits>` of the checkout, with ` dirty` behind it where its code has changed since; `version <n>`
    where it is none, or git is missing.
    """
    try:
        top, commit = _git(root, "rev-parse", "--show-toplevel", "HEAD").split("\n")
        if Path(top) == root:
            return f"git {commit}{' dirty' if _git(root, 'status', '--porcelain', '--', *CODE) else ''}"
    except (OSError, subprocess.CalledProcessError):
        pass
    return f"version {tomllib.loads((root / 'pyproject.toml').read_text())['project']['version']}"


def _git(root: Path, *arguments: str) -> str:
    """What git says of the folder `root`, whoever owns it, and whatever repository the environment names."""
    command = ["git", "--no-optional-locks", "-c", f"safe.directory={root}", "-C", str(root), *arguments]
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(command, env=own, capture_output=True, text=True, check=True).stdout.strip()


def closure(modules: Iterable[str]) -> set[str]:
    """`modules`, the kvbench modules that they import, and so on; with them every package that they lie in."""
    found: set[str] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module in found:
            continue
        if not _files(module):
            raise ValueError(f"{module} is no module of kvbench")
        found.add(module)
        if module != "kvbench":  # every module's parent; what it offers on demand belongs to whoever asks for it
            waiting += [name for name in imports(module) if name.split(".")[0] == "kvbench"]
    return found


def imports(module: str) -> set[str]:
    """What a kvbench module imports directly: modules of kvbench, and others by full name ("torch.nn").

    For a package: what any of its files imports. Importing a.b.c imports a and a.b too.
    """
    names: set[str] = set()
    for file in _files(module):
        if file.suffix != ".py":
            continue
        package = module if _is_package(module) else module.rpartition(".")[0]
        for origin, parts in _named(file.read_bytes(), package):
            names.add(origin)
            names.update(f"{origin}.{part}" for part in parts if _files(f"{origin}.{part}"))
    for name in [module, *names]:
        parts = name.split(".")
        names.update(".".join(parts[:end]) for end in range(1, len(parts)))
    return {name for name in names if name != module and (name.split(".")[0] != "kvbench" or _files(name))}


@cache
def _named(source: bytes, package: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """What a source in this package imports: full names, and for `from` what of it."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module
            found.append((origin, tuple(alias.name for alias in node.names)))
    return tuple(found)


def _is_package(module: str) -> bool:
    return any(file.name == "__init__.py" for file in _files(module))


def _files(module: str) -> list[Path]:
    """The files of a kvbench module: one, or all of a package's; none for a folder without `__init__.py`."""
    first, *rest = module.split(".")
    if first != "kvbench":
        return []
    for root in map(Path, kvbench.__path__):
        path = root.joinpath(*rest)
        if path.with_suffix(".py").is_file() and rest:
            return [path.with_suffix(".py")]
        if (path / "__init__.py").is_file():
            if not rest:
                return [path / "__init__.py"]  # kvbench itself holds everything; its other files count by name
            files = (file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
            return sorted(file for file in files if file.suffix not in NO_SOURCE)
    return []

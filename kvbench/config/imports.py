"""Find what a module imports and where it lies, without importing anything.

`list_imports` reads imports from the syntax of a source, inside functions too. `find_unfollowed` names the calls that
cannot be followed in this way, such as `importlib.import_module(name)`.
"""

import ast
import hashlib
import re
import sys
import sysconfig
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, wraps
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, distributions
from importlib.util import find_spec, resolve_name
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, NamedTuple, TypeVar

import kvbench
from kvbench.config.syntax import canonicalize

STANDARD = tuple({Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")})
SITES = {"site-packages", "dist-packages"}  # names of the folders that installers write into
UNFOLLOWED = {  # calls that can execute a source without an import statement that names it
    *("exec", "eval", "__import__", "import_module", "run_path", "run_module", "spec_from_file_location"),
    *("SourceFileLoader", "SourcelessFileLoader", "ExtensionFileLoader", "zipimporter"),
    *("CDLL", "PyDLL", "LoadLibrary", "load_library", "load_inline"),
}
MAY_CALL = re.compile(rb"\b(?:" + "|".join(UNFOLLOWED).encode() + rb")\b")
# These two have calls that cannot be followed but need no report: the first loads files of lm-eval, a dependency; the
# second searches for data, which the run's fingerprint covers.
KNOWN = {"kvbench.tasks.ruler.lm_eval_port", "kvbench.tasks.ruler.sentences"}
BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")  # fields of statements that hold further statements

Asked = TypeVar("Asked", bound=Hashable)
Found = TypeVar("Found")
_found: dict[Any, Any] = {}  # cache of `look_up_once`
_contexts = 0  # number of `sources_unchanging` that are open


@contextmanager
def sources_unchanging() -> Iterator[None]:
    """Look up every module, and read its files, only once inside this context.

    A hash asks for most modules many times, and a sweep computes hundreds of hashes at once. Sources must not change in
    the meantime.
    """
    global _contexts
    _contexts += 1
    try:
        yield
    finally:
        _contexts -= 1
        if not _contexts:
            _found.clear()


def look_up_once(look_up: Callable[[Asked], Found]) -> Callable[[Asked], Found]:
    """Cache a function of one argument inside `sources_unchanging`."""

    @wraps(look_up)
    def find(asked: Asked) -> Found:
        if not _contexts:
            return look_up(asked)
        if (key := (look_up, asked)) not in _found:
            _found[key] = look_up(asked)
        return _found[key]

    return find


@look_up_once
def list_imports(module: str) -> frozenset[str]:
    """Return the full names that a module imports directly, such as "kvbench.interfaces.rows" and "torch.nn".

    An import of a.b.c also imports a and a.b. For a kernel's package, the result covers all of its files. Modules that
    do not exist are left out.
    """
    names = {module}
    for name, _ in _read_imports(module):
        origin, star, _ = name.partition(".*")
        names |= {origin, *(f"{origin}.{member}" for member in (list_members(origin) if star else []))}
    names |= {name[: dot.start()] for name in names for dot in re.finditer(r"\.", name)}
    return frozenset(name for name in names - {module} if list_files(name) or not _is_ours(name) and _find_spec(name))


@look_up_once
def _read_imports(module: str) -> list[tuple[str, bool]]:
    """Return the imports of a module's files as `Source.imports` does, with full names."""
    files = list_files(module)
    package = module if any(file.name == "__init__.py" for file in files) else module.rpartition(".")[0]
    sources = [read_source(file.read_bytes()) for file in files if file.suffix == ".py"]
    imports = []
    for name, needed in (entry for source in sources for entry in source.imports):
        with suppress(ImportError):  # from . in a file that is in no package: Python refuses it, too
            imports.append((resolve_name(name, package), needed))
    return imports


def find_unfollowed(modules: Iterable[str]) -> list[str]:
    """Return the places that may execute a source which `list_imports` does not name, as text for a message.

    Only methods, tasks and files outside of kvbench are searched, because users write those.
    """
    places = []
    for module in sorted(set(modules) - KNOWN):
        if _is_ours(module) and module.split(".")[1:2] not in (["methods"], ["tasks"]):
            continue
        imports = _read_imports(module)
        names = {name for name, needed in imports if needed} - {name for name, needed in imports if not needed}
        missing = [name for name in sorted(names - {"__main__"}) if not _is_ours(name) and _find_spec(name) is None]
        for file in list_files(module):
            calls = read_source(file.read_bytes()).calls if file.suffix == ".py" else ()
            places += [f"{call}() in {file.name}, line {line}" for line, call in calls]
            places += [file.name] if file.suffix == ".pyc" else [f"import {name} in {file.name}" for name in missing]
    return places


class Source(NamedTuple):
    """A Python source, as far as hashes depend on it.

    Attributes:
        digest: The hash of its syntax.
        imports: (name, whether a module of that name must exist). Names begin with dots where the source has them, and
            end with ".*" for all members. Inside `try` a module may be missing, and a member need not be a module.
        calls: (line, function) of the calls in `UNFOLLOWED`.
    """

    digest: str
    imports: list[tuple[str, bool]]
    calls: list[tuple[int, str]]


@cache
def read_source(content: bytes) -> Source:
    """Parse a source, once in a process."""
    tree = ast.parse(content)
    imports, calls = list(_find_imports(tree)), []
    for line, called, argument in _find_calls(tree) if MAY_CALL.search(content) else ():
        if called in ("__import__", "import_module") and argument and not argument.startswith("."):
            imports.append((argument, True))
        else:
            calls.append((line, called))
    return Source(hash_text(canonicalize(tree)), imports, calls)


def _find_imports(node: ast.AST, tried: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield the imports of a statement and of those inside of it. Expressions, which hold none, are not searched."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, not tried) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        origin = "." * node.level + (node.module or "")
        yield origin, not tried
        yield from ((f"{origin}.{alias.name}" if node.module else origin + alias.name, False) for alias in node.names)
    for field in BLOCKS:
        for child in getattr(node, field, ()):
            yield from _find_imports(child, tried or isinstance(node, ast.Try | ast.TryStar) and field == "body")


def _find_calls(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield (line, function, first argument if it is a literal text) of the calls in `UNFOLLOWED`."""
    nodes = list(ast.walk(tree))
    aliases = {alias.asname: alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.Call):
            is_attribute = isinstance(node.func, ast.Attribute)
            name = getattr(node.func, "attr" if is_attribute else "id", "")
            called = aliases.get(name, name)
            if called in UNFOLLOWED and not (is_attribute and called in ("eval", "exec")):  # model.eval()
                first = getattr(node.args[0], "value", None) if node.args else None
                yield node.lineno, called, first if isinstance(first, str) else ""


@look_up_once
def list_files(module: str) -> tuple[Path, ...]:
    """Return the files of a module: of a kernel's package all, of a namespace and of a missing module none."""
    spec = _find_spec(module)
    if spec is None or spec.origin is None or not spec.has_location or not (file := Path(spec.origin)).is_file():
        return ()
    if file.name != "__init__.py" or not module.startswith("kvbench.kernels."):
        return (file,)
    files = (file for file in file.parent.iterdir() if file.is_file() and not file.name.startswith("."))
    return tuple(sorted(file for file in files if file.suffix not in (".md", ".pyc")))


def list_members(package: str) -> list[str]:
    """Return the names of the modules in a package; of another module none."""
    spec = _find_spec(package)
    return [info.name for info in iter_modules(list(spec and spec.submodule_search_locations or ()))]


@look_up_once
def _find_spec(module: str) -> ModuleSpec | None:
    """Return the spec by which an import would find a module."""
    parent, _, name = module.rpartition(".")
    try:
        if module == "kvbench":
            return PathFinder.find_spec(name, [str(Path(kvbench.__path__[0]).parent)])
        if not _is_ours(module) and (known := getattr(sys.modules.get(module), "__spec__", None)):
            return known
        if not parent:
            return find_spec(module)
        above = _find_spec(parent)
        folders = kvbench.__path__ if parent == "kvbench" else above and above.submodule_search_locations
        return PathFinder.find_spec(name, list(folders)) if folders else None
    except (ImportError, ValueError, AttributeError):
        return None


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == "kvbench"


@look_up_once
def find_owner(module: str) -> str | None:
    """Return "name version" of the distribution that installed a module.

    Returns:
        "" if none did, and for kvbench; None for a module of Python, and for one without files.
    """
    if _is_ours(module):
        return ""
    files = list_files(module.split(".")[0]) or list_files(module)  # distributions may share a namespace
    if not files:
        return None
    standard = any(files[0].resolve().is_relative_to(folder) for folder in STANDARD)
    return None if standard and not SITES & {*files[0].parts} else _find_distribution(files[0])


@cache
def _find_distribution(file: Path) -> str:
    """Return "name version" of the distribution that installed a file, "" if none did.

    None installed the files of an editable install: its metadata lists none of its modules.
    """
    for folder in file.parents:
        installed, relative = _list_installed(folder), file.relative_to(folder)
        if distribution := installed.get(relative.as_posix()) or installed.get(f"{relative.parts[0].split('.')[0]}/"):
            return f"{normalise(distribution.metadata['Name'])} {distribution.version}"
    return ""


@cache
def _list_installed(folder: Path) -> dict[str, Distribution]:
    """Return what the metadata in a folder says to be installed there: file, or top package and "/" -> distribution."""
    installed: dict[str, Distribution] = {}
    for distribution in distributions(path=[str(folder)]):
        if (record := distribution.read_text("RECORD")) is not None:
            installed |= {line.partition(",")[0]: distribution for line in record.split("\n")}
        elif folder.name in SITES:  # Debian's packages have no list of files
            installed |= {f"{name}/": distribution for name in (distribution.read_text("top_level.txt") or "").split()}
    return installed


def normalise(name: str) -> str:
    """Return the name of a distribution as in Python packaging."""
    return re.sub(r"[-_.]+", "-", name).lower()


def hash_text(text: str) -> str:
    """Return 16 hex digits over a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]

"""Imports point one way through the packages (docs/architecture.md), and no test module imports another."""

import ast
import re
import subprocess
import sys

import pytest

from kvbench.config.imports import list_imports, sources_unchanging
from kvbench.config.provenance import follow_imports
from tests.support.modules import MODULE_FILES, find_module_name, is_within
from tests.support.repository import ROOT

# A module may import from its own package and from those above it; who has rules of its own, see RULES.
ORDER = (
    "validation atomic stops threads network",
    "kernels",
    "config",
    "interfaces",
    "cache",
    "models",
    "engine",
    "store",
    "analysis",
    "runs",
    "papers",
    "integrations",
    "sweeps",
    "efficiency",
    "report",
    "training",
    "studies",
    "cli __main__",
)
RANK = {f"kvbench.{name}": rank for rank, names in enumerate(ORDER) for name in names.split()}
RULES = {  # the only modules of kvbench that these know
    "kvbench.kernels": ("kvbench.kernels",),
    "kvbench.methods": ("kvbench.interfaces", "kvbench.kernels", "kvbench.validation"),
    "kvbench.tasks": ("kvbench.interfaces.task", "kvbench.tasks", *(f"kvbench.{name}" for name in ORDER[0].split())),
}
BASES = ("kvbench.methods.codecs.coded_rows",)  # what several codecs derive from, and no codec itself
# These may import a method or a task by its name; all others build them from conf/.
BY_NAME = ("kvbench.efficiency", "kvbench.training", "kvbench.cli")
WITH_TRANSFORMERS = ("kvbench.models", "kvbench.training")
WITHOUT_TORCH = (
    *(f"kvbench.{name}" for name in (*ORDER[0].split(), "config", "store")),
    *("kvbench.analysis", "kvbench.papers"),
    *("kvbench.report", "kvbench.integrations.loggers", "kvbench.integrations.math_verify"),
    *("kvbench.integrations.wandb_logger", "kvbench.integrations.wandb_run", "kvbench.integrations.worker"),
    "kvbench.sweeps.status",
)


def package_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def allowed(module: str, imported: str) -> bool:
    """Whether the arrow may be."""
    if is_within(imported, "transformers"):
        return is_within(module, *WITH_TRANSFORMERS)
    if is_within(imported, "torch", "triton"):
        return not is_within(module, *WITHOUT_TORCH)
    if imported == "kvbench" or not is_within(imported, "kvbench"):
        return True
    if module.endswith(".triton") and imported.endswith(".reference"):
        return False
    if is_within(module, "kvbench.methods") and imported.startswith(f"{module}_"):
        return True  # a part of the same method or codec, in a file named after it
    if is_within(module, "kvbench.methods.codecs") and module not in BASES and imported in BASES:
        return True
    for root, known in RULES.items():
        if is_within(module, root):
            return is_within(imported, *known) or any(
                is_within(name, imported) for name in known
            )  # the latter: a package
    if is_within(imported, "kvbench.methods", "kvbench.tasks"):
        return is_within(module, *BY_NAME)
    if module == "kvbench":
        return True
    return RANK[package_of(imported)] <= RANK[package_of(module)]


MODULES = [find_module_name(path) for path in MODULE_FILES]


@pytest.fixture(scope="module", autouse=True)
def each_source_is_read_once():
    with sources_unchanging():
        yield


@pytest.fixture(scope="module")
def arrows() -> list[tuple[str, str]]:
    """Which module imports which; every source is parsed for it."""
    return [(own, other) for own in MODULES for other in list_imports(own)]


def test_no_arrow_turns_back(arrows):
    assert not [f"{own} → {other}" for own, other in arrows if not allowed(own, other)]


def test_nothing_stands_at_the_top_but_what_all_use():
    """A few base modules, and at most 16 packages, all of them in the order."""
    top = [path for path in (ROOT / "kvbench").iterdir() if path.name != "__pycache__"]
    base = {f"{name}.py" for name in ("__init__", "__main__", *ORDER[0].split())} | {"py.typed"}
    assert {path.name for path in top if path.is_file()} <= base
    folders = {path.name for path in top if path.is_dir() and any(path.glob("*.py"))}
    assert len(folders) <= 16 and {f"kvbench.{name}" for name in folders} <= RANK.keys()


def test_there_is_no_circle_between_modules():
    arrows = {
        module: {
            name
            for name in list_imports(module)
            if name in MODULES and "kvbench" not in (module, name) and not is_within(name, module)
            if not is_within(module, name)
        }
        for module in MODULES
    }
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " → ".join((*above[above.index(module) :], module))
        if module not in done:
            for name in sorted(arrows[module]):
                visit(name, (*above, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


def test_no_import_hides_from_python():
    for path in (own for own in MODULE_FILES if b"TYPE_CHECKING" in own.read_bytes()):
        names = {node.id for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.Name)}
        assert "TYPE_CHECKING" not in names, path


def test_the_rules_forbid_what_they_should():
    forbidden = [
        ("kvbench.engine.context", "kvbench.methods.snapkv"),
        ("kvbench.runs.runner", "kvbench.tasks.ruler.task"),
        ("kvbench.engine.context", "transformers"),
        ("kvbench.methods.snapkv", "kvbench.methods.sink"),
        ("kvbench.methods.codecs.kivi", "kvbench.engine.context"),
        ("kvbench.methods.codecs.kivi", "kvbench.methods.codecs.delta_compressors"),
        ("kvbench.methods.codecs.coded_rows", "kvbench.methods.codecs.fp8"),
        ("kvbench.methods.snapkv", "kvbench.methods.codecs.coded_rows"),
        ("kvbench.methods.snapkv", "transformers.cache_utils"),
        ("kvbench.tasks.ruler.task", "kvbench.interfaces.rows"),
        ("kvbench.tasks.ruler.task", "kvbench.methods.full"),
        ("kvbench.kernels.attention", "kvbench.interfaces.rows"),
        ("kvbench.kernels.attention.triton", "kvbench.kernels.attention.reference"),
        ("kvbench.interfaces.rows", "kvbench.models.checkpoint"),
        ("kvbench.interfaces.method", "kvbench.engine.context"),
        ("kvbench.analysis.closing_table", "torch.nn"),
        ("kvbench.store.run_folder", "kvbench.runs.runner"),
        ("kvbench.report.page", "kvbench.cli.report"),
    ]
    assert [arrow for arrow in forbidden if allowed(*arrow)] == []
    for arrow in (
        ("kvbench.models.checkpoint", "transformers"),
        ("kvbench.methods.snapkv", "kvbench.kernels.window_attention.pooling"),
        ("kvbench.tasks.ruler.task", "kvbench.interfaces"),
        ("kvbench.engine.context", "kvbench.models.checkpoint"),
        ("kvbench.analysis.closing_table", "kvbench.analysis.paired"),
        ("kvbench.training.train", "kvbench.tasks.ruler.task"),
        ("kvbench.engine.modelling", "torch"),
    ):
        assert allowed(*arrow)
    assert not allowed("kvbench.engine.modelling", "transformers")


def list_modules_without_torch() -> list[str]:
    present = [name for name in MODULES if is_within(name, *WITHOUT_TORCH)]
    assert len(present) > 40
    return present


def test_records_are_read_without_torch():
    present = list_modules_without_torch()
    for name in follow_imports(present):
        assert not {imported for imported in list_imports(name) if is_within(imported, "torch", "transformers")}


@pytest.mark.full
def test_no_package_imports_torch_for_those_who_read_records():
    present = list_modules_without_torch()
    code = f"import sys, {', '.join(present)}; sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def imported_tests(text: str) -> set[str]:
    """Names of test modules that a module with this text imports, in whatever way."""
    found: set[str] = set()
    if not any("test_" in own for own in re.findall(r"\b(?:from|import)\b[^()\n]*(?:\([^)]*)?", text)):
        return found  # parsing takes much longer
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        module = getattr(node, "module", None) or ""  # of `from module import names`
        found.update(part for name in (module, *names) for part in name.split(".") if part.startswith("test_"))
    return found


def test_no_test_module_is_imported():
    """What several test modules share lies in tests/support."""
    texts = {path.relative_to(ROOT): path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    assert len(texts) > 50
    assert {path: found for path, text in texts.items() if (found := imported_tests(text))} == {}


@pytest.mark.parametrize(
    "text",
    [
        "import tests.store.test_audit",
        "from tests.store import test_audit as audit",
        "from tests.store.test_audit import lines",
        "def f():\n    from .test_audit import lines",
    ],
)
def test_an_imported_test_module_is_found(text):
    assert imported_tests(text) == {"test_audit"}
    assert imported_tests("from tests.support.checkpoints import test, write_checkpoint") == set()

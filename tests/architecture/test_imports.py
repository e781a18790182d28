"""Imports point one way (DESIGN, "One line through the house"), and no test module imports another."""

import ast
import subprocess
import sys

import pytest

from kvbench.sources import closure, imports
from tests.support.modules import MODULE_FILES, name_of, within
from tests.support.repository import ROOT

RECORDS = (
    "kvbench.atomic",
    "kvbench.store",
    "kvbench.record",
    "kvbench.statistics",
    "kvbench.tables",
    "kvbench.report",
    "kvbench.sources",
    "kvbench.syntax",
    "kvbench.measurements",
    "kvbench.comparison",
    "kvbench.papers",
    "kvbench.frames",
    "kvbench.audit",
    "kvbench.sweep",
    "kvbench.dashboard",
    "kvbench.budget_curve",
    "kvbench.curves",
    "kvbench.figures",
    "kvbench.means",
    "kvbench.metrics",
    "kvbench.rendering",
    "kvbench.repeats",
    "kvbench.stored",
    "kvbench.swept",
    "kvbench.text_table",
    "kvbench.heatmap",
    "kvbench.card",
    "kvbench.catalogue",
    "kvbench.protocol",
    "kvbench.scores",
    "kvbench.contradictions",
    "kvbench.specification",
    "kvbench.beyond",
    "kvbench.wandb_log",
    "kvbench.wandb_run",
)
CONTRACTS = tuple(
    f"kvbench.{own}" for own in ("rows", "observation", "hooks", "method", "allocator", "apportion", "codec")
)
# Who may import what of kvbench (names and all below them); who is not here may import all but methods and tasks.
KNOWS = {
    "kvbench.kernels": ("kvbench.kernels",),
    "kvbench.methods": (*CONTRACTS, "kvbench.kernels", "kvbench.settings"),
    "kvbench.tasks": ("kvbench.task", "kvbench.settings", "kvbench.atomic", "kvbench.tasks"),
    **dict.fromkeys(CONTRACTS, (*CONTRACTS, "kvbench.kernels", "kvbench.settings")),
    **dict.fromkeys(RECORDS, (*RECORDS, "kvbench.settings")),
}


def allowed(module: str, imported: str) -> bool:
    """Whether the arrow may be."""
    if within(imported, "transformers"):
        return within(module, "kvbench.model", "kvbench.gguf_model", "kvbench.reference")
    if within(imported, "torch", "triton"):
        return not within(module, *RECORDS)
    if imported == "kvbench" or not within(imported, "kvbench"):
        return True
    if module.endswith(".triton") and imported.endswith(".reference"):
        return False
    for root, known in KNOWS.items():
        if within(module, root):
            return within(imported, *known)
    if within(module, "kvbench.reference", "kvbench.calibrate"):  # they make files, nothing imports them
        return True
    return not within(imported, "kvbench.methods", "kvbench.tasks")


@pytest.mark.parametrize("module", [name_of(path) for path in MODULE_FILES])
def test_no_arrow_turns_back(module):
    assert not {imported for imported in imports(module) if not allowed(module, imported)}


def test_the_rules_forbid_what_they_should():
    forbidden = [
        ("kvbench.engine", "kvbench.methods.snapkv"),
        ("kvbench.runner", "kvbench.tasks.ruler.task"),
        ("kvbench.engine", "transformers"),
        ("kvbench.methods.snapkv", "kvbench.methods.sink"),
        ("kvbench.methods.codecs.kivi", "kvbench.engine"),
        ("kvbench.methods.snapkv", "transformers.cache_utils"),
        ("kvbench.tasks.ruler.task", "kvbench.rows"),
        ("kvbench.tasks.ruler.task", "kvbench.methods.full"),
        ("kvbench.kernels.attention", "kvbench.rows"),
        ("kvbench.kernels.attention.triton", "kvbench.kernels.attention.reference"),
        ("kvbench.rows", "kvbench.model"),
        ("kvbench.method", "kvbench.engine"),
        ("kvbench.tables", "torch.nn"),
        ("kvbench.store", "kvbench.engine"),
    ]
    assert [arrow for arrow in forbidden if allowed(*arrow)] == []
    for arrow in (
        ("kvbench.model", "transformers"),
        ("kvbench.methods.snapkv", "kvbench.kernels.window_attention.pooling"),
        ("kvbench.engine", "kvbench.model"),
        ("kvbench.tables", "kvbench.statistics"),
        ("kvbench.modelling", "torch"),
    ):
        assert allowed(*arrow)
    assert not allowed("kvbench.modelling", "transformers")


def test_records_are_read_without_torch():
    present = [name for name in RECORDS if name in set(map(name_of, MODULE_FILES))]
    assert len(present) >= 4
    for name in closure(present):
        assert not {imported for imported in imports(name) if within(imported, "torch", "transformers")}
    code = f"import sys, {', '.join(present)}; sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def imported_tests(text: str) -> set[str]:
    """Names of test modules that a module with this text imports, in whatever way."""
    found = set()
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

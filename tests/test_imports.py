"""Imports point one way (DESIGN, "One line through the house"), and the hash of the sources follows them."""

import subprocess
import sys
from pathlib import Path

import pytest

import kvbench
from kvbench.sources import closure, imports, revision, source_hash

ROOT = Path(kvbench.__file__).parents[1]
FILES = sorted(path for folder in ("kvbench", "kernels", "methods", "tasks") for path in (ROOT / folder).rglob("*.py"))
RECORDS = (
    "kvbench.store",
    "kvbench.statistics",
    "kvbench.tables",
    "kvbench.report",
    "kvbench.sources",
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
    "kvbench.catalogue",
    "kvbench.protocol",
    "kvbench.scores",
    "kvbench.contradictions",
    "kvbench.specification",
    "kvbench.beyond",
    "kvbench.wandb_log",
    "kvbench.wandb_run",
)
CONTRACTS = ("kvbench.rows", "kvbench.method", "kvbench.allocator", "kvbench.codec")
# Who may import what of kvbench (names and all below them); who is not here may import all but methods and tasks.
KNOWS = {
    "kvbench.kernels": ("kvbench.kernels",),
    "kvbench.methods": (*CONTRACTS, "kvbench.kernels", "kvbench.settings"),
    "kvbench.tasks": ("kvbench.task", "kvbench.settings", "kvbench.tasks"),
    **dict.fromkeys(CONTRACTS, (*CONTRACTS, "kvbench.kernels", "kvbench.settings")),
    **dict.fromkeys(RECORDS, (*RECORDS, "kvbench.settings")),
}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "kvbench" else ("kvbench", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def within(name: str, *roots: str) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def allowed(module: str, imported: str) -> bool:
    """Whether the arrow may be."""
    if within(imported, "transformers"):
        return within(module, "kvbench.model", "kvbench.reference")
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


@pytest.mark.parametrize("module", [name_of(path) for path in FILES])
def test_no_arrow_turns_back(module):
    assert not {imported for imported in imports(module) if not allowed(module, imported)}


def test_the_rules_forbid_what_they_should():
    forbidden = [
        ("kvbench.engine", "kvbench.methods.snapkv"),
        ("kvbench.runner", "kvbench.tasks.ruler"),
        ("kvbench.engine", "transformers"),
        ("kvbench.methods.snapkv", "kvbench.methods.sink"),
        ("kvbench.methods.codecs.kivi", "kvbench.engine"),
        ("kvbench.methods.snapkv", "transformers.cache_utils"),
        ("kvbench.tasks.ruler", "kvbench.rows"),
        ("kvbench.tasks.ruler", "kvbench.methods.full"),
        ("kvbench.kernels.attend", "kvbench.rows"),
        ("kvbench.kernels.attend.triton", "kvbench.kernels.attend.reference"),
        ("kvbench.rows", "kvbench.model"),
        ("kvbench.method", "kvbench.engine"),
        ("kvbench.tables", "torch.nn"),
        ("kvbench.store", "kvbench.engine"),
    ]
    assert [arrow for arrow in forbidden if allowed(*arrow)] == []
    for arrow in (
        ("kvbench.model", "transformers"),
        ("kvbench.methods.snapkv", "kvbench.kernels.window.pool"),
        ("kvbench.engine", "kvbench.model"),
        ("kvbench.tables", "kvbench.statistics"),
        ("kvbench.modelling", "torch"),
    ):
        assert allowed(*arrow)
    assert not allowed("kvbench.modelling", "transformers")


def test_records_are_read_without_torch():
    present = [name for name in RECORDS if name in set(map(name_of, FILES))]
    assert len(present) >= 4
    for name in closure(present):
        assert not {imported for imported in imports(name) if within(imported, "torch", "transformers")}
    code = f"import sys, {', '.join(present)}; sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A small checkout beside which kvbench is looked up."""
    texts = {
        "kvbench/__init__.py": "def __getattr__(name):\n    from kvbench import tables\n",
        "kvbench/engine.py": "import torch.nn as nn\nfrom kvbench.rows import Rows, gone\nfrom . import settings\n",
        "kvbench/rows.py": "def size():\n    from kvbench.kernels import attend\n",
        "kvbench/settings.py": "",
        "kvbench/tables.py": "",
        "kernels/attend/__init__.py": "def attend(name):\n    return __import__(name)\n",
        "kernels/attend/triton.py": "from .tiles import tile\n",
        "kernels/attend/tiles.py": "",
        "kernels/attend/README.md": "",
        "kernels/attend/attend.cu": "",
        "kernels/match/__init__.py": "",
        "methods/snapkv.py": "from kvbench.settings import whole\nimport kvbench.kernels.match, json\n",
        "README.md": "",
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(kvbench, "__path__", [str(tmp_path / "kvbench"), str(tmp_path)])
    return tmp_path


def test_imports_and_their_closure(checkout):
    assert imports("kvbench.engine") == {"torch", "torch.nn", "kvbench", "kvbench.rows", "kvbench.settings"}
    assert imports("kvbench.rows") == {"kvbench", "kvbench.kernels.attend"}
    assert imports("kvbench.kernels.attend") == {"kvbench", "kvbench.kernels.attend.tiles"}
    assert imports("kvbench.methods.snapkv") == {"json", "kvbench", "kvbench.settings", "kvbench.kernels.match"}
    below = {"kvbench", "kvbench.rows", "kvbench.settings", "kvbench.kernels.attend", "kvbench.kernels.attend.tiles"}
    assert closure(["kvbench.engine"]) == below | {"kvbench.engine"}
    for unknown in ("kvbench.nothing", "torch", "kvbench.methods"):
        with pytest.raises(ValueError, match=f"^{unknown} is no module"):
            closure([unknown])


def test_the_hash_follows_what_can_change_a_result(checkout):
    named = ["kvbench.methods.snapkv", "kvbench.engine"]
    before = source_hash(named)
    assert before == source_hash(reversed(named)) and len(before) == 16
    counted = set()
    for path in sorted(path for path in checkout.rglob("*") if path.is_file()):
        text = path.read_text()
        path.write_text(text + "\n# changed\n")
        if source_hash(named) != before:
            counted.add(str(path.relative_to(checkout)))
        path.write_text(text)
    assert counted == {
        "kvbench/__init__.py",
        "kvbench/engine.py",
        "kvbench/rows.py",
        "kvbench/settings.py",
        "kernels/attend/__init__.py",
        "kernels/attend/triton.py",  # never imported by name, but the package may choose it
        "kernels/attend/tiles.py",
        "kernels/attend/attend.cu",
        "kernels/match/__init__.py",
        "methods/snapkv.py",
    }
    assert source_hash(named) == before != source_hash(["kvbench.engine"])
    (checkout / "kernels/attend/new.py").write_text("")
    assert source_hash(named) != before


def test_the_revision_is_the_checkouts(tmp_path, monkeypatch):
    def git(*arguments: str) -> str:
        own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", *own, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    def now(folder: Path = tmp_path) -> str:
        revision.cache_clear()
        return revision(folder)

    inner = tmp_path / "kvbench"
    inner.mkdir()
    for folder in (tmp_path, inner):
        (folder / "pyproject.toml").write_text('[project]\nversion = "7.1"\n')
    (inner / "rows.py").write_text("")
    assert now() == "version 7.1"
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    first = git("rev-parse", "HEAD").strip()
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert now() == f"git {first}"
    assert now(inner) == "version 7.1"  # a copy inside somebody's repository is no checkout
    (tmp_path / "notes.txt").write_text("no code")
    assert now() == f"git {first}"
    (inner / "new.py").write_text("")
    assert now() == f"git {first} dirty"
    monkeypatch.setenv("PATH", "")
    assert now() == "version 7.1"
    revision.cache_clear()

"""The hash of the sources follows what is imported, and the revision is the checkout's."""

import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import kvbench
from kvbench.config import provenance
from kvbench.config.imports import find_unfollowed, list_imports, sources_unchanging
from kvbench.config.provenance import (
    FOLDERS,
    UNCOUNTED,
    find_packages,
    find_revision,
    follow_imports,
    source_hash,
    source_hashes,
)
from kvbench.validation import SettingError
from tests.support.modules import MODULE_FILES, find_module_name, is_within
from tests.support.repository import ROOT


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A small checkout beside which kvbench is looked up."""
    texts = {
        "kvbench/__init__.py": "def __getattr__(name):\n    from kvbench import sheets\n",
        "kvbench/motor.py": "import torch.nn as nn\nfrom kvbench.shelf.lines import Rows, gone\nfrom . import limits\n",
        "kvbench/shelf/__init__.py": "",
        "kvbench/shelf/unused.py": "",
        "kvbench/shelf/lines.py": "def size():\n    from kvbench.kernels import focus\n",
        "kvbench/limits.py": "",
        "kvbench/sheets.py": "",
        "kernels/focus/__init__.py": "def focus(name):\n    return __import__(name)\n",
        "kernels/focus/triton.py": "from .tiles import tile\n",
        "kernels/focus/tiles.py": "",
        "kernels/focus/README.md": "",
        "kernels/focus/focus.cu": "",
        "kernels/pair/__init__.py": "",
        "methods/snapkv.py": "from kvbench.limits import whole\nimport kvbench.kernels.pair, json\n",
        "README.md": "",
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(kvbench, "__path__", [str(tmp_path / "kvbench"), str(tmp_path)])
    return tmp_path


def test_imports_and_their_closure(checkout):
    assert list_imports("kvbench.motor") == {
        "torch",
        "torch.nn",
        "kvbench",
        "kvbench.shelf",
        "kvbench.shelf.lines",
        "kvbench.limits",
    }
    assert list_imports("kvbench.shelf.lines") == {"kvbench", "kvbench.shelf", "kvbench.kernels.focus"}
    assert list_imports("kvbench.shelf") == {"kvbench"}
    assert list_imports("kvbench.kernels.focus") == {"kvbench", "kvbench.kernels.focus.tiles"}
    assert list_imports("kvbench.methods.snapkv") == {"json", "kvbench", "kvbench.limits", "kvbench.kernels.pair"}
    below = {
        "kvbench",
        "kvbench.shelf",
        "kvbench.shelf.lines",
        "kvbench.limits",
        "kvbench.kernels.focus",
        "kvbench.kernels.focus.tiles",
    }
    assert follow_imports(["kvbench.motor"]) == below | {"kvbench.motor"}
    for unknown in ("kvbench.nothing", "torch", "kvbench.methods"):
        with pytest.raises(ValueError, match=f"^{unknown}: a module of kvbench, or of"):
            follow_imports([unknown])


def test_the_hash_follows_what_can_change_a_result(checkout):
    named = ["kvbench.methods.snapkv", "kvbench.motor"]
    before = source_hash(named)
    assert before == source_hash(reversed(named)) and len(before) == 16
    counted = set()
    for path in sorted(path for path in checkout.rglob("*") if path.is_file()):
        text = path.read_text()
        path.write_text(text + "\n# said\n")
        said = source_hash(named) != before
        path.write_text(text + "\nCHANGED = 1\n")
        if source_hash(named) != before:
            counted.add(str(path.relative_to(checkout)))
            assert said == (path.suffix != ".py")  # of Python only what is done counts
        path.write_text(text)
    assert counted == {
        "kvbench/__init__.py",
        "kvbench/motor.py",
        "kvbench/shelf/__init__.py",  # of a package of kvbench what is imported
        "kvbench/shelf/lines.py",
        "kvbench/limits.py",
        "kernels/focus/__init__.py",
        "kernels/focus/triton.py",  # never imported by name, but the package may choose it
        "kernels/focus/tiles.py",
        "kernels/focus/focus.cu",
        "kernels/pair/__init__.py",
        "methods/snapkv.py",
    }
    assert source_hash(named) == before != source_hash(["kvbench.motor"])
    (checkout / "kernels/focus/new.py").write_text("")
    assert source_hash(named) != before


@sources_unchanging()
def test_modules_that_do_not_count_compute_nothing():
    """They are there, runs import them, and none of them can compute: only a conversion of weights knows torch."""
    run = ["kvbench.runs.runner", "kvbench.methods.snapkv", "kvbench.tasks.ruler.task"]
    counted = follow_imports(run)
    assert not counted & UNCOUNTED.keys()
    for module in UNCOUNTED:
        assert any(module in list_imports(other) for other in counted | UNCOUNTED.keys()), f"{module} is not imported"
        if module != "kvbench.models.gguf":
            assert not {
                name for name in list_imports(module) if is_within(name, "torch", "transformers", "kvbench.motor")
            }
    whole = {name for path in MODULE_FILES if is_within(name := find_module_name(path), *FOLDERS)} - UNCOUNTED.keys()
    assert {name.split(".")[1] for name in whole} == {"cache", "engine", "interfaces", "models", "runs"}
    assert [name for name, own in source_hashes(run).items() if own] == sorted(counted | whole)


def test_a_change_renames_the_runs_that_it_can_concern(checkout):
    """A listed folder concerns every run; a method, codec, task or kernel only the runs that import it."""
    texts = {
        "kvbench/runs/__init__.py": "",
        "kvbench/config/__init__.py": "",  # whose name this process has imported from elsewhere
        "kvbench/runs/runner.py": "from kvbench.engine import steps\nimport kvbench.config\n",
        "kvbench/runs/checks.py": "",
        "kvbench/engine/__init__.py": "",
        "kvbench/engine/steps.py": "import kvbench.kernels.shared\n",
        "kvbench/engine/unasked.py": "import kvbench.report, pytest\n",
        "kvbench/report/__init__.py": "",
        "kernels/shared/__init__.py": "",
        "methods/ada.py": "from kvbench.methods.snapkv import whole\n",
        "methods/knorm.py": "",
        "methods/codecs/kivi.py": "import kvbench.kernels.focus\n",
        "methods/allocators/tilted.py": "",
        "tasks/ruler/task.py": "from kvbench.tasks.ruler import texts\n",
        "tasks/ruler/texts.py": "",
        "tasks/math/task.py": "",
    }
    for name, text in texts.items():
        path = checkout / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    runs = {
        "snapkv": ["methods.snapkv", "tasks.ruler.task"],
        "ada": ["methods.ada", "methods.allocators.tilted", "tasks.math.task"],
        "knorm": ["methods.knorm", "methods.codecs.kivi", "tasks.ruler.task"],
    }

    def name_runs() -> dict[str, str]:
        return {
            name: source_hash(["kvbench.runs.runner", *(f"kvbench.{module}" for module in modules)])
            for name, modules in runs.items()
        }

    assert f"pytest {pytest.__version__}" in source_hashes(["kvbench.runs.runner"])
    before, renamed = name_runs(), {}
    for name in [*texts, "kernels/pair/__init__.py", "methods/snapkv.py"]:
        text = (checkout / name).read_text()
        (checkout / name).write_text(f"{text}CHANGED = 1\n")
        if found := [run for run, digits in name_runs().items() if digits != before[run]]:
            renamed[name] = " ".join(found)
        (checkout / name).write_text(text)
    everywhere = (
        "config/__init__",
        "runs/__init__",
        "runs/runner",
        "engine/__init__",
        "engine/steps",
        "engine/unasked",
    )
    assert renamed == {
        **{f"kvbench/{name}.py": "snapkv ada knorm" for name in everywhere},
        "kernels/shared/__init__.py": "snapkv ada knorm",
        "kernels/pair/__init__.py": "snapkv ada",
        "methods/snapkv.py": "snapkv ada",
        "methods/ada.py": "ada",
        "methods/knorm.py": "knorm",
        "methods/codecs/kivi.py": "knorm",
        "methods/allocators/tilted.py": "ada",
        "tasks/ruler/task.py": "snapkv knorm",
        "tasks/ruler/texts.py": "snapkv knorm",
        "tasks/math/task.py": "ada",
    }
    (checkout / "kvbench/engine/newer.py").write_text("")
    assert not set(name_runs().values()) & set(before.values())


@pytest.fixture
def outside(checkout, tmp_path_factory, monkeypatch):
    """A method of the small checkout, and what it imports from a folder on the path of Python."""
    folder = tmp_path_factory.mktemp("outside")
    texts = {
        "mylib.py": "SIGN = 1\n",
        "mypackage/__init__.py": "",
        "mypackage/sub.py": "from .deeper import *\n",
        "mypackage/deeper/__init__.py": "from mynamespace import plain\n",
        "mypackage/deeper/star.py": "",
        "mypackage/table.csv": "1,2\n",
        "mypackage/unused.py": "",
        "mynamespace/plain.py": "import kvbench.sheets\n",
        "mynamespace/named.py": "",
        f"mycompiled{EXTENSION_SUFFIXES[0]}": "machine code",
        "myunused.py": "",
    }
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    method = checkout / "methods/mine.py"
    method.write_text(
        "import json, torch, numpy as np\nfrom mylib import SIGN\nfrom mypackage import sub, missing\n"
        "def score():\n    import mycompiled\n    import importlib\n"
        "    return importlib.import_module('mynamespace.named'), __import__('mylib').SIGN\n"
    )
    monkeypatch.syspath_prepend(folder)
    return folder


def test_what_a_method_imports_from_elsewhere_is_hashed(outside, checkout, capsys):
    method = ["kvbench.methods.mine"]
    before = source_hash(method)
    files = {path for folder in (outside, checkout) for path in folder.rglob("*") if path.is_file()}
    counted = set()
    for path in sorted(files):
        content = path.read_bytes()
        path.write_bytes(content + b"\nCHANGED = 1\n")
        if source_hash(method) != before:
            counted.add(path)
        path.write_bytes(content)
    own = [
        "mylib.py",
        *("mypackage/" + name for name in ("__init__.py", "sub.py", "deeper/__init__.py", "deeper/star.py")),
    ]
    own += ["mynamespace/plain.py", "mynamespace/named.py", f"mycompiled{EXTENSION_SUFFIXES[0]}"]
    known = ["kvbench/__init__.py", "kvbench/sheets.py", "methods/mine.py"]
    assert counted == {outside / name for name in own} | {checkout / name for name in known}
    assert source_hash(method) == before
    (outside / "mylib.py").write_text("SIGN = -1\n")
    changed = source_hash(method)
    (outside / "mylib.py").write_text("SIGN = +1\n")
    assert len({before, changed, source_hash(method)}) == 3  # a change that leaves the size as it was, too
    assert not {"mylib", "mypackage", "mynamespace", "mycompiled"} & set(sys.modules)
    assert capsys.readouterr().err == ""


def install(folder: Path, name: str, version: str, files: list[str], editable: bool = False) -> None:
    """What an installer writes."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "top_level.txt").write_text("\n".join({own.split("/")[0].removesuffix(".py") for own in files}))
    (info / "RECORD").write_text("".join(f"{own},,\n" for own in ([] if editable else files)) + "METADATA,,\n")


def test_an_installed_package_counts_by_name_and_version(checkout, tmp_path_factory, monkeypatch):
    def hash_with(version: str, content: str, editable: bool = False) -> str:
        folder = tmp_path_factory.mktemp("site")
        (folder / "myinstalled").mkdir()
        for name in ("__init__.py", "sub.py"):  # an installer need not list the second, which may be made later
            (folder / "myinstalled" / name).write_text(content)
        install(folder, "My-Installed", version, ["myinstalled/__init__.py"], editable)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(folder)
            return source_hash(["kvbench.methods.mine"])

    (checkout / "methods/mine.py").write_text("import myinstalled.sub, torch, yaml, os.path\n")
    without = source_hash(["kvbench.methods.mine"])
    first = hash_with("1.0", "SIGN = 1")
    assert first == hash_with("1.0", "SIGN = -1") != hash_with("1.1", "SIGN = 1")
    assert without not in {first, hash_with("1.1", "SIGN = 1")}
    editable = hash_with("1.0", "SIGN = 1", editable=True)
    assert editable not in {first, hash_with("1.0", "SIGN = -1", editable=True)}
    assert find_packages(["torch.nn", "yaml", "numpy", "os.path", "json"]) == set()  # kvbench's own, and Python's
    assert find_packages(["pytest"]) == {f"pytest {pytest.__version__}"}


@pytest.mark.parametrize("folder, counts", [("dist-packages", "debians 1.0"), ("sources", "debians")])
def test_a_package_whose_metadata_lists_no_files(folder, counts, checkout, tmp_path, monkeypatch):
    """Debian installs such packages; beside sources that are being developed, the metadata says nothing."""
    info = tmp_path / folder / "debians-1.0.egg-info"
    info.mkdir(parents=True)
    (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: debians\nVersion: 1.0\n")
    (info / "top_level.txt").write_text("debians\n")
    (info.parent / "debians.py").write_text("")
    monkeypatch.syspath_prepend(info.parent)
    (checkout / "methods/mine.py").write_text("import debians\n")
    assert set(source_hashes(["kvbench.methods.mine"])) == {"kvbench", "kvbench.methods.mine", counts}


def test_a_method_in_an_installed_namespace_counts_with_the_sources_of_its_distribution(tmp_path, monkeypatch):
    """A namespace has no `__init__.py`, and several distributions may install modules into it."""
    texts = {
        "shared/method.py": "from shared import helpers, foreign\nfrom shared.deep.rows import ROWS\n",
        "shared/helpers.py": "SIGN = 1\n",
        "shared/deep/rows.py": "ROWS = 1\n",
        "shared/unused.py": "",
    }
    others = {"shared/foreign.py": "SIGN = 1\n"}
    for name, text in (texts | others).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    install(tmp_path, "shared-methods", "1.0", list(texts))
    install(tmp_path, "shared-others", "2.0", list(others))
    monkeypatch.syspath_prepend(tmp_path)
    hashes = source_hashes(["shared.method"])
    assert [name for name in hashes if not name.startswith("kvbench")] == [
        "shared.deep.rows", "shared.helpers", "shared.method", "shared-others 2.0"
    ]  # fmt: skip
    before, counted = source_hash(["shared.method"]), set()
    for name in texts | others:
        content = (tmp_path / name).read_text()
        (tmp_path / name).write_text(f"{content}CHANGED = 1\n")
        counted |= {name} if source_hash(["shared.method"]) != before else set()
        (tmp_path / name).write_text(content)
    assert counted == {"shared/method.py", "shared/helpers.py", "shared/deep/rows.py"}
    with pytest.raises(SettingError, match=r"^shared.nothing: a module of kvbench, or of a package that"):
        source_hash(["shared.nothing"])


@pytest.mark.parametrize(
    "line, said",
    [
        ("import importlib; importlib.import_module('my' + 'lib')", "import_module() in mine.py, line 1"),
        ("from importlib import import_module as load\nload(name)", "import_module() in mine.py, line 2"),
        ("exec(text)", "exec() in mine.py, line 1"),
        ("def f(name):\n    return __import__(name)", "__import__() in mine.py, line 2"),
        ("import ctypes; ctypes.CDLL('x.so')", "CDLL() in mine.py, line 1"),
        ("import sys; sys.path.append('x'); import mynowhere", "import mynowhere in mine.py"),
        ("try:\n    import mynowhere\nexcept ImportError:\n    pass", None),
        ("try:\n    import mynowhere\nexcept* ImportError:\n    pass", None),
        ("try:\n    import mynowhere\nexcept ImportError:\n    pass\ndef f():\n    import mynowhere", None),
        ("model.eval(); import json", None),
    ],
)
def test_what_cannot_be_followed_is_said_once(line, said, checkout, capsys, monkeypatch):
    monkeypatch.setattr(provenance, "_reported", set())
    (checkout / "methods/mine.py").write_text(line)
    (checkout / "methods/other.py").write_text("import kvbench.methods.mine")
    for _ in range(2):
        source_hash(["kvbench.methods.mine"])
        source_hash(["kvbench.methods.other"])
    text = f"kvbench: a run's hash does not cover the code that these execute: {said}\n" if said else ""
    assert capsys.readouterr().err == text


def test_the_methods_and_tasks_of_kvbench_can_be_followed():
    modules = {
        find_module_name(path) for path in MODULE_FILES if path.relative_to(ROOT).parts[0] in ("methods", "tasks")
    }
    assert find_unfollowed(follow_imports(modules)) == []


def test_a_file_in_no_package_may_try_to_import_from_one(outside):
    before = source_hash(["kvbench.methods.mine"])
    (outside / "mylib.py").write_text("try:\n    from . import more\nexcept ImportError:\n    pass\nSIGN = 1\n")
    assert source_hash(["kvbench.methods.mine"]) != before


def test_the_hash_is_asked_for_again_at_no_cost(outside, monkeypatch):
    before = source_hash(["kvbench.methods.mine"])
    monkeypatch.setattr(provenance, "follow_imports", None)
    assert source_hash(["kvbench.methods.mine"]) == before


def test_sources_that_change_count_once_they_may(outside):
    """A hash that is made while sources must not change is of the source that was read, and only as long."""
    method, more = ["kvbench.methods.mine"], ["kvbench.methods.mine", "kvbench.motor"]
    with sources_unchanging():
        before = source_hash(method)
        (outside / "mylib.py").write_text("SIGN = -1\n")
        with sources_unchanging():
            beside = source_hash(more)
        assert source_hash(method) == before
    assert source_hash(method) != before and source_hash(more) != beside
    (outside / "mylib.py").write_text("SIGN = 1\n")
    assert source_hash(method) == before and source_hash(more) == beside


def test_the_revision_is_the_checkouts(tmp_path, monkeypatch):
    def git(*arguments: str) -> str:
        own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", *own, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    def now(folder: Path = tmp_path) -> str:
        find_revision.cache_clear()
        return find_revision(folder)

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
    find_revision.cache_clear()

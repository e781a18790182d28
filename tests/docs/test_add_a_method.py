"""One file, one YAML file, one command: the methods of docs/add-a-method.md pass the tests that look at all methods."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import read_blocks
from tests.support.repository import ROOT

RESULTS = ("efficiency", "measured", "papers", "parity", "published", "studies", "tuned")  # what pages link to
COPIED = ("conf", "docs", "kernels", "kvbench", "methods", "tasks", "tests", *(f"results/{own}" for own in RESULTS))
LOOKS = ("methods_available(", "list_choices(", "complete_pages(")  # in a file whose tests look at all methods
CHOSEN = "newest or above or every_method or test_pages or test_doc_tables"
PLAIN = "not full and not gpu and not slurm and not browser and not parity and not package and not latex"


def call(root: Path, *words: str) -> str:
    """Return what a command of Python printed that was executed in a copy of the repository."""
    own = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], cwd=root, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.full
def test_the_documented_methods_pass_after_one_command(tmp_path):
    for name in COPIED:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.glob("*"):
        if path.is_file():
            shutil.copy(path, tmp_path / path.name)
    written = []
    for block in read_blocks(ROOT / "docs" / "add-a-method.md"):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
            written.append(block.file)
    names = "methods/newest.py", "conf/method/newest.yaml", "methods/above.py", "conf/method/above.yaml"
    assert tuple(written) == names
    said = call(tmp_path, "-m", "kvbench", "dev", "docs-tables")
    assert "README.md" in said and "docs/methods.md  written" in said
    looking = [
        own
        for own in sorted((tmp_path / "tests").rglob("test_*.py"))
        if own.parent.name != "gpu" and any(word in own.read_text() for word in LOOKS)
    ]
    files = {str(own.relative_to(tmp_path)) for own in [*looking, tmp_path / "tests" / "docs" / "test_pages.py"]}
    line = "-m", "pytest", "-p", "no:cacheprovider", "-m", PLAIN, "-k", CHOSEN, *sorted(files)
    found = call(tmp_path, *line).splitlines()[-1]
    assert int(found.split()[0]) > 50, found

"""What the repository holds stays small."""

import os
import shutil
import subprocess

import pytest

from tests.support.repository import ROOT

LIMIT = 50_000_000  # bytes of all committed files


@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="no checkout of git")
def test_the_tree_is_small_and_holds_no_file_beside_its_packed_form():
    """`make pack` replaces a CSV file by its packed form. Both together would hide that one of them is old."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    names = {name for name in listed.stdout.split("\0") if name and os.path.lexists(ROOT / name)}
    assert sum((ROOT / name).lstat().st_size for name in names) <= LIMIT
    assert not {name for name in names if f"{name}.gz" in names}

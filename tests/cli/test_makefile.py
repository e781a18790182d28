"""`make help` lists every target of the Makefile, a line each (run inside another make too, as in `make test`)."""

import re
import subprocess

from tests.support.repository import ROOT


def test_the_help_lists_every_target():
    listed = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    [phony] = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    lines = listed.splitlines()
    assert sorted(line.split()[0] for line in lines) == sorted(phony.split())
    assert all(line.endswith(".") and len(line) < 140 for line in lines)

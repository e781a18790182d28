"""Every Triton kernel compiles for sm_90, on machines without a GPU too."""

import re
from pathlib import Path

import pytest

from tests.support.compile_kernels import compile_all
from tests.support.repository import ROOT
from tests.support.selection import only_in_full

MODULES = sorted(
    path.stem
    for path in Path(__file__).parent.glob("test_*.py")
    if re.search("^def ahead", path.read_text(), re.MULTILINE)
)


def list_launched() -> set[str]:
    """The names of kernels that the sources launch."""
    text = "\n".join(path.read_text() for path in ROOT.glob("kernels/**/*.py"))
    jitted = set(re.findall(r"^@triton\.jit\b.*\n(?:@.*\n)*def (\w+)\(", text, re.MULTILINE))
    return {name for name in re.findall(r"\b(\w+)\[(?:[^][]|\[[^][]*\])*\]\(", text) if name in jitted}


@pytest.mark.parametrize("which, least", [("first", 1), only_in_full("every", 96)])
def test_every_kernel_compiles_for_sm_90(which, least):
    """With its first types and settings, or with all. One process compiles all, because each takes seconds to start."""
    lines = [line.split() for line in compile_all(which, [f"{__package__}.{name}" for name in MODULES]).splitlines()]
    assert {name for name, _ in lines} == list_launched() and len(lines) >= least

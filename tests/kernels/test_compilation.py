"""Every Triton kernel compiles for sm_90, on machines without a GPU too."""

import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

from tests.support.compile_kernels import compile_all, list_entries, translate_all
from tests.support.repository import ROOT

TESTED = [
    import_module(f"{__package__}.{path.stem}")
    for path in sorted(Path(__file__).parent.glob("test_*.py"))
    if re.search("^def ahead", path.read_text(), re.MULTILINE)
]
MODULES = [module.__name__ for module in TESTED]
PARTS = 4
"""Of the modules; each takes about a second, of which a fifth goes to importing Triton anew."""


def list_launched() -> set[str]:
    """The names of kernels that the sources launch."""
    text = "\n".join(path.read_text() for path in ROOT.glob("kernels/**/*.py"))
    jitted = set(re.findall(r"^@triton\.jit\b.*\n(?:@.*\n)*def (\w+)\(", text, re.MULTILINE))
    return {name for name in re.findall(r"\b(\w+)\[(?:[^][]|\[[^][]*\])*\]\(", text) if name in jitted}


def test_every_kernel_that_is_launched_is_listed():
    assert {kernel.__name__ for kernel, *_ in list_entries(MODULES)} == list_launched()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the kernels are compiled")
@pytest.mark.parametrize("part", range(PARTS))
def test_the_compiler_accepts_the_types_and_shapes_of_every_kernel(part):
    """It refuses what the interpreter takes, such as a variable whose type changes in a loop."""
    assert not translate_all(MODULES[part::PARTS])


@pytest.mark.full
def test_every_kernel_compiles_for_sm_90():
    """With all its types and settings. One process compiles all, because each takes seconds to start."""
    assert len(compile_all(MODULES).splitlines()) >= 96

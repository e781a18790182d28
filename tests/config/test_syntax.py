"""A run's identity counts what sources do, not what they say."""

import ast
import hashlib

import pytest

from kvbench.config import syntax
from tests.support.repository import ROOT
from tests.support.selection import only_in_full

SOURCE = '''"""A module."""

import triton
from dataclasses import dataclass
from typing import ClassVar

LIMIT = 3  # rows


@dataclass(frozen=True)
class Method:
    """A method."""

    name: ClassVar[str] = "mine"
    window: int = 8
    """How many."""

    def score(self, rows, power: float = 2.0, *, scale=1e-3):
        """Larger stays."""
        if rows is None:
            raise ValueError(f"no rows for {self.name}: give some")
        assert power > 0, "a power above 0"
        print(f"scoring {rows}")
        return -(rows**power) * scale + len(f"{self.name}: {rows!r:>{LIMIT}}" "é…")


def kernel(x, BLOCK: triton.language.constexpr):
    async def inner():
        yield x[1:, ..., None] @ b"\\x00" if x else 1j
'''
SAME = {
    "docstring": ('"""A method."""', '"""A method, described anew."""'),
    "description": ('"""How many."""', '"""How many rows."""'),
    "no docstring": ('        """Larger stays."""\n', ""),
    "comment": ("# rows", "# of what is held"),
    "layout": ("    window: int = 8\n", "\n    window: int = (\n        8\n    )\n"),
    "quotes": ('"mine"', "'mine'"),
    "message of raise": ("no rows for {self.name}: give some", "{rows} are no rows"),
    "message of assert": ("a power above 0", "power: above 0"),
    "what is printed": ("scoring {rows}", "now scoring"),
    "split text": ('{LIMIT}}" "é…"', '{LIMIT}}é…"'),
    "hexadecimal": ("window: int = 8", "window: int = 0x8"),
}
OTHER = {
    "operator": ("rows**power", "rows*power"),
    "sign": ("-(rows", "+(rows"),
    "default": ("power: float = 2.0", "power: float = 2.5"),
    "kind of number": ("LIMIT = 3", "LIMIT = 3.0"),
    "constexpr": ("BLOCK: triton.language.constexpr", "BLOCK"),
    "ClassVar": ("name: ClassVar[str]", "name: str"),
    "decorator": ("(frozen=True)", ""),
    "condition": ("rows is None", "rows is not None"),
    "kind of error": ("raise ValueError", "raise TypeError"),
    "condition of assert": ("power > 0", "power >= 0"),
    "text that is used": ('"mine"', '"yours"'),
    "text in a formatted one": ("{self.name}: {rows!r", "{self.name}; {rows!r"),
    "format": ("!r:>", "!s:>"),
    "width": (":>{LIMIT}", ":<{LIMIT}"),
    "keyword only": ("*, scale", "scale"),
    "bytes": ("x00", "x01"),
    "order": ("import triton\nfrom dataclasses import dataclass", "from dataclasses import dataclass\nimport triton"),
    "slice": ("1:, ...", "1:"),
}


def write(source: str | bytes) -> str:
    return syntax.canonicalize(ast.parse(source))


def changed(old: str, new: str) -> str:
    assert SOURCE.count(old) == 1
    return SOURCE.replace(old, new)


@pytest.mark.parametrize("case", SAME)
def test_what_is_said_does_not_count(case):
    assert write(changed(*SAME[case])) == write(SOURCE)


@pytest.mark.parametrize("case", OTHER)
def test_what_is_done_counts(case):
    assert write(changed(*OTHER[case])) != write(SOURCE)


def test_the_text_is_the_same_on_every_version_of_python():
    """Written on Python 3.11; 3.12 reads f-strings with another parser, 3.13 drops empty fields, 3.14 has new nodes."""
    text = write(SOURCE)
    assert text.isascii() and hashlib.sha256(text.encode()).hexdigest()[:16] == "7410056a2024c5a0"


@pytest.mark.parametrize("folder", ["kernels", "methods", "tasks", only_in_full("kvbench")])
def test_all_sources_can_be_written(folder):
    """Every run writes those of kvbench/ that it counts."""
    for path in (ROOT / folder).rglob("*.py"):
        assert write(path.read_bytes()).startswith("(Module body=[")

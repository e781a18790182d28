"""docs/troubleshooting.md: its lines are what the program says.

Lines that a command gives on any machine are made by that command. The others need a GPU, SLURM, a network or a damaged
file; their words must be in the sources.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from kvbench.__main__ import main as run_kvbench
from kvbench.cli.command import run_command
from tests.support.command_line import run_cli
from tests.support.repository import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
LINES = re.findall(r"^\| `([^`]+)`", PAGE, re.MULTILINE)
RUNS = {
    "method=snapkw: did you": "method=snapkw budget=0.1",
    "budgte: no such setting": "method=snapkv budgte=0.1",
    "method=snapkv,tova: has": "method=snapkv,tova budget=0.1",
    "budget=1.5: a": "method=snapkv budget=1.5",
    "budget=0.05: dms_threshold": "method=dms_threshold",
    "allocator=ada: quest": "method=quest allocator=ada budget=0.1",
    "block_size=128: kvzip": "method=kvzip block_size=128",
    "model.path=null: model=hf": "model=hf",
    "model.path=…: no such folder": "model=hf model.path=/nowhere/at/all",
    "method.path=null: give": "method=qfilters",
    "task.path=…: no such file": "task=longbench task.path=/nowhere/at/all",
    "task.path=/tmp: a file": "task=ruler_kvpress task.path=/tmp",
    "question=hidden: math500": "task=math500 question=hidden method=snapkv budget=0.1",
    "fidelity=true: task=math500": "task=math500 fidelity=true",
    "hydra/launcher=slurm: needs": "hydra/launcher=slurm",
}
NO_RUN = "…/runs: no run there"
LEAST = 11  # characters of a piece of a line that must be in a text of the sources
OF_OTHERS = ("submitit.core", "refused: …", "failed")  # a package's line, and words of `kvbench status`


def find_line(start: str) -> str:
    """Return the line of the page that begins so."""
    [line] = [line for line in LINES if line.startswith(start)]
    return line


def fits(line: str, said: str) -> bool:
    """Whether the program's text is the page's line, whose `…` stand for anything."""
    return re.fullmatch(".+".join(map(re.escape, line.split("…"))), said.rstrip("\n")) is not None


@pytest.mark.parametrize("start", RUNS)
def test_a_command_says_the_line(start, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, err = run_cli(RUNS[start].split(), monkeypatch, capsys)
    assert (code, out, list(tmp_path.iterdir())) == (2, "", [])
    assert fits(f"kvbench: {find_line(start)}", err.replace(" --model MODEL --out FILE", "")), err


def test_a_folder_without_runs_gives_the_line(tmp_path, capsys):
    assert run_command(lambda: run_kvbench(["results", "scores", "--results", str(tmp_path)])) == 2
    assert NO_RUN in LINES and fits(f"kvbench: {NO_RUN}", capsys.readouterr().err)


def iterate_texts(file: Path) -> Iterator[str]:
    """Yield the strings of a source file, with `…` where a value is filled in."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@cache
def list_sources() -> dict[Path, str]:
    folders = [path for name in ("kvbench", "methods", "tasks") for path in (ROOT / name).rglob("*.py")]
    return {file: file.read_text() for file in [ROOT / "make_venv.py", *folders]}


@cache
def list_texts(file: Path) -> list[str]:
    return [text for text in iterate_texts(file) if len(text) >= LEAST]


def is_in_a_text(piece: str) -> bool:
    """Whether a string of the sources holds a piece. Files that do not have all of its words are not parsed."""
    words = re.findall("[A-Za-z]+", piece)
    files = (file for file, source in list_sources().items() if all(word in source for word in words))
    return any(piece in text for file in files for text in list_texts(file))


SHOWN_BY_COMMANDS = {NO_RUN, *map(find_line, RUNS)}


@pytest.mark.parametrize("line", [line for line in LINES if line not in SHOWN_BY_COMMANDS])
def test_the_words_of_a_line_are_those_of_the_sources(line):
    if line.startswith(OF_OTHERS):
        return
    pieces = [piece.strip(" :;()") for piece in line.split("…")]
    words = [piece for piece in pieces if len(piece) >= LEAST]
    assert words
    for piece in words:
        assert is_in_a_text(piece), piece

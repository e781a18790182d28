"""The command line in a test's own process."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvbench.cli import run as command
from kvbench.cli.command import run_command


def run_cli(
    arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> tuple[int, str, str]:
    """Exit code, output and errors of `run.py` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    try:
        code = run_command(command.main)
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


def assert_refused(found: tuple[int, str, str], line: str, folder: Path) -> None:
    """One line that begins so, exit code 2, and nothing written into `folder`."""
    code, out, err = found
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and err.startswith("kvbench: " + line), err
    assert list(folder.iterdir()) == []

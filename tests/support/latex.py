"""Compile LaTeX."""

import subprocess
from pathlib import Path


def compile_latex(folder: Path, text: str) -> str:
    """Compile a document with pdflatex and return its log.

    Raises:
        AssertionError: pdflatex stops. The message is the end of the log.
    """
    (folder / "own.tex").write_text(text, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "own.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True)
    log = (folder / "own.log").read_text(errors="replace")
    assert done.returncode == 0, log[-2000:]
    return log

"""The files of pinned packages agree with each other and with pyproject.toml, and `make` installs from them."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import make_venv
from tests.support.repository import ROOT

RUN, GPU, TEST = "requirements.lock", "requirements-gpu.lock", "requirements-test.lock"
HOOKS = {"pre-commit", "codespell"}  # who uses them installs them: CONTRIBUTING.md


def read_pins(file: str) -> Iterator[tuple[str, str]]:
    """The packages of one file, without those of files that it includes, and their versions."""
    for line in (ROOT / file).read_text().splitlines():
        if not line.startswith(("#", "-r ")):
            name, version = line.split("==")
            yield canonicalize_name(name), version


def list_wanted(*lists: str) -> Iterator[Requirement]:
    """The requirements of pyproject.toml: "dependencies", or those of an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in chain(*(project.get(name) or project["optional-dependencies"][name] for name in lists)):
        if not line.startswith("kvbench["):
            yield Requirement(line)


def test_one_file_alone_pins_a_package():
    """So that no two contradict each other."""
    names = [name for file in (RUN, GPU, TEST) for name, _ in read_pins(file)]
    assert len(names) == len(set(names))
    included = [line for line in (ROOT / TEST).read_text().splitlines() if line.startswith("-r ")]
    assert included == [f"-r {RUN}", f"-r {GPU}"]


@pytest.mark.parametrize(
    ("lists", "files"), [(("dependencies", "report"), (RUN, GPU)), (("test", "dev"), (RUN, GPU, TEST))], ids=str
)
def test_pins_lie_in_the_ranges_of_pyproject(lists, files):
    pins = dict(chain(*(read_pins(file) for file in files)))
    for wanted in list_wanted(*lists):
        name = canonicalize_name(wanted.name)
        assert name in HOOKS or wanted.specifier.contains(pins[name]), name


def test_targets_that_need_the_packages_of_tests_ask_for_them():
    rules = re.findall(r"^([a-z-]+):(.*)\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    needs = re.compile(r"\$\(PYTEST\)|\$\(BIN\)/(ruff|python (-m (mypy|pytest)|tests/))")
    assert {name for name, wanted, _ in rules if "setup-tests" in wanted.split()} == {
        name for name, _, recipe in rules if needs.search(recipe)
    }


SCRIPT = """#!/bin/sh
case "$*" in
  *config*) cat <<'END'
global.index-url='https://else.invalid/simple'
global.find-links='/a\\n/b'
:env:.index-url='https://me:secret@mirror.invalid/simple'
END
  ;;
  *) {says}
esac
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An environment that is whole, but for the Python, which the tests write."""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "ready").touch()
    return Path(".venv")


def write_python(folder: Path, says: str) -> Path:
    """Write a Python whose pip has settings, and whose `pip install` is a line of the shell."""
    path = folder / "bin" / "python"
    path.write_text(SCRIPT.format(says=says))
    path.chmod(0o755)
    return path


def test_a_line_a_stage_says_how_long_it_took(folder, capfd):
    write_python(
        folder, "echo Collecting torch; echo Installing collected packages: torch; echo WARNING: no matter >&2"
    )
    assert make_venv.main(str(folder), RUN) == 0
    assert re.fullmatch(
        r"set-up: fetching packages with pip ... \d+ s\n"
        r"set-up: installing them ... \d+ s, 0 packages, 0\.0 GB in \.venv\n",
        capfd.readouterr().out,
    )
    assert (folder / "install.log").read_text().count("\n") == 3


def test_without_a_network_one_line_says_what_is_out_of_reach(folder, capfd):
    broken = "WARNING: Retrying after connection broken by NewConnectionError: /absl-py/"
    missing = "ERROR: No matching distribution found for absl-py==2.5.1"
    write_python(folder, f'echo "{broken}"; echo "{missing}"; exit 1')
    assert make_venv.main(str(folder), RUN) == 1
    assert capfd.readouterr().err == (
        "set-up: absl-py==2.5.1 cannot be fetched, because mirror.invalid is out of reach; "
        "check the network, then repeat the command (.venv/install.log has all of it)\n"
    )
    assert (folder / "install.log").read_text() == f"{broken}\n{missing}\n"


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("ERROR: No matching distribution found for torch==9\n", "No matching distribution found for torch==9"),
        ("ERROR: Could not install packages: [Errno 28] No space left on device: 'x'\n", "the disk is full"),
        (
            "error: Request failed after 3 retries in 3.4s\n  cause: Failed to fetch: https://a.invalid/simple/yarl/\n"
            "  cause: error sending request for url (https://a.invalid/simple/yarl/)\n  cause: dns error\n",
            "yarl cannot be fetched, because the package index is out of reach; "
            "check the network, then repeat the command",
        ),
        ("error: No solution found\n  cause: Because there is no version of a\n", "Because there is no version of a"),
        ("", "no output"),
    ],
)
def test_why_packages_are_missing_is_one_line(said, line):
    assert make_venv.explain_failure(said, "") == line


def test_uv_looks_where_pip_does(folder):
    settings = make_venv.read_pip_settings(write_python(folder, "exit 1"))
    variables = make_venv.make_uv_variables(settings)
    assert variables.pop("UV_INDEX_STRATEGY") == "unsafe-best-match"
    assert variables == {"UV_DEFAULT_INDEX": "https://me:secret@mirror.invalid/simple", "UV_FIND_LINKS": "/a,/b"}


def test_an_old_python_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "version_info", (3, 10, 1, "final", 0))
    assert make_venv.main(str(tmp_path / "new"), RUN) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("set-up: kvbench needs Python 3.11, and this is 3.10;") and err.count("\n") == 1


def test_only_a_whole_environment_is_marked(tmp_path):
    """`make` begins again where an installation failed, and where a pin changed."""
    for file in ("Makefile", "make_venv.py", RUN, GPU, TEST):
        shutil.copy(ROOT / file, tmp_path)
    (tmp_path / ".venv").mkdir()

    def make(python: str, target: str = "setup-tests") -> str:
        command = ["make", target, f"PYTHON={python}"]
        outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of `make test`
        return subprocess.run(command, cwd=tmp_path, env=outside, capture_output=True, text=True, check=False).stdout

    make("false")
    assert not list((tmp_path / ".venv").iterdir())
    assert make("echo").splitlines() == [f"make_venv.py .venv {TEST}"]
    assert "make_venv" not in make("echo") + make("echo", "setup")  # TEST includes RUN
    for mark in (tmp_path / ".venv").iterdir():
        os.utime(mark, (0, 0))
    make("false")
    assert make("echo", "setup").startswith(f"make_venv.py .venv {RUN}")
    assert make("echo").splitlines() == [f"make_venv.py .venv {TEST}"]

"""Make an environment from files of pinned packages, or bring it up to date. `make` calls this, with any Python.

Example:
  python3 make_venv.py .venv requirements.lock

It prints one line a stage, with its seconds. uv installs where it is on the PATH, otherwise pip. Both read the same
files. uv reads no configuration of pip's, so it is handed pip's indexes, links and constraints. What either of them
says is in `install.log` of the environment.

No source is compiled here. Python compiles what it imports: of 17,000 files, a run imports a quarter.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from ast import literal_eval
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from urllib.parse import urlsplit

OLDEST = (3, 11)
FETCHED = ("Installing collected packages", "Prepared ")  # how pip and uv say that everything is fetched
PACKAGE = re.compile(
    r"No matching distribution found for (\S+)|Failed to (?:fetch|download):? `?\S*?([^\s/`]+)/?`?$", re.M
)
OUT_OF_REACH = re.compile(r"connection broken|timed out|error sending request")
ERROR = re.compile(r"^(?:ERROR|error|\s*cause): *(.+)$", re.M)


class SetUpError(Exception):
    """The environment cannot be made. The message is one line."""


class Stage:
    """A line that says what is happening, and in the end how many seconds it took."""

    def __init__(self, text: str) -> None:
        print(f"set-up: {text} ...", end="", flush=True)
        self.start = perf_counter()

    def end(self, *facts: str) -> None:
        print("", ", ".join([f"{perf_counter() - self.start:.0f} s", *facts]), flush=True)

    def fail(self) -> None:
        print(f" failed after {perf_counter() - self.start:.0f} s", flush=True)


def make_environment(folder: Path) -> None:
    """Make an environment that has pip, or complete one that was not finished.

    Raises:
        SetUpError: This Python is too old, or cannot make environments.
    """
    here, oldest = (".".join(map(str, version)) for version in (sys.version_info[:2], OLDEST))
    if sys.version_info < OLDEST:
        raise SetUpError(
            f"kvbench needs Python {oldest}, and this is {here}; `make PYTHON=python{oldest} …` names another"
        )
    stage = Stage(f"making {folder} with Python {here}")
    command = [sys.executable, "-m", "venv", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        stage.fail()
    if done.returncode and "ensurepip" in done.stdout:
        raise SetUpError("Python's module ensurepip is missing; on Debian and Ubuntu, the package python3-venv has it")
    if done.returncode:
        raise SetUpError(f"python -m venv {folder} failed: {(done.stdout.splitlines() or ['no output'])[-1]}")
    stage.end()


def read_pip_settings(python: Path) -> dict[str, str]:
    """Return pip's settings by name, such as "index-url": those of its files, and before them those of variables."""
    done = subprocess.run([str(python), "-m", "pip", "config", "list"], stdout=subprocess.PIPE, text=True)
    lines = [line.partition("=") for line in done.stdout.splitlines()]
    settings = {}
    for section in ("global.", "install.", ":env:."):
        for name, _, value in lines:
            if name.startswith(section):
                settings[name[len(section) :]] = literal_eval(value)
    return settings


def make_uv_variables(settings: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables with which uv looks for packages where pip does."""
    variables = {
        "UV_DEFAULT_INDEX": settings.get("index-url", ""),
        "UV_INDEX": " ".join(settings.get("extra-index-url", "").split()),
        "UV_FIND_LINKS": ",".join(settings.get("find-links", "").split()),
        "UV_CONSTRAINT": " ".join(settings.get("constraint", "").split()),
        "SSL_CERT_FILE": settings.get("cert", ""),
        "UV_INDEX_STRATEGY": "unsafe-best-match",  # a pinned version may lie in any index, as for pip
    }
    return {name: value for name, value in variables.items() if value}


def install(command: Sequence[str], variables: Mapping[str, str], log: Path) -> tuple[bool, Stage]:
    """Run the command that installs, and write what it says into `log`.

    Returns:
        Whether it succeeded, and the stage that is not ended yet.
    """
    stage = Stage(f"fetching packages with {'uv' if command[0] == 'uv' else 'pip'}")
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            command, env={**variables, **os.environ}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        for line in process.stdout or ():
            file.write(line)
            if line.startswith(FETCHED):
                stage.end()
                stage = Stage("installing them")
    return process.returncode == 0, stage


def explain_failure(said: str, index: str) -> str:
    """Say in one line why pip or uv failed.

    Args:
        said: Its output.
        index: The URL of the package index that was asked; "" for pip's and uv's own.
    """
    if "No space left on device" in said:
        return "the disk is full"
    named = PACKAGE.search(said)
    package = (named[1] or named[2]) if named else "a package"
    if OUT_OF_REACH.search(said):
        host = urlsplit(index).hostname or "the package index"
        return (
            f"{package} cannot be fetched, because {host} is out of reach; check the network, then repeat the command"
        )
    errors = ERROR.findall(said) or said.strip().splitlines() or ["no output"]
    return errors[-1].strip()


def measure_size(folder: Path) -> float:
    """Return how many GB of the disk (of 2^30 bytes, as `du` counts) the files of a folder take."""
    files = (os.path.join(path, name) for path, _, names in os.walk(folder) for name in names)
    return sum(os.lstat(file).st_blocks for file in files) * 512 / 2**30


def count_packages(folder: Path) -> int:
    return len(list(folder.glob("lib/python*/site-packages/*.dist-info")))


def set_up(folder: Path, files: Sequence[str]) -> None:
    """Make the environment if it is not whole, and install what the files name.

    Raises:
        SetUpError: It cannot be made, or a package cannot be installed.
    """
    python, log = folder / "bin" / "python", folder / "install.log"
    if not (python.exists() and (folder / "ready").exists()):  # make writes `ready` when this has succeeded
        make_environment(folder)
    settings = read_pip_settings(python)
    wanted = [word for file in files for word in ("--requirement", file)]
    if shutil.which("uv"):
        succeeded, stage = install(
            ["uv", "pip", "install", "--python", str(python), *wanted], make_uv_variables(settings), log
        )
    else:
        succeeded, stage = install([str(python), "-m", "pip", "install", "--no-compile", *wanted], {}, log)
    if not succeeded:
        stage.fail()
        reason = explain_failure(log.read_text(encoding="utf-8"), settings.get("index-url", ""))
        raise SetUpError(f"{reason} ({log} has all of it)")
    stage.end(f"{count_packages(folder)} packages, {measure_size(folder):.1f} GB in {folder}")


def main(folder: str, *files: str) -> int:
    try:
        set_up(Path(folder), files)
    except SetUpError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up: stopped; the same command begins again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""The wheel holds everything that runs, under `kvbench/` alone, and runs as the checkout does.

The environments see the packages of this one, so nothing else is downloaded or installed.
"""

import csv
import io
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from kvbench.cli import COMMANDS
from tests.support.modules import MODULE_FILES
from tests.support.repository import ROOT

pytestmark = pytest.mark.package
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
CELL = ("method=snapkv", "budget=0.1", "task=ruler", "task.length=512", "limit=1", "task.subtasks=[niah_single_1]")
KERNELS = "MARK = 'a distribution of its own, as Hugging Face has one'\n"


def call(*command: str | Path, cwd: Path, path: str | None = None) -> str:
    """Return the output of a command. `path`: PYTHONPATH; without it the command sees what is installed, alone."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    own |= {"OMP_NUM_THREADS": "1"} | ({} if path is None else {"PYTHONPATH": path})
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    line = (*PIP, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", folder, ROOT)
    call(*line, cwd=folder, path=os.pathsep.join(sys.path))
    [file] = folder.glob("kvbench-*.whl")
    return file


def make_environment(folder: Path) -> Path:
    """Make an environment that has the packages of this one, and return its folder of packages."""
    call(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    [packages] = folder.glob("lib/python3*/site-packages")
    (packages / "existing.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return packages


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The folder of the programs of an environment in which kvbench and a package `kernels` are installed."""
    folder = tmp_path_factory.mktemp("installed") / "environment"
    packages = make_environment(folder)
    (packages / "kernels").mkdir()
    (packages / "kernels" / "__init__.py").write_text(KERNELS)
    call(*PIP, "--python", folder / "bin" / "python", "install", "--no-deps", "--no-index", wheel, cwd=folder)
    assert (packages / "kernels" / "__init__.py").read_text() == KERNELS
    return folder / "bin"


def list_recorded(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as file:
        [record] = [name for name in file.namelist() if name.endswith(".dist-info/RECORD")]
        return [line[0] for line in csv.reader(io.StringIO(file.read(record).decode()))]


def test_the_record_holds_kvbench_alone(wheel):
    names = list_recorded(wheel)
    information = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"kvbench", information}
    assert not [name for name in names if name.endswith(".pyc")]


def test_the_wheel_holds_everything_that_runs(wheel):
    names = set(list_recorded(wheel))
    files = [*MODULE_FILES, *(ROOT / "conf").rglob("*.yaml"), *(ROOT / "conf/model/shapes").iterdir()]
    files += [*(ROOT / "kvbench/models/embedded_v2").iterdir(), *(ROOT / "results/published").rglob("*.csv")]
    files += [
        ROOT / "kvbench" / name for name in ("report/intervals.js", "report/page.js", "report/page.css", "py.typed")
    ]
    files += [*(ROOT / "kvbench/models").glob("*.safetensors")]
    files += [ROOT / "kvbench/training" / name for name in ("tuning_facts.yaml", "tuning_words.txt")]
    for file in files:
        inside = file.relative_to(ROOT).as_posix().removeprefix("kvbench/")
        assert f"kvbench/{inside}" in names, inside


def test_the_main_job_runs_in_an_empty_folder(installed, tmp_path):
    """It runs where the path has a blank and an umlaut, and its runs have the hashes of the checkout's."""
    empty = tmp_path / "eine leere Fläche"
    empty.mkdir()
    assert "niah_single_1" in call(installed / "kvbench", "run", *CELL, cwd=empty)
    assert sorted(path.name for path in empty.iterdir()) == ["results"]
    assert "niah_single_1" in call(sys.executable, ROOT / "run.py", *CELL, cwd=tmp_path)
    runs = [sorted(path.name for path in (own / "results/runs").iterdir()) for own in (empty, tmp_path)]
    assert runs[0] == runs[1] and len(runs[0]) == 2
    told = call(installed / "kvbench", "results", "explain", runs[0][0], cwd=empty)
    assert "kvbench.engine.generation" in told and "today" not in told
    assert "0 damaged" in call(installed / "kvbench", "check", "results", "--replay", "1", cwd=empty)
    assert call(installed / "kvbench", "results", "report", cwd=empty).startswith("results/report.html  ")
    assert "KeyDiff" in call(installed / "kvbench", "papers", "write", "keydiff", "17", cwd=empty)


def test_another_package_called_kernels_stays_what_it_is(installed, tmp_path):
    code = "import kvbench.kernels.attention as own, kernels; print(own.__name__, kernels.MARK)"
    said = call(installed / "python", "-c", code, cwd=tmp_path)
    assert said.startswith("kvbench.kernels.attention a distribution of its own")


def test_every_command_is_there(installed, tmp_path):
    for command in COMMANDS:
        said = call(installed / "kvbench", *command.name.split(), "--help", cwd=tmp_path)
        assert f"usage: kvbench {command.name} " in said


def test_an_editable_install_is_the_checkout(tmp_path):
    folder = tmp_path / "environment"
    packages = make_environment(folder)
    line = (*PIP, "--python", folder / "bin" / "python", "install", "--no-deps", "--no-build-isolation", "-e", ROOT)
    call(*line, cwd=tmp_path, path=os.pathsep.join(sys.path))
    assert not (packages / "kvbench").exists() and not (packages / "kernels").exists()
    code = "import kvbench.methods.snapkv as own; print(own.__file__)"
    assert call(folder / "bin" / "python", "-c", code, cwd=tmp_path).strip() == str(ROOT / "methods/snapkv.py")
    assert call(folder / "bin" / "kvbench", "--version", cwd=tmp_path).startswith("kvbench ")

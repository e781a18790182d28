"""Find and load tasks of the installed lm-eval package and of users' own YAML files.

lm-eval's own index parses all of its 14,000 files. This module only searches them for a line `task: <name>` and loads
the file that has it.

lm-eval seeds Python's, NumPy's and the few-shot generators once before all tasks of a run (evaluator.py,
`simple_evaluate`), so that a task's documents may depend on the other tasks. This module seeds them before each task.
"""

import io
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy

from kvbench.network import use_hub
from kvbench.tasks.common.dataset_rows import check_rows, read_rows
from kvbench.tasks.common.lm_eval_strings import find_lm_eval_tasks
from kvbench.validation import SettingError

PACKAGE = find_lm_eval_tasks()
MINIATURES = Path(__file__).parent / "miniature"
OTHER_SEED = 1234  # lm-eval's default seed of NumPy and of the few-shot examples; that of Python is 0
NAME = re.compile(r"""^(task|group|tag):[ \t]*["']?([^\s"'#\[]+)""", re.MULTILINE)

_ANTLR = "its grader needs antlr 4.11 and Hydra 4.9"
_BOXED = "it grades what stands between dollar signs, and a boxed answer counts as wrong"
_METRICS = "it needs transformers.data.metrics, which transformers 5 has no more"
REFUSED = {  # folder of lm_eval/tasks -> why its tasks cannot be used
    "minerva_math": f"{_ANTLR}; task=math500",
    "leaderboard/math": f"{_ANTLR}; task=math500",
    "putnam_axiom": _ANTLR,
    "score/math": _ANTLR,
    "hendrycks_math": f"{_BOXED}; task=math500",
    "coqa": _METRICS,
    "noreval/norquad": _METRICS,
    "scrolls": _METRICS,
    "super_glue/record": _METRICS,
    "xquad": _METRICS,
    "longbench": "its data set already holds what lm-eval writes around it; task=longbench task.protocol=lm_eval",
    "ruler": "its documents are made for a tokenizer and depend on the other tasks of the run; task=ruler_lmeval",
}


def find_tasks(names: Sequence[str], include_path: str | None) -> dict[str, tuple[Path, Path]]:
    """Find tasks by name.

    Args:
        names: Names of tasks.
        include_path: The user's folder of tasks, or None.

    Returns:
        For each name its YAML file and the folder of tasks that has it: the user's, kvbench's miniatures or lm-eval's.

    Raises:
        SettingError: A task does not exist, or a name is that of a group or a tag.
    """
    paths: dict[str, tuple[Path, Path]] = {}
    kinds: dict[str, str] = {}
    include_folders = [] if include_path is None else [Path(include_path).expanduser()]
    for folder in (*include_folders, MINIATURES, PACKAGE):
        if set(names) <= set(paths):
            break
        for path in sorted(folder.rglob("*.yaml"), key=Path.as_posix):
            for kind, name in NAME.findall(path.read_text(encoding="utf-8", errors="replace")):
                if kind == "task" and name in names:
                    paths.setdefault(name, (path, folder))
                kinds.setdefault(name, kind)
    for name in names:
        if name not in paths and kinds.get(name, "task") != "task":
            raise SettingError(f"task.tasks={name}: a {kinds[name]} of lm-eval; name the tasks that it has")
        if name not in paths:
            raise SettingError(f"task.tasks={name}: no such task in lm-eval or in task.include_path={include_path}")
    return {name: paths[name] for name in names}


def load_task(name: str, path: Path, folder: Path, metadata: Mapping[str, Any], seed: int) -> Any:
    """Load an lm-eval task. The state of its generators depends on `seed` alone.

    Args:
        name: The task's name.
        path: Its YAML file.
        folder: The folder of tasks that has the file.
        metadata: What lm-eval's TaskManager passes on to the task.
        seed: Seed of the generators; 0 gives lm-eval's defaults.

    Returns:
        lm-eval's Task.

    Raises:
        SettingError: The task cannot be used. The message says why.
    """
    setting = f"task.tasks={name}"
    if folder == PACKAGE:
        name_in_package = path.relative_to(PACKAGE).as_posix()
        for prefix, reason in REFUSED.items():
            if name_in_package.startswith(f"{prefix}/"):
                raise SettingError(f"{setting}: {reason}")
    with explain_errors(setting, "lm-eval cannot load it"), silence_output(), seed_generators(seed), use_hub():
        from lm_eval.tasks import TaskManager
        from lm_eval.tasks._yaml_loader import load_yaml

        config = load_yaml(path, resolve_func=False)
        check_output(setting, config.get("output_type"))  # before its documents are fetched
        check_lines(setting, config)
        manager = TaskManager(include_defaults=False, metadata=dict(metadata))
        [task] = manager.load([str(path)])["tasks"].values()
        return task


def check_output(setting: str, output_type: str | None) -> None:
    """Raise a SettingError for a task that does not generate its answers."""
    if output_type not in (None, "generate_until"):
        raise SettingError(
            f"{setting}: its output type is {output_type}, samples are generated; lm-eval runs it with KVBenchLM"
        )


def check_lines(setting: str, config: Mapping[str, Any]) -> None:
    """Check the local .jsonl files of a task, because a template writes whatever it finds.

    Raises:
        SettingError: A file is missing, empty or broken, or a row's columns and types are not those of the first row.
            The message names the line.
    """
    given = (config.get("dataset_kwargs") or {}).get("data_files") or []
    listed = given.values() if isinstance(given, Mapping) else [given]
    for files in listed:
        for file in [files] if isinstance(files, str) else files:
            if file.endswith(".jsonl") and "://" not in file and "*" not in file:
                rows = list(read_rows(setting, Path(file)))
                check_rows(
                    setting, rows, {name: _column_types(value) for name, value in rows[0][1].items()} if rows else {}
                )


def _column_types(value: object) -> tuple[type, ...]:
    """Return the types that a column may have by its first value. None may follow any type, and any type None."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    types = (int, float) if number else (type(value),) if value is not None else (str, bool, int, float, list, dict)
    return (*types, type(None))


@contextmanager
def explain_errors(setting: str, what: str) -> Iterator[None]:
    """Turn whatever a task's code raises into one line that names the setting."""
    try:
        yield
    except SettingError:
        raise
    except Exception as error:
        first: BaseException = error
        while first.__cause__ is not None:  # `datasets` only says that something failed
            first = first.__cause__
        reason = " ".join(f"{type(first).__name__}: {first}".split())
        raise SettingError(f"{setting}: {what} ({reason[:300]})") from error


@contextmanager
def silence_output() -> Iterator[None]:
    """Throw away what lm-eval and its tasks print: progress bars, texts and warnings."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield


@contextmanager
def seed_generators(seed: int) -> Iterator[None]:
    """Seed the global generators inside as lm-eval does, and restore them. Seed 0 gives lm-eval's defaults."""
    before = random.getstate(), numpy.random.get_state()
    random.seed(seed)
    numpy.random.seed(OTHER_SEED + seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])

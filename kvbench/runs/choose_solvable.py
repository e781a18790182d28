"""Find the subtasks that a model can do, for its card: what conf/model/<name>.yaml lists under `solvable`.

It runs the full cache on samples with a seed of their own and prints the YAML to paste into that file, with every
score. A subtask is listed if its mean score is at least 50 (kvbench.analysis.solvable_subtasks); a sample that failed
counts as 0. The runs are kept in the store, so the same command continues where it was stopped. Other settings are
those of run.py. The scores can be kept in a file, too (kvbench.analysis.full_scores).

This works only for a task whose samples follow from `task.seed`. For other tasks the list would be chosen on the
samples that are evaluated. RULER's sample i asks question i whatever the seed, so in ruler_qa_squad and ruler_qa_hotpot
only the documents around the question differ.
"""

import textwrap
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from kvbench.analysis import solvable_subtasks
from kvbench.analysis.full_scores import ScoreSource
from kvbench.analysis.intervals import Values
from kvbench.config import catalogue
from kvbench.config.compose import compose_config
from kvbench.runs import checks
from kvbench.runs.spec import RunSpec
from kvbench.validation import SettingError, require_writable

SEED = 50_000
SAMPLES = 20
OWN = ("method", "allocator", "codec", "seed", "limit", "task.seed", "task.limit", "task.length", "task.samples")
WIDTH = 120


def compose_configs(options: Namespace) -> list[DictConfig]:
    """Compose and check one configuration for each length; SettingError if a setting cannot be used."""
    for override in options.settings:
        name, sign, value = override.partition("=")
        if not sign or "," in value and value[0] not in "[{'\"":
            raise SettingError(f"{override}: setting=value, one value each; --lengths takes several")
        if name in OWN:
            raise SettingError(f"{override}: is chosen here: the full cache, seed {SEED}, --lengths and --samples")
    overrides = ["method=full", f"seed={SEED}"]
    try:
        task = compose_config([*options.settings, *overrides]).task
        solvable_subtasks.list_listable("task", task.name)
        if lacking := [name for name in ("seed", "samples", "length") if name not in task]:
            raise SettingError(f"task={task.name}: has no task.{lacking[0]}, so no list can be made with other samples")
        overrides.append(f"task.samples={options.samples}")
        configs = [
            compose_config([*options.settings, *overrides, f"task.length={length}"])
            for length in options.lengths or [task.length]
        ]
    except (HydraException, OmegaConfBaseException) as error:
        raise SettingError(catalogue.error_message(error) or " ".join(str(error).split())) from None
    for config in configs:
        checks.check_settings(config)
    require_writable("results", Path(configs[0].results))
    return configs


def score_subtasks(
    runs: Sequence[RunSpec], results: Path, workers: int | str | None
) -> Iterator[tuple[int, Mapping[str, Values]]]:
    """Execute the runs. Yield for each its length and, by subtask, the scores of its samples in points."""
    from kvbench.runs.executor import Executor
    from kvbench.runs.workers import count_workers

    count = count_workers(workers or 1, runs[0].device)
    with Executor(results) as executor:
        for run in runs:
            scores: dict[str, list[tuple[float, str]]] = {}
            [records] = executor.execute([run], count=count)
            for record in sorted(records.values(), key=lambda record: record["index"]):
                scores.setdefault(record["subtask"], []).append((record["score"] or 0.0, record["group"]))
            assert (length := run.task.length) is not None  # `compose_configs` refuses other tasks
            yield (
                length,
                {
                    name: Values([score for score, _ in pairs], [group for _, group in pairs])
                    for name, pairs in scores.items()
                },
            )


def describe_source(run: RunSpec) -> ScoreSource:
    """Return what the scores of all lengths have in common."""
    model = run.checkpoint
    return ScoreSource(model.name, model.identity(), run.task_settings["name"], SEED, run.dtype, name_device(run))


def name_device(run: RunSpec) -> str:
    """Return the name of the GPU, or CPU."""
    return str(run.value["device"].get("gpu", "CPU"))


def format_card(run: RunSpec, command: str, by_length: Mapping[int, Mapping[str, Values]]) -> Iterator[str]:
    """Yield the lines of the YAML, with the command and the scores as comments."""
    yield from wrap_text(command, "# ")
    scored = {
        length: {name: list(values.values) for name, values in scores.items()} for length, scores in by_length.items()
    }
    count = max(len(subtask_scores) for scores in scored.values() for subtask_scores in scores.values())
    yield from wrap_text(
        f"The full cache's mean score of {count} samples a subtask, {run.dtype}, {name_device(run)}:", "# "
    )
    for length, scores in scored.items():
        said = ", ".join(
            f"{name} {sum(subtask_scores) / len(subtask_scores):.1f}" for name, subtask_scores in scores.items()
        )
        yield from wrap_text(f"{length}: {said}", "# ", "#   ")
    where = "kvbench/analysis/solvable_subtasks.py"
    yield f"# Listed: {solvable_subtasks.LEAST_SCORE:g} or more. The samples have a seed of their own; see {where}."
    lists = {
        length: [name for name, subtask_scores in scores.items() if solvable_subtasks.is_solvable(subtask_scores)]
        for length, scores in scored.items()
    }
    yield from format_list(run.checkpoint.identity(), SEED, run.task_settings["name"], lists)


def format_list(weights: str, seed: int, task: str, lists: Mapping[int, Sequence[str]]) -> Iterator[str]:
    """Yield the lines of the YAML: the key `solvable` of a model's file.

    Args:
        weights: Identity of the model's weights.
        seed: Seed of the samples.
        task: The task.
        lists: Length -> the subtasks that are listed.
    """
    yield f"{solvable_subtasks.KEY}:"
    yield f'  weights: "{weights}"'
    yield f"  seed: {seed}"
    yield f"  {task}:"
    for length, names in lists.items():
        yield from wrap_text(f"{length}: [{', '.join(names)}]", "    ", "      ")


def wrap_text(text: str, begin: str, then: str | None = None) -> list[str]:
    """Wrap a text; `begin` opens the first line and `then` the others."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=begin,
        subsequent_indent=then or begin,
        break_long_words=False,
        break_on_hyphens=False,
    )


def parse_numbers(name: str, text: str, most: int | None = None) -> list[int]:
    """Parse different whole numbers of at least 1, separated by commas; SettingError for anything else."""
    numbers = text.split(",")
    are_whole = all(one.isascii() and one.isdecimal() and int(one) for one in numbers)
    are_different = are_whole and len(set(map(int, numbers))) == len(numbers)
    if not are_different or most is not None and len(numbers) > most:
        raise SettingError(
            f"{name}={text}: {'different whole numbers' if most is None else 'a whole number'} of at least 1"
        )
    return list(map(int, numbers))

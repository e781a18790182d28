"""RULER as kvpress publishes and scores it (NVIDIA/kvpress evaluation/benchmarks/ruler). task=ruler is official.

The data set simonjegou/ruler has prompts of the 13 tasks, which NVIDIA/RULER made for the tokenizer of Llama 3.1, in a
folder for each length. A prompt is the same text for every model, so its length differs between tokenizers.
tasks/common/kvpress_rows.py says how a row becomes a prompt.

kvpress deletes control characters from an answer before it scores it. NVIDIA/RULER makes line breaks of them. Otherwise
scores are those of task=ruler: the share of the references that the answer contains, in qa whether it contains any.
"""

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from kvbench.interfaces.task import Graded, Sample, Tokenizer
from kvbench.tasks.common import dataset_rows, kvpress_rows
from kvbench.tasks.ruler.task import FAMILIES, SUBTASKS, count_least_units, draw_sample, render_sample
from kvbench.tasks.ruler.texts import load_texts
from kvbench.validation import SettingError, require_int, resolve_subtasks

HUB = ("simonjegou/ruler", "24adceac8a0e6532936e8d721cd9e9084d2e4686")
COLUMNS: dataset_rows.Columns = {**kvpress_rows.COLUMNS, "answer": list, "task": str}
RENAMED = {
    **{"vt": "ruler_vt", "cwe": "ruler_cwe", "fwe": "ruler_fwe"},
    **{"qa_1": "ruler_qa_squad", "qa_2": "ruler_qa_hotpot"},
}  # kvpress's name of a task -> task=ruler's
PUBLISHED = {RENAMED.get(name, name): name for name in (*(name for name in SUBTASKS if name[:4] == "niah"), *RENAMED)}
ROWS, LENGTH = 4, 1024  # rows of each subtask of the miniature; the length that decides parameters of cwe and fwe


@dataclass(frozen=True)
class RulerKvpress:
    """The task. conf/task/ruler_kvpress.yaml describes its settings."""

    name: str = "ruler_kvpress"
    path: str = dataset_rows.MINIATURE
    data_dir: int = 4096
    subtasks: str | Sequence[str] = "all"
    limit: int | None = None
    length: None = None
    subtask_names: ClassVar[tuple[str, ...]] = SUBTASKS

    def check(self) -> None:
        """Check the settings and read all rows.

        Raises:
            SettingError: A setting or a row is invalid.
        """
        dataset_rows.check_path("task.path", self.path)
        require_int("task.data_dir", self.data_dir, 1)
        if self.limit is not None:
            require_int("limit", self.limit, 1)
        self.inventory()

    def inventory(self) -> dict[str, int]:
        """Count the rows of each chosen subtask."""
        return {name: len(rows) for name, rows in self._rows.items()}

    def fingerprint(self) -> str:
        """Hash the rows of the chosen subtasks."""
        return self._fingerprint

    def samples(self, tokenizer: Tokenizer, template_tokens: int, longest: int) -> Iterator[Sample]:
        """Yield the samples subtask by subtask, in the order of the data."""
        for name, rows in self._rows.items():
            for index, row in enumerate(rows[: self.limit]):
                yield Sample(
                    uid=f"{name}/{self.data_dir}/{index}",
                    subtask=name,
                    answers=tuple(row["answer"]),
                    group=hashlib.sha256(row["context"].encode()).hexdigest()[:16],
                    meta={"data": dataset_rows.name_source(self.path)},
                    **kvpress_rows.make_prompt(row, tokenizer),
                )

    def score(self, sample: Sample, output: str) -> Graded:
        """Score by the share of the references in the output, in qa by whether any is."""
        answer = re.sub(r"[\x00-\x1f]", "", output.strip()).strip()
        hits = [reference.lower() in answer.lower() for reference in sample.answers]
        share = any(hits) if _is_qa(sample.subtask) else sum(hits) / len(hits)
        return Graded(100.0 * share, answer)

    def reference(self, sample: Sample) -> str:
        """Return the right answer: all references, or the first one if any of them is enough."""
        return sample.answers[0] if _is_qa(sample.subtask) else ", ".join(sample.answers)

    @cached_property
    def _rows(self) -> dict[str, list[dataset_rows.Row]]:
        """The rows of each chosen subtask."""
        chosen = resolve_subtasks("task.subtasks", self.subtasks, SUBTASKS)
        rows = check_rows(find_rows(self.path, self.data_dir))
        by_subtask = {name: [row for row in rows if row["task"] == PUBLISHED[name]] for name in chosen}
        if missing := [name for name, of_subtask in by_subtask.items() if not of_subtask]:
            raise SettingError(f"task.path: no rows of {', '.join(PUBLISHED[name] for name in missing)}")
        return by_subtask

    @cached_property
    def _fingerprint(self) -> str:
        return dataset_rows.hash_rows(self.path, [row for rows in self._rows.values() for row in rows])


def find_rows(path: str, data_dir: int) -> Iterator[tuple[str, dataset_rows.Row]]:
    """Yield (where, row) for the rows of a length.

    Args:
        path: ``miniature``, ``hub``, a file, or a folder with <data_dir>/test-*.parquet.
        data_dir: The folder of a length.

    Raises:
        SettingError: There is no such file, or it cannot be read.
    """
    if path == dataset_rows.MINIATURE:
        yield from make_rows()
    elif path == dataset_rows.HUB:
        yield from dataset_rows.read_hub_rows("task.path", *HUB, str(data_dir), "test")
    else:
        place = Path(path).expanduser()
        files = [place] if place.is_file() else sorted(place.glob(f"{data_dir}/test-*.parquet"))
        if not files:
            raise SettingError(f"task.path={path}: a file, or a folder with {data_dir}/test-00000-of-00001.parquet")
        for file in files:
            yield from dataset_rows.read_rows("task.path", file)


def check_rows(located: Iterator[tuple[str, dataset_rows.Row]]) -> list[dataset_rows.Row]:
    """Check rows and return them; a SettingError names row and column."""
    limit = "max_new_tokens"
    listed = [
        (where, {**row, limit: dataset_rows.parse_whole(row[limit])} if limit in row else row) for where, row in located
    ]
    rows = dataset_rows.check_rows("task.path", listed, COLUMNS)
    for where, row in listed:
        dataset_rows.check_texts("task.path", where, "answer", row["answer"])
        kvpress_rows.check_limit("task.path", where, row)
        if row["task"] not in PUBLISHED.values():
            known = ", ".join(PUBLISHED.values())
            raise SettingError(f"task.path: {where}: task is {row['task']!r}, expected one of {known}")
    return rows


def make_rows() -> Iterator[tuple[str, dataset_rows.Row]]:
    """Yield (where, row) for the miniature: prompts of task=ruler that are as short as they can be."""
    texts = load_texts(None, None)
    for family in FAMILIES:
        name = family.name
        for index in range(ROWS):
            rng, units = random.Random(f"kvbench {name}/{index}"), count_least_units(name, texts, LENGTH, index)
            made = render_sample(name, draw_sample(name, units, rng, texts, LENGTH, index=index), texts)
            yield (
                f"miniature {name} row {index}",
                {
                    **{"context": made.context, "question": made.question, "answer_prefix": made.answer_prefix},
                    **{"answer": list(made.answers), "task": PUBLISHED[name]},
                    "max_new_tokens": family.new_tokens,
                },
            )


def _is_qa(name: str) -> bool:
    return PUBLISHED[name].startswith("qa_")

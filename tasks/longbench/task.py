"""LongBench v1: 16 English and code tasks and 5 Chinese ones (arXiv 2308.14508; THUDM/LongBench 2e00731, LongBench/).

`subtasks=all` is the 16 that most papers have, `chinese` the 5, and `all21` all of them.

Prompts, middle truncation before the chat template, tasks without a template, token limits and metrics are official.
The context ends where the row's `context` ends, and the question follows. There is no answer prefix, because upstream
puts the whole prompt into the user's message.

`max_length` (tokens before the chat template) is upstream's model2maxlen: 3500, 7500, 15500, 31500 for windows of 4096,
8192, 16384, 32768. null continues that series by 1000 ⌊window / 1024⌋ − 500, which gives the 127500 that papers use at
131072.

`variant=e` is LongBench-E: 13 of the tasks, with about as many short rows as long ones. A row of the table is a task in
an interval of lengths, as in eval.py: under 4000 words, under 8000, and more.

`protocol=lm_eval` reads the same rows as lm-evaluation-harness 0.4.13 does (lm_eval/tasks/longbench/), with its
defaults:

* The prompt is lm-eval's template. Six of these lack a line break or a blank (tasks/longbench/prompts.py).
* No task has a chat template.
* A line break ends the answers of trec, triviaqa, samsum and lsht, also as their first token.
* White space around an answer is stripped before it is scored. An answer of code counts by its first line that is not
  blank and has no comment mark.
* No prompt is shortened. lm-eval drops the beginning of a prompt that is too long for the model. kvbench refuses such a
  prompt, unless `max_length` leaves out its middle as upstream does.

`protocol=kvpress` reads the data set that kvpress's evaluation reads, Xnhyacinth/LongBench:

* A row holds the whole prompt and the most tokens of its answer (tasks/common/kvpress_rows.py).
* Every task has a chat template, and no prompt is shortened.
* An answer of trec, triviaqa, samsum and lsht counts by its first line behind any white space.

lm-eval's own data set, which is the same, already holds the instructions that its templates write around a row, so
its prompts have them twice. kvbench reads the official rows, so its prompts have them once.
"""

import hashlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from kvbench.interfaces.task import Graded, Sample, Tokenizer
from kvbench.tasks.common import dataset_rows, kvpress_rows
from kvbench.tasks.longbench import chinese
from kvbench.tasks.longbench.metrics import first_line, lm_eval_code_line
from kvbench.tasks.longbench.prompts import PromptTemplate, load_lm_eval_prompt, load_official_prompt
from kvbench.tasks.longbench.rows import load_kvpress_rows, load_rows
from kvbench.tasks.longbench.subtasks import (
    CATEGORIES,
    CHINESE,
    COMPLETION,
    E_NAMES,
    ENGLISH,
    INTERVALS,
    NAMES,
    SETS,
    SHOTS,
    SUBTASKS,
    Subtask,
    find_interval,
)
from kvbench.tasks.longbench.truncation import truncate_middle
from kvbench.validation import SettingError, require_choice, require_int, require_length

E = "e"
OFFICIAL, LM_EVAL, KVPRESS = "official", "lm_eval", "kvpress"


@dataclass(frozen=True)
class LongBench:
    """The task. conf/task/longbench.yaml describes its settings."""

    name: str = "longbench"
    path: str = dataset_rows.MINIATURE
    variant: str | None = None
    subtasks: str | Sequence[str] = "all"
    protocol: str = OFFICIAL
    max_length: int | None = None
    limit: int | None = None
    length: None = None
    subtask_names: ClassVar[tuple[str, ...]] = NAMES

    def check(self) -> None:
        """Check the settings and read all rows of the chosen subtasks.

        Raises:
            SettingError: A setting or a row is invalid.
        """
        dataset_rows.check_path("task.path", self.path)
        require_choice("task.variant", self.variant, (None, E))
        require_choice("task.protocol", self.protocol, (OFFICIAL, LM_EVAL, KVPRESS))
        if self.max_length is not None:
            require_int("task.max_length", self.max_length, 2)
        if self.limit is not None:
            require_int("limit", self.limit, 1)
        file = Path(self.path).expanduser()
        for_e = file.stem.endswith("_e")
        if file.is_file() and file.stem.removesuffix("_e") in NAMES and for_e != (self.variant == E):
            variant, other = ("null", E) if for_e else (E, "null")
            raise SettingError(f"task.variant={variant}: {file.name} is read with task.variant={other}")
        if any(subtask.metric in (chinese.qa_f1, chinese.rouge) for subtask in self._chosen):
            chinese.require_jieba()
        self.inventory()

    @property
    def averages(self) -> Mapping[str, Mapping[str, float]]:
        """Return the weights of the averages: name -> subtask -> weight.

        A choice of subtasks has the mean over them. If the 16 English and code tasks are among them, their mean (as in
        KeyDiff's Table 1, DropKV and CentroidKV) and the mean over their six categories (as in DeltaKV) follow. Then
        come the means of those categories that are complete, and of the Chinese tasks. A category is its English or
        code tasks, whatever else is chosen, so that a name has one meaning in all runs.

        LongBench-E has the mean over the tasks, in which the intervals of a task weigh the same, and the mean over the
        tasks in each interval.
        """
        chosen = self._chosen
        if self.variant == E:
            return self._interval_means()
        names = [subtask.name for subtask in chosen]
        means = {f"mean of {len(names)} tasks": dict.fromkeys(names, 1 / len(names))}
        if set(ENGLISH) <= set(names):
            means.setdefault(f"mean of {len(ENGLISH)} tasks", dict.fromkeys(ENGLISH, 1 / len(ENGLISH)))
            means[f"mean of {len(CATEGORIES)} categories"] = {
                subtask.name: 1 / len(CATEGORIES) / len(whole) for whole in CATEGORIES.values() for subtask in whole
            }
        groups = {category: [subtask.name for subtask in whole] for category, whole in CATEGORIES.items()} | {
            "Chinese": CHINESE
        }
        for group, whole_group in groups.items():
            if set(whole_group) <= set(names):
                means[group] = dict.fromkeys(whole_group, 1 / len(whole_group))
        return means

    def inventory(self) -> dict[str, int]:
        """Count the rows of each subtask, of LongBench-E in each interval."""
        return {name: len(rows) for name, _, rows in self._parts}

    def fingerprint(self) -> str:
        """Hash the rows and prompts of the chosen subtasks."""
        return self._fingerprint

    def samples(self, tokenizer: Tokenizer, template_tokens: int, longest: int) -> Iterator[Sample]:
        """Yield the samples by rows of the table, in the order of the data. `limit` counts samples of such a row.

        Raises:
            SettingError: Prompts are longer than the model takes. The message names all their subtasks.
        """
        series = longest // 1024 * 1000 - 500 if self.protocol == OFFICIAL else sys.maxsize
        most = self.max_length if self.max_length is not None else series
        if most < 2:
            raise SettingError(f"task.max_length=null: a model that takes {longest} tokens needs a number here")
        made = (
            self._sample(part, subtask, row, tokenizer, most)
            for part, subtask, rows in self._parts
            for row in rows[: self.limit]
        )
        answer = max(self._new_tokens(subtask, row) for _, subtask, rows in self._parts for row in rows)
        if most + template_tokens + answer > longest:
            yield from self._check_fit(list(made), tokenizer, template_tokens, longest)
        else:
            yield from made

    def reference(self, sample: Sample) -> str:
        """Return the first of the right answers."""
        return sample.answers[0]

    def score(self, sample: Sample, output: str) -> Graded:
        """Score an output by the subtask's metric and the reference that gives most."""
        subtask = SUBTASKS[NAMES.index(sample.subtask.partition("/")[0])]
        extract, classes = subtask.extract, sample.meta.get("all_classes", ())
        if self.protocol == LM_EVAL:
            extract = lm_eval_code_line if subtask.category == COMPLETION else str.strip
        if self.protocol == KVPRESS and self.variant is None and extract is first_line:
            output = output.lstrip()
        answer = extract(output)
        return Graded(100.0 * max(subtask.metric(answer, reference, classes) for reference in sample.answers), answer)

    @cached_property
    def _chosen(self) -> tuple[Subtask, ...]:
        known, sets = (E_NAMES, {"all": E_NAMES}) if self.variant == E else (NAMES, SETS)
        given = self.subtasks
        if isinstance(given, Sequence) and len(given) == 1:
            [given] = given
        if isinstance(given, str):
            require_choice("task.subtasks", given, (*sets, *known))
            given = given if given == "all" else list(sets.get(given, (given,)))
        names: Sequence[str] = dataset_rows.select_subtasks(given, self.path, known, self._ending)
        if given == "all" and len(names) > 1:  # a single file is its own subtask
            names = sets["all"]
        return tuple(SUBTASKS[NAMES.index(name)] for name in names)

    @cached_property
    def _rows(self) -> dict[str, list[dataset_rows.Row]]:
        """The rows of each chosen subtask."""
        load = load_kvpress_rows if self.protocol == KVPRESS else load_rows
        return load(self.path, self._chosen, self._ending)

    @property
    def _ending(self) -> str:
        return "_e" if self.variant == E else ""

    @cached_property
    def _parts(self) -> list[tuple[str, Subtask, list[dataset_rows.Row]]]:
        """Each row of the table, with its subtask and its rows of the data."""
        if self.variant is None:
            return [(subtask.name, subtask, self._rows[subtask.name]) for subtask in self._chosen]
        parts = []
        for subtask in self._chosen:
            by_interval: dict[str, list[dataset_rows.Row]] = {interval: [] for interval in INTERVALS}
            for row in self._rows[subtask.name]:
                by_interval[find_interval(row["length"])].append(row)
            parts += [(f"{subtask.name}/{interval}", subtask, rows) for interval, rows in by_interval.items() if rows]
        return parts

    def _interval_means(self) -> dict[str, dict[str, float]]:
        names = [name for name, _, _ in self._parts]
        of_task = Counter(name.partition("/")[0] for name in names)
        shares = {name: 1 / len(of_task) / of_task[name.partition("/")[0]] for name in names}
        means = {f"mean of {len(of_task)} tasks": shares}
        for interval in INTERVALS:
            if there := [name for name in names if name.endswith(f"/{interval}")]:
                means[interval] = dict.fromkeys(there, 1 / len(there))
        return means

    @cached_property
    def _fingerprint(self) -> str:
        prompts = [{name: asdict(self._prompt(name))} for name in self._rows if self.protocol != KVPRESS]
        return dataset_rows.hash_rows(self.path, [*prompts, *(row for rows in self._rows.values() for row in rows)])

    def _prompt(self, name: str) -> PromptTemplate:
        return load_lm_eval_prompt(name) if self.protocol == LM_EVAL else load_official_prompt(name)

    def _new_tokens(self, subtask: Subtask, row: dataset_rows.Row) -> int:
        """Return the most tokens of an answer."""
        return row["max_new_tokens"] if self.protocol == KVPRESS else subtask.new_tokens

    def _sample(self, part: str, subtask: Subtask, row: dataset_rows.Row, tokenizer: Tokenizer, most: int) -> Sample:
        if self.protocol == KVPRESS:
            texts = kvpress_rows.make_prompt(row, tokenizer)
            context, question, prefix = (texts[name] for name in ("context", "question", "answer_prefix"))
        else:
            context, question = self._prompt(subtask.name).render(row["context"], row["input"])
            prefix = ""
        context, question, cut = truncate_middle(tokenizer, context, question, most)
        meta = {"data": dataset_rows.name_source(self.path), "length": row["length"], "left_out_of": cut}
        if row["all_classes"]:
            meta["all_classes"] = row["all_classes"]
        official = self.protocol == OFFICIAL
        samsum = official and subtask.name == "samsum"  # upstream: at least one token, and a line break ends it
        return Sample(
            uid=f"{subtask.name}/{row['_id']}",
            subtask=part,
            context=context,
            question=question,
            answer_prefix=prefix,
            answers=tuple(row["answers"]),
            max_new_tokens=self._new_tokens(subtask, row),
            group=hashlib.sha256(row["context"].encode("utf-8", "surrogatepass")).hexdigest()[:16],
            chat=self.protocol == KVPRESS or official and subtask.chat,
            meta=meta,
            ends=(tokenizer.encode("\n", add_special_tokens=False)[-1],) if samsum else (),
            until=("\n",) if self.protocol == LM_EVAL and subtask.category == SHOTS else (),
            min_new_tokens=1 if samsum else 0,
        )

    def _check_fit(self, made: list[Sample], tokenizer: Tokenizer, template_tokens: int, longest: int) -> list[Sample]:
        """Return the samples; raise a SettingError that names all subtasks with a sample that is too long."""
        needs: dict[str, int] = {}
        for sample in made:
            text = sample.context + sample.question + sample.answer_prefix
            name = sample.subtask.partition("/")[0]
            ids = tokenizer.encode(text, add_special_tokens=False) if sample.chat else tokenizer.encode(text)
            need = len(ids) + (template_tokens if sample.chat else 0) + sample.max_new_tokens
            needs[name] = max(need, needs.get(name, 0))
        why = f"with the answer, the model takes {longest} tokens; give a smaller number"
        require_length("task.max_length", self.max_length, longest, needs, why)
        return made

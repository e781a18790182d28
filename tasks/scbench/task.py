"""SCBench: several turns, or several queries, on one long context (arXiv 2412.10319; microsoft/MInference, scbench/).

Prompts, token limits and metrics are upstream's. repoqa and repoqa_and_kv are refused, because their metric runs a
parser over the code that the model wrote. There are two modes:

* `multi_turn`: a row is one conversation. A later turn finds the reference answers before it (`answers=golden`,
  upstream's default) or the model's own.
* `shared_context` (upstream's same_context_different_query): every query stands by itself on the context. With
  `question=hidden` the context's cache is cut once for all of them.

A row of the table is a turn index of a task, for which upstream prints one accuracy. In shared_context a row is a task,
and each of its queries weighs the same, as in upstream. The averages are the mean of the tasks, the mean of the four
tasks of DeltaKV's Table 2, and each task's mean over its rows. They weigh all rows alike, even if a late turn has few
samples. DeltaKV's mean is also given with equal weights for the samples of a task.

kvbench differs from upstream:

* A sequence begins with one begin token; upstream's chat prompts have two.
* A context is cut in the middle so that the whole conversation fits `length`; upstream keeps room for answers only.
* `max_turns` holds for every row; upstream cuts no row if the first one is short enough.
* With a chat template each turn of mf asks for its own number; upstream's later turns all name the last turn's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvbench.interfaces.task import Graded, Sample, Tokenizer
from kvbench.tasks.common.dataset_rows import MINIATURE, check_path, hash_rows, name_source, select_subtasks
from kvbench.tasks.common.sample_cache import hash_parts
from kvbench.tasks.scbench import rows as data
from kvbench.tasks.scbench.prompts import NAMES, NEEDLE, SUMMARY, TaskForm, load_forms
from kvbench.tasks.scbench.prompts import hash_prompts as forms_fingerprint
from kvbench.validation import SettingError, require_choice, require_int

REFUSED = ("scbench_repoqa", "scbench_repoqa_and_kv")
MODES, ANSWERS = ("multi_turn", "shared_context"), ("golden", "own")
DELTAKV = ("scbench_kv", "scbench_qa_eng", "scbench_summary_with_needles", "scbench_many_shot")
PARTS = {SUMMARY: "summary", NEEDLE: "needle"}


@dataclass(frozen=True)
class SCBench:
    """The task. conf/task/scbench.yaml describes its settings."""

    name: str = "scbench"
    path: str = MINIATURE
    subtasks: str | Sequence[str] = "all"
    mode: str = "multi_turn"
    answers: str = "golden"
    max_turns: int | None = 5
    length: int | None = None
    limit: int | None = None
    rows: int | None = None

    def check(self) -> None:
        """Check the settings and read the data.

        Raises:
            SettingError: A setting or a row is invalid.
        """
        check_path("task.path", self.path)
        require_choice("task.mode", self.mode, MODES)
        require_choice("task.answers", self.answers, ANSWERS)
        if self.mode == "shared_context" and self.answers != "golden":
            raise SettingError(f"task.answers={self.answers}: shared_context has no answers before a query; golden")
        for setting, value in (("task.max_turns", self.max_turns), ("task.length", self.length), ("limit", self.limit)):
            if value is not None:
                require_int(setting, value, 1)
        if self.rows is not None:
            if self.path != MINIATURE:
                given = f"task.rows={self.rows}"
                raise SettingError(f"{given}: the miniature makes so many; null with task.path={self.path}")
            require_int("task.rows", self.rows, 1)
        for name in [self.subtasks] if isinstance(self.subtasks, str) else self.subtasks or ():
            if name in REFUSED:
                raise SettingError(f"task.subtasks={name}: its metric parses the code that the model wrote, refused")
        self.inventory()

    def fingerprint(self) -> str:
        """Hash the rows and the prompt strings."""
        return hash_parts(forms_fingerprint(), *(hash_rows(self.path, rows) for _, rows, _ in self._loaded))[:16]

    def inventory(self) -> dict[str, int]:
        """Count the contexts of each task in the data."""
        return {form.name: len(rows) for form, rows, _ in self._loaded}

    def count_samples(self) -> dict[str, int]:
        """Return the number of questions of each row of the table."""
        return {name: count for rows in self._counts().values() for name, count in rows.items()}

    @property
    def averages(self) -> dict[str, dict[str, float]]:
        """The weights of the averages: name -> subtask -> weight. The weights of an average sum to one."""
        tasks = self._counts()
        by_task = {name: dict.fromkeys(rows, 1 / len(rows)) for name, rows in tasks.items()}
        means = {"mean of tasks": _mean(list(by_task.values()))}
        if set(DELTAKV) <= set(by_task):
            means["DeltaKV's four"] = _mean([by_task[name] for name in DELTAKV])
            chosen = [tasks[name] for name in DELTAKV]
            by_samples = [
                {row: count / sum(task_counts.values()) for row, count in task_counts.items()} for task_counts in chosen
            ]
            means["DeltaKV's four, by samples"] = _mean(by_samples)
        return means | {name: rows for name, rows in by_task.items() if len(rows) > 1}

    def samples(self, tokenizer: Tokenizer, template_tokens: int, longest: int) -> Iterator[Sample]:
        """Yield the samples task by task, row by row and turn by turn."""
        chat = bool(getattr(tokenizer, "chat_template", None))
        for form, _, sessions in self._loaded:
            for index, session in enumerate(sessions):
                turns = self._turns(f"{form.name}/{index}", form, session, chat, tokenizer)
                context = self._fit(form, session, turns, tokenizer, template_tokens, self.length or longest)
                for turn in turns:
                    yield Sample(context=context, **turn)

    def reference(self, sample: Sample) -> str:
        """Return the answer that later turns find, or the first of the right answers."""
        return sample.said or sample.answers[0]

    def score(self, sample: Sample, output: str) -> Graded:
        """Score an output by the metric of the sample's task."""
        form = next(form for form in load_forms() if form.name == sample.subtask.partition("/")[0])
        return form.metrics[sample.meta["task"]].grade(output, sample.answers)

    def _counts(self) -> dict[str, dict[str, int]]:
        """Return task -> row of the table -> number of questions."""
        tasks: dict[str, dict[str, int]] = {}
        for form, _, sessions in self._loaded:
            for session in sessions:
                for index, turn in enumerate(session.turns):
                    counts, name = tasks.setdefault(form.name, {}), self._subtask(form, turn, index)
                    counts[name] = counts.get(name, 0) + 1
        return tasks

    @cached_property
    def _loaded(self) -> list[tuple[TaskForm, list[data.Row], list[data.Session]]]:
        """Each chosen task with all its rows and the sessions that are asked."""
        loaded, chosen = [], select_subtasks(self.subtasks, self.path, NAMES)
        for form in load_forms():
            if form.name in chosen:
                rows, sessions = data.load_rows(self.path, form, self.rows)
                cut = [
                    data.Session(session.context, session.turns[: self.max_turns]) for session in sessions[: self.limit]
                ]
                loaded.append((form, rows, cut))
        return loaded

    def _subtask(self, form: TaskForm, turn: data.Turn, index: int) -> str:
        part = [PARTS[turn.task]] if turn.task else []
        return "/".join([form.name, *part, *([f"turn{index + 1}"] if self.mode == "multi_turn" else [])])

    def _turns(self, row: str, form: TaskForm, session: data.Session, chat: bool, tokenizer: Tokenizer) -> list[dict]:
        """Return the fields of each sample of a row, without the context."""
        wording, samples = form.wording, []
        from_model, conversing = self.answers == "own", self.mode == "multi_turn"
        for index, turn in enumerate(session.turns):
            prefilled = ""
            if not conversing:
                question = (wording.shared_asked or wording.asked).format(**turn.slots)
            elif index == 0:
                question = "\n\n" + wording.asked.format(**turn.slots)
            else:
                as_first = form.choices and (chat or from_model)
                question = (wording.asked if as_first else wording.later or wording.asked).format(**turn.slots)
                prefilled = wording.prefilled if chat else ""
                if not chat:
                    question = ((tokenizer.eos_token or "\n\n") if from_model else "\n\n") + question
            samples.append(
                {
                    "uid": f"{row}/turn{index + 1}",
                    "subtask": self._subtask(form, turn, index),
                    "question": question,
                    "answer_prefix": prefilled,
                    "answers": turn.answers,
                    "max_new_tokens": form.metrics[turn.task].new_tokens,
                    "group": row,
                    "meta": {"data": name_source(self.path), "task": turn.task, "turn": index + 1},
                    "conversation": row if conversing else "",
                    "said": turn.golden if conversing and not from_model else None,
                }
            )
        return samples

    def _fit(
        self, form: TaskForm, session: data.Session, turns: list[dict], tokenizer: Tokenizer, template: int, most: int
    ) -> str:
        """Return the context with the text before it, its middle cut out so that all turns fit `most` tokens."""

        def tokens(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        def asks(turn: dict) -> int:
            return len(tokens(turn["question"] + turn["answer_prefix"]))

        wording, first = form.wording, session.turns[0]
        conversing = self.mode == "multi_turn"
        before = wording.before if conversing or wording.shared_before is None else wording.shared_before
        context = before.format(**first.slots) + session.context
        read, rest = 0, 0
        for turn in turns:
            rest = max(rest, read + asks(turn) + turn["max_new_tokens"])
            if conversing:  # a template puts less than twice as much between turns as around one
                said = turn["max_new_tokens"] if turn["said"] is None else len(tokens(turn["said"]))
                read += asks(turn) + said + 2 * template
        room = most - template - rest
        if room < 1:
            raise SettingError(f"task.length={most}: {turns[0]['uid']} needs {most - room} tokens beside its context")
        ids = tokens(context)
        asked = asks(turns[0]) if conversing else 0  # upstream's halves are those of context and first question
        kept = room
        while len(ids) > room and len(tokens(context)) > room:
            head = min((kept + asked) // 2, kept)
            tail = ids[len(ids) - (kept - head) :]
            context = tokenizer.decode(ids[:head]).rstrip("\ufffd") + tokenizer.decode(tail).lstrip("\ufffd")
            kept -= 1
        return context


def _mean(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of several averages."""
    return {name: weight / len(rows) for average in rows for name, weight in average.items()}

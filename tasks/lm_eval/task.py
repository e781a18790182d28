"""Tasks of EleutherAI's lm-evaluation-harness (lm_eval 0.4.13).

lm-eval gives documents, prompts, stop texts and metrics; kvbench gives records, pairing and intervals. Only tasks that
generate text run here. For multiple choice and perplexity use kvbench.integrations.lm_eval_model.KVBenchLM. Neither of
lm-eval's caches is used.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvbench.interfaces.task import Graded, Sample, Tokenizer
from kvbench.tasks.lm_eval.documents import Documents, DocumentSettings, read_documents
from kvbench.tasks.lm_eval.loader import MINIATURES, PACKAGE, find_tasks, load_task
from kvbench.validation import SettingError, is_number, require_choice, require_int

SOURCES = ("", ".yaml", ".yml", ".py")


@dataclass(frozen=True)
class LmEval:
    """The task. conf/task/lm_eval.yaml describes its settings."""

    tasks: str | Sequence[str]
    name: str = "lm_eval"
    include_path: str | None = None
    num_fewshot: int | None = None
    gen_kwargs: Mapping[str, Any] | None = None
    apply_chat_template: bool = False
    metadata: Mapping[str, Any] | None = None
    metric: str | None = None
    best: float = 1.0
    context: str = "context"
    question: str = "visible"
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    limit: int | None = None

    length = None

    def check(self) -> None:
        """Check the settings and load all documents, because a run is identified by their hash.

        Raises:
            SettingError: A setting is invalid, or a task cannot be used.
        """
        names = self._names()
        if not names or len(set(names)) < len(names) or not all(isinstance(name, str) for name in names):
            raise SettingError(f"task.tasks={self.tasks}: a name of lm-eval's, or a list of different ones")
        if self.include_path is not None and not Path(str(self.include_path)).expanduser().is_dir():
            raise SettingError(f"task.include_path={self.include_path}: no such folder")
        if self.num_fewshot is not None:
            require_int("task.num_fewshot", self.num_fewshot, 0)
        if self.limit is not None:
            require_int("limit", self.limit, 1)
        for setting in ("gen_kwargs", "metadata"):
            if not isinstance(getattr(self, setting), Mapping | None):
                raise SettingError(
                    f"task.{setting}={getattr(self, setting)}: settings such as {{name: value}}, or null"
                )
        require_choice("task.apply_chat_template", self.apply_chat_template, (True, False))
        if not is_number(self.best) or not self.best > 0:
            raise SettingError(f"task.best={self.best}: the metric's largest value, 1 or 100")
        if not isinstance(self.context, str):
            raise SettingError(f"task.context={self.context}: the name of a column")
        _ = self._documents

    def fingerprint(self) -> str:
        """Hash all documents and prompts, lm-eval's version, and the files beside a user's own task."""
        digest = hashlib.sha256(version("lm-eval").encode())
        for name, documents in self._documents.items():
            digest.update(documents.fingerprint().encode())
            folder = self._places[name][1]
            if folder != PACKAGE:
                for file in sorted(path for path in folder.rglob("*") if path.suffix in SOURCES and path.is_file()):
                    digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes())
        return digest.hexdigest()[:16]

    def samples(self, tokenizer: Tokenizer, template_tokens: int, longest: int) -> Iterator[Sample]:
        for documents in self._documents.values():
            for sample, _ in documents.by_uid.values():
                yield sample

    def score(self, sample: Sample, output: str) -> Graded:
        return self._documents[sample.subtask].score(sample.uid, output)

    def _names(self) -> list[str]:
        return [self.tasks] if isinstance(self.tasks, str) or not isinstance(self.tasks, Sequence) else list(self.tasks)

    @cached_property
    def _places(self) -> dict[str, tuple[Path, Path]]:
        return find_tasks(self._names(), self.include_path)

    @cached_property
    def _documents(self) -> dict[str, Documents]:
        wishes = DocumentSettings(
            self.num_fewshot,
            self.gen_kwargs,
            self.apply_chat_template,
            self.context,
            self.question == "hidden",
            self.metric,
            self.best,
            self.temperature,
            self.top_p,
            self.seed,
            self.limit,
        )
        documents = {}
        for name, (path, folder) in self._places.items():
            task = load_task(name, path, folder, self.metadata or {}, self.seed)
            data = {MINIATURES: "miniature", PACKAGE: "hub"}.get(folder, "local")
            documents[name] = read_documents(name, task, wishes, {"data": data, "lm_eval": version("lm-eval")})
        return documents

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the settings alone, because functions of lm-eval's tasks cannot be pickled."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

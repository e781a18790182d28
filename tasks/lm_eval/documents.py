"""Turn the documents of an lm-eval task into samples, and score outputs by the task's own filters and metrics.

lm-eval builds the prompt (`fewshot_context`), the generation settings (`construct_requests`) and the metrics
(`process_results` of each filter's output). A document becomes a sample only if it has one request, `generate_until`.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from numbers import Real
from typing import Any, Protocol

from kvbench.interfaces.task import Graded, Sample
from kvbench.tasks.lm_eval.loader import OTHER_SEED, check_output, explain_errors, seed_generators, silence_output
from kvbench.validation import SettingError, require_choice, require_int

MOST_TOKENS = 256  # lm-eval's default of max_gen_toks (lm_eval/defaults.py)
FOLLOWED = ("until", "max_gen_toks", "do_sample", "temperature", "top_p")


class MetricFilter(Protocol):
    """A filter of lm-eval: what is done to an output before the metrics of the filter's name."""

    name: str


class LmEvalTask(Protocol):
    """The part of lm-eval's Task that is used. lm-eval itself is imported late, because that takes seconds."""

    OUTPUT_TYPE: str | None
    eval_docs: Iterable[object]
    task_name: str
    _instances: Sequence[object]
    _filters: Sequence[MetricFilter]

    def get_config(self, key: str) -> Any: ...

    def set_config(self, key: str, value: object) -> None: ...

    def set_fewshot_seed(self, seed: int) -> None: ...

    def doc_to_prefix(self, doc: object) -> str | None: ...

    def doc_to_target(self, doc: object) -> object: ...

    def fewshot_context(
        self,
        doc: object,
        num_fewshot: int,
        *,
        apply_chat_template: bool = ...,
        chat_template: Callable[..., str] | None = ...,
        gen_prefix: str | None = ...,
    ) -> object: ...

    def construct_requests(self, doc: object, ctx: str, *, metadata: tuple[str, int, int]) -> Any: ...

    def apply_filters(self) -> object: ...

    def process_results(self, doc: object, results: list[object]) -> Mapping[str, object]: ...

    def aggregation(self) -> Mapping[str, Callable[..., float]]: ...

    def higher_is_better(self) -> Mapping[str, bool]: ...


@dataclass(frozen=True)
class DocumentSettings:
    """How documents are read.

    Attributes:
        num_fewshot: Number of few-shot examples. ``None``: the task's own.
        gen_kwargs: Generation settings that replace the task's.
        apply_chat_template: Whether the model's chat template is used.
        context: The document's column that holds the context.
        hidden: Whether every document needs a context, because the cache is cut after it.
        metric: The metric that is the score. ``None``: the task's first.
        best: The metric's largest value.
        temperature: The run's temperature; a task that samples must ask for the same.
        top_p: The run's top_p, likewise.
        seed: Seed of lm-eval's generators.
        limit: The most documents.
    """

    num_fewshot: int | None = None
    gen_kwargs: Mapping[str, Any] | None = None
    apply_chat_template: bool = False
    context: str = "context"
    hidden: bool = False
    metric: str | None = None
    best: float = 1.0
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    limit: int | None = None


@dataclass(frozen=True)
class Documents:
    """The documents of one task.

    Attributes:
        name: The task's name.
        task: lm-eval's Task.
        best: The metric's largest value.
        metric: The metric that is the score.
        by_uid: By uid, a sample and lm-eval's Instance.
    """

    name: str
    task: LmEvalTask
    best: float
    metric: str
    by_uid: Mapping[str, tuple[Sample, Any]]

    def score(self, uid: str, output: str) -> Graded:
        """Score an output: points of the metric, and of the task's other metrics that are means over documents."""
        from lm_eval.api.instance import Instance

        asked = self.by_uid[uid][1]
        answered = Instance(asked.request_type, asked.doc, asked.arguments, asked.idx, asked.metadata, [output])
        self.task._instances = [answered]
        with silence_output():
            self.task.apply_filters()
            points = {
                _metric_name(name, key): self._points(name, value)
                for key, filtered in answered.filtered_resps.items()
                for name, value in self.task.process_results(asked.doc, [filtered]).items()
                if name in _list_mean_metrics(self.task)
            }
        if self.metric not in points:
            raise SettingError(f"task.metric={self.metric}: {self.name} gives {', '.join(points) or 'none'}")
        first = next(iter(answered.filtered_resps.values()))
        return Graded(points.pop(self.metric), str(first), points)

    def _points(self, name: str, value: object) -> float:
        if not isinstance(value, Real) or not 0 <= float(value) <= self.best:
            raise SettingError(f"task.best={self.best:g}: {self.name} gives {name} {value}, not from 0 to that")
        return 100.0 * float(value) / self.best

    def fingerprint(self) -> str:
        """Hash documents, prompts and generation settings."""
        digest = hashlib.sha256(self.name.encode())
        for _, asked in self.by_uid.values():
            digest.update(json.dumps([asked.doc, asked.arguments], sort_keys=True, default=str).encode())
        return digest.hexdigest()


def read_documents(
    name: str, task: LmEvalTask, wishes: DocumentSettings, meta: Mapping[str, Any], prefix: str | None = None
) -> Documents:
    """Read a task's documents.

    Args:
        name: The task's name.
        task: lm-eval's Task.
        wishes: How documents are read.
        meta: What records say about each sample.
        prefix: The uid of a document is ``prefix/index``. ``None``: the task's name.

    Raises:
        SettingError: The task has no documents, or one cannot be a sample.
    """
    setting = f"task.tasks={name}"
    check_output(setting, task.OUTPUT_TYPE)
    for flag, what in (("UNSAFE_CODE", "runs the code that a model writes"), ("MULTIMODAL", "shows more than text")):
        if getattr(task, flag, False):
            raise SettingError(f"{setting}: it {what}, which is not supported")
    metric = _choose_metric(setting, task, wishes.metric)
    shots = wishes.num_fewshot if wishes.num_fewshot is not None else task.get_config("num_fewshot")
    task.set_config("num_fewshot", shots or 0)
    task.set_fewshot_seed(OTHER_SEED + wishes.seed)
    by_uid = {}
    with seed_generators(wishes.seed), silence_output():
        for index, document in enumerate(islice(task.eval_docs, wishes.limit)):
            with explain_errors(f"{setting}: document {index}", "lm-eval cannot read it"):
                sample, asked = _sample(name, task, index, document, wishes, {**meta, "metric": metric})
            sample = replace(sample, uid=f"{prefix or name}/{index}")
            by_uid[sample.uid] = sample, asked
    if not by_uid:
        raise SettingError(f"{setting}: it has no documents")
    return Documents(name, task, wishes.best, metric, by_uid)


def _sample(
    name: str, task: LmEvalTask, index: int, document: object, wishes: DocumentSettings, meta: Mapping[str, Any]
) -> tuple[Sample, Any]:
    setting = f"task.tasks={name}"
    text, prefix = _build_prompt(task, document, wishes.apply_chat_template)
    asked = task.construct_requests(document, text + prefix, metadata=(name, index, 1))
    if isinstance(asked, list) and len(asked) == 1:
        [asked] = asked
    if isinstance(asked, list) or asked.request_type != "generate_until":
        raise SettingError(
            f"{setting}: a document has several requests or none that generates; lm-eval runs it with KVBenchLM"
        )
    if (task.get_config("repeats") or 1) > 1:
        raise SettingError(f"{setting}: it asks for {task.get_config('repeats')} answers a document, one is graded")
    asked.arguments = (asked.args[0], {**asked.args[1], **(wishes.gen_kwargs or {})})
    generation = read_generation_settings(setting, asked.args[1], wishes.temperature, wishes.top_p)
    end = _find_context_end(text, document, wishes.context)
    if end is None and wishes.hidden:
        raise SettingError(
            f"question=hidden: {name} has no column {wishes.context} that stands in its prompts; question=visible, or "
            "task.context=<another column>"
        )
    context = text[: end or 0]
    target = task.doc_to_target(document)
    sample = Sample(
        uid=f"{name}/{index}",
        subtask=name,
        context=context,
        question=text[len(context) :],
        answer_prefix=prefix,
        answers=tuple(map(str, target)) if isinstance(target, list | tuple) else (str(target),),
        group=f"{name}/{hashlib.sha256(context.encode()).hexdigest()[:16]}" if context else "",
        chat=wishes.apply_chat_template,
        meta=meta,
        **generation,
    )
    return sample, asked


def read_generation_settings(
    setting: str, given: Mapping[str, Any], temperature: float, top_p: float
) -> dict[str, Any]:
    """Return `max_new_tokens` and `until` from a request's generation settings.

    Raises:
        SettingError: A setting cannot be followed, or the task samples otherwise than the run.
    """
    from lm_eval.models.utils import normalize_gen_kwargs

    settings = normalize_gen_kwargs(dict(given), MOST_TOKENS)
    for key in settings:
        require_choice(f"{setting}: generation setting", key, FOLLOWED)
    wanted = (settings.get("temperature", 0.0), settings.get("top_p", 1.0))
    if settings["do_sample"] and wanted[0] > 0 and wanted != (temperature, top_p):
        raise SettingError(
            f"temperature={temperature}: {setting} samples at temperature={wanted[0]:g} top_p={wanted[1]:g}; set both "
            "so, or task.gen_kwargs={do_sample: false}"
        )
    require_int(f"{setting}: max_gen_toks", settings["max_gen_toks"], 1)
    return {"max_new_tokens": settings["max_gen_toks"], "until": tuple(end for end in settings["until"] if end)}


def _build_prompt(task: LmEvalTask, document: object, chat: bool) -> tuple[str, str]:
    """Build the prompt and the answer prefix.

    With a chat template, the prompt is the text that lm-eval gives to the template. A description, which lm-eval makes
    the system's message, opens the user's message.
    """
    prefix = task.doc_to_prefix(document) or ""
    shots = task.get_config("num_fewshot")
    if not chat:
        text = task.fewshot_context(document, shots, gen_prefix=prefix or None)
        if not isinstance(text, str):
            raise SettingError(f"task.tasks={task.task_name}: a document has several prompts")
        return text.removesuffix(prefix), prefix
    messages: list[Mapping[str, str]] = []

    def note(turns: list[Mapping[str, str]], **_: bool) -> str:
        messages.extend(turns)
        return ""

    template: Callable[..., str] = note
    task.fewshot_context(document, shots, apply_chat_template=True, chat_template=template, gen_prefix=prefix or None)
    return "".join(turn["content"] for turn in messages if turn["role"] != "assistant"), prefix


def _find_context_end(text: str, document: object, column: str) -> int | None:
    """Find where the document's context ends in its prompt. It may stand behind few-shot examples."""
    value = document.get(column) if isinstance(document, Mapping) else None
    if not isinstance(value, str) or not value.strip():
        return None
    place = text.rfind(value)
    return None if place < 0 else place + len(value)


def _choose_metric(setting: str, task: LmEvalTask, wanted: str | None) -> str:
    """Choose the metric that is the score: the wanted one, else the task's first."""
    higher = task.higher_is_better()
    names = [
        _metric_name(name, ensemble.name)
        for ensemble in task._filters
        for name in _list_mean_metrics(task)
        if higher.get(name) is not False
    ]
    if not names:
        all_of = ", ".join(task.aggregation())
        raise SettingError(f"{setting}: no metric is a mean over documents where more is better ({all_of})")
    if wanted is not None:
        require_choice(f"{setting}: task.metric", wanted, names)
    return wanted or names[0]


def _list_mean_metrics(task: LmEvalTask) -> list[str]:
    """List the metrics that are means over documents; other metrics do not score a single document."""
    from lm_eval.api.metrics import mean

    return [name for name, aggregation in task.aggregation().items() if aggregation is mean]


def _metric_name(name: str, key: str) -> str:
    """Return lm-eval's name of a metric: with the filter's name, if there is a filter."""
    return name if key == "none" else f"{name},{key}"

"""RULER as lm-eval 0.4.13 ports it, for numbers that must be compared with lm-eval's. The official RULER is task=ruler.

lm-eval's own modules make the documents, prompts and scores. They differ from NVIDIA/RULER:

* Sizes grow in linear steps, and fwe overflows the length.
* cwe has no solved example.
* Some wordings are older.
* Essays are not repeated.
* In qa an answer counts in part: `string_match_part` of one sample is `string_match_all`.

Each subtask is seeded by itself, so its samples do not depend on the other subtasks of the run, as they do in lm-eval.
Seed 0 gives what lm-eval gives for a subtask that runs alone.

The documents of niah_single_1, niah_multikey_2, niah_multikey_3, ruler_vt, ruler_cwe and ruler_fwe need no data. The
other needles need essays from the hub (baber/paul_graham_essays) and nltk's punkt_tab; qa needs SQuAD or HotpotQA.
lm-eval downloads these.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field, fields
from functools import cached_property
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any, ClassVar

from kvbench.interfaces.task import Graded, Sample, Tokenizer
from kvbench.network import require_reachable, use_hub
from kvbench.tasks.lm_eval.documents import Documents, DocumentSettings, read_documents
from kvbench.tasks.lm_eval.loader import PACKAGE, explain_errors, seed_generators, silence_output
from kvbench.validation import SettingError, require_choice, require_int, require_length, resolve_subtasks

NOTE = "RULER in lm-eval's port, which differs from the official one (task=ruler): compare with lm-eval's numbers only."
METRIC = "string_match"
ESSAYS = "baber/paul_graham_essays"


@dataclass(frozen=True)
class PortedSubtask:
    """A subtask of lm-eval's port.

    Attributes:
        file: lm-eval's YAML file, without its ending. Empty: the file has the subtask's name.
        module: lm-eval's module.
        make: Makes documents from (module, tokenizer, length, count).
        least: Returns the fewest tokens of a prompt from (module, tokenizer, length). Below them lm-eval's loops do
            not end, or it makes no document. None: not known.
        needs: Names what is downloaded, for messages. Empty: nothing is.
        fetch: Downloads it where only a module that takes long to load could say that it is out of reach, or asks
            whether its server answers.
        data: Returns it, from the module.
    """

    file: str
    module: str
    make: Callable[[ModuleType, Tokenizer, int, int], list[dict]]
    least: Callable[[ModuleType, Tokenizer, int], int] | None = None
    needs: str = ""
    fetch: Callable[[], None] = lambda: None
    data: Callable[[ModuleType], Any] = lambda _: None


def _niah(haystack: str, keys: str, values: str, **more: int) -> PortedSubtask:
    def make(niah: ModuleType, tokenizer: Tokenizer, length: int, count: int) -> list[dict]:
        return niah.generate_samples(
            niah.get_haystack(type_haystack=haystack),
            max_seq_length=length,
            template=niah.TEMPLATE,
            type_haystack=haystack,
            type_needle_k=keys,
            type_needle_v=values,
            num_samples=count,
            TOKENIZER=tokenizer,
            **more,
        )

    def least(niah: ModuleType, tokenizer: Tokenizer, length: int) -> int:
        from lm_eval.tasks.ruler.prepare_niah import generate_input_output  # downloads unless `_module` imported it

        queries, per_key = more.get("num_needle_q", 1), more.get("num_needle_v", 1)
        keyed = max(more.get("num_needle_k", 1), queries)
        text, *_ = generate_input_output(
            keyed * per_key,
            niah.get_haystack(type_haystack=haystack),
            type_haystack=haystack,
            num_needle_k=keyed,
            type_needle_k=keys,
            num_needle_v=per_key,
            type_needle_v=values,
            template=niah.TEMPLATE,
            num_needle_q=queries,
        )
        return _tokens(tokenizer, text) + 128 + MARGIN

    if haystack != "essay":
        return PortedSubtask("", "niah_utils", make, least)
    return PortedSubtask(
        "",
        "niah_utils",
        make,
        least,
        needs=f"{ESSAYS} and nltk's punkt_tab",
        fetch=_fetch_essays,
        data=lambda niah: niah.get_haystack(type_haystack="essay"),
    )


def _fetch_essays() -> None:
    from datasets import load_dataset

    load_dataset(ESSAYS, split="train")
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        require_reachable("https://raw.githubusercontent.com")
        nltk.download("punkt_tab", quiet=True, raise_on_error=True)


def _vt(vt: ModuleType, tokenizer: Tokenizer, length: int, count: int) -> list[dict]:
    example = vt.sys_vartrack_w_noise_random(tokenizer=tokenizer, num_samples=1, max_seq_length=500, incremental=5)[0]
    return vt.sys_vartrack_w_noise_random(
        tokenizer=tokenizer, num_samples=count, max_seq_length=length, icl_example=example
    )


def _vt_least(vt: ModuleType, tokenizer: Tokenizer, length: int) -> int:
    if _tokens(tokenizer, vt.generate_input_output(5, 1, 4, is_icl=True)[0]) + 30 + MARGIN > 500:
        raise SettingError("task.subtasks=ruler_vt: with this tokenizer lm-eval's example never fits its 500 tokens")
    return _tokens(tokenizer, vt.generate_input_output(10, 1, 4)[0]) + 30 + 500 + MARGIN


def _cwe(cwe: ModuleType, tokenizer: Tokenizer, length: int, count: int) -> list[dict]:
    return cwe.sys_word_pair_random(num_samples=count, max_seq_length=length, tokenizer=tokenizer)


def _cwe_least(cwe: ModuleType, tokenizer: Tokenizer, length: int) -> int:
    example, text, _ = cwe.generate_input_output(10, length)
    return _tokens(tokenizer, example + text) + 120 + 2 * MARGIN


def _fwe(fwe: ModuleType, tokenizer: Tokenizer, length: int, count: int) -> list[dict]:
    return fwe.sys_kwext(tokenizer=tokenizer, max_seq_length=length, num_samples=count)


def _fwe_least(fwe: ModuleType, tokenizer: Tokenizer, length: int) -> int:
    return max(250, _tokens(tokenizer, fwe.TEMPLATE + " abcdef" * 40))  # 5 coded words, the fourth of them once


def _qa(reader: str) -> Callable[..., list[dict]]:
    def make(qa: ModuleType, tokenizer: Tokenizer, length: int, count: int) -> list[dict]:
        questions, documents = getattr(qa, reader)()
        return qa.generate_samples(tokenizer, documents, questions, max_seq_length=length, num_samples=count)

    return make


def _tokens(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text))


MARGIN = 32  # tokens by which two draws of the same size may differ
PORTS = {
    "niah_single_1": _niah("repeat", "words", "numbers"),
    "niah_single_2": _niah("essay", "words", "numbers"),
    "niah_single_3": _niah("essay", "words", "uuids"),
    "niah_multikey_1": _niah("essay", "words", "numbers", num_needle_k=4),
    "niah_multikey_2": _niah("needle", "words", "numbers"),
    "niah_multikey_3": _niah("needle", "uuids", "uuids"),
    "niah_multivalue": _niah("essay", "words", "numbers", num_needle_v=4),
    "niah_multiquery": _niah("essay", "words", "numbers", num_needle_q=4),
    "ruler_vt": PortedSubtask("vt", "vt_utils", _vt, _vt_least),
    "ruler_cwe": PortedSubtask("cwe", "cwe_utils", _cwe, _cwe_least),
    "ruler_fwe": PortedSubtask("fwe", "fwe_utils", _fwe, _fwe_least),
    "ruler_qa_squad": PortedSubtask(
        "qa_squad", "qa_utils", _qa("read_squad"), needs="SQuAD", data=lambda qa: qa.read_squad(),
        fetch=lambda: require_reachable("https://rajpurkar.github.io"),
    ),
    "ruler_qa_hotpot": PortedSubtask(
        "qa_hotpot", "qa_utils", _qa("read_hotpotqa"), needs="HotpotQA", data=lambda qa: qa.read_hotpotqa(),
        fetch=lambda: require_reachable("https://huggingface.co"),
    ),
}  # fmt: skip
OFFLINE = tuple(name for name, port in PORTS.items() if not port.needs)


@dataclass(frozen=True)
class RulerLmEval:
    """The task. conf/task/ruler_lmeval.yaml describes its settings."""

    samples: InitVar[int]  # kept as `per_subtask`, because `samples` is the protocol's method
    name: str = "ruler_lmeval"
    length: int = 2048
    subtasks: str | Sequence[str] = "offline"
    apply_chat_template: bool = False
    seed: int = 0
    limit: int | None = None
    per_subtask: int = field(init=False)
    subtask_names: ClassVar[tuple[str, ...]] = tuple(PORTS)

    def __post_init__(self, samples: int) -> None:
        object.__setattr__(self, "per_subtask", samples)

    def check(self) -> None:
        """Check the settings and download the data that the subtasks need.

        Raises:
            SettingError: A setting is invalid, or the data cannot be reached.
        """
        require_int("task.length", self.length, 1)
        require_int("task.samples", self.per_subtask, 1)
        if self.limit is not None:
            require_int("limit", self.limit, 1)
        require_choice("task.apply_chat_template", self.apply_chat_template, (True, False))
        self.fingerprint()

    def fingerprint(self) -> str:
        """Hash the versions of the packages whose code and word lists make the documents, and the downloaded data."""
        digest = hashlib.sha256("".join(map(version, ("lm-eval", "wonderwords", "numpy"))).encode())
        for name in self._names():
            port = PORTS[name]
            if port.needs:
                what = f"{port.needs} is out of reach; without a network: {', '.join(OFFLINE)}"
                with explain_errors(f"task.subtasks={name}", what), silence_output(), use_hub():
                    port.fetch()
                    digest.update(json.dumps(port.data(_module(port.module))).encode())
        return digest.hexdigest()[:16]

    def count_samples(self) -> dict[str, int]:
        """Return the number of samples of each subtask."""
        count = self.per_subtask if self.limit is None else min(self.per_subtask, self.limit)
        return dict.fromkeys(self._names(), count)

    def samples(self, tokenizer: Tokenizer, template_tokens: int, longest: int) -> Iterator[Sample]:
        self._check_length(tokenizer)
        self._documents.clear()
        for name, count in self.count_samples().items():
            self._documents[name] = self._read(name, tokenizer, count)
            for sample, _ in self._documents[name].by_uid.values():
                yield sample

    def score(self, sample: Sample, output: str) -> Graded:
        return self._documents[sample.subtask].score(sample.uid, output)

    def _names(self) -> list[str]:
        return resolve_subtasks("task.subtasks", self.subtasks, tuple(PORTS), {"offline": OFFLINE})

    def _check_length(self, tokenizer: Tokenizer) -> None:
        """Raise a SettingError that names all subtasks that do not fit into the length, and those that do."""
        needs = {}
        for name in self._names():
            if (least := (port := PORTS[name]).least) is None:
                continue
            explained = explain_errors(f"task.subtasks={name}", "lm-eval cannot make it")
            with explained, silence_output(), use_hub(), seed_generators(self.seed):
                needs[name] = least(_module(port.module), tokenizer, self.length)
        require_length("task.length", self.length, self.length, needs, "with this tokenizer")

    def _read(self, name: str, tokenizer: Tokenizer, count: int) -> Documents:
        """Load lm-eval's task of a subtask, over documents that its module makes for the tokenizer."""
        from datasets import Dataset
        from lm_eval.api.task import ConfigurableTask
        from lm_eval.tasks._yaml_loader import load_yaml
        from lm_eval.tasks.ruler import common_utils

        port, setting = PORTS[name], f"task.subtasks={name}"
        with explain_errors(setting, "lm-eval cannot make it"), silence_output(), use_hub():
            with seed_generators(self.seed):
                documents = port.make(_module(port.module), tokenizer, self.length, count)
            if len(documents) < count:
                raise SettingError(
                    f"task.length={self.length}: {count - len(documents)} of {count} documents of {name} do not fit"
                )
            config = load_yaml(PACKAGE / "ruler" / f"{port.file or name}.yaml", resolve_func=False)
            grade = getattr(common_utils, config["process_results"].rpartition(".")[2])
            listed = Dataset.from_list(
                [{**document, "context": find_context(document["input"])} for document in documents]
            )
            config |= {
                "task": name,
                "custom_dataset": lambda **_: {"test": listed},
                "process_results": lambda document, outputs: {METRIC: grade(document, outputs)[str(self.length)]},
                "metric_list": [{"metric": METRIC, "aggregation": "mean", "higher_is_better": True}],
            }
            task = ConfigurableTask(config=config)
        wishes = DocumentSettings(apply_chat_template=self.apply_chat_template, seed=self.seed)
        return read_documents(
            name, task, wishes, {"note": NOTE, "lm_eval": version("lm-eval")}, prefix=f"{name}/{self.length}"
        )

    @cached_property
    def _documents(self) -> dict[str, Documents]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the settings alone, because functions of lm-eval's tasks cannot be pickled."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def find_context(text: str) -> str:
    """Return the prompt up to its last question: the part that `question=hidden` reads before the eviction."""
    cut = text.rfind("\nQuestion: ")
    return text[: cut if cut >= 0 else text.rfind("\n")]


def _module(name: str) -> ModuleType:
    """Load a fresh copy of one of lm-eval's modules, because cwe's has a generator that goes on from call to call.

    `prepare_niah` downloads data when it is imported, unless LOCAL_RANK says that another process does.
    """
    path = PACKAGE / "ruler" / f"{name}.py"
    spec = spec_from_file_location(f"ruler_lmeval_{name}", path)
    assert spec is not None and spec.loader is not None  # both are there for a path that ends in .py
    module, before = module_from_spec(spec), os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = "1"
    try:
        spec.loader.exec_module(module)
    finally:
        del os.environ["LOCAL_RANK"]
        os.environ.update({} if before is None else {"LOCAL_RANK": before})
    return module

"""Which definitions kvbench and kvpress share, both run on the same prompts, and a table of how far they agree.

kvpress runs in a process of its own (kvpress_reference.py here), because it needs an older transformers and patches
its attention functions. kvbench runs here, at the same time.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from kvbench.cache.policy import CachePolicy
from kvbench.config.catalogue import build, load_settings
from kvbench.engine import shared_prefill
from kvbench.engine.compressed_cache import CompressedCache, choose_cache
from kvbench.engine.generation import GenerationContext
from kvbench.interfaces.budget import Budget
from kvbench.models.chat_template import make_prompt_encoder, split_template
from kvbench.models.embedded import REFERENCE
from kvbench.tasks.common import synthetic_prose
from tests.support.method_files import make_method_args
from tests.support.repository import ROOT
from tests.support.tiny_models import COMMON, draw_model, heads, without_head_dim

SCRIPT = Path(__file__).parent / "kvpress_reference.py"
PACKAGES = ROOT / ".versions" / "kvpress"  # where `make parity` installs kvpress and its transformers
REAL_MODELS = ("smollm2", "smollm2_long")
BUDGETS = (0.5, 0.2, 0.05)
TOKENS = 10  # that follow the prompt and are compared
ANSWER = 20  # the same, where the answer is cut
INTERVAL = 8  # tokens between two of these cuts


@dataclass(frozen=True)
class Definition:
    """One definition in both programs. `press`: a kvpress class and its arguments; `method` … `allocator_args`: what
    kvbench calls the same. `window`: the newest rows that kvpress gives one common, highest score; it keeps all of them
    only where a head has at least `least` rows. `cuts_answer`: the prompt stays whole, and the answer is cut twice.
    """

    name: str
    press: Mapping[str, Any]
    method: str
    args: Mapping[str, Any] = field(default_factory=dict)
    allocator: str = "uniform"
    allocator_args: Mapping[str, Any] = field(default_factory=dict)
    window: int = 0
    least: int = 0
    eager: bool = False  # kvpress reads attention weights, which only eager attention gives
    cuts_answer: bool = False
    architectures: tuple[str, ...] = ()  # that kvpress can serve; empty: all

    @property
    def alone(self) -> bool:
        """Whether it needs a prefill of its own: the model reads about the prompt again, or nothing is cut yet."""
        return self.method == "kvzip" or self.cuts_answer

    @property
    def settings(self) -> Mapping[str, Any]:
        """Of kvbench's method."""
        decoding = {"decoding": True, "decode_interval": INTERVAL, "decode_size": "ROWS"} if self.cuts_answer else {}
        return {**self.args, **decoding}

    @property
    def press_name(self) -> str:
        """The class with its arguments, as one writes it in Python."""
        return written(self.press)

    @property
    def command(self) -> str:
        """The settings that kvbench's command line takes."""
        parts = [f"method={self.method}", *(f"method.{key}={shown(value)}" for key, value in self.settings.items())]
        if self.allocator != "uniform":
            parts += [f"allocator={self.allocator}"]
            parts += [f"allocator.{key}={shown(value)}" for key, value in self.allocator_args.items()]
        return " ".join(parts + ["budget=1.0"] * self.cuts_answer)


def shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{shown(own)}" for key, own in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def written(press: Mapping[str, Any]) -> str:
    arguments = [
        written(value) if isinstance(value, Mapping) else f"{key}={value}"
        for key, value in press.items()
        if key != "class"
    ]
    return f"{press['class']}({', '.join(arguments)})"


def press(name: str, inner: Mapping[str, Any] | None = None, **arguments: Any) -> dict[str, Any]:
    return {"class": name} | ({} if inner is None else {"press": inner}) | arguments


def cut_answer(name: str, inner: Mapping[str, Any], method: str, args: Mapping[str, Any]) -> Definition:
    """A definition that leaves ROWS rows of prompt and answer."""
    own = {"class": "DecodingPress", "base_press": inner, "compression_interval": INTERVAL, "target_size": "ROWS"}
    return Definition(f"{name}, cuts the answer", own, method, args, cuts_answer=True)


KVPRESS = {"preset": "kvpress"}
SNAPKV, SMALL = press("SnapKVPress"), press("SnapKVPress", window_size=8)
EXPECTED = press("ExpectedAttentionPress", epsilon=0.01)
PLAIN_EXPECTED = press("ExpectedAttentionPress", use_vnorm=False)
PLAIN_BASE = {"base": "expected_attention", "base_args": {"preset": "kvpress_class", "use_vnorm": False}}
HEAD_DIM = ("llama", "mistral", "qwen3")  # CriticalKVPress reads config.head_dim, which Qwen2's has not
LAYERWISE = {"mode": "safeguard", "alpha": 0}

DEFINITIONS = (
    Definition("Knorm", press("KnormPress"), "knorm", KVPRESS),
    Definition("KeyDiff", press("KeyDiffPress"), "keydiff", KVPRESS),
    Definition("TOVA", press("TOVAPress"), "tova", KVPRESS),
    Definition("StreamingLLM", press("StreamingLLMPress"), "sink", KVPRESS),
    Definition(
        "StreamingLLM, keys at their slot",
        press("KeyRerotationPress", press("StreamingLLMPress")),
        "sink",
        {"preset": "paper", "decoding": False},
    ),
    Definition("SnapKV", SNAPKV, "snapkv", KVPRESS, window=64, least=65),
    Definition("SnapKV, window 8", SMALL, "snapkv", KVPRESS | {"window": 8}, window=8, least=9),
    Definition("Expected Attention, ε 0.01", EXPECTED, "expected_attention", KVPRESS),
    Definition(
        "Expected Attention, ε 0", press("ExpectedAttentionPress"), "expected_attention", {"preset": "kvpress_class"}
    ),
    Definition("Observed attention", press("ObservedAttentionPress"), "observed_attention", eager=True),
    Definition("Q-Filters", press("QFilterPress"), "qfilters", KVPRESS),
    Definition("PyramidKV", press("PyramidKVPress"), "snapkv", KVPRESS, "pyramid", KVPRESS, window=64, least=65),
    Definition(
        "PyramidKV, window 8",
        press("PyramidKVPress", window_size=8),
        "snapkv",
        KVPRESS | {"window": 8},
        "pyramid",
        KVPRESS | {"window": 8},
        window=8,
        least=9,
    ),
    Definition(
        "AdaKV over SnapKV", press("AdaKVPress", SNAPKV), "snapkv", KVPRESS, "ada", KVPRESS, window=64, least=64
    ),
    Definition(
        "AdaKV over Expected Attention", press("AdaKVPress", EXPECTED), "expected_attention", KVPRESS, "ada", KVPRESS
    ),
    Definition("AdaKV over KeyDiff", press("AdaKVPress", press("KeyDiffPress")), "keydiff", KVPRESS, "ada", KVPRESS),
    Definition(
        "CriticalKV over SnapKV",
        press("CriticalKVPress", SNAPKV),
        "criticalkv",
        KVPRESS,
        window=64,
        least=128,
        architectures=HEAD_DIM,
    ),
    Definition(
        "CriticalKV over Expected Attention",
        press("CriticalKVPress", PLAIN_EXPECTED),
        "criticalkv",
        KVPRESS | PLAIN_BASE,
        architectures=HEAD_DIM,
    ),
    Definition(
        "CriticalAdaKV over SnapKV",
        press("CriticalAdaKVPress", SNAPKV),
        "criticalkv",
        KVPRESS,
        "ada",
        KVPRESS,
        window=64,
        least=128,
        architectures=HEAD_DIM,
    ),
    Definition(
        "CriticalAdaKV over Expected Attention",
        press("CriticalAdaKVPress", PLAIN_EXPECTED),
        "criticalkv",
        KVPRESS | PLAIN_BASE,
        "ada",
        KVPRESS,
        architectures=HEAD_DIM,
    ),
    Definition("DuoAttention", press("DuoAttentionPress"), "duo_attention", KVPRESS),
    Definition("KVzip", press("KVzipPress"), "kvzip", KVPRESS),
    Definition(
        "KVzip, layer by layer",
        press("KVzipPress", layerwise=True),
        "kvzip",
        KVPRESS | {"scope": "head"},
        "ada",
        LAYERWISE,
    ),
    cut_answer("Knorm", press("KnormPress"), "knorm", KVPRESS),
    cut_answer("KeyDiff", press("KeyDiffPress"), "keydiff", KVPRESS),
    cut_answer("TOVA", press("TOVAPress"), "tova", KVPRESS),
    cut_answer("StreamingLLM", press("StreamingLLMPress"), "sink", KVPRESS),
    cut_answer("Expected Attention, ε 0.01", EXPECTED, "expected_attention", {"preset": "decode_kvpress"}),
)


@dataclass(frozen=True)
class Case:
    """A definition on a prompt of `tokens` tokens at a budget (fraction of rows kept)."""

    definition: Definition
    tokens: int
    budget: float

    @property
    def name(self) -> str:
        return f"{self.definition.name}/{self.tokens}/{self.budget}"

    @property
    def quota(self) -> int:
        """Rows per head."""
        return Budget(self.budget).rows(self.tokens, self.tokens)

    @property
    def ratio(self) -> float:
        """kvpress's compression_ratio: 1 - budget, unless that makes it keep another number of rows than asked."""
        if self.definition.method == "kvzip":  # floors what it drops of all heads, and not what each keeps
            return (self.tokens - self.quota) / self.tokens * (1 + 1e-9)
        return 1 - self.budget if self.agrees else 1 - (self.quota + 0.5) / self.tokens

    @property
    def agrees(self) -> bool:
        """Whether 1 - budget makes kvpress keep as many rows: int(1000 * (1 - 0.8)) is 199. It matters only where a
        number of rows is floored.
        """
        own = self.definition
        floors = not own.cuts_answer and own.method not in ("duo_attention", "kvzip") and own.allocator != "pyramid"
        return not floors or int(self.tokens * (1 - (1 - self.budget))) == self.quota

    def count_slack(self, layers: int) -> Tensor:
        """(layers,) rows by which the two programs may differ, because they round a layer's share in other ways."""
        share = Budget(self.budget).share(self.tokens, self.tokens)
        if self.definition.allocator != "pyramid":
            return torch.zeros(layers, dtype=torch.int64)
        top = min(2 * share - share / 20, self.tokens - self.definition.window)  # NVIDIA/kvpress, pyramidkv_press.py
        bottom = 2 * share - top
        shares = [share] * layers
        if self.tokens >= top >= bottom >= self.definition.window:
            shares = [top - layer * (top - bottom) / (layers - 1) for layer in range(layers)]
        return torch.tensor([int(share.denominator > 1 or own.denominator > 1) for own in shares])

    @property
    def answer(self) -> int:
        """Tokens that follow the prompt."""
        return ANSWER if self.definition.cuts_answer else TOKENS


@dataclass(frozen=True)
class Subject:
    """A model in a folder that both programs load, what it reads, and the files that methods need, by method."""

    name: str
    folder: Path
    prompts: Mapping[int, list[int]]  # by number of tokens
    prefix: int  # tokens of a prompt in front of the user's text
    files: Mapping[str, str]
    model: torch.nn.Module
    tokenizer: Any

    def cases(self) -> list[Case]:
        """What is compared on this model: all definitions, prompts and budgets, as far as the time allows."""
        return [
            Case(definition, tokens, budget)
            for definition in DEFINITIONS
            for tokens in self.prompts
            for budget in BUDGETS
            if self.serves(definition, tokens, budget)
        ]

    def serves(self, definition: Definition, tokens: int, budget: float) -> bool:
        if definition.architectures and self.model.config.model_type not in definition.architectures:
            return False
        is_real = self.name in REAL_MODELS
        long, longest = is_real and tokens > 1024, is_real and tokens > 2000
        if definition.cuts_answer and is_real:
            return False
        return not (long and definition.alone) and not (longest and budget != min(BUDGETS))


def load_subject(name: str, folder: Path, make_prompts: Callable[[Any, int], Iterable[list[int]]]) -> Subject:
    """The model in `folder` in float32. `make_prompts` gives prompts from the tokenizer and the vocabulary's size."""
    # newer transformers' AutoTokenizer reads every tokenizer of a Qwen2 folder as Qwen2's own, kvpress's does not
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = {len(ids): ids for ids in make_prompts(tokenizer, model.config.vocab_size)}
    shortest = torch.tensor(prompts[min(prompts)])
    files = {
        method: make_method_args(method, f"parity-{name}", model, shortest[:300].split(100))["path"]
        for method in ("qfilters", "duo_attention")
    }
    prefix = len(tokenizer.encode(split_template(tokenizer)[0], add_special_tokens=False))
    return Subject(name, folder, prompts, prefix, files, model, tokenizer)


def english_prompts(tokenizer: Any, vocabulary: int) -> Iterator[list[int]]:
    """Chats about a licence and, where the prompt is longer than that, the prose of the RULER tasks."""
    before, after = split_template(tokenizer)
    text = (ROOT / "LICENSE").read_text() + " ".join(synthetic_prose.write_words()[:4000])
    start = tokenizer.encode(before + text, add_special_tokens=False)
    end = tokenizer.encode("\n\nWhat is this text about?" + after, add_special_tokens=False)
    for tokens in (301, 1024, 1999, 4000):
        yield start[: tokens - len(end)] + end


def random_prompts(lengths: Sequence[int]) -> Callable[[Any, int], Iterator[list[int]]]:
    """Random tokens, none twice in a prompt: equal tokens have keys of equal norm in the first layer."""

    def draw_prompts(tokenizer: Any, vocabulary: int) -> Iterator[list[int]]:
        for tokens in lengths:
            yield torch.randperm(vocabulary, generator=torch.Generator().manual_seed(tokens))[:tokens].tolist()

    return draw_prompts


def save_tiny(name: str, folder: Path) -> None:
    """Write a random model in float32 with grouped queries, and the embedded model's tokenizer."""
    common = COMMON | dict(vocab_size=4608, max_position_embeddings=8192, num_hidden_layers=3)
    config = {
        "llama": lambda: LlamaConfig(**common, **heads(6, 2)),
        "mistral": lambda: MistralConfig(**common, **heads(8, 2), sliding_window=None),
        "qwen2": lambda: Qwen2Config(**(common | without_head_dim(4, 2))),
        "qwen3": lambda: Qwen3Config(**common, **heads(6, 3)),
    }[name]()
    draw_model(lambda: AutoModelForCausalLM.from_config(config), seed=sum(map(ord, name))).save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(REFERENCE).save_pretrained(folder)


@dataclass(frozen=True)
class Found:
    """What a program did: rows kept (layers, KV heads, n) bool and the tokens that follow."""

    kept: Tensor
    tokens: list[int]


def grouped(cases: Iterable[Case]) -> list[list[Case]]:
    """Cases that share a prefill. Long prompts do so budget by budget, because every case has a cache of its own."""
    groups: dict[tuple, list[Case]] = {}
    for case in cases:
        own = case.definition
        apart = case.budget if case.tokens > 2000 else None, case.name if own.alone else None
        groups.setdefault((case.tokens, own.eager, *apart), []).append(case)
    return list(groups.values())


def start_kvpress(subject: Subject, cases: Sequence[Case], work: Path) -> subprocess.Popen:
    """Start kvpress on the cases; it writes result.safetensors into `work`."""

    def spec(case: Case) -> dict[str, Any]:
        path = subject.files.get(case.definition.method)
        own = {**case.definition.press, **({"file": path} if path else {})}
        if case.definition.cuts_answer:
            own["target_size"] = case.quota
        return {"name": case.name, "press": own, "ratio": case.ratio, "tokens": case.answer}

    job = {
        "model": str(subject.folder),
        "dtype": "float32",
        "prompts": {str(tokens): ids for tokens, ids in subject.prompts.items()},
        "groups": [
            {
                "prompt": str(some[0].tokens),
                "attention": "eager" if some[0].definition.eager else "sdpa",
                "alone": some[0].definition.alone,
                "cases": [spec(case) for case in some],
            }
            for some in grouped(cases)
        ],
    }
    (work / "job.json").write_text(json.dumps(job))
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(SCRIPT), str(work / "job.json"), str(work / "result.safetensors")]
    with (work / "log.txt").open("w") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def read_kvpress(process: subprocess.Popen, work: Path, cases: Iterable[Case]) -> dict[str, Found]:
    """Wait for kvpress; AssertionError with the end of its output where it failed."""
    assert process.wait() == 0, (work / "log.txt").read_text()[-3000:]
    found = load_file(work / "result.safetensors")
    return {case.name: Found(found[f"{case.name}.kept"], found[f"{case.name}.tokens"].tolist()) for case in cases}


def run_kvbench(subject: Subject, cases: Sequence[Case]) -> dict[str, Found]:
    """The same cases in kvbench, by their name."""
    found, choices, request = {}, {}, make_prompt_encoder(subject.tokenizer)
    for some in grouped(cases):
        ids = torch.tensor([subject.prompts[some[0].tokens]])
        contexts = []
        for case in some:
            own = case.definition
            key = own.name, case.budget, case.quota if own.cuts_answer else None
            choices[key] = choices.get(key) or make_choice(subject, case)
            budget = Budget(1.0 if own.cuts_answer else case.budget)
            contexts.append(GenerationContext(subject.model, choices[key], budget, None, (0,), subject.prefix, request))
        if some[0].definition.alone:
            contexts[0].prefill(ids)
        else:
            shared_prefill.prefill(contexts, ids)
        for case, context in zip(some, contexts, strict=True):
            found[case.name] = describe(CompressedCache([context]), case)
    return found


def make_choice(subject: Subject, case: Case) -> CachePolicy:
    own = case.definition
    args = dict(own.settings)
    if own.method in subject.files:
        args["path"] = subject.files[own.method]
    if own.method == "duo_attention":  # kvpress's ratio is the share of heads that stream
        args["sparsity"] = float(1 - Fraction(str(case.budget)))
    if own.cuts_answer:
        args["decode_size"] = case.quota
    return choose_cache(
        build("method", load_settings("method", own.method, args)),
        build("allocator", load_settings("allocator", own.allocator, own.allocator_args)),
        build("codec", load_settings("codec", "raw")),
    )


def describe(held: CompressedCache, case: Case) -> Found:
    """What follows, and the rows held before it, or after it where the answer is cut."""
    if case.definition.cuts_answer:
        tokens = generate(held, case)
        return Found(find_held(held, case.tokens + case.answer), tokens)
    return Found(find_held(held, case.tokens), generate(held, case))


def generate(held: CompressedCache, case: Case) -> list[int]:
    return held.generate(case.answer, stop=frozenset())[0].tolist()


def find_held(held: CompressedCache, tokens: int) -> Tensor:
    """(layers, KV heads, tokens) bool: the rows held."""
    layers = held.contexts[0].layers
    kept = torch.zeros(len(layers), layers[0].rows.shape[1], tokens, dtype=torch.bool)
    for layer in range(kept.shape[0]):
        for head in range(kept.shape[1]):
            kept[layer, head, held.places(layer, head)] = True
    return kept


WINDOW = (
    "kvpress gives all rows of the window one score. Where a head has no room for all of them, its top-k picks any; "
    "kvbench keeps the newest, and one row by its score."
)
CRITICAL_WINDOW = (
    "kvpress multiplies the window's common score by each row's projected norm. Where the window does not fit into "
    "half of a head's rows, its rows compete; kvbench protects them."
)
WHOLE_ROWS = (
    "The share of a layer is no whole number of rows. kvpress rounds each to the nearest; kvbench keeps the total at "
    "the budget's, so that a layer may have one row more or less."
)
TIES = (
    "In the first layer, the keys of equal tokens have the same norm, and rounding decides which of them stay. Both "
    "programs keep the same number of each token."
)

ROUNDING = (
    "One row of one head is another one with nearly the same score, which float32 rounds. (Computed in float64 for two "
    "of these cases, the scores of the two rows differ by less than a millionth.)"
)
ORDER = (
    "A cut of kvpress leaves the rows in the order of its top-k. Its second cut drops those that then stand behind the "
    "sinks, which are not the oldest ones. The tokens up to there are equal."
)


@dataclass(frozen=True)
class Comparison:
    """How far two programs agree on a case. Per layer and KV head: `common` rows, the `larger` and the `smaller` number
    of rows kept, `bound`: whether both definitions say the same, and `close`: whether they keep what both say of a
    window that does not fit (`are_close`).
    """

    subject: str
    case: Case
    common: Tensor
    larger: Tensor
    smaller: Tensor
    bound: Tensor
    close: Tensor
    tied: bool  # what differs are rows of the first layer that hold equal tokens
    same_start: int  # tokens until the first that differs

    @property
    def same_tokens(self) -> bool:
        return self.same_start == self.case.answer

    @property
    def share(self) -> float:
        """Rows in common, of the head where they are fewest."""
        return float((self.common / self.larger).min())

    @property
    def reason(self) -> str:
        """Why rows differ, "" where they do not have to."""
        reasons = []
        if not self.bound.all():
            reasons.append(CRITICAL_WINDOW if self.case.definition.method == "criticalkv" else WINDOW)
        if self.case.definition.allocator == "pyramid" and not torch.equal(self.larger, self.smaller):
            reasons.append(WHOLE_ROWS)
        if self.tied:
            reasons.append(TIES)
        if self.reordered and not torch.equal(self.common, self.larger):
            reasons.append(ORDER)
        if self.rounded and not reasons:
            reasons.append(ROUNDING)
        return " ".join(reasons)

    @property
    def rounded(self) -> bool:
        """Whether one row of one head is exchanged for another one, and the same tokens follow."""
        return (
            torch.equal(self.larger, self.smaller) and int((self.larger - self.common).sum()) == 1 and self.same_tokens
        )

    @property
    def reordered(self) -> bool:
        """Whether a cut of kvpress goes by the order in which the cut before left the rows."""
        return self.case.definition.cuts_answer and self.case.definition.method == "sink"

    @property
    def explained(self) -> bool:
        """Whether what differs is no more than the reason says."""
        if self.reordered:
            return torch.equal(self.larger, self.smaller) and self.same_start > 2 * INTERVAL
        slack = self.case.count_slack(len(self.common))[:, None].expand_as(self.common)
        fits = (self.common == self.smaller) & (self.larger - self.smaller <= slack) | self.close & ~self.bound
        return self.tied or self.reason == ROUNDING or (bool(fits.all()) and (self.reason != "" or self.same_tokens))


def compare(subject: str, case: Case, ids: Sequence[int], ours: Found, theirs: Found) -> Comparison:
    """`ids`: the prompt's tokens."""
    read = torch.tensor([*ids, *ours.tokens])[: ours.kept.shape[-1]]
    own = case.definition
    counts = torch.stack([ours.kept.sum(-1), theirs.kept.sum(-1)])
    smaller, larger = counts.amin(0), counts.amax(0)
    bound = (smaller >= own.least) & (case.quota > own.window)
    return Comparison(
        subject,
        case,
        (ours.kept & theirs.kept).sum(-1),
        larger,
        smaller,
        bound,
        are_close(case, ours.kept, theirs.kept),
        own.method == "knorm" and are_tied(read, ours.kept, theirs.kept),
        next((i for i, (a, b) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)) if a != b), len(ours.tokens)),
    )


def are_close(case: Case, ours: Tensor, theirs: Tensor) -> Tensor:
    """(layers, KV heads) whether two sets of rows (layers, KV heads, n) are what WINDOW and CRITICAL_WINDOW say.

    In a layer whose heads have n rows on average, each head of kvbench keeps the newest n - 1, or the window. A head of
    kvpress keeps rows of the window only; of criticalkv's rows the half that its first stage takes, or the window. Both
    keep the best rows before the window, and as many rows of each head, or of a layer whose heads share them out.
    """
    own, start = case.definition, case.tokens - case.definition.window
    counts, others = ours.sum(-1), theirs.sum(-1)
    newest = ours[..., start:].flip(-1).cumprod(-1).sum(-1)
    least = (counts.sum(-1, keepdim=True) // counts.shape[-1] - 1).clamp(max=own.window)
    inside = theirs[..., start:].sum(-1)
    first = (others // 2 if own.method == "criticalkv" else others).clamp(max=own.window)
    before = ours[..., :start].sum(-1), theirs[..., :start].sum(-1)
    nested = (ours & theirs)[..., :start].sum(-1) == torch.minimum(*before)
    apart = counts - others
    if own.allocator == "ada":
        apart = apart.sum(-1, keepdim=True)
    counted = apart.abs() <= case.count_slack(len(counts))[:, None]
    return nested & counted & (newest >= least) & (inside >= first)


def are_tied(ids: Tensor, ours: Tensor, theirs: Tensor) -> bool:
    """Whether two sets of rows (layers, KV heads, n) differ, in the first layer alone, by rows of equal tokens."""
    if torch.equal(ours, theirs) or not torch.equal(ours[1:], theirs[1:]):
        return False
    heads = zip(ours[0], theirs[0], strict=True)
    return all(torch.equal(ids[mine].sort().values, ids[other].sort().values) for mine, other in heads)


def write_table(comparisons: Sequence[Comparison]) -> str:
    """Markdown: a line for each definition and reason."""
    lines = [
        "| definition | kvpress | kvbench | models | tokens of a prompt | budgets | prompts × budgets "
        "| rows in common, least of a head | following tokens equal | why it differs |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for definition in DEFINITIONS:
        mine = [own for own in comparisons if own.case.definition is definition]
        for reason in sorted({own.reason for own in mine}):
            some = [own for own in mine if own.reason == reason]
            least = min(own.share for own in some)
            cells = [
                definition.name,
                f"`{definition.press_name}`",
                f"`{definition.command}`",
                ", ".join(dict.fromkeys(own.subject for own in some)),
                ", ".join(map(str, sorted({own.case.tokens for own in some}))),
                ", ".join(map(str, sorted({own.case.budget for own in some}, reverse=True))),
                str(len(some)),
                f"{100 * least:.1f} %" if least < 1 else "100 %",
                f"{sum(own.same_tokens for own in some)} of {len(some)}",
                reason,
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"

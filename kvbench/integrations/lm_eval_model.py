"""Run kvbench as a model of lm-evaluation-harness: any method at any budget on any of its tasks.

    from lm_eval import simple_evaluate
    simple_evaluate(model=KVBenchLM("/models/my-llama", method="snapkv", budget=0.1), tasks=["hellaswag"])

For a context x_1…x_n and a continuation y_1…y_m, the cache is evicted at these points:

* `generate_until` does what a run does. It reads x, evicts, and generates the answer. With `question="hidden"` it reads
  x up to the end of `doc[context_field]`, evicts, and reads the rest over the held rows.
* `loglikelihood` reads x_1…x_{n−1} (with hidden: up to the end of the document's context, if that comes earlier),
  evicts, and reads the rest of x and y_1…y_{m−1} over the held rows (`Context.extend`). So every log p(y_i | …) is
  computed over the compressed cache. If x_n were read with the context, y_1 would be predicted before the eviction, and
  so would every choice of one token. With the full cache these are the model's own log-probabilities. Continuations of
  one context share its compressed cache.
* `loglikelihood_rolling` splits the text into windows as lm-eval does (`max_length` tokens, each predicted once, and
  the first token from the begin token). It reads each window in blocks of `block_size` and evicts after each block. A
  block's tokens are predicted over the rows held before it and the block itself. Every method but `full` needs a block
  size.

lm-eval's `use_cache` is refused, because it identifies answers by the prompt alone and would give one method the
answers of another. Do not use `cache_requests` either, because it identifies a task's requests by the task's name
alone.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, NoReturn

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from tqdm import tqdm

from kvbench.config.catalogue import load_settings
from kvbench.engine.generation import GenerationContext, require_logits
from kvbench.interfaces.budget import Budget, check_budget
from kvbench.interfaces.task import Graded, Sample, Tokenizer
from kvbench.models.admission import admit_model
from kvbench.models.chat_template import TODAY
from kvbench.models.checkpoint import Checkpoint, find_model
from kvbench.models.encoding import encode_text, find_ids_beyond
from kvbench.models.layouts import find_max_tokens
from kvbench.models.transformers_port import read_layout
from kvbench.runs.checks import DTYPES
from kvbench.runs.prompt import Prompt, encode_parts
from kvbench.runs.resources import Resources
from kvbench.runs.responder import Responder, SharedPrefix
from kvbench.runs.spec import RunSpec
from kvbench.validation import SettingError, require_choice, require_int

SUPPORTED_SETTINGS = ("until", "max_gen_toks", "do_sample", "temperature", "top_p")


class LmEvalTask:
    """The task of the model's run. It has no samples and scores nothing, because lm-eval does both."""

    length: int | None = None

    def check(self) -> None:
        """Do nothing: there are no settings."""

    def fingerprint(self) -> str:
        """Return a constant, because there is no data."""
        return "lm-eval"

    def samples(self, tokenizer: Tokenizer, template_tokens: int, longest: int) -> Iterable[Sample]:
        """Return no samples."""
        return ()

    def score(self, sample: Sample, output: str) -> Graded:
        """Raise NotImplementedError: lm-eval scores."""
        raise NotImplementedError("lm-eval scores")


class KVBenchLM(TemplateLM):
    """A model of lm-eval that reads one prompt at a time into a compressed cache.

    Args:
        model: A Hugging Face model, or a local folder, a hub id, or "reference".
        tokenizer: The tokenizer of a Hugging Face model. The other kinds of models bring theirs.
        method, budget, block_size, allocator, codec, method_args, allocator_args, codec_args, budget_of: As in
            ``kvbench.prefill``.
        question: ``visible`` or ``hidden``; see the module.
        context_field: The document's field that holds the context.
        seed: Seed of methods and of sampling.
        max_length: The most tokens of prompt and answer. ``None``: as many as the model takes.
        max_gen_toks: The most tokens of an answer whose task does not say.
        truncate: Whether a longer prompt loses its first tokens, as in lm-eval's own models. If not, it is refused.
        revision: The commit of a hub id.
        device: ``cpu`` or ``cuda``.
        dtype: Type of the weights.

    Attributes:
        records: For each request, what its cache held and cost.

    Raises:
        SettingError: A setting cannot be used. The message names it.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        method: str = "full",
        budget: float | int | None = 1.0,
        block_size: int | None = None,
        allocator: str = "uniform",
        codec: str = "raw",
        *,
        method_args: Mapping[str, Any] | None = None,
        allocator_args: Mapping[str, Any] | None = None,
        codec_args: Mapping[str, Any] | None = None,
        budget_of: str = "prompt",
        question: str = "visible",
        context_field: str = "context",
        seed: int = 0,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        truncate: bool = False,
        revision: str | None = None,
        device: str = "cpu",
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        require_choice("question", question, ("visible", "hidden"))
        require_choice("dtype", dtype, DTYPES)
        require_choice("device", device, ("cpu", "cuda"))
        require_int("seed", seed, 0)
        require_int("max_gen_toks", max_gen_toks, 1)
        if block_size is not None:
            require_int("block_size", block_size, 1)
        groups = {
            "method": load_settings("method", method, method_args),
            "allocator": load_settings("allocator", allocator, allocator_args),
            "codec": load_settings("codec", codec, codec_args),
        }
        if isinstance(model, str):
            checkpoint = Checkpoint(model, find_model(model), revision)
            checkpoint.config()
        elif tokenizer is None:
            raise SettingError("tokenizer=None: a model that is loaded needs its tokenizer too")
        else:
            checkpoint = Checkpoint(type(model).__name__, getattr(model, "name_or_path", ""))
            device = next(model.parameters()).device.type
        self.run = RunSpec(
            checkpoint=checkpoint,
            groups=groups,
            budget=Budget(1.0 if method == "full" else budget, budget_of),
            block_size=block_size,
            question=question,
            seed=seed,
            temperature=0.0,
            top_p=1.0,
            task=LmEvalTask(),
            task_settings={},
            device=device,
            dtype=dtype,
            max_batch=1,
        )
        check_budget(self.run.budget, method, groups["method"].get("budget_setting"))
        self.choice = self.run.choice()  # refuses what does not go together before weights are loaded
        if not isinstance(model, str):
            admit_model(model)
        config = checkpoint.config() if isinstance(model, str) else model.config
        self.max_length = find_max_tokens(config) if max_length is None else max_length
        require_int("max_length", self.max_length, 1)
        self.tokenizer = tokenizer or checkpoint.tokenizer()
        find_ids_beyond(self.tokenizer, config.get_text_config(decoder=True).vocab_size, f"model={checkpoint.name}")
        layout = checkpoint.layout() if isinstance(model, str) else read_layout(model)
        self.choice.check(layout)
        self.model = checkpoint.weights(getattr(torch, dtype), device) if isinstance(model, str) else model
        self.context_field, self.max_gen_toks, self.truncate = context_field, max_gen_toks, truncate
        self.records: list[dict] = []
        self._device = next(self.model.parameters()).device
        self.reader = Responder(
            self.run, Resources(self.run, {"tokenizer": self.tokenizer, "model": self.model, "prompts": {}})
        )

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token with which an empty context and a rolling text begin."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: object) -> list[int]:
        """Tokenize a text; special tokens are put in front unless the text, of a chat template, begins with them.

        None is appended.
        """
        special = self._needs_special_tokens(string) if add_special_tokens is None else add_special_tokens
        return encode_text(self.tokenizer, string, special)[0]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render messages with the model's template; an assistant's message at the end is continued."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **TODAY,
        )

    def set_cache_hook(self, cache_hook: object) -> None:
        raise SettingError("use_cache: it knows answers by the prompt alone and gives one method another's; null")

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm-eval writes beside its results."""
        run = self.run
        return {
            "kvbench": {name: dict(settings) for name, settings in run.groups.items()}
            | {"budget": run.budget.value, "budget_of": run.budget.of, "block_size": run.block_size}
            | {"question": run.question, "seed": run.seed, "model": run.checkpoint.name, "dtype": run.dtype}
        }

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the answers. Repeats of a request are sampled with different seeds."""
        asked: Counter[str] = Counter()
        outputs = []
        for request in tqdm(requests, disable=disable_tqdm):
            text, given = request.args[:2]
            settings = normalize_gen_kwargs(given, self.max_gen_toks)
            for name in settings:
                require_choice(f"{request.task_name}: generation setting", name, SUPPORTED_SETTINGS)
            uid = _uid(request)
            asked[uid] += 1
            prompt = self._shorten(uid, self._divide(request, text), settings["max_gen_toks"])
            sample = Sample(
                f"{uid}/{asked[uid]}",
                request.task_name or "",
                text,
                "",
                "",
                (),
                settings["max_gen_toks"],
                group=_hash(prompt.context if self.run.question == "hidden" else prompt.ids),
                until=tuple(end for end in settings["until"] if end),
            )
            sampled = settings["do_sample"] and settings.get("temperature", 0.0) > 0
            chance = {"temperature": settings["temperature"], "top_p": settings.get("top_p", 1.0)} if sampled else {}
            self.reader.run = replace(self.run, **chance)
            record = self.reader.measure(sample, prompt)
            self.records.append({"uid": sample.uid, **record})
            outputs.append(record["output"])
        return outputs

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return, for each request, log p(continuation | context) and whether greedy decoding would give it."""
        last: tuple[Prompt, GenerationContext] | None = None
        scores = []
        for request in tqdm(requests, disable=disable_tqdm):
            prompt, target = self._encode_request(request)
            if last is None or last[0].context != prompt.context:
                last = None  # the old context is freed before the new one grows
                last = prompt, self._prefill(prompt)
                self.records.append({"uid": _uid(request), **_held_bytes(last[1])})
            held = last[1]
            with held.branch():
                before = held.last_logits[:, None]
                more = (*prompt.rest, *target[:-1])
                logits = torch.cat([before, held.extend(self._make_tensor(more))], dim=1) if more else before
                scores.append(_score_tokens(logits[0, -len(target) :], self._make_tensor(target)[0], self.model))
        return scores

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return log p(text) for each request."""
        if self.run.block_size is None and not self.run.full:
            raise SettingError("block_size=None: in one block a text is read before anything is cut; give a block size")
        scores = []
        for request in tqdm(requests, disable=disable_tqdm):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            scores.append(sum(self._score_window(*make_disjoint_window(window)) for window in windows))
        return scores

    def _loglikelihood_tokens(self, requests: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError("`loglikelihood` reads contexts itself")

    def _score_window(self, context: list[int], target: list[int]) -> float:
        """Return log p(target | context) for a window that is read in blocks."""
        ids, worth, place = [*context, *target[:-1]], 0.0, 1 - len(context)

        def each(logits: Tensor) -> None:
            nonlocal worth, place
            tokens = target[max(place, 0) : max(place + logits.shape[1], 0)]
            if tokens:
                worth += _score_tokens(logits[0, -len(tokens) :], self._make_tensor(tokens)[0], self.model)[0]
            place += logits.shape[1]

        self._make_context(tuple(ids)).prefill(self._make_tensor(ids), each)
        return worth

    def _divide(self, request: Instance, text: str) -> Prompt:
        """Tokenize the prompt and, if the question is hidden, split it after the document's context."""
        end = len(text)
        if self.run.question == "hidden":
            document = request.doc.get(self.context_field) if isinstance(request.doc, Mapping) else None
            value = document if isinstance(document, str) and document.strip() else ""
            place = text.rfind(value) if value else -1
            if place < 0:
                raise SettingError(
                    f"question=hidden: {_uid(request)} has no field {self.context_field} that stands in its prompt; "
                    "question=visible, or another context_field"
                )
            end = place + len(value)
        special = self._needs_special_tokens(text)
        return encode_parts(self.tokenizer, text, 0 if special else len(self.tokenizer.bos_token or ""), end, special)

    def _encode_request(self, request: Instance) -> tuple[Prompt, list[int]]:
        """Return the prompt, split before its last token or after its document's context, and the continuation."""
        context, continuation = request.args[:2]
        if context == "":
            ids, target = [self.prefix_token_id], self.tok_encode(continuation, add_special_tokens=False)
            divided = Prompt(tuple(ids), ())
            if target and target[0] == self.prefix_token_id:
                target = target[1:]
        else:
            ids, target = self._encode_pair(context, continuation)
            divided = self._divide(request, context)
        if not target:
            raise SettingError(f"{_uid(request)}: its continuation {continuation!r} has no tokens")
        split = max(min(len(divided.context), len(ids) - 1), 1)
        prompt = Prompt(tuple(ids[:split]), tuple(ids[split:]), min(divided.prefix, split))
        return self._shorten(_uid(request), prompt, len(target) - 1), target

    def _shorten(self, uid: str, prompt: Prompt, more: int) -> Prompt:
        """Return the prompt if it fits with `more` tokens; else drop its first tokens or raise a SettingError."""
        over = len(prompt.ids) + more - self.max_length
        if over <= 0:
            return prompt
        if not self.truncate or over >= len(prompt.ids):
            need = f"{uid} needs {len(prompt.ids) + more} tokens with its answer"
            raise SettingError(f"max_length={self.max_length}: {need}; truncate=True drops the first")
        context = prompt.context[over:]
        rest = prompt.rest[max(over - len(prompt.context), 0) :]
        return Prompt(context, rest) if context else Prompt(rest[:1], rest[1:])

    def _prefill(self, prompt: Prompt) -> GenerationContext:
        context = self._make_context(prompt.context, prompt.prefix)
        context.prefill(self._make_tensor(prompt.context))
        return context

    def _make_context(self, ids: tuple[int, ...], prefix: int = 0) -> GenerationContext:
        return self.reader.make_context(SharedPrefix((ids,), (_hash(ids),), prefix))

    def _needs_special_tokens(self, text: str) -> bool:
        return not (self.tokenizer.bos_token and text.startswith(self.tokenizer.bos_token))

    def _make_tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], device=self._device)


def _score_tokens(logits: Tensor, target: Tensor, model: torch.nn.Module) -> tuple[float, bool]:
    """Return log p of tokens (T,) under logits (T, vocab), and whether all of them are the likeliest.

    Raises:
        NumericalError: The logits of the model are not finite.
    """
    require_logits(logits, model)
    chosen = logits.float().log_softmax(-1).gather(-1, target[:, None])
    return float(chosen.sum()), bool((logits.argmax(-1) == target).all())


def _held_bytes(context: GenerationContext) -> dict[str, int]:
    """Return the bytes that a context holds after its eviction."""
    return {"resident_bytes": context.bytes().rows, "full_bytes": context.full_bytes(), "rows_seen": context.seen}


def _uid(request: Instance) -> str:
    return f"{request.task_name}/{request.doc_id}/{request.idx}"


def _hash(ids: Sequence[int]) -> str:
    return sha256(repr(tuple(ids)).encode()).hexdigest()[:16]

"""The Python interface: read a prompt into a compressed cache and look at what is held."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.guard import reason_against
from kvbench.cache.layer import Layer
from kvbench.cache.policy import CachePolicy
from kvbench.cache.storage import Bytes
from kvbench.config.catalogue import build, load_settings
from kvbench.engine.generation import GenerationContext
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.codec import Codec
from kvbench.interfaces.method import Method
from kvbench.models.chat_template import make_prompt_encoder
from kvbench.models.checkpoint import find_stop_tokens
from kvbench.validation import SettingError, require_int


def choose_cache(method: Method, allocator: Allocator, codec: Codec) -> CachePolicy:
    """The three together; SettingError for a pair that cannot work, with the reason."""
    reason = reason_against(method, allocator, codec)
    if reason is not None:
        raise SettingError(reason)
    return CachePolicy(method, allocator, codec)


def prefill(
    model: torch.nn.Module,
    input_ids: Tensor,
    method: str = "full",
    budget: float | int = 1.0,
    block_size: int | None = None,
    allocator: str = "uniform",
    codec: str = "raw",
    method_args: Mapping[str, Any] | None = None,
    seed: int = 0,
    *,
    allocator_args: Mapping[str, Any] | None = None,
    codec_args: Mapping[str, Any] | None = None,
    budget_of: str = "prompt",
    tokenizer: Any = None,
    prefix: int = 0,
) -> "CompressedCache":
    """Read `input_ids` (batch, tokens), prompts of one length, and cut the cache as `method` says.

    `budget`: float in (0, 1] or int >= 2 rows per layer and KV head, held, or looked at where a
    method holds all and reads few; `block_size`: tokens, None for one block;
    `method_args`: settings of conf/method/<method>.yaml, `preset` among them; `prefix`: tokens in front of the user's
    text and `tokenizer`: a Hugging Face one, for methods that let the model read more. The model's attention
    implementation is put back afterwards. SettingError (a ValueError) names a setting that cannot be used. On the CPU
    a batch is read sample by sample, so that each gives exactly what it gives alone.
    """
    ids = "a LongTensor of shape (batch, tokens) with prompts of one length"
    if not isinstance(input_ids, Tensor) or input_ids.is_floating_point():
        raise SettingError(f"input_ids: {ids}, got {getattr(input_ids, 'dtype', type(input_ids).__name__)}")
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise SettingError(f"input_ids: {ids}, got {tuple(input_ids.shape)}")
    if not isinstance(method_args or {}, Mapping):
        raise SettingError("method_args: a dict of settings of the method")
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    if not 0 <= int(input_ids.min()) <= int(input_ids.max()) < vocabulary:
        raise SettingError(f"input_ids: token ids from 0 to {vocabulary - 1}")
    require_int("seed", seed, 0)
    if seed >= 1 << 63:
        raise SettingError(f"seed={seed}: a whole number below 2^63")
    if block_size is not None:
        require_int("block_size", block_size, 1)
    require_int("prefix", prefix, 0)
    choice = choose_cache(
        build("method", load_settings("method", method, method_args)),
        build("allocator", load_settings("allocator", allocator, allocator_args)),
        build("codec", load_settings("codec", codec, codec_args)),
    )
    amount = Budget(budget, budget_of)
    if method == "full":
        amount = Budget(1.0)
    input_ids = input_ids.to(next(model.parameters()).device)
    alone = input_ids.device.type == "cpu"
    contexts = []
    for ids in input_ids.split(1) if alone else [input_ids]:
        own = make_prompt_encoder(tokenizer) if tokenizer is not None else None
        context = GenerationContext(model, choice, amount, block_size, (seed,) * len(ids), prefix, own)
        context.prefill(ids)
        contexts.append(context)
    return CompressedCache(contexts)


class CompressedCache:
    """What is held of a batch of prompts. Layers count from 0, heads are KV heads."""

    def __init__(self, contexts: list[GenerationContext]) -> None:
        self.contexts = contexts

    @property
    def logits(self) -> Tensor:
        """(batch, vocab) of the last token read."""
        return torch.cat([context.logits for context in self.contexts])

    def places(self, layer: int, head: int, sample: int = 0) -> Tensor:
        """1-D LongTensor, ascending: original positions of the rows held."""
        own, sample = self._layer(layer, sample)
        return own.rows.head_places(sample, head)

    def masses(self, layer: int, head: int, sample: int = 0) -> Tensor:
        """1-D LongTensor: tokens that each of those rows stands for."""
        own, sample = self._layer(layer, sample)
        return own.rows.head_masses(sample, head)

    def evicted(self, layer: int, head: int, sample: int = 0) -> int:
        """Tokens whose rows are gone; with the masses held they make the tokens seen."""
        own, sample = self._layer(layer, sample)
        return 0 if own.tally.evicted is None else int(own.tally.evicted[sample, head])

    @property
    def bytes(self) -> Bytes:
        """Bytes of rows, metadata, method state and head-room, counted on the storages."""
        return sum((context.bytes() for context in self.contexts), Bytes())

    @property
    def resident_bytes(self) -> int:
        """Bytes of the keys and values held, sliding-window layers included; `bytes` has the rest."""
        return self.bytes.rows

    @property
    def full_bytes(self) -> int:
        """Bytes of the keys and values of the full cache at this point."""
        return sum(context.full_bytes() for context in self.contexts)

    @property
    def peak_rows(self) -> int:
        """Most rows that a layer and head held after a block was read and cut."""
        return max(layer.tally.peak_rows for context in self.contexts for layer in context.own_layers)

    @property
    def peak_rows_attended(self) -> int:
        """Most rows that a layer and head attended over: at most its quota plus the block."""
        return max(layer.tally.peak_attended for context in self.contexts for layer in context.own_layers)

    @property
    def sliding_layers(self) -> tuple[int, ...]:
        """Layers that keep their own sliding-window cache and are not compressed."""
        return tuple(i for i, layer in enumerate(self.contexts[0].layers) if layer is None)

    def extend(self, more_ids: Tensor) -> Tensor:
        """Feed further tokens (batch, t) over the held rows: logits (batch, t, vocab)."""
        batch = sum(len(context.seeds) for context in self.contexts)
        if more_ids.dim() != 2 or more_ids.shape[0] != batch or more_ids.shape[1] == 0:
            raise SettingError(f"more_ids: shape ({batch}, tokens), got {tuple(more_ids.shape)}")
        device = self.logits.device
        parts = more_ids.to(device).split([len(context.seeds) for context in self.contexts])
        return torch.cat([context.extend(ids) for context, ids in zip(self.contexts, parts, strict=True)])

    def generate(
        self, max_new_tokens: int = 64, temperature: float = 0.0, top_p: float = 1.0, stop: frozenset[int] | None = None
    ) -> Tensor:
        """Continuation, greedy unless `temperature` > 0: token ids (batch, up to max_new_tokens), ended by the model's
        end token, which is repeated where other samples go on. `stop`: other ids to end at (empty: none).
        """
        require_int("max_new_tokens", max_new_tokens, 1)
        model = self.contexts[0].model
        stop = find_stop_tokens(model) if stop is None else stop
        sampling = Sampling(temperature, top_p)
        answers = []
        for context in self.contexts:
            steps = context.generate(max_new_tokens, sampling, stop, read_last=True)
            tokens = torch.stack(list(steps), dim=1).to(context.logits.device)
            answers.extend(trim(row, stop) for row in tokens)
        longest = max(map(len, answers))
        return torch.stack([torch.cat([row, row[-1:].expand(longest - len(row))]) for row in answers])

    @contextmanager
    def branch(self) -> Iterator["CompressedCache"]:
        """What is read inside is forgotten afterwards: several questions over one compressed context."""
        with ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context.branch())
            yield self

    def _layer(self, layer: int, sample: int) -> tuple[Layer, int]:
        for context in self.contexts if sample >= 0 else ():
            if sample < len(context.seeds):
                own = context.layers[layer]
                if own is None:
                    raise SettingError(f"layer={layer}: keeps transformers' own sliding-window cache, not rows")
                return own, sample
            sample -= len(context.seeds)
        raise IndexError("sample")


def trim(tokens: Tensor, stop: frozenset[int]) -> Tensor:
    """(T,) ids up to and including the first one of `stop`."""
    ends = torch.isin(tokens, torch.tensor(sorted(stop), device=tokens.device, dtype=tokens.dtype)).nonzero()
    return tokens if len(ends) == 0 else tokens[: int(ends[0]) + 1]

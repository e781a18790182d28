"""The Python interface: `prefill` reads a prompt and returns its compressed cache, `load_cache` reads a saved one."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from kvbench.cache.guard import without_gradients
from kvbench.cache.layer import Layer
from kvbench.cache.policy import choose_cache
from kvbench.cache.storage import Bytes
from kvbench.config.catalogue import build, list_choices, load_settings
from kvbench.engine.generation import GenerationContext
from kvbench.engine.sampling import Sampling
from kvbench.engine.saved_cache import read_contexts, write_contexts
from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.budget import Budget, check_budget
from kvbench.interfaces.codec import Codec
from kvbench.interfaces.method import Method
from kvbench.models.admission import admit_model
from kvbench.models.chat_template import make_prompt_encoder
from kvbench.models.encoding import FastTokenizer, find_text
from kvbench.models.layouts import find_max_tokens
from kvbench.models.loading import check_finite, find_stop_tokens
from kvbench.models.transformers_port import text_config
from kvbench.validation import SettingError, format_value, require_choice, require_int

T = TypeVar("T")

REPLACEABLE = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")


def make_part(group: str, kind: type[T], given: object, args: Mapping[str, Any] | None) -> T:
    """Return a method, an allocator or a codec.

    Args:
        group: "method", "allocator" or "codec".
        kind: The interface that an object must implement.
        given: A name of conf/<group>, or the object itself.
        args: Settings for a name; an object has its own.

    Raises:
        SettingError: There is no such name or setting, or the object is of another kind.
    """
    if isinstance(given, kind):
        if args:
            raise SettingError(f"{group}_args: {group} is an object, which has its settings already")
        return given
    if given is None:
        require_choice(group, given, list_choices(group))  # refuses it and lists the names
    if not isinstance(given, str):
        raise SettingError(f"{group}={format_value(given)}: a name of conf/{group} or a {kind.__name__} object")
    part: T = build(group, load_settings(group, given, args))
    return part


def check_attention(model: torch.nn.Module) -> None:
    """Refuse a model whose own attention would be replaced while kvbench reads.

    Raises:
        SettingError: The text model has an attention implementation that is not one of transformers' own.
    """
    attention = text_config(model)._attn_implementation
    if attention is not None and attention not in REPLACEABLE:
        raise SettingError(
            f"model: has the attention implementation {attention}, which kvbench would replace; "
            "model.set_attn_implementation('sdpa') allows that"
        )


def check_length(model: torch.nn.Module, name: str, tokens: int) -> None:
    """Refuse more tokens than the model has positions for.

    Args:
        model: A transformers model.
        name: The argument that the message names.
        tokens: Tokens read so far, those to read and those to generate.

    Raises:
        SettingError: The model takes fewer tokens, or its architecture is not supported.
    """
    admit_model(model)
    longest = find_max_tokens(model.config)
    positions = text_config(model).max_position_embeddings
    if tokens > longest >= positions:  # the engine refuses what a model of sliding layers alone cannot read
        raise SettingError(f"{name}: {tokens} tokens with those read before, and the model takes {longest}")


def prefill(
    model: torch.nn.Module,
    input_ids: Tensor,
    method: str | Method = "full",
    budget: float | int | None = 1.0,
    block_size: int | None = None,
    allocator: str | Allocator = "uniform",
    codec: str | Codec = "raw",
    method_args: Mapping[str, Any] | None = None,
    seed: int = 0,
    *,
    allocator_args: Mapping[str, Any] | None = None,
    codec_args: Mapping[str, Any] | None = None,
    budget_of: str = "prompt",
    tokenizer: FastTokenizer | None = None,
    prefix: int = 0,
    attention_mask: Tensor | None = None,
) -> "CompressedCache":
    """Read a prompt and compress its KV cache.

    On the CPU the samples of a batch are read one by one, so that each gives exactly what it gives alone.

    Args:
        model: A supported transformers model. Its attention implementation is restored on return.
        input_ids: Token ids, shape ``(batch, tokens)``. All prompts have the same length.
        method: Name of a method in ``conf/method``, or a ``Method`` object.
        budget: Fraction of rows to keep, in (0, 1], or the number of rows per layer and KV head, at least 2. A method
            that keeps all rows and reads few of them reads so many. ``None`` for a method that decides itself how many
            rows stay.
        block_size: Number of tokens read between two evictions. ``None`` reads the prompt as one block.
        allocator: Name in ``conf/allocator``, or an ``Allocator`` object. It divides the budget over heads or layers.
        codec: Name in ``conf/codec``, or a ``Codec`` object. It stores the rows.
        method_args: Settings of the named method, ``preset`` among them. An object has its own.
        seed: Seed of everything that is drawn, from 0.
        allocator_args: Settings of the named allocator.
        codec_args: Settings of the named codec.
        budget_of: Reference of a fraction: "prompt", or "seen" for the tokens read at each eviction.
        tokenizer: A Hugging Face tokenizer, for methods that let the model read more than the prompt, and for
            `CompressedCache.where`.
        prefix: Number of tokens in front of the user's text, for the same methods.
        attention_mask: What a tokenizer returns beside the ids, shape ``(batch, tokens)``. It may mask nothing: padded
            prompts would be read as text.

    Returns:
        The compressed cache. It reports which rows were kept and can continue generating.

    Raises:
        SettingError: A setting is invalid, the prompt is longer than the model reads, the model has an attention
            implementation of its own, or a weight is not finite. The message names the setting and the allowed values.
        ContractError: A method, an allocator or a codec broke its interface.
    """
    expected = "a LongTensor of shape (batch, tokens) with prompts of one length"
    if not isinstance(input_ids, Tensor) or input_ids.is_floating_point():
        raise SettingError(f"input_ids: {expected}, got {getattr(input_ids, 'dtype', type(input_ids).__name__)}")
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise SettingError(f"input_ids: {expected}, got {tuple(input_ids.shape)}")
    if attention_mask is not None and (
        attention_mask.shape != input_ids.shape or not bool((attention_mask == 1).all())
    ):
        raise SettingError(
            f"attention_mask: ones of shape {tuple(input_ids.shape)}; prompts of other lengths are read one by one"
        )
    if not isinstance(method_args or {}, Mapping):
        raise SettingError("method_args: a dict of settings of the method")
    vocabulary = text_config(model).vocab_size
    if not 0 <= int(input_ids.min()) <= int(input_ids.max()) < vocabulary:
        raise SettingError(f"input_ids: token ids from 0 to {vocabulary - 1}")
    check_finite(model, "model")
    require_int("seed", seed, 0)
    if seed >= 1 << 63:
        raise SettingError(f"seed={seed}: a whole number below 2^63")
    if block_size is not None:
        require_int("block_size", block_size, 1)
    require_int("prefix", prefix, 0)
    check_attention(model)
    check_length(model, "input_ids", input_ids.shape[1])
    choice = choose_cache(
        make_part("method", Method, method, method_args),
        make_part("allocator", Allocator, allocator, allocator_args),
        make_part("codec", Codec, codec, codec_args),
    )
    amount = Budget(budget, budget_of)
    check_budget(amount, choice.method.name, choice.method.budget_setting)
    if choice.method.name == "full":
        amount = Budget(1.0)
    input_ids = input_ids.to(next(model.parameters()).device)
    alone = input_ids.device.type == "cpu"
    contexts = []
    for ids in input_ids.split(1) if alone else [input_ids]:
        encoder = make_prompt_encoder(tokenizer) if tokenizer is not None else None
        context = GenerationContext(model, choice, amount, block_size, (seed,) * len(ids), prefix, encoder)
        context.prefill(ids)
        contexts.append(context)
    return CompressedCache(contexts, input_ids.to("cpu", copy=True), tokenizer)


@without_gradients
def load_cache(path: str | Path, model: torch.nn.Module) -> "CompressedCache":
    """Load a compressed cache that `CompressedCache.save` wrote. It answers as the saved one does.

    The method, the allocator and the codec are made again from their names and settings. Nothing in the file is
    executed.

    Args:
        path: The file.
        model: The model that the cache was made with, in the same dtype and on the same kind of device.

    Returns:
        The compressed cache, as it was when it was saved.

    Raises:
        SettingError: The file is damaged, of another version of the format or something else; or the cache was made
            with another model, with other weights, or with another file of a method or codec. The message says which.
    """
    check_finite(model, "model")
    check_attention(model)
    return CompressedCache(*read_contexts(Path(path).expanduser(), model))


class HeldText(NamedTuple):
    """The tokens of a text, and which of them are held."""

    places: Tensor
    """Positions of the text's tokens in the prompt, (tokens,) int64, ascending."""
    held: Tensor
    """Whether each layer and head holds a row at each of them, (layers, heads, tokens) bool on the CPU. A row that
    others were merged into counts at its own position.
    """


class CompressedCache:
    """The compressed KV cache of a batch of prompts. Layers and samples count from 0; heads are KV heads."""

    def __init__(
        self, contexts: list[GenerationContext], prompt: Tensor | None = None, tokenizer: FastTokenizer | None = None
    ) -> None:
        """Take over contexts.

        Args:
            contexts: The contexts, with one method, allocator, codec and model.
            prompt: Token ids of their prompts, (batch, tokens) on the CPU, which `where` needs.
            tokenizer: The tokenizer of the prompts, if `where` need not be given one.
        """
        self.contexts, self.prompt, self.tokenizer = contexts, prompt, tokenizer

    def __repr__(self) -> str:
        first = self.contexts[0]
        samples = sum(len(context.seeds) for context in self.contexts)
        counts = [layer.rows.counts() for context in self.contexts for layer in context.own_layers]
        held = sorted({row for layer_counts in counts for row in layer_counts.flatten().tolist()})
        rows = " to ".join(map(str, dict.fromkeys([held[0], held[-1]]))) if held else "no"
        choice = first.choice
        return (
            f"CompressedCache(method={choice.method.name}, allocator={choice.allocator.name}, "
            f"codec={choice.codec.name}, budget={first.budget.value}: {samples} "
            f"{'sample' if samples == 1 else 'samples'}, {first.seen} tokens seen, {rows} rows held per layer and "
            f"head, {self.resident_bytes} of {self.full_bytes} bytes)"
        )

    @property
    def logits(self) -> Tensor:
        """The logits of the last token read, (batch, vocab)."""
        return torch.cat([context.last_logits for context in self.contexts])

    def places(self, layer: int, head: int, sample: int = 0) -> Tensor:
        """Return the original positions of the rows that a head holds, a 1-D LongTensor, ascending."""
        cut_layer, sample = self._layer(layer, sample)
        return cut_layer.rows.head_places(sample, head)

    def masses(self, layer: int, head: int, sample: int = 0) -> Tensor:
        """Return how many tokens each of those rows stands for, a 1-D LongTensor.

        If the method weighs rows (`Method.weighs_rows`), it is a 1-D float tensor of their weights in attention.
        """
        cut_layer, sample = self._layer(layer, sample)
        return cut_layer.rows.head_masses(sample, head)

    def evicted(self, layer: int, head: int, sample: int = 0) -> int:
        """Return the number of tokens whose rows are gone.

        Together with the masses of the rows held (or their number, if rows are weighed) they are the tokens seen.
        """
        cut_layer, sample = self._layer(layer, sample)
        return 0 if cut_layer.tally.evicted is None else int(cut_layer.tally.evicted[sample, head])

    def where(self, text: str, tokenizer: FastTokenizer | None = None, sample: int = 0) -> HeldText:
        """Find which tokens of a text in the prompt are still held.

        Args:
            text: A part of the prompt. If it stands there several times, the tokens of all of them count.
            tokenizer: The tokenizer of the prompt. ``None`` takes the one that `prefill` was given.
            sample: Number of the prompt.

        Returns:
            The positions of the tokens, and for each layer and head whether it holds them. A layer with a sliding
            window holds the tokens in its window. A layer with a recurrent state alone holds none.

        Raises:
            SettingError: The text is not in the prompt, or the prompt or a tokenizer is not known.
        """
        tokenizer = self.tokenizer if tokenizer is None else tokenizer
        if tokenizer is None:
            raise SettingError("tokenizer=null: give the tokenizer of the prompt, here or to prefill")
        if self.prompt is None:
            raise SettingError("prompt: not known, because the contexts were put together without it")
        context, row = self._context(sample)
        positions = find_text(tokenizer, self.prompt[sample].tolist(), text) if text else []
        if not positions:
            raise SettingError(f"text={format_value(text)}: not in the prompt of sample {sample}")
        places = torch.tensor(positions)
        held, windows = [], dict(zip(context.sliding, context.sliding_layers(), strict=True))
        for index, layer in enumerate(context.layers):
            heads = context.own_layers[0].rows.shape[1]
            if layer is not None:
                held.append(layer.rows.holds(places)[row].cpu())
            else:
                tokens = windows[index].keys.shape[2] if index in windows else 0
                held.append((places >= context.seen - tokens).expand(heads, -1))
        return HeldText(places, torch.stack(held))

    def save(self, path: str | Path) -> None:
        """Save the cache as it is now, so that `load_cache` continues it, in this process or another one.

        Args:
            path: A safetensors file. An old one is replaced, completely or not at all.

        Raises:
            SettingError: The method, the allocator or the codec is no file of ``conf/`` or holds something that cannot
                be saved, or the file cannot be written.
        """
        write_contexts(Path(path).expanduser(), self.contexts, self.prompt)

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
        return self.contexts[0].sliding

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Layers without rows, which keep a recurrent or convolutional state, or nothing."""
        return tuple(
            i for i, layer in enumerate(self.contexts[0].layers) if layer is None and i not in self.sliding_layers
        )

    def extend(self, more_ids: Tensor) -> Tensor:
        """Read further tokens, (batch, t), which attend to the rows held. Return their logits, (batch, t, vocab)."""
        batch = sum(len(context.seeds) for context in self.contexts)
        if more_ids.dim() != 2 or more_ids.shape[0] != batch or more_ids.shape[1] == 0:
            raise SettingError(f"more_ids: shape ({batch}, tokens), got {tuple(more_ids.shape)}")
        device = self.logits.device
        parts = more_ids.to(device).split([len(context.seeds) for context in self.contexts])
        return torch.cat([context.extend(ids) for context, ids in zip(self.contexts, parts, strict=True)])

    def generate(
        self, max_new_tokens: int = 64, temperature: float = 0.0, top_p: float = 1.0, stop: frozenset[int] | None = None
    ) -> Tensor:
        """Generate a continuation.

        Args:
            max_new_tokens: Largest number of tokens to generate.
            temperature: 0 is greedy.
            top_p: Share of the probability from which tokens are drawn.
            stop: Ids that end a continuation. ``None`` takes the model's end tokens; an empty set takes none.

        Returns:
            Token ids, shape ``(batch, up to max_new_tokens)``. A sample that ends early repeats its last token.

        Raises:
            SettingError: A setting is invalid, or the model has fewer positions than the tokens would need.
        """
        require_int("max_new_tokens", max_new_tokens, 1)
        model = self.contexts[0].model
        check_length(model, f"max_new_tokens={max_new_tokens}", self.contexts[0].seen + max_new_tokens)
        stop = find_stop_tokens(model) if stop is None else stop
        sampling = Sampling(temperature, top_p)
        answers: list[Tensor] = []
        for context in self.contexts:
            steps = context.generate(max_new_tokens, sampling, stop, read_last=True)
            tokens = torch.stack(list(steps), dim=1).to(context.last_logits.device)
            answers.extend(trim(row, stop) for row in tokens)
        longest = max(map(len, answers))
        return torch.stack([torch.cat([row, row[-1:].expand(longest - len(row))]) for row in answers])

    @contextmanager
    def branch(self) -> Iterator["CompressedCache"]:
        """Forget what is read inside the `with` block, so that the next question finds the same compressed context."""
        with ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context.branch())
            yield self

    def _layer(self, layer: int, sample: int) -> tuple[Layer, int]:
        context, sample = self._context(sample)
        cut_layer = context.layers[layer]
        if cut_layer is None:
            kind = "sliding-window cache" if layer in context.sliding else "recurrent state"
            raise SettingError(f"layer={layer}: keeps transformers' own {kind}, not rows")
        return cut_layer, sample

    def _context(self, sample: int) -> tuple[GenerationContext, int]:
        """Return the context of a sample, and the sample's number in it."""
        for context in self.contexts if sample >= 0 else ():
            if sample < len(context.seeds):
                return context, sample
            sample -= len(context.seeds)
        raise IndexError("sample")


def trim(tokens: Tensor, stop: frozenset[int]) -> Tensor:
    """Return the ids, (T,), up to and including the first one of `stop`."""
    ends = torch.isin(tokens, torch.tensor(sorted(stop), device=tokens.device, dtype=tokens.dtype)).nonzero()
    return tokens if len(ends) == 0 else tokens[: int(ends[0]) + 1]

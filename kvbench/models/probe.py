"""Probe an architecture that is not on the tested list: try on a random miniature whether kvbench reads it correctly.

The truth is one pass of the miniature with transformers' `eager` attention and without a cache, because `sdpa` drops
Gemma 2's cap of the logits as kvbench would. The probe refuses the architecture unless

1. transformers' own cache gives the same in blocks and token by token,
2. kvbench's full cache does (law 1), in one block and in several, also if an answer is forgotten and read again,
3. so does a cut cache, with heads of different lengths, one block and several, compared with a pass of `eager` in which
   each query sees the rows that its KV head held,
4. keys, values and W_o have the shapes that methods and codecs are told, and each layer attends once to a block.

Then it compares the keys that kvbench norms and rotates with those that the model appended, rotated keys that it
rotates to other positions with keys that are rotated to these at once, and kvbench's own step with the model's logits.
What differs there is not refused: methods that rotate keys, and CUDA graphs, are then not used.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvbench.cache.layer import Layer, Layers
from kvbench.cache.policy import CachePolicy, choose_cache
from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.codec import Codec
from kvbench.interfaces.layout import Layout, Probe
from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import LayerInputs, Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.kernels.attention.sdpa import attend_windowed
from kvbench.kernels.rerotation import rerotate
from kvbench.kernels.rope_append import append
from kvbench.kernels.softmax_extras import SoftmaxExtras, get_cap
from kvbench.models.decoder_step import Norms, find_logits, forward_step
from kvbench.models.decoder_weights import DecoderWeights, collect_plain_weights
from kvbench.models.layer_state import has_state
from kvbench.models.layouts import WITHOUT_ROPE, Configuration, find_window, name_type, read_config_layout
from kvbench.models.miniature import VOCABULARY, Unshrinkable, draw_miniature, shrink
from kvbench.models.rotations import Rotation, find_key_norm
from kvbench.models.silence import silence_transformers
from kvbench.models.transformers_port import (
    PROBED,
    find_attention,
    find_class,
    find_output_projection,
    find_rotary_module,
    forward,
    kvbench_attention,
    list_decoder_layers,
    make_cache,
    text_config,
    use_attention,
)
from kvbench.validation import SettingError, summarize

PROMPT, ANSWER = 96, 6  # tokens that are read as a prompt, and one by one
BLOCK = 37  # tokens of a block where the prompt is read in several
STEPS = 60  # tokens that kvbench's own step reads
QUOTA = 28  # rows per head that a cut leaves
TOLERANCE = 1e-4  # of the spread; rounding is at 1e-5, what a model computes beside it at 1e-3 to 5
MASKED = "kvbench_probe"
HIDDEN_STATES = ("mamba", "recurrent")  # kinds of layers whose state may be no part of the cache


class Refused(Exception):
    """kvbench cannot read an architecture. The message says in which layer what differs, and by how much."""


def probe(config: Configuration) -> Probe:
    """Probe an architecture by a model's configuration. It takes some seconds on one CPU core.

    Raises:
        Refused: kvbench cannot read it, or transformers itself cannot.
    """
    with blame("its configuration lacks something"):
        check_kind(config)
    try:
        small = shrink(config)
    except Unshrinkable as error:
        raise Refused(f"its configuration does not shrink to a miniature ({error})") from None
    with silence_transformers():  # some models say while they read which packages would make them faster
        return probe_miniature(draw_miniature(small))


def find_config(model: torch.nn.Module) -> Configuration:
    """Return the configuration of a model."""
    return cast(Configuration, model.config)


def check_kind(config: Configuration) -> None:
    """Check what a configuration says about the layers of a model.

    Raises:
        Refused: Some of them keep something else than keys and values of all tokens or of a window.
    """
    if find_class(config) is None:
        raise Refused("transformers has no causal language model of this type")
    text = config.get_text_config(decoder=True)
    if not any(getattr(text, name, None) for name in ("num_attention_heads", "n_head", "n_heads")):
        raise Refused("it has no attention layer, and so no KV cache")
    if any(getattr(text, name, None) for name in ("index_topk", "index_topk_blocks")):
        raise Refused("a sparse indexer chooses which rows a query reads")
    if getattr(text, "kv_lora_rank", None):
        raise Refused("its cache holds latent rows (MLA) in place of keys and values")
    if shared := getattr(text, "num_kv_shared_layers", None):
        last = range(text.num_hidden_layers - shared, text.num_hidden_layers)
        raise Refused(f"{name_layers(last)} that read the rows of earlier ones")
    layers: list[Any] = list(DynamicCache(config=text).layers)
    kinds: list[str] = list(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or [])
    known = DynamicLayer, DynamicSlidingWindowLayer
    others = [i for i, layer in enumerate(layers) if type(layer) not in known and isinstance(layer, CacheLayerMixin)]
    if others := [index for index in others if not has_state(layers[index])]:
        raise Refused(f"{name_layers(others)} with a cache of another kind ({type(layers[others[0]]).__name__})")
    if hidden := [i for i, kind in enumerate(kinds) if kind in HIDDEN_STATES and not has_state(layers[i])]:
        raise Refused(f"{name_layers(hidden)} with a recurrent state outside of transformers' cache")


def name_layers(layers: Sequence[int]) -> str:
    """Return how many layers a refusal is about, and the first one. The caller says what they do."""
    return f"it has {len(layers)} layers (the first is layer {layers[0]})"


def probe_miniature(model: torch.nn.Module) -> Probe:
    """Probe a model on the CPU, which attends by `eager`. It may be a miniature of any configuration.

    Raises:
        Refused: kvbench cannot read it, or transformers itself cannot.
    """
    with torch.no_grad(), torch.device("cpu"):
        trial = make_trial(model)
        with blame("transformers' own cache does not work"):
            check_cached_reading(trial)
        with blame("kvbench's cache does not fit it"):
            check_full_cache(trial)
            check_cuts(trial)
        rotation_fault, rerotation_fault = find_rotation_faults(trial)
        layers = list_decoder_layers(model)
        norms = [find_key_norm(find_attention(layers[index])) for index in trial.layout.held]
        joint = any(norm.joint for norm in norms)
        name = name_type(find_config(model))
        return Probe(name, rotation_fault, matches_step(trial), rerotation_fault, joint)


@contextmanager
def blame(label: str) -> Iterator[None]:
    """Turn any error inside into a `Refused` of one line."""
    try:
        yield
    except Refused:
        raise
    except SettingError as error:
        raise Refused(str(error).removeprefix("model: ")) from None
    except Exception as error:  # other architectures may fail in any way
        reraise_shortage(error)
        raise Refused(f"{label} ({type(error).__name__}: {summarize(error)})") from None


def reraise_shortage(error: Exception) -> None:
    """Raise an error that says of the machine that it is short of memory or files, and nothing of the architecture.

    What the probe says is kept for later processes, so it must not depend on this.
    """
    if isinstance(error, MemoryError | OSError) or "allocate memory" in str(error):  # PyTorch raises a RuntimeError
        raise error


@dataclass(frozen=True)
class Reading:
    """What a model computed for a text."""

    logits: Tensor
    """(1, tokens, vocab)"""
    hidden: tuple[Tensor, ...]
    """The hidden states that leave each layer, (1, tokens, hidden)."""


@dataclass(frozen=True)
class Trial:
    """A miniature and the truth about a text."""

    model: torch.nn.Module
    layout: Layout
    ids: Tensor
    """Token ids of prompt and answer, (1, PROMPT + ANSWER)."""
    truth: Reading

    def split(self, block: int) -> list[Tensor]:
        """Return the token ids of the prompt in blocks, and of the answer one by one."""
        return [*self.ids[:, :PROMPT].split(block, 1), *self.ids[:, PROMPT:].split(1, 1)]


def make_trial(model: torch.nn.Module) -> Trial:
    """Let a miniature read a text in one pass by `eager`, without a cache."""
    with blame("its configuration lacks something"):
        layers = list_decoder_layers(model)
        PROBED[model] = anything = Probe(name_type(find_config(model)), None, graphs=False)  # nothing is refused
        layout = read_config_layout(find_config(model), anything)
        if len(layers) != layout.layers:
            raise Refused(f"its cache has {layout.layers} layers, and its decoder {len(layers)}")
    for index in layout.held:
        with blame(f"layer {index} has no attention module, or that has no W_o"):
            find_output_projection(find_attention(layers[index]))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (1, PROMPT + ANSWER), generator=generator)
    with blame("transformers cannot read with it"), use_attention(model, "eager"):
        truth = read_parts(model, [ids], lambda part: run(model, part))
    return Trial(model, layout, ids, truth)


def run(model: torch.nn.Module, ids: Tensor, cache: Cache | None = None) -> Tensor:
    """Return the logits of tokens, (1, n, vocab), read by the attention that the model is set to."""
    logits: Tensor = model(input_ids=ids, past_key_values=cache, use_cache=cache is not None).logits
    return logits


def read_parts(model: torch.nn.Module, parts: Sequence[Tensor], read: Callable[[Tensor], Tensor]) -> Reading:
    """Read parts of a text, one after the other, and join what the model computed.

    Args:
        model: The model.
        parts: Token ids, (1, n) each.
        read: Reads a part and returns its logits.
    """
    layers = list_decoder_layers(model)
    hidden: list[list[Tensor]] = [[] for _ in layers]

    def note(index: int, output: Tensor | tuple[Tensor, ...]) -> None:
        hidden[index].append(output[0] if isinstance(output, tuple) else output)

    handles = [
        layer.register_forward_hook(lambda _, args, output, index=index: note(index, output))
        for index, layer in enumerate(layers)
    ]
    try:
        logits = torch.cat([read(part) for part in parts], 1)
    finally:
        for handle in handles:
            handle.remove()
    return Reading(logits, tuple(torch.cat(states, 1) for states in hidden))


def measure(given: Tensor, truth: Tensor) -> float:
    """Return the largest difference as a part of the truth's spread. Numbers that are not finite differ without end."""
    return float(((given - truth).abs().max() / truth.std()).nan_to_num(torch.inf))


def compare(label: str, reading: Reading, truth: Reading) -> None:
    """Compare a reading with the truth.

    Raises:
        Refused: The logits differ. The message names the first layer after which hidden states differ.
    """
    error = measure(reading.logits, truth.logits)
    if error <= TOLERANCE:
        return
    pairs = enumerate(zip(reading.hidden, truth.hidden, strict=True))
    layer = next((index for index, (given, true) in pairs if measure(given, true) > TOLERANCE), None)
    where = "in the logits alone" if layer is None else f"from layer {layer} on"
    spread = f"{error:.1e} of the logits' spread"
    raise Refused(f"{label} differs from one pass of transformers' eager attention by {spread}, {where}")


def check_cached_reading(trial: Trial) -> None:
    """Check that transformers' own cache, in blocks and token by token, gives what one pass does."""
    cache = DynamicCache(config=text_config(trial.model))
    with use_attention(trial.model, "eager"):
        reading = read_parts(trial.model, trial.split(BLOCK), lambda part: run(trial.model, part, cache))
    compare("transformers' own cache", reading, trial.truth)


class WatchedLayer:
    """A layer of kvbench's cache that checks what the model hands it."""

    def __init__(self, layer: Layer, layout: Layout, wants_unrotated_keys: bool) -> None:
        self.layer, self.layout, self.wants_unrotated_keys = layer, layout, wants_unrotated_keys
        self.appended, self.attended = 0, 0  # blocks
        self.rotation_error = 0.0  # of keys that kvbench normed and rotated
        self.rerotation_error = 0.0  # of rotated keys that kvbench rotated to other positions
        self.block: tuple[Tensor, LayerInputs] | None = None  # the last one, if keys are to be rotated

    wants_hidden = False
    wants_normed_hidden = False

    def append(self, keys: Tensor, values: Tensor, inputs: LayerInputs | None) -> None:
        """Append a block after its shapes were checked, and rotate its keys to compare them, if asked for."""
        for name, rows, dim in (("keys", keys, self.layout.dim), ("values", values, self.layout.value_dim)):
            if rows.shape != (expected := (1, self.layout.heads, keys.shape[2], dim)):
                raise Refused(f"layer {self.layer.index}: it appends {name} {tuple(rows.shape)}, expected {expected}")
        if self.wants_unrotated_keys:
            assert inputs is not None and inputs.keys is not None  # `observe_inputs`
            places = self.layer.rows.seen + torch.arange(keys.shape[2]).expand(keys.shape[:3])
            self.rotation_error = max(self.rotation_error, measure(inputs.rotate(inputs.keys, places), keys))
            self.block = keys, inputs
        self.layer.append(keys, values)
        self.appended += 1

    def attend(
        self,
        queries: Tensor,
        scaling: float,
        output_weight: Tensor,
        rotation: Rotation,
        extras: SoftmaxExtras | None = None,
    ) -> Tensor:
        """Attend after the shape of W_o was checked."""
        expected = (self.layout.hidden, queries.shape[1] * self.layout.value_dim)
        if output_weight.shape != expected:
            raise Refused(f"layer {self.layer.index}: W_o is {tuple(output_weight.shape)}, expected {expected}")
        if get_cap(extras) != self.layout.softcap:
            line = f"its logits are capped at {get_cap(extras)}, expected {self.layout.softcap}"
            raise Refused(f"layer {self.layer.index}: {line}")
        self.attended += 1
        self.move_keys(rotation)
        return self.layer.attend(queries, scaling, output_weight, rotation, extras)

    def move_keys(self, rotation: Rotation) -> None:
        """Rotate the block's keys to other positions, and compare them with keys that were rotated to these at once."""
        if self.block is None:
            return
        (keys, inputs), self.block = self.block, None
        assert inputs.keys is not None  # `append`
        places = self.layer.rows.seen - keys.shape[2] + torch.arange(keys.shape[2])[None]
        moved = PROMPT - places.clamp(max=PROMPT)
        before, after = ((cos[:, None], sin[:, None]) for cos, sin in map(rotation, (places, moved)))
        truth = inputs.rotate(inputs.keys, moved[:, None])
        self.rerotation_error = max(self.rerotation_error, measure(rerotate(keys, before, after), truth))


@dataclass(frozen=True)
class RandomCut(Method):
    """Scores rows by nothing but their position and head."""

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        heads = torch.arange(rows.heads)[:, None] + 7 * observation.layer
        return ((rows.places + 1) * 7919 + heads * 104729).remainder(1009).to(rows.mass.dtype)


@dataclass(frozen=True)
class UnevenHeads(Allocator):
    """Gives every other head a third more than the quota, and its neighbour a third less."""

    even = False

    def heads(self, scores: Tensor, protected: Tensor, quota: int) -> Tensor:
        counts = torch.full(scores.shape[:2], quota)
        pairs = scores.shape[1] // 2
        counts[:, : 2 * pairs : 2] += quota // 3
        counts[:, 1 : 2 * pairs : 2] -= quota // 3
        return counts


class TrialCache:
    """kvbench's cache of a miniature, which is read without the engine."""

    def __init__(self, trial: Trial, policy: CachePolicy, rotates: bool = False) -> None:
        self.model, layout = trial.model, trial.layout
        self.sliding = layout.sliding
        self.layers, state = Layers(layout.layers), State((0,))
        for index in range(layout.layers):
            held = index in layout.held
            self.layers.append(Layer(index, layout.layers, policy, state, self.layers) if held else None)
        self.watched = [None if layer is None else WatchedLayer(layer, layout, rotates) for layer in self.layers]
        self.ports = make_cache(trial.model, self.watched)
        self.seen = 0

    @property
    def held(self) -> list[Layer]:
        """The layers that hold rows."""
        return [layer for layer in self.layers if layer is not None]

    def read(self, ids: Tensor, quota: int | None = None) -> Tensor:
        """Read a block, cut the layers to `quota` rows per head if it is given, and return the block's logits."""
        self.seen += ids.shape[1]
        share = None if quota is None else Fraction(quota)
        progress = replace(self.layers.progress, prompt=PROMPT, quota=quota, share=share)
        self.layers.progress = replace(progress, last=self.seen == PROMPT, decoding=self.seen > PROMPT)
        for layer in self.held:
            layer.stamp()
        logits = forward(self.model, ids, self.ports, 0)
        for layer in self.held:
            layer.check_stamped()
        for index, watched in enumerate(self.watched):
            if watched is not None and (watched.appended, watched.attended) != (1, 1):
                line = f"appends {watched.appended} times and attends {watched.attended} times"
                raise Refused(f"layer {index}: it {line} to a block, expected once")
            if watched is not None:
                watched.appended = watched.attended = 0
        return logits

    @contextmanager
    def branch(self) -> Iterator[None]:
        """Forget what is read inside the `with` block."""
        layers, seen, progress = [layer.snapshot() for layer in self.held], self.seen, self.layers.progress
        others: list[Any] = [self.ports.layers[index] for index in self.sliding]
        states = self.ports.copy_states()
        windows = [(other.keys, other.values, other.cumulative_length) for other in others]
        try:
            yield
        finally:
            for layer, before in zip(self.held, layers, strict=True):
                layer.restore(before)
            for other, (keys, values, length) in zip(others, windows, strict=True):
                other.keys, other.values, other.cumulative_length = keys, values, length
            self.ports.put_states(states)
            for port in self.ports.layers:
                if hasattr(port, "seen"):
                    port.seen = seen
            self.seen, self.layers.progress = seen, progress


def check_full_cache(trial: Trial) -> None:
    """Check law 1 in one block and in several. The answer is read twice, and forgotten in between."""
    for block in (PROMPT, BLOCK):
        cache, parts = TrialCache(trial, choose_full_cache()), trial.split(block)
        answer = parts[-ANSWER:]
        with kvbench_attention(trial.model):
            prompt = read_parts(trial.model, parts[:-ANSWER], cache.read)
            for label in ("in one block" if block == PROMPT else "in blocks", "after an answer was forgotten"):
                with cache.branch():
                    reading = join(prompt, read_parts(trial.model, answer, cache.read))
                compare(f"kvbench's full cache {label}", reading, trial.truth)


def choose_full_cache() -> CachePolicy:
    """Return the policy of the full cache."""
    return choose_cache(Method("full"), Allocator("uniform"), Codec("raw"))


def join(*readings: Reading) -> Reading:
    """Join readings of parts of a text."""
    states = zip(*(reading.hidden for reading in readings), strict=True)
    return Reading(
        torch.cat([reading.logits for reading in readings], 1), tuple(torch.cat(parts, 1) for parts in states)
    )


def check_cuts(trial: Trial) -> None:
    """Check cut caches against a pass of `eager` in which each query sees the rows that its KV head held."""
    for block in (PROMPT, BLOCK):
        policy = choose_cache(RandomCut("probe"), UnevenHeads("probe"), Codec("raw"))
        cache, seen = TrialCache(trial, policy), make_masks(trial)

        def read(part: Tensor, cache: TrialCache = cache, seen: Mapping[int, Tensor] = seen) -> Tensor:
            show_rows(cache, seen, cache.seen, cache.seen + part.shape[1])
            quota = QUOTA if cache.seen < PROMPT else None
            logits = cache.read(part, quota)
            if quota is not None:
                check_quotas(cache, quota)
            return logits

        with kvbench_attention(trial.model):
            reading = read_parts(trial.model, trial.split(block), read)
        label = "a cut cache in one block" if block == PROMPT else "a cache that is cut after each block"
        with blame("its attention cannot be masked"):
            truth = read_masked(trial, seen)
        compare(label, reading, truth)


def check_quotas(cache: TrialCache, quota: int) -> None:
    """Check that the heads of each layer together hold what they may."""
    for layer in cache.held:
        counts = layer.rows.counts()[0]
        if int(counts.sum()) != quota * len(counts):
            raise Refused(f"layer {layer.index}: heads hold {counts.tolist()} rows after a cut to {quota} on average")


def make_masks(trial: Trial) -> dict[int, Tensor]:
    """Return for each layer which tokens a query sees if nothing is cut, (KV heads, tokens, tokens) bool."""
    tokens = trial.ids.shape[1]
    config, places = text_config(trial.model), torch.arange(tokens)
    window = find_window(config) or tokens
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    windowed = causal.triu(1 - window)
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        windowed = causal & (places // window == places[:, None] // window)
    masks = {}
    for index in range(trial.layout.layers):
        seen = windowed if index in trial.layout.sliding else causal
        masks[index] = seen.repeat(trial.layout.heads, 1, 1)
    return masks


def show_rows(cache: TrialCache, seen: Mapping[int, Tensor], start: int, stop: int) -> None:
    """Let the queries of a block see, of the tokens before it, only those whose rows are held now."""
    if not start:
        return
    for layer in cache.held:
        rows = layer.rows.view()
        for head, (places, mass) in enumerate(zip(rows.places[0], rows.mass[0], strict=True)):
            held = torch.zeros(start, dtype=torch.bool)
            held[places[mass > 0]] = True
            seen[layer.index][head, start:stop, :start] = held


def read_masked(trial: Trial, seen: Mapping[int, Tensor]) -> Reading:
    """Return what the model's own eager attention computes in one pass if heads see the rows of `seen` alone."""

    def attend(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **given: object
    ) -> object:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        visible = seen[cast(int, module.layer_idx)].repeat_interleave(query.shape[1] // trial.layout.heads, 0)
        bias = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(query.dtype).min)
        return eager(module, query, key, value, attention_mask=bias[None], **given)

    ALL_ATTENTION_FUNCTIONS[MASKED] = attend
    try:
        with use_attention(trial.model, MASKED):
            return read_parts(trial.model, [trial.ids], lambda part: run(trial.model, part))
    finally:
        del ALL_ATTENTION_FUNCTIONS[MASKED]


def find_rotation_faults(trial: Trial) -> tuple[str | None, str | None]:
    """Return what is wrong with keys that kvbench norms and rotates, and with rotated keys that it rotates further.

    Returns:
        How the first differ from those that the model appends, and how the second differ from those that are rotated at
        once; None for what is right. If the first are wrong, nothing is known about the second.
    """
    if find_rotary_module(trial.model) is None:
        return WITHOUT_ROPE, None
    try:
        cache = TrialCache(trial, choose_full_cache(), rotates=True)
        with kvbench_attention(trial.model):
            for part in trial.ids.split(BLOCK, 1):
                cache.read(part)
    except Exception as error:  # other modules than kvbench knows may fail in any way
        reraise_shortage(error)
        return f"kvbench cannot rotate keys as the model does ({type(error).__name__}: {summarize(error)})", None
    watched = [(index, layer) for index, layer in enumerate(cache.watched) if layer is not None]
    for index, layer in watched:
        if layer.rotation_error > TOLERANCE:
            spread = f"{layer.rotation_error:.1e} of their spread"
            return f"in layer {index} keys that kvbench norms and rotates differ from the model's by {spread}", None
    for index, layer in watched:
        if layer.rerotation_error > TOLERANCE:
            spread = f"{layer.rerotation_error:.1e} of their spread"
            return None, f"in layer {index} keys that are rotated to other positions differ by {spread}"
    return None, None


def matches_step(trial: Trial) -> bool:
    """Return whether kvbench's own step, which CUDA graphs are captured of, computes the model's logits."""
    try:
        weights = collect_plain_weights(trial.model, trial.layout)
        if weights is None:
            return False
        logits = run_step(weights, trial.layout, trial.ids[:, :STEPS])
    except Exception as error:  # modules of another architecture have other parts
        reraise_shortage(error)
        return False
    return measure(logits, trial.truth.logits[:, :STEPS]) <= TOLERANCE


def run_step(weights: DecoderWeights, layout: Layout, ids: Tensor) -> Tensor:
    """Return the logits of tokens, (1, n, vocab), that kvbench's own step computes."""
    tokens, sliding = ids.shape[1], weights.sliding

    def attend(index: int, projected: Sequence[Tensor], norms: Norms) -> Tensor:
        window = sliding.tokens if sliding is not None and index in sliding.layers else None
        cos, sin = (part[0] for part in weights.rotations[index](torch.arange(tokens)[None]))
        keys, values = (torch.zeros(1, layout.heads, tokens, layout.dim) for _ in range(2))
        step, (new_queries, new_keys, new_values) = torch.zeros((), dtype=torch.int32), projected
        given = new_queries, new_keys, new_values, cos, sin, keys, values, 0, step
        rotated = append(*given, norms=norms, implementation="reference")
        return attend_windowed(rotated, keys, values, weights.scaling, window, weights.blocks[index].attention.extras)

    x = forward_step(weights, ids, attend, "reference")
    return find_logits(weights, x, "reference")[None]

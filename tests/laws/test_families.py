"""Random miniatures of the types on the tested list, under the laws of docs/architecture.md and beside them.

The truth is one pass of transformers' `eager` attention, with keys masked where kvbench has evicted them. `sdpa` is no
truth: it drops a cap of the logits. What a type has beside a plain decoder is left out of the model that kvbench reads,
one thing after the other, and law 1 must notice each. `make test` reads a miniature of each family, `make test-all` one
of each type.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.cache.policy import CachePolicy, choose_cache
from kvbench.config.catalogue import build, load_settings
from kvbench.engine import shared_prefill
from kvbench.engine.generation import GenerationContext
from kvbench.engine.joint_decoding import run_alone
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.codec import Codec, Packing
from kvbench.interfaces.method import Method
from kvbench.models import probe
from kvbench.models.layouts import ARCHITECTURES, is_without_rope, name_type, read_config_layout
from kvbench.models.loading import load_weights
from kvbench.models.miniature import draw_miniature
from kvbench.models.probe import BLOCK, PROMPT, TOLERANCE, Trial
from kvbench.models.transformers_port import use_attention
from kvbench.runs.fidelity import predict
from kvbench.validation import SettingError
from tests.support.families import choose_types, make_trial
from tests.support.selection import choose_quick

RAW = Codec("raw")
SHARE = 0.3  # of the rows stay
TOKENS = 3  # of a generated answer
SHIFT = 7  # positions

LEFT_OUT: dict[str, Callable[[Any], object]] = {  # by the field of a text decoder's configuration
    "attn_logit_softcapping": lambda cap: None,
    "final_logit_softcapping": lambda cap: None,
    "attention_multiplier": lambda factor: 2 * factor,
    "residual_multiplier": lambda factor: 1.0,
    "embedding_multiplier": lambda factor: 1.0,
    "logits_scaling": lambda factor: 1.0,
    "logit_scale": lambda factor: 1.0,
    "query_pre_attn_scalar": lambda scalar: 4 * scalar,
    "sliding_window": lambda window: 2 * window,
    "attention_chunk_size": lambda size: 2 * size,
    "no_rope_layers": lambda layers: [1] * len(layers),
    "routed_scaling_factor": lambda factor: 1.0,
    "rope_parameters": lambda rope: change_frequencies(rope),
    "layer_rope_theta": lambda bases: [2 * base for base in bases],  # in place of rope_parameters
}
WEIGHTS = {"sinks": -1e4, "k_norm": 1.0, "k_layernorm": 1.0, "key_layernorm": 1.0}  # fill the weights of such names


@dataclass(frozen=True)
class Unrotated(Codec):
    """Keeps rows raw, keys as they are before norm and rotation."""

    packing = Packing(takes_unrotated_keys=True)


@dataclass(frozen=True)
class Asks(Method):
    """Notes the hidden states that it is shown."""

    wants = ("hidden",)

    def update(self, observation, rows, state):
        state.shared.setdefault(observation.layer, []).append(observation.hidden)
        return {}


def choose(method: str | Method, allocator: str = "uniform", codec: Codec = RAW, **settings: object) -> CachePolicy:
    if isinstance(method, str):
        method = build("method", load_settings("method", method, settings))
    return choose_cache(method, build("allocator", load_settings("allocator", allocator)), codec)


def read(trial: Trial, choice: CachePolicy, block: int | None = None, share: float = 1.0) -> GenerationContext:
    """The prompt of a trial in kvbench's cache."""
    context = GenerationContext(trial.model, choice, Budget(share), block, (0,))
    context.prefill(trial.ids[:, :PROMPT])
    return context


def generate(context: GenerationContext, tokens: int = TOKENS) -> Tensor:
    """The most likely next tokens, (1, tokens), which stay in the cache."""
    return torch.stack(list(context.generate(tokens, Sampling(), frozenset(), read_last=True)), 1)


def assert_close(logits: Tensor, truth: Tensor) -> None:
    """Compare logits (n, vocab), as a part of their spread."""
    assert logits.shape == truth.shape and probe.measure(logits, truth) <= TOLERANCE


def check_full_budget(trial: Trial, block: int | None) -> None:
    """Laws 1 and 6: with a budget that holds all rows the model computes what it computes without kvbench."""
    context, truth = read(trial, choose("snapkv"), block), trial.truth.logits[0]
    assert_close(context.last_logits, truth[PROMPT - 1 : PROMPT])
    for _ in range(2):
        with context.branch():
            assert_close(context.extend(trial.ids[:, PROMPT:])[0], truth[PROMPT:])
    for layer in context.own_layers:
        assert layer.rows.counts().unique().tolist() == [PROMPT]


def check_cut(trial: Trial, block: int | None, method: str = "snapkv", allocator: str = "ada") -> None:
    """Laws 2, 3 and 5, and decoding: heads of different lengths hold the quota, and attend to what they hold."""
    seen = probe.make_masks(trial)
    context = GenerationContext(trial.model, choose(method, allocator), Budget(SHARE), block, (0,))

    def show_rows(tokens: int) -> None:
        """Let the queries of the next tokens see, of those before them, what is held now."""
        for layer in context.own_layers if context.seen else ():
            rows = layer.rows.view()
            for head, (places, mass) in enumerate(zip(rows.places[0], rows.mass[0], strict=True)):
                held = torch.zeros(context.seen, dtype=torch.bool)
                held[places[mass > 0]] = True
                seen[layer.index][head, context.seen : context.seen + tokens, : context.seen] = held

    handle = trial.model.register_forward_pre_hook(
        lambda *given: show_rows(given[-1]["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        context.prefill(trial.ids[:, :PROMPT])
        quota = int(SHARE * PROMPT)
        for layer in context.own_layers:
            counts, evicted = layer.rows.counts()[0], layer.tally.evicted
            assert int(counts.sum()) == quota * len(counts) and evicted is not None
            assert torch.equal(counts + evicted[0], torch.full_like(counts, PROMPT))
        before = context.last_logits
        answer = torch.cat([trial.ids[:, PROMPT:-TOKENS], torch.zeros(1, TOKENS, dtype=torch.int64)], 1)
        given = context.extend(answer[:, :-TOKENS])
        answer[:, -TOKENS:] = generate(context)
    finally:
        handle.remove()
    text = replace(trial, ids=torch.cat([trial.ids[:, :PROMPT], answer], 1))
    truth = probe.read_masked(text, seen).logits[0]
    assert_close(torch.cat([before, given[0]]), truth[PROMPT - 1 : -TOKENS])
    assert_close(context.last_logits, truth[-1:])
    likely = truth[-TOKENS - 1 : -1]  # in front of each generated token
    chosen = likely.gather(1, answer[0, -TOKENS:, None])[:, 0]
    assert (likely.max(-1).values - chosen <= TOLERANCE * truth.std()).all()


def check_shared_prefill(trial: Trial) -> None:
    """Contexts that read one prompt together hold and answer what they do alone, in turn.

    Runs of models with a sliding window never read together (`RunSpec.reading`).
    """
    if trial.layout.sliding or trial.layout.window is not None:
        return
    choices = [(choose("full"), 1.0), (choose("snapkv", "ada"), SHARE)]
    together = [GenerationContext(trial.model, choice, Budget(share), None, (0,)) for choice, share in choices]
    shared_prefill.prefill(together, trial.ids[:, :PROMPT])
    for context, (choice, share) in zip(together, choices, strict=True):
        alone = read(trial, choice, share=share)
        assert torch.equal(context.last_logits, alone.last_logits) and context.bytes() == alone.bytes()
        with context.branch():
            generate(context, 1)
        assert torch.equal(generate(context, 2), generate(alone, 2))
        assert torch.equal(context.last_logits, alone.last_logits)


def check_fidelity(trial: Trial) -> None:
    """The log-probabilities of an answer are those of the truth, and reading it leaves no trace."""
    context, answer = read(trial, choose("full")), trial.ids[0, PROMPT:].tolist()
    for _ in range(2):
        predicted = run_alone(predict(context, [answer]))[0][0]
        assert (predicted - trial.truth.logits[0, PROMPT - 1 : -1].log_softmax(-1)).abs().max() < 1e-2
        assert_close(predicted, trial.truth.logits[0, PROMPT - 1 : -1].log_softmax(-1))


def check_rotations(trial: Trial, block: int | None) -> None:
    """Keys that are stored before norm and rotation become the model's own, bit for bit, also those of a cut cache.

    Without sinks the rows that stay are neighbours, so attention to them does not change if all are rotated by their
    slots in place of their positions. Expected Attention asks for rotations of later positions and keeps its quota.
    """
    known = ARCHITECTURES[name_type(probe.find_config(trial.model))]
    if trial.layout.rotation_fault is not None or known.rotation_fault is not None:
        return  # what rotates keys is refused
    assert [fault is None for fault in probe.find_rotation_faults(trial)] == [True, known.rerotation_fault is None]
    share = 1.0 if known.joint_norm else SHARE  # such a norm needs all heads of a token
    raw, unrotated = (read(trial, choose("snapkv", codec=codec), block, share) for codec in (RAW, Unrotated("u")))
    assert torch.equal(generate(unrotated, 2), generate(raw, 2))
    assert torch.equal(unrotated.last_logits, raw.last_logits)
    if known.rerotation_fault is not None:
        for method in ("sink", "expected_attention"):
            with pytest.raises(SettingError, match=known.rerotation_fault):
                choose(method).check(read_config_layout(probe.find_config(trial.model)))
        return
    if follows_distances_alone(trial):
        ways = ({"sinks": 0, "positions": positions} for positions in ("rolling", "original"))
        rolling, original = (read(trial, choose("sink", **settings), None, SHARE) for settings in ways)
        answer = trial.ids[:, PROMPT:]
        assert_close(rolling.extend(answer)[0], original.extend(answer)[0])
    if trial.layout.softcap is None:  # it expects exponentials of the logits
        for layer in read(trial, choose("expected_attention"), block, SHARE).own_layers:
            assert layer.rows.counts().unique().tolist() == [int(SHARE * PROMPT)]


def follows_distances_alone(trial: Trial) -> bool:
    """Whether a model computes the same for a text at later positions."""
    places = torch.arange(SHIFT, SHIFT + trial.ids.shape[1])[None]
    with torch.no_grad(), use_attention(trial.model, "eager"):
        shifted = trial.model(input_ids=trial.ids, position_ids=places, use_cache=False).logits
    return probe.measure(shifted, trial.truth.logits) <= TOLERANCE


def check_hidden(trial: Trial) -> None:
    """A method that asks for hidden states is shown what leaves the layer before."""
    context = read(trial, choose(Asks("asks")), BLOCK)
    for layer in context.own_layers:
        if layer.index:
            shown = torch.cat(context.own_layers[0].state.shared[layer.index], 1)
            assert_close(shown, trial.truth.hidden[layer.index - 1][:, :PROMPT])


def check_step(trial: Trial) -> None:
    """The step that CUDA graphs are captured of computes the model's logits, if the list says so."""
    if ARCHITECTURES[name_type(probe.find_config(trial.model))].graphs:
        assert probe.matches_step(trial)


LAWS: dict[str, Callable[[Trial], None]] = {
    "full budget": lambda trial: check_full_budget(trial, None),
    "full budget in blocks": lambda trial: check_full_budget(trial, BLOCK),
    "cut in blocks": lambda trial: check_cut(trial, BLOCK),
    "shared prefill": check_shared_prefill,
    "fidelity": check_fidelity,
    "rotations in blocks": lambda trial: check_rotations(trial, BLOCK),
    "hidden states": check_hidden,
    "step": check_step,
}
IN_ONE_BLOCK: dict[str, Callable[[Trial], None]] = {  # what it shows, the first of several shows too
    "cut": lambda trial: check_cut(trial, None),
    "rotations": lambda trial: check_rotations(trial, None),
}


def check_laws(name: str, laws: dict[str, Callable[[Trial], None]]) -> None:
    """Check laws for a type. A failure names its law in a note."""
    trial = make_trial(name)
    for law, check in laws.items():
        try:
            check(trial)
        except BaseException as error:
            error.add_note(f"law: {law}")
            raise


@pytest.mark.parametrize("name", choose_quick(ARCHITECTURES, *choose_types()))
def test_laws(name):
    check_laws(name, LAWS)


@pytest.mark.full
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_laws_in_one_block(name):
    check_laws(name, IN_ONE_BLOCK)


def change_frequencies(rope: dict[str, Any]) -> dict[str, Any]:
    """Return settings of RoPE, or of that of each kind of layer, with another base."""
    if "rope_theta" in rope:
        return rope | {"rope_theta": 2 * rope["rope_theta"]}
    return {kind: change_frequencies(part) if isinstance(part, dict) else part for kind, part in rope.items()}


def list_mutants(trial: Trial) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield what is left out, and the model without it."""
    config = probe.find_config(trial.model)
    text = config.get_text_config(decoder=True)
    for field, leave_out in LEFT_OUT.items():
        value = getattr(text, field, None)
        if value is None or value == leave_out(value) or (field == "sliding_window" and not trial.layout.sliding):
            continue
        if field == "rope_parameters" and (hasattr(text, "layer_rope_theta") or is_without_rope(text)):
            continue
        changed = copy.deepcopy(config)
        setattr(changed.get_text_config(decoder=True), field, leave_out(value))
        mutant = draw_miniature(changed)
        mutant.load_state_dict(trial.model.state_dict())
        yield field, mutant
    for part, filling in WEIGHTS.items():
        mutant = copy.deepcopy(trial.model)
        weights = [weight for name, weight in mutant.named_parameters() if part in name]
        for weight in weights:
            torch.nn.init.constant_(weight, filling)
        if weights:
            yield part, mutant


@pytest.mark.parametrize("name", choose_quick(ARCHITECTURES, *choose_types()))
def test_law_1_notices_what_is_left_out(name):
    """What a type has beside a plain decoder, by the names of fields and weights, and the frequencies of RoPE.

    kvbench reads a model without it, and the truth is about the whole model.
    """
    trial = make_trial(name)
    for part, mutant in list_mutants(trial):
        try:
            check_full_budget(replace(trial, model=mutant), None)
        except AssertionError:
            continue
        pytest.fail(f"{name} without {part}: law 1 holds")


@pytest.mark.full
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_saved_miniature_is_loaded_as_it_was(name, tmp_path):
    trial = make_trial(name)
    trial.model.save_pretrained(tmp_path)
    loaded = load_weights(str(tmp_path), None, None, torch.float32, "cpu")
    check_full_budget(replace(trial, model=loaded), BLOCK)

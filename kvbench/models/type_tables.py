"""Tables of docs/models.md: what kvbench does with each type of transformers' causal language models.

Each type is tried by a random miniature of its default configuration. The tested list says which families there are and
whether answers are decoded in CUDA graphs. Everything else is found on the miniature, as the probe does it.
"""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from transformers.cache_utils import CacheLayerMixin, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvbench.models.layer_state import has_state
from kvbench.models.layouts import ARCHITECTURES, Configuration
from kvbench.models.miniature import draw_miniature, shrink
from kvbench.models.probe import Refused, find_rotation_faults, make_trial, probe
from kvbench.models.silence import silence_transformers

PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MULTIPLIERS = {"residual_multiplier": 0.3, "embedding_multiplier": 12.0, "logits_scaling": 2.0}
SCALED_EXPERTS = {"routed_scaling_factor": 2.5}
STATED: dict[str, dict[str, Any]] = {  # what checkpoints state and the defaults of transformers do not
    "hunyuan_v1_dense": {"head_dim": 16, "rope_parameters": PLAIN_ROPE},
    "hunyuan_v1_moe": {"head_dim": 16, "rope_parameters": PLAIN_ROPE},
    "ministral": {"head_dim": 128, "rope_parameters": PLAIN_ROPE},
    "nemotron": {"num_key_value_heads": 8},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1} | SCALED_EXPERTS,
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared", "hyperclovax"), MULTIPLIERS),
    **dict.fromkeys(("glm4_moe", "solar_open"), SCALED_EXPERTS),
}
TESTED = "tested types"  # what the line in front of each table calls it
ADMITTED = "admitted types"
REFUSED = "refused types"
UNLISTED = "it has no attention layer"  # the reason that the page states for all other types
DETAILS = (  # of one miniature, which a row of several types leaves out
    (re.compile(r"(?<=it has) \d+(?= layers)| \(the first is layer \d+\)|^layer \d+: "), ""),
    (re.compile(r"(?<=it appends )(\w+) .*"), r"\1 of another shape than its configuration says"),
    (re.compile(r" \(.*| by [\d.e+-]+ of the logits' spread.*"), ""),
)


@dataclass(frozen=True)
class TypeFacts:
    """What kvbench does with a type of models."""

    cut: str
    """Which layers methods cut."""
    rotations: str
    """Whether kvbench rotates keys as the model does."""
    graphs: bool
    """Whether answers are decoded in CUDA graphs."""


def make_default_config(name: str, **more: object) -> Configuration:
    """Return the default configuration of a type, with what it lacks and `more`.

    Raises:
        KeyError: This transformers has no such type.
    """
    return cast(Configuration, CONFIG_MAPPING[name](**(STATED.get(name, {}) | more)))


def has_default_config(name: str) -> bool:
    """Return whether transformers makes a configuration of a type from nothing. Some are put together from others."""
    try:
        make_default_config(name)
    except Exception:  # each class has checks of its own
        return False
    return True


def try_tested_type(name: str) -> TypeFacts:
    """Return what kvbench does with a type on the tested list."""
    config = make_default_config(name)
    trial = make_trial(draw_miniature(shrink(config)))
    known = ARCHITECTURES[name]
    fault, further = find_rotation_faults(trial)
    rotations = describe_rotations(known.rotation_fault or fault, further, known.joint_norm)
    return TypeFacts(describe_cut(config), rotations, known.graphs)


def try_other_type(name: str) -> TypeFacts:
    """Return what kvbench does with a type that is not on the list.

    Raises:
        Refused: A probe refuses it.
    """
    config = make_default_config(name)
    verdict = probe(config)
    rotations = describe_rotations(verdict.rotation_fault, verdict.rerotation_fault, verdict.joint_norm)
    return TypeFacts(describe_cut(config), rotations, verdict.graphs)


def describe_cut(config: Configuration) -> str:
    """Return which layers methods cut, by the cache that transformers makes for the text decoder.

    A state is named if it belongs to a layer without rows, and if it lies beside the rows of every layer.
    """
    text = config.get_text_config(decoder=True)
    kinds: Sequence[str] = getattr(text, "layer_types", None) or ()
    cache: list[Any] = list(DynamicCache(config=text).layers)
    layers = [type(layer).__name__ for layer in cache]
    others = {
        "windows": any("Sliding" in layer for layer in layers) and "sliding_attention" in kinds,
        "chunks": "chunked_attention" in kinds,
        "states": any(map(has_state, cache)),
    }
    left = [kind for kind, occurs in others.items() if occurs]
    if not left or all("Sliding" in layer for layer in layers):
        return "all layers"
    both = all(has_state(layer) and isinstance(layer, CacheLayerMixin) for layer in cache)
    return f"{'all' if both else 'full'} layers, not {' and '.join(left)}"


def list_tested() -> Iterator[str]:
    """Yield the rows of the tested types. Types of a family with the same facts share one."""
    rows: dict[tuple[str, TypeFacts], list[str]] = {}
    for name, known in ARCHITECTURES.items():
        rows.setdefault((known.family, try_tested_type(name)), []).append(name)
    yield from ("| family | types | what is cut | rotations | answers |", "|---|---|---|---|---|")
    for (family, facts), names in rows.items():
        cells = family, join_names(names), facts.cut, facts.rotations, describe_answers(facts)
        yield f"| {' | '.join(cells)} |"


def describe_rotations(fault: str | None, further: str | None, joint_norm: bool) -> str:
    """Return whether kvbench rotates keys as a model does.

    Args:
        fault: How keys that kvbench norms and rotates differ from the model's, or None.
        further: How rotated keys differ that kvbench rotates to other positions, or None.
        joint_norm: Whether the keys of all heads of a token are normed together.
    """
    if fault is not None:
        return "refused"
    return ("right" if further is None else "at their own positions") + (", norm over all heads" if joint_norm else "")


def describe_answers(facts: TypeFacts) -> str:
    """Return how answers are decoded."""
    return "CUDA graphs" if facts.graphs else "modules"


def join_names(names: Iterable[str]) -> str:
    """Return names of types as a cell shows them."""
    return ", ".join(f"`{name}`" for name in sorted(names))


def list_others() -> dict[str, list[str]]:
    """Return the rows of the tables of all types that are not on the list."""
    admitted: dict[tuple[str, str, str], list[str]] = {}
    refused: dict[str, list[str]] = {}
    for name in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(ARCHITECTURES)):
        if not has_default_config(name):
            continue
        try:
            facts = try_other_type(name)
        except Refused as refusal:
            if not str(refusal).startswith(UNLISTED):
                refused.setdefault(shorten_reason(str(refusal)), []).append(name)
            continue
        cells = facts.cut, facts.rotations, describe_answers(facts)
        admitted.setdefault(cells, []).append(name)
    return {
        ADMITTED: ["| types | what is cut | rotations | answers |", "|---|---|---|---|"]
        + [f"| {join_names(names)} | {' | '.join(cells)} |" for cells, names in sorted(admitted.items())],
        REFUSED: ["| types | reason |", "|---|---|"]
        + [f"| {join_names(names)} | {reason} |" for reason, names in sorted(refused.items())],
    }


def shorten_reason(reason: str) -> str:
    """Return why a probe refuses a type, without the numbers of its miniature."""
    for detail, shown in DETAILS:
        reason = detail.sub(shown, reason)
    return reason.replace("|", "\\|")


def list_tables() -> Mapping[str, Sequence[str]]:
    """Return the lines of each table, by its name. It takes half a minute on one CPU core."""
    with silence_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of types that transformers is about to drop
        return {TESTED: list(list_tested()), **list_others()}

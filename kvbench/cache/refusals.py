"""Which methods, allocators and codecs do not work together, and why: a table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.codec import Codec
from kvbench.interfaces.method import Method

Condition = Callable[[Method, Allocator, Codec], bool]

CONDITIONS: Mapping[str, Condition] = {
    "decoding": lambda method, allocator, codec: method.decoding,
    "allocator": lambda method, allocator, codec: allocator.name != "uniform",
    "uneven_allocator": lambda method, allocator, codec: not allocator.even,
    "cascading_allocator": lambda method, allocator, codec: allocator.cascades,
    "codec": lambda method, allocator, codec: codec.packs,
}
"""The conditions of `FurtherHooks.refusals` that follow from the three alone, not from block sizes or models."""


def can_cut_packed(codec: Codec) -> bool:
    """Return whether cuts can drop packed rows."""
    return codec.packing.before_attention or codec.packing.keeps


@dataclass(frozen=True)
class Rule:
    """A setting that no method of some kind can work with."""

    refused: str
    """A name of `CONDITIONS`, whose setting the message names."""
    applies: Condition
    reason: str
    """What the message says behind the setting. `{name}` is the method's name."""


RULES = (
    Rule(
        "allocator",
        lambda method, allocator, codec: method.attends_subset and allocator.name != "uniform",
        "{name} keeps every row, so there are none to share; use allocator=uniform",
    ),
    Rule(
        "codec",
        lambda method, allocator, codec: codec.packing.joins_heads and method.cuts,
        "it stores all heads of a layer together, and {name} evicts rows, which kvbench does in each head on its own; "
        "use method=full, a method that reads few of many rows, or codec=raw",
    ),
    Rule(
        "codec",
        lambda method, allocator, codec: codec.packing.takes_unrotated_keys and method.merges,
        "it stores keys before rotation, and {name} merges rotated ones; use codec=raw",
    ),
    Rule(
        "codec",
        lambda method, allocator, codec: codec.packing.before_attention and method.merges,
        "its rows are packed, and {name} merges rows; use codec=raw",
    ),
    Rule(
        "codec",
        lambda method, allocator, codec: codec.packing.keeps and method.decoding and method.merges,
        "{name} merges rows while decoding, when they are packed; use method.decoding=false or codec=raw",
    ),
    Rule(
        "codec",
        lambda method, allocator, codec: codec.packs and not can_cut_packed(codec) and method.decoding,
        "{name} cuts while decoding, and packed groups are never repacked; use method.decoding=false or codec=raw",
    ),
    Rule(
        "allocator",
        lambda method, allocator, codec: method.sets_head_quotas and allocator.name != "uniform",
        "{name} shares rows out itself; use allocator=uniform",
    ),
    Rule(
        "decoding",
        lambda method, allocator, codec: method.needs_extra_reads and method.decoding,
        "{name} has scores of the prompt only; use method.decoding=false",
    ),
    Rule(
        "allocator",
        lambda method, allocator, codec: method.needs_extra_reads and allocator.cascades,
        "{name} cuts after the model has read about the prompt, and then no queries are left to share rows by; "
        "use allocator=uniform, ada or pyramid",
    ),
    Rule(
        "allocator",
        lambda method, allocator, codec: not method.scores and (allocator.cascades or not allocator.even),
        "{name} has no scores to share rows by; use allocator=uniform",
    ),
)
"""What kvbench refuses for every method. The first rule that applies is quoted."""


def find_refusal(method: Method, allocator: Allocator, codec: Codec) -> str | None:
    """Return why three cannot work together, or None if they can. The line names the setting to change."""
    settings = {"decoding": "method.decoding=true", "codec": f"codec={codec.name}"}
    for name, reason in method.refusals.items():
        if name in CONDITIONS and CONDITIONS[name](method, allocator, codec):
            return f"{settings.get(name, f'allocator={allocator.name}')}: {method.name} {reason}"
    for rule in RULES:
        if rule.applies(method, allocator, codec):
            setting = settings.get(rule.refused, f"allocator={allocator.name}")
            return f"{setting}: {rule.reason.format(name=method.name)}"
    return None


def explain_one_block(method: Method) -> str:
    """Return why a method cannot read a prompt in blocks. The text follows the method's name."""
    return method.refusals.get("block_size", "needs the prompt as one block (null)")

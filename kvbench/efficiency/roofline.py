"""Compute the least time that a step, a prefill or a score can take on a machine.

    floor = max(bytes / bandwidth, operations / rate)

Decoding reads every weight, but the embedding table only if it is the output layer too, and of a mixture of experts
those that the tokens of the batch choose, as the mean over random choices. It also reads the held keys and values. A
method that attends to few of many rows reads only those, and what it chooses them by. A codec may have to make the rows
that are attended to of what it stores (DeltaKV), which takes further operations. A prefill multiplies every token with
the weights (only the last token with the output layer), and its queries with the rows that they see, with 4·Hq·d
operations for each pair. If the cache is cut after each block, this holds block by block. conf/efficiency/floors.yaml
lists what each score must do: passes over keys and values, and products of queries with rows. In a prefill this comes
on top in every layer, and so does what a codec reads once to pack the rows. Allocators are not counted: they read
scores, of which a row has one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import yaml
from torch import Tensor

from kvbench.config.catalogue import CONF
from kvbench.interfaces.layout import Layout
from kvbench.models.layouts import find_window
from kvbench.models.transformers_port import embedding_tables, read_layout, text_config


@dataclass(frozen=True)
class Machine:
    """A machine's memory bandwidth in bytes/s and its rate in operations/s."""

    bandwidth: float
    flops: float

    def ms(self, read: float, operations: float) -> float:
        """Return the milliseconds to read so many bytes and do so many operations at the same time."""
        return 1000 * max(read / self.bandwidth, operations / self.flops)


@dataclass(frozen=True)
class WeightSizes:
    """Sizes of a model's weights."""

    total: int
    """Bytes of all weights."""
    read: int
    """Bytes that every decoding step reads, which are those of all weights but the embeddings and the experts."""
    layers: int
    """Number of weights with which every token is multiplied, without the output layer and the experts."""
    layer_bytes: int = 0
    """Their bytes. A weight in int4 takes about half a byte, and yet each one is multiplied."""
    output: int = 0
    """Number of weights of the output layer."""
    experts: int = 0
    """Bytes of the experts that a router chooses from."""
    expert_weights: int = 0
    """Number of their weights."""
    share: float = 0.0
    """Which part of the experts a token is multiplied with."""

    @classmethod
    def of(cls, model: torch.nn.Module) -> "WeightSizes":
        """Read the sizes of a model."""
        weights = list(model.parameters())  # tied ones once
        table, output = embedding_tables(model)
        total, count = measure_tensors(weights)
        experts, expert_weights = measure_tensors(list_experts(model))
        outside, outside_weights = measure_tensors([output] if table is output else [table, output])
        layer_bytes = total - experts - outside
        return cls(
            total=total,
            read=layer_bytes + output.nbytes,
            layers=count - expert_weights - outside_weights,
            layer_bytes=layer_bytes,
            output=output.numel(),
            experts=experts,
            expert_weights=expert_weights,
            share=find_active_share(model) if experts else 0.0,
        )

    def read_by(self, tokens: int) -> float:
        """Return the bytes that a step of so many tokens reads. Each token chooses its experts at random."""
        return self.read + self.experts * (1 - (1 - self.share) ** tokens)

    @property
    def multiplied(self) -> float:
        """The number of weights with which a token is multiplied, without the output layer."""
        return self.layers + self.expert_weights * self.share


def measure_tensors(tensors: Sequence[Tensor]) -> tuple[int, int]:
    """Return the bytes and the numbers of tensors."""
    return sum(one.nbytes for one in tensors), sum(one.numel() for one in tensors)


def list_experts(model: torch.nn.Module) -> list[Tensor]:
    """Return the weights of the experts that a router chooses from, which are 3-dimensional tensors."""
    convolutions = torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d
    layers = (module for module in model.modules() if not isinstance(module, convolutions))
    weights = [list(layer.parameters(recurse=False)) for layer in layers]
    return [weight for stacked in weights if any(part.dim() == 3 for part in stacked) for weight in stacked]


def find_active_share(model: torch.nn.Module) -> float:
    """Return which part of a layer's experts a token is multiplied with."""
    config = text_config(model)
    count = next(weight.shape[0] for weight in list_experts(model))
    chosen: int = getattr(config, "num_experts_per_tok", None) or config.moe_topk
    return chosen / count


def decode_ms(machine: Machine, weights: WeightSizes, read: int, batch: int, making: int = 0) -> tuple[float, float]:
    """Return the milliseconds of one token for every sample, if it reads and computes at the same time, and if it first
    reads and then computes.

    Args:
        machine: The machine.
        weights: The sizes of the model's weights.
        read: Bytes of the cache that the token reads.
        batch: Number of samples.
        making: Operations that make the rows that it attends to.
    """
    operations = 2 * batch * (weights.multiplied + weights.output) + making
    moved = weights.read_by(batch) + read
    return machine.ms(moved, operations), machine.ms(moved, 0) + machine.ms(0, operations)


Needs = Callable[[int, int, int], tuple[int, int]]
"""Rows of a head, tokens of the block that was read, and rows that are packed after it -> bytes and operations that a
method and a codec need for a layer.
"""


def prefill_ms(
    machine: Machine,
    model: torch.nn.Module,
    tokens: int,
    batch: int,
    block: int | None,
    quota: int | None,
    needs: Needs = lambda rows, tokens, packed: (0, 0),
) -> float:
    """Return the milliseconds to read a prompt in blocks.

    Args:
        machine: The machine.
        model: The model.
        tokens: Tokens of the prompt.
        batch: Number of prompts.
        block: Tokens of a block; None for one block.
        quota: Number of rows to which a head is cut after each block; None for no cut.
        needs: What is done with the rows of each layer that holds rows after each block.
    """
    shape, weights = read_layout(model), WeightSizes.of(model)
    config = text_config(model)
    pair = 4 * config.num_attention_heads * shape.dim * batch
    window = find_window(config) or tokens
    full = len(shape.held)
    element = embedding_tables(model)[0].element_size()
    total, seen = 0.0, 0
    while seen < tokens:
        new = min(block or tokens, tokens - seen)
        held = seen if quota is None else min(seen, quota)
        pairs = full * new * (held + (new + 1) / 2)
        pairs += len(shape.sliding) * new * min(window, seen + (new + 1) / 2)
        rows = full * held + len(shape.sliding) * min(window, seen)
        read = weights.layer_bytes + weights.experts + rows * row_bytes(shape, element) * batch
        layer_rows = held + new
        packed = 0 if seen + new < tokens else layer_rows if quota is None else min(layer_rows, quota)
        more, operations = needs(layer_rows, new, packed)
        operations = full * operations + 2 * weights.multiplied * new * batch + pair * pairs
        total += machine.ms(read + full * more, operations)
        seen += new
    return total


def make_needs(model: torch.nn.Module, batch: int, method: Mapping[str, Any], codec: Mapping[str, Any]) -> Needs | None:
    """Return what a method and a codec with these settings need in a prefill; None if one of them has no floor."""
    if not {method["name"], codec["name"]} <= load_needs().keys():
        return None
    shape, config = read_layout(model), text_config(model)
    sizes = {"batch": batch, "heads": shape.heads, "group": config.num_attention_heads // shape.heads, "dim": shape.dim}
    sizes |= {"hidden": config.hidden_size, "element": embedding_tables(model)[0].element_size()}

    def needs(rows: int, tokens: int, packed: int) -> tuple[int, int]:
        work = [(method, rows), (codec, packed)] if packed else [(method, rows)]
        parts = [compute_score_needs(one["name"], one, sizes | {"rows": n, "tokens": tokens}) for one, n in work]
        return sum(part[0] for part in parts if part), sum(part[1] for part in parts if part)

    return needs


def prefill_ratio(
    model: torch.nn.Module, tokens: int, method: Mapping[str, Any], codec: Mapping[str, Any]
) -> float | None:
    """Return the least ratio of a prefill in one block to the full cache's, by operations alone; None without a floor.

    On a machine that computes longer than it reads, nothing is faster, because what it reads costs no time.
    """
    needs, machine = make_needs(model, 1, method, codec), Machine(math.inf, 1.0)
    if needs is None:
        return None
    return prefill_ms(machine, model, tokens, 1, None, None, needs) / prefill_ms(machine, model, tokens, 1, None, None)


def row_bytes(shape: Layout, element: int) -> int:
    """Return the bytes of a key and a value of every KV head of a layer."""
    return shape.row_numbers * element


@cache
def load_machines() -> dict[str, dict[str, float]]:
    """Load the speeds of machines, by the names of their files."""
    return yaml.safe_load((CONF / "efficiency" / "machines.yaml").read_text())


@cache
def load_needs() -> dict[str, dict[str, Any]]:
    """Load what a score needs, by method."""
    return yaml.safe_load((CONF / "efficiency" / "floors.yaml").read_text())


def compute_score_needs(method: str, settings: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[int, int] | None:
    """Compute the bytes and operations of a score; None for a method that conf/efficiency/floors.yaml does not list.

    Args:
        method: The method's name, or a codec's for what it needs to pack rows.
        settings: Its settings.
        sizes: batch, heads, group, rows, tokens (of the block), dim, hidden, element (bytes).
    """
    if method not in load_needs():
        return None
    need, size = load_needs()[method], sizes
    per_head = size["batch"] * size["heads"] * size["rows"]
    row = size["dim"] * size["element"]  # bytes of a key, or of a value
    read = per_head * row * (need.get("keys", 0) + need.get("values", 0)) + need.get("written", 4) * per_head
    pairs = per_head * size["group"]
    queries = settings.get("window", 1) if need.get("queries") == "window" else need.get("queries", 0)
    if need.get("keys") == 2 and queries:  # a second pass may read the first one's float32 logits instead
        read -= per_head * max(0, row - 8 * size["group"] * queries)
    if queries == "block":  # causal: the last query sees all rows
        queries = size["tokens"] * (1 - (size["tokens"] - 1) / (2 * size["rows"]))
        read += size["batch"] * size["heads"] * size["group"] * size["tokens"] * size["dim"] * size["element"]
    operations = 2 * pairs * queries * size["dim"] * need.get("products", 1)
    if need.get("moments"):
        asked = size["batch"] * size["heads"] * size["group"] * size["tokens"] * size["dim"]
        read, operations = read + asked * size["element"], operations + 2 * asked * size["dim"]
    operations += 2 * pairs * size["dim"] ** 2 * need.get("quadratic", 0)
    operations += 2 * pairs * size["dim"] * size["hidden"] * need.get("projections", 0)
    operations += 2 * per_head * size["dim"] * need.get("matches", 0) * ((settings.get("chunk") or size["rows"]) / 4)
    if need.get("clusters"):
        operations += 2 * per_head * size["dim"] * 2 ** settings["bits"] * (settings["iterations"] + 1)
    return int(read), int(operations)

"""Compute the least time that a step, a prefill or a score can take on a machine.

    floor = max(bytes / bandwidth, operations / rate)

Decoding reads every weight, but the embedding table only if it is the output layer too, and the held keys and values. A
method that attends to few of many rows reads only those, and what it chooses them by. A codec may have to make the rows
that are attended to of what it stores (DeltaKV), which takes further operations. A prefill multiplies every token with
the weights (only the last token with the output layer), and its queries with the rows that they see, with 4·Hq·d
operations for each pair. If the cache is cut after each block, this holds block by block. conf/efficiency/floors.yaml
lists what each score must do: passes over keys and values, and products of queries with rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import yaml

from kvbench.config.catalogue import CONF
from kvbench.interfaces.layout import Layout
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
    """Sizes of a model's weights.

    Attributes:
        total: Bytes of all weights.
        read: Bytes that a decoding step reads.
        layers: Number of weights with which every token is multiplied.
    """

    total: int
    read: int
    layers: int

    @classmethod
    def of(cls, model: torch.nn.Module) -> "WeightSizes":
        """Read the sizes of a model."""
        sizes = {id(own): own.nbytes for own in model.parameters()}
        table, output = embedding_tables(model)
        total = sum(sizes.values())
        read = total if table is output else total - table.nbytes
        return cls(total, read, (read - output.nbytes) // table.element_size())


def decode_ms(
    machine: Machine, weights: WeightSizes, read: int, batch: int, element: int, making: int = 0
) -> tuple[float, float]:
    """Return the milliseconds of one token for every sample, if it reads and computes at the same time, and if it first
    reads and then computes.

    Args:
        machine: The machine.
        weights: The sizes of the model's weights.
        read: Bytes of the cache that the token reads.
        batch: Number of samples.
        element: Bytes of a weight.
        making: Operations that make the rows that it attends to.
    """
    read, operations = weights.read + read, 2 * batch * weights.read / element + making
    return machine.ms(read, operations), machine.ms(read, 0) + machine.ms(0, operations)


def prefill_ms(
    machine: Machine, model: torch.nn.Module, tokens: int, batch: int, block: int | None, quota: int | None
) -> float:
    """Return the milliseconds to read a prompt in blocks, cut to `quota` rows after each. None: one block, no cut."""
    shape, weights = read_layout(model), WeightSizes.of(model)
    config = text_config(model)
    pair = 4 * config.num_attention_heads * shape.dim * batch
    window = getattr(config, "sliding_window", None) or tokens
    full = shape.layers - len(shape.sliding)
    element = embedding_tables(model)[0].element_size()
    total, seen = 0.0, 0
    while seen < tokens:
        new = min(block or tokens, tokens - seen)
        held = seen if quota is None else min(seen, quota)
        pairs = full * new * (held + (new + 1) / 2)
        pairs += len(shape.sliding) * new * min(window, seen + (new + 1) / 2)
        rows = full * held + len(shape.sliding) * min(window, seen)
        read = weights.layers * element + rows * row_bytes(shape, element) * batch
        total += machine.ms(read, 2 * weights.layers * new * batch + pair * pairs)
        seen += new
    return total


def row_bytes(shape: Layout, element: int) -> int:
    """Return the bytes of a key and a value of every KV head of a layer."""
    return 2 * shape.heads * shape.dim * element


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
        method: The method's name.
        settings: Its settings.
        sizes: batch, heads, group, rows, tokens (of the block), dim, hidden, element (bytes).
    """
    if method not in load_needs():
        return None
    own, size = load_needs()[method], sizes
    per_head = size["batch"] * size["heads"] * size["rows"]
    row = size["dim"] * size["element"]  # bytes of a key, or of a value
    read = per_head * row * (own.get("keys", 0) + own.get("values", 0)) + 4 * per_head
    pairs = per_head * size["group"]
    queries = settings.get("window", 1) if own.get("queries") == "window" else own.get("queries", 0)
    if own.get("keys") == 2 and queries:  # or the first pass writes its logits in float32, and the second reads these
        read -= per_head * max(0, row - 8 * size["group"] * queries)
    if queries == "block":  # causal: the last query sees all rows
        queries = size["tokens"] * (1 - (size["tokens"] - 1) / (2 * size["rows"]))
        read += size["batch"] * size["heads"] * size["group"] * size["tokens"] * size["dim"] * size["element"]
    operations = 2 * pairs * queries * size["dim"] * own.get("products", 1)
    if own.get("moments"):
        asked = size["batch"] * size["heads"] * size["group"] * size["tokens"] * size["dim"]
        read, operations = read + asked * size["element"], operations + 2 * asked * size["dim"]
    operations += 2 * pairs * size["dim"] ** 2 * own.get("quadratic", 0)
    operations += 2 * pairs * size["dim"] * size["hidden"] * own.get("projections", 0)
    operations += 2 * per_head * size["dim"] * own.get("matches", 0) * ((settings.get("chunk") or size["rows"]) / 4)
    return int(read), int(operations)

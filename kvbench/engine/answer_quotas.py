"""The quotas of an answer that is cut at every token, computed before the answer begins.

A CUDA graph can't ask how many rows a head may keep. If that follows from numbers alone, the host knows it for every
token of the answer: the budget gives the mean over the layers, and the allocator shares it among them. From the quotas
follows how many rows each head holds after each token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from kvbench.cache.layer import Layer
from kvbench.cache.policy import CachePolicy
from kvbench.interfaces.allocator import Allocator
from kvbench.kernels.row_replacement import NEVER


def knows_quotas(allocator: Allocator) -> bool:
    """Return whether the budget alone says how many rows the heads of each layer may keep while an answer is cut."""
    return allocator.is_uniform or (allocator.even and allocator.keeps_shares)


def replaces_rows(choice: CachePolicy) -> bool:
    """Return whether an answer is cut at every token, by scores alone and with quotas that are known beforehand."""
    method, allocator = choice.method, choice.allocator
    if not choice.codec.cuts_in_graph or not method.decoding or method.decode_interval > 1:
        return False
    if method.captured is None or not method.captured.order_free or choice.captures_state:
        return False
    if method.sets_head_quotas and not (choice.streams and not method.overrides("protect", "protect_sinks")):
        return False
    return knows_quotas(allocator) and not method.overrides("cut", "merge", "select")


@dataclass(frozen=True)
class AnswerQuotas:
    """What the heads of L layers may keep and do hold after each of T tokens.

    The last two dimensions of the tensors are B and H, or 1 where all samples or all heads are alike.
    """

    quotas: Tensor
    """Rows that a head may keep at the cut after each token, (T, L, b, h) int64; `NEVER` where it is not cut."""
    rows: Tensor
    """Rows that a head holds before the first and after each token, (T + 1, L, b, h) int64."""
    attended: dict[tuple[int, int], tuple[list[list[float]], list[int]]] = field(default_factory=dict, compare=False)
    """What `count_attended` has counted."""

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.quotas)

    @cached_property
    def cut(self) -> list[bool]:
        """Whether each layer is cut at all."""
        is_cut: list[bool] = (self.quotas < NEVER).flatten(2).any(-1).any(0).tolist()
        return is_cut

    @cached_property
    def constant(self) -> list[bool]:
        """Whether every head of each layer holds the same number of rows and loses one of them at every token."""
        rows, quotas = self.rows.flatten(2), self.quotas.flatten(2)
        alike = (rows == rows[:1, :, :1]).all(-1).all(0) & (quotas < NEVER).all(-1).all(0)
        is_constant: list[bool] = alike.tolist()
        return is_constant

    def select(self, layers: Sequence[int]) -> "AnswerQuotas":
        """Return the quotas of some layers."""
        return AnswerQuotas(self.quotas[:, layers], self.rows[:, layers])

    def find_last_cut(self, layer: int, begin: int, end: int) -> int | None:
        """Return how many tokens had been read at the last cut of a layer from token `begin` to before `end`.

        Returns None if the layer was not cut.
        """
        cuts = (self.quotas[begin:end, layer] < NEVER).flatten(1).any(-1).nonzero()
        return begin + 1 + int(cuts[-1]) if len(cuts) else None

    def count_attended(self, begin: int, end: int) -> tuple[list[list[float]], list[int]]:
        """Return how many rows the heads of each layer attend to for the tokens from `begin` to before `end`.

        Returns:
            For each layer the mean over the heads, for every token; and for the last token the most of a head.
        """
        if (begin, end) not in self.attended:  # all layers ask for the same
            rows = self.rows[begin:end].flatten(2)
            mean, most = rows.double().mean(-1).T + 1, rows[-1].amax(-1) + 1  # with the token itself
            self.attended[begin, end] = mean.tolist(), most.tolist()
        return self.attended[begin, end]


def join_answer_quotas(plans: Sequence[AnswerQuotas], sizes: Sequence[int]) -> AnswerQuotas:
    """Return the quotas of several contexts as those of one batch.

    Args:
        plans: Those of each context, for equally many tokens and layers.
        sizes: Number of its samples.
    """
    if len(plans) == 1:
        return plans[0]

    def join(parts: Sequence[Tensor]) -> Tensor:
        heads = max(part.shape[3] for part in parts)
        return torch.cat([part.expand(-1, -1, size, heads) for part, size in zip(parts, sizes, strict=True)], 2)

    return AnswerQuotas(join([plan.quotas for plan in plans]), join([plan.rows for plan in plans]))


def find_answer_quotas(layers: Sequence[Layer], nominal: Sequence[int]) -> AnswerQuotas:
    """Return the quotas up to the first token at which a head would give up more than one row.

    Args:
        layers: All layers.
        nominal: For each token, the rows per head that a cut leaves, as the mean over the layers.
    """
    numbers = {rows: number for number, rows in enumerate(sorted(set(nominal)))}
    which = torch.tensor([numbers[rows] for rows in nominal])
    wanted, held, even, stays_even = [], [], [], []
    streams, uniform = layers[0].choice.streams, layers[0].choice.allocator.is_uniform
    known: dict[bool, Tensor] = {}  # by whether the method spares a layer, if only that matters
    for layer in layers:
        spared = layer.index not in layer.cut_layers
        layer_quotas = known.get(spared)
        if layer_quotas is None:
            each = [find_layer_quotas(layer, rows, len(nominal)) for rows in numbers]
            layer_quotas = torch.stack(each)[which]  # (T, B, H or 1)
        if uniform and not streams:
            known[spared] = layer_quotas
        wanted.append(layer_quotas)
        held.append(torch.tensor([[layer.rows.longest_head]]) if layer.rows.even else layer.rows.counts().cpu())
        even.append(layer.rows.even or streams)
        stays_even.append(layer.even or streams)
    quotas = torch.stack(torch.broadcast_tensors(*wanted), 1)
    if (quotas == quotas[:, :, :1]).all():
        quotas = quotas[:, :, :1]
    start = torch.stack(torch.broadcast_tensors(*held))
    token = torch.arange(1, len(nominal) + 1)[:, None, None, None]
    rows = token + (quotas - token).cummin(0).values.minimum(start)  # of each token min(quota, rows before + 1)
    rows = torch.cat([start.expand_as(rows[:1]), rows])
    exceeded = (rows[:-1] + 1 > quotas).flatten(2).any(-1)  # (T, L): a head has too many rows
    uneven = ~torch.tensor(even) | (exceeded.cummax(0).values.roll(1, 0) & ~torch.tensor(stays_even))
    uneven[0] = ~torch.tensor(even)  # uneven heads that do not stream are cut at every token, even if no row leaves
    quotas = quotas.masked_fill(~(exceeded | uneven)[..., None, None], NEVER)
    falls = (rows[1:] < rows[:-1]).flatten(1).any(-1).nonzero()
    count = int(falls[0]) if len(falls) else len(nominal)
    return AnswerQuotas(quotas[:count], rows[: count + 1])


def find_layer_quotas(layer: Layer, nominal: int, tokens: int) -> Tensor:
    """Return the rows that the heads of a layer may keep at a cut, (B, 1) or (B, H) int64.

    Args:
        layer: The layer.
        nominal: Rows per head, as the mean over the layers.
        tokens: Number of tokens that will be read. A head that keeps all of their rows has the quota `NEVER`.
    """
    samples = torch.full((layer.rows.shape[0], 1), NEVER)
    if layer.index not in layer.cut_layers:
        return samples
    if layer.choice.streams:
        quotas = layer.find_head_quotas_ahead(nominal, tokens).long()
        return quotas.masked_fill(quotas >= layer.rows.seen + tokens, NEVER).expand(len(samples), layer.rows.shape[1])
    if layer.choice.allocator.is_uniform:
        return samples.fill_(nominal)
    return torch.tensor(layer.find_quota_ahead(nominal))[:, None]

"""received_attention: do keys that differ from the others receive the attention? (KeyDiff, Table 3 and its theory)

    correlation     Spearman's ρ, over the rows j of a prompt, of −cos(k_j, anchor) and the attention that row j
                    received. The anchor is the mean of k_i/‖k_i‖, so the order is that of KeyDiff's pairwise scores
                    too. The series `mean` divides the sum by the number of queries that can see row j, the series
                    `sum` does not. A value for each layer, the mean over its query heads
    correlation_mean, correlation_deviation   mean and standard deviation of it over the layers
    lemma           share of pairs of a query q and a row k* for which [log(n/(n+1)) − log(1−w)]/(2M) − 1 ≤ cos(k*, q)
                    (Lemma 3.1)
    lemma_slack     quantiles of cos(k*, q) minus that bound
    theorem         share of the pairs with α = cos(k̄, q) < 0 < β = cos(k*, q) for which
                    cos(k̄, k*) ≤ 1 + αβ − α²/2 − β²/2 (Theorem 3.2)
    theorem_slack   quantiles of that bound minus cos(k̄, k*)
    premise         share of all pairs that fulfil the theorem's premise

The lemma supposes ‖q‖ = 1 and logits q·k. A query of length ‖q‖ with the factor s of the logits sees the keys s·‖q‖·k,
so M is the largest squared norm of these. w is the probability of k* among the n + 1 rows that q can see, and k̄ is
their mean. Pairs are `QUERIES` random queries of every head, each with its most probable row and with a random one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from kvbench.interfaces.observation import Observation
from kvbench.interfaces.rows import Rows
from kvbench.kernels.accumulated_attention import accumulated_attention
from kvbench.store.study_lines import Line
from kvbench.studies.study import LayerStudy, Memory, correlate, draw_positions, rank, take_block, widen

QUERIES = 32  # queries of each head, at random positions
SLACK = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)  # quantiles of the slack of an inequality


@dataclass(frozen=True)
class ReceivedAttention(LayerStudy):
    """The attention that rows receive, against the similarity of their keys."""

    name: ClassVar[str] = "received_attention"
    wants: ClassVar[tuple[str, ...]] = ("lse",)

    def update(self, memory: Memory, observation: Observation, rows: Rows) -> None:
        assert observation.lse is not None  # the study wants it
        queries = observation.queries
        if not memory:
            positions = draw_positions(QUERIES, observation.prompt, self.seed, 1)  # the first query sees one row
            memory |= {"received": None, "queries": [], "positions": positions}
        votes = accumulated_attention(queries, rows.keys, rows.mass, observation.lse, observation.scaling)[0].flatten(
            0, 1
        )
        before = memory["received"]
        memory["received"] = votes if before is None else votes + pad(before, (0, votes.shape[1] - before.shape[1]))
        memory["queries"].append(queries[0][:, take_block(memory["positions"], observation)])
        if not observation.last:
            return
        received, positions = memory["received"].double(), memory["positions"]
        sampled = torch.cat(memory["queries"], 1)
        memory.clear()
        group = sampled.shape[0] // rows.heads
        seen = torch.arange(received.shape[1], 0, -1, device=received.device)
        ranks = rank(torch.stack([score_distance(keys) for keys in rows.keys[0]])).repeat_interleave(group, 0)
        for series, attention in (("mean", received / seen), ("sum", received)):
            memory[series] = correlate(ranks, rank(attention)).cpu()
        pairs = [
            check_inequalities(keys, group_queries, positions.to(keys.device), observation.scaling, self.seed)
            for keys, group_queries in zip(rows.keys[0], sampled.unflatten(0, (-1, group)), strict=True)
        ]
        memory |= {name: torch.cat([pair[name] for pair in pairs]).cpu() for name in pairs[0]}

    def finish(self, memories: Mapping[int, Memory], first: bool) -> Iterable[Line]:
        for series in ("mean", "sum"):
            means = torch.stack([memory[series].mean() for memory in memories.values()])
            for layer, memory, value in zip(memories, memories.values(), means, strict=True):
                yield self.line("correlation", value, series=series, layer=layer, n=len(memory[series]))
            yield self.line("correlation_mean", means.mean(), series=series, n=len(means))
            yield self.line("correlation_deviation", means.std(correction=0), series=series, n=len(means))
        premise = [memory["premise"] for memory in memories.values()]
        yield self.line("premise", torch.cat(premise).double().mean(), n=sum(map(len, premise)))
        for name in ("lemma", "theorem"):
            slack = torch.cat([memory[name] for memory in memories.values()])
            if len(slack) == 0:
                continue  # no pair fulfils the theorem's premise
            yield self.claim(name, [slack >= -1e-6])  # rounding of float32 cosines
            for share in SLACK:
                yield self.line(f"{name}_slack", slack.double().quantile(share), x=share, n=len(slack))


def score_distance(keys: Tensor) -> Tensor:
    """Return −cos(k_j, anchor) times a constant, (n,) float64, of the keys of one head (n, d)."""
    unit = normalize(keys.double() if keys.is_cpu else keys.float(), dim=-1)
    return -(unit @ unit.mean(0)).double()


def check_inequalities(keys: Tensor, queries: Tensor, positions: Tensor, scaling: float, seed: int) -> Memory:
    """Return the slack of both inequalities for pairs of a query and a row.

    Args:
        keys: Of one KV head, (n, d).
        queries: Of its group, (G, m, d).
        positions: Of the queries, (m,), at least 1.
        scaling: The factor of the logits.
        seed: Seed of the random rows.

    Returns:
        ``premise``, whether a pair fulfils the theorem's premise, and ``lemma``, for all pairs; ``theorem`` for those
        that fulfil its premise. Vectors.
    """
    keys, queries = widen(keys), widen(queries)
    visible = torch.arange(len(keys), device=keys.device) <= positions[:, None]  # (m, n)
    logits = (queries @ keys.mT * scaling).masked_fill(~visible, -torch.inf)
    sums = logits.logsumexp(-1)
    draws = torch.rand(len(positions), generator=torch.Generator().manual_seed(seed)).to(keys.device)
    drawn = (draws * (positions + 1)).long().expand(sums.shape)
    counts = positions + 1.0
    means = keys.cumsum(0)[positions] / counts[:, None]
    largest = keys.square().sum(-1).cummax(0).values[positions]
    bound = (scaling * queries.norm(dim=-1)).square() * largest  # M
    alpha = (normalize(queries, dim=-1) * normalize(means, dim=-1)).sum(-1)
    numbers: dict[str, list[Tensor]] = {"premise": [], "lemma": [], "theorem": []}
    for rows in (logits.argmax(-1), drawn):
        star = keys[rows]
        beta = (normalize(queries, dim=-1) * normalize(star, dim=-1)).sum(-1)
        weight = (logits.gather(-1, rows[..., None])[..., 0] - sums).exp()
        rest = torch.log1p(-weight.clamp(max=1 - torch.finfo(weight.dtype).eps / 2))
        numbers["lemma"].append(beta - (((counts - 1) / counts).log() - rest) / (2 * bound) + 1)
        premise = (alpha < 0) & (beta > 0)
        numbers["premise"].append(premise)
        cosine = (normalize(means, dim=-1) * normalize(star, dim=-1)).sum(-1)
        numbers["theorem"].append((1 + alpha * beta - alpha.square() / 2 - beta.square() / 2 - cosine)[premise])
    return {name: torch.cat([part.flatten() for part in parts]) for name, parts in numbers.items()}

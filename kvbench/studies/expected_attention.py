"""expected_attention: whether expected attention resembles observed attention (Expected Attention, Figure 10).

The moments of the queries of the first fifth of a prompt say what attention its keys can expect, by the formula of
methods/expected_attention.py: with μ, Σ the mean and covariance of a query head before rotation, without the first
`SINKS` queries, R̄ the mean rotation of the next `POSITIONS` positions and s the scaling of the logits,

    log ẑ_j = s·(R̄μ)·k_j + s²·k_jᵀ(R̄ΣR̄ᵀ)k_j/2

Observed is the mean a_j of the attention probabilities that the queries of the other four fifths give to the key. All
keys of the first fifth are compared. For each query head:

    pearson      the correlation of log ẑ_j and log a_j
    spearman     that of their ranks
    correlated   share of all query heads with a rank correlation above 0
    heads        points (log₁₀ â_j, log₁₀ a_j) of some keys, with â_j = ẑ_j / Σ ẑ_j, of the first query head of some
                 layers, of one prompt

A probability that is 0 in floating point counts as the smallest normal number.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import log
from typing import ClassVar

import torch

from kvbench.interfaces.observation import Observation
from kvbench.interfaces.rows import Rows
from kvbench.kernels.accumulated_attention import accumulated_attention
from kvbench.kernels.expected_attention import expected_logits, merge, moments
from kvbench.kernels.rerotation import rotate
from kvbench.store.study_lines import Line
from kvbench.studies.study import LayerStudy, Memory, correlate, draw_positions, find_rotation, rank

SINKS = 4  # the first queries, which are left out, as in conf/method/expected_attention.yaml
POSITIONS = 512  # T, the number of future positions, as in that file; fewer if the prompt has fewer
PARTS = 5  # the moments come from the first of so many parts of a prompt
POINTS = 100  # keys of a scatter


@dataclass(frozen=True)
class ExpectedAttentionStudy(LayerStudy):
    """Whether expected attention resembles observed attention."""

    name: ClassVar[str] = "expected_attention"
    wants: ClassVar[tuple[str, ...]] = ("lse",)

    def update(self, memory: Memory, observation: Observation, rows: Rows) -> None:
        known, first = observation.prompt // PARTS, observation.first
        past = observation.queries[:, :, max(0, SINKS - first) : max(0, known - first)]
        if past.shape[2]:
            places = torch.arange(past.shape[2]) + max(SINKS, first)
            cos, sin = (part[:, : part.shape[1] // 2] for part in find_rotation(observation, places))
            block = moments(past, turn=(cos, sin))
            memory["moments"] = merge(memory["moments"], block) if "moments" in memory else block
        start = max(0, known - first)
        later = observation.queries[:, :, start:]
        if later.shape[2]:
            assert observation.lse is not None  # the study wants it
            lse = observation.lse[:, :, start:]
            got = accumulated_attention(later, rows.keys, rows.mass, lse, observation.scaling)[..., :known]
            memory["attention"] = memory.get("attention", 0) + got.flatten(1, 2)[0]
        if not observation.last:
            return
        distribution = memory["moments"]
        ahead = torch.arange(min(POSITIONS, observation.prompt - known)) + known
        cos, sin = (part.mean(0) for part in find_rotation(observation, ahead))
        eye = torch.eye(distribution.mean.shape[-1], dtype=distribution.mean.dtype, device=distribution.mean.device)
        turn = rotate(eye, cos.to(eye.dtype), sin.to(eye.dtype)).mT  # `rotate` takes the axes one by one
        covariance = turn @ distribution.covariance @ turn.mT
        expected = expected_logits(
            distribution.mean @ turn.mT, covariance, rows.keys[:, :, :known], observation.scaling
        )[0]
        observed = (memory["attention"] / (observation.prompt - known)).to(expected.dtype)
        observed = observed.clamp_(min=torch.finfo(observed.dtype).tiny).log()
        memory.clear()
        memory |= {
            "pearson": correlate(expected, observed).cpu(),
            "spearman": correlate(rank(expected), rank(observed)).cpu(),
            "count": known,
        }
        if observation.layer in self.list_shown(observation.cut_layers):
            points = torch.stack([expected[0].log_softmax(0), observed[0]], 1) / log(10)
            memory["points"] = points[draw_positions(POINTS, known, self.seed).to(points.device)].cpu()

    def finish(self, memories: Mapping[int, Memory], first: bool) -> Iterable[Line]:
        for layer, memory in memories.items():
            for quantity in ("pearson", "spearman"):
                for head, value in enumerate(memory[quantity].tolist()):
                    yield self.line(quantity, value, layer=layer, head=head, n=memory["count"])
            for x, y in memory["points"].tolist() if first and "points" in memory else ():
                yield self.line("heads", y, layer=layer, head=0, x=x, n=memory["count"])
        yield self.claim("correlated", [memory["spearman"] > 0 for memory in memories.values()])

"""forward_flops: operations of a forward pass and of Expected Attention's scores (Expected Attention, Appendix F).

The paper's terms for s tokens, with H query heads of dimension d and feed-forward layers of width f:

    embeddings 2·s·V·D, projections 2·3·s·D·H·d, logits 2·s²·H·d, softmax 3·H·s², values 2·s²·H·d, output 2·s·H·d·D,
    feed-forward 4·s·D·f, final logits 2·s·D·V; all but the first and the last in each layer

    term        each term, and their sum "total", at s = x tokens
    corrected   the same as the model computes them: H_kv heads of keys and values, three matrices of a gated
                feed-forward layer, causal attention, and no product for embeddings, which are looked up
    overhead    share that the scores add to either total, with and without queries that are projected again for the
                statistics. The paper prints no formula for it. Ours is per layer: covariance 2·s·H·d², quadratic form
                2·s·H·d² + 2·s·H·d, mean term 2·s·H·d, and projected queries 2·s·D·H·d
    small, small_with_queries
                (claims) share of the lengths at which that is at most 0.5 % of the paper's total

V is the vocabulary and D the width of the hidden states. Layers with a sliding window count as full ones, as in the
paper.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.interfaces.layout import Layout
from kvbench.store.study_lines import Line
from kvbench.studies.study import ClosedForm, ModelConfig

LENGTHS = tuple(1024 * 2**power for power in range(8))
CLAIMED = 0.005
TOTAL = "total"


@dataclass(frozen=True)
class ForwardFlops(ClosedForm):
    """What a forward pass costs, and what the scores add."""

    name: ClassVar[str] = "forward_flops"

    def compute(self, layout: Layout, config: ModelConfig) -> Iterable[Line]:
        text = config.get_text_config(decoder=True)
        small: dict[str, list[bool]] = {"small": [], "small_with_queries": []}
        for tokens in LENGTHS:
            printed = count_printed(layout, text.vocab_size, text.intermediate_size, tokens)
            corrected = count_corrected(layout, text.vocab_size, text.intermediate_size, tokens)
            for quantity, terms in (("term", printed), ("corrected", corrected)):
                for series, value in terms.items():
                    yield self.line(quantity, value, series=series, x=tokens)
            scores, projected = count_scores(layout, tokens)
            for claim, series, flops in (
                ("small", "scores", scores),
                ("small_with_queries", "scores and queries", scores + projected),
            ):
                small[claim].append(flops / printed[TOTAL] <= CLAIMED)
                yield self.line("overhead", flops / printed[TOTAL], series=f"{series}, printed", x=tokens)
                yield self.line("overhead", flops / corrected[TOTAL], series=f"{series}, corrected", x=tokens)
        for claim, instances in small.items():
            yield self.claim(claim, [torch.tensor(instances)])


def add_up(layout: Layout, once: Mapping[str, int], each: Mapping[str, int]) -> dict[str, int]:
    """Return the terms of a whole model and their sum: those of `each` are per layer."""
    terms = {**once, **{name: layout.layers * flops for name, flops in each.items()}}
    return terms | {TOTAL: sum(terms.values())}


def count_printed(layout: Layout, vocabulary: int, inner: int, tokens: int) -> dict[str, int]:
    """Return the paper's terms.

    Args:
        layout: The model's shape.
        vocabulary: Size of the vocabulary, V.
        inner: Width of the feed-forward layers, f.
        tokens: s
    """
    width, hidden = layout.query_heads * layout.dim, layout.hidden
    each = {
        "projections": 2 * 3 * tokens * hidden * width,
        "logits of attention": 2 * tokens**2 * width,
        "softmax": 3 * layout.query_heads * tokens**2,
        "values": 2 * tokens**2 * width,
        "output": 2 * tokens * width * hidden,
        "feed-forward": 2 * tokens * (2 * hidden * inner),
    }
    once = {"embeddings": 2 * tokens * vocabulary * hidden, "logits": 2 * tokens * hidden * vocabulary}
    return add_up(layout, once, each)


def count_corrected(layout: Layout, vocabulary: int, inner: int, tokens: int) -> dict[str, int]:
    """Return the terms of a model with grouped heads, a gated feed-forward layer and causal attention.

    The arguments are those of `count_printed`.
    """
    width, hidden, pairs = layout.query_heads * layout.dim, layout.hidden, tokens * (tokens + 1) // 2
    each = {
        "projections": 2 * tokens * hidden * (width + 2 * layout.heads * layout.dim),
        "logits of attention": 2 * pairs * width,
        "softmax": 3 * layout.query_heads * pairs,
        "values": 2 * pairs * width,
        "output": 2 * tokens * width * hidden,
        "feed-forward": 2 * tokens * (3 * hidden * inner),
    }
    return add_up(layout, {"embeddings": 0, "logits": 2 * tokens * hidden * vocabulary}, each)


def count_scores(layout: Layout, tokens: int) -> tuple[int, int]:
    """Return the operations of the scores, and those of queries that are projected for them, in all layers."""
    width = layout.query_heads * layout.dim
    scores = 2 * tokens * width * layout.dim + 2 * tokens * width * (layout.dim + 1) + 2 * tokens * width
    return layout.layers * scores, layout.layers * 2 * tokens * layout.hidden * width

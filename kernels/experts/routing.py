"""How a router chooses the experts of a token."""

from dataclasses import dataclass

MOST_TOKENS = 64  # that share reads of the experts' weights; each further 64 read them anew
SCORES = ("softmax", "sigmoid", "sparsemixer")


@dataclass(frozen=True)
class Routing:
    """How the router's logits become the experts of a token and their shares."""

    count: int
    """The number k of experts of a token."""
    scores: str = "softmax"
    """What becomes of the logits: "softmax" over all experts, "sigmoid", or "sparsemixer" (README.md)."""
    normalized: bool = True
    """Whether the shares of a token's experts are divided by their sum. With "softmax" this equals a softmax over the
    logits of the chosen experts alone."""
    factor: float = 1.0
    """The factor of the shares."""
    groups: int = 1
    """The number of groups of experts that follow one another."""
    kept_groups: int = 1
    """The number of groups that a token's experts are chosen from: those whose two best experts have the largest
    sum."""
    wide: bool = False
    """Whether logits stay in float32. Otherwise they are rounded to the dtype of the hidden states."""
    jitter: float = 0.0
    """With "sparsemixer": half of the relative distance from the best logit from which an expert counts nothing."""

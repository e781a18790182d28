"""What the softmax of some models has beside the rows' logits: sinks (gpt-oss) and a cap of the logits (Gemma 2).

Derivation: kernels/attention/README.md.
"""

from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor


@dataclass(frozen=True)
class SoftmaxExtras:
    """Sinks and a cap. Functions take None in its place for the plain softmax."""

    sinks: Tensor | None = None
    """A further logit for each query head, (Hq,). It adds exp(sink) to the denominator and has no value."""
    cap: float | None = None
    """Logits l = q·k·scaling become cap·tanh(l / cap), before log mass and masks."""


def get_sinks(extras: SoftmaxExtras | None) -> Tensor | None:
    """Return the sinks, or None if there are none."""
    return None if extras is None else extras.sinks


def get_cap(extras: SoftmaxExtras | None) -> float | None:
    """Return the cap, or None if there is none."""
    return None if extras is None else extras.cap


def cap_logits(logits: Tensor, extras: SoftmaxExtras | None) -> Tensor:
    """Return the logits as the softmax takes them."""
    cap = get_cap(extras)
    return logits if cap is None else cap * (logits / cap).tanh()


@overload
def add_sinks(outputs: Tensor, lse: Tensor, extras: SoftmaxExtras | None) -> tuple[Tensor, Tensor]: ...
@overload
def add_sinks(outputs: Tensor, lse: Tensor | None, extras: None) -> tuple[Tensor, Tensor | None]: ...
def add_sinks(outputs: Tensor, lse: Tensor | None, extras: SoftmaxExtras | None) -> tuple[Tensor, Tensor | None]:
    """Add the sinks' terms to a softmax that was computed without them.

    Args:
        outputs: Attention outputs, (B, Hq, T, d).
        lse: Log-sum-exps of their logits, (B, Hq, T) in at least float32. Needed if there are sinks.
        extras: The sinks.

    Returns:
        The outputs, which are those given times σ(lse - sink), and the log-sum-exps with the sinks.
    """
    sinks = get_sinks(extras)
    if sinks is None:
        return outputs, lse
    assert lse is not None  # callers ask for it
    sinks = sinks.to(lse.dtype)[:, None]
    return (outputs * torch.sigmoid(lse - sinks)[..., None]).to(outputs.dtype), torch.logaddexp(lse, sinks)


def weigh_logits(logits: Tensor, extras: SoftmaxExtras | None) -> Tensor:
    """Return the probabilities of rows. With sinks they sum up to less than 1.

    Args:
        logits: Capped logits with log mass, -inf for rows that a query does not see, (B, H, G, T, n).
        extras: The sinks.
    """
    weights, sinks = logits.softmax(-1), get_sinks(extras)
    if sinks is None:
        return weights
    by_head = sinks.to(logits.dtype).view(*logits.shape[1:3], 1, 1)
    return weights * torch.sigmoid(logits.logsumexp(-1, keepdim=True) - by_head)

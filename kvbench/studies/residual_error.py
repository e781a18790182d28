"""residual_error: what a cut cache changes in the residual stream of later text (Expected Attention, Figure 6).

The first part of the prompt is read as one block, and each method removes a share of its rows once. The model reads the
rest, a fifth of the prompt and at most `FOLLOWING` tokens, over the cut cache and over the full cache. With h the
residual stream behind a layer, the last layer's output included, and ĥ the same over the cut cache:

    error           ‖h - ĥ‖₂, the mean over the rest's tokens and over layers, by the share `x` that is removed
    error_by_layer  the same of each layer, where `y` is the share that is removed
    least           share of the removed shares at which Expected Attention has the smallest error of all methods
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.engine.generation import GenerationContext
from kvbench.models.transformers_port import list_decoder_layers
from kvbench.store.study_lines import Line
from kvbench.studies.policy_study import FULL, Policy, PolicyStudy, Reading
from kvbench.studies.study import Memory, widen

OWN = "expected_attention"
REMOVED = (0.1, 0.25, 0.5, 0.75, 0.9)  # as in the paper's tables
FOLLOWING = 1024  # tokens


@dataclass(frozen=True)
class ResidualError(PolicyStudy):
    """What a cut cache changes in the residual stream."""

    name: ClassVar[str] = "residual_error"
    policies: ClassVar[tuple[Policy, ...]] = (
        Policy(OWN, None, "ada", "kvpress"),
        Policy("tova", "kvpress"),
        Policy("snapkv", "kvpress"),
        Policy("keydiff", "kvpress"),
    )

    def list_readings(self, tokens: int, first: bool) -> Sequence[Reading]:
        part = tokens - min(FOLLOWING, tokens // 5)
        cut = [Reading(policy, round(1 - removed, 6), part) for policy in self.policies for removed in REMOVED]
        return [Reading(FULL, 1.0, part), *cut]

    def inspect(self, memory: Memory, reading: Reading, context: GenerationContext, rest: Tensor) -> None:
        states = read_states(context, rest)
        if reading.policy == FULL:
            memory["full"], memory["errors"] = states, {}
            return
        pairs = zip(memory["full"], states, strict=True)
        errors = torch.stack([(widen(full) - widen(cut)).norm(dim=-1).double().mean().cpu() for full, cut in pairs])
        memory["errors"][reading.policy.method, round(1 - reading.budget, 6)] = errors

    def finish(self, memory: Memory, first: bool) -> Iterable[Line]:
        tokens, errors = len(memory["full"][0]), memory["errors"]
        for (method, removed), layer_errors in errors.items():
            yield self.line("error", layer_errors.mean(), series=method, x=removed, n=tokens * len(layer_errors))
            for layer, value in enumerate(layer_errors):
                yield self.line("error_by_layer", value, series=method, layer=layer, y=removed, n=tokens)
        means = {place: layer_errors.mean() for place, layer_errors in errors.items()}
        best = [min(mean for (_, at), mean in means.items() if at == removed) for removed in REMOVED]
        smallest = [means[OWN, removed] == lowest for removed, lowest in zip(REMOVED, best, strict=True)]
        yield self.claim("least", smallest)


def read_states(context: GenerationContext, ids: Tensor) -> list[Tensor]:
    """Return the residual stream behind each layer, (t, hidden) each, while the context reads tokens and forgets them.

    Args:
        context: A context that has read a prompt.
        ids: Token ids, (1, t).
    """
    layers = list_decoder_layers(context.model)
    states: list[Tensor] = []

    def take(module: torch.nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        states.append((output[0] if isinstance(output, tuple) else output)[0])

    handles = [layer.register_forward_hook(take) for layer in layers]
    try:
        with context.branch():
            context.extend(ids)
    finally:
        for handle in handles:
            handle.remove()
    return states

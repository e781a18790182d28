"""Measure what studies cost beside the prefill that they look at: seconds and peak memory, each alone and together."""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvbench.engine.timing import forget_peak, now, peak
from kvbench.models.transformers_port import text_config
from kvbench.runs.runner import describe_machine
from kvbench.studies.passes import StudyPrompt, read_prompt
from kvbench.studies.study import LayerStudy

NONE, ALL = "none", "all"
COLUMNS = ("study", "tokens", "block_size", "seconds", "ratio", "peak_bytes", "peak_ratio", "device", "torch")


@dataclass(frozen=True)
class Cost:
    """The cost of reading a prompt with some studies.

    Attributes:
        study: The study, ``none`` for the prefill alone, or ``all``.
        seconds: Time of reading the prompt and of computing the lines.
        peak: Most bytes allocated on the GPU meanwhile, weights included; 0 on a CPU.
    """

    study: str
    seconds: float
    peak: int


def measure_costs(
    model: torch.nn.Module, studies: Sequence[LayerStudy], tokens: int, block_size: int | None, seed: int
) -> Iterator[Cost]:
    """Yield the cost of a prefill alone, with each study, and with all studies.

    Each is read twice, because the first time pays for compiling and tuning kernels; the second time counts.

    Args:
        model: The model.
        studies: The studies.
        tokens: Number of random tokens of the prompt.
        block_size: Tokens read at once; None reads the prompt as one block.
        seed: Seed of the tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    most = text_config(model).vocab_size
    prompt = StudyPrompt("random", tuple(torch.randint(most, (tokens,), generator=generator).tolist()))
    device = next(model.parameters()).device.type
    alone = {study.name: [study] for study in studies}
    groups: dict[str, list[LayerStudy]] = {NONE: []} | alone | {ALL: list(studies)}
    for name, group in groups.items():
        for _ in range(2):
            gc.collect()
            forget_peak(device)
            begin = now(device)
            memories = read_prompt(model, prompt, group, block_size, seed)
            for study in group:
                list(study.finish(memories[study.name], True))
            cost = Cost(name, now(device) - begin, peak(device) or 0)
            del memories
        yield cost


def format_costs(costs: Sequence[Cost], tokens: int, block_size: int | None, device: str) -> list[list[object]]:
    """Return rows of a CSV with the columns `COLUMNS`; ratios are to the prefill alone."""
    machine = describe_machine(device)
    alone = costs[0]
    return [
        [
            cost.study,
            tokens,
            block_size or "",
            f"{cost.seconds:.4g}",
            f"{cost.seconds / alone.seconds:.3g}",
            cost.peak,
            f"{cost.peak / alone.peak:.3f}" if alone.peak else "",
            machine.get("gpu", "cpu"),
            torch.__version__,
        ]
        for cost in costs
    ]

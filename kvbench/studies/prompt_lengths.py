"""prompt_lengths: how long a task's prompts are, in tokens of the model (KeyDiff, Figure 18, Tables 8 and 9).

A prompt is the benchmark's own text, whole and without a chat template. By subtask:

    length      shares of prompts in bins of 1,024 tokens; longer ones count in the last bin
    prompts     number of prompts between x and the next of 0, 2,048, 4,096, 6,144 and 8,192 tokens
    kept        mean of min(1, N/L) over prompts of L tokens, for budgets of x = N rows; the series "mean of all" is the
                mean over the subtasks
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.interfaces.task import Sample
from kvbench.models.encoding import FastTokenizer, encode_text
from kvbench.store.study_lines import Line
from kvbench.studies.study import PromptStudy, count_bins, list_shares

BUDGETS = (2048, 4096, 6144, 8192)
WIDTH, BINS = 1024, 40
MEAN = "mean of all"


@dataclass(frozen=True)
class PromptLengths(PromptStudy):
    """How long prompts are, and which share of them a budget keeps."""

    name: ClassVar[str] = "prompt_lengths"

    def compute(self, samples: Sequence[Sample], tokenizer: FastTokenizer) -> Iterable[Line]:
        lengths: dict[str, list[int]] = {}
        for sample in samples:
            text = sample.context + sample.question + sample.answer_prefix
            lengths.setdefault(sample.subtask, []).append(len(encode_text(tokenizer, text)[0]))
        kept: dict[int, list[float]] = {budget: [] for budget in BUDGETS}
        for subtask, listed in lengths.items():
            tokens = torch.tensor(listed, dtype=torch.float64)
            yield from list_shares(
                self, "length", count_bins(tokens, 0, BINS * WIDTH, BINS), 0, BINS * WIDTH, series=subtask
            )
            # a prompt of exactly 2,048, 4,096 or 6,144 tokens fits into that budget; one of 8,192 is long, as printed
            place = torch.bucketize(tokens, torch.tensor([*BUDGETS[:-1], BUDGETS[-1] - 1], dtype=torch.float64))
            for start, count in zip((0, *BUDGETS), place.bincount(minlength=len(BUDGETS) + 1).tolist(), strict=True):
                yield self.line("prompts", count, series=subtask, x=start, n=len(tokens))
            for budget in BUDGETS:
                kept[budget].append(float((budget / tokens).clamp(max=1).mean()))
                yield self.line("kept", kept[budget][-1], series=subtask, x=budget, n=len(tokens))
        for budget, shares in kept.items():
            yield self.line("kept", sum(shares) / len(shares), series=MEAN, x=budget, n=len(samples))

"""Lengths of prompts, with a tokenizer whose tokens are words."""

import pytest

from kvbench.interfaces.task import Sample
from kvbench.studies.prompt_lengths import PromptLengths
from tests.support.studies import values


class Words:
    """Puts one token in front of the words of a text."""

    def __call__(self, text, add_special_tokens, **_):
        ids = self.encode(text, add_special_tokens)
        return {"input_ids": ids, "offset_mapping": [(0, 0)] * len(ids)}

    def encode(self, text, add_special_tokens):
        return [0] * add_special_tokens + [1] * len(text.split())


def make_sample(subtask: str, tokens: int) -> Sample:
    """A sample of so many tokens: the first one, three words in question and prefix, and the context."""
    words = "w " * (tokens - 4)
    return Sample(f"{subtask}/{tokens}", subtask, words, "a question ", "prefix", ("",), 1)


def test_bins_and_kept_shares():
    lengths = {"short": [2048, 2049, 6144, 50_000], "long": [8191, 8192]}
    samples = [make_sample(subtask, tokens) for subtask, own in lengths.items() for tokens in own]
    lines = list(PromptLengths().compute(samples, Words()))
    assert values(lines, "prompts", "short") == {(0.0,): 1, (2048.0,): 1, (4096.0,): 1, (6144.0,): 0, (8192.0,): 1}
    assert values(lines, "prompts", "long") == {(0.0,): 0, (2048.0,): 0, (4096.0,): 0, (6144.0,): 1, (8192.0,): 1}
    means = {}
    for subtask, own in lengths.items():
        for budget in (2048, 4096, 6144, 8192):
            means[subtask, budget] = sum(min(1, budget / tokens) for tokens in own) / len(own)
            assert values(lines, "kept", subtask)[(budget,)] == pytest.approx(means[subtask, budget])
    mean = (means["short", 4096] + means["long", 4096]) / 2
    assert values(lines, "kept", "mean of all")[(4096,)] == pytest.approx(mean)
    assert values(lines, "length", "short")[(2560.0,)] == 0.5  # 2048 and 2049 are in the bin from 2048 to 3072
    assert values(lines, "length", "short")[(39.5 * 1024,)] == 0.25

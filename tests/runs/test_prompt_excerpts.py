"""The text of prompts around their targets, cut where bins begin."""

import pytest

from kvbench.interfaces.task import Sample
from kvbench.runs.prompt import Prompt
from kvbench.runs.prompt_excerpts import AROUND, answer_request, build_excerpt, cut_windows
from kvbench.runs.replay import CannotReplay
from kvbench.runs.survival import find_evidence


def make(context: str, *answers: str) -> tuple[Sample, Prompt]:
    """A sample whose tokens are four characters each."""
    ends = [min(end, len(context)) for end in range(4, len(context) + 4, 4)]
    sample = Sample("a/0", "a", context, "?", "", answers, 8)
    return sample, Prompt(tuple(range(len(ends))), (1, 2), ends=ends)


def test_windows_lie_around_targets_and_bins_are_those_of_the_record():
    context = "".join(f"w{number:04} " for number in range(500))
    sample, prompt = make(context, "w0040", "w0300")
    tokens = len(prompt.context) + 2
    windows = cut_windows(sample, prompt, tokens)
    assert ["".join(text for text, _, _ in window) for window in windows] == [
        context[240 - AROUND : 245 + AROUND],
        context[1800 - AROUND : 1805 + AROUND],
    ]
    found = [(text, place) for window in windows for text, place, target in window if target]
    assert [text for text, _ in found] == ["w0040", "w0300"]
    assert {place for _, place in found} <= set(find_evidence(sample, prompt, tokens))
    for window, begin in zip(windows, (240 - AROUND, 1800 - AROUND), strict=True):
        for text, place, target in window:
            for offset in () if target else range(len(text)):
                assert place == (begin + offset) // 4 * 64 // tokens
            begin += len(text)


def test_a_sample_without_a_target_shows_its_beginning():
    sample, prompt = make("word " * 200, "elsewhere")
    (window,) = cut_windows(sample, prompt, 252)
    assert "".join(text for text, _, _ in window) == ("word " * 200)[:AROUND]


def test_another_prompt_is_refused():
    sample, prompt = make("some text 7", "7")
    record = {"uid": "a/0", "rows_seen": 5, "prompt_hash": prompt.hash()}
    assert build_excerpt({"a/0": (sample, prompt)}, record)[0] == 5
    for wrong, known in ((record | {"prompt_hash": "0"}, {"a/0": (sample, prompt)}), (record, {})):
        with pytest.raises(CannotReplay, match="another one today"):
            build_excerpt(known, wrong)


def test_a_run_that_cannot_be_made_again_has_a_reason(tmp_path):
    assert "run.yaml cannot be read" in answer_request({"run": str(tmp_path / "none"), "uids": ["a"]})["reason"]

"""The file of full caches' scores: what it says, which scores new ones replace, and files that cannot be read."""

from dataclasses import replace

import pytest

from kvbench.analysis.full_scores import AVERAGE, FullScore, ScoreSource, read_scores, replace_scores, write_scores
from kvbench.analysis.intervals import Values, mean
from kvbench.validation import SettingError

SOURCE = ScoreSource("mine", "0a1b", "ruler", 50_000, "bfloat16", "NVIDIA H200")
EASY = Values([100, 100, 50, 100, 25], list("abcde"))
HARD = Values([0, 0, 100 / 3, 0, 0], list("abcde"))


def make_scores(source: ScoreSource = SOURCE, lengths: tuple[int, ...] = (2048,)) -> list[FullScore]:
    return source.list_scores({length: {"easy": EASY, "hard": HARD} for length in lengths})


def test_each_subtask_and_the_average_have_an_interval():
    scores = {score.subtask: score for score in make_scores()}
    assert list(scores) == ["easy", "hard", AVERAGE]
    for name, values in (("easy", [EASY]), ("hard", [HARD]), (AVERAGE, [EASY, HARD])):
        expected = mean(values)
        assert scores[name].samples == expected.samples
        numbers = scores[name].score, scores[name].low, scores[name].high
        assert numbers == pytest.approx((expected.value, expected.low, expected.high), abs=1e-4)
    assert scores[AVERAGE].score == pytest.approx((75 + 20 / 3) / 2, abs=1e-4)


def test_one_sample_has_no_interval(tmp_path):
    scores = SOURCE.list_scores({512: {"easy": Values([100], ["a"])}})
    write_scores(tmp_path / "new" / "scores.csv", scores)
    assert [(score.low, score.high) for score in scores] == [(None, None)] * 2
    assert read_scores(tmp_path / "new" / "scores.csv") == scores


def test_new_scores_take_the_place_of_what_they_measure_again():
    """Those of other models, tasks and lengths stay, and those of other weights or seeds go."""
    base, other = replace(SOURCE, model="base"), replace(SOURCE, task="another")
    known = [*make_scores(base), *make_scores(lengths=(2048, 4096)), *make_scores(other)]
    new = make_scores(lengths=(2048, 8192))
    kept = replace_scores(known, new)
    assert {score.length for score in kept if score.model == "mine" and score.task == "ruler"} == {2048, 4096, 8192}
    assert len(kept) == len(set(kept)) == 3 * (1 + 1 + 3)
    assert [(score.model, score.task, score.length) for score in kept] == sorted(
        (score.model, score.task, score.length) for score in kept
    )
    for changed in (replace(SOURCE, weights="ffff"), replace(SOURCE, seed=1)):
        kept = replace_scores(known, make_scores(changed, (8192,)))
        assert kept == [*make_scores(base), *make_scores(changed, (8192,))]


@pytest.mark.parametrize("text", ["", "model,score\nmine,1\n", None])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, text):
    path = tmp_path / "scores.csv"
    write_scores(path, make_scores())
    if text is None:
        path.write_text(path.read_text().replace("easy,5,75.0", "easy,5,many"))
    elif text:
        path.write_text(text)
    else:
        path.unlink()
    with pytest.raises(SettingError, match="scores.csv: cannot read scores of full caches there"):
        read_scores(path)

"""LongBench's metrics against the values that its own code gives, and against the package `rouge` that it calls."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rouge import Rouge

from kvbench.tasks.longbench import chinese
from kvbench.tasks.longbench.metrics import (
    STEPS,
    classification_score,
    code_line,
    code_sim,
    count_score,
    first_line,
    qa_f1,
    retrieval_score,
    rouge,
)

FOODS = ["Food", "Food and drink", "Sport"]


@pytest.mark.parametrize(
    "metric, output, reference, expected",
    [
        (rouge, "The cat sat. The dog ran away.", "The dog ran. A cat sat down.", 0.7692307642603551),
        (rouge, "a a a b", "a b", 0.999999995),
        (rouge, "...", "a b", 0.0),
        (rouge, "", "a b", 0.0),
        (rouge, "a b", "", 0.0),
        (qa_f1, "It was in Paris, France", "Paris", 1 / 3),
        (qa_f1, "The U.S.A.", "an usa", 1.0),
        (qa_f1, "the", "the", 0.0),
        (qa_f1, "b b c", "b b b", 2 / 3),
        (count_score, "There are 7 of 10", "7", 0.5),
        (count_score, "seven", "7", 0.0),
        (count_score, "07", "7", 0.0),
        (retrieval_score, "Paragraph 12 or 3 or 12", "Paragraph 12", 2 / 3),
        (retrieval_score, "12", "Paragraph 1", 0.0),
        (retrieval_score, "段落12、3、12", "段落12", 2 / 3),
        (retrieval_score, "第十二段", "段落12", 0.0),
        (chinese.qa_f1, "他 来到了“网易”大厦。", "来到 网易 大厦", 6 / 8),  # 他|来到|了|网易|大厦
        (chinese.qa_f1, "ABC公司！", "abc，公司", 1.0),
        (chinese.qa_f1, "。", "北京", 0.0),
        (chinese.rouge, "他来到了网易大厦", "来到大厦", 0.8 / (1.4 + 1e-8)),  # 2 of 5 words, 2 of 2
        (chinese.rouge, "大厦。来到", "来到大厦", 1 / (2.5 + 3e-8)),  # one sentence: "。" is no "."
        (chinese.rouge, "", "北京", 0.0),
        (code_sim, "\n# c\nreturn x+1\n", "return x + 1", 0.91),
        (code_sim, " \nreturn x + 1", "return x + 1", 0.15),
        (code_sim, "```\nreturn x + 1\n```", "return x + 1", 1.0),
        (code_sim, "# c\n// d", "return", 0.0),
        (code_sim, "", "return", 0.0),
    ],
)
def test_golden_values(metric, output, reference, expected):
    assert metric(output, reference) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    "output, reference, classes, expected",
    [
        ("Type: Food and drink", "Food", FOODS, 0.5),
        ("Type: Food and drink", "Food and drink", FOODS, 1.0),
        ("Type: Food, Sport", "Sport", FOODS, 0.5),
        ("Type: Sports", "Sport", FOODS, 1.0),
        ("Type: food", "Food", FOODS, 0.0),
        ("x y z", "x y z", ["x", "x y", "x y z"], 0.5),  # "x y" stays: it follows one that was dropped
        ("x y z", "x y z", ["x", "q", "x y z", "x y"], 1.0),
    ],
)
def test_golden_classes(output, reference, classes, expected):
    assert classification_score(output, reference, classes) == expected


def test_which_line_is_graded():
    assert first_line("\n\n  a\nb") == "  a" and first_line("") == "" == first_line("\n")
    assert first_line(" \na") == " "  # a blank line counts, as upstream's does
    assert code_line("\n`a`\nb # c\nd // e\nf\ng") == "f" and code_line("#") == ""


def packages(output: str, reference: str) -> float:
    """LongBench's rouge_score."""
    try:
        return Rouge().get_scores([output], [reference], avg=True)["rouge-l"]["f"]
    except (ValueError, RecursionError):
        return 0.0


def test_rouge_is_the_packages():
    rng = random.Random(0)
    pieces = [*"abcdefghijkl", "dd", "e f", ".", ". ", " ", "\n", "a. b", ""]

    def text() -> str:
        return " ".join(rng.choices(pieces, k=rng.randint(0, 40)))

    pairs = [(text(), text()) for _ in range(500)]
    found = [rouge(*pair) for pair in pairs]
    assert found == [packages(*pair) for pair in pairs]
    assert len(set(found)) > 100


@given(st.text("ab. ", max_size=40), st.text("ab. ", max_size=40))
def test_rouge_is_the_packages_for_any_text(output, reference):
    assert rouge(output, reference) == packages(output, reference)


def test_a_walk_beyond_the_recursion_limit_scores_nothing():
    """Counted in a script of the frames of upstream's eval.py, the package fails from 991 equal words on."""
    words = [f"w{i}" for i in range(STEPS + 1)]
    assert rouge(" ".join(words[:STEPS]), " ".join(words[:STEPS])) == pytest.approx(1)
    assert rouge(" ".join(words), " ".join(words)) == 0.0


@pytest.mark.full
def test_the_package_scores_a_long_walk_as_nothing():
    words = [f"w{i}" for i in range(1000)]
    assert packages(" ".join(words), " ".join(words)) == 0.0


def test_sentences_count_together():
    """The limit holds for one sentence, not for all of a text."""
    words = [f"w{i}" for i in range(STEPS + 10)]
    apart = ". ".join(words), ". ".join(words[:20])
    assert rouge(*apart) == packages(*apart) > 0


def test_a_walk_of_chinese_words_is_one_step_shorter(monkeypatch):
    """Counted like STEPS, the package fails from 990 equal words on, because `rouge_zh_score` calls `rouge_score`."""
    monkeypatch.setattr(chinese, "load_cutter", lambda: str.split)
    words = [f"w{i}" for i in range(STEPS)]
    assert chinese.rouge(" ".join(words[1:]), " ".join(words[1:])) == pytest.approx(1)
    assert chinese.rouge(" ".join(words), " ".join(words)) == 0.0


@pytest.mark.full
def test_words_are_those_that_jieba_cuts(monkeypatch, tmp_path):
    """`jieba.cut` reads its dictionary in its own way."""
    import jieba

    jieba.setLogLevel("ERROR")
    jieba.dt.tmp_dir = str(tmp_path)
    pieces = [
        "北京",
        "来到了",
        "大厦",
        "研究生命",
        "长春市",
        "药店",
        "iPhone-12",
        "3.5%",
        "，",
        "。",
        " ",
        "\n",
        "C++",
        "囧",
    ]
    rng = random.Random(0)
    texts = ["".join(rng.choices(pieces, k=12)) for _ in range(100)]
    assert [list(chinese.load_cutter()(text)) for text in texts] == [list(jieba.cut(text)) for text in texts]

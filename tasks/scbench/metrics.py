"""The metrics of SCBench (microsoft/MInference 9987de6, scbench/compute_scores.py), in points of 100.

They are the published metrics with their oddities. `contains_any_character` and `chinese_f1` compare with the single
characters of a reference, because upstream gives them a text where they expect a list. The further metrics in `also`
are what they were meant to be. No metric cuts Chinese into words: upstream imports jieba, but its scores do not use it.
"""

import re
import string
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

from kvbench.interfaces.task import Graded
from kvbench.tasks.common.lm_eval_strings import find_literal, parse_source, read_strings

LM_EVAL_STRINGS = "5f86ce48981e780179eec762828f3289b5631c519ac701aab6ee70d36ac373ab"  # hash for lm-eval 0.4.13
LETTERS = "ABCD"
NUMBER = re.compile(r"\d+\.\d+|\d+")
OPENERS = ("answer is:", "answer:", "answer is", "option is")


def contains_label(output: str, answers: tuple[str, ...]) -> Graded:
    """Score kv and prefix_suffix: whether the output contains the label."""
    return _grade(answers[0] in output, output)


def share_found(output: str, answers: tuple[str, ...]) -> Graded:
    """Score vt: the share of the references that the output contains in any case, rounded to two decimals."""
    hits = sum(reference.lower() in output.lower() for reference in answers)
    return _grade(round(hits / len(answers), 2), output)


def contains_any(output: str, answers: tuple[str, ...]) -> Graded:
    """Score qa_eng: whether the output contains one of the references in any case."""
    output = output.strip()
    return _grade(any(reference.upper() in output.upper() for reference in answers), output)


def contains_any_character(output: str, answers: tuple[str, ...]) -> Graded:
    """Score many_shot as qa_eng, with the characters of the label as references; `contained` is for the whole label."""
    [label] = answers
    grade, whole = contains_any(output, tuple(label)), contains_any(output, answers)
    return Graded(grade.score, grade.answer, {"contained": whole.score})


def chinese_f1(output: str, answers: tuple[str, ...]) -> Graded:
    """Score qa_chn: the best F1 of the output's characters and one of the reference's; `f1` is for all of them."""
    [reference] = answers
    best = max(f1(_chinese(output), _chinese(character)) for character in reference)
    return Graded(100.0 * best, output, {"f1": 100.0 * f1(_chinese(output), _chinese(reference))})


def f1(one: str, other: str) -> float:
    """Return the F1 of the characters of two texts."""
    same = sum((Counter(one) & Counter(other)).values())
    return 2 * same / (len(one) + len(other)) if same else 0.0


def choice_score(output: str, answers: tuple[str, ...]) -> Graded:
    """Score choice_eng; `answers` are the option's text and its letter.

    The first character counts if it is A, B, C or D; else the whole output if it is an answer; else what follows an
    opening such as "answer is"; else the first word that is A, B, C or D.
    """
    answer = output.strip()
    if not answer:
        return _grade(False, answer)
    if answer[0] in LETTERS:
        return _grade(answer[0] in answers, answer[0])
    if answer in answers:
        return _grade(True, answer)
    plain = re.sub(" +", " ", re.sub("[\\n\"'.,?!{}]", " ", answer))
    for opener in OPENERS:
        place = plain.find(opener)
        if place >= 0:
            after = plain[place + len(opener) + 1 :]
            return _grade(any(after.startswith(reference) for reference in answers), after)
    word = next((word for word in plain.split() if word in LETTERS), "")
    return _grade(word in answers, word)


def first_number(output: str, answers: tuple[str, ...]) -> Graded:
    """Score mf: whether the output's first number is the label. Its decimals do not count if the label is whole."""
    [label] = answers
    number = NUMBER.search(output)
    if number is None:
        return _grade(False, "")
    value = float(number[0])
    right = int(value) == int(label) if label.lstrip("-").isdigit() else value == float(label)
    return _grade(right, number[0])


def first_digits(output: str, answers: tuple[str, ...]) -> Graded:
    """Score needles: whether the output's first digits are the label."""
    match = re.search("[0-9]+", output)
    digits = match[0] if match else ""
    return _grade(digits == answers[0], digits)


def rouge(output: str, answers: tuple[str, ...]) -> Graded:
    """Score summary: F of ROUGE-Lsum with line breaks between sentences, unstemmed, as `evaluate` calls rouge-score."""
    return _grade(_scorer()(answers[0], output), output)


@cache
def chinese_punctuation() -> str:
    """Load the punctuation of the Chinese normaliser, which lm-eval's LongBench metrics have too.

    Raises:
        SettingError: The installed lm-eval has other punctuation than the tested one.
    """
    return read_strings("task=scbench", "longbench", _read_files, LM_EVAL_STRINGS)["punctuation"]


def _read_files(folder: Path) -> dict[str, str]:
    return {"punctuation": find_literal(parse_source(folder / "metrics.py"), "cn_punctuation")}


def _chinese(text: str) -> str:
    """Return the text in lower case without punctuation and white space."""
    marks = string.punctuation + chinese_punctuation()
    return "".join(character for character in text.lower() if character not in marks and not character.isspace())


@cache
def _scorer() -> Callable[[str, str], float]:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeLsum"], use_stemmer=False)
    return lambda target, output: scorer.score(target, output)["rougeLsum"].fmeasure


def _grade(share: float, answer: str) -> Graded:
    return Graded(100.0 * share, answer)

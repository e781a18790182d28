"""LongBench's metrics (THUDM/LongBench 2e00731, LongBench/metrics.py): one output and one reference give [0, 1].

`rouge` is the `rouge-l` f of the package rouge 1.0.1, which LongBench calls, and no other ROUGE-L. Texts are split at
every ".", and each word counts once. Let U be the union of the words on one longest common subsequence of each pair of
a sentence of the output and a sentence of the reference, and W(text) the different words of a text. Then

    p = |U| / |W(output)|,    r = |U| / |W(reference)|,    f = 2 p r / (p + r + 1e-8)

The package walks back along a subsequence by recursion, and LongBench scores 0 if it raises anything. So a walk beyond
Python's recursion limit (STEPS, counted from eval.py) scores 0 here too. Only a pair of sentences that together have
about a thousand words without any "." is that long.

`code_sim` is `fuzz.ratio` of fuzzywuzzy 0.18.0 without python-Levenshtein: difflib's ratio in whole per cent.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

STEPS = 990  # the longest walk: 991 calls fit into 1000 frames below those of eval.py (Python 3.11)
PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")


def qa_f1(output: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return the F1 of the bags of words, without case, ASCII punctuation and articles."""
    return bag_f1(_words(output), _words(reference))


def bag_f1(words: Sequence[str], wanted: Sequence[str]) -> float:
    """Return the F1 of two bags of words."""
    same = (Counter(words) & Counter(wanted)).total()
    if not same:
        return 0.0
    precision, recall = same / len(words), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


def rouge(output: str, reference: str, classes: Sequence[str] = (), steps: int = STEPS) -> float:
    """Return the summary-level ROUGE-L f of rouge 1.0.1; 0 without sentences or if a walk is longer than `steps`."""
    sentences, wanted = _sentences(output), _sentences(reference)
    if not sentences or not wanted:
        return 0.0
    union: set[str] = set()
    for one in wanted:
        for other in sentences:
            common = _common(one, other, steps)
            if common is None:
                return 0.0
            union |= common
    precision = len(union) / len(set().union(*sentences))
    recall = len(union) / len(set().union(*wanted))
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def classification_score(output: str, reference: str, classes: Sequence[str]) -> float:
    """Return 1 / n if the reference is among the n classes that the output contains, else 0.

    Classes that are part of the reference's name do not count. But upstream drops them from the list that it walks
    along, so that it skips the class after a dropped one; this function does the same.
    """
    named_classes = [name for name in classes if name in output]
    place = 0
    while place < len(named_classes):
        name = named_classes[place]
        if name in reference and name != reference:
            named_classes.remove(name)
        place += 1
    return 1.0 / len(named_classes) if reference in named_classes else 0.0


def count_score(output: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return the share of the output's numbers that equal the reference."""
    numbers = re.findall(r"\d+", output)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def retrieval_score(output: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return `count_score` for the number of the paragraph that the reference ("Paragraph 7", "段落7") names."""
    return count_score(output, find_paragraph(reference) or "")


def find_paragraph(reference: str) -> str | None:
    """Find the number in "Paragraph 7" or "段落7"; None if there is none."""
    match = re.search(r"(?:Paragraph |段落)(\d+)", reference)
    return match[1] if match else None


def code_sim(output: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return how similar the output's line of code is to the reference, in hundredths."""
    return int(round(100 * SequenceMatcher(None, code_line(output), reference).ratio())) / 100


def first_line(output: str) -> str:
    """Return the first line that is not empty."""
    return output.lstrip("\n").split("\n")[0]


def code_line(output: str) -> str:
    """Return the first line after leading line breaks that has no `, # or //; an empty text if there is none."""
    lines = output.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")


def lm_eval_code_line(output: str) -> str:
    """Return the first line without a mark that is not blank, as lm-eval's code_sim_score does."""
    return code_line("\n".join(filter(str.strip, output.split("\n"))))


def _words(text: str) -> list[str]:
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def _sentences(text: str) -> list[list[str]]:
    """Split into words of each piece between full stops; a piece of blanks has one empty word."""
    return [" ".join(piece.split()).split(" ") for piece in text.split(".") if piece]


def _common(x: Sequence[str], y: Sequence[str], steps: int) -> set[str] | None:
    """Return the words of a longest common subsequence; None if the walk to its beginning is longer than `steps`."""
    table = [[0] * (len(y) + 1)]
    for word in x:
        above, row = table[-1], [0]
        for j, other in enumerate(y):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
        table.append(row)
    i, j = len(x), len(y)
    words: set[str] = set()
    for _ in range(steps + 1):
        if i == 0 or j == 0:
            return words
        if x[i - 1] == y[j - 1]:
            words.add(x[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return None

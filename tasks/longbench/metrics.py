"""LongBench's metrics, each of one output and one reference, in [0, 1] (THUDM/LongBench 2e00731, LongBench/metrics.py).

`rouge` is the `rouge-l` f of the package rouge 1.0.1, which LongBench calls, and no other ROUGE-L: texts are split at
every ".", words are counted once each, and with U the union of the words on one longest common subsequence of each
pair of an output's and a reference's sentence, W the different words of a text,

    p = |U| / |W(output)|,    r = |U| / |W(reference)|,    f = 2 p r / (p + r + 1e-8)

The package walks back along a subsequence by recursion, and LongBench scores 0 whatever it raises. So a walk beyond
Python's recursion limit (STEPS, counted from eval.py) is a 0 here too. It takes a pair of sentences of together about a
thousand words without any ".".

`code_sim` is `fuzz.ratio` of fuzzywuzzy 0.18.0 where python-Levenshtein is not installed: difflib's, in whole per cent.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

STEPS = 990  # of a walk: 991 calls fit into 1000 frames below eval.py's own (Python 3.11)
PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")


def qa_f1(output: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F1 of the bags of words, without case, ASCII punctuation and articles."""
    found, wanted = _words(output), _words(reference)
    same = (Counter(found) & Counter(wanted)).total()
    if not same:
        return 0.0
    precision, recall = same / len(found), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


def rouge(output: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Summary-level ROUGE-L f of rouge 1.0.1; 0 where one has no sentence or a walk is longer than STEPS."""
    found, wanted = _sentences(output), _sentences(reference)
    if not found or not wanted:
        return 0.0
    union: set[str] = set()
    for one in wanted:
        for other in found:
            common = _common(one, other)
            if common is None:
                return 0.0
            union |= common
    precision = len(union) / len(set().union(*found))
    recall = len(union) / len(set().union(*wanted))
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def classification_score(output: str, reference: str, classes: Sequence[str]) -> float:
    """1 / n if the reference is among the n classes that stand in the output. Those contained in the reference do not
    count; but upstream drops them from the list that it walks along, so that the one after a dropped one stays.
    """
    found = [name for name in classes if name in output]
    place = 0
    while place < len(found):
        name = found[place]
        if name in reference and name != reference:
            found.remove(name)
        place += 1
    return 1.0 / len(found) if reference in found else 0.0


def count_score(output: str, reference: str, classes: Sequence[str] = ()) -> float:
    """The share of the numbers in the output that are the reference."""
    numbers = re.findall(r"\d+", output)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def retrieval_score(output: str, reference: str, classes: Sequence[str] = ()) -> float:
    """`count_score` of the number of the paragraph that the reference, "Paragraph 7", names."""
    return count_score(output, find_paragraph(reference) or "")


def find_paragraph(reference: str) -> str | None:
    """The number in "Paragraph 7", None where there is none."""
    found = re.search(r"Paragraph (\d+)", reference)
    return found and found[1]


def code_sim(output: str, reference: str, classes: Sequence[str] = ()) -> float:
    """How similar the output's line of code is to the reference, in hundredths."""
    return int(round(100 * SequenceMatcher(None, code_line(output), reference).ratio())) / 100


def first_line(output: str) -> str:
    """The first line that is not empty."""
    return output.lstrip("\n").split("\n")[0]


def code_line(output: str) -> str:
    """The first line, of those after leading line breaks, without `, # and //; else nothing."""
    lines = output.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")


def lm_eval_code_line(output: str) -> str:
    """lm-eval's reading of code (lm_eval/tasks/longbench/metrics.py, code_sim_score): as `code_line`, and not blank."""
    return code_line("\n".join(filter(str.strip, output.split("\n"))))


def _words(text: str) -> list[str]:
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def _sentences(text: str) -> list[list[str]]:
    """Words of each piece between full stops; one of blanks alone has the empty word."""
    return [" ".join(piece.split()).split(" ") for piece in text.split(".") if piece]


def _common(x: Sequence[str], y: Sequence[str]) -> set[str] | None:
    """The words of a longest common subsequence; None if the way back to its beginning is longer than STEPS."""
    table = [[0] * (len(y) + 1)]
    for word in x:
        above, row = table[-1], [0]
        for j, other in enumerate(y):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
        table.append(row)
    i, j, words = len(x), len(y), set()
    for _ in range(STEPS + 1):
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

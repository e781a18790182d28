"""Words, names, numbers and prose for the tuning of `model=smollm2_long`, none of which an evaluation has.

A tuning shares wordings with an evaluation: the prompts of the benchmarks, RULER's noise sentence, the ledger's lines,
labels such as `Document 3`, months. The templates of its own sentences and documents (below, and tuning_facts.yaml)
have common words such as "mill" or "born", which an evaluation's word lists or templates may have too; none of them is
a key, a value, an entry of a list or an answer. Its plain text is documentation of packages, in which any word can
stand. What is drawn is in one of both sides only:

* Words come from tuning_words.txt, which has no word of wonderwords, from whose lists all tasks draw. A word is another
  word if its lower-case string differs; `tables` is none of the words that have `table`. It has none of the words of
  the tasks' templates either. The words have four to twelve letters and stand three times or more in docstrings of
  numpy, torch, transformers, sklearn, scipy, networkx, nltk, pandas and sympy. Three in four are one token of SmolLM2.
* Names are made of other syllables. A name that the syllables of the tasks could make is drawn again, and so is a word.
* Numbers of four digits or more: needles have six, eight or nine digits and an evaluation's have seven, values of
  variables have six or eight (five), counts have six (four), the years of dates are not 1580 to 1949.
* Numbers below 1000 are too few to share out: places in lists, days, the terms of ledgers, and comparisons, which have
  three digits (two). A ledger as a whole follows from its seed.
* UUIDs have another version than 4, and lines of SCBench have 20 or 28 hex digits (24).
* Variables have four, six or seven letters, in the example four (five, and three). Coded words have seven or
  eight letters (six).
* Sentences and documents are made of these words and names, by templates of their own.
* Seeds are texts that begin with `kvbench tuning/`. Those of an evaluation begin with a whole number (`0/niah_…`), or
  with the name of another generator (`kvbench prose`, `kvbench miniature/…`). `random.Random` hashes the whole text.
"""

import random
import re
import string
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from itertools import accumulate, chain
from pathlib import Path

from kvbench.tasks.common import synthetic_prose, synthetic_qa

WORDS = Path(__file__).with_name("tuning_words.txt")
EVALUATED = re.compile(
    f"(?:{'|'.join(synthetic_prose.STARTS)})(?:{'|'.join(synthetic_qa.MIDDLES)})?(?:{'|'.join(synthetic_prose.ENDS)})"
)  # the names of an evaluation
ONSETS = (
    *("b", "bl", "br", "c", "ch", "cl", "cr", "d", "dr", "f", "fl", "fr", "g", "gl", "gr", "h", "j", "k", "kr", "l"),
    *("m", "n", "p", "pl", "pr", "qu", "r", "s", "sh", "sk", "sl", "sp", "st", "str", "t", "th", "tr", "v", "w", "z"),
)
# Cities of task=niah that have such syllables
CITIES = (
    "Bogota",
    "Cairo",
    "Dakar",
    "Dublin",
    "Geneva",
    "Jakarta",
    "Lagos",
    "Madrid",
    "Manila",
    "Nairobi",
    "Quito",
    "Toronto",
)
VOWELS = *"aeiou" * 4, "ai", "ea", "ie", "oa", "ou", "y"
CODAS = "", "", "ck", "d", "k", "l", "ld", "m", "n", "nd", "nt", "p", "r", "rd", "rk", "s", "st", "t", "th", "x"
DIGITS = 6, 8, 9  # of a needle's number
SEED = "kvbench tuning"
VERSIONS = "1235678"
FIRST, LAST = 1580, 1949  # years of an evaluation's dates
MONTHS = synthetic_qa.MONTHS

OPENINGS = (
    "Toward the end of the week",
    "In the papers of {p}",
    "North of {l}",
    "Not far from the {n}",
    "For most of that year",
    "Once the {n} had been counted",
    "As far as {p} could tell",
    "During the long wait for {q}",
    "Under the {n} of {l}",
    "Only after {p} had left",
    "In a {a} corner of {l}",
    "With so many {n} around",
    "Despite the {n}",
    "Every other day",
    "According to the oldest {n}",
    "While {q} was away",
    "Since nobody had asked",
    "By the middle of the month",
)
MAINS = (
    "{p} had never seen the {n} so {a}",
    "the {n} was handed to {q}",
    "a pair of {n} lay beside the {m}",
    "people from {l} preferred the {a} {n}",
    "it was {q} who first noticed the {n}",
    "the {n} could not be {v} at all",
    "some {n} were {a} and others were {b}",
    "they kept talking about the {n} of {l}",
    "{p} sold the {a} {m} to {q}",
    "the whole street had been {v} by {p}",
    "nothing about the {n} was {a}",
    "the {m} had been {v} twice already",
    "{q} found a {a} {n} under the stairs",
    "a letter with the word {n} in it arrived at {l}",
    "the {n} turned {a}",
    "{p} and {q} had {v} the {n} together",
    "the {a} {n} stayed where it was",
    "there were more {n} than {m} in {l}",
    "the guests of {q} looked at the {n} in silence",
    "none of the {m} had a {b} side",
    "somebody painted the {n} {a}",
    "the price of {n} doubled in {l}",
    "{p} asked whether the {n} was {b}",
    "the road past the {n} was closed again",
    "every {m} had to be {v} by hand",
    "{q} dreamed of {n} and {m}",
    "what the {n} meant was not {a} to {p}",
    "two of the {n} belonged to {q}",
    "the {b} {n} was put away for {p}",
    "the map of {l} showed a {a} {m}",
)
LINKS = ", and ", ", but ", ", so ", ", for ", " because ", " after ", " before ", " whenever ", " as soon as ", "; "
CLOSINGS = (
    ", or at least {p} said so",
    ", much like the {m}",
    " without a single {n}",
    ", just as {q} had hoped",
    ", which made it {a}",
    " on the way to {l}",
    ", and then the {n} too",
    " in front of everybody",
)


@cache
def load_words() -> tuple[str, ...]:
    """Load the words, in alphabetical order."""
    return tuple(WORDS.read_text(encoding="utf-8").split())


@cache
def load_evaluated_words() -> frozenset[str]:
    """Load the words from which the tasks draw, in lower case."""
    folder = files("wonderwords.assets")
    texts = (folder.joinpath(f"{name}list.txt").read_text(encoding="utf-8") for name in ("noun", "adjective", "verb"))
    return frozenset(chain.from_iterable(text.lower().split() for text in texts))


Syllables = tuple[Sequence[str], Sequence[str]]
"""First syllables of names, and others."""


def draw_syllables(rng: random.Random) -> Syllables:
    """Draw a few syllables of two or three letters, which make more than 2,000 names that are like each other."""

    def draw(codas: Sequence[str], count: int) -> list[str]:
        drawn: dict[str, None] = {}
        while len(drawn) < count:
            if len(part := rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(codas)) <= 3:
                drawn[part] = None
        return list(drawn)

    return draw(("",), rng.randint(10, 30)), draw(CODAS, rng.randint(16, 40))


def draw_name(rng: random.Random, syllables: Syllables | None = None) -> str:
    """Draw a name of five to ten letters that no evaluation can have.

    Args:
        rng: The generator.
        syllables: What `draw_syllables` returns; None for a name of any syllables.
    """
    while True:
        if syllables is None:
            parts = range(rng.choice((2, 2, 2, 3)))
            name = "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + (rng.choice(CODAS) if i else "") for i in parts)
        else:
            first, others = syllables
            name = rng.choice(first) + "".join(rng.choices(others, k=rng.choice((1, 2, 2))))
        name = name.capitalize()
        evaluated = EVALUATED.fullmatch(name) or name in CITIES or name.lower() in load_evaluated_words()
        if 5 <= len(name) <= 10 and not evaluated:
            return name


def draw_person(rng: random.Random, syllables: Syllables | None = None) -> str:
    """Draw a first and a last name (`draw_name`)."""
    return f"{draw_name(rng, syllables)} {draw_name(rng, syllables)}"


def draw_number(rng: random.Random, digits: int) -> str:
    """Draw a number that does not begin with a zero."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def draw_uuid(rng: random.Random) -> str:
    """Draw a UUID whose version is not 4."""
    digits = f"{rng.getrandbits(128):032x}"
    digits = digits[:12] + rng.choice(VERSIONS) + digits[13:]
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def draw_letters(rng: random.Random, count: int, letters: str = string.ascii_uppercase) -> str:
    """Draw a word of random letters."""
    return "".join(rng.choices(letters, k=count))


def draw_date(rng: random.Random) -> str:
    """Draw a date outside the years of an evaluation."""
    year = rng.choice((rng.randint(1102, FIRST - 1), rng.randint(LAST + 1, 2098)))
    return f"{rng.randint(1, 28)} {rng.choice(MONTHS)} {year}"


def draw_count(rng: random.Random) -> str:
    """Draw a count of six digits."""
    return f"{rng.randrange(100_000, 1_000_000):,}"


def write_prose(rng: random.Random, words: int) -> list[str]:
    """Write sentences that have at least so many words together.

    They come in passages of a few sentences that share people, a place and some words.
    """
    written: list[str] = []
    count = 0
    while count < words:
        theme = rng.sample(load_words(), 26)
        place, people = draw_name(rng), [draw_name(rng), draw_person(rng), draw_name(rng)]
        for _ in range(rng.randint(4, 9)):
            sentence = _write_sentence(rng, theme, place, people)
            written.append(sentence)
            count += sentence.count(" ") + 1
    return written


def _write_sentence(rng: random.Random, theme: Sequence[str], place: str, people: Sequence[str]) -> str:
    def fill(text: str) -> str:
        n, m, a, b, v = rng.sample(theme, 5)
        p, q = rng.sample(people, 2)
        return text.format(n=n, m=m, a=a, b=b, v=v, p=p, q=q, l=place)

    text = fill(rng.choice(MAINS))
    if rng.random() < 0.4:
        text = f"{fill(rng.choice(OPENINGS))}, {text}"
    drawn = rng.random()
    if drawn < 0.4:
        text += rng.choice(LINKS) + fill(rng.choice(MAINS))
    elif drawn < 0.65:
        text += fill(rng.choice(CLOSINGS))
    return text[0].upper() + text[1:] + "."


class Haystack:
    """An essay, as RULER's needles are hidden in one.

    Attributes:
        nouns: Words to draw the second part of a key from.
        adjectives: Words to draw the first part of a key from.
    """

    def __init__(self, rng: random.Random, words: int) -> None:
        self.nouns = self.adjectives = load_words()
        self._sentences = [sentence.split() for sentence in write_prose(rng, max(words, 1))]

    def essay(self, units: int) -> tuple[tuple[str, ...], list[int]]:
        """Return the first `units` words, and the number of words up to the end of each sentence."""
        return tuple(chain.from_iterable(self._sentences))[:units], list(accumulate(map(len, self._sentences)))

"""Generate English prose: essays for haystacks where no official text is available.

An essay has a theme: two people, a place, and some nouns, adjectives and verbs of wonderwords' lists. A paragraph uses a
part of the theme. A sentence is made of an opener, one or two clauses and a tail. The generator has a fixed seed, so the
text is always the same.
"""

import random
from functools import cache
from importlib.resources import files

STARTS = (
    "Bar",
    "Bel",
    "Bor",
    "Cal",
    "Cor",
    "Dal",
    "Dor",
    "Fen",
    "Gar",
    "Gil",
    "Hal",
    "Hes",
    "Jor",
    "Kal",
    "Kes",
    "Lar",
    "Lor",
    "Mar",
    "Mel",
    "Mor",
    "Nal",
    "Nor",
    "Pel",
    "Per",
    "Ral",
    "Ros",
    "Sal",
    "Sel",
    "Tal",
    "Tor",
    "Val",
    "Ver",
    "Wen",
    "Yal",
    "Zel",
    "Zor",
)
ENDS = (
    "den",
    "dor",
    "fen",
    "gan",
    "ham",
    "kin",
    "lan",
    "len",
    "lin",
    "lor",
    "mar",
    "min",
    "mon",
    "nar",
    "ned",
    "nor",
    "ran",
    "ric",
    "rin",
    "rod",
    "sen",
    "son",
    "tan",
    "ter",
    "ton",
    "ven",
    "vik",
    "wen",
    "wyn",
    "zan",
)

OPENERS = (
    "In those years",
    "Before the winter",
    "On the road to {l}",
    "After the first {n}",
    "By the time {p} came home",
    "Some years later",
    "At the edge of {l}",
    "More often than not",
    "To my surprise",
    "When the {n} was done",
    "Without any {n}",
    "In the house of {p}",
    "For a long while",
    "According to {q}",
    "Late in the {a} season",
    "If we are honest",
    "Between the {n} and the {m}",
    "As children",
    "On {A} morning",
    "Against all advice",
    "Whenever the {n} failed",
    "Long after {q} had gone",
    "From the hills above {l}",
    "With {A} {n} in hand",
)
CLAUSES = (
    "the {n} seemed {a}",
    "{p} learned to {v} the {n}",
    "nobody in {l} would {v} {A} {n}",
    "the {a} {n} taught {p} how to {v}",
    "most people think of the {n} as {A} {m}",
    "{q} kept {A} {n} by the door",
    "there is nothing {a} about {N}",
    "we began to {v} and to {w} without much thought",
    "every {n} in {l} has its own {m}",
    "it is hard to {v} {N} that you never liked",
    "the story of the {n} is also the story of the {m}",
    "{p} and {q} could not agree about the {n}",
    "a person who can {v} will sooner or later {w}",
    "what {p} wanted was {A} {n}",
    "the {m} would {v} in the {a} light",
    "I have tried to {v} the {n} myself",
    "the old {n} stood beside {A} {m}",
    "they used to {v} the {m} twice a year",
    "{q} wrote that {N} must be {a}",
    "you can {v} the {n} or you can {w} it",
    "the question of the {m} came up again",
    "{p} gave the {n} to {A} stranger",
    "one {a} {n} is worth more than {N} of another kind",
    "the trouble with {N} is that it will {v}",
    "{l} was known for its {n} and its {a} {m}",
    "the letter from {q} spoke only of the {n}",
    "good work starts with {A} {n}",
    "I remember the {n} better than the {m}",
    "{p} refused to {v} in front of the {n}",
    "half of what we call {n} is really {m}",
    "the {n} grew {a} and the {m} grew {b}",
    "a good {n} should never {v}",
    "the {b} part was how to {v} the {n}",
    "{q} laughed at the {a} {n}",
    "the way to {v} is to {w} first",
    "our {n} had become {a} overnight",
    "no one asked why the {m} was so {a}",
    "it took {p} a month to {v} the {a} {n}",
    "the {n} of {l} belongs to whoever can {v} it",
    "there was {A} kind of {n} in every {m}",
)
JOINS = ("and", "but", "so", "because", "although", "while", "until", "even when", "just as", "since", "yet", "though")
TAILS = (
    "as {p} used to say",
    "at least in {l}",
    "for the sake of the {n}",
    "with {A} {m} and no {n}",
    "or so {q} believed",
    "like {A} {n}",
    "which is to say {a}",
    "whatever the {m} may cost",
    "not unlike the {n}",
    "as if to {v} the {m}",
    "and that was the end of the {n}",
    "long before anyone could {v}",
    "in spite of the {a} {m}",
)


def draw_short_name(rng: random.Random) -> str:
    """Draw a name of six letters. The names of synthetic_qa have eight, so it is never one of them."""
    return rng.choice(STARTS) + rng.choice(ENDS)


@cache
def load_word_lists() -> tuple[list[str], list[str], list[str]]:
    """Load nouns, adjectives and verbs of wonderwords: words in lower case, without rude ones."""
    folder = files("wonderwords.assets")
    rude = set(folder.joinpath("profanitylist.txt").read_text(encoding="utf-8").split())

    def clean(name: str) -> list[str]:
        lines = folder.joinpath(f"{name}list.txt").read_text(encoding="utf-8").splitlines()
        return [w for w in map(str.rstrip, lines) if w.isascii() and w.isalpha() and w.islower() and w not in rude]

    return clean("noun"), clean("adjective"), clean("verb")


def write_essay(rng: random.Random, sentences: int) -> list[str]:
    """Write sentences of 5 to 25 words about one theme."""
    nouns, adjectives, verbs = (rng.sample(words, n) for words, n in zip(load_word_lists(), (24, 16, 16), strict=True))
    place, people = draw_short_name(rng), [f"{draw_short_name(rng)} {draw_short_name(rng)}", draw_short_name(rng)]
    written: list[str] = []
    while len(written) < sentences:
        theme = rng.sample(nouns, 9), rng.sample(adjectives, 7), rng.sample(verbs, 6)
        for _ in range(rng.randint(4, 8)):
            written.append(_sentence(rng, *theme, place, rng.sample(people, 2)))
    return written[:sentences]


@cache
def write_words(total: int = 130_000) -> tuple[str, ...]:
    """Write the haystack: at least `total` words, one essay after the other."""
    rng = random.Random("kvbench prose")
    text: list[str] = []
    while len(text) < total:
        text += " ".join(write_essay(rng, rng.randint(50, 90))).split()
    return tuple(text)


def _sentence(rng, nouns, adjectives, verbs, place, people) -> str:
    while True:
        n, a, (v, w) = rng.sample(nouns, 6), rng.sample(adjectives, 6), rng.sample(verbs, 2)
        first = {
            "n": n[0],
            "m": n[1],
            "N": _a(n[2]),
            "a": a[0],
            "b": a[1],
            "A": _a(a[2]),
            "v": v,
            "w": w,
            "l": place,
            "p": people[0],
            "q": people[1],
        }
        second = {
            "n": n[3],
            "m": n[4],
            "N": _a(n[5]),
            "a": a[3],
            "b": a[4],
            "A": _a(a[5]),
            "v": w,
            "w": v,
            "l": place,
            "p": people[1],
            "q": people[0],
        }
        text = rng.choice(CLAUSES).format(**first)
        if rng.random() < 0.55:
            text = f"{rng.choice(OPENERS).format(**second)}, {text}"
        if rng.random() < 0.6:
            text += f", {rng.choice(JOINS)} {rng.choice(CLAUSES).format(**second)}"
        elif rng.random() < 0.5:
            text += f", {rng.choice(TAILS).format(**second)}"
        if 5 <= len(text.split()) <= 25:
            return text[0].upper() + text[1:] + "."


def _a(word: str) -> str:
    return ("an " if word[0] in "aeiou" else "a ") + word

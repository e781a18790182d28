"""What the reference model is trained on: RULER's 13 subtasks, drawn and rendered by the project's own generators.

Three things differ from an evaluation. Every random choice comes from a generator seeded `kvbench reference/…`, which
no evaluation uses. The essays, documents and questions are invented anew, so that none of an evaluation's is ever seen.
And a context is followed by one to eight questions with their answers, each closed by `<eos>`, and the parameters of
a subtask (keys, values, repetitions) vary around the official ones. Nothing here knows that a cache can be cut.
"""

import random
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from kvbench.reference.texts import Texts
from kvbench.reference.tokenizer import BOS, EOS, PAD
from kvbench.tasks.ruler import FAMILIES, SUBTASKS
from kvbench.tasks.ruler_niah import Niah
from kvbench.tasks.ruler_wordings import wordings

RECIPE = {  # relative share of the samples, and about how many tokens a unit of the haystack has
    "niah_single_1": (2, 26), "niah_single_2": (3, 1.7), "niah_single_3": (4, 1.7), "niah_multikey_1": (4, 1.7),
    "niah_multikey_2": (8, 26), "niah_multikey_3": (11, 85), "niah_multivalue": (5, 1.7), "niah_multiquery": (5, 1.7),
    "ruler_vt": (8, 26), "ruler_cwe": (26, 5.5), "ruler_fwe": (12, 2.3), "ruler_qa_squad": (8, 130),
    "ruler_qa_hotpot": (9, 75),
}  # fmt: skip
ANSWER, SHOWN, CONTEXT = 1.0, 0.9, 0.1  # loss weights: of an answer (and its <eos>), an example's answer, the rest
STRONGER = 4.0  # weight of fwe's answers, short, one to a context
TOKENS = 131072  # a step
Piece = tuple[str, float]  # text and the loss weight of its tokens


class Maker:
    """Makes samples: token ids and loss weights."""

    def __init__(self, name: str, tokenizer: Tokenizer):
        self.rng = random.Random(f"kvbench reference/{name}")
        self.texts = Texts(name, self.rng)
        self.tokenizer = tokenizer
        self.families = {family.name: family for family in FAMILIES}
        self.rest: dict[tuple[str, int], float] = {}  # tokens that are no units, as seen so far
        self.served = 0

    def sample(self, length: int) -> tuple[int, list[int], list[float]]:
        """Number of the subtask, at most length + 1 ids, and as many weights."""
        while True:
            name = self.rng.choices(list(RECIPE), [share for share, _ in RECIPE.values()])[0]
            per_unit = RECIPE[name][1]
            target = (length + 1) * self.rng.uniform(0.85, 1.0)
            units = int((target - self.rest.get((name, length), 150)) / per_unit)
            state = self.rng.getstate()
            for _ in range(3):
                self.rng.setstate(state)  # the same sample with another number of units
                pieces = self.pieces(name, units, length)
                if pieces is None:
                    self.rest[name, length] = 0.9 * self.rest.get((name, length), 150)
                    break
                ids, weights = self.encode(pieces, length)
                rest = len(ids) - units * per_unit
                self.rest[name, length] = 0.9 * self.rest.get((name, length), rest) + 0.1 * rest
                if 0.85 * target <= len(ids) <= length + 1:
                    return SUBTASKS.index(name), ids, weights
                units += int((0.97 * target - len(ids)) / per_unit)

    def encode(self, pieces: list[Piece], length: int) -> tuple[list[int], list[float]]:
        """Ids and weights; the rest of a long context weighs less, so that it does not outweigh its answers."""
        rest = CONTEXT * min(1.0, 1024 / length)
        encoded = self.tokenizer.encode_batch_fast([text for text, _ in pieces], add_special_tokens=False)
        ids, weights = [BOS], [0.0]
        for piece, (_, weight) in zip(encoded, pieces, strict=True):
            weight = rest if weight == CONTEXT else weight
            end = [EOS] if weight >= ANSWER else []
            ids += piece.ids + end
            weights += [weight] * (len(piece.ids) + len(end))
        return ids, weights

    def pieces(self, name: str, units: int, length: int) -> list[Piece] | None:
        """A context and its questions, or None where `units` are too few."""
        kind = name.removeprefix("ruler_").split("_")[0]
        return getattr(self, f"_{kind}")(self.families[name], units, length)

    def _asked(self, rendered, answer: str, weight: float = ANSWER) -> list[Piece]:
        return [(rendered.question + rendered.answer_prefix, CONTEXT), (" " + answer, weight)]

    def _niah(self, family: Niah, units: int, length: int) -> list[Piece] | None:
        rng = self.rng
        if rng.random() < 0.5:  # other numbers of keys and values than the official ones
            keys = rng.randint(1, min(8, length // 64))
            values = rng.choice([1, 1, 2, 3, 4]) if family.value == "numbers" and length > 256 else 1
            family = replace(family, keys=keys, values=values, asked=rng.randint(1, min(keys, 4)))
        if units < family.keys * family.values:
            return None
        draws = family.draw(units, rng, self.texts, length)
        rendered = family.render(draws, self.texts)
        facts = dict(zip(draws["keys"], draws["values"], strict=True))
        facts = {key: sorted(values, key=rendered.context.find) for key, values in facts.items()}
        answer = ", ".join(value for i in draws["asked"] for value in facts[draws["keys"][i]])
        pieces = [(rendered.context, CONTEXT), *self._asked(rendered, answer)]
        facts |= {key: [value] for key, value in draws.get("others", ()) if key not in facts}
        blank = replace(family, haystack="noise")  # renders a question without a haystack
        most = min(7, length // 128) // (1 if family.value == "numbers" else 2)
        for _ in range(rng.randint(0, min(most, 2 * len(facts) - 2))):
            keys = rng.sample(list(facts), min(len(facts), rng.choice([1, 1, 1, 2, 4])))
            nothing = {"units": 0, "order": [], "places": [], "asked": range(len(keys))}
            again = blank.render(nothing | {"keys": keys, "values": [facts[k] for k in keys]}, self.texts)
            pieces += self._asked(again, ", ".join(value for key in keys for value in facts[key]))
        return pieces

    def _vt(self, family, units: int, length: int) -> list[Piece] | None:
        if units < 5:
            return None
        draws = family.draw(units, self.rng, self.texts, length, example=self.rng.randint(5, 15))
        rendered = family.render(draws, self.texts)
        shown = self._example(rendered.context, "they are: ", "Memorize", length > 512)
        return [*shown, *self._asked(rendered, " ".join(draws["names"]))]

    def _cwe(self, family, units: int, length: int) -> list[Piece] | None:
        """Units are entries of the list; official repetitions half of the time."""
        rng = self.rng
        common, rare = rng.choice([(6, 1), (30, 3)] if length > 2048 else [(6, 1)])
        example = family.draw(11, rng, self.texts, 4096 if common == 30 else 1)["example"]
        if rng.random() < 0.5 or units < 10 * common + rare:
            rare = rng.randint(1, 3 if units > 150 else 1)
            most = min(10 * rare, (units - rare) // 10)
            if most < 2 * rare:
                return None
            common = rng.randint(2 * rare, most)
        different = 10 + (units - 10 * common) // rare
        words = rng.sample(self.texts.pool, different)
        listed = words[:10] * common + words[10:] * rare
        rng.shuffle(listed)
        rendered = family.render({"example": example, "words": listed, "common": words[:10]}, self.texts)
        shown = self._example(rendered.context, "in the list are:", "Below is", length > 512)
        return [*shown, *self._asked(rendered, " ".join(f"{i}. {w}" for i, w in enumerate(rendered.answers, 1)))]

    def _example(self, context: str, prefix: str, start: str, keep: bool) -> list[Piece]:
        """Splits the solved example that opens a context, whose answer counts as one; or leaves it out."""
        second = context.rindex(start)
        if not keep:
            return [(context[second:], CONTEXT)]
        answer = context.index(prefix) + len(prefix)
        return [(context[:answer], CONTEXT), (context[answer:second], SHOWN), (context[second:], CONTEXT)]

    def _fwe(self, family, units: int, length: int) -> list[Piece] | None:
        draws = family.draw(units, self.rng, self.texts, max(300, int(length * self.rng.uniform(0.5, 1.5))))
        if not 0 < draws["words"].count(draws["top"][2]):
            return None
        rendered = family.render(draws, self.texts)
        pieces = self._asked(rendered, " ".join(draws["top"]), STRONGER)
        return [(rendered.context, CONTEXT), *pieces]

    def _qa(self, family, units: int, length: int) -> list[Piece] | None:
        """Articles (squad) or chains (hotpot) that are asked about, among single documents of others."""
        rng, texts = self.rng, self.texts
        self.served += 1
        if texts.renewals == 0 or self.served % 250 == 0:
            texts.renew()
        groups = rng.sample(*((texts.articles, 24) if family.source == "squad" else (texts.chains, 60)))
        whole = rng.randint(1, 6)
        documents = list(chain.from_iterable(group[0] for group in groups[:whole]))
        loose = [document for group in groups[whole:] for document in group[0]]
        if units < 1:
            return None
        documents += rng.sample(loose, min(len(loose), max(0, units - len(documents))))
        questions = [q for group in groups[:whole] for q in group[1]]
        if units < len(documents):
            if family.source == "hotpot":
                documents, questions = documents[: units // 2 * 2], questions[: units // 2 * 2]
            documents = rng.sample(documents, min(units, len(documents)))
        questions = [q for q in questions if any(q[1].split(", ")[-1] in d for d in documents)]
        if not questions:
            return None
        rng.shuffle(documents)
        numbered = [wordings().document.format(i=i, document=d) for i, d in enumerate(documents, 1)]
        pieces: list[Piece] = []
        for query, answer in rng.sample(questions, min(len(questions), rng.randint(1, 8))):
            rendered = wordings().qa.render("" if pieces else "\n\n".join(numbered), [answer], query=query)
            pieces += [] if pieces else [(rendered.context, CONTEXT)]
            pieces += self._asked(rendered, answer)
        return pieces


def batch(maker: Maker, length: int, copies: float, tokens: int = TOKENS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids and weights (rows, length + 1), and each row's subtask (-1: copying)."""
    rows = tokens // length
    ids = np.full((rows, length + 1), PAD, np.uint16)
    weights = np.zeros((rows, length + 1), np.float16)
    kinds = np.full(rows, -1, np.int8)
    for row in range(rows):
        if maker.rng.random() < copies:  # random pieces, and the same again
            half = np.random.default_rng(maker.rng.getrandbits(64)).integers(3, 4096, length // 2)
            ids[row, 0], ids[row, 1 : 2 * len(half) + 1] = BOS, np.tile(half, 2)
            weights[row, len(half) + 1 :] = ANSWER
        else:
            kinds[row], one, weight = maker.sample(length)
            ids[row, : len(one)], weights[row, : len(one)] = one, weight
    return ids, weights, kinds


def corpus(samples: int = 2600, length: int = 1500):
    """Text for the tokenizer: every subtask equally often."""
    maker = Maker("tokenizer", None)
    units = dict(
        niah_single_1=8,
        niah_multikey_2=20,
        niah_multikey_3=5,
        ruler_vt=8,
        ruler_cwe=250,
        ruler_fwe=120,
        ruler_qa_squad=8,
        ruler_qa_hotpot=10,
    )
    for i in range(samples):
        name = SUBTASKS[i % len(SUBTASKS)]
        for text, _ in maker.pieces(name, units.get(name, 600), length) or ():
            yield text


def load(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))

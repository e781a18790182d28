"""Generate the samples on which the embedded model is trained.

The samples are subtasks of RULER, conversations as in SCBench, ledgers, and the needles of task=niah. They come from
the generators of these tasks, with three differences from an evaluation:

* Every random choice uses a seed that begins with `kvbench reference/`. No evaluation uses such a seed.
* Essays, documents and questions are new, so the model never sees those of an evaluation.
* One to eight questions with answers follow a context, and `<eos>` ends each answer. The parameters of a subtask (keys,
  values, repetitions) vary around the official ones.

No sample is made for eviction: this module knows nothing about it.

`Recipe.confusable` is for ablations and 0 by default. It is the share of samples with several facts in which the values
of the facts differ in a few characters only. The model then fails if it copies what followed the last few characters.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import yaml
from tokenizers import Tokenizer

from kvbench.config.catalogue import CONF
from kvbench.tasks.ledger import task
from kvbench.tasks.ruler.niah import NiahFamily
from kvbench.tasks.ruler.task import FAMILIES, SUBTASKS
from kvbench.tasks.ruler.templates import load_wordings
from kvbench.tasks.scbench.miniature import MAKERS, add_options
from kvbench.tasks.scbench.prompts import load_forms
from kvbench.tasks.scbench.rows import parse_session
from kvbench.training.recipe import VOCABULARY, Recipe
from kvbench.training.tokenizer import BOS, EOS, PAD
from kvbench.training.training_texts import EndlessTexts
from kvbench.validation import SettingError, is_number, require_choice

# Kind of sample -> (relative share of the samples, about how many tokens a unit of its haystack has)
RULER = {
    "niah_single_1": (2, 26), "niah_single_2": (3, 1.7), "niah_single_3": (4, 1.7), "niah_multikey_1": (4, 1.7),
    "niah_multikey_2": (8, 26), "niah_multikey_3": (11, 85), "niah_multivalue": (5, 1.7), "niah_multiquery": (5, 1.7),
    "ruler_vt": (8, 26), "ruler_cwe": (26, 5.5), "ruler_fwe": (12, 2.3), "ruler_qa_squad": (8, 130),
    "ruler_qa_hotpot": (9, 75),
}  # fmt: skip
TURNS = {
    "scbench_kv": (1, 38), "scbench_prefix_suffix": (1, 23), "scbench_vt": (1, 78), "scbench_qa_eng": (1, 95),
    "scbench_choice_eng": (0.6, 95), "scbench_many_shot": (0.4, 26),
}  # fmt: skip
LEDGER = {"ledger": (1, 36)}
NEEDLE = {"magic_number": (1, 1.7)}  # task=niah, its first preset
LONGEST = 120  # lines of a ledger
TRIES = 10_000  # attempts to find a sample; some kinds do not fit, as a ledger does not fit in 128 tokens
BREAKS = 2, 2, 2, 3, 4  # numbers of line breaks to draw from, after a solved example; RULER's port in lm-eval has four
NAMES = (*SUBTASKS, *TURNS, *LEDGER, *NEEDLE)
ANSWER, SHOWN, CONTEXT = 1.0, 0.9, 0.1  # loss weights of an answer with its <eos>, of an example's answer, of the rest
STRONGER, LONG = 4.0, 0.3  # loss weights of the short answers of fwe and of the long answers of ledgers
# The look-ahead draws positions with these weights: the last WINDOW tokens of a question have weight 1, the tokens of
# the answer IN_ANSWER, and the other tokens of the question BEFORE.
WINDOW, IN_ANSWER, BEFORE = 16, 0.3, 0.15


@dataclass(frozen=True)
class Piece:
    """A part of a sample's text. The piece before an answer is its question."""

    text: str
    weight: float = CONTEXT
    """Loss weight of the tokens."""
    answer: bool = False
    """Whether the text is an answer."""
    ends: bool = True
    """Whether `<eos>` follows, if the text is an answer."""


@dataclass(frozen=True)
class TrainingSample:
    """A sample as token ids."""

    name: str
    """Kind of the sample."""
    ids: list[int]
    weights: list[float]
    """Loss weight of each token."""
    spans: list[tuple[int, int, int]]
    """(start of the question, start of the answer, end of the answer) for each answer, as indices into `ids`."""


@cache
def load_needle_wording() -> dict[str, str]:
    """Load the wording of task=niah with the preset `magic_number`."""
    return yaml.safe_load((CONF / "task/niah.yaml").read_text())["presets"]["magic_number"]


def split_runs(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Split the pieces of a sample into runs, each of which ends with `<eos>`."""
    run: list[Piece] = []
    for piece in pieces:
        run.append(piece)
        if piece.answer and piece.ends:
            yield run
            run = []
    if run:
        yield run


def compute_shares(recipe: Recipe) -> dict[str, tuple[float, float]]:
    """Return the share of every kind of sample, and its tokens per unit.

    Returns:
        Kind -> (relative share, about how many tokens a unit has).

    Raises:
        SettingError: The recipe's `mix` is invalid.
    """
    shares: dict[str, tuple[float, float]] = {}
    special = ((TURNS, recipe.turns), (LEDGER, recipe.ledgers), (NEEDLE, recipe.needles))
    for kinds, part in ((RULER, 1 - sum(part for _, part in special)), *special):
        whole = sum(share for share, _ in kinds.values())
        shares |= {
            name: (recipe.mix.get(name, part * share / whole), tokens) for name, (share, tokens) in kinds.items()
        }
    for name, share in recipe.mix.items():
        require_choice("mix", name, shares)
        if not (is_number(share) and share >= 0):
            raise SettingError(f"mix: {name} is {share}: a number of at least 0")
    if not any(share for share, _ in shares.values()):
        raise SettingError("mix: no kind of sample is left")
    return shares


class SampleMaker:
    """Makes the samples of one worker.

    Args:
        name: Part of the seed.
        tokenizer: The embedded model's tokenizer; None if `sample` is not called.
        recipe: Shares of the kinds of samples.
    """

    def __init__(self, name: str, tokenizer: Tokenizer | None, recipe: Recipe):
        self.rng = random.Random(f"kvbench reference/{name}")
        self.texts = EndlessTexts(name, self.rng)
        self.tokenizer, self.recipe, self.shares = tokenizer, recipe, compute_shares(recipe)
        self.families = {family.name: family for family in FAMILIES}
        self.rest: dict[tuple[str, int], float] = {}  # (kind, length) -> mean number of tokens outside of units
        self.served = 0

    def sample(self, length: int) -> TrainingSample:
        """Make a sample of at most length + 1 tokens, and of nearly as many.

        Raises:
            ValueError: No sample was found in `TRIES` attempts.
        """
        for _ in range(TRIES):
            name = self.rng.choices(list(self.shares), [share for share, _ in self.shares.values()])[0]
            per_unit = self.shares[name][1]
            target = (length + 1) * self.rng.uniform(0.4 if name in LEDGER else 0.85, 1.0)  # ledgers vary more
            units = int((target - self.rest.get((name, length), 150)) / per_unit)
            state = self.rng.getstate()
            for _ in range(3):
                self.rng.setstate(state)  # the same sample with another number of units
                pieces = self.pieces(name, units, length)
                if pieces is None:
                    self.rest[name, length] = 0.9 * self.rest.get((name, length), 150)
                    break
                made = self.encode(name, pieces, length)
                rest = len(made.ids) - units * per_unit
                self.rest[name, length] = 0.9 * self.rest.get((name, length), rest) + 0.1 * rest
                if 0.85 * target <= len(made.ids) <= length + 1:
                    return made
                units += int((0.97 * target - len(made.ids)) / per_unit)
        raise ValueError(f"no sample of {length} tokens in {TRIES} draws: none of the kinds has such")

    def encode(self, name: str, pieces: list[Piece], length: int) -> TrainingSample:
        """Encode the pieces of a sample.

        The tokens outside of answers have a smaller weight in a long sample, so that they do not outweigh the answers.
        """
        rest = CONTEXT * min(1.0, 1024 / length)
        ids, weights, spans, asked = [BOS], [0.0], [], 0
        for run in split_runs(pieces):  # encode the whole run, because tokens of a prompt can span two of its parts
            text, ends = "", []
            for piece in run:
                text += piece.text
                ends.append(len(text))
            assert self.tokenizer is not None  # only `tokenizer_texts` has none, and it encodes nothing
            encoded = self.tokenizer.encode(text, add_special_tokens=False)
            tokens, borders = encoded.ids, np.searchsorted([start for start, _ in encoded.offsets], ends)
            for piece, (first, last) in zip(run, pairwise([0, *borders]), strict=True):
                tokens_here = tokens[first:last] + [EOS] * (piece.answer and piece.ends)
                if piece.answer:
                    spans.append((asked, len(ids), len(ids) + len(tokens_here)))
                asked = len(ids)
                ids += tokens_here
                weights += [rest if piece.weight == CONTEXT else piece.weight] * len(tokens_here)
        return TrainingSample(name, ids, weights, spans)

    def pieces(self, name: str, units: int, length: int) -> list[Piece] | None:
        """Make a context and its questions.

        Args:
            name: Kind of the sample, one of `NAMES`.
            units: Number of units in the context. What a unit is depends on the kind.
            length: Tokens of the sample, about.

        Returns:
            The pieces, or None if there are too few units.
        """
        kind = name.removeprefix("ruler_").split("_")[0]
        return getattr(self, f"_{kind}")(self.families.get(name, name), units, length)

    def _asked(self, rendered, answer: str, weight: float = ANSWER) -> list[Piece]:
        return [Piece(rendered.question + rendered.answer_prefix), Piece(" " + answer, weight, answer=True)]

    def _niah(self, family: NiahFamily, units: int, length: int) -> list[Piece] | None:
        rng = self.rng
        if rng.random() < 0.5:  # vary the numbers of keys and values
            keys = rng.randint(1, min(8, length // 64))
            values = rng.choice([1, 1, 2, 3, 4]) if family.value == "numbers" and length > 256 else 1
            family = replace(family, keys=keys, values=values, asked=rng.randint(1, min(keys, 4)))
        if units < family.keys * family.values:
            return None
        draws = family.draw(units, rng, self.texts, length)
        if rng.random() < self.recipe.confusable:
            self._confuse(draws)
        rendered = family.render(draws, self.texts)
        facts = dict(zip(draws["keys"], draws["values"], strict=True))
        facts = {key: sorted(values, key=rendered.context.find) for key, values in facts.items()}
        answer = ", ".join(value for i in draws["asked"] for value in facts[draws["keys"][i]])
        pieces = [Piece(rendered.context), *self._asked(rendered, answer)]
        facts |= {key: [value] for key, value in draws.get("others", ()) if key not in facts}
        blank = replace(family, haystack="noise")  # renders a question without a haystack
        most = min(7, length // 128) // (1 if family.value == "numbers" else 2)
        for _ in range(rng.randint(0, min(most, 2 * len(facts) - 2))):
            asked = rng.sample(list(facts), min(len(facts), rng.choice([1, 1, 1, 2, 4])))
            nothing = {"units": 0, "order": [], "places": [], "asked": range(len(asked))}
            again = blank.render(nothing | {"keys": asked, "values": [facts[key] for key in asked]}, self.texts)
            pieces += self._asked(again, ", ".join(value for key in asked for value in facts[key]))
        return pieces

    def _confuse(self, draws: dict) -> None:
        """Replace the values of the facts by values that differ in a few characters from each other."""
        facts = [[values, i] for values in draws["values"] for i in range(len(values))]
        facts += [[other, 1] for other in draws.get("others", ())]
        sources = [values[i] for values, i in self.rng.sample(facts, 1 + len(facts) // 16)]
        taken = set()
        for values, i in facts:
            value = self._alike(self.rng.choice(sources))
            while value in taken:
                value = self._alike(value)
            taken.add(value)
            values[i] = value

    def _alike(self, value: str) -> str:
        """Return the value with one to three characters drawn again, but never the first character."""
        drawn = list(value)
        digits = "0123456789abcdef" if "-" in value else "0123456789"
        for place in self.rng.sample([i for i, c in enumerate(value) if i and c != "-"], self.rng.randint(1, 3)):
            drawn[place] = self.rng.choice(digits)
        return "".join(drawn)

    def _vt(self, family, units: int, length: int) -> list[Piece] | None:
        if units < 5:
            return None
        draws = family.draw(units, self.rng, self.texts, length, example=self.rng.randint(5, 15))
        rendered = family.render(draws, self.texts)
        shown = self._example(rendered.context, "they are: ", "Memorize", length > 512)
        return [*shown, *self._asked(rendered, " ".join(draws["names"]))]

    def _cwe(self, family, units: int, length: int) -> list[Piece] | None:
        """Make a list of words. Units are its entries. Half of the samples repeat words as often as in RULER."""
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
        """Split a context that begins with a solved example, or remove the example.

        Args:
            context: The solved example, followed by the context itself.
            prefix: Text after which the answer of the example begins.
            start: First words of the context itself.
            keep: Whether to keep the example. The weight of its answer is almost that of a real one.
        """
        second = context.rindex(start)
        if not keep:
            return [Piece(context[second:])]
        answer = context.index(prefix) + len(prefix)
        solved = context[answer:second].rstrip() + "\n" * self.rng.choice(BREAKS)
        return [Piece(context[:answer]), Piece(solved, SHOWN), Piece(context[second:])]

    def _fwe(self, family, units: int, length: int) -> list[Piece] | None:
        draws = family.draw(units, self.rng, self.texts, max(300, int(length * self.rng.uniform(0.5, 1.5))))
        if not 0 < draws["words"].count(draws["top"][2]):
            return None
        rendered = family.render(draws, self.texts)
        pieces = self._asked(rendered, " ".join(draws["top"]), STRONGER)
        return [Piece(rendered.context), *pieces]

    def _qa(self, family, units: int, length: int) -> list[Piece] | None:
        """Make articles (squad) or chains (hotpot) with questions, among documents of other articles or chains."""
        rng, texts = self.rng, self.texts
        self._renew()
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
        numbered = [load_wordings().document.format(i=i, document=d) for i, d in enumerate(documents, 1)]
        pieces: list[Piece] = []
        for query, answer in rng.sample(questions, min(len(questions), rng.randint(1, 8))):
            rendered = load_wordings().qa.render("" if pieces else "\n\n".join(numbered), [answer], query=query)
            pieces += [] if pieces else [Piece(rendered.context)]
            pieces += self._asked(rendered, answer)
        return pieces

    def _renew(self) -> None:
        """Make new articles and chains at the first call and at every 250th."""
        self.served += 1
        if self.texts.renewals == 0 or self.served % 250 == 0:
            self.texts.renew()

    def _scbench(self, name: str, units: int, length: int) -> list[Piece] | None:
        """Make a conversation. Units are pairs, lines, lines of noise, shots or documents, depending on the subtask.

        In half of the samples only the last answer ends with `<eos>`, as in an evaluation that puts the benchmark's
        answers between the turns. Such an answer is a list in vt and the text of an option in choice_eng. The model
        is to answer with names and with letters instead, so those answers have the low weight of a context.
        """
        rng, turns = self.rng, self.rng.randint(2, 5)
        if units < 2 * turns:
            return None
        form = next(form for form in load_forms() if form.name == name)
        if form.name in ("scbench_qa_eng", "scbench_choice_eng"):
            row = self._articles(units, turns)
            row = add_options(rng, row) if form.choices else row
        else:
            row = MAKERS[name](rng, turns, units)
        held, wording, given = parse_session(name, row, form), form.wording, rng.random() < 0.5
        pieces = [Piece(wording.before + held.context)]
        for place, turn in enumerate(held.turns):
            asked = (given and place and wording.later) or wording.asked
            pieces += [Piece("\n\n" * (given or not place) + asked.format(**turn.slots))]
            answer = turn.golden
            if form.answer is list:
                answer = " " + " ".join(turn.answers)
            elif form.choices:
                answer = " " + turn.answers[1]
            if not given or place == len(held.turns) - 1:
                pieces += [Piece(answer, ANSWER, answer=True)]
            elif answer == turn.golden:
                pieces += [Piece(answer, ANSWER, answer=True, ends=False)]
            else:
                pieces += [Piece(turn.golden)]
        return pieces

    def _articles(self, units: int, turns: int) -> dict:
        """Make documents of several articles, and questions about them."""
        self._renew()
        chosen = self.rng.sample(self.texts.articles, len(self.texts.articles))
        documents: list[str] = []
        asked: list[tuple[str, str]] = []
        while len(documents) < units and chosen:
            article, questions = chosen.pop()
            documents += article
            asked += questions
        texts = "\n\n".join(f"Document {i}:\n{text}" for i, text in enumerate(documents, 1))
        drawn = self.rng.sample(asked, min(turns, len(asked)))
        return {"context": texts, "multi_turns": [{"input": q, "answer": a} for q, a in drawn]}

    def _magic(self, name: str, units: int, length: int) -> list[Piece] | None:
        """Make a sample of task=niah. Units are words. The needles give one to three cities a number each.

        The names of the cities are capitalised nouns.
        """
        if units < 20:
            return None
        words, ends = self.texts.essay(units)
        cities = map(str.capitalize, self.rng.sample(self.texts.nouns, self.rng.choice([1, 1, 2, 3])))
        numbers = {city: str(self.rng.randint(10**6, 10**7 - 1)) for city in cities}
        places = sorted(self.rng.choice([0, *(end for end in ends if end < units), units]) for _ in numbers)
        form, text = load_needle_wording(), ""
        for (first, last), (city, number) in zip(pairwise([0, *places]), numbers.items(), strict=True):
            text += " " * bool(text) + " ".join(words[first:last]) + form["needle"].format(city=city, number=number)
        text += " " + " ".join(words[places[-1] :])
        pieces = [Piece(form["context"].format(haystack=text.strip()))]
        for city in self.rng.sample(list(numbers), len(numbers)):
            pieces.append(Piece((form["question"] + form["answer_prefix"]).format(city=city)))
            pieces.append(Piece(" " + numbers[city], ANSWER, answer=True))
        return pieces

    def _ledger(self, name: str, units: int, length: int) -> list[Piece] | None:
        """Make a ledger. Units are its lines."""
        early = self.rng.choice([0.5, 0.75, 1.0])
        most = int(units * early) - task.STARTS
        if most < 2 or units > LONGEST:
            return None
        drawn = task.draw_ledger(units, self.rng.randint(2, min(6, most)), early, 50, self.rng)
        answer = Piece(drawn.render_solution(), LONG, answer=True)
        return [Piece(drawn.context()), Piece(drawn.question() + task.PREFIX), answer]


@dataclass(frozen=True)
class Batch:
    """The data of a step."""

    ids: np.ndarray
    """Token ids, shape (rows, length + 1)."""
    weights: np.ndarray
    """Loss weight of each token, shape (rows, length + 1)."""
    kinds: np.ndarray
    """Kind of each row as an index into `NAMES`, shape (rows,); -1 for a copy."""
    pairs: np.ndarray
    """Positions that predict, as indices into the rows * length inputs of the step, shape (offsets, places)."""
    targets: np.ndarray
    """Token that each of them predicts, same shape; -100 for none."""


def make_batch(maker: SampleMaker, length: int, copies: float) -> Batch:
    """Make the data of a step.

    Args:
        maker: Makes the samples.
        length: Tokens of a row.
        copies: Share of rows that consist of random tokens and their copy.
    """
    rows = max(1, maker.recipe.tokens // length)
    ids = np.full((rows, length + 1), PAD, np.uint16)
    weights = np.zeros((rows, length + 1), np.float16)
    kinds = np.full(rows, -1, np.int8)
    spans: list[tuple[int, int, int, int]] = []
    for row in range(rows):
        if maker.rng.random() < copies:
            half = np.random.default_rng(maker.rng.getrandbits(64)).integers(3, VOCABULARY, length // 2)
            ids[row, 0], ids[row, 1 : 2 * len(half) + 1] = BOS, np.tile(half, 2)
            weights[row, len(half) + 1 :] = ANSWER
        else:
            made = maker.sample(length)
            kinds[row] = NAMES.index(made.name)
            ids[row, : len(made.ids)], weights[row, : len(made.ids)] = made.ids, made.weights
            spans += [(row, *span) for span in made.spans]
    return Batch(ids, weights, kinds, *draw_look_ahead(maker, ids, spans))


def draw_look_ahead(
    maker: SampleMaker, ids: np.ndarray, spans: list[tuple[int, int, int, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Draw the positions from which the look-ahead predicts, and the tokens that it predicts.

    A position belongs to a question or its answer. Targets are among the first `look_ahead` tokens of the answer.

    Args:
        maker: Provides the recipe and the random numbers.
        ids: Token ids, shape (rows, length + 1).
        spans: (row, start of the question, start of the answer, end of the answer) for each answer.

    Returns:
        Positions and targets as in `Batch`.
    """
    most, length = maker.recipe.look_ahead, ids.shape[1] - 1
    offsets, draw = maker.recipe.offsets, np.random.default_rng(maker.rng.getrandbits(64))
    shape = len(offsets), maker.recipe.places
    pairs, targets = np.zeros(shape, np.int64), np.full(shape, -100, np.int64)
    tokens = [
        (row, place, asked, begin) for row, asked, begin, end in spans for place in range(begin, min(end, begin + most))
    ]
    if not tokens:
        return pairs, targets
    rows, places, asked, begin = np.array(tokens, np.int64).T
    for i, offset in enumerate(offsets):
        starts = places - offset
        share = np.where(starts >= begin, IN_ANSWER, np.where(starts >= begin - WINDOW, 1.0, BEFORE)) * (
            starts >= asked
        )
        if share.any():
            drawn = draw.choice(len(share), shape[1], p=share / share.sum())
            pairs[i] = rows[drawn] * length + starts[drawn]
            targets[i] = ids[rows[drawn], places[drawn]]
    return pairs, targets


def draw_corpus(samples: int = 2600, length: int = 1500):
    """Yield texts to train the tokenizer on, from the same number of samples of every subtask."""
    maker = SampleMaker("tokenizer", None, Recipe(confusable=0.0))
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
        for piece in maker.pieces(name, units.get(name, 600), length) or ():
            yield piece.text


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load tokenizer.json from a folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))

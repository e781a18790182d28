"""Write documents about invented things, people and places, with questions, for the tuning of `model=smollm2_long`.

A document tells a few facts about its subject. A fact has a value, ways to tell it and ways to ask for it. Facts are
drawn for each document, so that a question can be answered from its wording only, and not from the place of an answer.
Two facts may share a sentence, and a sentence may call its subject by a pronoun.

A question of two steps names a person or a place by a document: "Where was the builder of the lighthouse Kreath born?"
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from kvbench.training import tuning_texts

FACTS = Path(__file__).with_name("tuning_facts.yaml")
ALIKE = 2 / 3  # share of the samples whose names are made of a few syllables


@dataclass(frozen=True)
class Fact:
    """A fact about a subject.

    Attributes:
        value: What the value is: ``person``, ``name``, ``date`` or ``count``.
        told: Ways to tell it, with {s} for the subject, {p} for its possessive and {v} for the value.
        asked: Ways to ask for it, with {x} for the subject.
        aside: Ways to tell it beside another fact of the subject: "built by {v}".
        role: What the value is for the subject ("the builder of"), where it can be the subject of a second step.
    """

    value: str
    told: tuple[str, ...]
    asked: tuple[str, ...]
    aside: tuple[str, ...] = ()
    role: str = ""


@dataclass(frozen=True)
class Question:
    """A question about documents, with its answer and what that is: ``person``, ``name``, ``date`` or ``count``."""

    query: str
    answer: str
    kind: str


@dataclass(frozen=True)
class Facts:
    """What documents tell.

    Attributes:
        things: Kinds of things, such as "mill".
        places: Kinds of places.
        work: Occupations.
        by_subject: Kind of the subject (``thing``, ``person``, ``place``) -> its facts.
    """

    things: tuple[str, ...]
    places: tuple[str, ...]
    work: tuple[str, ...]
    by_subject: dict[str, tuple[Fact, ...]]


@cache
def load_facts() -> Facts:
    """Load tuning_facts.yaml."""
    read = yaml.safe_load(FACTS.read_text(encoding="utf-8"))
    lists = {name: tuple(read.pop(name)) for name in ("things", "places", "work")}
    by_subject = {subject: tuple(_parse_fact(**fact) for fact in facts) for subject, facts in read.items()}
    return Facts(**lists, by_subject=by_subject)


def _parse_fact(
    value: str, told: Iterable[str], asked: Iterable[str], aside: Iterable[str] = (), role: str = ""
) -> Fact:
    return Fact(value, tuple(told), tuple(asked), tuple(aside), role)


class Inventor:
    """Draws the values of one sample and never draws one twice.

    In two of three samples all names have a few syllables in common, as those of an evaluation have: a name must be
    read whole to be told from the others.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._syllables = tuning_texts.draw_syllables(rng) if rng.random() < ALIKE else None
        self._used: set[str] = set()

    def draw(self, kind: str) -> str:
        """Draw a new ``person``, ``name``, ``date`` or ``count``."""
        draws: dict[str, Callable[[], str]] = {
            "person": lambda: tuning_texts.draw_person(self.rng, self._syllables),
            "name": lambda: tuning_texts.draw_name(self.rng, self._syllables),
            "date": lambda: tuning_texts.draw_date(self.rng),
            "count": lambda: tuning_texts.draw_count(self.rng),
        }
        while True:
            value = draws[kind]()
            if value not in self._used:
                self._used.add(value)
                return value


@dataclass(frozen=True)
class Subject:
    """What a document is about.

    Attributes:
        kind: ``thing``, ``person`` or ``place``.
        name: The name.
        label: The subject in a sentence, such as "the mill Kreath".
        title: The title of its document.
        asked: The subject in a question.
        again: What later sentences call it: (subject, possessive).
        opening: A sentence that only says what it is; "" if the label does.
    """

    kind: str
    name: str
    label: str
    title: str
    asked: str
    again: tuple[tuple[str, str], ...]
    opening: str = ""


@dataclass(frozen=True)
class Document:
    """A document with the facts that it tells, each with its value."""

    subject: Subject
    text: str
    facts: tuple[tuple[Fact, str], ...]

    def ask(self, rng: random.Random) -> Question:
        """Ask for one of its facts."""
        fact, value = rng.choice(self.facts)
        return Question(_capitalise(rng.choice(fact.asked).format(x=self.subject.asked)), value, fact.value)


class Writer:
    """Writes documents whose values are drawn by one generator and whose form by another.

    Args:
        inventor: Draws the values.
        form: Draws what a document tells and how. Two documents whose forms come from generators of the same seed
            differ in names, dates and counts only, as the documents of an evaluation do.
    """

    def __init__(self, inventor: Inventor, form: random.Random) -> None:
        self.inventor, self.form = inventor, form

    def draw_subject(self, kind: str, name: str | None = None) -> Subject:
        """Draw a subject of a kind, with a name of its own if none is given."""
        form = self.form
        if kind == "person":
            name = name or self.inventor.draw("person")
            pronoun, work, last = (
                form.choice((("he", "his"), ("she", "her"))),
                form.choice(load_facts().work),
                name.split()[-1],
            )
            opening = form.choice((f"{name} was {_a(work)}.", f"{name} is remembered as {_a(work)}.", ""))
            asked = form.choice((name, f"the {work} {name}")) if opening else name
            return Subject(kind, name, name, name, asked, (pronoun, (last, f"{last}'s"), pronoun), opening)
        name = name or self.inventor.draw("name")
        noun = form.choice(load_facts().things if kind == "thing" else load_facts().places)
        title = f"the {noun} {name}" if kind == "thing" else f"the {noun} of {name}"
        label = form.choice((title, name, f"the {name} {noun}" if kind == "thing" else title))
        opening = f"{name} is {_a(noun)}." if label == name else ""
        again = ("it", "its"), (f"the {noun}", f"the {noun}'s"), ("it", "its")
        return Subject(kind, name, label, title, form.choice((label, label, name)), again, opening)

    def write(self, subject: Subject, facts: int, known: Sequence[tuple[Fact, str]] = (), remarks: int = 0) -> Document:
        """Write a document.

        Args:
            subject: What the document is about.
            facts: Number of facts, with the known ones.
            known: Facts that must be among them, with their values.
            remarks: Number of sentences of prose behind the facts.
        """
        form, draw = self.form, self.inventor.draw
        others = [fact for fact in load_facts().by_subject[subject.kind] if fact not in [fact for fact, _ in known]]
        chosen = [*known, *((fact, draw(fact.value)) for fact in form.sample(others, max(0, facts - len(known))))]
        form.shuffle(chosen)
        sentences = [subject.opening] if subject.opening else []
        place = 0
        while place < len(chosen):
            joined = chosen[place : place + form.choice((1, 2))]
            sentences.append(self._write_sentence(subject, joined, first=not sentences))
            place += len(joined)
        if remarks:
            sentences += tuning_texts.write_prose(self.inventor.rng, 8 * remarks)[:remarks]
        return Document(subject, " ".join(sentences), tuple(chosen))

    def _write_sentence(self, subject: Subject, facts: Sequence[tuple[Fact, str]], first: bool) -> str:
        """Write a sentence that tells one fact or two: the first one as an aside, or each in a clause of its own."""
        form, clauses = self.form, []
        (before, known), (fact, value) = facts[0], facts[-1]
        if len(facts) == 2 and before.aside and form.random() < 0.7:
            aside, named = form.choice(before.aside).format(v=known), first or form.random() < 0.3
            told = form.choice(fact.told)
            inside = named and told.startswith("{s} ") and form.random() < 0.5
            text = f"{{s}}, {aside}, {told.removeprefix('{s} ')}" if inside else f"{aside}, {told}"
            return _capitalise(self._tell(subject, text, value, named)) + "."
        for place, (fact, value) in enumerate(facts):
            named = first and not place or form.random() < 0.15
            clauses.append(self._tell(subject, form.choice(fact.told), value, named))
        return _capitalise(form.choice((", and ", "; ", ", while ")).join(clauses)) + "."

    def _tell(self, subject: Subject, told: str, value: str, named: bool) -> str:
        """Fill in a fact's sentence; the subject has its name, or what it is called later."""
        called = (subject.label, f"{subject.label}'s") if named else self.form.choice(subject.again)
        return told.format(s=called[0], p=called[1], v=value)

    def write_pair(self) -> tuple[list[Document], list[Question]]:
        """Write two documents, and questions that need both.

        The first document is about a thing, a place or a person and names a person or a place, which the second one is
        about. An answer names the first step's result, then the second's.
        """
        form = self.form
        kind = form.choice(("thing", "thing", "thing", "place", "person"))
        fact = form.choice([fact for fact in load_facts().by_subject[kind] if fact.role])
        first = self.draw_subject(kind)
        second = self.draw_subject("person" if fact.value == "person" else "place")
        one = self.write(first, form.randint(2, 4), [(fact, second.name)])
        other = self.write(second, form.randint(3, 5))
        middle = f"{fact.role} {first.asked}"
        asked = [
            Question(_capitalise(form.choice(told.asked).format(x=middle)), f"{second.name}, {value}", told.value)
            for told, value in form.sample(other.facts, 2)
        ]
        return [one, other], asked


def write_page(document: Document) -> str:
    """Return the document below its title, as HotpotQA has it."""
    return f"{_capitalise(document.subject.title)}\n{document.text}"


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _capitalise(text: str) -> str:
    return text[0].upper() + text[1:]

"""Write documents about invented things, people and places, with questions, for the tuning of `model=smollm2_long`.

A document tells a few facts about its subject. A fact has a value, ways to tell it and ways to ask for it. Facts are
drawn for each document, so that a question can be answered from its wording only, and not from the place of an answer.
Two facts may share a sentence, and a sentence may call its subject by a pronoun.

A question of two steps names a person or a place by a document: "Where was the builder of the lighthouse Kreath born?"
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.training import tuning_texts


@dataclass(frozen=True)
class Fact:
    """A fact about a subject.

    Attributes:
        value: What the value is: ``person``, ``name``, ``date`` or ``count``.
        told: Ways to tell it, with {s} for the subject, {p} for its possessive and {v} for the value.
        asked: Ways to ask for it, with {x} for the subject.
        role: What the value is for the subject ("the builder of"), where it can be the subject of a second step.
    """

    value: str
    told: tuple[str, ...]
    asked: tuple[str, ...]
    role: str = ""


@dataclass(frozen=True)
class Question:
    """A question about documents, with its answer."""

    query: str
    answer: str


THINGS = (
    *("lighthouse", "mill", "theatre", "clock tower", "school", "museum", "factory", "library", "market hall", "ship"),
    *("newspaper", "statue", "garden", "railway", "hospital", "chapel", "inn", "observatory", "song", "film", "poem"),
    *("play", "orchard", "mine", "tunnel", "fountain", "hotel", "bakery", "stadium", "aqueduct", "prize", "choir"),
)
PLACES = "town", "village", "island", "valley", "harbour town", "district", "county", "mountain village"
WORK = (
    "cooper", "surgeon", "printer", "sailor", "botanist", "lawyer", "teacher", "sculptor", "blacksmith", "astronomer",
    "singer", "photographer", "carpenter", "nurse", "poet", "merchant", "judge", "baker", "geologist", "chemist",
)  # fmt: skip
THING_FACTS = (
    Fact("person", ("{s} was built by {v}", "the one who built {s} was {v}", "{s} is the work of {v}"),
         ("Who built {x}?", "By whom was {x} built?"), "the builder of"),
    Fact("person", ("{s} was paid for by {v}", "the money for {s} came from {v}", "{v} paid for {s}"),
         ("Who paid for {x}?", "Who gave the money for {x}?"), "the sponsor of"),
    Fact("person", ("{s} belongs to {v}", "{p} owner is {v}", "today {s} is owned by {v}"),
         ("Who owns {x}?", "To whom does {x} belong?", "Who is the owner of {x}?"), "the owner of"),
    Fact("person", ("{s} is looked after by {v}", "{p} keeper is {v}", "{v} looks after {s}"),
         ("Who looks after {x}?", "Who is the keeper of {x}?"), "the keeper of"),
    Fact("person", ("{s} was named in memory of {v}", "{p} name recalls {v}", "{s} honours {v}"),
         ("In memory of whom was {x} named?", "Whom does the name of {x} recall?"), "the person honoured by"),
    Fact("person", ("{s} was first described by {v}", "the first to describe {s} was {v}"),
         ("Who first described {x}?", "Who was the first to describe {x}?"), "the first to describe"),
    Fact("person", ("{s} was restored by {v}", "{v} restored {s}", "{p} restorer was {v}"),
         ("Who restored {x}?", "By whom was {x} restored?"), "the restorer of"),
    Fact("person", ("{s} was praised by {v}", "{v} wrote a speech about {s}"), ("Who praised or wrote about {x}?",)),
    Fact("person", ("{p} critics were led by {v}", "{v} tried to stop {s}", "the loudest enemy of {s} was {v}"),
         ("Who was against {x}?", "Who led the opponents of {x}?"), "the opponent of"),
    Fact("name", ("{s} stands in {v}", "{s} can be found in {v}", "{p} home is {v}"),
         ("Where is {x}?", "In which place can {x} be found?", "Where does {x} stand?"), "the home of"),
    Fact("name", ("{s} was moved here from {v}", "before that {s} was in {v}", "{s} came from {v}"),
         ("Where did {x} come from?", "Where was {x} before?")),
    Fact("name", ("{p} stone was cut in {v}", "the material for {s} was brought from {v}"),
         ("From where was the material for {x} brought?", "Where did the material of {x} come from?")),
    Fact("name", ("people in the area call {s} {v}", "{p} nickname is {v}", "{s} is also known as {v}"),
         ("What is the nickname of {x}?", "By what other name is {x} known?")),
    Fact("name", ("a copy of {s} exists in {v}", "{v} has a copy of {s}"),
         ("Where is there a copy of {x}?", "Which place has a copy of {x}?")),
    Fact("name", ("a footpath leads from {s} to {v}", "one can walk from {s} to {v}"),
         ("Where does the footpath from {x} lead?", "To which place can one walk from {x}?")),
    Fact("name", ("{p} emblem shows the dog {v}", "a dog called {v} guards {s}"),
         ("What is the name of the dog of {x}?", "Which dog belongs to {x}?")),
    Fact("date", ("{s} was opened on {v}", "{p} opening took place on {v}", "on {v} {s} was opened"),
         ("When was {x} opened?", "On which day did {x} open?")),
    Fact("date", ("{s} burned down on {v}", "a fire destroyed {s} on {v}"),
         ("When did {x} burn down?", "When did a fire destroy {x}?")),
    Fact("date", ("work on {s} began on {v}", "{s} was begun on {v}"),
         ("When did the work on {x} begin?", "When was {x} begun?")),
    Fact("date", ("{s} was sold on {v}", "on {v} {s} changed hands"), ("When was {x} sold?", "When did {x} change hands?")),
    Fact("date", ("{p} last celebration was on {v}", "{s} was last celebrated on {v}"),
         ("When was {x} last celebrated?", "On which day was the last celebration of {x}?")),
    Fact("count", ("{s} cost {v} thalers", "{p} price was {v} thalers"),
         ("How much did {x} cost?", "What was the price of {x} in thalers?")),
    Fact("count", ("{s} drew {v} visitors", "{p} visitors numbered {v}", "{v} people came to see {s}"),
         ("How many visitors did {x} draw?", "How many people came to see {x}?")),
    Fact("count", ("{s} is mentioned in {v} letters", "there are {v} letters about {s}"),
         ("How many letters mention {x}?", "In how many letters is {x} mentioned?")),
    Fact("count", ("{s} employs {v} people", "{p} staff has {v} members"),
         ("How many people does {x} employ?", "How many members does the staff of {x} have?")),
    Fact("count", ("{s} weighs {v} stone", "{p} weight is {v} stone"), ("How much does {x} weigh?", "What is the weight of {x}?")),
)  # fmt: skip
PERSON_FACTS = (
    Fact("name", ("{s} was born in {v}", "{p} birthplace is {v}", "{s} came into the world in {v}"),
         ("Where was {x} born?", "What is the birthplace of {x}?", "In which place was {x} born?"), "the birthplace of"),
    Fact("name", ("{s} died in {v}", "the last years of {s} were spent in {v}"),
         ("Where did {x} spend the last years?", "In which place did {x} end up?")),
    Fact("name", ("{s} studied in {v}", "{p} studies took place in {v}"),
         ("Where did {x} study?", "In which city did {x} study?")),
    Fact("name", ("{s} grew up in {v}", "{p} childhood was spent in {v}"),
         ("Where did {x} grow up?", "Where did {x} spend the childhood years?")),
    Fact("name", ("{s} emigrated to {v}", "later {s} left for {v}", "{s} settled in {v}"),
         ("Where did {x} settle?", "To which place did {x} emigrate?")),
    Fact("name", ("{s} sailed on the {v}", "{p} ship was the {v}"),
         ("On which ship did {x} sail?", "What was the ship of {x} called?")),
    Fact("name", ("{s} rode a horse called {v}", "{p} horse had the name {v}"),
         ("What was the horse of {x} called?", "Which horse did {x} ride?")),
    Fact("name", ("{s} is buried in {v}", "{p} grave is in {v}"), ("Where is {x} buried?", "Where is the grave of {x}?")),
    Fact("name", ("{s} worked for the {v} company", "{p} employer was the {v} company"),
         ("For which company did {x} work?", "Who was the employer of {x}?")),
    Fact("person", ("{s} was taught by {v}", "{p} teacher was {v}", "{s} learned the trade from {v}"),
         ("Who taught {x}?", "Who was the teacher of {x}?", "From whom did {x} learn the trade?"), "the teacher of"),
    Fact("person", ("{s} was married to {v}", "{p} partner for life was {v}", "{s} shared a house with {v}"),
         ("To whom was {x} married?", "Who was the partner of {x}?", "With whom did {x} share a house?"), "the partner of"),
    Fact("person", ("{p} best friend was {v}", "{s} was a close friend of {v}"),
         ("Who was the best friend of {x}?", "Who was a close friend of {x}?"), "the best friend of"),
    Fact("person", ("{s} quarrelled with {v}", "{p} rival was {v}"),
         ("With whom did {x} quarrel?", "Who was the rival of {x}?"), "the rival of"),
    Fact("person", ("{p} mother was {v}", "{s} was a child of {v}"),
         ("Who was the mother of {x}?", "Whose child was {x}?"), "the mother of"),
    Fact("person", ("{s} wrote a biography of {v}", "{p} biography of {v} is still read"),
         ("About whom did {x} write a biography?", "Whose biography did {x} write?")),
    Fact("person", ("{p} only student was {v}", "{s} taught {v}"), ("Whom did {x} teach?", "Who was the student of {x}?")),
    Fact("date", ("{s} was born on {v}", "{p} birthday was {v}"), ("What is the birthday of {x}?", "On which day was {x} born?")),
    Fact("date", ("{s} retired on {v}", "{p} last day at work was {v}"), ("When did {x} retire?", "When did {x} stop working?")),
    Fact("date", ("{s} was elected to the council on {v}", "the council elected {s} on {v}"),
         ("When was {x} elected to the council?", "When did the council elect {x}?")),
    Fact("count", ("{s} left behind {v} drawings", "{v} drawings by {s} are known"),
         ("How many drawings did {x} leave behind?", "How many drawings by {x} are known?")),
    Fact("count", ("{s} collected {v} shells", "{p} collection had {v} shells"),
         ("How many shells did {x} collect?", "How many shells were in the collection of {x}?")),
    Fact("count", ("{s} earned {v} thalers a year", "{p} yearly wage was {v} thalers"),
         ("How much did {x} earn a year?", "What was the yearly wage of {x}?")),
)  # fmt: skip
PLACE_FACTS = (
    Fact("person", ("{s} was settled by {v}", "{p} first settler was {v}"),
         ("Who settled {x}?", "Who was the first settler of {x}?"), "the first settler of"),
    Fact("person", ("{p} mayor is {v}", "{s} is governed by {v}"), ("Who is the mayor of {x}?", "Who governs {x}?"), "the mayor of"),
    Fact("person", ("{p} main street bears the name of {v}", "{s} has a street named for {v}"),
         ("For whom is the main street of {x} named?", "Whose name does the main street of {x} bear?")),
    Fact("person", ("the doctor in {s} is {v}", "{p} doctor is called {v}"), ("Who is the doctor in {x}?",), "the doctor in"),
    Fact("name", ("{s} lies on the lake {v}", "the lake near {s} is called {v}"),
         ("On which lake does {x} lie?", "What is the lake near {x} called?")),
    Fact("name", ("{s} trades with {v}", "{p} main trading partner is {v}"),
         ("With which place does {x} trade?", "What is the trading partner of {x}?")),
    Fact("name", ("{s} is known for a cheese called {v}", "{p} cheese is sold as {v}"),
         ("What is the cheese of {x} called?", "For which cheese is {x} known?")),
    Fact("name", ("the hill behind {s} is the {v}", "{s} lies below the hill {v}"),
         ("Below which hill does {x} lie?", "What is the hill behind {x} called?")),
    Fact("date", ("{s} became a free city on {v}", "{p} charter was signed on {v}"),
         ("When was the charter of {x} signed?", "When did {x} get its charter?")),
    Fact("date", ("{s} was flooded on {v}", "a flood reached {s} on {v}"), ("When was {x} flooded?", "When did a flood reach {x}?")),
    Fact("count", ("{s} has {v} houses", "there are {v} houses in {s}"), ("How many houses are there in {x}?", "How many houses does {x} have?")),
    Fact("count", ("{s} keeps {v} goats", "{v} goats graze around {s}"),
         ("How many goats graze around {x}?", "How many goats does {x} keep?")),
)  # fmt: skip
FACTS = {"thing": THING_FACTS, "person": PERSON_FACTS, "place": PLACE_FACTS}


class Inventor:
    """Draws the values of one sample and never draws one twice."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._used: set[str] = set()

    def draw(self, kind: str) -> str:
        """Draw a new ``person``, ``name``, ``date`` or ``count``."""
        draws = {
            "person": tuning_texts.draw_person,
            "name": tuning_texts.draw_name,
            "date": tuning_texts.draw_date,
            "count": tuning_texts.draw_count,
        }
        while True:
            value = draws[kind](self.rng)
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
        again: What later sentences call it: (subject, possessive).
        opening: A sentence that only says what it is; "" if the label does.
    """

    kind: str
    name: str
    label: str
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
        return Question(_capitalise(rng.choice(fact.asked).format(x=self.subject.label)), value)


def draw_subject(inventor: Inventor, kind: str, name: str | None = None) -> Subject:
    """Draw a subject of a kind, with a name of its own if none is given."""
    rng = inventor.rng
    if kind == "person":
        name = name or inventor.draw("person")
        pronoun, possessive = rng.choice((("he", "his"), ("she", "her")))
        work, last = rng.choice(WORK), name.split()[-1]
        opening = rng.choice((f"{name} was a {work}.", f"{name} is remembered as a {work}.", ""))
        return Subject(kind, name, name, ((pronoun, possessive), (last, f"{last}'s"), (pronoun, possessive)), opening)
    name = name or inventor.draw("name")
    noun = rng.choice(THINGS if kind == "thing" else PLACES)
    forms = (f"the {noun} {name}", f"the {noun} {name}", f"the {name} {noun}") if kind == "thing" else (name, f"the {noun} of {name}")
    label = rng.choice(forms)
    opening = "" if noun in label else f"{name} is a {noun}."
    return Subject(kind, name, label, (("it", "its"), (f"the {noun}", f"the {noun}'s"), ("it", "its")), opening)


def write_document(
    inventor: Inventor, subject: Subject, facts: int, known: Sequence[tuple[Fact, str]] = (), remarks: int = 0
) -> Document:
    """Write a document.

    Args:
        inventor: Draws the values.
        subject: What the document is about.
        facts: Number of facts, with the known ones.
        known: Facts that must be among them, with their values.
        remarks: Number of sentences of prose behind the facts.
    """
    rng = inventor.rng
    others = [fact for fact in FACTS[subject.kind] if fact not in [fact for fact, _ in known]]
    chosen = [*known, *((fact, inventor.draw(fact.value)) for fact in rng.sample(others, max(0, facts - len(known))))]
    rng.shuffle(chosen)
    sentences = [subject.opening] if subject.opening else []
    place = 0
    while place < len(chosen):
        joined = 2 if rng.random() < 0.4 else 1
        parts = []
        for fact, value in chosen[place : place + joined]:
            first = not sentences and not parts
            called = (subject.label, f"{subject.label}'s") if first or rng.random() < 0.15 else rng.choice(subject.again)
            parts.append(rng.choice(fact.told).format(s=called[0], p=called[1], v=value))
        sentences.append(_capitalise(rng.choice((", and ", "; ", ", while ")).join(parts)) + ".")
        place += joined
    if remarks:
        sentences += tuning_texts.write_prose(rng, 8 * remarks)[:remarks]
    return Document(subject, " ".join(sentences), tuple(chosen))


def write_page(document: Document) -> str:
    """Return the document below its title, as HotpotQA has it."""
    label = document.subject.label
    return f"{_capitalise(label)}\n{document.text}"


def write_pair(inventor: Inventor) -> tuple[list[Document], list[Question]]:
    """Write two documents, and questions that need both. The answer names the first step's result, then the second's.

    The first document is about a thing or a place and gives it a person or a place, whom the second one is about.
    """
    rng = inventor.rng
    kind = rng.choice(("thing", "thing", "thing", "place", "person"))
    fact = rng.choice([fact for fact in FACTS[kind] if fact.role])
    second = draw_subject(inventor, "person" if fact.value == "person" else "place")
    first = draw_subject(inventor, kind)
    one = write_document(inventor, first, rng.randint(2, 4), [(fact, second.name)])
    other = write_document(inventor, second, rng.randint(3, 5))
    chosen = rng.sample(other.facts, min(2, len(other.facts)))
    middle = f"{fact.role} {first.label}"
    asked = [
        Question(_capitalise(rng.choice(told.asked).format(x=middle)), f"{second.name}, {value}") for told, value in chosen
    ]
    return [one, other], asked


def _capitalise(text: str) -> str:
    return text[0].upper() + text[1:]

"""Generate two sets of questions about invented people and places, in the formats of SQuAD v2 and HotpotQA.

They replace the official files where these are not available. A model cannot know the answers from elsewhere, because
every name is made of syllables. Every answer stands in exactly one document: all names have eight letters, dates have a
day of two digits and counts have four digits, so that none is a part of another.
"""

import random
import re

from kvbench.tasks.common import synthetic_prose

MIDDLES = (
    "ba",
    "be",
    "da",
    "de",
    "di",
    "ga",
    "ka",
    "ki",
    "la",
    "le",
    "li",
    "lo",
    "ma",
    "me",
    "mi",
    "na",
    "ne",
    "ni",
    "no",
    "ra",
    "re",
    "ri",
    "ro",
    "sa",
    "se",
    "ta",
    "te",
    "ti",
    "to",
    "va",
    "ve",
    "vi",
)
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
ARTICLES, CHAINS = 70, 1050

# A paragraph, and questions with the slot that answers each. The letters of a slot's name say what is drawn for it.
PARAGRAPHS = (
    (
        "{person1} was a mapmaker of {province}, born in the village of {name1} on {date1}. As an apprentice of {person2} "
        "the boy learned to draw coastlines from a fishing boat. His survey of the marshes took {count1} days and was "
        "printed at the expense of the widow {person3}.",
        (
            ("In which village was the mapmaker {person1} born?", "name1"),
            ("When was {person1} born?", "date1"),
            ("Whose apprentice was {person1}?", "person2"),
            ("How many days did the survey of {person1} take?", "count1"),
            ("Who paid for the printing of the survey of {person1}?", "person3"),
        ),
    ),
    (
        "The town of {name1} in {province} lies where the river {name2} leaves the hills. It was founded by {person1} on "
        "{date1}, and its market square is named after {person2}. Some {count1} people live there, most of them weavers.",
        (
            ("Which river flows through the town of {name1}?", "name2"),
            ("Who founded the town of {name1}?", "person1"),
            ("When was the town of {name1} founded?", "date1"),
            ("How many people live in {name1}?", "count1"),
            ("After whom is the market square of {name1} named?", "person2"),
        ),
    ),
    (
        "The novel {name1} by {person1} is set in {province} during a long drought. Its heroine, {person2}, runs the "
        "ferry to {name2}. The book came out on {date1} and sold {count1} copies in its first year.",
        (
            ("Who wrote the novel {name1}?", "person1"),
            ("Who is the heroine of the novel {name1}?", "person2"),
            ("Where does the ferry in the novel {name1} go?", "name2"),
            ("When did the novel {name1} come out?", "date1"),
            ("How many copies of {name1} were sold in its first year?", "count1"),
        ),
    ),
    (
        "The {name1} Institute, which studies the birds of {province}, was set up with money left by {person1}. Its "
        "reading room was designed by {person2} and opened on {date1}. The collection holds {count1} eggs, and the "
        "director lives at {name2} House.",
        (
            ("Who left the money for the {name1} Institute?", "person1"),
            ("Who designed the reading room of the {name1} Institute?", "person2"),
            ("When did the reading room of the {name1} Institute open?", "date1"),
            ("How many eggs does the {name1} Institute hold?", "count1"),
            ("In which house does the director of the {name1} Institute live?", "name2"),
        ),
    ),
    (
        "The bridge at {name1}, the longest in {province}, carries the road to {name2}. {person1} drew the plans, but it "
        "was {person2} who finished the work on {date1}. It rests on piles of oak and weighs {count1} tons.",
        (
            ("Who drew the plans of the bridge at {name1}?", "person1"),
            ("Who finished the bridge at {name1}?", "person2"),
            ("When was the bridge at {name1} finished?", "date1"),
            ("How many tons does the bridge at {name1} weigh?", "count1"),
            ("To which place does the bridge at {name1} carry the road?", "name2"),
        ),
    ),
    (
        "Every autumn the people of {province} keep the feast of {name1}. It recalls the day, {date1}, when {person1} "
        "brought grain across the snow. A cake called {name2} is baked for it, after a recipe of {person2}, and {count1} "
        "lanterns are hung along the quay.",
        (
            ("On what day did the event happen that the feast of {name1} recalls?", "date1"),
            ("Who brought the grain that the feast of {name1} recalls?", "person1"),
            ("What is the cake called that is baked for the feast of {name1}?", "name2"),
            ("Whose recipe is used for the cake of the feast of {name1}?", "person2"),
            ("How many lanterns are hung at the feast of {name1}?", "count1"),
        ),
    ),
)
PEOPLE = (  # a person's part in a work, the title of the work's document, and the document
    (
        "composer",
        "The opera {work}",
        "{work} is an opera in three acts by {person}. It was first sung on {date1} "
        "before {count1} listeners and has been revived four times.",
    ),
    (
        "engineer",
        "The canal {work}",
        "{work} is a canal that was dug by the engineer {person}. Its locks were opened "
        "on {date1}, and {count1} barges pass through them in a year.",
    ),
    (
        "author",
        "The novel {work}",
        "{work} is a novel by {person} about two brothers who keep bees. It was printed on {date1} in {count1} copies.",
    ),
    (
        "painter",
        "The painting {work}",
        "{work} is a painting by {person} that shows a harbour at night. It was sold on {date1} for {count1} crowns.",
    ),
    (
        "gardener",
        "The park {work}",
        "{work} is a park laid out by {person}. It was given to the public on {date1} and has {count1} lime trees.",
    ),
)
LIVES = (
    "{person} was born in the village of {name1} and went to school with the children of the miller. A pupil of "
    "{person1} for six years, {person} later moved to {name2} and married the pianist {person2}."
)
BRIDGES = (
    ("In which village was the {role} of {work} born?", "name1"),
    ("Whose pupil was the {role} of {work}?", "person1"),
    ("To which place did the {role} of {work} move?", "name2"),
    ("Whom did the {role} of {work} marry?", "person2"),
)


class Inventor:
    """Draws values and never draws one twice."""

    def __init__(self, seed: str):
        self.rng = random.Random(seed)
        self.used: set[str] = set()

    def draw(self, slot: str) -> str:
        """Draw a new value for a slot such as ``person1``."""
        while True:
            value = getattr(self, f"_{slot.rstrip('0123456789')}")()
            if value not in self.used:
                self.used.add(value)
                return value

    def slots(self, text: str, **known: str) -> dict[str, str]:
        """Draw a new value for every slot of the text that is not known, and add the known ones."""
        return known | {slot: self.draw(slot) for slot in sorted(set(re.findall(r"{(\w+)}", text)) - set(known))}

    def _name(self) -> str:
        return (
            self.rng.choice(synthetic_prose.STARTS) + self.rng.choice(MIDDLES) + self.rng.choice(synthetic_prose.ENDS)
        )

    def _person(self) -> str:
        return f"{synthetic_prose.draw_short_name(self.rng)} {self.draw('name')}"

    def _date(self) -> str:
        return f"{self.rng.randint(10, 28)} {self.rng.choice(MONTHS)} {self.rng.randint(1580, 1949)}"

    def _count(self) -> str:
        return f"{self.rng.randint(1000, 9999):,}"


def make_squad() -> dict:
    """Make articles about provinces in the format of SQuAD v2's dev file."""
    inventor = Inventor("kvbench squad")
    return {"data": [make_article(inventor) for _ in range(ARTICLES)]}


def make_hotpot() -> list[dict]:
    """Make questions about two documents among four other pairs, in the format of HotpotQA's distractor file."""
    inventor = Inventor("kvbench hotpot")
    chains = [make_chain(inventor) for _ in range(CHAINS)]
    entries = []
    for i, (pages, questions) in enumerate(chains):
        for question, answer in questions:
            others = [j for j in inventor.rng.sample(range(CHAINS), 5) if j != i][:4]
            context = pages + [page for j in others for page in chains[j][0]]
            entries.append({"question": question, "answer": answer, "context": context})
    return entries


def make_article(inventor: Inventor) -> dict:
    """Make an article about a province: paragraphs with their questions."""
    province = inventor.draw("name")
    paragraphs = []
    for text, questions in PARAGRAPHS:
        slots = inventor.slots(text, province=province)
        asked = [
            {
                "question": q.format(**slots),
                "is_impossible": False,
                "answers": [{"text": t} for t in _aliases(slot, slots[slot])],
            }
            for q, slot in questions
        ]
        remark = " ".join(synthetic_prose.write_essay(inventor.rng, 2))
        paragraphs.append({"context": f"{text.format(**slots)} {remark}", "qas": asked})
    return {"title": province, "paragraphs": paragraphs}


def _aliases(slot: str, value: str) -> list[str]:
    """Return the right answers: for a person, the full name and the surname."""
    return [value, value.split()[-1]] if slot.startswith("person") else [value]


def make_chain(inventor: Inventor) -> tuple[list, list[tuple[str, str]]]:
    """Make documents about a work and the person behind it, and questions that need both."""
    role, title, text = inventor.rng.choice(PEOPLE)
    slots = inventor.slots(text + LIVES, work=inventor.draw("name"), person=inventor.draw("person"), role=role)
    pages = [[title.format(**slots), [text.format(**slots)]], [slots["person"], [LIVES.format(**slots)]]]
    return pages, [(q.format(**slots), slots[slot]) for q, slot in inventor.rng.sample(BRIDGES, 2)]

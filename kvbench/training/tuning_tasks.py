"""Draw the conversations on which `model=smollm2_long` is tuned, in the prompt forms of the tasks.

A conversation has a context and one to six turns on it. The first turn of a subtask of RULER, of task=ledger and of
task=niah is asked as these tasks ask; later turns ask the same way for something else in the context. The parameters
(keys, values, hops, chains, repetitions) vary around the official ones. tuning_texts.py says what is drawn, and that no
evaluation draws it.

An answer to a question of two steps names the first step's result before the second's, as in the embedded model's
training. It is as short as RULER's limit of 32 tokens asks.
"""

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from kvbench.tasks.ledger import task as ledger
from kvbench.tasks.phonebook import PHONES
from kvbench.tasks.ruler.niah import DEPTHS, NIAH, NiahFamily
from kvbench.tasks.ruler.templates import RenderedPrompt, load_wordings
from kvbench.tasks.scbench.prompts import load_forms
from kvbench.training import tuning_questions, tuning_texts
from kvbench.training.training_data import load_needle_wording

MOST_TURNS = 6
HOPS = 2, 3, 4, 4, 4, 5, 6
LONGEST_LEDGER = 120  # lines


@dataclass(frozen=True)
class Turn:
    """A question and its answer.

    Attributes:
        question: The rest of the user's message, in the first turn; the whole message in a later one.
        prefix: What opens the answer. It is part of the prompt.
        answer: The answer.
        counts: Whether the answer counts in the loss.
    """

    question: str
    prefix: str
    answer: str
    counts: bool = True


@dataclass(frozen=True)
class Conversation:
    """A context with its turns. `solved` says where the answer of a solved example is, as in `Sample`."""

    context: str
    turns: tuple[Turn, ...]
    solved: tuple[int, ...] = ()


@dataclass(frozen=True)
class Kind:
    """A kind of conversation.

    Attributes:
        make: Draws one. Its arguments are a generator, the units of the haystack, and the tokens that there are. It
            returns None if the units are too few.
        unit: About how many tokens a unit has.
        rest: About how many tokens there are beside.
    """

    make: Callable[[random.Random, int, int], Conversation | None]
    unit: float
    rest: float


def _first_turn(rendered: RenderedPrompt, answer: str) -> Turn:
    return Turn(rendered.question, rendered.answer_prefix, " " + answer)


def _later_turn(rendered: RenderedPrompt, answer: str) -> Turn:
    return Turn(rendered.question.lstrip(), rendered.answer_prefix, " " + answer)


def _count_turns(rng: random.Random) -> int:
    """Draw the number of turns: one in a third of the conversations. It is drawn before what depends on the units."""
    return 1 if rng.random() < 0.35 else rng.randint(1, MOST_TURNS)


# Needles


def _draw_value(rng: random.Random, kind: str, digits: int) -> str:
    return tuning_texts.draw_number(rng, digits) if kind == "numbers" else tuning_texts.draw_uuid(rng)


def _draw_key(rng: random.Random, kind: str) -> str:
    if kind == "words":
        return "-".join(rng.sample(tuning_texts.load_words(), 2))
    return tuning_texts.draw_uuid(rng)


def _make_needles(family: NiahFamily) -> Callable[[random.Random, int, int], Conversation | None]:
    """Return the function that hides needles as a subtask of RULER does, with other numbers of keys and values."""

    def make(rng: random.Random, units: int, length: int) -> Conversation | None:
        keys, values, asked, most = family.keys, family.values, family.asked, _count_turns(rng)
        if rng.random() < 0.4:
            keys = rng.randint(1, max(1, min(8, length // 128)))
            values = rng.choice((1, 1, 2, 3, 5)) if family.value == "numbers" else 1
            asked = rng.randint(1, min(keys, 5)) if family.value == "numbers" else 1
        if family.haystack == "essay" and keys * values > len(DEPTHS) or units < keys * values:
            return None
        digits = rng.choice(tuning_texts.DIGITS)
        drawn: dict[str, list[str]] = {}
        while len(drawn) < keys:
            drawn[_draw_key(rng, family.key)] = [_draw_value(rng, family.value, digits) for _ in range(values)]
        count = keys * values
        order = rng.sample(range(count), count)
        places = sorted(rng.sample(DEPTHS if family.haystack == "essay" else range(units), count))
        names, queries = list(drawn), rng.sample(range(keys), asked)
        draws: dict[str, object] = {
            "units": units,
            "keys": names,
            "values": list(drawn.values()),
            "order": order,
            "places": places,
        }
        draws["asked"] = queries
        others: dict[str, str] = {}
        if family.haystack == "needle":
            while len(others) < units:
                others[_draw_key(rng, family.key)] = _draw_value(rng, family.value, digits)
            draws["others"] = [[key, value] for key, value in others.items() if key not in drawn]
        texts = tuning_texts.Haystack(rng, units if family.haystack == "essay" else 1)
        rendered = family.render(draws, texts)
        facts = {key: sorted(listed, key=rendered.context.find) for key, listed in drawn.items()}
        chosen = [names[i] for i in queries]
        turns = [_first_turn(rendered, ", ".join(value for key in chosen for value in facts[key]))]
        facts |= {key: [value] for key, value in others.items() if key not in facts}
        for _ in range(min(most, len(facts)) - 1):
            chosen = rng.sample(list(facts), min(len(facts), rng.choice((1, 1, 1, 2, 4))))
            chosen = chosen if family.value == "numbers" else chosen[:1]
            said = [value for key in chosen for value in facts[key]]
            turns.append(_later_turn(_ask_for_keys(chosen, said, family.value), ", ".join(said)))
        return Conversation(rendered.context, tuple(turns))

    return make


def _ask_for_keys(keys: Sequence[str], values: Sequence[str], kind: str) -> RenderedPrompt:
    """Render the question for keys, without a context."""
    wording, query = load_wordings().niah, ", ".join(keys[:-1]) + ", and " + keys[-1] if len(keys) > 1 else keys[0]
    if len(values) == 1:
        return wording.singular().render("", values, type_needle_v=kind[:-1], query=query)
    return wording.render("", values, type_needle_v=kind, query=query)


# Variables


def _draw_chains(rng: random.Random, chains: int, letters: int, digits: int) -> dict[str, list[str]]:
    """Draw chains of variables: value -> names. All names and values differ."""
    used: set[str] = {"VAR"}
    drawn: dict[str, list[str]] = {}
    while len(drawn) < chains:
        names: list[str] = []
        hops = rng.choice(HOPS)
        while len(names) < hops + 1:
            name = tuning_texts.draw_letters(rng, letters)
            if name not in used:
                used.add(name)
                names.append(name)
        drawn[tuning_texts.draw_number(rng, digits)] = names
    return drawn


def _state_chain(value: str, names: Sequence[str]) -> list[str]:
    """Return the statements of a chain."""
    return [f"VAR {names[0]} = {value}", *(f"VAR {new} = VAR {old} " for old, new in pairwise(names))]


def _scatter(rng: random.Random, chains: dict[str, list[str]], noise: int) -> str:
    """Write noise sentences, among which each chain's statements stand in order."""
    lines: list[tuple[float, str]] = [(place + 0.5, load_wordings().noise) for place in range(noise)]
    for value, names in chains.items():
        statements = _state_chain(value, names)
        places = sorted(rng.uniform(0, noise) for _ in statements)
        lines += zip(places, statements, strict=True)
    return "\n".join(line for _, line in sorted(lines, key=lambda line: line[0]))


def _ask_for_chain(value: str, names: Sequence[str], context: str = "") -> RenderedPrompt:
    return load_wordings().vt.render(context, names, query=value, num_v=len(names))


def _make_variables(rng: random.Random, units: int, length: int) -> Conversation | None:
    """Make a sample of vt. Half of them have one chain, as in RULER, and the others up to five."""
    if units < 6:
        return None
    letters, digits = rng.choice((4, 6, 7)), rng.choice((6, 8))
    chains = _draw_chains(rng, 1 if rng.random() < 0.5 else rng.randint(2, 5), letters, digits)
    example = _draw_chains(rng, 1, 4, digits)
    [(value, names)] = example.items()
    if rng.random() < 0.85:  # four hops as in RULER, so that the example is like the sample
        names = names[:5]
    shown = _ask_for_chain(value, names, _scatter(rng, {value: names}, rng.randint(5, 15) if length > 1024 else 4))
    solved = f"{shown.prompt} {' '.join(names)}\n\n" if length > 768 else ""
    asked = rng.sample(list(chains), min(len(chains), _count_turns(rng)))
    rendered = _ask_for_chain(asked[0], chains[asked[0]], _scatter(rng, chains, units))
    turns = [_first_turn(rendered, " ".join(chains[asked[0]]))]
    for value in asked[1:]:
        turns.append(_later_turn(_ask_for_chain(value, chains[value]), " ".join(chains[value])))
    return Conversation(solved + rendered.context, tuple(turns))


# Counting words


def _number(words: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def _list_words(rng: random.Random, different: int, common: int, rare: int) -> dict[str, list[str]]:
    """Draw words, ten of them `common` times and the others `rare` times, and shuffle them."""
    drawn = rng.sample(tuning_texts.load_words(), different)
    words = drawn[:10] * common + drawn[10:] * rare
    rng.shuffle(words)
    return {"words": words, "common": drawn[:10]}


def _make_common_words(rng: random.Random, units: int, length: int) -> Conversation | None:
    """Make a sample of cwe. Units are its entries. Two thirds of the samples repeat words as often as in RULER."""
    long = length >= 4096
    common, rare = (30, 3) if long else (6, 1)
    if rng.random() < 0.33 or units < 10 * common + rare:
        rare = rng.randint(1, 3 if units > 150 else 1)
        most = min(10 * rare, (units - 2 * rare) // 10)
        if most <= 2 * rare:
            return None
        common = rng.randint(2 * rare + 1, most)
    different = min(10 + max(1, (units - 10 * common) // rare), len(tuning_texts.load_words()))
    example = _list_words(rng, *((40, 10, 3) if long else (20, 3, 1)))
    drawn = _list_words(rng, different, common, rare)
    return ask_for_common(example, drawn)


def ask_for_common(example: dict[str, list[str]], drawn: dict[str, list[str]]) -> Conversation:
    """Ask for the common words of a list behind a solved example, which a chat template makes turns of its own."""
    shown, asked = (load_wordings().cwe.render(_number(one["words"]), one["common"]) for one in (example, drawn))
    solved = f"{shown.prompt} {_number(shown.answers)}\n"
    places = len(shown.context + shown.question), len(solved)
    return Conversation(solved + asked.context, (_first_turn(asked, _number(asked.answers)),), places)


def _make_frequent_words(rng: random.Random, units: int, length: int) -> Conversation | None:
    """Make a sample of fwe. Units are the sum of the counts before each count is rounded down."""
    letters, alpha = rng.choice((7, 8)), rng.choice((2.0, 2.0, 2.0, 1.8, 2.3))
    different = max(12, int(length * rng.uniform(0.5, 1.5)) // 50)
    drawn: dict[str, None] = {}
    while len(drawn) < different:
        drawn[tuning_texts.draw_letters(rng, letters, "abcdefghijklmnopqrstuvwxyz")] = None
    coded = list(drawn)
    zeta = math.fsum(rank**-alpha for rank in range(1, 2000))
    counts = [int(units * rank**-alpha / zeta) for rank in range(1, different + 1)]
    if counts[3] <= counts[4] or counts[3] < 2:
        return None
    words = [word for word, count in zip(["...", *coded[1:]], counts, strict=True) for _ in range(count)]
    rng.shuffle(words)
    rendered = load_wordings().fwe.render(" ".join(words), coded[1:4])
    return Conversation(rendered.context, (_first_turn(rendered, " ".join(coded[1:4])),))


# Questions about documents


def _ask_question(query: str, answer: str, context: str = "") -> RenderedPrompt:
    return load_wordings().qa.render(context, [answer], query=query)


def _ask_documents(rng: random.Random, texts: list[str], asked: list[tuning_questions.Question]) -> Conversation:
    """Shuffle and number documents, and ask questions about them."""
    rng.shuffle(texts)
    numbered = [load_wordings().document.format(i=i, document=text) for i, text in enumerate(texts, 1)]
    rendered = _ask_question(asked[0].query, asked[0].answer, "\n\n".join(numbered))
    turns = [_first_turn(rendered, asked[0].answer)]
    turns += [_later_turn(_ask_question(one.query, one.answer), one.answer) for one in asked[1:]]
    return Conversation(rendered.context, tuple(turns))


def _make_forms(rng: random.Random) -> Callable[[], random.Random]:
    """Return a function that gives each document of a sample the generator of its form.

    In half of the samples there are one to six forms, so that many documents tell the same facts about other subjects.
    """
    seeds = [rng.getrandbits(64) for _ in range(rng.randint(1, 6))] if rng.random() < 0.5 else []
    return lambda: random.Random(f"{tuning_texts.SEED}/{rng.choice(seeds) if seeds else rng.getrandbits(64)}")


def _write_documents(rng: random.Random, units: int) -> tuple[list[str], list[tuning_questions.Question]]:
    """Write documents about different subjects, and a question about each."""
    inventor, documents, draw_form = tuning_questions.Inventor(rng), [], _make_forms(rng)
    remarks = rng.choice((0, 1, 2, 2))
    for _ in range(units):
        writer = tuning_questions.Writer(inventor, draw_form())
        subject = writer.draw_subject(writer.form.choice(("thing", "thing", "person", "place")))
        documents.append(writer.write(subject, writer.form.randint(3, 6), remarks=remarks))
    return [document.text for document in documents], [document.ask(rng) for document in documents]


def _make_squad(rng: random.Random, units: int, length: int) -> Conversation | None:
    """Make a sample of qa_squad: documents, and questions that one of them answers."""
    if units < 2:
        return None
    turns = _count_turns(rng)
    texts, questions = _write_documents(rng, units)
    return _ask_documents(rng, texts, rng.sample(questions, min(len(questions), turns)))


def _make_hotpot(rng: random.Random, units: int, length: int) -> Conversation | None:
    """Make a sample of qa_hotpot: pairs of documents, and questions that need both of a pair."""
    if units < 4:
        return None
    inventor, draw_form, turns = tuning_questions.Inventor(rng), _make_forms(rng), _count_turns(rng)
    pairs = [tuning_questions.Writer(inventor, draw_form()).write_pair() for _ in range(units // 2)]
    texts = [tuning_questions.write_page(document) for documents, _ in pairs for document in documents]
    chosen = rng.sample(pairs, min(len(pairs), turns))
    return _ask_documents(rng, texts, [rng.choice(asked) for _, asked in chosen])


# Several turns, as in SCBench


@cache
def load_scbench_wordings() -> dict[str, tuple[str, str, str]]:
    """Return for each task of SCBench the text before the context, the first question and a later one."""
    return {
        form.name: (
            form.wording.before,
            form.wording.asked,
            form.wording.asked if form.choices else form.wording.later or form.wording.asked,
        )
        for form in load_forms()
    }


def _converse(
    name: str, context: str, asked: Sequence[tuple[dict[str, str], str]], golden: Sequence[str] = ()
) -> Conversation:
    """Ask as a task of SCBench does.

    Args:
        name: The task.
        context: The text below the task's heading.
        asked: Slots and answer of each turn.
        golden: What all turns but the last show as their answers, if that is not the answer. These do not count.
    """
    before, first, later = load_scbench_wordings()[name]
    turns = []
    for place, (slots, answer) in enumerate(asked):
        question = later.format(**slots) if place else "\n\n" + first.format(**slots)
        shown = golden and place < len(asked) - 1
        turns.append(Turn(question, "", golden[place] if shown else answer, not shown))
    return Conversation(before + context, tuple(turns))


def show_golden(rng: random.Random, golden: Sequence[str]) -> Sequence[str]:
    """Return the benchmark's answers for half of the conversations: an evaluation shows these or the model's own."""
    return golden if rng.random() < 0.5 else ()


def _draw_turns(rng: random.Random) -> int:
    return rng.randint(2, MOST_TURNS)


def _ask_alone(rendered: RenderedPrompt) -> dict[str, str]:
    """Return the input of a turn that asks as RULER does, with the answer's prefix in the question."""
    return {"input": rendered.question.lstrip() + rendered.answer_prefix}


def _make_kv(rng: random.Random, units: int, length: int) -> Conversation | None:
    """Make pairs in JSON: needles of RULER as in the miniature, or UUIDs as in the benchmark."""
    turns = _draw_turns(rng)
    if units < turns:
        return None
    digits = rng.choice(tuning_texts.DIGITS)
    if rng.random() < 0.5:
        pairs = {_draw_key(rng, "words"): tuning_texts.draw_number(rng, digits) for _ in range(2 * units)}
        told = {
            key: load_wordings().needle.format(type_needle_v="numbers", key=key, value=value)
            for key, value in pairs.items()
        }
        asked = [
            (_ask_alone(_ask_for_keys([key], [pairs[key]], "numbers")), pairs[key])
            for key in rng.sample(list(pairs), turns)
        ]
        return _converse("scbench_kv", json.dumps(told, indent=0), asked)
    pairs = {tuning_texts.draw_uuid(rng): tuning_texts.draw_uuid(rng) for _ in range(units)}
    asked = [
        ({"input": f'Key: "{key}"\nThe value associated with the specified key is:'}, pairs[key])
        for key in rng.sample(list(pairs), turns)
    ]
    return _converse("scbench_kv", "JSON data:\n" + json.dumps(pairs, indent=0), asked)


def _make_lines(rng: random.Random, units: int, length: int) -> Conversation | None:
    """Make lines of hex digits, which a question names by their first and last six."""
    turns, digits = _draw_turns(rng), rng.choice((20, 28))
    if units < turns:
        return None
    lines = [f"{rng.getrandbits(4 * digits):0{digits}x}" for _ in range(units)]
    asked = [
        ({"input": f"Which line begins with {line[:6]} and ends in {line[-6:]}? Line:"}, line)
        for line in rng.sample(lines, turns)
    ]
    return _converse("scbench_prefix_suffix", "\n".join(lines), asked)


def _make_tracked(rng: random.Random, units: int, length: int) -> Conversation | None:
    """Make several chains of variables, one for each turn."""
    turns = _draw_turns(rng)
    if units < 4:
        return None
    chains = _draw_chains(rng, turns, rng.choice((4, 6)), rng.choice((6, 8)))
    first, *_ = chains
    context = _ask_for_chain(first, chains[first], _scatter(rng, chains, units)).context
    order = rng.sample(list(chains), turns)
    asked = [(_ask_alone(_ask_for_chain(value, chains[value])), " ".join(chains[value])) for value in order]
    return _converse("scbench_vt", context, asked, show_golden(rng, [str(chains[value]) for value in order]))


def _make_book(rng: random.Random, units: int, length: int) -> Conversation | None:
    """Make open questions about documents."""
    if units < (turns := _draw_turns(rng)):
        return None
    context, questions = _write_book(rng, units)
    asked = [({"input": question.query}, question.answer) for question in rng.sample(questions, turns)]
    return _converse("scbench_qa_eng", context, asked)


def _make_choices(rng: random.Random, units: int, length: int) -> Conversation | None:
    """Make questions with four options, which are answered by a letter: SCBench grades the first letter first."""
    if units < (turns := _draw_turns(rng)):
        return None
    context, questions = _write_book(rng, units)
    chosen, asked = rng.sample(questions, turns), []
    for question in chosen:
        others = {one.answer for one in questions if one.kind == question.kind} - {question.answer}
        options = [question.answer, *rng.sample(sorted(others), min(3, len(others)))]
        options += [tuning_texts.draw_name(rng) for _ in range(4 - len(options))]
        rng.shuffle(options)
        slots = {"input": question.query, **dict(zip("ABCD", options, strict=True))}
        asked.append((slots, "ABCD"[options.index(question.answer)]))
    golden = show_golden(rng, [question.answer for question in chosen])
    return _converse("scbench_choice_eng", context, asked, golden)


def _write_book(rng: random.Random, units: int) -> tuple[str, list[tuning_questions.Question]]:
    """Write numbered documents, and a question about each."""
    texts, questions = _write_documents(rng, units)
    return "\n\n".join(f"Document {i}:\n{text}" for i, text in enumerate(texts, 1)), questions


def _make_shots(rng: random.Random, units: int, length: int) -> Conversation | None:
    """Make many solved comparisons of numbers, and ask for more."""

    def shot() -> tuple[str, str]:
        one, other = rng.sample(range(100, 1000), 2)
        return f"Which is larger?\n(A) {one}\n(B) {other}\nAnswer:", "AB"[other > one]

    if units < 4:
        return None
    context = "\n\n".join(" ".join(shot()) for _ in range(units))
    asked = [({"input": question}, answer) for question, answer in (shot() for _ in range(_draw_turns(rng)))]
    return _converse("scbench_many_shot", context, asked)


# Others


def _make_ledger(rng: random.Random, units: int, length: int) -> Conversation | None:
    """Make a ledger. Units are its lines."""
    early, lines = rng.choice((0.5, 0.75, 1.0)), min(units, LONGEST_LEDGER)
    most = int(lines * early) - ledger.STARTS
    if most < 2:
        return None
    drawn = ledger.draw_ledger(lines, rng.randint(2, min(6, most)), early, rng.choice((20, 50)), rng)
    return Conversation(drawn.context(), (Turn(drawn.question(), ledger.PREFIX, drawn.render_solution()),))


def _make_phonebook(rng: random.Random, units: int, length: int) -> Conversation | None:
    """Make a phone book in one of the two wordings of task=phonebook."""
    if units < 2:
        return None
    plain, turns = rng.random() < 0.5, _count_turns(rng)
    names = list(dict.fromkeys(tuning_texts.draw_person(rng) for _ in range(units)))
    digits = rng.choice(tuning_texts.DIGITS)

    def draw() -> str:
        number = tuning_texts.draw_number(rng, digits)
        return f"{number[:2]}-{number[2:5]}-{number[5:]}".strip("-") if plain else number

    book = {name: draw() for name in names}
    entry, one = (PHONES.entry, PHONES.one) if plain else (load_wordings().needle, load_wordings().niah.singular())
    lines = [entry.format(type_needle_v="numbers", key=name, value=number) for name, number in book.items()]

    def ask(name: str, context: str = "") -> RenderedPrompt:
        return one.render(context, [book[name]], type_needle_v="number", query=name)

    first, *later = rng.sample(names, min(len(names), turns))
    rendered = ask(first, "\n".join(lines))
    asked = (_first_turn(rendered, book[first]), *(_later_turn(ask(name), book[name]) for name in later))
    return Conversation(rendered.context, asked)


def _make_magic(rng: random.Random, units: int, length: int) -> Conversation | None:
    """Make a sample of task=niah with the preset `magic_number`. Units are words."""
    if units < 40:
        return None
    form, sentences = load_needle_wording(), tuning_texts.write_prose(rng, units)
    cities = {
        tuning_texts.draw_name(rng): tuning_texts.draw_number(rng, rng.choice(tuning_texts.DIGITS))
        for _ in range(rng.choice((1, 1, 2, 3)))
    }
    for city, number in cities.items():
        place = rng.randrange(len(sentences))
        sentences[place] += form["needle"].format(city=city, number=number)
    turns: list[Turn] = []
    for city in rng.sample(list(cities), len(cities)):
        question = form["question"].format(city=city)
        turns.append(
            Turn(question.lstrip() if turns else question, form["answer_prefix"].format(city=city), " " + cities[city])
        )
    return Conversation(form["context"].format(haystack=" ".join(sentences)), tuple(turns))


_NEEDLES = {"noise": (25.1, 200), "essay": (1.43, 300), "needle": (25.0, 300)}  # haystack -> `unit` and `rest`
KINDS = {
    **{family.name: Kind(_make_needles(family), *_NEEDLES[family.haystack]) for family in NIAH},
    "niah_multikey_3": Kind(_make_needles(NIAH[5]), 80, 620),
    "ruler_vt": Kind(_make_variables, 25.5, 560),
    "ruler_cwe": Kind(_make_common_words, 7.2, 550),
    "ruler_fwe": Kind(_make_frequent_words, 2.32, 50),
    "ruler_qa_squad": Kind(_make_squad, 102, 120),
    "ruler_qa_hotpot": Kind(_make_hotpot, 69, 80),
    "scbench_kv": Kind(_make_kv, 65, 350),
    "scbench_prefix_suffix": Kind(_make_lines, 22, 270),
    "scbench_vt": Kind(_make_tracked, 25, 760),
    "scbench_qa_eng": Kind(_make_book, 95, 160),
    "scbench_choice_eng": Kind(_make_choices, 95, 300),
    "scbench_many_shot": Kind(_make_shots, 26, 140),
    "ledger": Kind(_make_ledger, 36, 400),
    "phonebook": Kind(_make_phonebook, 23.5, 260),
    "magic_number": Kind(_make_magic, 1.44, 190),
}

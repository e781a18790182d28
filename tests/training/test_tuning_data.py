"""The data of the tuning: prompts are the runner's, samples follow from numbers, and an evaluation shares nothing.

`tuning_texts` says what both sides have in common on purpose, and what not.
"""

import json
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from kvbench.config.catalogue import build, load_settings
from kvbench.interfaces.task import Sample
from kvbench.models.chat_template import count_template_tokens
from kvbench.models.embedded import REFERENCE
from kvbench.runs.choose_solvable import SEED as SOLVABLE_SEED
from kvbench.runs.prompt import encode, encode_all
from kvbench.tasks.common import synthetic_prose, synthetic_qa
from kvbench.tasks.ledger import task as ledger
from kvbench.tasks.niah.task import CITIES
from kvbench.tasks.phonebook import PHONES, Phonebook
from kvbench.tasks.ruler.task import FAMILIES, SUBTASKS, Ruler
from kvbench.tasks.ruler.templates import load_wordings
from kvbench.tasks.ruler.texts import load_texts
from kvbench.tasks.ruler.word_counts import WORDS
from kvbench.tasks.scbench.prompts import load_forms
from kvbench.tasks.scbench.task import SCBench
from kvbench.training import tuning_data, tuning_questions, tuning_tasks, tuning_texts
from kvbench.training.training_data import load_needle_wording
from kvbench.training.tuning_batches import choose_length
from kvbench.training.tuning_data import SHARES, TEXT, Coder, TuningData, held_out_text, pack_texts
from kvbench.training.tuning_recipe import TuningRecipe
from kvbench.training.tuning_tasks import KINDS, Conversation, Turn
from kvbench.validation import SettingError

CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LENGTH = 2048
NO_TEXT = {name: share for name, share in SHARES.items() if name != TEXT}
EVALUATED_SEEDS = 0, 1, 2, SOLVABLE_SEED
TALKS = tuple(name for name in KINDS if name.startswith("scbench"))
UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
SMOLLM2 = Path(__file__).parents[2] / ".models/smollm2"


@cache
def load_tokenizer():
    """The embedded model's tokenizer with a chat template such as that of SmolLM2."""
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    return tokenizer


@cache
def load_data() -> TuningData:
    return TuningData(load_tokenizer(), None, NO_TEXT)


def make_conversation(kind: str, number: int, length: int = LENGTH) -> Conversation:
    made = KINDS[kind]
    rng = random.Random(f"{tuning_texts.SEED}/test/{kind}/{number}")
    conversation = made.make(rng, int(0.8 * (length - made.rest) / made.unit), length)
    assert conversation is not None
    return conversation


def make_samples(conversation: Conversation) -> list[Sample]:
    """The turns as a task's samples."""
    return [
        Sample(
            f"talk/{i}", "", conversation.context, turn.question, turn.prefix, (turn.answer,), 1,
            solved=conversation.solved, conversation="talk", said=turn.answer,
        )
        for i, turn in enumerate(conversation.turns)
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_runner_reads_the_same_ids_as_the_tuning(kind):
    tokenizer = load_tokenizer()
    for number in range(2):
        conversation = make_conversation(kind, number)
        check_against_runner(tokenizer, conversation)


def check_against_runner(tokenizer, conversation: Conversation) -> None:
    ids, spans = Coder(tokenizer).encode(conversation)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    prompts = [prompt for _, prompt in encode_all(tokenizer, make_samples(conversation)).values()]
    counted = [(prompt, turn) for prompt, turn in zip(prompts, conversation.turns, strict=True) if turn.counts]
    assert len(spans) == len(counted)
    for (prompt, turn), (begin, stop) in zip(counted, spans, strict=True):
        assert ids[:begin] == list(prompt.ids)
        assert ids[stop - 1] == end
        assert tokenizer.decode(ids[begin : stop - 1], clean_up_tokenization_spaces=False) == turn.answer
    first = list(encode(tokenizer, make_samples(conversation)[0]).ids)
    assert ids[: len(first)] == first
    assert spans[-1][1] == len(ids)
    assert not any(turn.question[0].isspace() for turn in conversation.turns[1:])


@pytest.mark.parametrize("subtask", SUBTASKS)
def test_a_prompt_of_an_evaluation_gets_the_ids_that_its_run_reads(subtask):
    tokenizer = load_tokenizer()
    [sample] = draw_ruler(0, subtask, 1, LENGTH)
    turn = Turn(sample.question, sample.answer_prefix, " " + sample.answers[0])
    ids, [(begin, _)] = Coder(tokenizer).encode(Conversation(sample.context, (turn,), sample.solved))
    assert ids[:begin] == list(encode(tokenizer, sample).ids)


@pytest.mark.parametrize("subtask", SUBTASKS)
def test_a_first_turn_asks_as_the_evaluation_does(subtask):
    """Without what is drawn, question, answer prefix and the beginning of the context are the same."""
    forms = {blank_out(sample) for sample in draw_ruler(0, subtask, 2, LENGTH)}
    made = [make_conversation(subtask, number) for number in range(12)]
    drawn = {
        blank_out(Sample("", "", one.context, one.turns[0].question, one.turns[0].prefix, (), 1, solved=one.solved))
        for one in made
    }
    assert forms & drawn
    assert all(bool(one.solved) == (subtask == "ruler_cwe") for one in made)


def blank_out(sample: Sample) -> tuple[str, str, str]:
    """The prompt's parts without what is drawn: of contexts of vt and cwe all, of others the heading."""
    drawn = rf"{UUID}|\b(?:[\w'.]+-[\w'.-]+(?:, (?:and )?)?)+|\d+|\b[A-Z]{{3,}}(?: [A-Z]{{3,}})+"
    context, question = sample.context, sample.question
    if "VAR " in context:
        context = re.sub(
            rf"(?:(?:{re.escape(load_wordings().noise)}|VAR \w+ = (?:VAR \w+ |\d+))(?:\n|$))+", "#", context
        )
    elif sample.solved:
        context = re.sub(r"(?:\d+\. \S+ ?)+", "#", context)
    else:
        context = context.partition("\n")[0][:70]
    if "given documents" in context:
        question = question.partition("Question: ")[0]
    context, question, prefix = (re.sub(drawn, "#", part) for part in (context, question, sample.answer_prefix))
    return context, question, prefix


def test_common_words_are_rendered_as_in_ruler():
    words = tuning_texts.load_words()
    example, drawn = ({"words": list(words[i : i + 60]), "common": list(words[i : i + 10])} for i in (0, 200))
    made = tuning_tasks.ask_for_common(example, drawn)
    rendered = WORDS[0].render({"example": example, **drawn}, load_texts())
    assert (made.context, made.solved) == (rendered.context, rendered.solved)
    assert (made.turns[0].question, made.turns[0].prefix) == (rendered.question, rendered.answer_prefix)


@pytest.mark.parametrize("name", TALKS)
def test_a_conversation_is_that_of_scbench(name, tmp_path):
    """A row of the tuning in SCBench's format gives the task the same context and questions."""
    for number in range(4):
        check_conversation(make_conversation(name, number), name, tmp_path)


def check_conversation(conversation: Conversation, name: str, folder: Path) -> None:
    form = next(form for form in load_forms() if form.name == name)
    [before, *_] = tuning_tasks.load_scbench_wordings()[name]
    assert conversation.context.startswith(before)
    turns = []
    for turn in conversation.turns:
        asked, answer = turn.question.removeprefix("\n\n"), turn.answer
        if name == "scbench_qa_eng":
            asked = re.fullmatch(r"Question: (.*)\nAnswer:", asked)[1]
        row = {"input": asked, "answer": re.findall("[A-Z]+", answer) if form.answer is list else answer}
        if form.choices:
            row["input"], *options = re.match(
                r"Question: (.*)\nA\. (.*)\nB\. (.*)\nC\. (.*)\nD\. (.*)\n", asked
            ).groups()
            row |= {"options": options, "answer": options["ABCD".index(answer)] if turn.counts else answer}
        turns.append(row)
    row = {"id": 0, "context": conversation.context.removeprefix(before), "multi_turns": turns}
    (folder / f"{name}.jsonl").write_text(json.dumps(row))
    task = SCBench(path=str(folder), subtasks=name, max_turns=None)
    samples = list(task.samples(load_tokenizer(), 30, 100_000))
    assert all(
        turn.counts or sample.said == turn.answer for sample, turn in zip(samples, conversation.turns, strict=True)
    )
    assert [(s.context, s.question, s.answer_prefix) for s in samples] == [
        (conversation.context, turn.question, turn.prefix) for turn in conversation.turns
    ]
    assert all(
        task.score(sample, turn.answer).score == 100
        for sample, turn in zip(samples, conversation.turns, strict=True)
        if turn.counts
    )


def test_letters_and_names_answer_what_the_benchmark_answers(monkeypatch):
    """The same conversations with the benchmark's answers before the last turn, and without."""
    for name in ("scbench_choice_eng", "scbench_vt"):
        monkeypatch.setattr(tuning_tasks, "show_golden", lambda rng, golden: golden)
        golden = [make_conversation(name, number) for number in range(4)]
        monkeypatch.setattr(tuning_tasks, "show_golden", lambda rng, golden: ())
        for shown, plain in zip(golden, (make_conversation(name, number) for number in range(4)), strict=True):
            assert [turn.counts for turn in shown.turns] == [False] * (len(plain.turns) - 1) + [True]
            for theirs, ours in zip(shown.turns[:-1], plain.turns[:-1], strict=True):
                assert theirs.question == ours.question
                if name == "scbench_vt":
                    assert theirs.answer == str(ours.answer.split())
                else:
                    assert f"\n{ours.answer}. {theirs.answer}\n" in ours.question


@pytest.mark.parametrize("subtask", SUBTASKS)
def test_ruler_grades_the_answers_as_right(subtask):
    task = Ruler(samples=1, subtasks=subtask)
    family = next(family for family in FAMILIES if family.name == subtask)
    for number in range(4):
        turn = make_conversation(subtask, number).turns[0]
        parts = (
            re.split(r", |\d+\. | ", turn.answer.strip()) if subtask == "ruler_cwe" else turn.answer.strip().split(", ")
        )
        references = tuple(part for part in parts if part.strip())
        sample = Sample("", subtask, "", "", "", references, family.new_tokens)
        assert task.score(sample, turn.answer).score == 100


@pytest.mark.parametrize("kind", KINDS)
def test_the_context_holds_the_answers(kind):
    """Names, numbers and words of an answer stand in the context, but for results of the ledger and letters."""
    if kind in ("ledger", "scbench_many_shot", "scbench_choice_eng"):
        return
    for number in range(3):
        conversation = make_conversation(kind, number)
        for turn in conversation.turns:
            if not turn.counts:
                continue
            words = kind in ("ruler_vt", "ruler_fwe", "scbench_vt")
            parts = re.split(" " if words else r", |(?:^| )\d+\. ", turn.answer.strip())
            assert all(part.strip() in conversation.context for part in parts), turn


@pytest.mark.parametrize("length", [1024, 3000, *(pytest.param(n, marks=pytest.mark.full) for n in (8192, 16384))])
def test_samples_have_most_of_the_tokens_and_never_more(length):
    data, parts = load_data(), []
    for number in range(20):
        made = data.draw(0, number, length)
        assert made.kind in NO_TEXT
        assert len(made.ids) <= length
        assert all(0 < begin < end <= len(made.ids) for begin, end in made.answers)
        parts.append(len(made.ids) / length)
    assert np.mean(parts) > 0.65


def test_a_sample_follows_from_seed_number_and_length():
    data, other = load_data(), TuningData(load_tokenizer(), None, NO_TEXT)
    first = [data.draw(7, number, 1024) for number in range(6)]
    assert [other.draw(7, number, 1024) for number in (5, 4, 3, 2, 1, 0)] == first[::-1]
    assert data.draw(8, 0, 1024) != first[0] != data.draw(7, 0, 1280)


def test_shares_decide_the_kinds_and_short_lists_come_more_often():
    data = TuningData(load_tokenizer(), None, {"ruler_fwe": 1, "niah_single_1": 0})
    assert {data.draw(0, number, 1024).kind for number in range(5)} == {"ruler_fwe"}
    with pytest.raises(SettingError, match="shares: text needs a folder of packed texts"):
        TuningData(load_tokenizer(), None)
    with pytest.raises(SettingError, match="shares: ruler_vt is -1"):
        TuningData(load_tokenizer(), None, {"ruler_vt": -1})
    with pytest.raises(SettingError, match="shares"):
        TuningData(load_tokenizer(), None, {"ruler": 1})
    with pytest.raises(SettingError, match="no kind of sample is left"):
        TuningData(load_tokenizer(), None, {"ruler_vt": 0})
    with pytest.raises(ValueError, match="no sample of 64 tokens"):
        load_data().draw(0, 0, 64)


def test_every_kind_has_a_share():
    assert set(SHARES) == {*KINDS, TEXT}
    assert set(tuning_data.MORE) < set(KINDS)


def test_packed_texts_are_read_back(tmp_path, monkeypatch):
    for name in ("learned", "kept_back"):
        (tmp_path / name).mkdir()
        lines = "\n".join(f"def f{i}():\n    '''The {name} text number {i} explains a thing.'''\n" for i in range(40))
        (tmp_path / name / "__init__.py").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)
    tokenizer, folder = load_tokenizer(), tmp_path / "texts"
    written = pack_texts(tokenizer, folder, ["learned"], ["kept_back"])
    assert written == json.loads((folder / "texts.json").read_text())
    held = tokenizer.decode(held_out_text(folder)[1:].tolist())
    assert "kept_back text number 39" in held and "learned" not in held
    data = TuningData(tokenizer, folder, {TEXT: 1})
    made = data.draw(0, 3, 128)
    assert made == data.draw(0, 3, 128) != data.draw(0, 4, 128)
    assert (made.kind, made.answers, len(made.ids)) == (TEXT, [(1, 128)], 128)
    assert tokenizer.decode(made.ids) in tokenizer.decode(np.load(folder / "train.npy").tolist())
    with pytest.raises(SettingError, match="learned: for the training or held out, not both"):
        pack_texts(tokenizer, folder, ["learned"], ["learned"])
    with pytest.raises(SettingError, match="not the tokens of packed texts"):
        TuningData(tokenizer, tmp_path / "nowhere")
    assert not set(tuning_data.TRAINED) & set(tuning_data.HELD_OUT)


# What is drawn is in one of both sides only.

TOKEN = re.compile(rf"{UUID}|\d+(?:-\d+)+|\d[\d,]*\d(?!\w)|[^\W_]+")  # codes, numbers with commas, words
SENTENCE = re.compile(r"[^.!?\n]{25,}[.!?]")
PLACES = {*map(str, range(1000))}


def draw_ruler(seed: int, subtask: str, count: int, length: int) -> list[Sample]:
    tokenizer = load_tokenizer()
    task = Ruler(samples=count, subtasks=subtask, seed=seed, length=length, cache=None)
    return list(task.samples(tokenizer, count_template_tokens(tokenizer), length))


def draw_evaluations(seeds: Iterable[int], lengths: Iterable[int], count: int) -> Iterator[str]:
    """All texts of evaluations: RULER's subtasks, SCBench, the phone book and the cities of task=niah."""
    for subtask, seed, length in product(SUBTASKS, seeds, lengths):
        for sample in draw_ruler(seed, subtask, count, length):
            yield "\n".join((sample.context, sample.question, sample.answer_prefix, *sample.answers))
    for sample in SCBench(subtasks=TALKS, limit=count).samples(load_tokenizer(), 30, 100_000):
        yield "\n".join((sample.context, sample.question, *sample.answers))
    book = Phonebook([50], "entries", None, count, 1, "book")
    for sample in book.samples(load_tokenizer(), 30, 100_000):
        yield "\n".join((sample.context, sample.question, *sample.answers))
    yield " ".join(CITIES)


def draw_tuning(count: int) -> Iterator[str]:
    for kind, number in product(KINDS, range(count)):
        conversation = make_conversation(kind, number)
        turns = (part for turn in conversation.turns for part in (turn.question, turn.prefix, turn.answer))
        yield "\n".join((conversation.context, *turns))


@cache
def read_wordings() -> frozenset[str]:
    """Every word of the templates of an evaluation. The tuning's word list has none of them."""
    forms = [(form.wording.before, form.wording.asked, form.wording.later) for form in load_forms()]
    prose = synthetic_prose.OPENERS, synthetic_prose.CLAUSES, synthetic_prose.JOINS, synthetic_prose.TAILS
    documents = synthetic_qa.PARAGRAPHS, synthetic_qa.PEOPLE, synthetic_qa.LIVES, synthetic_qa.BRIDGES
    others = asdict(load_wordings()), forms, load_needle_wording(), ledger.CONTEXT, ledger.QUESTION, asdict(PHONES)
    rows = (
        "Document JSON data: Which line begins with and ends in? Line: Which is larger? (A) (B) Answer: VAR uuid uuids"
    )
    return find_words((*prose, *documents, *others, synthetic_qa.MONTHS, rows))


@cache
def read_own_wordings() -> frozenset[str]:
    """Every word of the templates of the tuning's sentences and documents."""
    prose = tuning_texts.OPENINGS, tuning_texts.MAINS, tuning_texts.LINKS, tuning_texts.CLOSINGS
    return find_words((*prose, tuning_questions.FACTS.read_text(), "he she his her it its a an is was"))


def find_words(parts: Iterable[object]) -> frozenset[str]:
    texts = (re.sub(r"\\n|{\w+}", " ", repr(part)) for part in parts)
    return frozenset(word.lower() for text in texts for word in TOKEN.findall(text))


def find_drawn(texts: Iterable[str]) -> set[str]:
    """The words, names, numbers and codes of texts, without numbers below 1000 and the places of a numbered list."""
    drawn = set()
    for text in texts:
        for word in TOKEN.findall(re.sub(r"\b\d+\. (?=[a-z])", " ", text)):
            if not (word[:1].isdigit() and word.replace(",", "").isdigit() and int(word.replace(",", "")) < 1000):
                drawn.add(word)
    return drawn


MANY = pytest.param(EVALUATED_SEEDS, (1024, 4096, 8192), 6, 60, marks=pytest.mark.full, id="many")


@pytest.mark.parametrize(
    ("seeds", "lengths", "evaluated", "tuned"), [pytest.param((0, SOLVABLE_SEED), (1024,), 1, 3, id="few"), MANY]
)
def test_no_word_name_number_code_or_sentence_is_in_both(seeds, lengths, evaluated, tuned):
    theirs, ours = tuple(draw_evaluations(seeds, lengths, evaluated)), tuple(draw_tuning(tuned))
    one, other = find_drawn(theirs), find_drawn(ours)
    assert min(len(one), len(other)) > 1500
    wordings = read_wordings() | read_own_wordings()
    assert not {word for word in one & other if word.lower() not in wordings}
    one, other = ({sentence for text in texts for sentence in SENTENCE.findall(text)} for texts in (theirs, ours))
    assert min(len(one), len(other)) > 300
    assert not {
        text for text in one & other if not {w.lower() for w in TOKEN.findall(text)} <= read_wordings() | PLACES
    }


def test_the_word_list_has_no_word_of_an_evaluation():
    words = set(tuning_texts.load_words())
    assert len(words) == len(tuning_texts.load_words()) > 4000
    assert not words & tuning_texts.load_evaluated_words()
    assert not {word for word in words if word in read_wordings()}
    assert all(re.fullmatch("[a-z]{4,12}", word) for word in words)


def test_questions_and_facts_have_their_own_wordings():
    theirs = [text.lower() for _, asked in synthetic_qa.PARAGRAPHS for text, _ in asked]
    theirs += [text.lower() for text, _ in synthetic_qa.BRIDGES]
    blank = {re.sub(r"{\w+}", "#", text) for text in theirs}
    facts = [fact for listed in tuning_questions.load_facts().by_subject.values() for fact in listed]
    ours = {re.sub(r"{\w+}", "#", text.lower()) for fact in facts for text in fact.asked}
    assert not ours & blank
    nouns = {*tuning_questions.load_facts().things, *tuning_questions.load_facts().work}
    assert not nouns & {"novel", "opera", "canal", "painting", "park", "bridge", "mapmaker", "composer", "engineer"}


def test_names_numbers_and_codes_differ_by_their_form():
    rng = random.Random("form")
    for _ in range(3000):
        name = tuning_texts.draw_name(rng)
        assert not tuning_texts.EVALUATED.fullmatch(name)
        assert name.lower() not in tuning_texts.load_evaluated_words()
        assert tuning_texts.draw_uuid(rng)[14] in tuning_texts.VERSIONS
        assert not 1580 <= int(tuning_texts.draw_date(rng)[-4:]) <= 1949
        assert re.fullmatch(r"\d{3},\d{3}", tuning_texts.draw_count(rng))
    inventor = synthetic_qa.Inventor("form")
    assert all(tuning_texts.EVALUATED.fullmatch(inventor.draw("name")) for _ in range(300))
    assert all(tuning_texts.EVALUATED.fullmatch(synthetic_prose.draw_short_name(rng)) for _ in range(300))
    assert 7 not in tuning_texts.DIGITS
    assert "4" not in tuning_texts.VERSIONS


def test_a_name_of_an_evaluation_is_drawn_again():
    start, end = synthetic_prose.STARTS[0], synthetic_prose.ENDS[0]
    other = "rokka"
    assert tuning_texts.EVALUATED.fullmatch(start + end) and not tuning_texts.EVALUATED.fullmatch(start + other)
    rng = random.Random("again")
    names = {tuning_texts.draw_name(rng, ((start,), (end, other))) for _ in range(60)}
    assert (start + end).capitalize() not in names and (start + other).capitalize() in names


FORMS = {  # subtask -> patterns of what is drawn, which have other lengths in a tuning
    "ruler_vt": (r"VAR ([A-Z]+)", r"= (\d+)"),
    "niah_multivalue": (r" is: (\d+)\.",),
    "ruler_fwe": (r"\b([a-z]+) \.\.\.",),
    "scbench_prefix_suffix": (r"\b([0-9a-f]{16,})\b",),
}


@pytest.mark.parametrize("subtask", FORMS)
def test_values_variables_and_codes_have_other_lengths(subtask):
    """Chance alone would let few of them be in both."""
    if subtask in TALKS:
        samples = SCBench(subtasks=[subtask], limit=2).samples(load_tokenizer(), 30, 100_000)
        theirs = [sample.context for sample in samples]
    else:
        theirs = [sample.context for sample in draw_ruler(0, subtask, 2, LENGTH)]
    ours = [make_conversation(subtask, number).context for number in range(16)]
    for pattern in FORMS[subtask]:
        lengths = [{len(part) for text in texts for part in re.findall(pattern, text)} for texts in (theirs, ours)]
        assert all(lengths) and not lengths[0] & lengths[1], (pattern, lengths)


def test_no_sentence_has_the_template_of_an_evaluation():
    """Whatever fills their slots, sentences of both sides differ in more than the words drawn."""

    def blank(templates: Iterable[str]) -> set[str]:
        return {re.sub(r"\W*{\w+}\W*", " # ", text).strip(" ,").lower() for text in templates}

    theirs = [
        *(synthetic_prose.OPENERS, synthetic_prose.CLAUSES, synthetic_prose.TAILS),
        *([text for text, _ in synthetic_qa.PARAGRAPHS], synthetic_qa.LIVES),
    ]
    ours = tuning_texts.OPENINGS, tuning_texts.MAINS, tuning_texts.CLOSINGS
    one, other = (blank(text for part in parts for text in part if "{" in text) for parts in (theirs, ours))
    assert min(len(one), len(other)) > 30
    assert not one & other


def test_names_of_a_sample_share_syllables_and_no_evaluation_has_them(monkeypatch):
    monkeypatch.setattr(tuning_questions, "ALIKE", 1.0)
    inventor = tuning_questions.Inventor(random.Random("alike"))
    names = [inventor.draw("name") for _ in range(400)]
    assert len(set(names)) == 400 and all(5 <= len(name) <= 10 for name in names)
    assert len({name[:3] for name in names}) < 200
    assert not any(tuning_texts.EVALUATED.fullmatch(name) or name in CITIES for name in names)
    parts = [f"(?:{'|'.join(part)})" for part in (tuning_texts.ONSETS, tuning_texts.VOWELS, tuning_texts.CODAS)]
    made = re.compile("{0}{1}(?:{0}{1}{2}){{1,2}}".format(*parts))  # so that `CITIES` excludes what it must
    assert all(made.fullmatch(name.lower()) for name in names)
    monkeypatch.setattr(tuning_questions, "ALIKE", 0.0)
    inventor = tuning_questions.Inventor(random.Random("alike"))
    assert len({inventor.draw("name")[:3] for _ in range(400)}) > 200


def test_no_name_is_a_city_of_the_needle_task():
    parts = [f"(?:{'|'.join(part)})" for part in (tuning_texts.ONSETS, tuning_texts.VOWELS, tuning_texts.CODAS)]
    made = re.compile("{0}{1}(?:{0}{1}{2}){{1,2}}".format(*parts))
    assert {city for city in CITIES if len(city) >= 5 and made.fullmatch(city.lower())} == set(tuning_texts.CITIES)


def test_seeds_cannot_collide(monkeypatch):
    seeds: list[object] = []

    class Recording(random.Random):
        def __init__(self, seed=None):
            seeds.append(seed)
            super().__init__(seed)

    monkeypatch.setattr(random, "Random", Recording)
    for kind in ("ruler_qa_squad", "ruler_qa_hotpot", "niah_multikey_2", "ruler_vt", "ruler_cwe", "ledger"):
        load_data().draw_kind(kind, 0, 0, 1024)
    load_data().draw(0, 0, 1024)
    choose_length(TuningRecipe(), 3)
    assert seeds
    assert all(str(seed).startswith("kvbench tuning/") for seed in seeds)
    seeds.clear()
    draw_ruler(0, "niah_single_2", 1, 1024)
    list(SCBench(subtasks=["scbench_kv"]).samples(load_tokenizer(), 30, 100_000))
    book = Phonebook([20], "entries", 2, 1, 1, "book")
    others = [build("task", load_settings("task", name, {"limit": 1, "seed": 0})) for name in ("ledger", "niah")]
    for task in (book, *others):
        next(iter(task.samples(load_tokenizer(), 30, 100_000)))
    assert len(seeds) > 10
    assert not any(str(seed).startswith("kvbench tuning") for seed in seeds)


@pytest.mark.full
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="smollm2 is not there: run make model")
@pytest.mark.parametrize("kind", KINDS)
def test_smollm2_reads_the_same_ids(kind):
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    for number in range(8):
        check_against_runner(tokenizer, make_conversation(kind, number))

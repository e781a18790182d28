"""LongBench: official prompts to the byte, official truncation, lm-eval's port, any copy of the data, whole runs."""

import hashlib
import json
import pickle
import random
import re
import sys
import zipfile
from collections.abc import Iterator
from difflib import SequenceMatcher
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from itertools import groupby
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.utils import apply_template
from pyarrow import Table, parquet
from transformers import AutoTokenizer

from kvbench.cli.data import examine
from kvbench.config.compose import compose_config
from kvbench.interfaces.task import Sample
from kvbench.models.embedded import REFERENCE
from kvbench.runs.prompt import encode
from kvbench.runs.spec import RunSpec
from kvbench.tasks.lm_eval.loader import PACKAGE
from kvbench.tasks.longbench import chinese, miniature, task
from kvbench.tasks.longbench.chinese import load_cutter
from kvbench.tasks.longbench.miniature import make_rows
from kvbench.tasks.longbench.prompts import load_official_prompt
from kvbench.tasks.longbench.subtasks import CATEGORIES, CHINESE, E_NAMES, ENGLISH, NAMES, SUBTASKS
from kvbench.tasks.longbench.task import LongBench
from kvbench.tasks.longbench.truncation import CONTEXT, NOTHING, QUESTION, truncate_middle
from kvbench.validation import SettingError
from tests.support.command_line import assert_refused, run_cli
from tests.support.selection import only_in_full

NO_TEMPLATE = {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
TOKENIZER = AutoTokenizer.from_pretrained(REFERENCE)


def samples(longest: int = 4096, **settings) -> list[Sample]:
    return list(LongBench(**settings).samples(TOKENIZER, 1, longest))


@pytest.fixture(scope="module", autouse=True)
def dictionary() -> None:
    """jieba's dictionary, which is read once for all tests."""
    load_cutter()


@cache
def pack_rows(name: str) -> bytes:
    return pickle.dumps(list(make_rows(name)))


@pytest.fixture(scope="module", autouse=True)
def each_subtask_of_the_miniature_is_made_once() -> Iterator[None]:
    """Tests are given copies."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(miniature, "make_rows", lambda name: iter(pickle.loads(pack_rows(name))))
        yield


@pytest.fixture(scope="module")
def every() -> list[Sample]:
    return samples(subtasks="all21")


@pytest.fixture
def folder(tmp_path) -> Path:
    """The miniature as files."""
    (tmp_path / "copy" / "data").mkdir(parents=True)
    for name in NAMES:
        lines = "".join(json.dumps(row) + "\n" for _, row in miniature.make_rows(name))
        (tmp_path / "copy" / "data" / f"{name}.jsonl").write_text(lines)
    return tmp_path / "copy"


# Prompts


def test_the_prompts_are_the_official_ones():
    """The hashes are those of config/dataset2prompt.json's strings."""
    hashes = (
        (ENGLISH, "c9543dd43c893ba18b183361b6d7207fe97ac48f6aaad2f3c3494e63de317305"),
        (CHINESE, "801bd36fa39121ec76224202a46f1a1a1c281bdf1c2921fd8e0eabf22cc6d57f"),
    )
    for names, expected in hashes:
        texts = ["".join(load_official_prompt(name).render("{context}", "{input}")) for name in names]
        assert hashlib.sha256("\0".join(texts).encode()).hexdigest() == expected


def test_context_and_question_joined_are_the_prompt(every):
    made = iter(every)
    for name in NAMES:
        for (_, row), sample in zip(make_rows(name), made, strict=False):
            own = load_official_prompt(name)
            assert sample.context == own.before + row["context"] and sample.answer_prefix == ""
            assert sample.question == own.after.replace("{{question}}", row["input"])
            assert row["input"] in sample.question and sample.answers == tuple(row["answers"])
            assert (sample.uid, sample.subtask) == (f"{name}/{row['_id']}", name)
            assert sample.meta["length"] == row["length"] and sample.meta["left_out_of"] == NOTHING
    assert next(made, None) is None


def test_a_place_for_the_question_in_a_row_is_text():
    assert load_official_prompt("qasper").render("{{question}}", "{{context}}")[0].endswith("Article: {{question}}")
    assert "Question: {{context}}\n" in load_official_prompt("qasper").render("", "{{context}}")[1]


def test_limits_templates_and_ends(every):
    by_name = {sample.subtask: sample for sample in every}
    assert list(by_name) == list(NAMES)
    assert {name for name, sample in by_name.items() if not sample.chat} == NO_TEMPLATE
    limits = dict.fromkeys(NAMES, 32) | dict.fromkeys(("narrativeqa", "qasper", "samsum", "dureader"), 128)
    limits |= dict.fromkeys(("multifieldqa_en", "multifieldqa_zh", "trec", "lsht", "lcc", "repobench-p"), 64)
    limits |= dict.fromkeys(("gov_report", "qmsum", "multi_news", "vcsum"), 512)
    assert {name: sample.max_new_tokens for name, sample in by_name.items()} == limits
    assert {name for name, sample in by_name.items() if sample.ends or sample.min_new_tokens} == {"samsum"}
    assert TOKENIZER.decode(by_name["samsum"].ends) == "\n" and by_name["samsum"].min_new_tokens == 1


def test_samples_depend_neither_on_the_choice_nor_on_the_limit(every):
    some = samples(subtasks=["trec", "narrativeqa"], limit=2)
    assert [sample.subtask for sample in some] == ["trec"] * 2 + ["narrativeqa"] * 2
    known = {sample.uid: sample for sample in every}
    assert len(known) == len(every) and all(known[sample.uid] == sample for sample in some)
    assert [sample.uid for sample in every if sample.subtask == "trec"][:2] == [sample.uid for sample in some][:2]


def test_samples_on_one_context_are_a_group(every):
    groups = [{sample.group for sample in own} for _, own in groupby(every, lambda sample: sample.context)]
    assert all(len(own) == 1 for own in groups) and len(groups) == len(set.union(*groups)) < len(every)


# Truncation


class Lossy:
    """A tokenizer whose decoding loses the blank before a comma, as some models' do."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return TOKENIZER.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return TOKENIZER.decode(ids, skip_special_tokens=skip_special_tokens).replace(" ,", ",")


def official(tokenizer, text: str, most: int) -> str:
    """What pred.py makes of a prompt."""
    ids = tokenizer.encode(text)
    if len(ids) <= most:
        return text
    half = int(most / 2)
    return tokenizer.decode(ids[:half], skip_special_tokens=True) + tokenizer.decode(
        ids[-half:], skip_special_tokens=True
    )


words = st.lists(
    st.sampled_from(["river", "Éclair", " ", "\n\n", ".", " ,", "don't", "1234", "漢字", "</s>"]), min_size=1
)


@given(words, words, st.integers(2, 60), st.sampled_from([TOKENIZER, Lossy()]))
def test_the_two_parts_are_the_official_prompt(before, after, most, tokenizer):
    context, question = " ".join(before), "\n\nNow, " + " ".join(after)
    short, rest, of = truncate_middle(tokenizer, context, question, most)
    assert short + rest == official(tokenizer, context + question, most)
    if of == NOTHING:
        assert (short, rest) == (context, question) and len(tokenizer.encode(context + question)) <= most
    elif tokenizer is TOKENIZER and "\ufffd" not in short + rest:  # no token of a part of a character stands alone
        kept = range(len(short) + 1)
        assert any(context.startswith(short[:place]) and context.endswith(short[place:]) for place in kept)
        assert (rest == question) == (of == CONTEXT)


def test_where_a_prompt_is_cut():
    context, question = "river " * 100, "Where does it end ?"
    tokens = len(TOKENIZER.encode(context + question))
    assert truncate_middle(TOKENIZER, context, question, tokens) == (context, question, NOTHING)
    short, rest, of = truncate_middle(TOKENIZER, context, question, tokens - 1)
    assert (rest, of) == (question, CONTEXT) and short.startswith("river river") and len(short) < len(context)
    assert truncate_middle(TOKENIZER, context, question, 51) == truncate_middle(TOKENIZER, context, question, 50)
    few = len(TOKENIZER.encode(question)) - 2  # fewer than the question: it is cut, and its beginning goes
    short, rest, of = truncate_middle(TOKENIZER, context, question, few)
    assert of == QUESTION and set(short.split()) == {"river"} and question.endswith(rest) and rest != question
    short, rest, of = truncate_middle(TOKENIZER, "river", question * 9, 20)  # the front reaches the question
    assert of == QUESTION and short == "river" and rest.startswith("Where") and rest.endswith("end ?")
    short, rest, of = truncate_middle(Lossy(), context, "\n\nWhere , and when?", 40)
    assert of == CONTEXT and rest == "\n\nWhere, and when?" and set(short.split()) == {"river"}


def test_the_window_says_how_long_a_prompt_may_be(monkeypatch):
    asked = []

    def seen(tokenizer, context, question, most):
        asked.append(most)
        return context, question, NOTHING

    monkeypatch.setattr(task, "truncate_middle", seen)
    for longest in (4096, 8192, 16384, 32768, 131072):
        samples(longest, subtasks="trec", limit=1)
    samples(subtasks="trec", limit=1, max_length=7950, longest=8192)
    assert asked == [3500, 7500, 15500, 31500, 127500, 7950]  # model2maxlen's four, and the papers' at 128k


def test_a_length_that_the_model_does_not_take_is_refused():
    with pytest.raises(SettingError, match="^task.max_length=null: a model that takes 1000 tokens needs a number here"):
        samples(longest=1000, subtasks="trec")
    some = ["qasper", "gov_report", "trec", "multi_news"]
    needs = (
        r"at least \d+ for gov_report, \d+ for multi_news with the answer, the model takes 1200 tokens; give a smaller"
    )
    with pytest.raises(SettingError, match=rf"^task.max_length=9000: {needs} number; what fits: .*=\[qasper,trec\]$"):
        next(LongBench(subtasks=some, max_length=9000).samples(TOKENIZER, 1, 1200))
    assert samples(longest=1200, subtasks="gov_report", max_length=600)[0].meta["left_out_of"] == CONTEXT


def test_the_middle_goes_before_the_chat_template_comes():
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    tokenizer.chat_template = "{% for m in messages %}<u>{{ m.content }}</u><a>{% endfor %}"
    for name, wrapped in (("hotpotqa", True), ("trec", False)):
        whole = samples(subtasks=name, limit=1)[0]
        [sample] = LongBench(subtasks=name, limit=1, max_length=200).samples(tokenizer, 9, 4096)
        short = official(TOKENIZER, whole.context + whole.question, 200)
        text = tokenizer.decode(encode(tokenizer, sample).ids, skip_special_tokens=True)
        assert text == (f"<u>{short}</u><a>" if wrapped else short) and sample.question == whole.question


# Scores


def test_scores_are_the_best_of_the_answers_in_points():
    task = LongBench()

    def score(name: str, output: str, *answers: str, **meta) -> tuple[float, str]:
        sample = Sample("u", name, "", "", "", answers, 1, meta=meta)
        graded = task.score(sample, output)
        return graded.score, graded.answer

    assert score("hotpotqa", "Paris\nor not", "Rome", "paris or not") == (100.0, "Paris\nor not")
    assert score("triviaqa", "\nParis\nPassage", "Rome", "paris") == (100.0, "Paris")
    assert score("samsum", "\n\na b\nc", "a b")[0] == pytest.approx(100.0)
    assert score("trec", "Food and drink\nSport", "Food", all_classes=["Food", "Food and drink"]) == (
        50.0,
        "Food and drink",
    )
    assert score("passage_retrieval_en", "Paragraph 3 or 4", "Paragraph 4")[0] == 50.0
    assert score("passage_count", "3", "3")[0] == 100.0
    assert score("lcc", "# it\nx = 1\ny", "x = 1") == (100.0, "x = 1")
    assert score("gov_report", "", "a b") == (0.0, "")
    assert score("lsht", "\n工业品\n农产品", "工业品", all_classes=["工业品", "农产品"]) == (100.0, "工业品")
    assert score("passage_retrieval_zh", "段落3或4", "段落4")[0] == 50.0
    assert score("multifieldqa_zh", "在北京，\n。", "上海", "在 北京")[0] == 100.0
    assert score("dureader", "", "北京") == (0.0, "")


def test_averages_are_those_of_the_papers():
    means = LongBench().averages
    assert list(means) == ["mean of 16 tasks", "mean of 6 categories", *CATEGORIES] and len(CATEGORIES) == 6
    assert all(sum(weights.values()) == pytest.approx(1) for weights in means.values())
    scores = {subtask.name: 10.0 * list(CATEGORIES).index(subtask.category) for subtask in SUBTASKS}

    def mean(name: str) -> float:
        return sum(scores[own] * weight for own, weight in means[name].items())

    assert [mean(name) for name in CATEGORIES] == pytest.approx([0, 10, 20, 30, 40, 50])
    assert mean("mean of 6 categories") == pytest.approx(25)
    assert mean("mean of 16 tasks") == pytest.approx((3 * (0 + 10 + 20 + 30) + 2 * (40 + 50)) / 16)
    some = LongBench(subtasks=["lcc", "trec", "repobench-p"]).averages
    assert list(some) == ["mean of 3 tasks", "code"] and some["code"] == {"lcc": 0.5, "repobench-p": 0.5}


def test_averages_keep_their_meaning_beside_the_chinese_tasks():
    english, chinese, all21 = (LongBench(subtasks=own).averages for own in ("all", "chinese", "all21"))
    assert chinese == dict.fromkeys(("mean of 5 tasks", "Chinese"), dict.fromkeys(CHINESE, 0.2))
    assert all21.pop("mean of 21 tasks") == dict.fromkeys(NAMES, 1 / 21)
    assert all21 == english | {"Chinese": chinese["Chinese"]} and list(all21)[:2] == list(english)[:2]


def test_all_means_the_16_english_and_code_tasks():
    """Their hash is that of runs that were made before kvbench had the Chinese tasks."""
    assert LongBench().fingerprint() == LongBench(subtasks=list(ENGLISH)).fingerprint() == "57c013caca3a895c"
    assert LongBench(protocol="lm_eval").fingerprint() == "9ee577c752b33aef"
    assert list(LongBench().inventory()) == list(ENGLISH) and len(ENGLISH) == 16
    assert list(LongBench(subtasks="all21").inventory()) == list(NAMES) and len(NAMES) == 21
    assert LongBench(subtasks=["all21"]).inventory() == LongBench(subtasks="all21").inventory()
    assert list(LongBench(subtasks="chinese").inventory()) == list(CHINESE) and set(NAMES) - set(ENGLISH) == set(
        CHINESE
    )


# lm-eval's protocol


def port(name: str) -> dict:
    """lm-eval's file of a subtask, its metric by name."""

    class Loader(yaml.SafeLoader):
        """Reads a function's name as a text."""

    Loader.add_constructor("!function", lambda loader, node: node.value)
    return yaml.load((PACKAGE / "longbench" / f"{name}.yaml").read_text(), Loader)


@pytest.fixture
def metrics(monkeypatch) -> ModuleType:
    """lm-eval's module of metrics, with the words of `load_cutter`. Of the package that is not here, fuzzywuzzy, the
    ratio without python-Levenshtein is difflib's in whole per cent.
    """

    def ratio(one: str, other: str) -> int:
        return int(round(100 * SequenceMatcher(None, one, other).ratio()))

    jieba = SimpleNamespace(cut=lambda text, cut_all: load_cutter()(text))
    monkeypatch.setitem(sys.modules, "jieba", jieba)
    monkeypatch.setitem(sys.modules, "fuzzywuzzy", SimpleNamespace(fuzz=SimpleNamespace(ratio=ratio)))
    spec = spec_from_file_location("longbench_port", PACKAGE / "longbench" / "metrics.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_lm_evals_prompts_stop_texts_and_limits():
    made = samples(protocol="lm_eval", limit=1, subtasks="all21")
    assert [sample.subtask for sample in made] == list(NAMES)
    official = samples(limit=1, subtasks="all21")
    for sample, its in zip(made, official, strict=True):
        [(_, row), own] = next(make_rows(sample.subtask)), port(sample.subtask)
        document = row | {"question": row["input"]}
        assert sample.context + sample.question == apply_template(own["doc_to_text"], document)
        assert sample.context == its.context and not sample.chat and sample.answer_prefix == ""
        asked = own["generation_kwargs"]
        assert (list(sample.until), sample.max_new_tokens) == (asked["until"], asked["max_gen_toks"])
        assert asked["do_sample"] is False and (sample.ends, sample.min_new_tokens) == ((), 0)
    assert {sample.subtask for sample in made if sample.until} == {"trec", "triviaqa", "samsum", "lsht"}
    others = {sample.subtask for sample, its in zip(made, official, strict=True) if sample.question != its.question}
    assert others == {"triviaqa", "samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p"}
    assert len({LongBench(protocol=own).fingerprint() for own in ("official", "lm_eval")}) == 2


WORDS = ["Rome", "the", "Paris ,", "\n", " ", ".", "# x", "x = 1", "7", "Paragraph 7", "// y", "a. b", "\t", "Number"]
WORDS += ["段落7", "北京", "，", "。", "农产品", "送到了"]


@pytest.mark.parametrize("name", NAMES)
def test_lm_evals_scores(metrics, name):
    """Of answers drawn from words of the references and of others."""
    draw, task = random.Random(name), LongBench(protocol="lm_eval", subtasks=name)
    grade = getattr(metrics, port(name)["process_results"].removeprefix("metrics."))
    seen = set()
    for sample, (_, row) in zip(task.samples(TOKENIZER, 1, 4096), make_rows(name), strict=True):
        words_ = WORDS + " ".join(sample.answers).split() + list(sample.answers)
        for _ in range(100):
            output = "".join(draw.choices(words_, k=draw.randint(0, 6)))
            points = 100 * grade(row, [output])["score"]
            assert task.score(sample, output).score == pytest.approx(points, abs=1e-9), output
            seen.add(round(points))
    assert len(seen) > 1


def test_the_protocols_grade_code_and_first_lines_in_their_own_way():
    answers = {}
    for protocol in ("official", "lm_eval"):
        task = LongBench(protocol=protocol, limit=1, subtasks=["triviaqa", "lcc"])
        trivia, code = task.samples(TOKENIZER, 1, 4096)
        answers[protocol] = [task.score(code, " \nx = 1").answer, task.score(trivia, "\nParis\nRome").answer]
    assert answers == {"official": [" ", "Paris"], "lm_eval": ["x = 1", "Paris\nRome"]}


def test_lm_evals_protocol_shortens_no_prompt():
    with pytest.raises(SettingError, match=r"^task.max_length=null: at least \d+ for narrativeqa, \d+ .* takes 400 "):
        samples(longest=400, protocol="lm_eval")
    short = samples(longest=400, protocol="lm_eval", max_length=200, subtasks="narrativeqa")
    assert {sample.meta["left_out_of"] for sample in short} == {CONTEXT}


# LongBench-E


def make_e_files(folder: Path, *names: str) -> Path:
    """Files of LongBench-E: the miniature's four rows, two of 3999 and 4000 words and two of 7999 and 8000."""
    (folder / "data").mkdir(exist_ok=True)
    for name in names:
        rows = (row | {"length": own} for own, (_, row) in zip((8000, 3999, 4000, 7999), make_rows(name), strict=True))
        (folder / "data" / f"{name}_e.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_longbench_e_has_13_tasks_in_three_rows_by_length(tmp_path):
    folder = make_e_files(tmp_path, *E_NAMES)
    task = LongBench(path=str(folder), variant="e")
    task.check()
    assert len(E_NAMES) == 13 and set(ENGLISH) - set(E_NAMES) == {"narrativeqa", "musique", "qmsum"}
    rows = [f"{name}/{interval}" for name in E_NAMES for interval in ("0-4k", "4-8k", "8k+")]
    assert task.inventory() == {row: 2 if row.endswith("4-8k") else 1 for row in rows}
    made = list(task.samples(TOKENIZER, 1, 4096))
    assert [sample.meta["length"] for sample in made] == [3999, 4000, 7999, 8000] * 13
    assert list(dict.fromkeys(sample.subtask for sample in made)) == rows
    plain = {sample.uid: sample for sample in samples(subtasks=list(E_NAMES))}
    assert {sample.uid: sample.question for sample in made} == {uid: own.question for uid, own in plain.items()}
    limited = LongBench(path=str(folder), variant="e", limit=1).samples(TOKENIZER, 1, 4096)
    assert [sample.subtask for sample in limited] == rows
    means = task.averages
    assert list(means) == ["mean of 13 tasks", "0-4k", "4-8k", "8k+"]
    assert means["mean of 13 tasks"] == pytest.approx(dict.fromkeys(rows, 1 / 39))
    assert means["8k+"] == pytest.approx({f"{name}/8k+": 1 / 13 for name in E_NAMES})
    short = LongBench(variant="e", subtasks="lcc")  # the miniature has no long rows
    assert short.averages == {"mean of 1 tasks": {"lcc/0-4k": 1.0}, "0-4k": {"lcc/0-4k": 1.0}}
    assert [sample.subtask for sample in short.samples(TOKENIZER, 1, 4096)] == ["lcc/0-4k"] * 4


@pytest.mark.parametrize("name", ["qasper", "triviaqa"])
def test_rows_of_longbench_e_have_the_scores_of_scorer_e(tmp_path, metrics, monkeypatch, name):
    """lm-eval's package has a copy of the benchmark's function."""
    monkeypatch.setitem(sys.modules, "metrics", metrics)
    spec = spec_from_file_location("longbench_utils", PACKAGE / "longbench" / "utils.py")
    utils = module_from_spec(spec)
    spec.loader.exec_module(utils)
    task = LongBench(path=str(make_e_files(tmp_path, name)), variant="e", subtasks=name)
    made = list(task.samples(TOKENIZER, 1, 4096))
    outputs = [f"{sample.answers[0]}{' and more' * place}\nQ" for place, sample in enumerate(made)]
    found: dict[str, list[float]] = {}
    for sample, output in zip(made, outputs, strict=True):
        found.setdefault(sample.subtask.partition("/")[2], []).append(task.score(sample, output).score)
    lengths = [sample.meta["length"] for sample in made]
    expected = utils.scorer_e(name, outputs, [sample.answers for sample in made], lengths, [])
    assert {own: sum(scores) / len(scores) for own, scores in found.items()} == pytest.approx(expected, abs=0.005)
    assert len(set(expected.values())) == 3


def test_lm_evals_prompts_are_those_of_its_tasks_of_longbench_e():
    for name in E_NAMES:
        for key in ("doc_to_text", "generation_kwargs", "process_results"):
            assert port(f"{name}_e")[key] == port(name)[key]


def test_files_of_longbench_e_are_found_and_not_mixed_up(folder, tmp_path):
    make_e_files(folder, "lcc", "trec")
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as packed:
        packed.write(folder / "data" / "lcc_e.jsonl", "LongBench/data/lcc_e.jsonl")
    file = folder / "data" / "lcc_e.jsonl"
    paths = (folder, tmp_path / "data.zip", file)
    hashes = {LongBench(path=str(path), variant="e", subtasks="lcc").fingerprint() for path in paths}
    assert len(hashes) == 1 and LongBench(path=str(folder), subtasks="lcc").fingerprint() not in hashes
    assert list(LongBench(path=str(file), variant="e").inventory()) == ["lcc/0-4k", "lcc/4-8k", "lcc/8k+"]
    assert re.search(r"^lcc/4-8k +2 rows$", examine("longbench", str(file), ["task.variant=e"]), re.MULTILINE)
    with pytest.raises(SettingError, match="task.varient"):
        examine("longbench", str(file), ["task.varient=e"])
    rows = [json.loads(line) | {"dataset": "lcc_e"} for line in file.read_text().splitlines()]
    for own, said in (
        ({"path": str(file)}, "task.variant=null: lcc_e.jsonl is read with task.variant=e"),
        ({"path": str(folder / "data" / "lcc.jsonl"), "variant": "e"}, "task.variant=e: lcc.jsonl is read with task.v"),
        ({"variant": "E"}, "task.variant=E: did you mean e? Choose one of null, e"),
        ({"variant": "e", "subtasks": "musique"}, "task.subtasks=musique: choose one of all, qasper, multifieldqa_en"),
    ):
        with pytest.raises(SettingError, match="^" + re.escape(said)):
            LongBench(**own).check()
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    LongBench(path=str(file), variant="e").check()  # copies differ in what they call the data set


# Data


def test_every_copy_of_the_data_is_the_same(folder, tmp_path, monkeypatch, every):
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as packed:
        for name in NAMES:
            packed.write(folder / "data" / f"{name}.jsonl", f"data/{name}.jsonl")
    with zipfile.ZipFile(tmp_path / "front.zip", "w") as packed:  # a folder in front, a mark, lengths as text
        for name in NAMES:
            rows = ({**row, "length": str(row["length"])} for _, row in make_rows(name))
            packed.writestr(f"LongBench/data/{name}.jsonl", "\ufeff" + "\n".join(map(json.dumps, rows)))
    asked = []

    def fetch(*where, **more):
        asked.append((*where, *more.values()))
        return str(tmp_path / "data.zip")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    paths = (folder, folder / "data", tmp_path / "data.zip", tmp_path, tmp_path / "front.zip")
    own = LongBench(path=str(folder), subtasks="all21")
    for path, kind in (*((str(path), "local") for path in paths), ("hub", "hub")):
        task = LongBench(path=path, subtasks="all21")
        task.check()
        assert task.inventory() == dict.fromkeys(NAMES, 4)
        assert task.fingerprint() == own.fingerprint() != LongBench(subtasks="all21").fingerprint()
        if path in (str(folder / "data"), str(tmp_path / "data.zip")):
            continue  # read as the folder and as what is downloaded
        found = list(task.samples(TOKENIZER, 1, 4096))
        assert {sample.meta["data"] for sample in found} == {kind}
        assert [(s.uid, s.context, s.question, s.answers, s.group) for s in found] == [
            (s.uid, s.context, s.question, s.answers, s.group) for s in every
        ]
    assert asked == [("zai-org/LongBench", "data.zip", "dataset", "5e628be450b7e67fb7ae6e201bd6d8f7056f7672")]
    one = LongBench(path=str(folder / "data" / "trec.jsonl"), subtasks="trec")
    assert one.inventory() == LongBench(path=one.path).inventory() == {"trec": 4}
    for several in (["trec", "lcc"], "all21"):
        with pytest.raises(SettingError, match="one file is one subtask's"):
            LongBench(path=one.path, subtasks=several).check()
    assert LongBench(path=str(folder / "data" / "lsht.jsonl")).inventory() == {"lsht": 4}
    assert {sample.meta["data"] for sample in every} == {"miniature"}


def test_make_data_counts_rows_and_the_fingerprint_follows_them(folder):
    said = examine("longbench", str(folder))
    assert re.search("^repobench-p +4 rows$", said, re.MULTILINE) and said.count("rows") == 16
    first, trec = LongBench(path=str(folder)), LongBench(path=str(folder), subtasks="trec")
    assert said.endswith(f"fingerprint {first.fingerprint()}") and trec.fingerprint()
    file = folder / "data" / "lcc.jsonl"
    file.write_text(file.read_text().replace("class Store", "class Shop", 1))
    assert LongBench(path=str(folder)).fingerprint() != first.fingerprint()
    assert LongBench(path=str(folder), subtasks="trec").fingerprint() == trec.fingerprint()


def test_a_run_is_known_by_what_a_copy_holds(folder):
    def value(*settings: str) -> dict:
        return RunSpec.from_config(compose_config(["task=longbench", "task.subtasks=lcc", *settings])).value

    first, same = value(f"task.path={folder}"), value(f"task.path={folder / 'data'}")
    assert first == same != value(f"task.path={folder}", "task.max_length=7950")
    make_e_files(folder, "lcc")
    assert "variant" not in first["task"] and value(f"task.path={folder}", "task.variant=e")["task"]["variant"] == "e"
    file = folder / "data" / "lcc.jsonl"
    file.write_text(file.read_text().replace("class Store", "class Shop", 1))
    assert value(f"task.path={folder}") != first


def broken(row: dict, **changes) -> str:
    return json.dumps({key: value for key, value in (row | changes).items() if value is not ...}) + "\n"


BAD_ROWS = {  # changes of the second row of a subtask, and what is said
    "no column": ("hotpotqa", {"input": ...}, "line 2 has no column input"),
    "no id": ("hotpotqa", {"_id": ...}, "line 2 has no column _id"),
    "no text": ("hotpotqa", {"context": "\ud800"}, "line 2 has half of a surrogate pair, which no tokenizer reads"),
    "wrong type": ("hotpotqa", {"context": ["a"]}, "line 2: context is list, expected str"),
    "no number": ("hotpotqa", {"length": "12 words"}, "line 2: length is str, expected int"),
    "a truth value": ("hotpotqa", {"length": True}, "line 2: length is bool, expected int"),
    "no answers": ("hotpotqa", {"answers": []}, "line 2: answers is not a list of strings with at least one"),
    "answers of numbers": ("hotpotqa", {"answers": [1]}, "line 2: answers is not a list of strings"),
    "another task": ("hotpotqa", {"dataset": "musique"}, "line 2: dataset is 'musique', expected 'hotpotqa'"),
    "no classes": ("trec", {"all_classes": None}, "line 2: all_classes is not a list of strings"),
    "no paragraph": ("passage_retrieval_en", {"answers": ["7"]}, "line 2: answers are not of the form 'Paragraph 1'"),
    "no Chinese classes": ("lsht", {"all_classes": []}, "line 2: all_classes is not a list of strings"),
    "no Chinese paragraph": ("passage_retrieval_zh", {"answers": ["段7"]}, "line 2: answers are not of the form 'Par"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_row_that_cannot_be_used_is_named(case, folder):
    name, changes, said = BAD_ROWS[case]
    first, second, *_ = (row for _, row in make_rows(name))
    (folder / "data" / f"{name}.jsonl").write_text(broken(first) + broken(second, **changes))
    with pytest.raises(SettingError, match=re.escape(f"task.path: {name}.jsonl {said}")):
        LongBench(path=str(folder), subtasks="all21").check()


def test_a_file_that_cannot_be_used_is_one_line_and_nothing_is_written(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("kvbench.models.checkpoint.Checkpoint.weights", lambda *_: pytest.fail("weights were loaded"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    file, row = folder / "data" / "musique.jsonl", next(make_rows("musique"))[1]

    def refused(line: str, *settings: str) -> None:
        base = ["task=longbench", "device=cpu", *(settings or [f"task.path={folder}"])]
        assert_refused(run_cli(base, monkeypatch, capsys), line, work)

    file.write_text("")
    refused("task.path: no rows of musique")
    file.write_text(broken(row) + "\n" + broken(row))
    refused(f"task.path: musique.jsonl line 3: _id {row['_id']!r} is that of musique.jsonl line 1")
    file.write_text(broken(row) + '{"input": "a\n')
    refused("task.path: musique.jsonl line 2 is not JSON (")
    file.write_text("[1]\n")
    refused("task.path: musique.jsonl line 1 is not an object with columns")
    file.write_bytes(b"\xff\xfe")
    refused("task.path: musique.jsonl is not UTF-8 (byte 0)")
    file.unlink()
    refused(f"task.path={folder}: a file, or a folder with one of data/musique.jsonl, musique.jsonl, data.zip")
    (tmp_path / "data.zip").write_bytes(b"PK")
    refused("task.path: data.zip:data/narrativeqa.jsonl cannot be read (", f"task.path={tmp_path}/data.zip")
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as packed:
        packed.writestr("data/narrativeqa.jsonl", "")
    refused("task.path: no rows of narrativeqa", f"task.path={tmp_path}/data.zip")
    refused("task.path: data.zip has no data/lcc.jsonl", f"task.path={tmp_path}/data.zip", "task.subtasks=lcc")
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as packed:
        packed.writestr("a/lcc.jsonl", ""), packed.writestr("b/lcc.jsonl", "")
    said = "task.path: data.zip has a/lcc.jsonl and b/lcc.jsonl, expected one or data/lcc.jsonl"
    refused(said, f"task.path={tmp_path}/data.zip", "task.subtasks=lcc")
    refused("task.path=/nowhere: no such file or folder; or miniature, or hub", "task.path=/nowhere")
    refused("task.path=hub: zai-org/LongBench/data.zip is out of reach (", "task.path=hub")
    refused("task.path=1: miniature, hub, or a file or folder", "task.path=1")
    for wrong in ("zh", "[zh]"):
        refused("task.subtasks=zh: choose one of all, all21, chinese, narrativeqa", f"task.subtasks={wrong}")
    said = "task.subtasks=dureader: choose one of all, qasper"
    refused(said, "task.subtasks=dureader", "task.variant=e", "task.path=miniature")
    monkeypatch.setattr(chinese, "version", lambda name: "0.39")
    said = "task=longbench: jieba cuts Chinese answers into words and 0.39 may cut other words; install jieba==0.42.1"
    refused(said, "task.subtasks=chinese")
    refused("task.protocol=paper: choose one of official, lm_eval, kvpress", "task.protocol=paper")
    refused("task.max_length=1: a whole number of at least 2", "task.max_length=1")
    refused("task.max_length=4k: a whole number of at least 2", "task.max_length=4k")
    refused("limit=0: a whole number of at least 1", "limit=0")


# kvpress's protocol


def write_kvpress(folder: Path, name: str, ending: str = "", **changes) -> list[dict]:
    """Write a task's rows as kvpress publishes them, and return them. `changes` are of the second row."""
    rows = []
    for index, (_, row) in enumerate(make_rows(name)):
        kept = {key: row[key] for key in ("answers", "length", "dataset", "language", "all_classes", "_id")}
        more = {"context": f"Read:\n{row['context']}\n\n", "question": f"Question: {row['input']}\n\n", "task": name}
        own = {**kept, **more, "answer_prefix": "Answer: ", "max_new_tokens": 40 + index}
        rows.append(own | changes if index == 1 else own)
    (folder / f"{name}{ending}").mkdir(parents=True, exist_ok=True)
    parquet.write_table(Table.from_pylist(rows), folder / f"{name}{ending}" / "test-00000-of-00001.parquet")
    return rows


def kvpress_prompt(tokenizer, row: dict) -> str:
    """The text that kvpress's pipeline makes of a row."""
    if tokenizer.chat_template is None:
        return row["context"] + row["question"] + "\n" + row["answer_prefix"]
    mark = "#" * (len(row["context"]) + 10)
    message = [{"role": "user", "content": row["context"] + mark}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return row["question"].join(text.split(mark)) + row["answer_prefix"]


@pytest.mark.parametrize("template", [None, "{% for m in messages %}<u>{{ m.content }}</u><a>{% endfor %}"])
def test_kvpress_prompts_are_those_of_its_pipeline(tmp_path, template):
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    tokenizer.chat_template = template
    rows = [row for name in ("qasper", "trec") for row in write_kvpress(tmp_path, name)]
    own = LongBench(path=str(tmp_path), protocol="kvpress", subtasks=["qasper", "trec"])
    for sample, row in zip(own.samples(tokenizer, 9, 4096), rows, strict=True):
        prompt = encode(tokenizer, sample)
        assert tokenizer.decode(prompt.ids, skip_special_tokens=True) == kvpress_prompt(tokenizer, row)
        assert (sample.context, sample.answers) == (row["context"], tuple(row["answers"])) and sample.chat
        assert sample.max_new_tokens == row["max_new_tokens"] and not (sample.ends or sample.until)
        assert sample.uid == f"{row['task']}/{row['_id']}" and sample.meta["left_out_of"] == NOTHING


def test_kvpress_scores_the_first_line_behind_white_space():
    outputs = {}
    for protocol in ("official", "kvpress"):
        task = LongBench(protocol=protocol, limit=1, subtasks=["triviaqa", "hotpotqa"])
        outputs[protocol] = [task.score(own, " \n Paris\nRome").answer for own in task.samples(TOKENIZER, 1, 4096)]
    assert outputs == {"kvpress": ["Paris", " \n Paris\nRome"], "official": [" ", " \n Paris\nRome"]}


def test_kvpress_files_and_the_hub_are_read(tmp_path, monkeypatch):
    write_kvpress(tmp_path, "lcc"), write_kvpress(tmp_path, "lcc", "_e")
    asked = []

    def fetch(*where, **more):
        asked.append((*where, *more.values()))
        return str(tmp_path / where[1])

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    own = {"protocol": "kvpress", "subtasks": "lcc"}
    file = tmp_path / "lcc" / "test-00000-of-00001.parquet"
    hashes = {LongBench(path=str(path), **own).fingerprint() for path in ("hub", tmp_path, file)}
    assert len(hashes) == 1 and hashes != {LongBench(**own).fingerprint()} != {LongBench(subtasks="lcc").fingerprint()}
    assert list(LongBench(path="hub", variant="e", **own).inventory()) == ["lcc/0-4k"]
    files = [f"{name}/test-00000-of-00001.parquet" for name in ("lcc", "lcc_e")]
    revision = "2e9ade51ebf45d98942056c0716234f9d5d257d5"
    assert asked == [("Xnhyacinth/LongBench", file, "dataset", revision) for file in files]
    made = samples(protocol="kvpress", subtasks="all21", limit=1)  # the miniature in kvpress's columns
    plain = {sample.uid: sample for sample in samples(subtasks="all21", limit=1)}
    assert all(own.context + own.question == plain[own.uid].context + plain[own.uid].question + "\n" for own in made)
    assert all(own.max_new_tokens == plain[own.uid].max_new_tokens + 20 for own in made)


BAD_KVPRESS_ROWS = {  # changes of the second row, and what is said of it
    "no column": ({"question": ...}, "has no column question"),
    "no text": ({"answer_prefix": None}, "answer_prefix is NoneType, expected str"),
    "a text as limit": ({"max_new_tokens": "many"}, "max_new_tokens is str, expected int"),
    "no token": ({"max_new_tokens": "0"}, "max_new_tokens is 0, expected at least 1"),
    "another task": ({"task": "lcc"}, "task is 'lcc', expected 'qasper'"),
    "no answers": ({"answers": []}, "answers is not a list of strings with at least one"),
}


@pytest.mark.parametrize("case", BAD_KVPRESS_ROWS)
def test_a_row_of_kvpress_that_cannot_be_used_is_named(tmp_path, case):
    changes, said = BAD_KVPRESS_ROWS[case]
    first, second, *_ = write_kvpress(tmp_path, "qasper")
    (tmp_path / "qasper" / "test-00000-of-00001.parquet").unlink()
    (tmp_path / "qasper.jsonl").write_text(broken(first) + broken(second, **changes))
    with pytest.raises(SettingError, match=f"^task.path: {tmp_path.name}/qasper.jsonl line 2:? {re.escape(said)}$"):
        LongBench(path=str(tmp_path), protocol="kvpress", subtasks="qasper").check()


def test_files_of_one_layout_are_refused_for_the_other(folder, tmp_path):
    write_kvpress(tmp_path, "qasper", task="trec")
    for path, own, said in (
        (tmp_path, "kvpress", "qasper/test-00000-of-00001.parquet row 1: task is 'trec', expected 'qasper'"),
        (
            tmp_path / "qasper" / "test-00000-of-00001.parquet",
            "official",
            "test-00000-of-00001.parquet row 0 has no col",
        ),
        (folder / "data" / "qasper.jsonl", "kvpress", "data/qasper.jsonl line 1 has no column task"),
    ):
        with pytest.raises(SettingError, match=f"^task.path: {re.escape(said)}"):
            LongBench(path=str(path), protocol=own, subtasks="qasper").check()


# Whole runs


@pytest.mark.full
@pytest.mark.parametrize(
    "methods, questions", [(("snapkv",), ("hidden",)), only_in_full(("snapkv", "keydiff"), ("visible", "hidden"))]
)
def test_methods_and_both_values_of_question(tmp_path, monkeypatch, capsys, methods, questions):
    monkeypatch.chdir(tmp_path)
    cells = len(questions) * len(methods)
    names = ("multifieldqa_en", "samsum")
    settings = ["task=longbench", f"task.subtasks=[{','.join(names)}]", "limit=1", "device=cpu", "task.max_length=900"]
    code, out, _ = run_cli(
        [*settings, f"method={','.join(methods)}", "budget=0.3", f"question={','.join(questions)}", "-m", "-v"],
        monkeypatch,
        capsys,
    )
    assert (
        code == 0 and out.count("\ntask: longbench (miniature)\n") == cells
    )  # a wide table has its rows in two blocks
    assert all(out.count(f"\n{name} ") in (cells, 2 * cells) for name in names)
    task, prompts, found = LongBench(subtasks=names, limit=1, max_length=900), set(), []
    for folder in (tmp_path / "results" / "runs").iterdir():
        records = [json.loads(line) for file in folder.glob("records*.jsonl") for line in file.read_text().splitlines()]
        assert sorted(record["subtask"] for record in records) == sorted(names)
        for record, sample in zip(
            sorted(records, key=lambda record: record["index"]), task.samples(TOKENIZER, 1, 4096), strict=True
        ):
            assert (record["uid"], record["group"], record["target"]) == (
                sample.uid,
                sample.group,
                list(sample.answers),
            )
            assert record["error"] is None and record["meta"] == dict(sample.meta)
            assert record["score"] == task.score(sample, record["output"]).score
            prompts.add((record["uid"], record["prompt_hash"]))
            found.append(record)
    assert len(prompts) == 2 and len(found) == 2 * (len(questions) + cells)  # the full caches, and the cells
    assert {record["meta"]["left_out_of"] for record in found if record["subtask"] == "samsum"} == {CONTEXT}
    assert max(record["score"] for record in found if record["budget"] == 1.0) == 100.0  # the embedded model answers
    for record in found:
        if record["subtask"] == "samsum":
            assert record["tokens_out"] >= 1 and "\n" not in record["output"].rstrip("\n")


@pytest.mark.full
def test_chinese_answers_have_records_and_rows_of_the_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    chosen = {"subtasks": "chinese", "limit": 1, "max_length": 300}
    settings = ["task.subtasks=chinese", "limit=1", "task.max_length=300", "method=snapkv", "budget=0.3", "device=cpu"]
    code, out, _ = run_cli(["task=longbench", *settings, "-v"], monkeypatch, capsys)
    assert code == 0 and all(
        re.search(f"^{row} ", out, re.MULTILINE) for row in (*CHINESE, "mean of 5 tasks", "Chinese")
    )
    task = LongBench(**chosen)
    expected = {sample.uid: sample for sample in task.samples(TOKENIZER, 1, 4096)}
    files = list((tmp_path / "results" / "runs").glob("*/records*.jsonl"))
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(expected) == 5 and len(records) == 10
    for record in records:
        sample = expected[record["uid"]]
        assert record["error"] is None and record["target"] == list(sample.answers)
        assert record["score"] == task.score(sample, record["output"]).score

"""MATH-500 and AIME: answers are read and compared rightly, data is checked, and runs are repeated with own seeds."""

import json
import re
import time
from codecs import BOM_UTF8
from pathlib import Path

import pandas as pd
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lm_eval.tasks.aime.utils import is_equiv
from transformers import AutoTokenizer

from kvbench.cli import data as check
from kvbench.interfaces.task import Graded
from kvbench.models.embedded import REFERENCE
from kvbench.tasks.common import dataset_rows
from kvbench.tasks.mathematics.equivalence import LONGEST, is_same_answer, normalize
from kvbench.tasks.mathematics.extraction import extract_boxed, extract_first_box, extract_flexible
from kvbench.tasks.mathematics.miniature import make_problems
from kvbench.tasks.mathematics.rows import SOURCES, load_problems
from kvbench.tasks.mathematics.task import MathProblems
from kvbench.validation import SettingError
from tests.support.command_line import assert_refused, run_cli
from tests.support.math_pairs import EQUAL, UNEQUAL, parse_pairs

PIECES = [
    *(r"\frac", r"\dfrac", "{", "}", r"\{", r"\}", "(", ")", "[", "]", "1", "23", "000", ",", ", ", ".", "-", "+", "/"),
    *(r"\sqrt", r"\text{", r"\text{ cm}", r"\\", "\\", r"\left", r"\!", "^", "_", r"\circ", "x", "=", r"\pi", r"\pm"),
    *(r"\cup", r"\cdot", "*", r"\begin{pmatrix}", r"\end{bmatrix}", "$", "%", " or ", "cm", r"\boxed{", "π", "−", "\n"),
    *("th", r"\text{nd}", ":15", "p.m.", "\u200b"),
    *(" ", ";", "\0", "{,}", r"\sin", r"\[6pt]", r"\cdot10^", r"\$"),
]
LATEX = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
MANY = settings(max_examples=4 * settings.default.max_examples)
DEAR = settings(max_examples=60 if settings.default.max_examples == 30 else 400)  # 30: of make test
CHECKPOINT = {"stops": False}


def problems(**given) -> MathProblems:
    base = {"name": "math500", "path": "miniature", "prompt": "{problem}", "answer_prefix": "", "chat": True}
    rest = {"extract": None, "max_new_tokens": None, "repeats": 1, "temperature": 0.6, "limit": None}
    return MathProblems(**base | rest | given)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(REFERENCE)


# Comparing


@pytest.mark.parametrize("one, other", parse_pairs(EQUAL))
def test_equal_answers(one, other):
    assert is_same_answer(one, other) and is_same_answer(other, one)


@pytest.mark.parametrize("one, other", parse_pairs(UNEQUAL))
def test_unequal_answers(one, other):
    assert not is_same_answer(one, other) and not is_same_answer(other, one)


def test_there_are_enough_pairs():
    assert len(set(parse_pairs(EQUAL))) >= 80 and len(set(parse_pairs(UNEQUAL))) >= 40


def test_no_pair_contradicts_the_rule_of_the_authors():
    """lm-eval's port of Hendrycks's rule accepts fewer equal pairs (30 of 143), and none of the unequal ones."""
    assert 20 < sum(is_equiv(*pair) for pair in parse_pairs(EQUAL)) < len(parse_pairs(EQUAL))
    assert not any(is_equiv(*pair) for pair in parse_pairs(UNEQUAL))


@DEAR
@given(LATEX | st.text(), LATEX)
@example("100, 200", "100,200")
@example("\\\\\\\\frac12", "1 or 2 or 3")
def test_any_text_has_one_spelling_and_is_itself(one, other):
    spelling = normalize(one)
    assert normalize(spelling) == spelling
    assert is_same_answer(one, one) and is_same_answer(spelling, one)
    assert is_same_answer(one, other) == is_same_answer(other, one)


TERMS = st.sampled_from(["x", "2y", "x^{n-1}", "3", r"\sqrt{5}", r"\frac{x+1}{2}", "(x-1)(y+2)", r"2\pi r", "x y", "i"])
SUM = st.lists(st.tuples(st.sampled_from("+-"), TERMS), min_size=2, max_size=4)


@given(SUM, SUM, st.randoms(use_true_random=False))
def test_a_sum_is_that_of_the_same_terms(one, other, shuffle):
    """In any order, and inside brackets; a sum of other terms or signs is another."""
    mixed = shuffle.sample(one, len(one))
    for form in ("%s", r"\frac{%s}{2}", "2(%s)z - 1", r"(%s, \sqrt{%s})"):
        written = [form.replace("%s", " ".join(f"{sign} {term}" for sign, term in own)) for own in (one, mixed, other)]
        assert is_same_answer(written[0], written[1])
        assert is_same_answer(written[0], written[2]) == (sorted(one) == sorted(other))


def test_what_is_no_answer_takes_no_time():
    pieces = ["$", "{", r"\text{", "(1/", "1,", r"\pm", r"\{1,", r"\frac", "-", r"\boxed{", "answer is ", "$1", r"\$1"]
    pieces += [r"\boxed\a{", r"\boxed 1,", "1^{", "2:15 p.m."]
    pieces += [r"\sin", r"\sin^{", "x+", "(x+", "(x+1)", r"\pi cm", "10^{9", r"2\cdot10^9", r"\begin{pmatrix}\\[6pt"]
    for piece in pieces:
        for size in (LONGEST // len(piece), 20_000):
            text, begun = piece * size, time.perf_counter()
            is_same_answer(text, text + "1"), extract_boxed(text), extract_flexible(text)
            assert time.perf_counter() - begun < 5


# Extracting


def last_box(text: str) -> str | None:
    """By the definition: the last \\boxed whose brace is closed by the stack of all braces and that is not empty."""
    pairs_, stack, place = {}, [], 0
    while place < len(text):
        if text[place] == "\\" and text[place + 1 : place + 2] in ("{", "}", "\\"):
            place += 2
            continue
        if text[place] == "{":
            stack.append(place)
        if text[place] == "}" and stack:
            pairs_[stack.pop()] = place
        place += 1
    found = [
        text[opened + 1 : pairs_[opened]]
        for opened in sorted(pairs_)
        if re.search(r"(?<!\\)(?:\\\\)*\\(?:boxed|fbox)\s*\Z", text[:opened])
    ]
    return next((content.strip() for content in reversed(found) if content.strip()), None)


@MANY
@given(st.lists(st.sampled_from([r"\boxed{", r"\fbox {", "{", "}", r"\{", r"\}", "\\\\", "1", " ", "x"]), max_size=16))
def test_boxes_are_those_of_a_stack_of_braces(pieces):
    text = "".join(pieces)
    assert extract_boxed(text) == last_box(text)


@pytest.mark.parametrize(
    "output, box, loose, first",
    [
        (r"so \boxed{\frac{1}{2}}, in \boxed{}.", r"\frac{1}{2}", r"\frac{1}{2}", r"\frac{1"),
        (r"\boxed{3} no, \boxed{4}", "4", "4", "3"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}", r"\{1,2\}", r"\{1,2\ "[:-1]),
        (r"\boxed{1} then \boxed{2", "1", "1", "1"),
        (r"\boxed{12 and no end", None, "12", "12 and no end"),
        (r"so $\boxed 12$, not 5", "12", "12", None),
        (r"\boxed{3} no, \boxed4 of 5", "4", "4", "3"),
        (r"\boxed\frac{\sqrt{3}}2, or 1", r"\frac{\sqrt{3}}2", r"\frac{\sqrt{3}}2", None),
        (r"\boxed -1,234.5, or 1", "-1,234.5", "-1,234.5", None),
        (r"\boxed \pi", r"\pi", r"\pi", None),
        (r"\fbox\text{(B)} or C", r"\text{(B)}", r"\text{(B)}", None),
        (r"\(\boxed B\)", "B", "B", None),
        (r"In a \boxed I write 5.", None, "5", None),
        ("In \\boxed\n5, then 6", None, "6", None),
        (r"\boxed\left(1,2\right)", None, "1,2", None),
        ("The answer is 204.", None, "204", None),
        ("**Answer:** 204", None, "204", None),
        ("The final answer is $\\frac12$ because 3 > 2", None, r"\frac12", None),
        ("the answer is x + 1.\nDone.", None, "x + 1", None),
        ("The answer is the number 7 of the list, not 8", None, "7", None),
        ("12 apples </think> hence 7, not 5", None, "5", None),
        ("we get $x=3$ and 3,040 of them", None, "3,040", None),
        (r"in all $\$18.90$", None, r"\$18.90", None),
        (r"They pay \$18.90 and \$3.10, together $\$22$.", None, r"\$22", None),
        (r"The answer is $\$18.90$.", None, r"\$18.90", None),
        (r"so they cost \$18.90", None, "18.90", None),
        ("no idea", None, None, None),
        ("", None, None, None),
    ],
)
def test_readings(output, box, loose, first):
    assert (extract_boxed(output), extract_flexible(output), extract_first_box(output)) == (box, loose, first)


def test_score_and_what_stands_beside_it(tokenizer):
    task = problems(path="hub", extract="boxed")
    [sample] = problems(limit=1).samples(tokenizer, 0, 4096)
    number = sample.answers[0]
    closed = task.score(sample, rf"<think>hm, \boxed{{8}}</think> \boxed{{{number}.0}}")
    also = {"boxed": 100.0, "flexible": 100.0, "exact": 0.0, "first_box": 0.0, "closed": True}
    assert closed == Graded(100.0, f"{number}.0", also)
    said = f"The answer is {number}."
    assert task.score(sample, said).score == 0 and task.score(sample, said).also["flexible"] == 100
    assert problems(extract="flexible").score(sample, said).score == 100
    assert problems().score(sample, said).score == 100  # the miniature's
    exact = task.score(sample, rf"\boxed{{{number}}}")
    assert exact.also == {"boxed": 100.0, "flexible": 100.0, "exact": 100.0, "first_box": 100.0, "closed": False}
    assert task.score(sample, "") == Graded(0.0, "", dict.fromkeys(also, 0.0) | {"closed": False})


# Data


ROWS = [{"problem": f"What is {n} + 0?", "answer": str(n), "unique_id": f"test/{n}"} for n in (7, 70)]


def written(folder, rows, name="test.jsonl"):
    path = folder / name
    if name.endswith(".parquet"):
        pd.DataFrame(rows).to_parquet(path)
    elif name.endswith(".json"):
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("name", ["test.jsonl", "test.json"])
def test_a_byte_order_mark_is_no_text(tmp_path, name):
    path = Path(written(tmp_path, ROWS, name))
    found = load_problems("math500", str(path))
    path.write_bytes(BOM_UTF8 + path.read_bytes())
    assert load_problems("math500", str(path)) == found


@pytest.mark.parametrize("name", ["test.jsonl", "test.json", "test.parquet"])
def test_forms_of_a_file_give_the_same_rows(tmp_path, name):
    path = written(tmp_path, ROWS, name)
    assert load_problems("math500", path) == [
        {"id": f"test/{n}", "problem": f"What is {n} + 0?", "answer": f"{n}"} for n in (7, 70)
    ]
    assert load_problems("math500", str(tmp_path)) == load_problems("math500", path)


@pytest.mark.parametrize(
    "row",
    [
        {"ID": "2024-I-1", "Problem": "p", "Solution": "s", "Answer": 70},
        {"id": 60, "problem": "p", "answer": "070", "url": "u", "year": 2024},
        {"problem_idx": 1, "problem": "p", "answer": 70, "problem_type": ["Algebra"]},
        {"question": "p", "answer": "70"},
        {"id": 60.0, "problem": "p", "answer": 70.0},
        {"problem": "p", "answer": "70.0"},
    ],
)
def test_columns_of_the_copies_of_aime(tmp_path, row):
    [found] = load_problems("aime24", written(tmp_path, [row]))
    assert found["problem"] == "p" and int(found["answer"]) == 70 and set(found) == {"id", "problem", "answer"}


def test_opencompass_has_two_files_and_an_answer_in_degrees(tmp_path, capsys):
    """opencompass/AIME2025 a6ad95f: one file an exam, columns question and answer; II-5's answer is an angle."""
    answers = {exam: [f"{number:03}" for number in range(15)] for exam in ("I", "II")}
    answers["II"][4] = r"336^\circ"
    for exam, own in answers.items():
        rows = [{"question": f"{exam}-{number}", "answer": answer} for number, answer in enumerate(own, 1)]
        written(tmp_path, rows, f"aime2025-{exam}.jsonl")
    found = load_problems("aime25", str(tmp_path))
    assert [row["problem"] for row in found] == [f"{exam}-{n}" for exam in ("I", "II") for n in range(1, 16)]
    assert found[19]["answer"] == "336" and [row["answer"] for row in found[:15]] == answers["I"]
    assert len({row["id"] for row in found}) == 30
    assert check.main(["aime25", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"aime25 +30 rows\n", said)
    assert load_problems("aime25", str(tmp_path / "aime2025-II.jsonl")) == found[15:]
    written(tmp_path, [{"problem": "p", "answer": 1}], "test.jsonl")  # as math-ai/aime25
    assert [row["problem"] for row in load_problems("aime25", str(tmp_path))] == ["p"]
    (tmp_path / "test.jsonl").unlink()
    (tmp_path / "aime2025-II.jsonl").unlink()
    with pytest.raises(SettingError, match=r"^task.path: aime2025-II.jsonl cannot be read \(No such file or directory"):
        load_problems("aime25", str(tmp_path))
    assert check.main(["aime25", str(tmp_path)]) == 2 and capsys.readouterr().err.count("\n") == 1


def test_maxwell_jia_has_a_file_of_its_own_name(tmp_path, capsys):
    """Maxwell-Jia/AIME_2024 8d88b28: aime_2024_problems.parquet, columns with capitals, whole numbers as answers."""
    rows = [
        {"ID": f"2024-{exam}-{n}", "Problem": f"{exam}-{n}", "Solution": "s", "Answer": n * 33}
        for exam in ("I", "II") for n in range(1, 16)
    ]  # fmt: skip
    path = written(tmp_path, rows, "aime_2024_problems.parquet")
    found = load_problems("aime24", str(tmp_path))
    assert found == load_problems("aime24", path) and len(found) == 30
    assert found[0] == {"id": "2024-I-1", "problem": "I-1", "answer": "33"}
    assert check.main(["aime24", str(tmp_path)]) == 0
    assert re.search(r"aime24 +30 rows\n", capsys.readouterr().out)


@pytest.mark.parametrize("answer_", ["336^\\circ", "336^{\\circ}", "336 ^ { \\circ }", "336°", " 336 "])
def test_a_degree_sign_is_no_part_of_an_answer_of_aime(tmp_path, answer_):
    [row] = load_problems("aime25", written(tmp_path, [{"question": "p", "answer": answer_}]))
    assert row["answer"].strip() == "336"


BAD = {
    "no column problem": [{"answer": "1", "id": "1"}],
    "no column answer": [{"problem": "p", "id": "1"}],
    "line 1: problem is int, expected str": [{"problem": 1, "answer": "1", "id": "1"}],
    "line 1: answer is float, expected str": [{"problem": "p", "answer": 1.5, "id": "1"}],
    "line 1: id is NoneType, expected str": [{"problem": "p", "answer": "1", "id": None}],
    "line 1: problem is empty": [{"problem": " ", "answer": "1"}],
    "line 1: answer is empty": [{"problem": "p", "answer": ""}],
    "line 2: id '1' is that of test.jsonl line 1": [{"problem": "p", "answer": "1", "id": own} for own in ("1", 1)],
    "line 1: answer_prefix is not a text": [{"problem": "p", "answer": "1", "answer_prefix": 1}],
    "line 1: answer is '1000', expected a whole number from 0 to 999": [{"problem": "p", "answer": 1000}],
    "line 1: answer is '70.5', expected a whole number": [{"problem": "p", "answer": "70.5"}],
    "line 1: answer is 'x', expected a whole number": [{"problem": "p", "answer": "x"}],
    "line 1: answer is '-1', expected a whole number": [{"problem": "p", "answer": -1}],
    "line 1: answer is '3360', expected a whole number": [{"problem": "p", "answer": r"3360^\circ"}],
    "line 1: answer is '', expected a whole number": [{"problem": "p", "answer": r"^\circ"}],
    "line 1: answer is '33^\\\\circ6', expected a whole number": [{"problem": "p", "answer": r"33^\circ6"}],
    "no rows": [],
}  # fmt: skip


@pytest.mark.parametrize("said", BAD)
def test_a_bad_row_is_one_line(tmp_path, said):
    with pytest.raises(SettingError) as error:
        load_problems("aime25", written(tmp_path, BAD[said]))
    assert said in str(error.value) and str(error.value).startswith("task.path: ") and "\n" not in str(error.value)


def test_a_broken_line_has_its_number_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "bad.jsonl").write_text(json.dumps(ROWS[0]) + '\n{"problem": \n')
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("kvbench.models.checkpoint.Checkpoint.weights", lambda *_: pytest.fail("weights were loaded"))
    found = run_cli(["task=math500", "task.path=../bad.jsonl"], monkeypatch, capsys)
    assert_refused(found, "task.path: bad.jsonl line 2 is not JSON", tmp_path / "here")


def test_the_hub_is_asked_for_a_pinned_revision(monkeypatch):
    asked = []

    def load(*names, **settings):
        asked.append((*names, settings))
        return [{"problem": f"p{n}", "answer": n, "id": n} for n in range(30)]

    monkeypatch.setattr("datasets.load_dataset", load)
    assert len(load_problems("aime25", "hub")) == 30
    revision = "563bb8404243c5f09de6ec262f2db674fe5bce9b"
    assert asked == [("math-ai/aime25", None, {"split": "test", "revision": revision})]
    assert all(re.fullmatch("[0-9a-f]{40}", source.revision) for source in SOURCES.values())
    with pytest.raises(SettingError, match="task.path=hub: HuggingFaceH4/MATH-500 has 30 problems, expected 500"):
        load_problems("math500", "hub")
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: exec("raise ConnectionError('no network')"))
    with pytest.raises(SettingError, match="task.path=hub: HuggingFaceH4/aime_2024 is out of reach"):
        load_problems("aime24", "hub")


@pytest.mark.parametrize("name", SOURCES)
def test_the_miniature_is_a_file_of_the_same_form(tmp_path, name, capsys):
    path = written(tmp_path, [row for _, row in make_problems(name, SOURCES[name].integers)])
    assert load_problems(name, path) == load_problems(name, "miniature")
    assert check.main([name, path]) == 0
    said = capsys.readouterr().out
    assert re.search(rf"{name} +12 rows\n", said) and dataset_rows.hash_rows(path, load_problems(name, path)) in said
    (tmp_path / "test.jsonl").write_text((tmp_path / "test.jsonl").read_text().replace("Document 1", "Document 0", 1))
    assert dataset_rows.hash_rows(path, load_problems(name, path)) not in said


def test_a_copy_of_the_miniature_is_another_run(tmp_path):
    """There answers may be longer and are read from a box: what null stands for."""
    path = written(tmp_path, [row for _, row in make_problems("math500", False)])
    assert problems(path=path).fingerprint() == problems(path=path).fingerprint() != problems().fingerprint()


# Samples


def test_samples_do_not_depend_on_limit_order_or_repeats(tokenizer, tmp_path):
    every = {sample.uid: sample for sample in problems(repeats=3).samples(tokenizer, 0, 4096)}
    assert list(every)[:4] == [f"math500/miniature/0/r{r}" for r in range(3)] + ["math500/miniature/1/r0"]
    assert len(every) == 36 and len({sample.group for sample in every.values()}) == 12
    few = list(problems(limit=2).samples(tokenizer, 0, 4096))
    assert [sample.uid for sample in few] == ["math500/miniature/0/r0", "math500/miniature/1/r0"]
    assert all(every[sample.uid] == sample for sample in few)
    backwards = problems(path=written(tmp_path, ROWS[::-1]), max_new_tokens=8).samples(tokenizer, 0, 4096)
    assert [sample.uid for sample in backwards] == ["math500/test/70/r0", "math500/test/7/r0"]


def test_a_sample_is_the_problem_in_its_prompt(tokenizer, tmp_path):
    suffix = "{problem}\nPlease reason step by step, and put your final answer within \\boxed{}."
    task = problems(path=written(tmp_path, ROWS), prompt=suffix, max_new_tokens=900, answer_prefix="<think>\n")
    [sample, _] = task.samples(tokenizer, 0, 4096)
    assert sample.context == "" and sample.question == suffix.replace("{problem}", "What is 7 + 0?")
    assert (sample.answer_prefix, sample.answers, sample.max_new_tokens) == ("<think>\n", ("7",), 900)
    assert sample.meta == {"data": "local", "repeat": 0, "verify": "math_verify"}
    with pytest.raises(SettingError, match="task.max_new_tokens=32768: .* at most 4"):
        list(problems(path=written(tmp_path, ROWS)).samples(tokenizer, 0, 4096))


WRONG = {
    "task.repeats=2": "task.repeats=2: all the same with temperature=0",
    "task.repeats=0": "task.repeats=0: a whole number of at least 1",
    "task.prompt=Solve": "task.prompt='Solve': a text with {problem} in it, once",
    "task.preset=cot": "task.preset=cot: choose one of boxed, kvpress, matharena",
    "task.extract=last": "task.extract=last: choose one of null, boxed, flexible",
    "task.max_new_tokens=0": "task.max_new_tokens=0: a whole number of at least 1",
    "task.chat=maybe": "task.chat=maybe: choose one of true, false",
    "task.answer_prefix=3": "task.answer_prefix=3: a text",
    "task.path=/nowhere": "task.path=/nowhere: no such file or folder",
    "task.name=amc": "task.name=amc: must be aime24",
    "question=hidden": "question=hidden: aime24 has no context apart from its question; use question=visible",
}


@pytest.mark.parametrize("setting", WRONG)
def test_a_wrong_setting_is_one_line(tmp_path, monkeypatch, capsys, setting):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvbench.models.checkpoint.Checkpoint.weights", lambda *_: pytest.fail("weights were loaded"))
    assert_refused(run_cli(["task=aime24", setting], monkeypatch, capsys), WRONG[setting], tmp_path)


# Runs


def records(results) -> dict[str, dict[str, dict]]:
    """Method -> uid -> record."""
    found = {}
    for folder in (results / "runs").iterdir():
        name = yaml.safe_load((folder / "run.yaml").read_text())["value"]["method"]["name"]
        lines = "".join(path.read_text() for path in folder.glob("records*.jsonl")).splitlines()
        found[name] = {own["uid"]: own for own in map(json.loads, lines)}
    return found


@pytest.fixture
def one_opinion(monkeypatch):
    """No second opinions, which tests/integrations/test_math_verify.py is about."""
    monkeypatch.setattr("kvbench.integrations.math_verify.grade", lambda folder: None)


def test_two_methods_end_to_end_and_seeds_of_their_own(one_opinion, kvbench, tmp_path):
    """Sampled twice a problem, cut while decoding; a record is the same whichever others are asked."""
    sampled = ("task=aime24", "temperature=1.0", "task.repeats=2", "task.max_new_tokens=4", "budget=0.5")
    code, out, err = kvbench(*sampled, "method=knorm", "method.decoding=true", "budget_of=seen", "limit=2")
    assert code == 0, err
    assert re.search(r"\naime24 .* 4\b", out) and "\ntask: aime24 (miniature)\n" in out
    assert "avg@2: each prompt was answered 2 times" in out and "\npass@2 " in out
    assert kvbench(*sampled, "method=snapkv", "limit=1", "results=alone")[0] == 0
    found, alone = (records(tmp_path / folder) for folder in ("results", "alone"))
    assert set(found) == {"full", "knorm"} and all(len(own) == 4 for own in found.values())
    assert set(alone) == {"full", "snapkv"} and all(len(own) == 2 for own in alone.values())
    for uid, own in alone["full"].items():
        assert own["output"] == found["full"][uid]["output"]
    repeats = [{own["output"] for uid, own in found["full"].items() if f"/{problem}/" in uid} for problem in range(2)]
    assert max(map(len, repeats)) == 2
    for own in (own for every in (*found.values(), *alone.values()) for own in every.values()):
        assert own["group"] == own["uid"].rpartition("/")[0] and own["meta"]["data"] == "miniature"
        assert own["stop"] in ("eos", "length") and own["tokens_out"] > 0 and own["also"]["closed"] is False
    assert {own["while_decoding"] for own in found["knorm"].values()} == {"cuts"}
    assert all(own["rows_held_end"] < 0.52 * own["rows_seen_decoding"] for own in found["knorm"].values())


@pytest.mark.full
def test_the_embedded_model_answers_some(one_opinion, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, _, err = run_cli(["task=math500", "method=full", "limit=4", "device=cpu"], monkeypatch, capsys)
    assert code == 0, err
    scores = {uid: own["score"] for uid, own in records(tmp_path / "results")["full"].items()}
    assert scores == {f"math500/miniature/{index}/r0": 100.0 if index < 3 else 0.0 for index in range(4)}

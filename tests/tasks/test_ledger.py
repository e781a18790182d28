"""The ledger: what is drawn and asked, and what an answer is worth."""

import random
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvbench.config import catalogue
from kvbench.interfaces.task import Sample
from kvbench.models.chat_template import count_template_tokens
from kvbench.models.embedded import REFERENCE
from kvbench.runs.prompt import encode
from kvbench.tasks.ledger.answer_parser import WrittenSum, parse_answer
from kvbench.tasks.ledger.task import PREFIX, STARTS, Ledger, LedgerTask, Step, draw_ledger
from kvbench.validation import SettingError
from tests.support.command_line import assert_refused, run_cli
from tests.support.recorded_runs import read_runs
from tests.support.selection import only_in_full

CHECKPOINT = {"stops": False}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(REFERENCE)


def ledger_task(**own) -> LedgerTask:
    own = {"seed": 0, "limit": None} | own
    return catalogue.build("task", catalogue.load_settings("task", "ledger", own))


def worked_out(context: str) -> dict[int, int]:
    """The results of the ledger in a prompt, from its text alone."""
    results: dict[int, int] = {}
    for line, named, left, word, right in re.findall(
        r"^Line (\d+): (line )?(\d+) (plus|minus) (\d+)\.$", context.rpartition("Ledger:")[2], re.MULTILINE
    ):
        first = results[int(left)] if named else int(left)
        results[int(line)] = first + int(right) * (1 if word == "plus" else -1)
    return results


DRAWS = {
    "steps": st.integers(22, 90),
    "recalled": st.integers(2, 6),
    "early": st.sampled_from([0.5, 0.75, 1.0]),
    "largest": st.integers(1, 89),
    "seed": st.integers(0, 10**6),
}


@settings(deadline=None)
@given(**DRAWS)
def test_every_ledger_keeps_its_promises(steps, recalled, early, largest, seed):
    ledger = draw_ledger(steps, recalled, early, largest, random.Random(seed))
    results = worked_out(ledger.context())
    assert list(results) == list(range(1, steps + 1)) and all(10 <= result <= 99 for result in results.values())
    assert {line: step.result for line, step in ledger.steps.items()} == results
    assert all(1 <= step.right <= largest for step in ledger.steps.values())
    last = int(early * steps)
    assert len(set(ledger.recalled)) == recalled and all(STARTS < line <= last for line in ledger.recalled)
    for line, step in ledger.steps.items():
        assert step.line is None if line <= STARTS else 1 <= step.line < line
        assert line <= last or step.line not in ledger.recalled
    text, _, end = ledger.render_solution().partition("Results")
    behind = "\n".join(text.splitlines()[last:])
    assert not any(re.search(rf"\b[Ll]ine {line}\b", behind) for line in ledger.recalled)
    assert [int(line) for line in re.findall(r"line (\d+)", end)] == list(ledger.recalled)


@settings(deadline=None)
@given(**DRAWS)
def test_the_solved_answer_is_read_as_it_was_meant(steps, recalled, early, largest, seed):
    ledger = draw_ledger(steps, recalled, early, largest, random.Random(seed))
    sums, results = parse_answer(ledger.render_solution(), ledger.recalled)
    assert sums == [(n, WrittenSum(s.line, s.left, s.sign, s.right, s.result)) for n, s in ledger.steps.items()]
    assert list(results.items()) == [(line, ledger.steps[line].result) for line in ledger.recalled]


def test_lines_build_on_near_and_far_ones_in_short_chains():
    ledgers = [draw_ledger(60, 5, 0.5, 50, random.Random(seed)) for seed in range(20)]
    distances = [line - step.line for own in ledgers for line, step in own.steps.items() if step.line]
    assert min(distances) == 1 and max(distances) > 50 and 15 < sum(distances) / len(distances) < 35
    for own in ledgers:
        depths: dict[int, int] = {}
        for line, step in own.steps.items():
            depths[line] = 1 + depths.get(step.line, 0)
        assert sum(depths.values()) / 60 < 6 and max(depths.values()) < 16


def test_the_prompt(tokenizer):
    [sample] = ledger_task(samples=1).samples(tokenizer, 0, 4096)
    prompt = sample.context + sample.question + sample.answer_prefix
    *first, last = map(str, sample.meta["recalled"])
    asked = f"write again the results of lines {', '.join(first)} and {last}."
    assert sample.question == f"\n\nWork out all 60 lines in order, then {asked}\n\nAnswer:"
    assert prompt.endswith("\n\nAnswer:\n") and sample.context.count("\nLine 60: line ") == 1
    results = worked_out(sample.context)
    assert sample.answers == tuple(str(results[line]) for line in sample.meta["recalled"])
    # the example's lines are none of the ledger's, and solved as an answer should be
    assert (
        "Line 902: line 901 is 55, 55 - 9 = 46\nResults: line 902 is 46, line 901 is 55.\n\nLedger:\nLine 1: " in prompt
    )


def test_a_chat_model_is_asked_and_its_answer_opened():
    own = AutoTokenizer.from_pretrained(REFERENCE)
    own.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    [sample] = ledger_task(samples=1).samples(own, count_template_tokens(own), 4096)
    prompt = encode(own, sample)
    assert own.decode(prompt.context) == f"<user>{sample.context}"
    assert own.decode(prompt.rest) == f"{sample.question}<assistant>\n"


def test_an_answer_takes_a_thousand_tokens_and_has_room(tokenizer):
    task = ledger_task(samples=5)
    task.check()
    for sample in task.samples(tokenizer, 0, 4096):
        solved = task._ledger(60, sample.uid).render_solution()
        tokens = len(tokenizer.encode(solved, add_special_tokens=False))
        # a piece for each word, sign and digit, which no tokenizer with single digits undercuts
        assert len(re.findall(r"[A-Za-z]+|\d|[^\sA-Za-z\d]+|\n", solved)) >= 1000
        assert 1.25 * tokens <= sample.max_new_tokens < 1.25 * tokens + 64
    assert [s.max_new_tokens for s in ledger_task(samples=1, max_new_tokens=9).samples(tokenizer, 0, 4096)] == [9]


def test_a_sample_depends_neither_on_the_others_nor_on_the_limit(tokenizer):
    every = {s.uid: s for s in ledger_task(steps=[20, 24], samples=3).samples(tokenizer, 0, 4096)}
    assert list(every)[:2] == ["ledger/20/0", "ledger/20/1"]
    some = list(ledger_task(steps=[24, 20], samples=2, limit=1).samples(tokenizer, 0, 4096))
    assert [s.subtask for s in some] == ["ledger_24", "ledger_20"] and all(every[s.uid] == s for s in some)
    assert len({s.context for s in every.values()}) == 6 == len({s.group for s in every.values()})
    assert next(iter(ledger_task(steps=[24], seed=1).samples(tokenizer, 0, 4096))).context != some[0].context


SMALL = Ledger(
    {
        1: Step(None, 20, "+", 5), 2: Step(None, 40, "-", 7), 3: Step(1, 25, "+", 12), 4: Step(2, 33, "-", 3),
        5: Step(3, 37, "+", 40), 6: Step(5, 77, "-", 10),
    },
    recalled=(4, 3),
)  # fmt: skip


class OfSmall(LedgerTask):
    def _ledger(self, steps, uid):
        return SMALL


@pytest.fixture(scope="module")
def score():
    task = OfSmall(6, 2, 1.0, 50, None, 1)
    sample = Sample("ledger/6/0", "ledger_6", "", "", "", ("30", "37"), 1, meta={"steps": 6})
    return lambda output: task.score(sample, output)


@pytest.mark.parametrize(
    "end, points",
    [
        ("Results: line 4 is 30, line 3 is 37.", 100),
        ("Results: line 3 is 37, line 4 is 30", 100),  # in another order
        ("**Results:**\n- **Line 4:** 30\n- **Line 3:** 37", 100),
        ("## Results\n\n| Line 4 | 30 |\n| Line 3 | 37 |", 100),
        ("RESULTS: Line 4 = 30; Line 3 = `37`", 100),
        ("Results of lines 4 and 3:\nline 4: 33 - 3 = 30\nline 3: 25 plus 12 equals 37", 100),
        (r"Results: line 4 is $\mathbf{ }30$, and line 3 is \(37\).", 100),
        ("Results: line 4's result is 30 and the result of line 3 is 037", 100),
        ("Results: line 4 is 30, line 4 is 30, line 3 is 37", 100),  # repeated
        ("Results: line 1 is 25, line 4 is 30, line 3 is 37, line 6 is 0", 100),  # of lines not asked for
        ("Results: line 4 is 30, line 3 is 37.\nThese results include line 3, which is 25 + 12.", 100),
        ("Results: line 4 is 1, line 3 is 2.\nLet me check.\nResults: line 4 is 30, line 3 is 37.", 100),
        ("Results: line 4 is 30.", 50),  # missing
        ("Results: line 4 is 30, line 3 is 3", 50),  # cut at the length
        ("Results: line 4 is 30, line 3 is", 50),
        ("Results: line 4 is 30, line 3 is 38", 50),  # wrong
        ("Results: line 4 is 30, line 3 is 36, line 3 is 37", 50),  # contradictory
        ("Results: line 4 is 30, line 3 is 37.5", 50),
        ("Results: line 4 is 30, line 3 is -37", 50),
        ("Results: line 4 is 37, line 3 is 30", 0),
        ("Results: line 14 is 30, line 33 is 37", 0),
        ("Results: 30, 37", 0),  # of which lines?
        ("Line 4 is 30, line 3 is 37.", 0),  # no heading
        ("Results", 0),
        ("", 0),
    ],
)
def test_a_result_is_recalled_exactly_or_not(score, end, points):
    solved = SMALL.render_solution().partition("Results")[0]
    graded = score(solved + end)
    assert graded.score == points
    # what stands at the end is no step
    assert graded.also["steps"] == graded.also["holds"] == graded.also["carried"] == graded.also["read"] == 100
    assert graded.also["recalled_own"] == points
    assert score(end).score == points and score(end).also["recalled_own"] == score(end).also["steps"] == 0


@pytest.mark.parametrize(
    "line",
    [
        "Line 3: line 1 is 25, 25 + 12 = 37",
        "Line 3: 25 + 12 = 37",
        "- **Line 3**: line 1 + 12 = 25 + 12 = **37**.",
        "3. Line 3: line 1 is 25; $25 + 12 = 37$",
        "Line 3 (line 1 plus 12): 25 plus 12 equals 37",
        "| Line 3 | line 1 (25) + 12 = 37 |",
        "line 3 = 25 + 12 = 37",
    ],
)
def test_forms_of_a_step(score, line):
    lines = SMALL.render_solution().splitlines()
    also = score("\n".join([*lines[:2], line, *lines[3:]])).also
    assert all(value in (True, 100) for value in also.values())


def changed(line: int, new: str) -> str:
    lines = SMALL.render_solution().splitlines()
    return "\n".join([*lines[: line - 1], *([new] if new else []), *lines[line:]])


@pytest.mark.parametrize(
    "output, points, also",
    [
        # cannot add: what follows is carried over as it is in the answer, and right only by the true results
        (
            changed(3, "Line 3: line 1 is 25, 25 + 12 = 47").replace("37, 37 + 40 = 77", "47, 47 + 40 = 87")
            .replace("77, 77 - 10 = 67", "87, 87 - 10 = 77").replace("line 3 is 37.", "line 3 is 47."),
            50, {"recalled_own": 100, "steps": 50, "holds": 500 / 6, "read": 100, "carried": 100, "ended": True},
        ),
        # lost a row that it had generated, at a step and at the end
        (
            changed(5, "Line 5: line 3 is 30, 30 + 40 = 70"),
            100, {"recalled_own": 100, "steps": 500 / 6, "holds": 100, "read": 100, "carried": 50, "ended": True},
        ),
        (
            SMALL.render_solution().replace("line 3 is 37.", "line 3 is 33."),
            50, {"recalled_own": 50, "steps": 100, "holds": 100, "read": 100, "carried": 100, "ended": True},
        ),
        # lost a row of the prompt: another line, another number, another sign
        (
            changed(6, "Line 6: line 3 is 37, 37 - 10 = 27"),
            100, {"recalled_own": 100, "steps": 500 / 6, "holds": 100, "read": 500 / 6, "carried": 100, "ended": True},
        ),
        (
            changed(6, "Line 6: line 5 is 77, 77 + 11 = 88"),
            100, {"recalled_own": 100, "steps": 500 / 6, "holds": 100, "read": 500 / 6, "carried": 100, "ended": True},
        ),
        (
            changed(2, "Line 2: 42 - 7 = 35"),
            100, {"recalled_own": 100, "steps": 500 / 6, "holds": 100, "read": 500 / 6, "carried": 75, "ended": True},
        ),
        # a line left out, and what builds on it came from nowhere
        (
            changed(3, ""),
            100, {"recalled_own": 50, "steps": 500 / 6, "holds": 100, "read": 100, "carried": 200 / 3, "ended": True},
        ),
        # cut in the middle, and in the results
        (
            SMALL.render_solution().partition("Line 5")[0],
            0, {"recalled_own": 0, "steps": 400 / 6, "holds": 100, "read": 100, "carried": 100, "ended": False},
        ),
        (
            SMALL.render_solution().partition(", line 3 is")[0],
            50, {"recalled_own": 50, "steps": 100, "holds": 100, "read": 100, "carried": 100, "ended": False},
        ),
        # nothing, and the ledger again
        ("", 0, {"recalled_own": 0, "steps": 0, "holds": None, "read": None, "carried": None, "ended": False}),
        (
            SMALL.render_lines() + "\nLine 901: 31 + 24 = 55",
            0, {"recalled_own": 0, "steps": 0, "holds": None, "read": None, "carried": None, "ended": False},
        ),
    ],
)  # fmt: skip
def test_what_went_wrong_can_be_told(score, output, points, also):
    graded = score(output)
    assert graded.score == points and graded.also == pytest.approx(also)


def test_of_a_line_written_twice_the_last_counts(score):
    solved = SMALL.render_solution()
    assert score(solved.replace("25 + 12 = 37", "25 + 12 = 38") + "\n" + solved).also["holds"] == 100
    but = score(solved + "\nBut line 3 is 38.")
    assert but.score == 50 and but.answer == "line 4 is 30" and score(solved).answer == "line 4 is 30, line 3 is 37"


def test_an_answer_that_loops_is_read_in_time(score):
    import time

    started = time.perf_counter()
    score("Results: line " * 20_000)
    score("Line 3: 25 + 12 = " * 20_000)
    assert time.perf_counter() - started < 5


def test_a_number_that_never_ends_is_none(score):
    solved, endless = SMALL.render_solution(), "7" * 5000
    for line in (f"Line 3: 25 + 12 = {endless}", f"Line {endless}: 25 + 12 = 37", f"Line 3: line {endless}"):
        assert score(f"{line}\n{solved}") == score(solved)
    assert score(solved.replace("line 3 is 37", f"line 3 is {endless}")).answer == "line 4 is 30"
    assert score(f"{solved}, line {endless} is 5") == score(solved)


@pytest.mark.parametrize(
    "own, message",
    [
        ({"steps": [0]}, "task.steps=[0]: different whole numbers from 1 to 900"),
        ({"steps": [60, 60]}, "task.steps=[60, 60]: different whole numbers from 1 to 900"),
        ({"steps": 17}, "task.steps=17: at least 18 with task.recalled=5 and task.early=0.5"),
        ({"steps": 29, "early": 0.3}, "task.steps=29: at least 30 with task.recalled=5 and task.early=0.3"),
        ({"early": 0.001}, "task.recalled=5 and task.early=0.001: fewer or a larger part; no ledger has 9000 lines"),
        ({"recalled": 1}, "task.recalled=1: a whole number of at least 2"),
        ({"early": 0}, "task.early=0: a number in (0, 1]"),
        ({"early": 1.5}, "task.early=1.5: a number in (0, 1]"),
        ({"largest": 0}, "task.largest=0: a whole number of at least 1"),
        ({"largest": 90}, "task.largest=90: at most 89"),
        ({"samples": 0}, "task.samples=0: a whole number of at least 1"),
        ({"max_new_tokens": 0}, "task.max_new_tokens=0: a whole number of at least 1"),
        ({"limit": 0}, "limit=0: a whole number of at least 1"),
    ],
)
def test_a_wrong_setting_is_said_in_one_line(own, message):
    with pytest.raises(SettingError) as error:
        ledger_task(**own).check()
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
    ledger_task(steps=[18, 30]).check()


def test_the_fingerprint_follows_the_wording(monkeypatch):
    before = ledger_task().fingerprint()
    assert before == replace(ledger_task(), samples=3).fingerprint()
    monkeypatch.setattr("kvbench.tasks.ledger.task.PREFIX", PREFIX + " ")
    assert ledger_task().fingerprint() != before


@pytest.mark.parametrize("question", [only_in_full("visible"), "hidden"])
def test_two_methods_and_both_questions(question, kvbench, tmp_path):
    for method in (("snapkv", "method.decoding=true", "budget=0.5"), ("keydiff", "budget=1.0")):
        name, *more = method
        own = ("task=ledger", "task.steps=[18]", "task.max_new_tokens=8", "limit=1", f"question={question}")
        code, out, err = kvbench(*own, f"method={name}", "method.decode_size=64", *more)
        assert code == 0 and "ledger_18" in out and "recalled_own" in out, err
    found = read_runs(tmp_path / "results")
    assert set(found) == {"full", "snapkv", "keydiff"}
    for _, records in found.values():
        [record] = records
        assert record["error"] is None and record["tokens_out"] == 8 and record["meta"]["steps"] == 18
    full, *cut = (found[name][1][0] for name in ("full", "snapkv", "keydiff"))
    assert full["rows_attended"] > 400
    most = 100 if question == "hidden" else 130  # the prompt of a visible question is longer
    for record in cut:
        assert record["while_decoding"] == "cuts" and record["rows_attended"] < most


@pytest.mark.parametrize(
    "own, named", [("steps=[20,160]", "task.steps=160: "), ("max_new_tokens=4000", "task.max_new_tokens=4000, ")]
)
def test_what_does_not_fit_the_model_leaves_nothing(own, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = ["model=hf", f'model.path="{REFERENCE}"', "model.longest=4096"]
    found = run_cli(["task=ledger", f"task.{own}", *model, "method=snapkv", "device=cpu"], monkeypatch, capsys)
    assert_refused(found, named, tmp_path)
    assert found[2].endswith(" tokens with this tokenizer, the model takes 4096\n")

"""The closing table, against hand-written records: every printed number is recomputed from them."""

import csv
import io
import statistics

import numpy as np
import pytest

from kvbench.analysis.closing_table import (
    EMBEDDED_NOTE,
    MINIATURE_NOTE,
    SHARED_GPU_NOTE,
    SHARED_PREFILL_NOTE,
    SHARED_QUESTION_NOTE,
    is_embedded,
    median_error,
)
from kvbench.analysis.intervals import Values, mean
from kvbench.analysis.paired import PairedScores, compare_subtasks
from kvbench.analysis.pass_at_k import estimate_pass_at_k
from kvbench.validation import SettingError, escape
from tests.support.single_tables import build_closing_table, compare_scores

HEADING = {"model": "tiny", "revision": "0a1b", "method": "snapkv", "budget": 0.1}
# uid: score, resident of 1000 bytes, rows attended of 200, TTFT, decode ms, tokens out (full, then method)
FULL = {
    "vt/0": (100, 1000, 200, 90, 40, 5),
    "vt/1": (100, 1000, 200, 110, 44, 5),
    "vt/2": (50, 1000, 200, 103, 30, 4),
    "niah/0": (100, 1000, 200, 80, 12, 3),
    "niah/1": (100, 1000, 200, 82, 10, 3),
}
METHOD = {
    "vt/0": (80, 100, 20, 95, 36, 5),
    "vt/1": (40, 120, 24, 115, 28, 5),
    "vt/2": (50, 110, 26, 104, 18, 4),
    "niah/0": (100, 150, 30, 85, 8, 3),
    "niah/1": (0, 170, 30, 87, 0, 1),
}


def records(table: dict[str, tuple], **changed: object) -> dict[str, dict]:
    found = {}
    for index, (uid, (score, resident, attended, ttft, decode, tokens)) in enumerate(table.items()):
        found[uid] = {
            "uid": uid,
            "subtask": uid.split("/")[0],
            "group": "",
            "index": index,
            "prompt_hash": f"p{uid}",
            "target_hash": f"t{uid}",
            "score": score,
            "resident_bytes": resident,
            "full_bytes": 1000,
            "rows_attended": attended,
            "rows_seen_decoding": 200,
            "ttft_ms": ttft,
            "decode_ms": decode,
            "tokens_out": tokens,
            "meta": {},
            "error": None,
            "output": "an answer",
            "stop": "eos",
            "also": {},
        } | changed
    return found


def failed(found: dict[str, dict], uid: str, error: str | None) -> dict[str, dict]:
    empty = dict.fromkeys(("score", "resident_bytes", "rows_attended", "ttft_ms", "decode_ms", "tokens_out"))
    return found | {uid: found[uid] | empty | {"error": error}}


# vt: d = -20, -60, 0, s² = 933.3, error 17.64, t(2) = 4.303: -26.67 ± 75.9,
# with one unseen sample of +100 up to +64.0; niah: d = 0, -100 says nothing;
# shares of vt: 330 / 3000, 70 / 600; medians of 90 110 103, of 40/4 44/4 30/3, of 36/4 28/4 18/3 = 9 7 6
GOLDEN = """\
model: tiny
revision: 0a1b
method: snapkv
budget: 0.1

         score   score                     95 %  lost/gained     bytes      rows  TTFT ms  TTFT ms  TPOT ms  TPOT ms
subtask   full  method   diff          interval        /same  n   held  attended     full   method     full   method
--------------------------------------------------------------------------------------------------------------------
vt        83.3    56.7  -26.7   [-100.0, +64.0]        2/0/1  3  11.0%     11.7%    103.0    104.0     10.0      7.0
niah     100.0    50.0  -50.0  [-100.0, +100.0]        1/0/1  2  16.0%     15.0%     81.0     86.0      5.5      4.0
--------------------------------------------------------------------------------------------------------------------
average   91.7    53.3  -38.3  [-100.0, +100.0]        3/0/2  5  13.5%     13.3%     92.0     95.0      7.8      5.5

                                                     95 %  lost/gained
answers                full  method  diff        interval        /same  n
-------------------------------------------------------------------------
empty answers %         0.0     0.0  +0.0  [-65.2, +65.2]        0/0/5  5
at the length limit %   0.0     0.0  +0.0  [-65.2, +65.2]        0/0/5  5
tokens                  3.8     3.3  -0.5    [-6.9, +5.9]        1/0/4  5

Model tiny, revision 0a1b.
diff: method - full in points, with its 95 % interval, paired and clustered by context. Right-or-wrong scores have exact
  binomial bounds if fewer than 6 contexts differ. Intervals of partial scores allow for one more context with the most
  extreme score. lost/gained/same: samples that score less, more or the same with the method.
bytes held, rows attended: shares of the full cache's bytes, without files beside the model, and of its rows per decoded
  token. TTFT: time to first token. TPOT: time per output token after the first. Both times are medians over samples;
  those of the full cache may come from an earlier run.
answers: means over the subtasks that have the metric, each with the same weight.
"""


def lines(table: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(table)))


def test_text():
    table = build_closing_table(records(FULL), records(METHOD), HEADING)
    assert table.to_text(120) == GOLDEN
    shuffled = dict(reversed(records(METHOD).items()))
    assert build_closing_table(dict(reversed(records(FULL).items())), shuffled, HEADING) == table


def test_the_error_of_a_median():
    # of 5 values the least and the largest hold the median with a chance of 15/16: (30 - 2) / 2 / z(1 - 1/32)
    assert median_error([3, 30, 2, 5, 4]) == pytest.approx(14 / statistics.NormalDist().inv_cdf(1 - 1 / 32))
    assert median_error([7] * 9) == 0 and median_error([7]) is None
    draw = np.random.default_rng(0)
    samples = draw.exponential(100, (2000, 40))
    errors = np.array([median_error(own.tolist()) for own in samples])
    assert 0.9 <= (abs(np.median(samples, 1) - 100 * np.log(2)) <= 1.96 * errors).mean() <= 0.98


def test_narrow_text_goes_into_blocks():
    table = build_closing_table(records(FULL), failed(records(METHOD), "vt/0", "out_of_memory"), HEADING)
    wide = [line.split() for line in table.to_text(200).splitlines()]
    for width in (60, 80, 100):
        text = table.to_text(width)
        assert max(map(len, text.splitlines())) <= width
        rows = [line.split()[1:] for line in text.splitlines() if line.startswith("niah ")]
        assert len(rows) > 1 and sum(rows, []) == next(line[1:] for line in wide if line and line[0] == "niah")
    long = {uid: record | {"subtask": "s" * 90} for uid, record in records(METHOD).items()}
    text = build_closing_table(records(FULL), long, HEADING).to_text(80)
    assert "sss...  " in text and max(map(len, text.splitlines())) <= 80


def test_markdown():
    text = build_closing_table(records(FULL), records(METHOD), HEADING | {"run": "a|b"}).to_markdown()
    assert text.startswith("* model: tiny\n* revision: 0a1b\n* method: snapkv\n* budget: 0.1\n* run: a\\|b\n\n| subt")
    table = [line for line in text.splitlines() if line.startswith("|")]
    table, also = table[:5], table[5:]
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1 and len(also) == 5
    assert table[2].startswith(
        "| vt | 83.3 | 56.7 | -26.7 | \\[-100.0, +64.0\\] | 2/0/1 | 3 | 11.0% | 11.7% | 103.0 | 104.0 |"
    )
    assert "\n* Model tiny, revision 0a1b.\n" in text


def test_every_number_is_recomputed_from_the_records():
    found = lines(build_closing_table(records(FULL), records(METHOD), HEADING).to_csv())
    *rows, last = [row for row in found if row["kind"] != "also"]
    assert [row["subtask"] for row in (*rows, last)] == ["vt", "niah", "average"]
    numbers = ("mean_full", "mean_method", "difference", "held", "attended", "ttft_full", "ttft", "tpot_full", "tpot")
    parts = []
    for row in rows:
        full = [value for uid, value in FULL.items() if uid.startswith(row["subtask"])]
        method = [value for uid, value in METHOD.items() if uid.startswith(row["subtask"])]
        expected = (
            statistics.mean(value[0] for value in full),
            statistics.mean(value[0] for value in method),
            statistics.mean(b[0] - a[0] for a, b in zip(full, method, strict=True)),
            statistics.mean(value[1] / 1000 for value in method),
            statistics.mean(value[2] / 200 for value in method),
            statistics.median(value[3] for value in full),
            statistics.median(value[3] for value in method),
            statistics.median(value[4] / (value[5] - 1) for value in full if value[5] > 1),
            statistics.median(value[4] / (value[5] - 1) for value in method if value[5] > 1),
        )
        assert [float(row[name]) for name in numbers] == pytest.approx(expected)
        names = [str(place) for place in range(len(full))]
        interval = compare_scores([value[0] for value in full], [value[0] for value in method], names)
        assert [float(row[name]) for name in ("low", "high", "error")] == [interval.low, interval.high, interval.error]
        assert (int(row["samples"]), int(row["groups"])) == (len(full), len(full))
        assert int(row["lost"]) == sum(b[0] < a[0] for a, b in zip(full, method, strict=True))
        assert (int(row["gained"]), int(row["lost"]) + int(row["same"])) == (0, len(full))
        for side, values in (("full", full), ("method", method)):
            own = mean([Values([value[0] for value in values], names)])
            assert [float(row[f"{side}_{edge}"]) for edge in ("low", "high", "error")] == [own.low, own.high, own.error]
        groups = [f"{row['subtask']}{name}" for name in names]
        parts.append(PairedScores([value[0] for value in full], [value[0] for value in method], groups))
    for name in numbers:
        assert float(last[name]) == pytest.approx(statistics.mean(float(row[name]) for row in rows))
    interval = compare_subtasks(parts)
    assert [float(last[name]) for name in ("low", "high", "error")] == [interval.low, interval.high, interval.error]
    assert (last["samples"], last["model"], last["budget"]) == ("5", "tiny", "0.1")


def test_groups_are_contexts():
    one = build_closing_table(records(FULL, group="same"), records(METHOD, group="same"), HEADING)
    assert {row.interval.groups for row in one.rows} == {1}
    assert one.rows[0].interval.low is None and one.rows[-1].interval.low is None
    assert "  n/a        2/0/1  3  " in one.to_text(
        120
    ) and "There is no interval if a subtask has only one context" in one.to_text(200)
    assert lines(one.to_csv())[0]["low"] == ""


@pytest.mark.parametrize(("error", "kind"), [("out_of_memory", "out_of_memory"), (None, "no_score")])
def test_failures_leave_both_sides_and_are_counted(error, kind):
    method = failed(records(METHOD), "vt/1", error)
    table = build_closing_table(failed(records(FULL), "vt/2", error), method, HEADING)
    vt = table.rows[0]
    assert (vt.interval.mean_full, vt.interval.mean_method, vt.interval.samples, vt.failed) == (100, 80, 1, 2)
    assert (vt.held, vt.ttft_full, vt.ttft) == (0.1, 90, 95)
    assert table.rows[-1].failed == 2 and table.rows[-1].interval.samples == 3
    for side in ("full cache's", "method's"):
        assert f"1 of 5 samples failed in the {side} run (1 {kind}) and are left out on both sides." in table.notes
    assert "  failed  " in table.to_text(140)


def test_a_subtask_that_failed_altogether_is_shown_and_named():
    method = failed(failed(records(METHOD), "niah/0", "out_of_memory"), "niah/1", "out_of_memory")
    table = build_closing_table(records(FULL), method, HEADING)
    vt, niah, last = table.rows
    assert (niah.interval, niah.held, niah.ttft, niah.tpot_full, niah.failed) == (None, None, None, None, 2)
    assert (last.interval, last.held) == (vt.interval, vt.held)
    assert "The average leaves out niah: no sample was answered." in table.notes
    (line,) = [line for line in table.to_text(200).splitlines() if line.startswith("niah ")]
    assert line.split() == ["niah", *["n/a"] * 5, "0", "2", *["n/a"] * 6]
    nothing = build_closing_table(failed(records(FULL) | {}, "vt/0", "x"), {}, HEADING)
    assert (
        nothing.rows[-1].interval is None
        and len(nothing.rows) == 1
        and not nothing.also
        and "average" in nothing.to_text(80)
    )


def test_samples_without_a_partner_are_counted():
    full, method = records(FULL), records(METHOD)
    del full["vt/0"], method["vt/1"], method["niah/1"]
    table = build_closing_table(full, method, HEADING)
    assert table.rows[-1].interval.samples == 2
    assert "2 samples of the full cache's run have no partner in the other run and are left out." in table.notes
    assert "1 sample of the method's run has no partner in the other run and is left out." in table.notes


def test_a_time_to_first_token_of_shared_prompts_says_so():
    full, method = records(FULL, shared_prefill=1), records(METHOD, shared_prefill=12)
    one = {uid: record | {"shared_prefill": 12 if uid == "vt/0" else 1} for uid, record in full.items()}
    said = {
        "method": build_closing_table(full, method, HEADING),
        "full cache and the method": build_closing_table(one, method, HEADING),
        "full cache": build_closing_table(one, None, HEADING),
        None: build_closing_table(full, records(METHOD), HEADING),
    }
    for sides, table in said.items():
        found = [note for note in table.notes if note.startswith("Time to first token")]
        assert found == ([SHARED_PREFILL_NOTE.format(sides)] if sides else [])


def test_a_time_to_first_token_with_the_questions_of_others_is_left_out():
    full, method = records(FULL), records(METHOD, asked_together=4)
    plain, table = (build_closing_table(full, own, HEADING) for own in (records(METHOD), method))
    assert SHARED_QUESTION_NOTE.format("method") in table.notes
    for own, alone in zip(table.rows, plain.rows, strict=True):
        assert own.ttft is None and (own.tpot, own.ttft_full) == (alone.tpot, alone.ttft_full)


def test_times_of_processes_that_shared_a_gpu_are_left_out():
    full, method = records(FULL), records(METHOD)
    plain = build_closing_table(full, method, HEADING)
    shared = build_closing_table(full, records(METHOD, gpu_processes=4), HEADING)
    method["vt/1"]["gpu_processes"] = 2
    some = build_closing_table(full, method, HEADING)
    for table in (shared, some):
        assert SHARED_GPU_NOTE.format("method") in table.notes
    for own, alone in zip(shared.rows, plain.rows, strict=True):
        assert (own.ttft, own.tpot, own.ttft_error, own.tpot_error) == (None,) * 4
        assert (own.ttft_full, own.tpot_full) == (alone.ttft_full, alone.tpot_full)
        assert (own.held, own.attended, own.interval) == (alone.held, alone.attended, alone.interval)
    assert (some.rows[0].ttft, some.rows[0].tpot) == (statistics.median([95, 104]), statistics.median([36 / 4, 18 / 3]))
    both = build_closing_table(records(FULL, gpu_processes=4), records(METHOD, gpu_processes=4), HEADING)
    assert SHARED_GPU_NOTE.format("full cache and the method") in both.notes
    (line,) = [line for line in both.to_text(200).splitlines() if line.startswith("vt ")]
    assert line.split()[-4:] == ["n/a"] * 4


def test_runs_on_other_prompts_are_refused():
    with pytest.raises(SettingError, match="^results: niah/0: prompt_hash"):
        build_closing_table(records(FULL), records(METHOD, prompt_hash="other"), HEADING)


def test_the_full_cache_alone():
    table = build_closing_table(records(FULL), None, HEADING | {"method": "full"})
    text = table.to_text(80)
    assert "diff " not in text and "lost" not in text and "method" not in text.replace("method: full", "")
    (line,) = [line for line in text.splitlines() if line.startswith("vt ")]
    own = mean([Values([100, 100, 50], ["0", "1", "2"])])
    interval = [f"[{own.low:.1f},", f"{own.high:.1f}]"]
    assert line.split() == ["vt", "83.3", *interval, "3", "100.0%", "100.0%", "103.0", "10.0"]


def test_what_must_be_said():
    plain = build_closing_table(records(FULL), records(METHOD), {}).notes
    assert plain == ("Model n/a, revision not recorded.",)
    meta = {"haystack": "generated", "qa": "generated"}
    table = build_closing_table(records(FULL, meta=meta), records(METHOD, meta=meta), HEADING | {"embedded": True})
    for text in (table.to_text(400), table.to_markdown(), table.to_csv()):
        assert EMBEDDED_NOTE in text and "embedded: " not in text
        assert "Generated text (haystack; questions and answers)" in text
    assert "Generated" not in " ".join(build_closing_table(records(FULL, meta={"haystack": "essays"}), None, {}).notes)


def test_runs_of_the_first_embedded_model_are_still_marked():
    """conf/model/ has no file of this name any more."""
    assert is_embedded({"model": {"name": "reference_v1"}}) and not is_embedded({"model": {"name": "hf"}})


def test_nothing_steers_the_terminal_or_breaks_a_cell():
    assert escape("é|\x1b[31m\n\r\0\u2028\u202e\x9b\ud800") == "é|\\x1b[31m\\n\\r\\x00\\u2028\\u202e\\x9b\\ud800"
    evil = "\x1b]0;x\x07|a\n\u202eb\ud800"
    hostile = {
        uid: record | {"subtask": evil, "also": {evil: 1.0}, "meta": {"data": evil}}
        for uid, record in records(METHOD).items()
    }
    table = build_closing_table(
        records(FULL, also={evil: 1.0}), failed(hostile, "vt/0", evil), {"model": evil, evil: evil, "task": evil}
    )
    for text in (table.to_text(120), table.to_markdown(), table.to_csv()):
        assert text.encode() and not {"\x1b", "\x07", "\u202e"} & set(text)
        assert "x1b]0;x" in text.replace("\\]", "]")
    assert [row["kind"] for row in lines(table.to_csv())] == ["subtask", "average", *["also"] * 4]
    table_lines = [line for line in table.to_markdown().splitlines() if line.startswith("|")][:4]
    assert (
        len(table.to_markdown().split("\n| answers |")) == 2
        and len({line.replace("\\|", "").count("|") for line in table_lines}) == 1
    )


def test_averages_are_the_tasks_own():
    weights = {"both": {"vt": 1, "niah": 3}, "vt alone": {"vt": 2.0}, "more": {"vt": 1, "qa": 1}}
    table = build_closing_table(records(FULL), records(METHOD), HEADING, weights)
    vt, niah, both, alone, more = table.rows
    assert [row.subtask for row in table.rows[2:]] == list(weights)
    parts = [
        [[one[uid][0] for uid in one if uid.startswith(name)] for one in (FULL, METHOD)] for name in ("vt", "niah")
    ]
    parts = [PairedScores(*own, [f"{at}{n}" for n in range(len(own[0]))]) for at, own in enumerate(parts)]
    assert both.interval == compare_subtasks(parts, [1, 3])
    assert both.interval.difference == pytest.approx((vt.interval.difference + 3 * niah.interval.difference) / 4)
    for name in ("held", "attended", "ttft_full", "ttft", "tpot_full", "tpot"):
        assert getattr(both, name) == pytest.approx((getattr(vt, name) + 3 * getattr(niah, name)) / 4)
    assert (alone.interval, alone.held) == (vt.interval, vt.held)
    assert (more.interval, more.held) == (
        None,
        None,
    ) and "There is no more: no sample of qa was answered." in table.notes
    text = table.to_text(120).splitlines()
    assert [line for line in text if line.startswith("more ")][0].split() == ["more", *["n/a"] * 5, "0", *["n/a"] * 6]
    rules = [at for at, line in enumerate(text) if line.startswith("---")]
    assert [text[at].split()[0] for at in range(rules[1] + 1, rules[1] + 4)] == ["both", "vt", "more"]
    gone = failed(failed(records(METHOD), "niah/0", "x"), "niah/1", "x")
    table = build_closing_table(records(FULL), gone, HEADING, weights)
    assert table.rows[2].interval is None and table.rows[2].failed == 2
    assert "There is no both: no sample of niah was answered." in table.notes


def test_further_metrics_and_how_answers_ended():
    def changed(table: dict[str, tuple], values: dict[str, dict]) -> dict[str, dict]:
        return {uid: record | values.get(uid, {}) for uid, record in records(table).items()}

    full = changed(FULL, {uid: {"also": {"exact": True, "f1": 80, "ppl": 250.0}} for uid in FULL})
    own = {uid: {"also": {"exact": uid == "vt/0", "f1": 60, "ppl": 300.0 + at}} for at, uid in enumerate(METHOD)}
    own["vt/1"] = {"also": {"exact": None, "f1": 20}, "stop": "length", "output": " \n"}
    table = build_closing_table(full, changed(METHOD, own), HEADING)
    rows = {row.subtask: row.interval for row in table.also}
    assert list(rows) == ["exact %", "f1", "ppl", "empty answers %", "at the length limit %", "tokens"]
    # vt: exact of 0 and 2 (1 has none) 100, 0; niah 0, 0; each subtask weighs the same
    assert (rows["exact %"].mean_full, rows["exact %"].mean_method, rows["exact %"].samples) == (100, 25, 4)
    assert (rows["f1"].mean_full, rows["f1"].mean_method) == (80, pytest.approx(((60 + 20 + 60) / 3 + 60) / 2))
    assert rows["ppl"].mean_method == pytest.approx(((300 + 302) / 2 + (303 + 304) / 2) / 2)
    assert rows["ppl"].high > rows["ppl"].difference == pytest.approx(52.25)  # beyond 100 points: not bounded
    small = {"also": {"rouge1": 2.0}, "meta": {"most": {"rouge1": 10.0}}}
    least = build_closing_table(
        *(changed(table, dict.fromkeys(FULL, small)) for table in (FULL, METHOD)), HEADING
    ).also[0]
    assert least.interval.difference == 0 and -10 <= least.interval.low < 0 < least.interval.high <= 10
    for name in ("empty answers %", "at the length limit %"):
        assert (rows[name].mean_full, rows[name].mean_method) == (0, pytest.approx(100 / 6))
    assert rows["tokens"].mean_method == pytest.approx(((5 + 5 + 4) / 3 + (3 + 1) / 2) / 2)
    for text in (table.to_text(120), table.to_markdown(), table.to_csv()):
        assert "f1" in text and "ppl" in text
    assert [row["subtask"] for row in lines(table.to_csv()) if row["kind"] == "also"] == list(rows)


def test_repeats_have_pass_at_k():
    right = {"full": [[1, 1, 0, 1], [0, 1, 0, 0], [1, 1, 1, 1]], "method": [[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]]}

    def made(side: str) -> dict[str, dict]:
        table = {f"aime/{p}/{n}": (100 * right[side][p][n], *METHOD["vt/0"][1:]) for p in range(3) for n in range(4)}
        found = records(table)
        for uid, record in found.items():
            record |= {"group": uid[:6], "prompt_hash": uid[:6], "target_hash": uid[:6]}
        return found

    table = build_closing_table(made("full"), made("method"), HEADING)
    assert (table.rows[0].interval.samples, table.rows[0].interval.groups) == (12, 3)
    assert "avg@4: each prompt was answered 4 times, and its answers form one group." in table.notes
    rows = {row.subtask: row.interval for row in table.also}
    for k in (2, 4):
        full, method = (
            [100 * estimate_pass_at_k(k, 4, sum(own)) for own in right[side]] for side in ("full", "method")
        )
        assert rows[f"pass@{k}"] == compare_scores(full, method, ["0", "1", "2"])
    assert "pass@" not in "".join(row.subtask for row in build_closing_table(records(FULL), None, {}).also)


def test_miniature_data_is_said():
    table = build_closing_table(
        records(FULL), records(METHOD, meta={"data": "miniature"}), HEADING | {"task": "longbench"}
    )
    assert table.heading["task"] == "longbench (miniature)" and MINIATURE_NOTE in table.notes
    table = build_closing_table(records(FULL), records(METHOD, meta={"data": "hub"}), HEADING | {"task": "longbench"})
    assert table.heading["task"] == "longbench (hub)" and MINIATURE_NOTE not in table.notes

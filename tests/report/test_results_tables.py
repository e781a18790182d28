"""The tables of the pages of results, and the sentences about them, follow from the lines."""

import pytest

from kvbench.analysis.byte_front import EQUAL
from kvbench.analysis.cell_comparisons import CellComparison
from kvbench.analysis.result_lines import PartNumbers
from kvbench.analysis.text_table import Column, format_markdown
from kvbench.report.results_cells import count_signs, find_front, split_sections
from kvbench.report.results_conclusions import conclude_lengths
from kvbench.report.results_cost import (
    CostTable,
    describe_slow,
    find_fastest,
    format_costs,
    read_cost_tables,
    read_prefill_ratios,
)
from kvbench.report.results_models import Measured, describe_turned, format_lengths, format_models
from kvbench.report.results_pictures import shorten_label
from kvbench.report.results_tables import (
    compare_to_full,
    describe_holders,
    describe_separation,
    format_bytes,
    format_ends,
    format_equal_bytes,
    format_scores,
    format_section,
    format_spreads,
    format_subtasks,
)
from kvbench.report.results_text import format_ranks, format_score, wrap
from tests.support.measured_lines import make_full, make_line, pair_bytes, rank


def split(*lines: dict):
    [section] = split_sections({"a": [make_full(), *lines]})
    return section


def list_rows(lines: list[str]) -> list[list[str]]:
    """The cells of a Markdown table, without its head."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")][1:]


def test_only_a_narrow_interval_shows_that_a_cell_loses_little():
    full = make_full(score=20.4)
    names = ("difference", "low", "high")
    ends = (-11.5, -23.5, 0.5), (-0.4, -1.5, 0.7), (-20.0, -25.0, -15.0)
    cells = [
        make_line("tova", 0.2, score, **dict(zip(names, end, strict=True)))
        for score, end in zip((8.9, 20.0, 2.0), ends, strict=True)
    ]
    kept = "1 of 3 cells is shown to lose at most 2.0 points; of the others, "
    assert compare_to_full(cells, full, 3.0) == f"{kept}1 is shown to score less and 1 is undecided."
    signed = [line | {"difference_sign": 0} for line in cells]
    assert compare_to_full(signed, full, 3.0) == f"{kept}2 are undecided."
    assert compare_to_full([cells[1]], full, 1.0).startswith("None of 1 cells is shown to lose at most 1.0 points: ")
    assert [format_score(line, full, 3.0) for line in (*cells, full)] == ["8.9", "20.0 ✓", "2.0", "20.4"]


def test_only_cells_of_like_bytes_are_ranked_together():
    column = [make_line(label, 0.2, score) for label, score in {"tova": 70.0, "snapkv": 60.0, "sink": 5.0}.items()]
    alone = make_line("centroidkv", 0.2, 50.0, bytes_held=0.3)
    ranked = [*rank(column, (1, 2), (1, 2), (3, 3)), *rank([alone], (1, 1), name="30.0% of the bytes")]
    [sentence] = describe_separation(split(*ranked), 3.0)
    assert (
        "2 of 3 pairs of cells at 20.0% of the bytes can be told apart. The best of these 3 may be tova or" in sentence
    )
    assert "30.0%" not in sentence and [format_ranks(line) for line in ranked] == [
        *("1 to 2 of 3", "1 to 2 of 3", "3 of 3", ""),
    ]
    packed = [make_line(f"{label} · int4", 0.2, 89.0, codec="int4", low=-1.0) for label in ("tova", "sink")]
    packed = rank([line | {"bytes_held": 0.06} for line in packed], (1, 2), (1, 2), name="6.0% of the bytes")
    larger = [line | {"budget": 0.5, "hash": f"{line['hash']} more"} for line in packed]
    [sentence] = describe_separation(split(*ranked, *packed, *larger), 3.0)
    assert "None of 4 cells is shown to lose" in sentence and "6.0%" not in sentence  # no class of evicting cells
    [sentence] = describe_separation(split(*packed), 3.0)
    assert "The two cells at 6.0% of the bytes cannot be told apart. Any of these 2 may be the best." in sentence
    assert "2 of 2 cells are shown to lose" in sentence
    apart = rank(packed, (1, 1), (2, 2), name="6.0% of the bytes")
    [sentence] = describe_separation(split(*apart), 3.0)
    assert "The two cells at 6.0% of the bytes can be told apart. The best of these 2 is tova · int4." in sentence


def test_long_answers_say_how_they_end():
    lines = [make_full(tokens_out=1346.8), make_line("sink", 0.2, 9.0, tokens_out=812.4, at_limit=0.25)]
    [section] = split_sections({"a": [line | {"task": "ledger"} for line in lines]})
    assert list_rows(format_ends(section)) == [
        ["full cache", "100 %", "90.0", "1,347", "0.0%"],
        ["sink", "20 %", "9.0", "812", "25.0%"],
    ]
    assert format_ends(split(lines[1])) == []


def test_rows_go_by_their_mean_score_and_say_their_bytes():
    cells = [make_line("sink", 0.2, 60.0), make_line("tova", 0.2, 50.0), make_line("tova", 0.5, 90.0)]
    table = format_scores(split(*cells), 3.0)
    head = "| method | 50 % score | 50 % diff | 50 % bytes | 20 % score | 20 % diff | 20 % bytes |"
    assert table[0] == head and [row[0] for row in list_rows(table)] == ["tova", "sink", "full cache"]
    assert [row[6] for row in list_rows(table)] == ["20.0%", "20.0%", "100.0%"]


def test_scores_by_subtask_say_how_precise_they_are():
    lines = [make_full(subtasks=2, n=72), make_line("sink", 0.2, 40.0), make_line("tova", 0.2, 50.0)]
    means = {"full cache": {"niah_a": 100.0, "ruler_vt": 80.0}, "sink": {"niah_a": 40.4, "ruler_vt": 39.6}}
    [section] = split_sections({"a": lines}, {"a": PartNumbers(lines, subtasks=means)})
    text, _, head, _, *rows = format_subtasks(section, section.cells[1:])
    assert head == "| cell | mean | niah a | vt |"
    assert rows == ["| sink | 40.0 | 40 | 40 |", "| full cache | 90.0 | 100 | 80 |"]  # nothing is known of tova
    assert " ".join(text.split()).endswith(
        "The cells hold 20 % of the bytes. With 36 samples a subtask, the 95 % interval of a number near 50 reaches "
        "at most from 33 to 67."
    )
    assert format_subtasks(split(*lines[1:]), lines[1:]) == []
    [few] = split_sections({"a": [lines[0] | {"n": 2}, *lines[1:]]}, {"a": PartNumbers(lines, subtasks=means)})
    assert format_subtasks(few, few.cells[1:]) == []  # one sample a subtask says nothing about its precision


def test_tables_do_not_mix_kinds_of_cells():
    """A reading cell holds all bytes, and a codec's or a threshold's bytes do not follow from the budget."""
    reading = make_line("quest", 0.2, 80.0, bytes_held=1.0, rows_kept=1.0, rows_attended=0.2)
    packed = make_line("tova · int4", 0.2, 70.0, codec="int4", bytes_held=0.06)
    decided = make_line("dms_threshold", "threshold=-3", 75.0, bytes_held=0.3)
    text = format_section(split(make_line("tova", 0.2, 70.0), reading, packed, decided), 3.0)
    starts = [place for place, line in enumerate(text) if line.startswith("| ") and "|---" in text[place + 1]]
    first, second, third = (
        list_rows(text[start:end]) for start, end in zip(starts, [*starts[1:], len(text)], strict=True)
    )
    assert [row[0] for row in first] == ["tova", "full cache"]
    assert [row[:3] for row in second] == [["quest", "20 %", "20.0%"], ["full cache", "100 %", "100.0%"]]
    assert [row[:3] for row in third] == [
        ["tova · int4", "20 %", "6.0%"],
        ["dms\\_threshold", "threshold=-3", "30.0%"],
        ["full cache", "100 %", "100.0%"],
    ]
    assert "quest holds all bytes" in " ".join(" ".join(text).split())


def test_the_page_says_which_methods_hold_all_bytes():
    cells = [make_line("quest", 0.2, 50.0, bytes_held=1.0, bytes_in_all=1.023), make_line("tova", 0.2, 50.0)]
    assert describe_holders(split(cells[1])) == []
    assert describe_holders(split(cells[0] | {"budget": "threshold=1"})) == []
    [sentence] = describe_holders(split(*cells))
    assert sentence.endswith("kept beside the rows, such as codes and bounds, makes this 102.3% (quest).")
    unknown = cells[0] | {"bytes_in_all": None}
    assert describe_holders(split(unknown)) == ["quest holds all bytes of the full cache."]


def test_falls_are_counted_jointly():
    cells = [
        {"question_gain_low": -19.0, "question_gain_high": -1.0, "question_gain_sign": sign} for sign in (0, 0, -1)
    ]
    assert count_signs(cells, "question_gain") == {-1: 1, 0: 2, 1: 0}


def test_pairs_at_equal_bytes_have_a_table():
    raw = make_line("tova", 0.2, 60.0)
    coded = pair_bytes(make_line("tova · int4", 0.71, 90.0, codec="int4", bytes_held=0.2), raw)
    text = format_equal_bytes([split(raw, coded)])
    assert "scores more in 1 of 1 pairs and less in 0. These signs" in " ".join(" ".join(text).split())
    assert list_rows(text) == [
        ["tova · int4", "71 %", "20 %", "20.0%", "90.0", "60.0", "+30.0 \\[+23.0, +37.0\\]"],
    ]
    assert format_equal_bytes([split(raw)]) == []


def test_presets_have_a_table_of_their_spread():
    scores = {"snapkv": 60.0, "snapkv kvpress": 62.0, "snapkv window=4": 20.0}
    cells = [make_line(label, 0.2, score, method="snapkv") for label, score in scores.items()]
    lines = [make_full(), *cells, make_line("tova", 0.2, 90.0)]
    pairs = (
        ("snapkv", "snapkv kvpress", 0),
        ("snapkv window=4", "snapkv", 1),
        ("snapkv window=4", "snapkv kvpress", 1),
    )
    varied = [
        CellComparison(one, other, (gain := scores[other] - scores[one], gain - 7, gain + 7), sign)
        for one, other, sign in pairs
    ]
    text = format_spreads(split_sections({"a": lines}, {"a": PartNumbers(lines, varied=varied)}))
    assert "**Part a: smollm2, ruler length 4096, question visible.** 2 of 3 pairs are shown to differ." in " ".join(
        text
    )
    ends = ["snapkv kvpress", "snapkv window=4"]
    numbers = ["62.0, 60.0, 20.0", "+42.0 \\[+35.0, +49.0\\]", "2 of 3"]
    assert list_rows(text) == [[*ends, "20 %", "3", *numbers]]
    assert format_spreads([split(cells[0])]) == []


def test_comparisons_are_compared_between_models():
    """The tuned model and the plain one: a pair with opposite signs, one alike, one not shown; one was made once.

    The cells of a fourth pair do not hold equal bytes in the plain model.
    """

    def measure(
        model: str, part: str, samples: int, protocol: str = "length 4096", **signs: int
    ) -> tuple[str, PartNumbers]:
        same = {"model": model, "protocol": protocol}
        lines = [make_full(n=samples, **same), make_line("snapkv", 0.2, 50.0, **same)]
        for label, sign in signs.items():
            held = 0.15 if (label, sign) == ("tova", -1) else 0.2
            lines.append(make_line(label, 0.2, 50.0 + 9 * sign, bytes_held=held, **same))
        known = {line["label"]: line["hash"] for line in lines}
        changes = {label: (9.0 * sign, 9.0 * sign - 1, 9.0 * sign + 1) for label, sign in signs.items()}
        planned = [CellComparison(known["snapkv"], known[label], changes[label], sign) for label, sign in signs.items()]
        by_subtask = {known["full cache"]: {"a": 90.0, "b": 90.0 if protocol == "length 4096" else 70.0}}
        return part, PartNumbers(lines, planned, subtasks=by_subtask)

    first = measure("smollm2_long", "few", 10, tova=-1)
    second = measure("smollm2_long", "many", 20, kvzip=1, keydiff=1, tova=1, sink=1, h2o=1)
    numbers = dict([measure("smollm2", "plain", 10, kvzip=1, keydiff=0, tova=-1, sink=-1), first, second])
    sections = split_sections({part: known.lines for part, known in numbers.items()}, numbers)
    text = format_models(sections)
    said = " ".join(" ".join(text).split())
    assert "at several lengths of one model yet" in said
    assert "scores 90.0 (smollm2_long ruler length 4096, part many, 20 samples a cell) and 90.0 (smollm2 ruler" in said
    more, less = "+9.0 \\[+8.0, +10.0\\]", "-9.0 \\[-10.0, -8.0\\]"
    tuned, plain = "smollm2\\_long ruler length 4096", "smollm2 ruler length 4096"
    assert list_rows(text) == [
        [tuned, plain, "3", "1", "1", "1"],
        ["first", "second", tuned, plain, "signs"],
        ["snapkv, 20 %", "sink, 20 %", more, less, "opposite"],
        ["snapkv, 20 %", "kvzip, 20 %", more, more, "same"],
        ["snapkv, 20 %", "keydiff, 20 %", more, "+0.0 \\[-1.0, +1.0\\], not shown", "open"],
        ["snapkv, 20 %", "tova, 20 %", more, f"{less}, 20 % and 15 %", ""],
    ]
    turned = describe_turned(sections)
    assert (
        turned.startswith("Even between these models, ") and "the same in 1 and opposite in 1; in 1, at least" in turned
    )
    longer = dict(numbers, longer=measure("smollm2_long", "longer", 10, protocol="length 16384", kvzip=-1, tova=-1)[1])
    sections = split_sections({part: known.lines for part, known in longer.items()}, longer)
    rows = list_rows(format_models(sections))
    assert rows[:4] == [
        [tuned, long := "smollm2\\_long ruler length 16384", "1", "0", "1", "0"],
        [tuned, plain, "3", "1", "1", "1"],  # at this length the models have more common comparisons
        ["all columns", "", "3", "0", "2", "1"],
        ["first", "second", tuned, long, plain, "signs"],
    ]
    assert describe_turned(sections) == (
        "Even between these models, the better of two cells changes: of 3 planned comparisons at equal bytes, the "
        "signs are the same in 1 and opposite in 1; in 1, at least one is not shown. Between prompts of several "
        "lengths, of 1 planned comparison at equal bytes, the signs are the same in 0 and opposite in 1; in 0, at "
        "least one is not shown."
    )
    assert rows[4] == ["snapkv, 20 %", "kvzip, 20 %", more, less, more, "opposite"]
    lengths = list_rows(format_lengths(sections))
    assert lengths[0] == ["full cache", "90.0", "", "90.0", ""]  # of parts many and longer
    assert lengths[3] == ["snapkv, 20 %", *(2 * ["50.0", "-40.0 \\[-45.0, -35.0\\]"])]
    assert [row[0] for row in lengths[1:3]] == ["kvzip, 20 %", "tova, 20 %"] and len(lengths) == 4  # others: one length
    assert conclude_lengths(sections, 3.0).write() == (
        "**Of 1 comparison at equal bytes, planned for several lengths, 0 show the same sign wherever they were made "
        "and 1 opposite ones (the signs of each part jointly at 95 %).** *(part many and part longer, smollm2_long, "
        "ruler, length 4096 and length 16384: pairs of cells)* In 0, a sign is not shown. They compare `snapkv` with "
        "`kvzip`. With the question visible, the full cache scores 90.0 (length 4096) and 90.0 (length 16384). From "
        "the shortest to the longest prompts, it falls most in `b`: from 90.0 to 70.0."
    )
    assert conclude_lengths(sections[:2], 3.0) is None and format_lengths(sections[:2]) == []
    sections = sections[:1]
    assert describe_turned(sections[:1]) == "" and format_models(sections[:1]) == []


def test_cells_are_matched_if_their_bytes_differ_by_little():
    for more, matched in ((EQUAL - 0.001, True), (EQUAL + 0.001, False)):
        lines = [{"bytes_held": held} for held in (0.2, 0.2 * (1 + more))]
        assert [Measured(None, *some, None).is_matched for some in (lines, lines[::-1])] == [matched] * 2


def test_the_front_has_no_cell_that_another_one_beats():
    cells = [
        {"bytes_held": held, "score": score} for held, score in ((0.5, 90), (0.2, 40), (0.2, 50), (0.4, 45), (1, 90))
    ]
    assert find_front(cells) == [{"bytes_held": 0.2, "score": 50}, {"bytes_held": 0.5, "score": 90}]


def test_a_cell_that_needs_a_file_is_listed_and_may_be_on_one_front_only():
    cells = [
        make_line(label, 0.5, score, codec=codec, bytes_held=held, bytes_with_files=files)
        for label, codec, held, files, score in (
            ("cheap with its file", "delta", 0.2, 0.3, 80.0),
            ("dear with its file", "delta", 0.3, 1.2, 85.0),
            ("beaten", "delta", 0.4, 0.6, 70.0),
            ("without a file", "raw", 0.5, None, 60.0),
        )
    ]
    text = format_bytes([split(*cells)])
    assert "3 of 5 cells are on the front by bytes held, 2 of them with a codec, and 2 on the front" in " ".join(
        " ".join(text).split()
    )
    assert [(row[0], row[-1]) for row in list_rows(text)] == [
        ("cheap with its file", "both"),
        ("dear with its file", "cache"),
        ("beaten", ""),
        ("full cache", "both"),
    ]


def test_pictures_have_short_labels():
    label = "full · delta · codec.stride=20 · codec.path=stride-20"
    assert shorten_label(label) == "delta · stride=20 · stride-20" and shorten_label("snapkv · ada") == "snapkv · ada"
    assert shorten_label("snapkv official_code/kvpress · ada") == "snapkv official_code · ada"


def test_numbers_and_intervals_are_not_broken_between_lines():
    for start in range(100, 120):
        for text in ("95 %", "+3.0 [-1.0, +2.0]"):
            assert text in wrap(f"{'x' * start} {text} of [a link, too](there)")


TIMES = """\
,32k ms published,32k ms measured,128k ms measured,128k over full measured
full cache,,5.0,8.0,1.00
"SnapKV, 5 %",,4.0,4.0,0.50
R-KV,,4.5,[1],[1]
KIVI,,OOM,OOM,–
"""


def test_slow_prefills_are_named(tmp_path):
    lines = ["method,preset,allocator,codec,ratio", "kvzip,,uniform,raw,4.33", "kvzip,plus,uniform,raw,4.62"]
    lines += ["snapkv,,uniform,raw,1.01", "snapkv,,ada,raw,9", "kvgrad,,uniform,raw,7.67", "rkv,,uniform,raw,"]
    (tmp_path / "prefill-1.csv").write_text("\n".join(lines))
    ratios = read_prefill_ratios(tmp_path)
    assert ratios == {"kvzip": 4.33, "snapkv": 1.01, "kvgrad": 7.67} and read_prefill_ratios(tmp_path / "x") == {}
    assert "takes 7.7 times as long as the full cache's with kvgrad and 4.3 times" in describe_slow(ratios)
    assert describe_slow(ratios).endswith(" On a GPU, the first token of kvgrad and kvzip was not timed yet.")
    timed = [CostTable("gpu-x", "prefill_full", [{"": "KVzip 20 %"}])]
    assert describe_slow(ratios, timed).endswith(" the first token of kvgrad was not timed yet.")


def test_only_rows_that_ran_have_a_cost(tmp_path):
    for machine, text in {"few": TIMES.replace("0.50", "[1]"), "many": TIMES}.items():
        (tmp_path / machine).mkdir()
        (tmp_path / machine / "decoding_methods.csv").write_text(text)
    tables = read_cost_tables(tmp_path)
    text = format_costs(tables)
    assert [line for line in text if line.startswith("#")] == [
        f"## A token, Llama-3.1-8B shape, {machine}" for machine in ("few", "many")
    ]
    assert list_rows(format_costs(tables[1:])) == [
        ["full cache", "5.0", "8.0", "1.00"],
        ["SnapKV, 5 %", "4.0", "4.0", "0.50"],
        ["R-KV", "4.5", "", ""],
    ]
    table, rows = find_fastest(tables)
    assert (table.machine, [row[""] for row in rows]) == ("many", ["SnapKV, 5 %"])
    assert find_fastest([]) is None and read_cost_tables(tmp_path / "nosuch") == []


@pytest.mark.parametrize("count", [1, 2])
def test_a_budget_with_a_single_cell_is_not_compared(count):
    cells = [make_line(label, 0.2, 50.0) for label in ("tova", "sink")][:count]
    assert len(describe_separation(split(*cells), 3.0)) == count - 1


def test_columns_of_texts_are_aligned_left():
    numbers = ("1.0", "-2.0 [-3.0, +4.0]", "20.0%", "1 to 2 of 3", "n/a", "", "0.52×", "1e-05", "± 2", "< 3")
    texts = (*numbers, "tova: 70.0", "0123ab")
    columns = [Column("", "", str) for _ in range(2)]
    sides = [format_markdown(columns, ["", text])[1] for text in texts]
    assert sides == ["|---|--:|"] * len(numbers) + ["|---|---|"] * 2
    assert format_markdown(columns, [])[1] == "|---|--:|"

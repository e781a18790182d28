"""The report page as a file: its numbers, what it never does with text, what it names, what it weighs."""

import json
import re
import shutil
import subprocess
import sys
from base64 import b64encode
from datetime import UTC, datetime
from hashlib import sha256
from math import comb
from pathlib import Path
from statistics import NormalDist, fmean, variance
from time import process_time

import pytest
import yaml
from scipy.special import stdtrit

from kvbench import report
from kvbench.analysis.closing_table import SHARED_GPU_NOTE, SHARED_PREFILL_NOTE
from kvbench.analysis.intervals import mean
from kvbench.analysis.paired import PairedDifference, PairedScores, compare_subtasks
from kvbench.analysis.run_labels import shorten
from kvbench.cli.report import main
from kvbench.config import compose
from kvbench.config.catalogue import load_settings
from kvbench.config.compose import list_choices
from kvbench.config.paths import CONF
from kvbench.report.charts import INK, LINE, MUTED
from kvbench.report.doc_tables import list_unwritten
from kvbench.report.method_pages import describe_method
from kvbench.report.page import MOST, NUMBERS, compact_json, load_library, render_html, write_page, write_report
from kvbench.report.panels import Pairing, classify_share, gather_results
from kvbench.report.samples import LONGEST, QUESTION, escape_invisible, format_strip, to_embedded_json
from kvbench.report.style import COLOURS, DARK, DASHES, FULL, MARKS, PAIRS, choose_style, choose_styles, find_style
from kvbench.validation import SettingError
from tests.support import report_store
from tests.support.report_store import BUDGETS, HOSTILE, TASKS, make_records, write_run, write_small_store
from tests.support.study_folders import list_heads, write_study

NOW = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A store with its page, which tests only read."""
    results = write_small_store(tmp_path_factory.mktemp("made"))
    write_report(results, NOW)
    return results


@pytest.fixture(scope="module")
def page(made) -> dict:
    """What the page of `made` holds."""
    return data_of(made / "report.html")


@pytest.fixture
def store(made, tmp_path) -> Path:
    """A copy of the store and its page, which a test may change."""
    return shutil.copytree(made, tmp_path, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def made_visible(tmp_path_factory) -> Path:
    return write_small_store(tmp_path_factory.mktemp("visible"), ["visible"])


@pytest.fixture
def visible(made_visible, tmp_path) -> Path:
    """A copy of the half of the store whose question is visible. It has no page yet."""
    return shutil.copytree(made_visible, tmp_path, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def pairings(made) -> tuple[Pairing, ...]:
    """The runs of `made`, each with the full cache's."""
    return tuple(gather_results(made, NOW).pairings)


def data_of(path: Path) -> dict:
    """What the page holds, its tables as rows with names."""

    def unpacked(own: dict) -> object:
        return (
            [dict(zip(own["names"], row, strict=True)) for row in own["rows"]] if set(own) == {"names", "rows"} else own
        )

    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text())[1]
    return json.loads(text, object_hook=unpacked)


def samples_of(path: Path) -> list:
    text = re.fullmatch(r'kvbenchSamples\("([0-9a-f]{16})",(\d+),(\[.*\])\);\n', path.read_text("ascii"))
    assert text, path
    return json.loads(text[3])


def test_every_number_is_recomputed_from_the_records(page):
    assert [(panel["question"], len(panel["series"])) for panel in page["panels"]] == [("hidden", 4), ("visible", 4)]
    panel = page["panels"][1]
    assert [own["label"] for own in panel["series"]] == ["keydiff", "keydiff · block 128", "newest", "snapkv"]
    full = make_records(1.0, 100)
    for place, own in enumerate(panel["series"]):
        salt = {"snapkv": 0, "keydiff": 1, "keydiff · block 128": 2, "newest": 3}[own["label"]]
        points = [point for point in panel["points"] if point["s"] == place == own["s"]]
        for (budget, chance), point in zip(BUDGETS.items(), points, strict=True):
            method = make_records(budget, chance + 15 * (salt % 2), salt)
            scores = {}
            for task in TASKS:
                uids = [uid for uid in full if full[uid]["subtask"] == task]
                parts = ([side[uid]["score"] for uid in uids] for side in (full, method))
                scores[task] = PairedScores(*parts, [full[uid]["group"] for uid in uids])
            score, change = (
                mean([one.method_values for one in scores.values()]),
                compare_subtasks(list(scores.values())),
            )
            expected = [budget, score.value, score.low, score.high, 24]
            found = [point[name] for name in ("share", "score", "score_low", "score_high", "n")]
            assert point["budget"] == f"{100 * budget:g}\u202f%" and found == pytest.approx(expected, abs=1e-4)
            assert [point[name] for name in CHANGE] == pytest.approx(numbers(change), abs=1e-4)
            name = f"{own['label']} · {point['budget']}"
            cost = next(one for one in panel["costs"] if one["row"] == name)
            assert (cost["held"], cost["ttft"]) == pytest.approx((budget, 100 + 200 * budget + salt))
            assert [cost[name] for name in CHANGE] == [point[name] for name in CHANGE]
            assert cost["tpot"] == pytest.approx((80 + 40 * budget) / 8) and (cost["s"], cost["score"]) == (
                place,
                point["score"],
            )
            (row,) = [row for row in panel["rows"] if row["row"] == name]
            assert row["s"] == place
            for task, one in scores.items():
                column = next(own["column"] for own in panel["tasks"] if own["task"] == task)
                (cell,) = [cell for cell in panel["cells"] if (cell["order"], cell["column"]) == (row["order"], column)]
                assert [cell[name] for name in CHANGE] == pytest.approx(numbers(compare_subtasks([one])), abs=1e-4)
    grid = next(one for one in panel["grids"] if one["row"] == "snapkv · 5\u202f%")
    own = [
        one
        for one in make_records(0.05, 30).values()
        if one["meta"].get("depth") == 50 and one["meta"]["length"] == 512
    ]
    cell = next(cell for cell in grid["cells"] if (cell["length"], cell["depth"]) == (512, 50))
    assert cell["score"] == sum(one["score"] for one in own) / len(own) and cell["n"] == len(own)


def test_the_matrix_shows_the_points_of_the_curves(page):
    """Both are computed apart from each other, on the same samples."""
    for panel in page["panels"]:
        matrix = panel["matrix"]
        assert matrix["budgets"] == [f"{100 * budget:g}\u202f%" for budget in BUDGETS]
        assert matrix["about"].startswith(
            "Average, each subtask weighing the same; n = 24, of 3 subtasks. The embedded reference model"
        )
        for row in matrix["methods"]:
            points = [point for point in panel["points"] if point["s"] == row["s"]]
            for cell, point in zip(row["scores"], points, strict=True):
                assert [cell[name] for name in ("score", "diff", "low", "high", "held")] == pytest.approx(
                    [point[name] for name in ("score", "diff", "diff_low", "diff_high", "share")], abs=1e-4
                )
        for column in zip(*(row["scores"] for row in matrix["methods"]), strict=True):
            most = max(cell["score"] for cell in column)
            assert [cell["best"] for cell in column] == [cell["score"] == most for cell in column]
            assert all(cell["tied"] for cell in column if cell["best"])


def test_cells_with_codecs_are_listed_by_their_bytes(tmp_path):
    write_run(tmp_path, make_records(1.0, 100), method={"name": "full"})
    for method, codec, share, budget in (
        ("snapkv", "raw", 0.2, 0.2),
        ("snapkv", "int4", 0.06, 0.2),
        ("keydiff", "fp8", 0.2, 0.4),
        ("snapkv", "fp8", 0.2, 0.4),
        ("full", "int8", 0.5, 1.0),
        ("full", "fp8", 0.5, 1.0),
    ):
        own = make_records(share, 50, int(100 * budget))
        write_run(tmp_path, own, method={"name": method}, codec={"name": codec}, budget=budget)
    [panel] = data_of(write_report(tmp_path, NOW))["panels"]
    matrix, labels = panel["matrix"], [own["label"] for own in panel["series"]]
    listed = {labels[own["s"]]: own["held"] for own in matrix["by_bytes"]}
    assert listed == {"snapkv · int4": 0.06, "full · int8": 0.5, "full · fp8": 0.5}
    shown = {labels[own["s"]]: [cell and cell["alike"] for cell in own["scores"]] for own in matrix["methods"]}
    alike = "20.0% of the bytes"
    assert shown == {"snapkv": ["", None], "keydiff · fp8": [None, alike], "snapkv · fp8": [None, alike]}
    assert matrix["budgets"] == ["20\u202f%", "40\u202f%"]


CHANGE = ("diff", "diff_low", "diff_high", "full", "lost", "gained", "same")


def numbers(own: PairedDifference) -> list:
    return [own.difference, own.low, own.high, own.mean_full, own.lost, own.gained, own.same]


def test_smallest_budgets_that_cannot_be_told_apart_have_bounds_that_overlap(tmp_path):
    """Two methods that fall short on other samples, and one that needs far more bytes than both."""
    write_run(tmp_path, make_records(1.0, 100, count=43, group=""), method={"name": "full"})
    for salt, (method, chance) in enumerate({"snapkv": 95, "keydiff": 94, "newest": 0}.items()):
        for budget, right in {0.05: chance, 0.8: 100}.items():
            write_run(tmp_path, make_records(budget, right, salt, 43, group=""), budget=budget, method={"name": method})
    [panel] = gather_results(tmp_path, NOW).page["panels"]
    least = {own["label"]: own["smallest"] for own in panel["series"]}
    assert least["keydiff"]["order"] != least["snapkv"]["order"]  # the numbers alone rank them
    bounds = {name: own["bounds"] for name, own in least.items()}
    assert max(bounds["keydiff"][0], bounds["snapkv"][0]) < min(bounds["keydiff"][1], bounds["snapkv"][1])
    assert bounds["newest"][0] > max(bounds["keydiff"][1], bounds["snapkv"][1])
    for own in least.values():  # all hold at once, so each is wider than an interval of its own
        assert own["bounds"][0] <= own["ends"][0] <= own["ends"][2] <= own["bounds"][1]


def test_the_front_is_what_nothing_beats(page):
    for panel in page["panels"]:
        candidates = [*panel["costs"], *panel["free"]]
        for cost in ("held", "ttft", "tpot"):
            for row in candidates:
                beaten = any(
                    other[cost] <= row[cost]
                    and other["diff"] >= row["diff"]
                    and (other[cost], other["diff"]) != (row[cost], row["diff"])
                    for other in candidates
                )
                assert row[f"front_{cost}"] is not beaten
            joined = {(row[cost], row["diff"]) for row in candidates if row[f"front_{cost}"]}
            assert {(own["at"], own["diff"]) for own in panel["front"] if own["cost"] == cost} == joined


@pytest.mark.full
def test_a_page_of_many_runs_takes_time_and_bytes_in_proportion(tmp_path):
    """10,000 runs are to take at most 2 minutes and a page of 20 MB."""
    write_run(tmp_path, make_records(1.0, 100, count=2), method={"name": "full"})
    for number in range(110):
        for budget in (0.1, 0.2, 0.3, 0.4, 0.5):
            records = make_records(budget, 50, salt=number % 7, count=2)
            write_run(tmp_path, records, method={"name": "snapkv", "window": number}, budget=budget)
    start = process_time()
    path = write_report(tmp_path, NOW)
    assert process_time() - start < 20
    loaded = [path, *path.parent.glob("report/part-*.js")]
    assert sum(file.stat().st_size for file in loaded) < MOST + 551 * 2_000


def test_a_full_cache_that_is_faster_and_better_takes_a_point_off_the_front(tmp_path):
    write_run(tmp_path, make_records(1.0, 100, ttft_ms=290.0), method={"name": "full"})
    write_run(tmp_path, make_records(0.1, 50, ttft_ms=305.0), budget=0.1)  # fewer bytes, but slower and worse
    write_run(tmp_path, make_records(0.3, 85, ttft_ms=280.0), budget=0.3)
    page = write_report(tmp_path, NOW)
    [panel] = data_of(page)["panels"]
    [full] = panel["free"]
    slow, fast = sorted(panel["costs"], key=lambda row: row["held"])
    assert slow["diff"] < fast["diff"] < 0
    assert (slow["front_ttft"], fast["front_ttft"], full["front_ttft"]) == (False, True, True)
    assert (slow["front_held"], fast["front_held"], full["front_held"]) == (True, True, True)
    assert "no other run of the panel, and not the full cache (the diamond), costs as little" in page.read_text()


def test_times_have_intervals(visible):
    """The mean of three subtasks' medians: errors of medians of 8, by the second and the seventh of them."""
    own = make_records(0.05, 30)
    for place, record in enumerate(own.values()):
        record["ttft_ms"] = 100.0 + 10 * (place % 8)
    write_run(visible, own, method={"name": "timed"}, budget=0.05)
    [panel] = data_of(write_report(visible, NOW))["panels"]
    row = next(one for one in panel["costs"] if one["row"].startswith("timed"))
    chance = 2 * sum(comb(8, k) for k in range(2)) / 2**8
    error = 50 / (2 * NormalDist().inv_cdf(1 - chance / 2)) / 3**0.5
    reach = NormalDist().inv_cdf(0.975) * error
    assert (row["ttft"], row["ttft_low"], row["ttft_high"]) == pytest.approx((135, 135 - reach, 135 + reach), abs=1e-3)
    assert all(one["tpot_low"] <= one["tpot"] <= one["tpot_high"] for one in (*panel["costs"], *panel["free"]))


def test_bytes_that_differ_between_samples_have_intervals(visible):
    """The t interval over contexts of a mean of three subtasks; none where all samples hold the same share."""
    own = make_records(0.05, 30)
    for place, record in enumerate(own.values()):
        record["resident_bytes"] = 50 + 10 * (place % 7)
    write_run(visible, own, method={"name": "ragged"}, budget=0.05)
    [panel] = data_of(write_report(visible, NOW))["panels"]
    row = next(one for one in panel["costs"] if one["row"].startswith("ragged"))
    subtasks = [[one for one in own.values() if one["subtask"] == name] for name in TASKS]
    shares = [[one["resident_bytes"] / 1000 for one in some] for some in subtasks]
    contexts = [[fmean(some[at : at + 2]) for at in range(0, 8, 2)] for some in shares]  # of two samples each
    variances = [variance(some) / 4 for some in contexts]
    freedom = sum(variances) ** 2 / sum(own**2 / 3 for own in variances)
    reach = stdtrit(freedom, 0.975) * sum(variances) ** 0.5 / 3
    held = fmean(fmean(some) for some in shares)
    assert (row["held"], row["held_low"], row["held_high"]) == pytest.approx(
        (held, held - reach, held + reach), abs=1e-4
    )
    same = [one for one in (*panel["costs"], *panel["free"]) if one != row]
    assert same and {(one["held_low"], one["held_high"]) for one in same} == {(None, None)}


def test_runs_of_different_protocols_never_share_a_panel(store):
    for changed in ({"seed": 1}, {"data": "d1"}, {"task": {"name": "ruler", "length": 4096}}):
        write_run(store, make_records(1.0, 100), method={"name": "full"}, **changed)
        write_run(store, make_records(0.1, 50), budget=0.1, **changed)
    write_run(store, make_records(0.1, 50), budget=0.1, task={"name": "ruler", "length": 8192})  # without a full cache
    page = gather_results(store, NOW).page
    assert len(page["panels"]) == 6
    said = {(panel["question"], *panel["also"]) for panel in page["panels"]}
    assert said == {
        ("hidden", "length 2048"),
        ("visible", "length 2048", "data d0", "seed 0"),
        ("visible", "length 2048", "data d1", "seed 0"),
        ("visible", "length 2048", "seed 1"),
        ("visible", "length 4096", "seed 0"),
        ("visible", "length 8192", "seed 0"),
    }
    assert any("no finished run of the full cache" in why for _, why in page["damaged"])


def test_methods_with_the_names_of_tables_keep_their_looks():
    """`method=full` with a codec is a method of the page, and `full` a table of its panels."""
    looks = {name: {"colour": "#333333", "shape": "diamond"} for name in ("full", "rows", "snapkv")}
    assert compact_json({"methods": looks, "full": [{"s": 0}]}) == {
        "methods": looks, "full": {"names": ["s"], "rows": [[0]]},
    }  # fmt: skip


def test_a_method_keeps_its_look(page):
    assert choose_style("snapkv") == {"colour": "#0072B2", "shape": "circle"}
    assert choose_style("keydiff") == {"colour": "#D55E00", "shape": "square"}
    assert choose_style("cake") == {"colour": "#0072B2", "shape": "triangle-up"}
    for panel in page["panels"]:
        for own in panel["series"]:
            assert own["colour"] == choose_style(own["method"])["colour"]
        one, other = [own for own in panel["series"] if own["method"] == "keydiff"]
        assert one["shape"] == choose_style("keydiff")["shape"]
        assert one["shape"] != other["shape"] and one["dash"] != other["dash"]  # one colour, two marks and lines


DESCRIBED = sorted({*list_choices("method")} - list_unwritten("method"))
METHODS = [name for name in DESCRIBED if name != "full"]


def test_files_of_methods_state_looks_that_differ():
    files = [yaml.safe_load((CONF / "method" / f"{name}.yaml").read_text())["_style_"] for name in METHODS]
    assert [find_style(name) for name in METHODS] == files
    assert len({(own["mark"], own["dash"]) for own in files}) == len(METHODS)  # in grey, too
    assert "_style_" not in load_settings("method", "snapkv")  # no run depends on it


@pytest.fixture
def plugins(tmp_path, monkeypatch) -> Path:
    """A folder of methods, which is added to those of conf/method."""
    folder = tmp_path / "own" / "method"
    folder.mkdir(parents=True)
    monkeypatch.setattr(compose, "folders", lambda: (CONF, folder.parent))
    return folder


def test_a_method_without_a_look_gets_a_free_one(plugins):
    before = {name: find_style(name) for name in METHODS}
    for name in ("mine", "yours", "third"):
        assert find_style(name) == find_style(name)
        pair = find_style(name)["mark"], find_style(name)["dash"]
        assert pair not in {(own["mark"], own["dash"]) for own in before.values()}
    own = find_style("mine")
    (plugins / "stated.yaml").write_text("_target_: a.B\nname: stated\n_style_: " + json.dumps(own))
    assert find_style("stated") == own and choose_style("stated")["shape"] == own["mark"]
    assert (find_style("mine")["mark"], find_style("mine")["dash"]) != (own["mark"], own["dash"])
    assert {name: find_style(name) for name in METHODS} == before
    left = [(mark, dash) for mark in MARKS for dash in DASHES]
    for place, (mark, dash) in enumerate(left):
        style = json.dumps({"colour": "blue", "mark": mark, "dash": dash})
        (plugins / f"p{place}.yaml").write_text(f"_target_: a.B\nname: p{place}\n_style_: {style}")
    assert set(find_style("mine")) == {"colour", "mark", "dash"}  # although no pair is free


@pytest.mark.parametrize(
    ("style", "said"),
    [
        ("{colour: red, mark: circle, dash: solid}", r"mine.yaml: _style_.colour=red: choose one of blue, vermilion"),
        ("{colour: blue, mark: [circle], dash: solid}", r"mine.yaml: _style_.mark=\[circle\]: choose one of circle"),
        ("{colour: blue}", r"mine.yaml: _style_ states colour, mark, dash"),
        ("blue", r"mine.yaml: _style_ states colour, mark, dash"),
        ("{", r"mine.yaml.* is not valid YAML"),
    ],
)
def test_a_wrong_look_is_refused(plugins, style, said):
    (plugins / "mine.yaml").write_text(f"_target_: a.B\nname: mine\n_style_: {style}\n")
    with pytest.raises(SettingError, match=said):
        find_style("mine")


@pytest.mark.parametrize("text", [b"", b"# to be written\n", b"[a, b]\n"])
def test_a_file_that_states_nothing_states_no_look(plugins, text):
    (plugins / "mine.yaml").write_bytes(text)
    assert find_style("snapkv")["colour"] == "blue" and set(find_style("mine")) == {"colour", "mark", "dash"}


def test_a_file_that_is_no_text_is_named(plugins):
    (plugins / "mine.yaml").write_bytes(b"_target_: a.B\nname: \xff\n")
    with pytest.raises(SettingError, match=r"mine.yaml is not valid YAML \('utf-8' codec"):
        find_style("snapkv")


@pytest.mark.parametrize(
    "methods",
    [
        ["snapkv"] * 25,
        [*METHODS, "mine", "yours", "full", "full", "snapkv"],
        ["full"] * 3 + ["mine"] * 11 + ["yours"] * 11,
    ],
    ids=["one method", "all methods", "unknown methods"],
)
def test_at_least_25_lines_of_a_panel_can_be_told_apart_in_grey(methods):
    styles = choose_styles(methods)
    assert len({(own["shape"], tuple(own["dash"])) for own in styles}) == len(methods) >= 25
    assert [own["colour"] for own in styles] == [choose_style(method)["colour"] for method in methods]
    for method in set(METHODS) & set(methods):
        assert styles[methods.index(method)]["shape"] == choose_style(method)["shape"]


def test_more_lines_than_pairs_keep_their_colours():
    styles = choose_styles(["snapkv"] * 40)
    assert len({(own["shape"], tuple(own["dash"])) for own in styles}) == len(PAIRS)
    assert {own["colour"] for own in styles} == {choose_style("snapkv")["colour"]}


@pytest.mark.parametrize(
    ("share", "name"),
    [
        (0.5, "50"),
        (0.7, "50"),
        (0.72, "other"),
        (0.3, "25"),
        (0.1, "12.5"),
        (0.05, "6.25"),
        (0.04, "other"),
        (0, "other"),
    ],
)
def test_a_budget_is_in_the_nearest_class(share, name):
    assert classify_share(share).removesuffix("\u202f%") == name


def test_columns_of_the_matrix_have_classes(tmp_path):
    write_run(tmp_path, make_records(1.0, 100), method={"name": "full"})
    write_run(tmp_path, make_records(0.25, 50), budget=64)  # holds a quarter of the bytes
    write_run(tmp_path, make_records(0.02, 50), budget=0.02)
    page = data_of(write_report(tmp_path, NOW))
    assert page["classes"] == ["25\u202f%", "other"]
    matrix = page["panels"][0]["matrix"]
    assert dict(zip(matrix["budgets"], matrix["classes"], strict=True)) == {"64 rows": "25\u202f%", "2\u202f%": "other"}


def test_nothing_in_the_page_can_run_or_fetch_but_its_own_scripts(made):
    text = (made / "report.html").read_text()
    head, _, rest = text.partition("<style>")
    rest = rest.partition("</style>")[2]
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", rest, re.S)
    assert [own for own, _ in scripts] == [' type="application/json" id="data"', ' type="text/plain" id="library"', ""]
    for _, script in scripts[1:]:
        assert f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" in head
    assert "default-src 'none'" in head and "unsafe-inline'; img" in head and "script-src 'sha256" in head
    assert "<" not in scripts[0][1] and ">" not in scripts[0][1] and scripts[0][1].isascii()
    outside = re.sub(r"<script.*?</script>", "", rest, flags=re.S)
    assert not re.search(r"(src|href)=|https?:", outside)


def test_answers_lie_beside_the_page_and_are_text_only(made, page):
    text = (made / "report.html").read_text()
    assert "the number is 3" not in text and "surrogate" not in text
    assert {name for own in page["files"] for name in own["names"]} == {
        file.name for file in (made / "report").glob("*.*")
    }
    for own in page["files"]:
        shown = [sample for name in own["names"] for sample in samples_of(made / "report" / name)]
        assert len(shown) == 24
        changes = [method[1] - full[1] for _, _, _, full, method, *_ in shown]
        assert changes == sorted(changes)
    raw = "".join((made / "report" / name).read_text("ascii") for name in page["files"][0]["names"])
    assert "<" not in raw and ">" not in raw and "\x1b" not in raw
    outputs = {
        sample[4][0] for own in page["files"] for name in own["names"] for sample in samples_of(made / "report" / name)
    }
    assert escape_invisible(HOSTILE[0]) in outputs and HOSTILE[0] == escape_invisible(HOSTILE[0])
    assert escape_invisible(HOSTILE[1]) == "<!-- \\u2028 \\x00 \\x1b[31mred\\x1b[0m \\u202egnorw"
    assert "\\ud800" in escape_invisible(HOSTILE[2])
    assert len(escape_invisible(HOSTILE[3])) < LONGEST + 60 and escape_invisible(HOSTILE[3]).endswith(
        "more characters in the record"
    )
    assert escape_invisible(None) == "" and escape_invisible({"a": 1}) == '{"a": 1}'


def test_samples_of_a_context_have_its_number(made, page, pairings):
    for pairing in pairings:
        names = next(own["names"] for own in page["files"] if own["run"] == pairing.run.hash)
        numbered = {sample[0]: sample[-1] for name in names for sample in samples_of(made / "report" / name)}
        contexts = {shorten(uid): record["group"] for uid, record in pairing.run.records.items()}
        assert len(set(contexts.values())) == 12  # of two samples each
        assert len({(contexts[uid], number) for uid, number in numbered.items()}) == len(set(numbered.values())) == 12


def test_question_and_rows_are_the_records(made, page, pairings):
    files = {own["run"]: own["names"] for own in page["files"]}
    for pairing in pairings:
        records = {shorten(uid): record for uid, record in pairing.run.records.items()}
        shown = [sample for name in files[pairing.run.hash] for sample in samples_of(made / "report" / name)]
        assert len(shown) == len(records) == 24
        for uid, *_, asked, rows, _ in shown:
            record = records[uid]
            if pairing.run.value["budget"] == 0.3:  # not recorded
                assert asked is rows is None
            else:
                assert asked == escape_invisible(record["asked"], QUESTION) and len(asked) < QUESTION + 60
                assert rows == [record["survived"], 200, record["evidence"]]


@pytest.mark.parametrize(
    "wrong",
    [{"survived": "65"}, {"survived": "0"}, {"survived": "00" * 65}, {"survived": "<b"}, {"survived": 5}]
    + [{"survived": None}, {"rows_seen": "many"}, {"rows_seen": None}],
)
def test_a_strip_that_is_none_is_not_shown(wrong):
    good = {"survived": "0064", "rows_seen": 9, "evidence": [1]}
    assert format_strip(good) == ["0064", 9, [1]] and format_strip(good | wrong) is None
    for evidence in (None, "1", [2, -1, "1", [1], None]):
        assert format_strip(good | {"evidence": evidence}) == ["0064", 9, []]


def test_files_of_samples_are_split_and_old_ones_go(visible, monkeypatch):
    monkeypatch.setattr("kvbench.report.samples.PART", 1000)
    (visible / "report").mkdir()
    (visible / "report" / "samples-ffffffffffffffff-0.js").write_text("old")
    (visible / "report" / "notes.txt").write_text("not ours")
    page = data_of(write_report(visible, NOW))
    names = {name for own in page["files"] for name in own["names"]}
    assert min(len(own["names"]) for own in page["files"]) > 1
    assert {file.name for file in (visible / "report").iterdir()} == names | {"notes.txt", "lock"}


def test_who_makes_the_page_is_alone(tmp_path, monkeypatch):
    """Or one would take away what lies beside the other's page."""
    write_run(tmp_path, make_records(1.0, 100, count=1), method={"name": "full"})
    code = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    other = [sys.executable, "-c", code, str(tmp_path / "report" / "lock")]
    tried = []

    def watched(*given: object) -> None:
        tried.append(subprocess.run(other, capture_output=True).returncode)
        write_page(*given)

    monkeypatch.setattr("kvbench.report.page.write_page", watched)
    assert write_report(tmp_path, NOW).is_file() and tried == [1]
    assert subprocess.run(other, capture_output=True).returncode == 0


def test_what_is_damaged_is_named_and_the_rest_is_shown(visible):
    method = {"name": "snapkv"}
    old = write_run(visible, make_records(0.2, 50), budget=0.2, method=method)
    (old / "run.yaml").write_text("format: [")
    torn = write_run(visible, make_records(0.25, 50), budget=0.25, method=method)
    file = next(torn.glob("records*.jsonl"))
    file.write_bytes(file.read_bytes()[:-9])
    odd = [
        write_run(visible, {uid: {"uid": uid} for uid in make_records(0.4, 50)}, budget=0.4, method=method),
        write_run(visible, make_records(0.5, 50, score=1e9), budget=0.5, method=method),
        write_run(visible, make_records(0.6, 50, meta=None), budget=0.6, method=method),
        write_run(visible, make_records(0.7, 50, prompt_hash="another"), budget=0.7, method=method),
    ]
    write_run(visible, {}, finish=False, budget=0.8, method=method)
    page = data_of(write_report(visible, NOW))
    said = " ".join(f"{name} {why}" for name, why in page["damaged"])
    for path in (old, torn, *odd):
        assert path.name in said
    assert (
        "run.yaml cannot be read (is no YAML" in said and "torn" in said and "score is 1000000000.0, expected" in said
    )
    assert (page["unfinished"], page["empty"]) == (0, 1)
    [panel] = page["panels"]
    snapkv = next(own for own in panel["series"] if own["label"] == "snapkv")
    points = [point for point in panel["points"] if point["s"] == snapkv["s"]]
    assert [point["budget"] for point in points] == ["5\u202f%", "10\u202f%", "30\u202f%"]


def test_an_unfinished_run_is_shown_on_the_samples_in_common(visible):
    whole = make_records(0.2, 50)
    some = {uid: own for uid, own in whole.items() if own["index"] % 2 == 0}
    write_run(visible, some, finish=False, budget=0.2, method={"name": "snapkv"})
    write_run(visible, {"vt/0": whole["vt/0"]}, finish=False, budget=0.4, method={"name": "snapkv"})
    page = data_of(write_report(visible, NOW))
    [panel] = page["panels"]
    snapkv = next(own for own in panel["series"] if own["label"] == "snapkv")
    points = [point for point in panel["points"] if point["s"] == snapkv["s"]]
    assert page["unfinished"] == 2 and {point["n"] for point in points} == {len(some)} and len(points) == 4
    short, skipped = snapkv["unfinished"]
    assert short == "20\u202f% (12 of 24 samples)"
    assert skipped.startswith("40\u202f% (1 of 24 samples, left out: answered no sample of")
    runs = {run["budget"]: (run["samples"], run["of"]) for run in page["runs"] if run["of"]}
    assert runs == {"20\u202f%": (12, 24), "40\u202f%": (1, 24)}
    assert "snapkv · 20\u202f% · 12 of 24 samples" in [own["row"] for own in panel["rows"]]
    matrix = panel["matrix"]
    (row,) = [own for own in matrix["methods"] if own["s"] == snapkv["s"]]
    score = row["scores"][matrix["budgets"].index("20\u202f%")]["score"]
    assert score == next(point["score"] for point in points if point["budget"] == "20\u202f%")
    counted = "n = 12 of 24 planned samples, of 3 subtasks: "
    assert counted in matrix["about"] and counted in matrix["count"] and "Not finished" in matrix["about"]
    for name in TASKS:
        assert f"{name} (4)" in matrix["about"]


def test_all_numbers_of_a_panel_come_from_the_same_samples(visible):
    """A run that is not finished takes samples from every chart, not from the matrix alone."""
    some = {uid: own for uid, own in make_records(0.2, 50).items() if own["index"] % 2 == 0}
    some["vt/0"] = some["vt/0"] | {"error": "out_of_memory", "score": None}
    path = write_run(visible, some, finish=False, budget=0.2, method={"name": "late"})
    (path / "samples").write_text("90\n")
    write_run(visible, {}, finish=False, budget=0.4, method={"name": "late"})
    page = data_of(write_report(visible, NOW))
    [panel] = page["panels"]
    assert {point["n"] for name in ("points", "full") for point in panel[name]} == {11}
    assert {cost["n"] for cost in panel["costs"]} == {11}
    assert sum(cell["n"] for cell in panel["grids"][0]["cells"]) == 4
    shown = {own["s"]: own["scores"] for own in panel["matrix"]["methods"]}
    for place, series in enumerate(panel["series"]):
        curve = [point["score"] for point in panel["points"] if point["s"] == place]
        costs = [cost["score"] for cost in panel["costs"] if cost["s"] == place]
        assert curve == costs == [cell["score"] for cell in shown[place] if cell], series["label"]
    tasks = [column["task"] for column in panel["tasks"]]
    cells = {(cell["order"], tasks[cell["column"]]): cell["n"] for cell in panel["cells"]}
    assert {count for (_, task), count in cells.items() if task == "vt"} == {3}
    assert "n = 11 of 90 planned samples" in panel["matrix"]["about"] and "1 sample failed" in panel["matrix"]["about"]
    runs = {(run["series"], run["budget"]): (run["samples"], run["of"]) for run in page["runs"]}
    assert runs["late", "20\u202f%"] == (12, 90) and runs["full cache", ""] == (24, None)
    entry = next(file for file in page["files"] if file["row"].startswith("newest"))
    assert sum(len(samples_of(visible / "report" / name)) for name in entry["names"]) == 24  # answers are all there


def test_a_run_without_a_subtask_is_named_and_its_answers_are_shown(visible):
    """Finished or not, it is in no table, because it would take the subtask from the others."""
    whole = make_records(0.2, 50)
    lost = {uid: own | {"error": "out_of_memory", "score": None} for uid, own in whole.items() if uid.startswith("vt/")}
    write_run(visible, whole | lost, budget=0.2, method={"name": "large"})
    page = data_of(write_report(visible, NOW))
    [panel] = page["panels"]
    large = next(own for own in panel["series"] if own["label"] == "large")
    assert large["refused"] == "budget 20\u202f% answered no sample of vt"
    assert any("answered no sample of vt" in why for _, why in page["damaged"])
    assert (
        "n = 24, of 3 subtasks." in panel["matrix"]["about"] and "Left out: large 20\u202f%" in panel["matrix"]["about"]
    )
    assert any(file["row"] == "large · 20\u202f%" and file["names"] for file in page["files"])


def test_the_page_says_what_it_is_made_of(page):
    assert page["made"] == "2026-01-02 03:04 UTC" and page["models"] == ["reference 0a1b"]
    assert page["machines"] == ["CPU x86_64, 1 thread, Python 3.11, torch 2.13.0"]
    assert {run["code"] for run in page["runs"]} == {"git 0123456789 dirty"}
    assert {run["sources"] for run in page["runs"]} == {"s0"} and len(page["runs"]) == 26
    notes = " ".join(page["panels"][0]["notes"])
    assert "no evidence about large models" in notes and "Miniature data" in notes
    assert "several cells" not in notes


def test_the_costs_say_that_prompts_were_shared(tmp_path):
    write_run(tmp_path, make_records(1.0, 100), method={"name": "full"})
    write_run(tmp_path, make_records(0.1, 55, shared_prefill=12), budget=0.1)
    [panel] = data_of(write_report(tmp_path, NOW))["panels"]
    assert panel["costs"] and [note for note in panel["notes"] if note == SHARED_PREFILL_NOTE.format("method")]


def test_the_costs_leave_out_times_of_processes_that_shared_a_gpu(tmp_path):
    write_run(tmp_path, make_records(1.0, 100, gpu_processes=2), method={"name": "full"})
    write_run(tmp_path, make_records(0.1, 55, gpu_processes=2), budget=0.1)
    [panel] = data_of(write_report(tmp_path, NOW))["panels"]
    assert SHARED_GPU_NOTE.format("full cache and the method") in panel["notes"]
    for row in (*panel["costs"], *panel["free"]):
        assert row["held"] is not None and row["ttft"] is row["tpot"] is row["ttft_low"] is None
    assert {own["cost"] for own in panel["front"]} == {"held"}


def test_a_large_study_stays_small(tmp_path, monkeypatch):
    """20 methods, 10 budgets, 2 questions, 21 subtasks."""
    monkeypatch.setattr(report_store, "TASKS", tuple(f"a_rather_long_name_{place}" for place in range(21)))
    page = gather_results(write_small_store(tmp_path, ["visible"], count=2), NOW).page
    [panel] = page["panels"]
    for name in ("points", "rows", "cells", "costs", "grids", "series"):  # 12 runs to 204
        panel[name] = panel[name] * (17 if name != "series" else 5)
    page["panels"] *= 2
    page["runs"] *= 34
    files = [{"run": 16 * "0", "panel": 0, "row": 30 * " ", "names": [30 * " "], "method": "", "block": 1}] * 408
    assert len(render_html(compact_json(page | {"files": files, "prompts": [], "folder": "report"}))) < MOST


def test_studies_are_shown_with_claims_and_readings(store, page):
    """Numbers of a chart lie in a file of their own, so that the page stays small."""
    assert page["studies"] == [] and not list((store / "report").glob("part-*"))
    size = (store / "report.html").stat().st_size
    write_study(store, list_heads())
    path = write_report(store, NOW)
    [own] = data_of(path)["studies"]
    assert own["about"] == "reference, 2 prompts of ruler, up to 1,500 tokens." and own["title"].startswith(
        "KeyDiff, Figure 14"
    )
    assert own["claims"][0].endswith("Holds for 50.0 %. (50.0 % [25.0, 75.0] of 24, 2 prompts; counted exactly)")
    [file] = (store / "report").glob("part-*")
    assert file.name == own["part"] and path.stat().st_size < size + 1_000
    spec = json.loads(file.read_text("ascii").partition(",")[2].removesuffix(");\n"))
    drawn = [(row["layer"], row["head"], row["value"]) for row in spec["datasets"]["plot0"]]
    assert drawn == [(line.layer, line.head, line.value) for line in list_heads() if line.series == ""]
    (store / "studies" / "0123456789abcdef" / "key_geometry.csv").write_text("layer\n")
    shown = data_of(write_report(store, NOW))
    assert (
        shown["studies"] == [] and shown["damaged"][0][0] == "studies" and "key_geometry.csv" in shown["damaged"][0][1]
    )
    assert not list((store / "report").glob("part-*"))


def test_no_store_is_too_large(store, monkeypatch):
    """Numbers that make the page larger than it may be lie beside it, and are the same; few do not."""
    whole = gather_results(store, NOW)
    most = len(render_html({}).encode()) + 2_000  # little more than the scripts
    monkeypatch.setattr("kvbench.report.page.gather_results", lambda results, now: whole)
    with monkeypatch.context() as patch:
        patch.setattr("kvbench.report.page.MOST", most)
        path, folder = write_report(store, NOW), store / "report"
    assert path.stat().st_size < most

    def part(name: str) -> dict:
        text = (folder / name).read_text("ascii")
        assert text.startswith(f'kvbenchPart("{name}",') and text.endswith(");\n")
        return json.loads(text[len(f'kvbenchPart("{name}",') : -3])

    page = part(data_of(path)["part"])
    assert {file.name for file in folder.glob("part-*")} == {
        data_of(path)["part"],
        *(panel["part"] for panel in page["panels"]),
    }
    assert len(page["runs"]) == 26 and len(page["files"]) == 24
    for panel, expected in zip(page["panels"], whole.page["panels"], strict=True):
        numbers = part(panel.pop("part"))
        assert set(numbers) == set(NUMBERS) and panel | numbers == json.loads(to_embedded_json(compact_json(expected)))
    write_report(store, NOW)
    assert len(data_of(path)["panels"]) == 2 and not list(folder.glob("part-*"))


def test_a_folder_without_runs_is_refused(tmp_path, capsys):
    with pytest.raises(SettingError, match="the folder contains no runs"):
        write_report(tmp_path, NOW)
    assert main(["--results", str(tmp_path)]) == 2 and not (tmp_path / "report.html").exists()
    (tmp_path / "runs").mkdir()
    assert main(["--results", str(tmp_path)]) == 0 and data_of(tmp_path / "report.html")["panels"] == []
    write_run(tmp_path, make_records(1.0, 100), method={"name": "full"})
    assert main(["--results", str(tmp_path)]) == 0 and data_of(tmp_path / "report.html")["panels"][0]["series"] == []
    assert "report.html" in capsys.readouterr().out


def test_the_charting_library_is_bundled_once(tmp_path, monkeypatch) -> None:
    bundled = iter(["one", "two"])
    monkeypatch.setattr("kvbench.report.page.CACHE", tmp_path / "cache")
    monkeypatch.setattr("kvbench.report.page.vl_convert.javascript_bundle", lambda: next(bundled))
    assert [load_library(), load_library()] == ["one", "one"]
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_text("damaged")
    assert load_library() == "two"


def read_colours(scheme: str) -> dict[str, str]:
    """The colours of page.css, by name, on a light page or on a dark one."""
    light, dark = re.findall(r":root {(.*?)}", (Path(report.__file__).parent / "page.css").read_text())
    found = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", light))
    return found if scheme == "light" else found | dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", dark))


def measure_contrast(one: str, other: str) -> float:
    """WCAG 2 contrast ratio of two colours."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_can_be_read_on_every_ground(scheme):
    own = read_colours(scheme)
    grounds = ["paper", "soft", "warn-soft", "bad-soft"]
    pairs = [(text, ground) for text in ("ink", "muted", "blue") for ground in grounds]
    pairs += [("ink", "lost"), ("ink", "gained"), ("right-ink", "right"), ("wrong-ink", "wrong")]
    assert {
        f"{text} on {ground}": ratio
        for text, ground in pairs
        if (ratio := measure_contrast(own[text], own[ground])) < 4.5
    } == {}
    css = (Path(report.__file__).parent / "page.css").read_text().splitlines()[2:]
    assert not re.search(r"#[0-9a-fA-F]{3,8}\b(?=[;,) ])", "\n".join(css)), "a colour that does not follow the scheme"


def test_marks_can_be_seen_on_a_dark_page():
    paper = read_colours("dark")["paper"]
    for colour in (*COLOURS.values(), FULL):
        assert measure_contrast(DARK[colour], paper) >= 3
    assert len({DARK[colour] for colour in COLOURS.values()}) == len(COLOURS)
    assert {own.lower() for own in DARK} >= {INK, MUTED, LINE}


def test_a_method_is_described_by_its_module_and_its_config():
    own = describe_method("snapkv")
    assert own["definition"].startswith("snapkv: keep the rows") and "s_j = pool_κ(mean_t p_{t,j})" in own["equation"]
    assert own["source"].startswith("Source: FasterDecoding/SnapKV") and own["preset"] == "paper"
    presets = {name: (settings, note) for name, settings, note in own["presets"]}
    assert presets["kvpress"] == ("window=64, kernel=5, pooling=avg, group=after", "NVIDIA/kvpress snapkv_press.py")
    assert describe_method("nosuch") is None


def test_every_method_has_an_equation():
    """Only the full cache needs none: nothing is ever cut. One that nobody described yet may come without."""
    about = {name: describe_method(name) for name in DESCRIBED}
    assert [name for name, own in about.items() if not own["equation"]] == ["full"]
    for name, own in about.items():
        assert own["definition"], name
    borrowed = about["observed_attention"]  # h2o's class with other settings
    assert borrowed["definition"].startswith("Observed attention: mean attention that a row got")
    assert borrowed["more"][0] == about["h2o"]["definition"] and borrowed["equation"] == about["h2o"]["equation"]


def test_where_a_series_fails_first(tmp_path):
    write_run(tmp_path, make_records(1.0, 100, count=40), method={"name": "full"})
    for budget, chance in {0.05: 5, 0.1: 20, 0.3: 100}.items():
        write_run(tmp_path, make_records(budget, chance, count=40), budget=budget)
    page = data_of(write_report(tmp_path, NOW))
    for panel in page["panels"]:
        tasks = {own["column"]: own["task"] for own in panel["tasks"]}
        for own in panel["series"]:
            rows = [row for row in panel["rows"] if row["s"] == own["s"]]
            lost = [
                [
                    (cell["diff"], tasks[cell["column"]])
                    for cell in panel["cells"]
                    if cell["order"] == row["order"] and cell["diff_high"] is not None and cell["diff_high"] < 0
                    if not tasks[cell["column"]].startswith("Ø")
                ]
                for row in reversed(rows)
            ]
            worst = next((min(some) for some in lost if some), None)
            found = own["fails"]
            assert (found and (found["diff"], found["task"])) == worst
    (own,) = page["panels"][0]["series"]
    assert (
        own["fails"]["row"] == "snapkv · 10\u202f%"
        and own["fails"]["low"] < own["fails"]["diff"] < own["fails"]["high"] < 0
    )


def test_runs_say_the_settings_in_which_they_differ(page):
    keydiff = [run["settings"] for run in page["runs"] if run["method"] == "keydiff"]
    assert {own["block_size"] for own in keydiff} == {"null", "128"}
    assert {own["budget"] for own in keydiff} == {str(budget) for budget in BUDGETS}
    assert not any("seed" in run["settings"] for run in page["runs"])

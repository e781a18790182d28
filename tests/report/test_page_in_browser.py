"""The report page in a headless Chromium: it draws, filters and loads; nothing else runs, nothing leaves it."""

import os
import random
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvbench.analysis.intervals import Values, compute_means
from kvbench.analysis.run_comparison import SCORES, RunComparison, compare_runs
from kvbench.report.page import write_report
from kvbench.report.style import choose_style
from kvbench.store.runs import load_runs
from tests.support.browser import CHROMIUM, SIZES, draw_charts
from tests.support.report_store import make_records, write_run, write_small_store
from tests.support.study_folders import list_heads, write_study

# newest has no style of its own: its colour is one of the others.
LINES = Counter(choose_style(name)["colour"] for name in ("snapkv", "keydiff", "keydiff", "newest"))
SNAPKV, DARK_SNAPKV, KEYDIFF = "#0072B2", "#4FB3F0", "#D55E00"
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no chromium: make test-browser")]


@pytest.fixture(scope="module")
def page_file(tmp_path_factory) -> Path:
    store = write_small_store(tmp_path_factory.mktemp("store"))
    (write_run(store, make_records(0.2, 50), budget=0.2) / "run.yaml").write_text("format: [")
    return write_report(store, datetime(2026, 1, 2, 3, 4, tzinfo=UTC))


@pytest.fixture(params=SIZES, ids=str)
def page(request, chromium, page_file):
    """The page, opened from disk; at the end nobody complained and nothing but its own files was asked for."""
    width = request.param
    page = chromium.new_page(viewport={"width": width, "height": SIZES[width]})
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda call: asked.append(call.url))
    page.goto(page_file.as_uri())
    page.wait_for_selector("#leaderboard table")
    yield page
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.close()
    assert said == []
    own = (page_file.as_uri(), f"{page_file.parent.as_uri()}/report/samples-", "data:")
    assert [url for url in asked if not url.startswith(own)] == []


def series(page) -> list[str]:
    """The methods of the first leaderboard."""
    return [text.strip() for text in page.locator("#leaderboard .panel").first.locator("td.name").all_inner_texts()]


def test_charts_are_drawn(page):
    # two questions: a curve, a heat map, three costs; a grid for each of 12 runs and the full cache
    assert draw_charts(page) == 2 * (1 + 1 + 3 + 13)
    curve = page.locator("[data-chart=curve] svg").first
    for colour in (SNAPKV, KEYDIFF):
        assert curve.locator(f"path[stroke='{colour}']").count() == LINES[colour] > 0
    assert page.locator("[data-chart=tasks]").first.locator("text", has_text="cwe<img").count() == 1
    assert page.locator("#damaged li").count() == 1
    assert "no evidence about large models" in page.locator(".note").first.inner_text()


def test_the_matrix_is_sorted_by_the_budget_with_most_methods(chromium, tmp_path):
    """Cells that read few rows may have smaller budgets of their own."""
    store = write_small_store(tmp_path / "store")
    write_run(store, make_records(0.02, 50, count=8), method={"name": "quest"}, budget=0.02)
    page = chromium.new_page()
    page.goto(write_report(store, datetime(2026, 1, 2, 3, 4, tzinfo=UTC)).as_uri())
    page.wait_for_selector("#leaderboard table")
    heads = page.locator("#matrix .panel", has_text="question visible").locator("thead th")
    assert heads.all_inner_texts()[2] == "2\u202f%" and heads.nth(2).get_attribute("aria-sort") == "none"
    assert heads.nth(3).get_attribute("aria-sort") == "descending"  # 5 % has as many methods as 10 and 30 %
    assert (
        page.locator("#matrix .panel", has_text="question visible").locator("tbody th").last.inner_text()
        == "full cache"
    )
    names = page.locator("#matrix .panel", has_text="question visible").locator("tbody tr:not(.full) th")
    assert names.last.inner_text().strip() == "quest"
    page.close()


def test_the_matrix_is_sorted_by_a_click_and_by_a_key(page):
    panel = page.locator("#matrix .panel").first
    heads = panel.locator("thead th")
    assert heads.all_inner_texts() == ["method", "#", "5\u202f%", "10\u202f%", "30\u202f%"]

    def column(at: int) -> list[float]:
        cells = panel.locator(f"tbody tr:not(.full) td:nth-child({at + 2})")
        return [float(text.splitlines()[0].strip("*†")) for text in cells.all_inner_texts()]

    assert column(1) == sorted(column(1), reverse=True) and heads.nth(2).get_attribute("aria-sort") == "descending"
    panel.locator("[data-order='2']").click()
    assert column(3) == sorted(column(3), reverse=True) and heads.nth(4).get_attribute("aria-sort") == "descending"
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    assert column(2) == sorted(column(2), reverse=True) and heads.nth(4).get_attribute("aria-sort") == "none"
    tied = panel.locator("tbody tr:has(td.tied) td.rank").first
    assert tied.inner_text().startswith("1")
    assert panel.locator("td.rank small", has_text="n ≈ ").count() == panel.locator("td.rank:has(small)").count() > 0
    panel.locator("[data-order=name]").click()
    assert panel.locator("td.rank").count() == 0
    names = [text.strip() for text in panel.locator("tbody tr:not(.full) th").all_inner_texts()]
    assert names == ["keydiff", "keydiff · block 128", "newest", "snapkv"]
    assert panel.locator("tr.full th").inner_text().strip() == "full cache"
    assert panel.locator("td sup", has_text="*").count() >= 3


def test_every_cell_of_the_matrix_has_its_bytes_in_its_second_line(page):
    """In the text itself, which print and touch show too."""
    cells = page.locator("#matrix .panel").first.locator("tbody tr td.num:not(.rank)")
    lines = [text.splitlines() for text in cells.all_inner_texts() if text != ""]
    shares = {own[1] for own in lines}
    assert shares == {f"bytes {share}.0\u202f%" for share in ("5", "10", "30", "100")} and cells.count() == 5 * 3 + 1
    assert all(len(own) == 3 and "[" in own[2] for own in lines if own[1] != "bytes 100.0\u202f%")
    assert page.locator("#matrix td[title]").count() == 0


def test_cells_with_codecs_have_a_table_sorted_by_bytes(chromium, tmp_path):
    write_run(tmp_path, make_records(1.0, 100), method={"name": "full"})
    for salt, (method, codec, share, budget) in enumerate(
        (
            ("full", "int8", 0.5, 1.0),
            ("snapkv", "int4", 0.06, 0.2),
            ("snapkv", "raw", 0.2, 0.2),
            ("tova", "raw", 0.1, 0.2),
        )
    ):
        own = make_records(share, 50, salt)
        write_run(tmp_path, own, method={"name": method}, codec={"name": codec}, budget=budget)
    page = chromium.new_page()
    page.goto(write_report(tmp_path, datetime(2026, 1, 2, 3, 4, tzinfo=UTC)).as_uri())
    page.wait_for_selector("#matrix .points")
    names = [" ".join(text.split()) for text in page.locator("#matrix .points tbody th").all_inner_texts()]
    assert names == ["snapkv · int4 budget 20 %", "full · int8", "full cache"]
    assert "bytes 6.0" in page.locator("#matrix .points td").first.inner_text()
    ranks = page.locator("#matrix td.rank").all_inner_texts()
    assert ranks == ["–", "–"] and page.locator("#matrix sup", has_text="*").count() == 0  # no two hold similar bytes
    page.select_option("[data-filter=class]", "50\u202f%")
    assert page.locator("#matrix table").count() == 1 and page.locator("#matrix .points tbody tr").count() == 2
    page.close()


def test_a_table_that_is_wider_than_the_screen_says_so(page):
    box = page.locator("#matrix .scroll").first
    page.wait_for_timeout(100)  # the observer of sizes has run
    hint = page.locator("#matrix .hint").first
    wide = box.evaluate("own => own.scrollWidth > own.clientWidth")
    assert wide == (page.viewport_size["width"] == 390) == hint.is_visible()
    assert box.evaluate("own => own.classList.contains('cut')") == wide
    if wide:
        name = page.locator("#matrix tbody th.name").first
        before = name.bounding_box()["x"]
        box.evaluate("own => own.scrollTo(own.scrollWidth, 0)")
        page.wait_for_timeout(100)
        assert not box.evaluate("own => own.classList.contains('cut')")
        assert name.bounding_box()["x"] == before  # the names of methods stay in sight
        page.emulate_media(media="print")
        assert not hint.is_visible()
        page.emulate_media(media="screen")


def test_smallest_budgets_that_cannot_be_told_apart_share_a_rank(chromium, tmp_path):
    write_run(tmp_path, make_records(1.0, 100, count=43, group=""), method={"name": "full"})
    for salt, (method, chances) in enumerate({"snapkv": (70, 100), "keydiff": (75, 100), "newest": (0, 0)}.items()):
        for budget, chance in zip((0.05, 0.1, 0.8), (*chances, 100), strict=True):
            write_run(
                tmp_path, make_records(budget, chance, salt, 43, group=""), budget=budget, method={"name": method}
            )
    page = chromium.new_page()
    page.goto(write_report(tmp_path, datetime(2026, 1, 2, tzinfo=UTC)).as_uri())
    page.wait_for_selector("#leaderboard table")

    def ranks() -> list[str]:
        rows = page.locator("#leaderboard tbody tr").all()
        return sorted(
            f"{row.locator('td.name').inner_text().strip()} {row.locator('td').first.inner_text()}" for row in rows
        )

    assert ranks() == ["keydiff 1=", "newest 3", "snapkv 1="]
    page.click("[data-method=keydiff]")  # ranks are those among the methods shown
    assert ranks() == ["newest 2", "snapkv 1"]
    page.close()


def test_few_budgets_have_readable_axes(chromium, tmp_path):
    """One budget: a row for each method. Two budgets between usual shares: a tick at each."""
    for question, budgets in {"visible": (0.25,), "hidden": (0.12, 0.15)}.items():
        write_run(tmp_path, make_records(1.0, 100), method={"name": "full"}, question=question)
        for salt, method in enumerate(("snapkv", "keydiff")):
            for budget in budgets:
                own = make_records(budget, 50, salt)
                write_run(tmp_path, own, method={"name": method}, budget=budget, question=question)
    page = chromium.new_page()
    page.goto(write_report(tmp_path, datetime(2026, 1, 2, tzinfo=UTC)).as_uri())
    page.wait_for_selector("#leaderboard table")
    draw_charts(page)

    def labels(chart: str) -> list[str]:
        return page.locator(f"#curves [data-chart={chart}] .role-axis-label text").all_text_contents()

    assert labels("curve") == ["12%", "15%", "0", "20", "40", "60", "80", "100"]
    assert labels("dots")[:-2] == ["0", "20", "40", "60", "80", "100"]
    matrix = page.locator("#matrix .panel").nth(1).locator("tbody tr:not(.full) th")
    assert labels("dots")[-2:] == [text.strip() for text in matrix.all_inner_texts()]  # the higher score first
    assert page.locator("#curves [data-chart=dots] .mark-symbol path").count() == 2
    assert "budget 25\u202f%" in page.locator("#curves").inner_text()
    page.select_option("[data-filter=question]", "hidden")
    page.locator("#matrix a.method", has_text="snapkv").click()
    page.wait_for_selector("#method h2")
    draw_charts(page)
    assert page.locator("#method [data-chart=curve] .role-axis-label text").count() == 8
    page.close()


def test_the_charts_of_costs_have_a_key(page):
    assert page.locator("#costs .panel").count() == 2
    for place in range(2):
        names = page.locator("#costs .panel").nth(place).locator(".key span").all_inner_texts()
        assert [name.strip() for name in names] == ["keydiff", "keydiff · block 128", "newest", "snapkv", "full cache"]


def test_a_full_cache_alone_has_its_score(chromium, tmp_path):
    records = make_records(1.0, 100)
    write_run(tmp_path, records, method={"name": "full"})
    page = chromium.new_page()
    page.goto(write_report(tmp_path, datetime(2026, 1, 2, tzinfo=UTC)).as_uri())
    page.wait_for_selector("#matrix table")
    (row,) = page.locator("#matrix tbody tr").all_inner_texts()
    score = sum(own["score"] for own in records.values()) / len(records)
    assert row.split() == ["full", "cache", f"{score:.1f}", "bytes", "100.0", "%"]
    assert page.locator(".facts dd").first.inner_text() == "1 run, 0 methods, 24 answers"
    page.close()


def test_what_the_first_table_does_not_need_is_made_later(page):
    """The charting library starts with the first chart, and the list of runs is made when it is opened."""
    runs = page.evaluate("JSON.parse(document.getElementById('data').textContent).runs.length")
    assert page.locator("#runs tbody tr").count() == 0
    page.click("#runs summary")
    page.wait_for_selector("#runs tbody tr")
    assert page.locator("#runs tbody tr").count() == runs
    page.click("#runs summary")
    draw_charts(page)
    scripts = (
        "[...document.scripts].filter((own) => own.textContent === document.getElementById('library').textContent)"
    )
    assert page.evaluate(f"{scripts}.length") == 2  # as text, and once as a script


def test_a_tooltip_says_the_interval(page):
    draw_charts(page)
    mark = page.locator("[data-chart=tasks] .mark-rect.role-mark path[aria-label*='cwe']").first
    mark.scroll_into_view_if_needed()
    mark.hover(force=True)
    page.wait_for_selector("#vg-tooltip-element.visible")
    text = page.locator("#vg-tooltip-element").inner_text()
    assert "cwe<img" in text and "95 %" in text and "lost / gained / same" in text


def test_studies_are_drawn_when_they_are_near(chromium, tmp_path):
    store = write_small_store(tmp_path)
    write_study(store, list_heads())
    page, said = chromium.new_page(viewport={"width": 390, "height": 844}), []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(write_report(store, datetime(2026, 1, 2, 3, 4, tzinfo=UTC)).as_uri())
    page.wait_for_selector("#leaderboard table")
    assert page.locator("#studies svg").count() == 0 and page.locator("#studies li").count() == 1
    page.locator("#studies .study").scroll_into_view_if_needed()
    page.wait_for_selector("#studies svg.marks")
    assert page.evaluate("document.documentElement.scrollWidth") == 390 and said == []
    page.close()


def test_filters(page):
    assert page.locator("#curves .panel").count() == 2
    page.select_option("[data-filter=question]", "hidden")
    assert page.locator("#curves .panel h3").all_inner_texts() == ["ruler · question hidden"]
    assert sorted(series(page)) == ["keydiff", "keydiff · block 128", "newest", "snapkv"]
    page.select_option("[data-filter=block]", "128")
    assert series(page) == ["keydiff · block 128"]
    page.select_option("[data-filter=block]", "")
    page.select_option("[data-filter=class]", "25\u202f%")
    heads = page.locator("#matrix .panel").first.locator("thead th")
    assert heads.all_inner_texts() == ["method", "#", "30\u202f%"]
    page.select_option("[data-filter=class]", "")
    page.click("[data-method=keydiff]")
    assert sorted(series(page)) == ["newest", "snapkv"]
    assert page.get_attribute("[data-method=keydiff]", "aria-pressed") == "false"
    assert draw_charts(page) == 1 + 1 + 3 + 7
    for colour, count in ((KEYDIFF, LINES[KEYDIFF] - 2), (SNAPKV, LINES[SNAPKV])):  # the colours stay
        assert page.locator(f"[data-chart=curve] path[stroke='{colour}']").count() == count
    page.click("[data-method=snapkv]")
    page.click("[data-method=newest]")
    assert page.locator("#nothing").is_visible() and not page.locator("#curves").is_visible()
    page.dblclick("[data-method=snapkv]")
    assert series(page) == ["snapkv"]


def test_samples_are_loaded_when_they_are_asked_for(page):
    assert page.locator("script[src]").count() == 0 and page.locator(".sample").count() == 0
    page.select_option("[data-filter=question]", "visible")
    page.select_option("[data-pick=run]", label="ruler · question visible · snapkv · 5\u202f%")
    page.wait_for_selector(".sample")
    assert page.locator("script[src]").count() == 1
    assert page.locator(".sample").count() == 20
    page.click("text=Show more")
    assert page.locator(".sample").count() == 24
    body = page.locator("#samples").inner_text()
    assert "</script><script>window.hacked = 1</script>" in body and "\\x1b[31mred" in body and "\\ud800" in body
    assert page.locator("#samples img, #samples script").count() == 0
    first = page.locator(".sample").first
    assert first.locator("del").count() and first.locator("ins").count()
    assert body.count("What is the number?") == 24
    assert page.locator("#samples .rows svg").count() == 24 and page.locator("#samples .shades").count() == 1
    rows = page.locator("#samples .rows").first
    assert rows.locator("rect:has(title)").count() == 64 and rows.locator("rect.place").count() == 1
    assert rows.locator("rect").first.get_attribute("fill") == "rgb(18,63,109)"  # all of a bin
    assert rows.locator("title").first.text_content() == "tokens 0 to 3: 100\u202f%"
    assert "where a target stands" in rows.locator("svg").get_attribute("aria-label")
    assert rows.locator("span").all_inner_texts()[::2] == ["0", "200 tokens"]
    page.select_option("[data-pick=show]", "lost")
    lost = page.locator(".sample").count()
    assert 0 < lost < 24 and "difference −" in page.locator(".sample small").first.inner_text()
    page.select_option("[data-pick=subtask]", "vt")
    assert 0 < page.locator(".sample").count() < lost
    page.select_option("[data-pick=show]", "gained")
    assert page.locator(".sample").count() == 0
    page.click("[data-method=snapkv]")  # what is filtered out is not shown
    assert page.input_value("[data-pick=run]") == ""


def test_a_sample_shows_its_prompt(chromium, tmp_path, monkeypatch):
    """Words are shaded as their bins survived, and targets are green or amber, as the answer has them or not."""
    code = (
        "import json, sys\nfor line in sys.stdin:\n    uids = json.loads(line)['uids']\n"
        "    pieces = lambda uid: [['kept ', 0, False], [uid.split('/')[1], 20, True], [' gone', 30, False]]\n"
        "    print(json.dumps({'excerpts': {uid: [200, pieces(uid)] for uid in uids}}))"
    )
    monkeypatch.setattr("kvbench.report.excerpts.COMMAND", [sys.executable, "-c", code])
    hashed = {"prompt_hash": "0123456789abcdef", "rows_seen": 200}
    write_run(tmp_path, make_records(1.0, 100, **hashed), method={"name": "full"})
    lost = make_records(0.1, 50, score=0.0, survived="64" * 30 + "00" * 34, **hashed)
    lost["vt/1"] |= {"score": 100.0}
    lost["vt/2"] |= {"score": 50.0, "output": "it is 2"}
    write_run(tmp_path, lost, budget=0.1)
    page = chromium.new_page()
    page.goto(write_report(tmp_path, datetime(2026, 1, 2, tzinfo=UTC)).as_uri())
    page.select_option("[data-pick=run]", index=1)
    page.wait_for_selector(".prompt")
    while page.locator("text=Show more").count():
        page.click("text=Show more")
    for uid, kind in {"vt/0": "wrong", "vt/1": "right", "vt/2": "right"}.items():
        box = page.locator(".sample", has=page.locator("b", has_text=uid)).locator(".prompt")
        assert box.inner_text() == f"… kept {uid[-1]} gone …"
        assert box.locator(f"mark.{kind}").inner_text() == uid[-1]
        colours = [own.get_attribute("style") for own in box.locator("span").all()]
        assert colours == [
            "background: rgb(18,63,109); color: #fff",
            "background: rgb(242,244,247); color: #000",
        ]
    page.close()


def test_a_page_says_why_it_shows_no_prompts(page):
    page.select_option("[data-pick=run]", label="ruler · question visible · snapkv · 5\u202f%")
    page.wait_for_selector(".sample")
    assert page.locator("#samples .about").inner_text() == (
        "The prompts' text is not shown: the records were not made by a run."
    )


def test_what_older_records_lack_is_said(page):
    page.select_option("[data-pick=run]", label="ruler · question visible · snapkv · 30\u202f%")
    page.wait_for_selector(".sample")
    assert page.locator(".sample .rows").count() == page.locator(".shades").count() == 0
    said = page.locator(".sample").first.inner_text()
    assert "question: not recorded" in said and "which rows survived: not recorded" in said


def test_a_file_of_samples_that_is_gone_is_named(chromium, page_file):
    page = chromium.new_page()
    page.goto(page_file.as_uri())
    (own, *_) = page.evaluate("JSON.parse(document.getElementById('data').textContent).files")
    gone = page_file.parent / "report" / own["names"][0]
    away = gone.rename(gone.with_suffix(".away"))
    try:
        page.select_option("[data-pick=run]", own["run"])
        page.wait_for_selector("#samples .note.bad")
        assert f"report/{gone.name} is missing next to this page" in page.locator("#samples .note.bad").inner_text()
    finally:
        away.rename(gone)
        page.close()


def test_a_method_has_a_page(page, page_file):
    page.locator("#matrix a.method", has_text="snapkv").first.click()
    page.wait_for_selector("#method h2")
    text = page.locator("#method").inner_text()
    assert "keep the rows that the last queries attended to" in text and "s_j = pool_κ" in text
    assert "window=64, kernel=5, pooling=avg, group=after" in text and "Where it fails first" in text
    assert not page.locator("#matrix").is_visible() and draw_charts(page) >= 2
    assert page.url.endswith("#method=snapkv")
    assert page.evaluate("document.activeElement.tagName") == "H2"
    page.click("#method .back")
    page.wait_for_selector("#matrix table")
    assert not page.locator("#method").is_visible() and page.locator("#matrix").is_visible()
    page.goto(f"{page_file.as_uri()}#method=newest")
    page.wait_for_selector("#method h2")
    assert "no method of this name" in page.locator("#method").inner_text()
    page.go_back()


def shown_comparison(page) -> list[list[str]]:
    """The rows of the comparison of two runs, with the signs that the command prints."""
    rows = page.locator("#compare .paired tbody tr").all()
    cells = [row.locator("th, td").all_inner_texts() for row in rows]
    return [[text.replace("−", "-").replace(" / ", "/").replace("+0.0", "0.0") for text in own] for own in cells]


def compare_there(page_file: Path, *hashes: str) -> RunComparison:
    runs = {run.hash: run for run in load_runs(page_file.parent)}
    return compare_runs(*(runs[name] for name in hashes))


def expected_comparison(page_file: Path, *hashes: str) -> list[list[str]]:
    """The same rows as `kvbench results compare` prints them. It writes +0.0 where the page writes 0.0."""
    found = compare_there(page_file, *hashes)
    rows = [*found.subtasks.items(), ("average", found.average)]
    return [[column.cell(row).replace("+0.0", "0.0") for column in SCORES] for row in rows]


def expected_samples(page_file: Path, *hashes: str) -> tuple[int, int]:
    found = compare_there(page_file, *hashes)
    return len(found.lost), len(found.gained)


def draw_differences(draw: random.Random) -> list[dict[str, list]]:
    """Differences of one to five subtasks: right or wrong, rare, partial, smooth or none, alone or clustered."""
    kind, shared, subtasks = draw.choice(["binary", "rare", "partial", "smooth", "none"]), draw.random() < 0.2, []
    values = {
        "binary": lambda: draw.choice([-100.0, 0.0, 0.0, 100.0]),
        "rare": lambda: -100.0 if draw.random() < 0.03 else 0.0,
        "partial": lambda: draw.choice([0.0, 0.0, 0.0, 50.0, -50.0, -25.0, 100.0]),
        "smooth": lambda: max(-100.0, min(100.0, draw.gauss(-5, 15))),
        "none": lambda: 0.0,
    }[kind]
    for subtask in range(draw.choice([1, 1, 2, 3, 5])):
        count, size = draw.choice([1, 2, 5, 8, 20, 50, 120]), draw.choice([1, 1, 2, 3])
        groups = [f"{'' if shared else subtask}/{place // size}" for place in range(count)]
        subtasks.append({"values": [values() for _ in groups], "groups": groups})
    return subtasks


def test_intervals_of_the_page_are_those_of_the_tables(page):
    draw = random.Random(0)
    cases = [draw_differences(draw) for _ in range(200)]
    expected = compute_means([([Values(**own, least=-100, most=100) for own in case], None) for case in cases])
    found = page.evaluate("cases => cases.map((own) => kvbenchIntervals.mean(own))", cases)
    assert len({own.low is None for own in expected}) == 2
    for own, one in zip(found, expected, strict=True):
        assert (own["low"] is None) is (one.low is None)
        ends = ("value", "low", "high") if one.low is not None else ("value",)
        assert [own[end] for end in ends] == pytest.approx([getattr(one, end) for end in ends], abs=1e-9)


def test_two_runs_are_compared(page, page_file):
    runs = page.evaluate("JSON.parse(document.getElementById('data').textContent).runs")
    one, other, full = (
        next(run for run in runs if run["panel"] == 1 and (run["series"], run["budget"]) == own)
        for own in (("snapkv", "5\u202f%"), ("snapkv", "30\u202f%"), ("full cache", ""))
    )
    page.select_option("[data-compare=a]", one["hash"])
    page.select_option("[data-compare=b]", other["hash"])
    page.wait_for_selector("#compare .paired")
    assert page.locator("#compare .settings tbody tr").all_inner_texts() == ["budget\t0.05\t0.3"]
    assert shown_comparison(page) == expected_comparison(page_file, one["hash"], other["hash"])
    lost = expected_samples(page_file, one["hash"], other["hash"])
    assert page.locator("#compare h3").all_inner_texts()[-2:] == [f"Lost ({lost[0]})", f"Gained ({lost[1]})"]
    said = page.locator("#compare").inner_text()
    assert f"kvbench results compare {one['hash']} {other['hash']}" in said
    assert "These samples tell A from B." in said
    near = next(run for run in runs if run["panel"] == 1 and (run["series"], run["budget"]) == ("keydiff", "30\u202f%"))
    page.select_option("[data-compare=b]", near["hash"])
    page.select_option("[data-compare=a]", other["hash"])
    page.select_option("[data-compare=b]", near["hash"])
    page.wait_for_selector("#compare .paired")
    assert "These 24 samples cannot tell A from B. If the difference" in page.locator("#compare").inner_text()
    page.select_option("[data-compare=a]", one["hash"])
    page.select_option("[data-compare=b]", full["hash"])
    page.wait_for_selector("#compare .paired")
    assert shown_comparison(page) == expected_comparison(page_file, one["hash"], full["hash"])
    assert f"a={one['hash']}&b={full['hash']}" in page.url
    assert page.locator("[data-compare=b] option").count() == 13  # the other runs of the panel


@pytest.mark.parametrize("width", SIZES)
def test_a_dark_page_is_dark(chromium, page_file, width):
    page = chromium.new_page(viewport={"width": width, "height": SIZES[width]}, color_scheme="dark")
    said = []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(page_file.as_uri())
    page.wait_for_selector("#matrix table")
    draw_charts(page)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 29)"
    curve = page.locator("[data-chart=curve] svg").first
    assert curve.locator(f"path[stroke='{DARK_SNAPKV}']").count() == LINES[SNAPKV]
    assert not curve.locator(f"path[stroke='{SNAPKV}']").count()
    assert page.evaluate("document.documentElement.scrollWidth") == width and said == []
    page.emulate_media(color_scheme="light")
    page.wait_for_selector("[data-chart=curve]:not([data-drawn])", state="attached")
    draw_charts(page)
    assert page.locator("[data-chart=curve] svg").first.locator(f"path[stroke='{SNAPKV}']").count() == LINES[SNAPKV]
    page.close()


def test_everything_has_a_name_for_screen_readers(page):
    draw_charts(page)
    page.select_option("[data-pick=run]", index=1)
    page.wait_for_selector(".sample")
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, a, select, [role=img], [tabindex='0']")]
        .filter((node) => node.getClientRects().length && !node.closest(".vega-embed svg"))
        .filter((node) => !node.getAttribute("aria-label") && !(node.closest("label") || node).innerText.trim())
        .map((node) => node.outerHTML.slice(0, 100))"""
    )
    assert unnamed == []
    assert page.locator("th:not([scope])").count() == 0


def test_the_address_says_what_is_chosen(page, page_file):
    page.select_option("[data-filter=question]", "hidden")
    page.click("[data-method=newest]")
    page.select_option("[data-pick=run]", label="ruler · question hidden · snapkv · 5\u202f%")
    page.wait_for_selector(".sample")
    page.select_option("[data-pick=show]", "lost")
    page.select_option("[data-pick=subtask]", "vt")
    shown, link = page.locator(".sample").count(), page.url
    run = page.input_value("[data-pick=run]")
    assert link.partition("#")[2] == f"question=hidden&hide=newest&run={run}&show=lost&subtask=vt" and shown
    page.goto("about:blank")
    page.goto(link)
    page.wait_for_selector(".sample")
    assert page.locator(".sample").count() == shown and page.url == link
    assert page.input_value("[data-filter=question]") == "hidden" and "newest" not in series(page)
    assert [page.input_value(f"[data-pick={name}]") for name in ("run", "show", "subtask")] == [run, "lost", "vt"]
    page.select_option("[data-pick=show]", "all")
    page.click("[data-method=newest]")
    assert "newest" in series(page)
    page.go_back()
    assert "newest" not in series(page) and page.input_value("[data-pick=show]") == "all"
    page.go_back()
    assert page.input_value("[data-pick=show]") == "lost" and page.locator(".sample").count() == shown
    page.go_forward()
    assert page.input_value("[data-pick=show]") == "all"


def test_an_address_of_another_store_is_ignored(page, page_file):
    page.goto("about:blank")
    page.goto(
        f"{page_file.as_uri()}#question=sideways&hide=nobody&hide=toString&run=0&show=constructor&subtask=x&z=%ff"
    )
    page.wait_for_selector("#leaderboard table")
    assert page.locator("#curves .panel").count() == 2 and page.locator("[aria-pressed=false]").count() == 0
    assert [page.input_value(f"[data-pick={name}]") for name in ("run", "show", "subtask")] == ["", "all", ""]
    (own, *_) = page.evaluate("JSON.parse(document.getElementById('data').textContent).files")
    page.goto("about:blank")
    page.goto(f"{page_file.as_uri()}#run={own['run']}&subtask=nothing")
    page.wait_for_selector(".sample")
    assert page.input_value("[data-pick=subtask]") == "" and page.locator(".sample").count() == 20


def test_a_part_that_another_section_has_loaded_is_not_asked_for_again(chromium, tmp_path, monkeypatch):
    """Here a section is filled long after the first one, and its place comes near the screen in between."""
    monkeypatch.setattr("kvbench.report.page.MOST", 1000)
    file = write_report(write_small_store(tmp_path), datetime(2026, 1, 2, 3, 4, tzinfo=UTC))
    page = chromium.new_page(viewport={"width": 390, "height": 100})
    failed = []
    page.on("requestfailed", lambda request: failed.append(request.url))
    page.add_init_script(
        "const soon = requestAnimationFrame; requestAnimationFrame = (f) => soon(() => setTimeout(f, 2000))"
    )
    page.goto(file.as_uri())
    page.wait_for_selector("#leaderboard table")
    for place in range(0, 6000, 600):
        page.evaluate(f"scrollTo(0, {place})")
        page.wait_for_timeout(50)
    page.wait_for_timeout(2500)
    assert failed == []
    page.close()


def test_numbers_beside_the_page_come_when_they_are_near(chromium, tmp_path, monkeypatch):
    monkeypatch.setattr("kvbench.report.page.MOST", 1000)
    write_run(write_small_store(tmp_path), make_records(0.2, 50), budget=0.2, question="hidden")
    file = write_report(tmp_path, datetime(2026, 1, 2, 3, 4, tzinfo=UTC))
    page = chromium.new_page(viewport={"width": 1440, "height": 900})
    said = []
    page.on("console", lambda message: said.append(message.text))
    page.on("requestfailed", lambda request: said.append(request.url))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(f"{file.as_uri()}#question=hidden")
    page.wait_for_selector("#leaderboard table")
    assert draw_charts(page) == 1 + 1 + 3 + 14
    assert page.locator("script[src*=part]").count() == 2  # the other question's are not asked for
    page.select_option("[data-filter=question]", "")
    assert draw_charts(page) == 2 * (1 + 1 + 3 + 13) + 1 and page.locator(".unloaded").count() == 0
    assert page.locator("script[src*=part]").count() == 3
    page.select_option("[data-filter=block]", "128")
    assert series(page) == ["keydiff · block 128"]
    assert said == []
    for part in (file.parent / "report").glob("part-*"):
        part.unlink()
    page.reload()
    page.wait_for_selector(".note.bad")
    assert "is missing next to this page" in page.locator(".note.bad").inner_text()
    page.close()


def test_a_large_panel_is_folded_and_says_so(chromium, tmp_path):
    write_run(tmp_path, make_records(1.0, 100, count=1), method={"name": "full"})
    for number in range(110):
        records = make_records(0.1, number % 100, count=1)
        write_run(tmp_path, records, method={"name": "snapkv", "window": number}, budget=0.1)
    page = chromium.new_page(viewport={"width": 1440, "height": 900})
    said = []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(write_report(tmp_path, datetime(2026, 1, 2, 3, 4, tzinfo=UTC)).as_uri())
    page.wait_for_selector("#leaderboard table")
    for name, more in (("matrix", 1), ("leaderboard", 0)):  # the matrix ends with the full cache
        rows, note = page.locator(f"#{name} tbody tr"), page.locator(f"#{name} .fold")
        assert rows.count() == 100 + more and note.inner_text() == "The first 100 of 110 rows. Show all"
        note.locator("button").click()
        assert rows.count() == 110 + more and note.count() == 0
    page.locator("#matrix [data-order=name]").click()
    assert page.locator("#matrix tbody tr").count() == 111
    drawn = "40 of the 110 rows of scores are drawn: those with the highest score at any budget."
    for name in ("curves", "tasks", "costs"):
        assert page.locator(f"#{name} .drawn").inner_text().startswith(drawn)
    page.locator("#runs summary").click()
    page.wait_for_selector("#runs tbody tr")  # the browser says later that the list was opened
    assert page.locator("#runs tbody tr").count() == 100
    page.locator("#runs .fold button").click()
    assert page.locator("#runs tbody tr").count() == 111 and said == []
    page.close()


def test_pictures_for_people(page):
    """`make test-browser SHOTS=folder` keeps pictures of the page. Without a folder, none is taken.

    Chromium once did not answer for 30 seconds when it was asked for a picture of the whole page.
    """
    draw_charts(page)
    folder, width = os.environ.get("KVBENCH_SHOTS"), page.viewport_size["width"]
    if folder:
        assert len(page.screenshot(full_page=True, path=Path(folder) / f"report-{width}.png")) > 50_000
    page.select_option("[data-pick=run]", label="ruler · question visible · snapkv · 5\u202f%")
    page.wait_for_selector(".sample")
    page.evaluate("document.getElementById('samples').scrollIntoView()")
    if folder:
        assert len(page.screenshot(path=Path(folder) / f"samples-{width}.png")) > 20_000

"""docs/results.md: what it says follows from the lines, and the same lines give the same page."""

import re

import pytest

from kvbench.analysis.result_lines import format_lines, make_lines
from kvbench.report.results_page import (
    choose_files,
    compare_to_full,
    count_signs,
    describe_holders,
    describe_separation,
    find_front,
    format_bytes,
    format_page,
    format_ranks,
    format_score,
    shorten_label,
    write_results_page,
)
from kvbench.store.runs import load_runs
from kvbench.validation import SettingError
from tests.support.made_up_runs import write_run
from tests.support.report_store import make_records

ADA, KIVI = {"name": "ada", "mode": "interpolate"}, {"name": "kivi", "bits": 2}


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Two questions, two budgets, an allocator and a codec; snapkv is far better than random."""
    folder = tmp_path_factory.mktemp("store")
    for question in ("visible", "hidden"):
        write_run(folder, make_records(1.0, 100, count=20), method={"name": "full"}, question=question)
        for name, chance in {"snapkv": 100, "random": 0}.items():
            for budget in (0.5, 0.2):
                own = make_records(budget, chance * (question == "visible"), count=20)
                write_run(folder, own, method={"name": name}, budget=budget, question=question)
    own = make_records(0.2, 100, count=20)
    write_run(folder, own, method={"name": "snapkv"}, budget=0.2, allocator=ADA)
    write_run(folder, own, method={"name": "snapkv"}, budget=0.2, codec=KIVI)
    return make_lines(load_runs(folder))


@pytest.fixture
def machine(lines, tmp_path):
    """A folder of two tiers, which share the lines with a hidden question."""
    folder = tmp_path / "measured" / "gpu-x"
    folder.mkdir(parents=True)
    (folder / "a.csv").write_text(format_lines(lines))
    (folder / "b.csv").write_text(format_lines([line for line in lines if line["question"] == "hidden"]))
    return folder


@pytest.fixture
def without_pictures(monkeypatch) -> None:
    monkeypatch.setattr("kvbench.report.results_page.draw_pictures", lambda tiers: {})


def test_the_page_states_what_the_lines_hold(machine, lines, tmp_path):
    (machine / "b.csv").unlink()
    [page, *pictures] = write_results_page(choose_files(machine.parent), tmp_path / "docs")
    text = page.read_text()
    assert re.findall(r"\]\((images/[^)]+)\)", text) == [path.relative_to(page.parent).as_posix() for path in pictures]
    assert all(path.read_text().startswith("<svg") for path in pictures)
    assert f"| a | Main methods | {len(lines)} | {60 * len(lines)} | python -m kvbench dev measured a |" in text
    sections = [line for line in text.splitlines() if line.startswith("## ")]
    assert sections == [
        "## What was measured",
        "## Which methods can be told apart",
        "## What changes when the question is hidden",
        "## What allocators bring",
        "## What a byte buys",
        "## What these numbers cannot tell",
    ]
    # visible, 20 %: snapkv, its two variants and random; only random differs from the three
    assert "**20 % kept.** 3 of 6 pairs of cells at 20.0% of the bytes can be told apart." in text
    assert "| random | 0.0 " in text and "| 4 of 4 |" in text
    said = " ".join(text.split())
    assert (
        "Scores fall in 2 of 4 cells when the cache is cut before the question is known, rise in 0, and in 2 neither"
        in said
    )
    assert "Scores are higher than without the allocator in 0 of 1 cells and lower in 0; in 1 neither is shown" in said
    assert "None" not in text and "n/a" not in text and "[measured/gpu-x](../measured/gpu-x)" in said


def test_a_section_without_cells_is_left_out(machine, tmp_path, without_pictures):
    (machine / "a.csv").unlink()
    text = write_results_page(choose_files(machine.parent), tmp_path / "docs")[0].read_text()
    assert "allocators bring" not in text and "byte buys" not in text and "## What these numbers" in text


def test_the_same_lines_give_the_same_page(machine, lines, tmp_path):
    few = [line for line in lines if line["question"] == "hidden" and line["budget"] in (1.0, 0.2)]
    (machine / "a.csv").unlink()
    (machine / "b.csv").write_text(format_lines(few))
    one, other = (write_results_page(choose_files(machine.parent), tmp_path / name) for name in ("one", "other"))
    assert len(one) > 1 and [path.read_text() for path in one] == [path.read_text() for path in other]


def format_text(**tiers) -> str:
    """The page of these tiers in one line, without pictures."""
    return " ".join(format_page(tiers, ["measured/gpu-x"], {}).split())


def test_the_page_says_where_tiers_of_different_code_score_differently(lines):
    def describe(**changes) -> str:
        shared = [line | changes if line["method"] == "full" else line for line in lines]
        return format_text(a=lines, b=[line for line in shared if line["question"] == "hidden"])

    said = "The full cache scores 80.0 to 90.0 (tiny, ruler length 2048, question hidden), depending on the tier."
    assert said in describe(score=80.0, code="git other")
    assert "depending on the tier" not in describe(score=80.0)
    assert "depending on the tier" not in describe(code="git other")


def test_the_page_says_which_tiers_are_not_finished(lines):
    planned = 38 * 2  # of tier a: 19 sweeps of methods with two questions and two budgets
    methods = [line for line in lines if line["method"] != "full"]
    said = f"Tier a is not finished: {len(methods)} of its {planned} cells of methods were measured."
    assert said in format_text(a=lines)
    many = (planned // len(methods) + 1) * methods
    assert "not finished" not in format_text(a=[*lines, *many])


def test_cells_are_compared_within_their_tier(lines):
    """A cell of another tier that is measured again has another hash and may score otherwise."""
    again = [line | {"hash": line["hash"][::-1], "code": "git other"} for line in lines]
    text = format_text(a=lines, b=[line | {"score": 95.0} if line["allocator"] == "ada" else line for line in again])
    for tier in "ab":
        said = f"**Tier {tier}: tiny, ruler length 2048, question visible.** "
        assert f"{said}Scores are higher than without the allocator in 0 of 1 cells" in text
        assert any(" of 7 cells are on the front" in part[:60] for part in text.split(said))


def test_a_warning_that_tiers_share_is_said_once(lines):
    one, other = "Made-up texts: no evidence.", "Generated text (haystack) replaces the benchmark's own."
    warned = {
        name: [line | {"warnings": own} for line in lines] for name, own in (("a", f"{one} {other}"), ("b", other))
    }
    text = format_text(**warned)
    assert text.count("Made-up texts") == text.count("Generated text") == 1


def test_the_page_says_which_methods_hold_all_bytes(lines):
    assert (
        describe_holders(lines)
        == describe_holders([line | {"bytes_held": 1.0, "budget": "x=1"} for line in lines])
        == []
    )
    held = [line | {"bytes_held": 1.0} if line["label"] == "random" else line for line in lines]
    [said] = describe_holders(held)
    assert said.startswith("random holds all bytes of the full cache: its budget is") and "beside" not in said
    [said] = describe_holders([line | {"bytes_in_all": 1.023} for line in held])
    assert "beside the rows, such as codes and bounds, 102.3% (random) are held." in said


def test_cells_whose_method_decides_have_a_table_of_their_own(tmp_path):
    write_run(tmp_path, make_records(1.0, 100, count=20), method={"name": "full"})
    write_run(tmp_path, make_records(0.5, 100, count=20), method={"name": "snapkv"}, budget=0.5)
    for threshold, share in ((-0.5, 0.3), (-0.7, 0.6)):
        method = {"name": "dms_threshold", "budget_setting": "threshold", "threshold": threshold}
        write_run(tmp_path, make_records(share, 50, count=20), method=method, budget=None)
    folder = tmp_path / "measured" / "gpu-x"
    folder.mkdir(parents=True)
    (folder / "a.csv").write_text(format_lines(make_lines(load_runs(tmp_path))))

    [page, *pictures] = write_results_page(choose_files(tmp_path / "measured"), tmp_path / "docs")
    text = page.read_text()
    assert [path.stem.rpartition("-")[2] for path in pictures] == ["0.5", "curve"]
    assert "| method | 50 % score |" in text  # thresholds are no columns
    rows = [line.split(" | ")[:3] for line in text.splitlines() if line.startswith("| dms")]
    assert rows == [["| dms\\_threshold", f"threshold={own}", f"{held:.1f}%"] for own, held in ((-0.7, 60), (-0.5, 30))]


def make_cell(score: float, low: float, high: float) -> dict[str, float]:
    """A cell of a column, with what the comparison with the full cache reads."""
    return {"score": score, "difference": (low + high) / 2, "low": low, "high": high}


def test_only_a_narrow_interval_shows_that_a_cell_is_no_worse():
    full = {"method": "full", "codec": "raw", "score": 20.4}
    wide, near, far = make_cell(8.9, -23.5, 0.5), make_cell(20.0, -1.5, 0.7), make_cell(2.0, -25.0, -15.0)
    cells = [wide, near, far]
    less = "1 of 3 cells is shown to lose at most 2.0 points against the full cache; 1 is shown to score less"
    assert compare_to_full(cells, full, 3.0) == f"{less}, and for 1 neither is shown."
    signed = [line | {"difference_sign": 0} for line in cells]
    assert "; 0 are shown to score less, and for 2 neither is shown." in compare_to_full(signed, full, 3.0)
    assert compare_to_full([near], full, 1.0).startswith("0 of 1 cells are shown to lose at most 1.0 points")
    lines = [line | {"method": "snapkv", "codec": "raw"} for line in cells]
    assert [format_score(line, full, 3.0) for line in (*lines, full)] == ["8.9", "20.0 ✓", "2.0", "20.4"]


def test_only_cells_of_like_bytes_are_ranked_together(lines, machine, tmp_path, without_pictures):
    column = [line for line in lines if line["question"] == "visible" and line["budget"] == 0.2]
    packed = [line | {"rank_class": "3.3% of the bytes", "rank_of": 1, "rank_first": 1} for line in column[:1]]
    full = next(line for line in lines if line["method"] == "full")
    [said] = describe_separation([full, *packed, *column[1:]], 3.0)
    assert "of 3 pairs of cells at 20.0% of the bytes can be told apart" in said and "3.3%" not in said
    older = [{name: value for name, value in line.items() if "rank_" not in name} for line in column]
    older = [line | {"rank_first": 1, "rank_last": 4} for line in older]
    [said] = describe_separation([full, *older], 3.0)
    assert "0 of 6 pairs of cells can be told apart. Any of 4 cells" in said
    assert format_ranks(older[0]) == "1 to 4" and format_ranks(packed[0] | {"rank_last": 1}) == "1 of 1"


def test_falls_are_counted_jointly():
    """Of twenty intervals, one excludes 0 by little, as chance lets one in twenty do."""
    names = ("question_gain", "question_gain_low", "question_gain_high")
    values = [(-10.0, -19.0, -1.0), *[(0.0, -5.0, 5.0)] * 18, (-50.0, -60.0, -40.0)]
    cells = [dict(zip(names, value, strict=True)) for value in values]
    assert count_signs(cells, "question_gain") == {-1: 1, 0: 19, 1: 0}
    assert count_signs([line | {"question_gain_sign": -1} for line in cells], "question_gain")[-1] == 20


def test_the_front_has_no_cell_that_another_one_beats():
    cells = [
        {"bytes_held": held, "score": score} for held, score in ((0.5, 90), (0.2, 40), (0.2, 50), (0.4, 45), (1, 90))
    ]
    assert find_front(cells) == [{"bytes_held": 0.2, "score": 50}, {"bytes_held": 0.5, "score": 90}]


def test_a_cell_that_needs_a_file_is_listed_and_may_be_on_one_front_only():
    names = ("label", "codec", "budget", "bytes_held", "bytes_with_files", "score")
    cells = [
        dict(zip(names, values, strict=True)) | {"score_low": 1.0, "score_high": 99.0, "codec_gain": None}
        for values in (
            ("full cache", "raw", 1.0, 1.0, 1.0, 90.0),
            ("cheap with its file", "delta", 1.0, 0.2, 0.3, 80.0),
            ("dear with its file", "delta", 1.0, 0.3, 1.2, 85.0),
            ("beaten", "delta", 1.0, 0.4, 0.6, 70.0),
            ("without a file", "raw", 0.5, 0.5, None, 60.0),
        )
    ]
    text = "\n".join(format_bytes({"Tier x": cells}))
    assert "**Tier x.** 3 of 5 cells are on the front by bytes held, 2 of them with a codec, and 2 on the front" in text
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    assert [(line[0].strip("| "), line[-1].strip(" |")) for line in lines] == [
        ("cheap with its file", "both"),
        ("dear with its file", "cache"),
        ("beaten", ""),
        ("full cache", "both"),
    ]


def test_pictures_have_short_labels():
    label = "full · delta · codec.stride=20 · codec.path=stride-20"
    assert shorten_label(label) == "delta · stride=20 · stride-20" and shorten_label("snapkv · ada") == "snapkv · ada"


def test_machines_and_their_tiers_are_chosen(machine, tmp_path, without_pictures):
    folder = machine.parent
    files = {tier: machine / f"{tier}.csv" for tier in "ab"}
    assert choose_files(folder) == choose_files(folder, "gpu-x") == files
    with pytest.raises(SettingError, match="--machine=nosuch: choose one of gpu-x"):
        choose_files(folder, "nosuch")
    with pytest.raises(SettingError, match="no results there; kvbench dev measured a"):
        choose_files(folder / "gpu-x" / "nosuch")

    other = folder / "gpu-y"
    other.mkdir()
    (machine / "b.csv").rename(other / "b.csv")
    assert choose_files(folder) == choose_files(folder, "gpu-y") == files | {"b": other / "b.csv"}
    text = write_results_page(choose_files(folder), tmp_path / "docs")[0].read_text()
    assert "[measured/gpu-x](../measured/gpu-x) and [measured/gpu-y](../measured/gpu-y)," in text
    (other / "a.csv").write_text("")
    with pytest.raises(SettingError, match="--machine: tier a was measured on several; choose one of gpu-x, gpu-y"):
        choose_files(folder)
    assert choose_files(folder, "gpu-x") == files | {"b": other / "b.csv"}
    with pytest.raises(SettingError, match="gpu-y/a.csv: has no lines"):
        write_results_page(choose_files(folder, "gpu-y"), tmp_path / "docs")

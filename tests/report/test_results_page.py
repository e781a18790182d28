"""docs/results.md and its sub-pages: what they say follows from the lines, and the same lines give the same pages."""

import re

import pytest

from kvbench.analysis.joint_signs import MARGIN
from kvbench.analysis.power import estimate_deviation
from kvbench.analysis.result_lines import PartNumbers, make_lines
from kvbench.cli.measured import main
from kvbench.config.study_parts import StudyPart, read_study
from kvbench.report.results_cells import split_sections
from kvbench.report.results_origin import describe_progress
from kvbench.report.results_page import (
    CODECS,
    EQUAL,
    MEASURED,
    PAGES,
    answer_page,
    choose_files,
    drop_repeated,
    find_page,
    format_pages,
    list_changes,
    name_page,
    read_all_checksums,
    read_parts,
    write_results_page,
)
from kvbench.report.results_tables import PLANNED, format_section
from kvbench.report.results_text import wrap
from kvbench.store.checksums import write_checksum
from kvbench.store.published_file import write_published
from kvbench.store.published_runs import PublishedRun, publish
from kvbench.store.runs import load_runs
from kvbench.validation import SettingError
from tests.support.made_up_runs import write_run
from tests.support.measured_lines import make_full, make_line, pair_bytes, rank
from tests.support.report_store import make_records
from tests.support.repository import ROOT

ADA, KIVI = {"name": "ada", "mode": "interpolate"}, {"name": "kivi", "bits": 2}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[PublishedRun]:
    """Two questions, two budgets, an allocator and a codec; snapkv is far better than random."""
    folder = tmp_path_factory.mktemp("store")
    for question in ("visible", "hidden"):
        write_run(folder, make_records(1.0, 100, count=20), method={"name": "full"}, question=question)
        for name, chance in {"snapkv": 100, "random": 0}.items():
            for budget in (0.5, 0.2):
                records = make_records(budget, chance * (question == "visible"), count=20)
                write_run(folder, records, method={"name": name}, budget=budget, question=question)
    records = make_records(0.2, 100, count=20)
    write_run(folder, records, method={"name": "snapkv"}, budget=0.2, allocator=ADA)
    write_run(folder, records, method={"name": "snapkv"}, budget=0.2, codec=KIVI)
    return [publish(run) for run in load_runs(folder)]


@pytest.fixture(scope="module")
def lines(runs):
    return make_lines(runs)


@pytest.fixture
def machine(runs, tmp_path):
    """A folder of two parts, which share the runs with a hidden question."""
    folder = tmp_path / "measured" / "gpu-x"
    folder.mkdir(parents=True)
    write_published(runs, {}, folder / "a.parquet")
    write_published([run for run in runs if run.value["question"] == "hidden"], {}, folder / "b.parquet")
    return folder


@pytest.fixture
def without_pictures(monkeypatch) -> None:
    monkeypatch.setattr("kvbench.report.results_page.draw_pictures", lambda sections: {})
    monkeypatch.setattr("kvbench.report.results_page.draw_figure", lambda section: "<svg")


def read_text(pages: dict[str, str], page: str) -> str:
    """A page in one line."""
    return " ".join(pages[page].split())


@pytest.fixture(scope="module")
def committed() -> dict[str, PartNumbers]:
    """The numbers of all published parts, which take seconds for each."""
    return read_parts(choose_files(ROOT / "results" / "measured"))


@pytest.mark.full
def test_the_committed_pages_and_pictures_are_those_of_the_committed_files(committed, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "kvbench.report.results_page.read_parts", lambda files: {part: committed[part] for part in files}
    )
    (tmp_path / "results").symlink_to(ROOT / "results")
    assert main(["--page", "--results", str(tmp_path / "results"), "--out", str(tmp_path / "docs")]) == 0
    written = list((tmp_path / "docs").rglob("*.*"))
    assert {path.name for path in written} >= {"which-method.md", *map(name_page, PAGES)}
    for path in written:
        name = path.relative_to(tmp_path)
        assert (ROOT / name).read_text() == path.read_text(), f"{name}: write it by kvbench dev measured --page"
    drawn = {path.name for path in (ROOT / "docs" / "images").glob("measured-*.svg")}
    assert drawn <= {path.name for path in written}, "remove the pictures of earlier pages"


@pytest.mark.full
def test_every_named_change_has_its_cells_in_the_committed_files(committed):
    changes = {part: study.changes for part, study in read_study().items() if study.changes}
    named = {part: {words for others in some.values() for words in others} for part, some in changes.items()}
    assert named and named == {part: {each.words for each in committed[part].changed} for part in changes}


@pytest.mark.full
def test_the_stated_deviations_are_those_of_the_committed_files(committed):
    lines = [line for known in committed.values() for line in known.lines]
    said = " ".join((ROOT / "docs" / "statistics.md").read_text().split())

    def measure(model: str, task: str) -> float:
        return estimate_deviation([line for line in lines if (line["model"], line["task"]) == (model, task)])

    models = (measure(model, "ruler") for model in ("smollm2", "smollm2_long", "reference"))
    sentence = "{:.1f} points for SmolLM2, {:.1f} for the tuned one and {:.1f} for the embedded model"
    turns = "{:.1f} points in the embedded model and {:.1f} in the tuned SmolLM2"
    assert sentence.format(*models) in said
    assert turns.format(*(measure(model, "scbench") for model in ("reference", "smollm2_long"))) in said


def test_the_committed_pages_hold_what_small_files_say_and_name_the_others():
    """A change of a table's form, or of a file, without `kvbench dev measured --page`, is noticed here."""
    files = choose_files(ROOT / "results" / "measured")
    small = {part: path for part, path in files.items() if path.stat().st_size < 100_000}
    sections = split_sections({part: known.lines for part, known in read_parts(small).items()})
    for section in sections:
        text = "\n".join(format_section(section, MARGIN))
        assert text in (ROOT / "docs" / name_page(find_page(section))).read_text(), section.title
    origin = (ROOT / "docs" / name_page(MEASURED)).read_text()
    assert sections and all(f"| {part} |" in origin.replace("\\_", "_") for part in files)
    for name, digest in read_all_checksums(files.values()).items():
        assert f"| {name} | {digest} |" in origin.replace("\\_", "_")


def test_the_page_compares_what_the_study_names(machine, tmp_path, without_pictures, monkeypatch):
    pair, words = ("method=snapkv", "method=random"), "rows at random in place of snapkv's"
    changes = {"method=snapkv budget=0.5": {words: "method=random budget=0.5"}}
    study = StudyPart("a", "A part", [], pairs=[pair], changes=changes)
    monkeypatch.setattr("kvbench.report.results_page.list_known", lambda: {"a": study})
    (machine / "b.parquet").unlink()
    write_results_page(choose_files(machine.parent), tmp_path / "docs")
    codecs, equal = ((tmp_path / "docs" / name_page(page)).read_text() for page in (CODECS, EQUAL))
    assert "## What parts of a codec change" in codecs and f"| {words} | 50.0% |" in codecs
    assert "named change, " in codecs and "**Planned comparisons.**" in equal


def test_results_are_one_screen():
    text = (ROOT / "docs" / "results.md").read_text()
    assert len(text.splitlines()) <= 150
    assert text.count("![") == 1 and re.findall(r"^(\d)\. \*\*", text, re.MULTILINE) == list("12345")
    assert all(f"({name_page(page)})" in text for page in PAGES)
    conclusions = " ".join(text.partition("## What they show")[2].partition("A fixed rule")[0].split())
    parts = re.findall(r"\bpart (\w+)(?:,| has)", conclusions, re.IGNORECASE)
    assert parts and set(parts) <= set(read_study())


def test_the_pages_state_what_the_lines_hold(machine, lines, tmp_path):
    (machine / "b.parquet").unlink()
    front, *written = write_results_page(choose_files(machine.parent), tmp_path / "docs")
    assert [path.name for path in written][: len(PAGES) + 1] == [*map(name_page, PAGES), "which-method.md"]
    shown = {
        front.parent / link
        for page in front.parent.glob("*.md")
        for link in re.findall(r"\]\((images/[^)]+)\)", page.read_text())
    }
    assert shown == {path for path in written if path.suffix == ".svg"}
    assert all(path.read_text().startswith("<svg") for path in shown)
    pages = {path.name: path.read_text() for path in (front, *written) if path.suffix == ".md"}
    seen, hidden, codecs = (
        read_text(pages, f"results-{page}.md") for page in ("equal-bytes", "question-hidden", "codecs")
    )
    # visible, 20 %: snapkv with and without an allocator, and random; kivi is a point of its own
    assert "**Budget 20 %.** 3 of 6 pairs of cells at 20.0% of the bytes can be told apart." in seen
    assert "| random | 0.0 " in seen and "| 4 of 4 |" in seen
    higher = "Scores are shown to be higher than without the"
    assert f"{higher} allocator in 0 of 1 cells and lower in 0; in 1 neither is shown" in seen
    known = "when the cache is cut before the question is known"
    assert f"Scores are shown to fall in 2 of 4 cells {known}, and to rise in 0; in 2 neither" in hidden
    assert f"{higher} codec in 0 of 1 cells" in codecs
    assert "With the question hidden, evicting cells hold 1.00 times the bytes" in hidden
    first = read_text(pages, "results.md")
    for page, sentence in {
        seen: "and the question in sight, ",
        hidden: "question is known lowers the score in ",
    }.items():
        assert sentence in page.partition("Tables are sorted")[0] and sentence in first
    assert seen.index("## Part a") < seen.index("## What allocators bring")
    assert hidden.index("## What changes when") < hidden.index("## Part a")
    row = f"| a |  | {len(lines)} | {60 * len(lines)} | python -m kvbench dev measured a |"
    assert row in pages["results-measured.md"]
    assert "[measured/gpu-x](../measured/gpu-x)" in read_text(pages, "results.md")
    assert f"60 samples of {lines[0]['subtasks']} subtasks a cell" in first and "measured. Every number" in first
    for name, text in pages.items():  # words are explained where tables use them
        if name.startswith("results-") and "*bytes* is" in text:
            assert [f"*{word}*" in text for word in ("diff", "KL", "Ranks")] == [
                f"{head} |" in text for head in ("diff", "KL", "ranks")
            ], name
    assert not any(re.search(r"\bNone\b(?!\s+of\s+\d+\s+cells)|n/a", text) for text in pages.values())


def test_the_best_methods_and_the_codecs_have_scores_by_subtask():
    raw = rank([make_line(name, 0.2, score) for name, score in (("tova", 60.0), ("sink", 40.0))], (1, 1), (2, 2))
    coded = [make_line(f"{name} · int4", 1.0, 80.0, codec="int4", bytes_held=0.28) for name in ("full", "tova")]
    lines = [make_full(subtasks=2), *raw, *coded]
    means = {line["hash"]: {"a": line["score"] + 10, "b": line["score"] - 10} for line in lines}
    hidden = [line | {"question": "hidden"} for line in lines[:3]]
    parts = {"p": [*lines, *hidden]}
    sections = split_sections(parts, {"p": PartNumbers(parts["p"], subtasks=means)})
    for page, cells in {
        "equal-bytes": ["tova", "sink"],
        "question-hidden": ["tova", "sink"],
        "codecs": ["full · int4"],
    }.items():
        table = list_changes(page, sections)["Scores by subtask"]
        rows = [line.split(" | ") for line in table if line.startswith("| ")][1:]
        assert [row[0].strip("| ") for row in rows] == [*cells, "full cache"]
        assert [float(row[2]) for row in rows] == [means[name]["a"] for name in (*cells, "full cache")]


def test_a_page_without_cells_says_so(machine, tmp_path, without_pictures):
    (machine / "a.parquet").unlink()
    write_results_page(choose_files(machine.parent), tmp_path / "docs")
    for page in ("equal-bytes", "long-answers", "several-turns", "codecs", "models-and-lengths", "presets-and-seeds"):
        assert "Nothing was measured for this yet." in (tmp_path / "docs" / name_page(page)).read_text()
    cost = (tmp_path / "docs" / "results-cost.md").read_text()
    assert "No times were measured yet." in cost and "a prefill of" not in cost


def test_sub_pages_begin_with_their_answers():
    tova = make_line("tova", 0.2, 50.0)
    tasks = {task: [line | {"task": task} for line in (make_full(), tova)] for task in ("ledger", "scbench")}
    coded = pair_bytes(make_line("tova · int4", 0.7, 60.0, codec="int4", bytes_held=0.2), tova)
    parts = {"a": [make_full(), tova, coded]} | tasks
    sections = split_sections(parts)
    heads = {page: [each.headline for each in answer_page(page, sections, 3.0)] for page in PAGES}
    assert [len(heads[page]) for page in ("equal-bytes", "codecs", "cost", "measured")] == [1, 1, 0, 0]
    assert heads["long-answers"][0].startswith("Where answers are long, 1 of 1") and ";" not in heads["long-answers"][0]
    assert heads["several-turns"][0].startswith("Where a context gets several questions, 1 of 1")


def test_a_section_has_one_page():
    packed = make_line("tova · int4", 0.2, 50.0, codec="int4")
    plain = make_line("tova", 0.2, 50.0)

    def find(part: str = "a", *lines: dict, **changed: str) -> str:
        [section] = split_sections({part: [line | changed for line in (make_full(), *lines)]})
        return find_page(section)

    assert (find("a", plain), find("a", plain, question="hidden")) == ("equal-bytes", "question-hidden")
    assert (find("a", plain, packed), find("a", packed)) == ("equal-bytes", "codecs")
    assert (find("a", packed, task="ledger"), find("a", plain, task="scbench")) == ("long-answers", "several-turns")
    assert find("seeds", packed, task="scbench") == find("presets", plain) == "presets-and-seeds"


def format_measured(**parts) -> str:
    """The page of what was measured, in one line."""
    return read_text(format_pages(parts, ["measured/gpu-x"], {}), "results-measured.md")


def test_the_page_has_the_checksums_of_published_files(machine, lines, tmp_path, without_pictures):
    write_checksum(machine / "a.parquet")
    digest = (machine / "SHA256SUMS").read_text().split()[0]
    write_results_page(choose_files(machine.parent), tmp_path / "docs")
    assert f"| gpu-x/a.parquet | {digest} |" in (tmp_path / "docs" / name_page(MEASURED)).read_text()
    assert "Checksums" not in format_measured(a=lines)
    for text, said in (
        (f"{'0' * 64}  a.parquet", "a.parquet: is not the file that"),
        (f"{digest}  c.zip", "c.zip: SHA"),
    ):
        (machine / "SHA256SUMS").write_text(f"{text}\n")
        with pytest.raises(SettingError, match=f"{said}.*get"):
            write_results_page(choose_files(machine.parent), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_the_page_says_which_parts_are_not_finished(lines):
    planned = 7 * 2 * 2  # of part untuned: methods, questions and budgets
    methods = [line for line in lines if line["method"] != "full"]
    sentence = f"Part untuned is not finished: {len(methods)} of its {planned} cells of methods were measured."
    text = format_measured(untuned=lines)
    assert sentence in text and "| untuned | SmolLM2 as it was published. Does the tuning change which" in text
    many = (planned // len(methods) + 1) * methods
    assert "not finished" not in format_measured(untuned=[*lines, *many])
    assert "Parts of the study that have not begun: screening, confirmation, longer, embedded," in text
    assert f"Part seeds: {read_study()['seeds'].note}" in format_measured(seeds=lines)


def test_the_best_seed_is_no_question_and_a_table_is_explained_once(lines):
    parts = dict.fromkeys(("seeds", "presets"), lines)
    page = format_pages(parts, ["measured/gpu-x"], {})["results-presets-and-seeds.md"]
    shown = re.split(r"^## (?=Part )", page, flags=re.MULTILINE)
    seeds, presets = (next(text for text in shown if text.startswith(f"Part {part}:")) for part in parts)
    assert read_study()["seeds"].note in " ".join(seeds.split())
    assert "score less" in presets and "score less" not in seeds
    explained = f"{wrap(PLANNED)}\n"
    assert drop_repeated(["a", explained, "b", "a", explained]) == ["a", explained, "b", "a"]


def test_the_front_says_which_parts_of_the_study_have_cells():
    study = list(read_study())
    assert describe_progress({"seeds": 1, "embedded_turns": 999, "a": 7}) == (
        f"The study is under way: 1 of its {len(study)} parts is complete and 1 begun ([which](results-measured.md))."
    )
    assert [describe_progress(parts) for parts in ({"a": 1}, dict.fromkeys(study, 999))] == ["", ""]


def test_a_warning_that_parts_share_is_said_once(lines):
    one, other = "Made-up texts: no evidence.", "Generated text (haystack) replaces the benchmark's own."
    warned = {
        name: [line | {"warnings": text} for line in lines] for name, text in (("a", f"{one} {other}"), ("b", other))
    }
    text = format_measured(**warned)
    assert "* Part a: Made-up texts: no evidence. * Parts a and b: Generated text (haystack) replaces" in text
    assert text.count("Made-up texts") == text.count("Generated text") == 1


def test_machines_and_their_parts_are_chosen(machine, runs, tmp_path, without_pictures):
    folder = machine.parent
    files = {part: machine / f"{part}.parquet" for part in "ab"}
    assert choose_files(folder) == choose_files(folder, "gpu-x") == files
    (machine / "screening.parquet").touch()
    assert list(choose_files(folder)) == ["screening", "a", "b"]  # as in conf/measured.yaml
    (machine / "screening.parquet").unlink()
    with pytest.raises(SettingError, match="--machine=nosuch: choose one of gpu-x"):
        choose_files(folder, "nosuch")
    with pytest.raises(SettingError, match="no results there; kvbench dev measured screening"):
        choose_files(folder / "gpu-x" / "nosuch")

    other = folder / "gpu-y"
    other.mkdir()
    (machine / "b.parquet").rename(other / "b.parquet")
    assert choose_files(folder) == choose_files(folder, "gpu-y") == files | {"b": other / "b.parquet"}
    text = write_results_page(choose_files(folder), tmp_path / "docs")[0].read_text()
    assert "[measured/gpu-x](../measured/gpu-x) and [measured/gpu-y](../measured/gpu-y)," in " ".join(text.split())
    write_published([run for run in runs if run.full], {}, other / "a.parquet")
    with pytest.raises(SettingError, match="--machine: part a was measured on several; choose one of gpu-x, gpu-y"):
        choose_files(folder)
    assert choose_files(folder, "gpu-x") == files | {"b": other / "b.parquet"}
    with pytest.raises(SettingError, match="gpu-y/a.parquet: has no lines"):
        write_results_page(choose_files(folder, "gpu-y"), tmp_path / "docs")

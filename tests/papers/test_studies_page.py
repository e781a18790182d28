"""docs/studies.md says what the committed lines say, and nothing that they do not."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kvbench.papers.exhibit_pages import fill_exhibits
from kvbench.papers.exhibits import load_exhibits
from kvbench.papers.studies_page import format_studies_page, write_studies_page
from tests.support.repository import ROOT
from tests.support.study_folders import list_heads, write_study


def test_the_page_is_made_from_the_committed_lines(tmp_path):
    """Studies that were only computed here do not count."""
    files = subprocess.run(["git", "ls-files", "results/studies"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in files.stdout.splitlines():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    assert (ROOT / "docs" / "studies.md").read_text() == format_studies_page(tmp_path / "results")


@pytest.mark.full
def test_the_example_pages_are_made_from_the_committed_lines():
    pages = {
        page.folder / f"{page.name}.md": page
        for own in fill_exhibits(ROOT / "results", load_exhibits()).values()
        for page in own
    }
    listed = subprocess.run(
        ["git", "ls-files", "results/papers/*/*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    paths = [ROOT / name for name in listed.stdout.splitlines()]
    assert len(paths) > 30
    for path in paths:
        assert path.read_text() == pages[path].to_markdown(path.with_suffix(".svg").exists()), path


def test_every_model_has_its_verdict(tmp_path):
    write_study(tmp_path, list_heads(), "small", "1" * 16)
    [*others, claim] = list_heads()
    write_study(tmp_path, [*others, claim._replace(value=1.0, low=None)], "large_8b", "2" * 16)
    page = write_studies_page(tmp_path, tmp_path / "docs")
    text = page.read_text()
    assert page == tmp_path / "docs" / "studies.md" and max(map(len, text.splitlines())) <= 120
    assert "| small | 2 of ruler | 1,500 tokens | 1 | 0 | 0 |" in text
    assert "| large\\_8b | 2 of ruler | 1,500 tokens | 1 | 1 | 0 |" in text
    verdicts = " ".join(text.split("point to opposite sides.*")[1].split("\n\n")[0].split())
    assert "large\\_8b, 2 prompts of ruler, up to 1,500 tokens: Holds. (100.0 % of 24, 2 prompts;" in verdicts
    assert "small, 2 prompts of ruler, up to 1,500 tokens: Holds for 50.0 %. (50.0 % \\[25.0, 75.0\\] of 24" in verdicts
    assert "`python -m kvbench papers study keydiff figure14`" in text and "Reading: The paper does not say" in text


def test_without_studies_the_page_says_what_computes_them(tmp_path: Path):
    assert "`python -m kvbench papers study all` computes them" in format_studies_page(tmp_path)


def test_a_folder_that_holds_diagnoses_only_is_no_study(tmp_path):
    write_study(tmp_path, list_heads("diagnosis"))
    assert "`python -m kvbench papers study all` computes them" in format_studies_page(tmp_path)

"""README and the pages say what is there: links, methods, presets, settings, commands."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from kvbench.analysis.solvable_subtasks import read_card
from kvbench.config import catalogue
from kvbench.config.compose import compose_config
from kvbench.report.doc_tables import COMMAND, OTHER, complete_pages
from kvbench.report.doc_tables import PAGES as PAGES_WITH_TABLES
from kvbench.tasks.ruler.task import SUBTASKS
from tests.docs.pages import PAGES
from tests.support.repository import ROOT

LINK = re.compile(r"\]\((?!https?://|#)([^)\s#]+)(#[^)\s]+)?\)")


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"(?:\A|\n\n)#+ (.+)$", text, re.MULTILINE)  # a heading right behind a table is a row of it
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title.replace("`", "")).strip().lower()) for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    for path, anchor in LINK.findall(page.read_text()):
        target = (page.parent / path).resolve()
        assert target.exists(), (page.name, path)
        if anchor and target.suffix == ".md":
            assert anchor[1:] in slugs(target), (page.name, path, anchor)


def test_readme_is_short_and_names_the_pages():
    text = (ROOT / "README.md").read_text()
    assert sum(not line.startswith((OTHER, "| [")) for line in text.splitlines()) <= 150  # without the rows of methods
    methods = text.partition("\n## Methods\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in methods.splitlines() if line.startswith("| ")]
    assert all(len(row) == 3 and len(row[1]) <= 80 for row in rows if not row[0].startswith(" other"))  # for a phone
    assert "docs/records.md" in text and "make run" in text and "make test" in text


def test_the_citation_names_this_version():
    about = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (about["version"], about["license"]) == (project["version"], project["license"])
    entry = re.search(r"^@software\{kvbench,.*?\}\}$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert entry, "README.md has no BibTeX entry"
    fields = dict(re.findall(r"(\w+) = \{+(.*?)\}", entry[0]))
    [author] = about["authors"]
    year = about["date-released"].year
    assert fields == {"author": author["name"], "version": about["version"], "title": about["title"], "year": str(year)}
    assert f"\n## {about['version']} ({about['date-released']})\n" in (ROOT / "CHANGELOG.md").read_text()
    address = about.get("repository-code")  # BibTeX has it, too, once it is known
    assert (f"url = {{{address}}}" in entry[0]) == (address is not None)


@pytest.mark.parametrize("page", PAGES_WITH_TABLES)
def test_tables_list_every_choice(page):
    before, after = complete_pages()[page]
    assert before == after, f"{page} lacks what conf/ has; {COMMAND} writes it"


def test_every_choice_has_a_section_with_its_presets():
    text = (ROOT / "docs" / "methods.md").read_text()
    for group in ("method", "allocator", "codec"):
        for name in catalogue.list_choices(group):
            if name == "full":
                continue
            section = re.search(rf"^`{group}={name}` .*?(?=^### |^## |\Z)", text, re.MULTILINE | re.DOTALL)
            assert section, f"{group}={name} has no section; {COMMAND} writes it"
            config = yaml.safe_load((catalogue.CONF / group / f"{name}.yaml").read_text())
            shown = dict(re.findall(r"^\| `(\w+)`(?: \(default\))? \| (.*?) \|", section[0], re.MULTILINE))
            assert list(shown) == list(config.get("presets", {})), name
            everywhere = "".join(re.findall(r"^In all presets: (.*)$", section[0], re.MULTILINE))
            for preset, settings in shown.items():
                for key, value in re.findall(r"`(\w+)=([^`]*)`", settings + everywhere):
                    said, meant = yaml.safe_load(value), config["presets"][preset][key]
                    assert said == meant or float(said) == meant, (name, preset, key)
            if shown:
                assert f"| `{config['preset']}` (default) |" in section[0]


def test_the_settings_of_a_run_are_described():
    text = (ROOT / "docs" / "settings.md").read_text()
    config = OmegaConf.load(catalogue.CONF / "config.yaml")
    names = [name for name in config if name not in ("defaults", "hydra", "model", "task", "sweep")]
    names += [f"{group}.{name}" for group in ("model", "task", "sweep") for name in config[group]]
    for name in names:
        assert re.search(rf"^\| .*`{re.escape(name)}`.* \|", text, re.MULTILINE), name


def test_every_task_has_a_line():
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    for name in catalogue.list_choices("task"):
        assert f"`{name}`" in text, name


def test_every_page_is_in_the_sites_contents():
    site = (ROOT / "mkdocs.yml").read_text()
    for page in sorted((ROOT / "docs").glob("*.md")):
        assert f": {page.name}\n" in site, page.name


def test_make_real_asks_for_what_exists():
    """For subtasks of different families that the model can do, once its list is there."""
    line = re.search(r"^REAL \?= ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    settings = dict(part.split("=", 1) for part in line.replace("\\\n", " ").split())
    for budget in settings.pop("budget").split(","):
        config = compose_config([f"budget={budget}", *map("=".join, settings.items())])
    names = list(config.task.subtasks)
    assert len(names) == len(set(names) & set(SUBTASKS)) == 5
    listed = read_card(config.model.name).get("ruler", {}).get(config.task.length, names)
    assert set(names) <= set(listed)

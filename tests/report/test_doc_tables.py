"""`python -m kvbench dev docs-tables`: what a page lacks of conf/ gets a row and a section, and all else stays."""

import re
import shutil
from pathlib import Path

import pytest
import yaml

from kvbench.report.doc_tables import PAGES, WRITTEN, complete_pages
from kvbench.validation import SettingError
from tests.docs.pages import read_blocks
from tests.support.repository import ROOT

GROUPS = ("method", "allocator", "codec", "task")
PRESETS = """# a comment
_target_: kvbench.methods.allocators.mine.Mine
name: mine
preset: paper
presets:
  paper: {window: 4, layers: [0, 1], last: true}  # the paper, section 3 | its code
  ours: {}  # nothing of it
"""


@pytest.fixture
def root(tmp_path) -> Path:
    """A copy of the pages without what the command wrote, and empty folders of methods and the like."""
    for folder in ("docs", "methods/allocators", "tasks", *(f"conf/{group}" for group in GROUPS)):
        (tmp_path / folder).mkdir(parents=True)
    for page in PAGES:
        shutil.copy(ROOT / page, tmp_path / page)
    write(tmp_path)
    return tmp_path


def write(root: Path) -> dict[str, str]:
    """Complete the pages; return those that changed, with the lines that are new."""
    changed = {}
    for page, (before, after) in complete_pages(root).items():
        (root / page).write_text(after)
        if before != after:
            changed[page] = "\n".join(line for line in after.splitlines() if line not in before.splitlines())
    assert all(before == after for before, after in complete_pages(root).values())
    return changed


def test_the_documented_method_gets_its_row_and_section(root):
    names = []
    for block in read_blocks(ROOT / "docs" / "add-a-method.md"):
        if block.file and "newest" in block.file:
            names.append(block.file)
            (root / block.file).write_text(block.text)
    assert names == ["methods/newest.py", "conf/method/newest.yaml"]
    before = {page: (root / page).read_text() for page in PAGES}
    found = write(root)
    assert found["README.md"] == "| other: [newest](methods/newest.py) | The newest rows stay. | |" and len(found) == 2
    assert found["docs/methods.md"].split("\n") == [
        *("## Further methods", "### newest", WRITTEN, "`method=newest` · [methods/newest.py](../methods/newest.py)"),
        "The newest rows stay.",
    ]
    for name in names:
        (root / name).unlink()
    write(root)
    assert before == {page: (root / page).read_text() for page in PAGES}


def test_presets_are_listed_with_their_sources(root):
    (root / "methods" / "allocators" / "mine.py").write_text('"""mine: all rows.\n\nSource: a paper.\n"""\n')
    (root / "conf" / "allocator" / "mine.yaml").write_text(PRESETS)
    found = write(root)
    assert found["README.md"] == "| other: [`allocator=mine`](methods/allocators/mine.py) | All rows. | |"
    text = (root / "docs" / "methods.md").read_text()
    section = text.partition("### mine\n")[2].partition("\n## Codecs\n")[0]
    assert "\nAll rows.\n\nSource: a paper.\n" in section and "\n## " not in section
    assert r" `window=4`, `layers=[0,1]`, `last=true` | the paper, section 3 \| its code |" in section
    assert "\n| `paper` (default) |" in section and "\n| `ours` |  | nothing of it |\n" in section
    shown = re.findall(r"`(\w+)=([^`]*)`", section.partition("`paper`")[2].partition("\n")[0])
    assert {key: yaml.safe_load(value) for key, value in shown} == {"window": 4, "layers": [0, 1], "last": True}


def test_what_somebody_wrote_stays(root):
    (root / "conf" / "codec" / "mine.yaml").write_text("_target_: my_package.mine.Mine\nname: mine\n")
    assert "`codec=mine` · a class of another package" in write(root)["docs/methods.md"]
    page = root / "docs" / "methods.md"
    page.write_text(page.read_text().replace(f"{WRITTEN}\n\n", "").replace("\nMine\n", "\nBy hand.\n"))
    readme = (root / "README.md").read_text()
    readme = readme.replace("| other: `codec=mine` | Mine | |\n", "| `codec=mine` | by hand | |\n")
    (root / "README.md").write_text(readme)
    assert write(root) == {} and "\nBy hand.\n" in page.read_text()


def test_a_task_gets_a_row_of_both_pages(root):
    (root / "conf" / "task" / "mine.yaml").write_text("# a | b\n_target_: my_package.mine.Mine\nname: mine\n")
    assert write(root) == {
        "README.md": "| other `task=` | `mine` |",
        "docs/benchmarks.md": r"| other: `mine` | A \| b | |",
    }


@pytest.mark.parametrize(("page", "heading"), [("docs/methods.md", "## Codecs"), ("README.md", "## Benchmarks")])
def test_a_page_without_its_heading_is_one_line(page, heading, root):
    (root / page).write_text((root / page).read_text().replace(f"\n{heading}\n", "\n## Another\n"))
    with pytest.raises(SettingError, match=f"^[^\n]*{heading}[^\n]*$"):
        complete_pages(root)

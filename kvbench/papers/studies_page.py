"""Write docs/studies.md from results/studies/*/: which claims of the papers hold on which models."""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvbench.analysis.text_table import Column, format_markdown
from kvbench.papers.exhibit_pages import ExhibitPage, fill_exhibits
from kvbench.papers.exhibits import Exhibit, list_claims, load_exhibits, make_study_command
from kvbench.papers.paper_table import escape_all_markdown, escape_outside_code
from kvbench.store.study_lines import StudyFolder, write_text

PAGE = "studies.md"
WIDTH = 120
CODE = re.compile("`[^`]*`")
HEAD = """\
# Studies

<!-- Written by `python -m kvbench papers write --page`. Edit kvbench/papers/studies_page.py instead. -->

A *study* looks at what a full cache holds or methods keep, or checks a formula. This page says which claims of the
papers hold on the models that were looked at, and which do not. A claim is a sentence about many instances, such as
heads or pairs of tokens. *Holds* means that it holds in all instances that were looked at, and *holds for 54.2 %* that
it holds in this share of them. The interval is that of the mean over prompts, at 95 %.
[Tables and figures of papers](papers.md#exhibits-that-studies-fill) shows how to emit the exhibits, and
[Add a study](add-a-study.md) how to write one.
"""
NOTHING = "There are no studies in results/studies. `python -m kvbench papers study all` computes them."


def write_studies_page(results: Path, out: Path) -> Path:
    """Write the page into the folder `out`, and return its path.

    Raises:
        SettingError: A file of studies cannot be read.
    """
    path = out / PAGE
    write_text(path, format_studies_page(results))
    return path


def format_studies_page(results: Path) -> str:
    """Return the page.

    Raises:
        SettingError: A file of studies cannot be read.
    """
    exhibits = load_exhibits()
    pages = fill_exhibits(results, exhibits)
    claimed = {name: spec for name, spec in exhibits.items() if spec.get("claims")}
    others = {name: spec for name, spec in exhibits.items() if name not in claimed}
    folders = {page.study.path: page.study for exhibit_pages in pages.values() for page in exhibit_pages}
    parts = [
        HEAD,
        "## What was looked at",
        "",
        *format_folders(sorted(folders.values(), key=lambda folder: folder.name), pages),
        "",
    ]
    for title, wanted in (("Which claims hold", claimed), ("Exhibits without a claim", others)):
        parts += [f"## {title}", ""]
        for name, spec in wanted.items():
            parts += [*describe_exhibit(name, spec, pages[name]), ""]
    return "\n".join(parts).rstrip() + "\n"


def format_folders(folders: Sequence[StudyFolder], pages: Mapping[str, Sequence[ExhibitPage]]) -> list[str]:
    """Return a table of models and prompts, with the numbers of claims that hold, and that do not."""
    if not folders:
        return [NOTHING]
    shares: dict[Path, list[float]] = {folder.path: [] for folder in folders}
    for page in (page for exhibit_pages in pages.values() for page in exhibit_pages):
        shares[page.study.path] += [claim.line.value for claim in page.claims if claim.line]
    columns = [
        Column("model", "", lambda folder: str(folder.about["model"]["name"])),
        Column(
            "prompts", "", lambda folder: f"{folder.about['prompts']['count']} of {folder.about['prompts']['name']}"
        ),
        Column("longest", "", lambda folder: f"{folder.about['prompts']['longest']:,} tokens"),
        Column("claims", "", lambda folder: str(len(shares[folder.path]))),
        Column("hold", "", lambda folder: str(shares[folder.path].count(1.0))),
        Column("do not hold", "", lambda folder: str(shares[folder.path].count(0.0))),
    ]
    return [*format_markdown(columns, folders), "", "The other claims hold for a share of the instances."]


def describe_exhibit(name: str, spec: Exhibit, pages: Sequence[ExhibitPage]) -> Iterator[str]:
    """Yield the title, the command, the verdict of each claim on each model, and the readings."""
    yield fill_line(f"**{escape_all_markdown(spec['title'])}.** Command: `{make_study_command(name)}`.")
    for claim in list_claims(spec, ()):
        yield f"\n* {fill_line(f'*{escape_all_markdown(claim.words)}*', 2)}"
        for page in pages:
            [measured] = (measured for measured in page.claims if measured.quantity == claim.quantity)
            yield f"    - {fill_line(escape_all_markdown(f'{page.source[:-1]}: {measured.text}'), 6)}"
    if not pages:
        yield "\nNot computed yet."
    if notes := " ".join(" ".join(note.split()) for note in spec.get("notes", ())):
        yield f"\n{fill_line(f'Reading: {escape_outside_code(notes)}')}"


def fill_line(text: str, indent: int = 0) -> str:
    """Return a text in lines of the page's width, of which those after the first are indented. Code is not split."""
    whole = CODE.sub(lambda match: match[0].replace(" ", "\0"), text)
    wrapped = textwrap.fill(
        whole, WIDTH - indent, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return wrapped.replace("\0", " ")

"""Write the papers' tables and figures, published and measured side by side.

Examples:
  kvbench papers write                       all of them, into results/papers/
  kvbench papers write dropkv                those of one paper
  kvbench papers write dropkv 5              one of them; print it too
  kvbench papers write keydiff figure14      from what kvbench papers study found
  kvbench papers write --beside              the tables of cost alone, into results/efficiency/<gpu>/
  kvbench papers write --page                docs/studies.md, from the studies alone

Tables become Markdown, CSV and LaTeX. Figures also become SVG, PDF and PNG, which needs the extra `report`.
"""

import sys
from argparse import SUPPRESS
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvbench.cli.command import CommandParser, find_width, move_results, require_extra, run_command, say_renamed
from kvbench.validation import SettingError, require_writable


def make_parser() -> CommandParser:
    parser = CommandParser("papers write", __doc__)
    parser.add_results(old=False)
    parser.add_argument("paper", nargs="?", help="name of a paper in conf/papers (default: all)")
    parser.add_argument("exhibit", nargs="?", help="a table or figure, such as 5, table05 or figure14 (default: all)")
    parser.add_argument("old_exhibit", nargs="?", help=SUPPRESS)
    parser.add_argument("--list", action="store_true", help=SUPPRESS)
    parser.add_argument("--beside", action="store_true", help="write the tables of cost beside their measurements")
    parser.add_argument(
        "--page", action="store_true", help="write the page about what holds on the models, and no more"
    )
    parser.add_argument("--out", type=Path, help="folder of that page (default: docs)")
    parser.add_argument(
        "--width", help="of figures, at most: column (3.25 in), page (6.75 in) or inches (default: by its chart)"
    )
    return parser


def write_papers(arguments: Sequence[str]) -> None:
    """Write tables and figures and print their files, or the text of the one that is named."""
    given = make_parser().parse(arguments)
    from kvbench.papers.table_spec import list_papers

    is_folder = given.paper is not None and given.paper not in list_papers() and Path(given.paper).is_dir()
    if is_folder or given.old_exhibit is not None:  # 0.1 took the folder of results in front of the paper
        move_results(given, given.paper)
        given.paper, given.exhibit = given.exhibit, given.old_exhibit
    if given.list:
        say_renamed("papers write --list", "papers list", "form")
        print_list(given.results, given.paper)
        return
    if given.page:
        from kvbench.papers.studies_page import write_studies_page

        print(write_studies_page(given.results, given.out or Path("docs")))
        return
    if given.out:
        raise SettingError("--out: only with --page")
    if given.width is not None:
        require_extra("report", "altair", "vl_convert")
        from kvbench.report.figures import parse_inches

        given.width = parse_inches(given.width)
    for text in emit_exhibits(given.results, given.paper, given.exhibit, given.beside, given.width):
        print_page(text)


def print_list(results: Path, paper: str | None) -> None:
    """Print a line for each table and figure of a paper, or of all papers."""
    from kvbench.papers.listing import describe_exhibits, format_list

    require_folder(results)
    for line in format_list(describe_exhibits(results, paper), find_width()):
        print(line)


def print_page(text: str) -> None:
    """Print a line, or a Markdown page, which a terminal shows as text of its width."""
    if "\n" in text and sys.stdout.isatty():
        from kvbench.analysis.text_table import fit_markdown

        text = "\n".join(fit_markdown(text, find_width()))
    print(text)


def require_folder(results: Path) -> None:
    """Raise a SettingError if there is no such folder of results."""
    if not results.is_dir():
        raise SettingError(f"results={results}: no such folder")


def emit_exhibits(
    results: Path, paper: str | None, exhibit: str | None, beside: bool = False, inches: float | None = None
) -> Iterable[str]:
    """Write tables and figures, and yield the paths of their files, or the text of the one that is named.

    Args:
        results: Folder of results.
        paper: Name of a paper in conf/papers; None writes the exhibits of all papers.
        exhibit: Number of a table of the paper, or name of one of its exhibits; None writes all of them.
        beside: Whether to write the tables of cost, and no others, beside their measurements. Those of which a
            machine measured nothing are left out.
        inches: Largest width of figures; None leaves it to their charts.

    Raises:
        SettingError: There is no such folder, paper or exhibit.
    """
    from kvbench.papers.build import write_cost_tables, write_tables
    from kvbench.papers.listing import choose_exhibits, find_parts

    tables, studied = choose_exhibits(paper, exhibit)
    require_folder(results)
    require_writable("results", results)
    if beside:
        written = write_cost_tables(results, tables, results / "efficiency", measured_only=True)
        if not written:
            yield f"no measurements of these tables in {results}/efficiency: `make efficiency` makes them"
    else:
        written = write_tables(results, tables, choose_drawing(tables, inches)) if tables else []
    if exhibit is None:
        yield from map(str, written)
    else:
        yield from (f"{part.name}: static: {part.reason}" for part in find_parts(paper, exhibit) if part.reason)
        yield from (path.read_text(encoding="utf-8") for path in written if path.suffix == ".md")
    if studied and not beside:
        yield from emit_studied(results, studied, exhibit is not None, inches)


def choose_drawing(tables: Mapping[str, Any], inches: float | None) -> Callable[..., bool] | None:
    """Return the function that draws figures of scores and costs; None if there are none or the extra is missing."""
    if not any("chart" in spec for spec in tables.values()):
        return None
    if missing := find_missing_extra():
        print(f"kvbench: {missing}", file=sys.stderr)
        return None
    from kvbench.report.paper_charts import draw_figure

    return partial(draw_figure, inches=inches)


def find_missing_extra() -> str:
    """Return why figures cannot be drawn, or "" if they can."""
    try:
        require_extra("report", "altair", "vl_convert")
    except SettingError as error:
        return f"figures are not drawn: {error}"
    return ""


def emit_studied(results: Path, wanted: Mapping[str, Any], named: bool, inches: float | None) -> Iterator[str]:
    """Write exhibits that studies fill, and yield the paths of their files, or the text of the one that is named.

    Args:
        results: Folder of results.
        wanted: <paper>_<exhibit> -> its specification.
        named: Whether the exhibit was named.
        inches: Largest width of figures; None leaves it to their charts.
    """
    from kvbench.papers.exhibit_pages import fill_exhibits
    from kvbench.papers.exhibits import make_study_command

    filled = fill_exhibits(results, wanted)
    if not named and not any(filled.values()):
        yield f"no studies in {results}/studies: `python -m kvbench papers study all` computes them"
        return
    drawn = any(page.table is None for pages in filled.values() for page in pages)
    missing = find_missing_extra() if drawn else ""
    for name, pages in filled.items():
        for page in pages:
            pictured = page.table is None and not missing
            written = page.write(pictured)
            if named:
                yield page.to_markdown(pictured)
            yield from map(str, [] if named else written)
            if pictured:
                from kvbench.report.study_charts import make_figure

                yield make_figure(page, inches).write_pictures(page.folder)
        if not pages:
            yield f"{name}: no study has filled it: `{make_study_command(name)}` does"
    if missing:
        print(f"kvbench: {missing}", file=sys.stderr)


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: write_papers(arguments))

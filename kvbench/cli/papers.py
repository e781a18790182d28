"""Write the papers' tables, published and measured side by side.

Examples:
  kvbench papers                        all tables, into results/papers/
  kvbench papers results dropkv         the tables of one paper
  kvbench papers --beside               the tables of cost alone, into results/efficiency/<gpu>/
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from kvbench.cli.command import CommandParser, run_command
from kvbench.validation import SettingError, require_writable


def make_parser() -> CommandParser:
    parser = CommandParser("papers", __doc__)
    parser.add_results()
    parser.add_argument("paper", nargs="?", help="name of a paper in conf/papers (default: all)")
    parser.add_argument("table", nargs="?", help="number of a table; print it too (default: all)")
    parser.add_argument("--beside", action="store_true", help="write the tables of cost beside their measurements")
    return parser


def write_papers(arguments: Sequence[str]) -> None:
    """Write the tables and print their files, or the text of the one that is named."""
    given = make_parser().parse_args(arguments)
    for text in emit_tables(given.results, given.paper, given.table, given.beside):
        print(text)


def emit_tables(results: Path, paper: str | None, table: str | None, beside: bool = False) -> Iterable[str]:
    """Write tables and yield the paths of their files, or the text of the one table that is named.

    Args:
        results: Folder of results.
        paper: Name of a paper in conf/papers; None writes the tables of all papers.
        table: Number of a table of the paper; None writes all of them.
        beside: Whether to write the tables of cost, and no others, beside their measurements. If no table is named,
            those of which a machine measured nothing are left out.

    Raises:
        SettingError: There is no such folder, paper or table.
    """
    from kvbench.papers.build import write_cost_tables, write_tables
    from kvbench.papers.table_spec import is_cost_table, load_specs
    from kvbench.store.efficiency_csv import find_measurements

    wanted = load_specs(paper, table)
    if not results.is_dir():
        raise SettingError(f"results={results}: no such folder")
    require_writable("results", results)
    if beside:
        written = write_cost_tables(results, wanted, results / "efficiency", measured_only=table is None)
    else:
        written = write_tables(results, wanted)
    if table is None:
        yield from map(str, written)
    else:
        yield from (path.read_text(encoding="utf-8") for path in written if path.suffix == ".md")
    if any(map(is_cost_table, wanted.values())) and not any(find_measurements(results / "efficiency")):
        yield f"no measurements in {results}/efficiency: `make efficiency` makes them"


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: write_papers(arguments))

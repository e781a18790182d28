"""Write the papers' tables, published and measured side by side.

python -m kvbench papers [results] [paper] [table]      # into <results>/papers/
python -m kvbench papers --beside                       # tables of cost, into <results>/efficiency/<gpu>/
"""

from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.command import CommandParser, run_command
from kvbench.papers.build import write_cost_tables, write_tables
from kvbench.papers.table_spec import is_cost_table, load_specs
from kvbench.store.efficiency_csv import find_measurements
from kvbench.validation import SettingError, require_writable


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(lambda: write_papers(argv))


def write_papers(argv: Sequence[str] | None) -> None:
    """Print the tables' files, or the text of the one that is named."""
    parser = CommandParser("kvbench papers", __doc__)
    parser.add_argument("results", nargs="?", default="results", type=Path)
    parser.add_argument("paper", nargs="?")
    parser.add_argument("table", nargs="?", help="its number; default: all")
    parser.add_argument(
        "--beside", action="store_true", help="write the tables of cost, and no others, beside their measurements"
    )
    given = parser.parse_args(argv)
    results, wanted = given.results, load_specs(given.paper, given.table)
    if not results.is_dir():
        raise SettingError(f"results={results}: no such folder")
    require_writable("results", results)
    written = (
        write_cost_tables(results, wanted, results / "efficiency") if given.beside else write_tables(results, wanted)
    )
    texts = map(str, written)
    if given.table is not None:
        texts = (path.read_text(encoding="utf-8") for path in written if path.suffix == ".md")
    for text in texts:
        print(text)
    if any(map(is_cost_table, wanted.values())) and not any(find_measurements(results / "efficiency")):
        print(f"no measurements in {results}/efficiency: `make efficiency` makes them")

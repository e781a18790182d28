"""Write the papers' tables, published and measured side by side.

python -m kvbench papers [results] [paper] [table]      # into <results>/papers/
python -m kvbench papers --beside                       # tables of cost, into <results>/efficiency/<gpu>/
"""

from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.command import Arguments, answered
from kvbench.papers.build import emit, emit_costs
from kvbench.papers.table_spec import (
    specs,
    timed_only,
)
from kvbench.store.efficiency_csv import measured
from kvbench.validation import SettingError, writable


def main(argv: Sequence[str] | None = None) -> int:
    return answered(lambda: show(argv))


def show(argv: Sequence[str] | None) -> None:
    """Print the tables' files, or the text of the one that is named."""
    parser = Arguments("kvbench papers", __doc__)
    parser.add_argument("results", nargs="?", default="results", type=Path)
    parser.add_argument("paper", nargs="?")
    parser.add_argument("table", nargs="?", help="its number; default: all")
    parser.add_argument(
        "--beside", action="store_true", help="write the tables of cost, and no others, beside their measurements"
    )
    given = parser.parse_args(argv)
    results, wanted = given.results, specs(given.paper, given.table)
    if not results.is_dir():
        raise SettingError(f"results={results}: no such folder")
    writable("results", results)
    written = emit_costs(results, wanted, results / "efficiency") if given.beside else emit(results, wanted)
    texts = map(str, written)
    if given.table is not None:
        texts = (path.read_text(encoding="utf-8") for path in written if path.suffix == ".md")
    for text in texts:
        print(text)
    if any(map(timed_only, wanted.values())) and not any(measured(results / "efficiency")):
        print(f"no measurements in {results}/efficiency: `make efficiency` makes them")

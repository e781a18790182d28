"""Say in one line for each cell what a finished sweep found."""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from kvbench.analysis.closing_table import build_run_table
from kvbench.sweeps.status import SweepCell, read_cell_records


def describe_results(results: Path, cells: Iterable[SweepCell]) -> list[str]:
    """The first average of every cell: the score, its paired difference to the full cache in points with the 95 %
    interval, and the number of samples; the reason where a cell was refused.
    """

    @cache
    def read(name: str) -> Mapping[str, dict]:
        return read_cell_records(results, name)

    lines = [f"  {'':<60}{'score':>7}  difference [95 %]           n"]
    for cell in cells:
        if cell.run is None or cell.baseline is None:
            lines.append(f"  {cell.label:<60}refused: {cell.refused}")
            continue
        name, full = cell.names
        table = build_run_table(cell.run, read(full), read(name) if name != full else None)
        row = next(row for row in table.rows if row.kind == "average")
        if row.method is None or row.interval is None:
            lines.append(f"  {cell.label:<60}{'n/a':>7}")
            continue
        own = row.interval
        ends = "n/a" if own.low is None or own.high is None else f"{own.low:+.1f}, {own.high:+.1f}"
        difference = f"{own.difference:+.1f} [{ends}]" if name != full else "full cache"
        lines.append(f"  {cell.label:<60}{own.mean_method:>7.1f}  {difference:<26}{own.samples:>5}")
    return lines

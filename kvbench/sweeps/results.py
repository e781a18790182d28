"""Show what the cells of a sweep found, as one matrix."""

from collections.abc import Sequence
from pathlib import Path

from kvbench.analysis.score_matrix import build_blocks
from kvbench.analysis.score_matrix_format import format_text
from kvbench.store.run_folder import RunFolder
from kvbench.store.runs import FoundRuns, StoredRun, name_some
from kvbench.sweeps.status import SweepCell
from kvbench.validation import escape


def describe_results(results: Path, cells: Sequence[SweepCell], width: int, styled: bool) -> str:
    """Return the matrix of the runs of a sweep's cells, and why cells have no numbers.

    Args:
        results: The folder of results.
        cells: The cells.
        width: Characters of a line.
        styled: As in `kvbench.analysis.score_matrix_format.format_text`.
    """
    loaded = FoundRuns()
    values = {name: value for cell in cells for name, value in zip(cell.names, (cell.run, cell.baseline), strict=False)}
    for name, value in values.items():
        if value is not None and (results / "runs" / name / "run.yaml").is_file():
            run = StoredRun(name, value, RunFolder(results / "runs", value))
            loaded.note_damage(run)
            if not run.damage and run.records:
                loaded.runs.append(run)
    loaded.print_damage()
    asked = {cell.names[0] for cell in cells if cell.names}
    blocks, refused = build_blocks([run for run in loaded.runs if run.hash in asked], loaded.runs)
    reasons: dict[str, list[str]] = {}
    for cell in cells:
        if cell.refused is not None:
            reasons.setdefault(cell.refused, []).append(cell.label)
    lines = [f"refused: {name_some(labels)}: {reason}" for reason, labels in reasons.items()]
    text = format_text(blocks, width, styled=styled) if blocks else ""
    return text + "".join(f"{escape(line)}\n" for line in [*refused, *lines])

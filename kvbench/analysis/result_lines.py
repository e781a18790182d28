"""Compute a line for each cell of measured runs, from which docs/results.md is made.

Lines are computed from the published part of runs alone (kvbench.store.published_runs): those of a store and those of
a Parquet file with a row for each sample come by the same functions, and are equal.

A line holds what `kvbench results scores --format csv` says about a run, and beside it

    subtasks                     number of subtasks that the score is the mean of
    worst_subtask, worst         subtask in which the score is furthest below the full cache's, and this difference,
                                 with its 95 % interval
    decoding                     1 if the method also cuts the cache while it answers, otherwise 0
    tokens_out                   mean number of tokens of an answer
    nll, kl                      means of `fidelity` in nats a token, with 95 % intervals
    rank_first, rank_last        ranks that the cell may have in its class of a protocol and budget (`bound_ranks`)
    rank_of, rank_class          cells of this class, and its bytes or rows (kvbench.analysis.byte_classes)
    beaten_by                    hashes of the cells of the class that score more for certain, with spaces between them
    allocator_gain               paired difference from the same cell with allocator=uniform, in points
    codec_gain                   likewise with codec=raw
    question_gain                likewise with the question visible
    bytes_gain                   likewise from the cell of the same method with fewer raw rows and equal bytes, whose
                                 hash is bytes_gain_from (kvbench.analysis.byte_front.pair_at_equal_bytes)
    …_sign                       -1, 0 or 1: whether a gain is below or above 0, jointly for all cells of a protocol; of
                                 the difference from the full cache for those of a budget (kvbench.analysis.joint_signs)
    difference_of_all_sign       that of the difference from the full cache, jointly for all cells of a protocol
    machine, versions, code      where and by which code it was made; `replay` is the hash of tests/replay

Nothing in a line depends on other parts of the study. `read_part` also compares cells with each other
(kvbench.analysis.cell_comparisons).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvbench.analysis.answer_metrics import FIDELITY, collect_fidelity
from kvbench.analysis.byte_classes import split_column
from kvbench.analysis.byte_front import pair_at_equal_bytes
from kvbench.analysis.cell_comparisons import CellComparison, compare_changes, compare_planned, compare_variants
from kvbench.analysis.intervals import compute_means
from kvbench.analysis.joint_signs import bound_ranks, sign_changes
from kvbench.analysis.paired import PairedScores, compare_averages
from kvbench.analysis.score_matrix import MatrixCell, Samples, ScoreBlock, build_blocks, list_cells
from kvbench.analysis.score_matrix_columns import COLUMNS
from kvbench.analysis.turn_scores import TurnScores, compare_turns
from kvbench.config.catalogue import load_settings
from kvbench.store.csv_rows import format_rows
from kvbench.store.published_runs import PublishedRun, describe_machines, publish, require_pyarrow
from kvbench.store.run_folder import run_hash
from kvbench.store.runs import CACHE_GROUPS, StoredRun, flatten
from kvbench.validation import SettingError

DECIMALS = 4
BYTES_GAIN = "bytes_gain"
GAINS = {  # name of a gain -> group or setting, and its value in the cell to compare with
    "allocator_gain": ("allocator", "uniform"),
    "codec_gain": ("codec", "raw"),
    "question_gain": ("question", "visible"),
}
ROWS = ".parquet"  # ends the name of a file with rows of samples
SIGN = "_sign"  # ends the name of a joint sign
OF_ALL = "difference_of_all"  # the difference from the full cache, counted with those of all cells of a protocol
Line = dict[str, Any]
NO_WORST: Line = dict.fromkeys(("worst_subtask", "worst", "worst_low", "worst_high"))


@dataclass(frozen=True)
class PartNumbers:
    """What the published runs of a part of the study say.

    Attributes:
        lines: A line for each cell.
        planned: The planned comparisons; empty if only lines are known.
        varied: The comparisons of cells that differ in presets, settings or files alone; likewise.
        changed: The comparisons of cells with what conf/measured.yaml changes in them; likewise.
        turns: The scores of cells by turn, where contexts get several questions; likewise.
        subtasks: Run -> subtask -> mean score of its samples; likewise.
    """

    lines: Sequence[Line]
    planned: Sequence[CellComparison] = ()
    varied: Sequence[CellComparison] = ()
    changed: Sequence[CellComparison] = ()
    turns: Sequence[TurnScores] = ()
    subtasks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def make_lines(runs: Sequence[StoredRun], files: Mapping[str, str] = MappingProxyType({})) -> list[Line]:
    """Return a line for each run, and for each full cache that they are compared with.

    Args:
        runs: The runs of a part, finished or not, with those of the full cache. Unfinished ones are left out.
        files: `content_hash` of a file -> its name. Settings, and so labels, hold the hashes.

    Raises:
        SettingError: Runs of a protocol cannot be shown in one table (`build_blocks`).
    """
    return describe_blocks(build_finished(runs), files)


def build_finished(runs: Sequence[StoredRun]) -> list[ScoreBlock]:
    """Return the blocks of the finished runs, as they are published.

    Raises:
        SettingError: As `make_lines`.
    """
    finished = [run if isinstance(run, PublishedRun) else publish(run) for run in runs if run.finished]
    blocks, refused = build_blocks([run for run in finished if not run.full], finished)
    if refused:
        raise SettingError(refused[0])
    return blocks


def describe_blocks(blocks: Sequence[ScoreBlock], files: Mapping[str, str]) -> list[Line]:
    """Return a line for each cell of blocks, as `make_lines`."""
    gains = compute_gains(blocks)
    lines = []
    for block in blocks:
        fidelity = compute_fidelity(block)
        columns = [[row[budget] for row in block.rows.values() if budget in row] for budget in block.budgets]
        ranks = {cell.run.hash: ranked for column in columns for cell, ranked in rank_column(column, block)}
        signs = {cell.run.hash: sign for column in columns for cell, sign in sign_column(column, block)}
        cells = list_cells([block])
        cut = [cell for _, _, cell in cells if not cell.run.full]
        worst = find_worst(cut, block)
        joint = {cell.run.hash: sign for cell, sign in sign_column(cut, block)}
        labels = name_files({label: cell.run for _, label, cell in cells}, files)
        for _, label, cell in cells:
            label = labels[label]
            name = cell.run.hash
            line: Line = {"model": block.model, "task": block.task, "question": block.question}
            line |= {"protocol": ", ".join(block.also), "average": block.average, "label": label}
            line |= {"subtasks": len(block.paired.weights)} | worst.get(name, NO_WORST)
            line |= {group: cell.run.value[group]["name"] for group in CACHE_GROUPS}
            line |= {"budget": cell.run.value["budget"] or cell.run.budget_name}
            line["decoding"] = int(bool(cell.run.value["method"].get("decoding")))
            line |= {key: read(cell) for column in COLUMNS.values() for key, read in column.numbers.items()}
            line["tokens_out"] = block.paired.average(cell.run, lambda record: record["tokens_out"])
            line["warnings"] = " ".join(block.warnings)
            line |= fidelity[name] | ranks.get(name, NO_RANKS) | gains.get(name, NO_GAINS)
            line |= {f"difference{SIGN}": signs.get(name), f"{OF_ALL}{SIGN}": joint.get(name)}
            lines.append(line | describe_origin(cell.run))
    return lines


def average_subtasks(blocks: Sequence[ScoreBlock]) -> dict[str, dict[str, float]]:
    """Return by run the mean score of each subtask, in points."""
    return {
        cell.run.hash: {
            subtask: sum(float(cell.run.records[uid]["score"]) for uid in uids) / len(uids)
            for subtask, uids in block.paired.places.items()
        }
        for block, _, cell in list_cells(blocks)
    }


def find_worst(cells: Sequence[MatrixCell], block: ScoreBlock) -> dict[str, Line]:
    """Return by run the subtask in which a cell loses most, and its difference there; empty for a single subtask."""
    names, worst = list(block.paired.places), {}
    if len(names) < 2:
        return {}
    for cell in cells:
        pairs = block.paired.pair(block.full.run, cell.run)
        changes = zip(names, compare_averages([([scores], None) for scores in pairs]), strict=True)
        name, least = min(changes, key=lambda entry: entry[1].difference)
        ends = {"worst": least.difference, "worst_low": least.low, "worst_high": least.high}
        worst[cell.run.hash] = {"worst_subtask": name, **ends}
    return worst


def name_files(runs: Mapping[str, StoredRun], files: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of a block as they are shown, with files by their names.

    Where a label names a file of the codec, the file is last, and the codec's settings that have their usual values are
    left out: a file that was made for another stride would otherwise put the stride into the labels of all files. If
    cells could not be told apart then, nothing is left out.

    Args:
        runs: Label -> one of its runs.
        files: `content_hash` of a file -> its name.
    """

    def write(parts: Sequence[str]) -> str:
        text = " · ".join(parts)
        for identity, file in files.items():
            text = text.replace(identity, file)
        return text

    parts = {label: label.split(" · ") for label in runs}
    short = dict(parts)
    for label, run in runs.items():
        codec = run.value["codec"]
        if codec.get("path") in files:
            usual = flatten(load_settings("codec", codec["name"]))
            plain = {f"codec.{name.removesuffix('.name')}={value}" for name, value in usual.items()}
            named = f"codec.path={codec['path']}"
            kept = [part for part in parts[label] if part not in plain]
            short[label] = [*(part for part in kept if part != named), *(part for part in kept if part == named)]
    shown = {label: write(words) for label, words in short.items()}
    if len({*shown.values()}) < len(shown):
        return {label: write(words) for label, words in parts.items()}
    return shown


NO_RANKS: Line = dict.fromkeys(("rank_first", "rank_last", "rank_of", "rank_class", "beaten_by"))


def rank_column(cells: Sequence[MatrixCell], block: ScoreBlock) -> list[tuple[MatrixCell, Line]]:
    """Return each cell of a column with the bounds of its rank in its class, and the cells that surely score more."""
    ranked = []
    for name, alike in split_column(cells):
        better = block.paired.find_better(alike)
        for cell, those, (first, last) in zip(alike, better, bound_ranks(better), strict=True):
            beaten = " ".join(alike[place].run.hash for place in those)
            ranked.append((cell, dict(zip(NO_RANKS, (first, last, len(alike), name, beaten), strict=True))))
    return ranked


def sign_column(cells: Sequence[MatrixCell], block: ScoreBlock) -> list[tuple[MatrixCell, int]]:
    """Return each cell of a column with the sign of its difference from the full cache, jointly for the column."""
    weights = list(block.paired.weights.values())
    signs = sign_changes([(block.paired.pair(block.full.run, cell.run), weights) for cell in cells])
    return list(zip(cells, signs, strict=True))


def compute_fidelity(block: ScoreBlock) -> dict[str, Line]:
    """Return the means of `fidelity` by run, with 95 % intervals; None where records have none."""
    cells = [block.full, *(cell for row in block.rows.values() for cell in row.values())]
    numbers: dict[str, Line] = {cell.run.hash: dict.fromkeys(name_ends(*FIDELITY.values())) for cell in cells}
    known, places = [], []
    for cell in cells:
        pairs = {
            subtask: [(block.full.run.records[uid], cell.run.records[uid]) for uid in uids]
            for subtask, uids in block.paired.places.items()
        }
        for name, by_subtask in collect_fidelity(pairs):
            if by_subtask.keys() == block.paired.weights.keys():
                ordered = [by_subtask[subtask].method_values for subtask in block.paired.weights]
                known.append((ordered, list(block.paired.weights.values())))
                places.append((cell.run.hash, FIDELITY[name]))
    for (run, key), mean in zip(places, compute_means(known), strict=True):
        numbers[run] |= dict(zip(name_ends(key), (mean.value, mean.low, mean.high), strict=True))
    return numbers


def name_ends(*names: str) -> list[str]:
    """Return the columns of numbers with intervals."""
    return [f"{name}{end}" for name in names for end in ("", "_low", "_high")]


NO_GAINS: Line = dict.fromkeys(
    [name for gain in (*GAINS, BYTES_GAIN) for name in (*name_ends(gain), f"{gain}{SIGN}")] + [f"{BYTES_GAIN}_from"]
)


def compute_gains(blocks: Sequence[ScoreBlock]) -> dict[str, Line]:
    """Return the gains of each run that has one, by its hash."""
    samples = {cell.run.hash: block.paired for block, _, cell in list_cells(blocks)}
    protocols = {cell.run.hash: place for place, block in enumerate(blocks) for _, _, cell in list_cells([block])}
    runs = {cell.run.hash: cell.run for _, _, cell in list_cells(blocks)}
    known, places = [], []
    for gain, (setting, plain) in GAINS.items():
        siblings = {hash_without(run, setting): run for run in runs.values() if read_name(run, setting) == plain}
        for run in runs.values():
            other = siblings.get(hash_without(run, setting))
            if other is not None and other.hash != run.hash:
                both = pair_subtasks(other, run, samples[other.hash], samples[run.hash])
                known.append((both, list(samples[run.hash].weights.values())))
                places.append((run.hash, gain))
    partners: dict[str, str] = {}
    for block in blocks:
        for pair in pair_at_equal_bytes(block):
            known.append((block.paired.pair(pair.raw.run, pair.coded.run), list(block.paired.weights.values())))
            places.append((pair.coded.run.hash, BYTES_GAIN))
            partners[pair.coded.run.hash] = pair.raw.run.hash
    gains: dict[str, Line] = {}
    for (name, gain), change in zip(places, compare_averages(known), strict=True):
        ends = dict(zip(name_ends(gain), (change.difference, change.low, change.high), strict=True))
        gains[name] = gains.get(name, NO_GAINS) | ends
    families: dict[tuple[int, str], list[int]] = {}  # of the changes whose signs hold together
    for at, (name, gain) in enumerate(places):
        if runs[name].full:
            continue
        families.setdefault((protocols[name], gain), []).append(at)
    for family in families.values():
        for at, sign in zip(family, sign_changes([known[at] for at in family]), strict=True):
            name, gain = places[at]
            gains[name][f"{gain}{SIGN}"] = sign
    for name, partner in partners.items():
        gains[name][f"{BYTES_GAIN}_from"] = partner
    return gains


def read_name(run: StoredRun, setting: str) -> str:
    """Return the name in a group of a run, or the value of a setting."""
    value = run.value[setting]
    return str(value["name"] if isinstance(value, Mapping) else value)


def hash_without(run: StoredRun, setting: str) -> str:
    """Return a hash of a run's settings without one of them and without the sources, which change with it."""
    return run_hash({name: part for name, part in run.value.items() if name not in (setting, "sources")})


def pair_subtasks(one: StoredRun, other: StoredRun, here: Samples, there: Samples) -> list[PairedScores]:
    """Return the scores of the samples that two runs have, by subtask, in the order of `there`.

    Their prompts may differ in where the question stands, so samples are paired by uid alone.

    Raises:
        SettingError: They share no sample of a subtask.
    """
    scores = []
    for subtask, uids in there.places.items():
        both = [uid for uid in uids if uid in here.places.get(subtask, ())]
        if not both:
            raise SettingError(f"runs {one.hash} and {other.hash} share no sample of {subtask}")
        plain, varied = ([float(run.records[uid]["score"]) for uid in both] for run in (one, other))
        scores.append(PairedScores(plain, varied, [other.records[uid]["group"] or uid for uid in both]))
    return scores


def describe_origin(run: StoredRun) -> Line:
    """Return where a run was made, by which versions and which code, and its hash."""
    device = run.value["device"]
    line = {"machine": device.get("gpu") or device["type"]}
    line |= {name: device.get(name) for name in ("dtype", "torch", "transformers")}
    return line | describe_machines(run) | {"hash": run.hash}


def read_lines(path: Path) -> list[Line]:
    """Return the lines that follow from the rows of a file.

    Raises:
        SettingError: As `read_part`.
    """
    return list(read_part(path).lines)


def read_part(
    path: Path,
    pairs: Sequence[tuple[str, str]] = (),
    changes: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> PartNumbers:
    """Return the lines that follow from the rows of a file, and the comparisons of cells.

    Args:
        path: The file.
        pairs: The pairs of cells whose comparison was planned.
        changes: Cell -> what another cell changes in it, in words -> the other cell.

    Raises:
        SettingError: The file cannot be read, pyarrow is not installed, its runs cannot be shown in one table, or a
            pair or change means several cells of one budget.
    """
    require_pyarrow(path)
    from kvbench.store.published_file import read_published

    runs, files = read_published(path)
    blocks = build_finished(runs)
    return PartNumbers(
        describe_blocks(blocks, files),
        compare_planned(pairs, blocks),
        compare_variants(blocks),
        compare_changes(changes, blocks, files),
        compare_turns(blocks),
        average_subtasks(blocks),
    )


def list_part_files(folder: Path) -> list[Path]:
    """Return the files of parts in the folders of machines below `folder`, sorted."""
    return sorted(folder.glob(f"*/*{ROWS}"))


def format_lines(lines: Sequence[Line]) -> str:
    """Return lines as CSV, with numbers rounded to DECIMALS."""
    names = list(lines[0])
    values = ([line[name] for name in names] for line in lines)
    rounded = ([round(cell, DECIMALS) + 0.0 if isinstance(cell, float) else cell for cell in line] for line in values)
    return format_rows([names, *rounded])

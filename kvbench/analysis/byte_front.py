"""Score over measured bytes: what to use at a share of the full cache's bytes, whatever made the cache so small.

A budget counts rows, and a codec makes rows smaller. Only the bytes that were measured compare both. All cells of a
block (kvbench.analysis.score_matrix), the full cache among them, are therefore put in one order by their bytes.

*Front.* A cell is on the front if no other cell that holds at most as many bytes scores more, and none that holds fewer
scores as much.

*Ties.* Chance may have put a cell on the front. Cells that hold at most as many bytes tie with it if they cannot be
told from it: cell and ties together contain the truly best of these cells with a confidence of 95 %
(`Samples.mark_best`). What to use at a share of the bytes is chosen likewise among all cells that hold no more.

*Equal bytes.* A codec pays if the same method scores more with it at the same bytes. Each cell of a codec is paired
with the cell that has all its settings but the codec and the budget, stores raw rows, and holds the nearest number of
bytes, if both differ by at most EQUAL. Their difference is paired by sample (kvbench.analysis.paired). The mean over
several methods is computed in each sample, so that its interval counts contexts and not methods.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from kvbench.analysis.intervals import TOLERANCE
from kvbench.analysis.paired import PairedDifference, PairedScores, compare_averages
from kvbench.analysis.run_labels import format_budget, name_presets, rank_budget
from kvbench.analysis.score_matrix import MatrixCell, Samples, ScoreBlock, list_cells
from kvbench.store.run_folder import run_hash
from kvbench.store.runs import StoredRun

SIZES = {"bytes": "held", "bytes_with_files": "loaded", "bytes_in_all": "whole"}  # --by -> attribute of MatrixCell
SHOWN = 0.0005  # half of the last digit of a share: what is shown as 10.0 % counts as 10 %
DECIMALS = 9  # of a share: means of equal shares may differ by less
FEWER = 0.95  # part of the rows in a codec below which raw rows are fewer
EQUAL = 0.05  # largest relative difference of bytes that count as equal


@dataclass(frozen=True)
class ByteCell:
    """A cell in the order of bytes.

    Attributes:
        label: Label of its row in the matrix.
        cell: Its numbers.
        share: What it holds over the bytes of the full cache's rows, above 0.
        place: Its place on the front, from 1 for the fewest bytes; None beside the front.
        ties: Places on the front of other cells that hold at least as many bytes and cannot be told from it.
    """

    label: str
    cell: MatrixCell
    share: float
    place: int | None = None
    ties: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The label with the budget."""
        return self.label if self.cell.run.full else f"{self.label} {format_budget(self.cell.run)}"


@dataclass(frozen=True)
class CodecPair:
    """A cell of a codec and the raw cell of the same method that holds as many bytes.

    Attributes:
        label: Label of the raw cell.
        raw: The raw cell.
        coded: The codec's cell.
    """

    label: str
    raw: MatrixCell
    coded: MatrixCell

    @property
    def distance(self) -> float:
        """The relative difference of their bytes."""
        assert self.raw.held and self.coded.held  # `pair_at_equal_bytes` leaves others out
        return abs(self.coded.held / self.raw.held - 1)


@dataclass(frozen=True)
class EqualBytes:
    """Cells of a codec against raw cells of the same methods that hold as many bytes.

    Attributes:
        codec: Name and preset of the codec.
        labels: Labels of the raw cells, one for each method.
        budget: Budget of the raw cells.
        coded_budgets: Budgets of the codec's cells.
        raw_share: Mean share of the full cache's bytes that the raw cells hold.
        coded_share: The same of the codec's cells.
        change: The difference, codec minus raw, in points; the mean over the methods if there are several.
    """

    codec: str
    labels: tuple[str, ...]
    budget: str
    coded_budgets: tuple[str, ...]
    raw_share: float
    coded_share: float
    change: PairedDifference


def order_by_bytes(block: ScoreBlock, size: str = "bytes") -> list[ByteCell]:
    """Return the cells of a block, the fewest bytes first, with the front and its ties.

    Args:
        block: The block.
        size: Which bytes count, a key of SIZES: those of the rows, with files of the method and codec, or in all.

    Returns:
        The cells. Of equal bytes, the highest score is first. Cells whose records do not say their bytes are missing.
    """
    known = [
        ByteCell(label, cell, round(share, DECIMALS))
        for _, label, cell in list_cells([block])
        if (share := getattr(cell, SIZES[size])) is not None
    ]
    known.sort(key=lambda one: (one.share, -one.cell.score.value, one.name))
    front = mark_front(known)
    ties: dict[str, list[int]] = {}
    for last in front:
        assert last.place is not None
        beside = [one for one in known if one.share <= last.share]
        for cell in block.paired.mark_best([one.cell for one in beside]):
            if cell.tied and cell.run.hash != last.cell.run.hash:
                ties.setdefault(cell.run.hash, []).append(last.place)
    places = {one.cell.run.hash: one.place for one in front}
    return [
        replace(one, place=places.get(one.cell.run.hash), ties=tuple(ties.get(one.cell.run.hash, ()))) for one in known
    ]


def mark_front(cells: Sequence[ByteCell]) -> list[ByteCell]:
    """Return the cells on the front with their places, as this module's docstring defines it.

    Args:
        cells: Cells, the fewest bytes first and of equal bytes the highest score.
    """
    front: list[ByteCell] = []
    for one in cells:
        more = one.cell.score.value - front[-1].cell.score.value if front else math.inf
        alike = bool(front) and one.share == front[-1].share and more >= -TOLERANCE
        if more > TOLERANCE or alike:
            front.append(replace(one, place=len(front) + 1))
    return front


def choose_at(block: ScoreBlock, cells: Sequence[ByteCell], share: float) -> list[ByteCell]:
    """Return what to use at a share of the bytes: the best cell that holds no more, and all that may be truly best.

    Args:
        block: The block.
        cells: What `order_by_bytes` returns for it.
        share: The share, in (0, 1]. Shares are compared as they are shown, with one digit of a per cent.

    Returns:
        The cell on the front, and behind it the others that hold no more than the share and cannot be told from the
        best of these, the highest scores first. Nothing if all cells hold more.
    """
    reached = [one for one in cells if one.share < share + SHOWN]
    if not reached:
        return []
    front = [one for one in reached if one.place is not None]
    marked = block.paired.mark_best([one.cell for one in reached])
    ties = [one for one, cell in zip(reached, marked, strict=True) if cell.tied and one not in front[-1:]]
    return front[-1:] + sorted(ties, key=lambda one: -one.cell.score.value)


def compare_at_equal_bytes(block: ScoreBlock) -> list[EqualBytes]:
    """Compare each codec with raw rows at equal bytes: each method, and their mean where there are several.

    Returns:
        The comparisons, by codec and budget of the raw cells; the mean stands behind its methods.
    """
    groups: dict[tuple[str, str], list[CodecPair]] = {}
    for pair in pair_at_equal_bytes(block):
        key = json.dumps(pair.coded.run.value["codec"], sort_keys=True), format_budget(pair.raw.run)
        groups.setdefault(key, []).append(pair)
    chosen = []
    for pairs in groups.values():
        chosen += [[pair] for pair in pairs] + ([pairs] if len(pairs) > 1 else [])
    weights = list(block.paired.weights.values())
    changes = compare_averages([(average_pairs(pairs, block.paired), weights) for pairs in chosen])
    compared = [describe_pairs(pairs, change) for pairs, change in zip(chosen, changes, strict=True)]
    return sorted(compared, key=lambda one: one.codec)


def pair_at_equal_bytes(block: ScoreBlock) -> list[CodecPair]:
    """Return the pairs of a block, in the order of the raw cells' budgets. A raw cell has one partner of each codec.

    It keeps fewer rows than its partner: a codec that saves no bytes leaves nothing to compare.
    """
    cells = [(label, cell) for _, label, cell in list_cells([block]) if cell.held and not cell.run.full]
    raw = [(label, cell) for label, cell in cells if cell.run.value["codec"]["name"] == "raw"]
    pairs: dict[tuple[str, str], CodecPair] = {}
    for _, coded in cells:
        codec = coded.run.value["codec"]
        if codec["name"] == "raw":
            continue
        eviction = hash_eviction(coded.run)
        beside = [
            CodecPair(label, plain, coded)
            for label, plain in raw
            if hash_eviction(plain.run) == eviction and keeps_fewer(plain.kept, coded.kept)
        ]
        pair = min(beside, key=lambda pair: pair.distance, default=None)
        if pair is None or pair.distance > EQUAL:
            continue
        key = pair.raw.run.hash, json.dumps(codec, sort_keys=True)
        if key not in pairs or pair.distance < pairs[key].distance:
            pairs[key] = pair
    return sorted(pairs.values(), key=lambda pair: rank_budget(pair.raw.run))


def keeps_fewer(raw: float | None, coded: float | None) -> bool:
    """Return whether raw rows are fewer than those in a codec; both are shares of the rows, unknown in old records."""
    return raw is None or coded is None or raw < FEWER * coded


def average_pairs(pairs: Sequence[CodecPair], samples: Samples) -> list[PairedScores]:
    """Return the mean scores of some pairs in each sample, by subtask, with the raw cells in the full cache's place."""
    each = [samples.pair(pair.raw.run, pair.coded.run) for pair in pairs]
    return [
        PairedScores(
            [fmean(scores) for scores in zip(*(one.full for one in subtask), strict=True)],
            [fmean(scores) for scores in zip(*(one.method for one in subtask), strict=True)],
            subtask[0].groups,
        )
        for subtask in zip(*each, strict=True)
    ]


def describe_pairs(pairs: Sequence[CodecPair], change: PairedDifference) -> EqualBytes:
    """Return the comparison of some pairs of one codec and one budget of raw cells."""
    codec = pairs[0].coded.run.value["codec"]
    budgets = [format_budget(pair.coded.run) for pair in sorted(pairs, key=lambda pair: rank_budget(pair.coded.run))]
    return EqualBytes(
        codec=" ".join(filter(None, (codec["name"], name_presets("codec", codec)))),
        labels=tuple(pair.label for pair in pairs),
        budget=format_budget(pairs[0].raw.run),
        coded_budgets=tuple(dict.fromkeys(budgets)),
        raw_share=fmean(pair.raw.held or 0.0 for pair in pairs),
        coded_share=fmean(pair.coded.held or 0.0 for pair in pairs),
        change=change,
    )


def hash_eviction(run: StoredRun) -> str:
    """Return a hash of a run's settings without the codec, the budget, and the sources, which change with the codec."""
    return run_hash(
        {
            name: setting
            for name, setting in run.settings.items()
            if name not in (run.budget_setting, "sources") and name.partition(".")[0] != "codec"
        }
    )

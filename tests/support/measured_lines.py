"""Made-up lines of measured cells, as kvbench.analysis.result_lines writes them."""

from typing import Any

from kvbench.analysis.joint_signs import sign_interval
from kvbench.analysis.result_lines import BYTES_GAIN, NO_GAINS, NO_RANKS, OF_ALL, SIGN


def make_line(label: str, budget: float | str, score: float, **changed: Any) -> dict[str, Any]:
    """Return the line of a cell that holds as many bytes as its budget says, with intervals of 5 points to each side.

    Args:
        label: Its label, which begins with the method.
        budget: Its budget, or the setting in its place.
        score: Its score; that of the full cache is 90.
        changed: Other columns.
    """
    share = 1.0 if isinstance(budget, str) else budget
    line = {"model": "smollm2", "task": "ruler", "question": "visible", "protocol": "length 4096", "average": "mean"}
    line |= {"label": label, "method": label.split(" ")[0], "allocator": "uniform", "codec": "raw", "budget": budget}
    line |= {"score": score, "score_low": score - 5.0, "score_high": score + 5.0, "n": 120, "lost": 1, "gained": 1}
    line |= {"difference": score - 90.0, "low": score - 95.0, "high": score - 85.0, "kl": None, "warnings": None}
    line |= {"subtasks": 1, "worst_subtask": None, "decoding": 0, "tokens_out": 8.0, "at_limit": 0.0}
    line |= dict.fromkeys(("bytes_held", "bytes_with_files", "bytes_in_all", "rows_kept", "rows_attended"), share)
    line |= {"machine": "cpu", "dtype": "float32", "torch": "2", "transformers": "5", "code": "git x", "hash": label}
    alone = 1, 1, 1, f"{100 * changed.get('bytes_held', share):.1f}% of the bytes", ""
    line |= dict(zip(NO_RANKS, alone, strict=True)) | NO_GAINS | changed
    sign = sign_interval(line["low"], line["high"])
    return {f"difference{SIGN}": sign, f"{OF_ALL}{SIGN}": sign} | line


def make_full(**changed: Any) -> dict[str, Any]:
    """Return the line of the full cache."""
    line = make_line("full cache", 1.0, 90.0, method="full")
    return line | dict.fromkeys(("difference", "low", "high", *NO_RANKS)) | changed


def pair_bytes(coded: dict[str, Any], raw: dict[str, Any], sign: int = 1) -> dict[str, Any]:
    """Return the line of a cell with a codec that is compared with a raw cell of equal bytes."""
    gain = coded["score"] - raw["score"]
    ends = {f"{BYTES_GAIN}_low": gain - 7.0, f"{BYTES_GAIN}_high": gain + 7.0}
    return coded | {f"{BYTES_GAIN}_from": raw["hash"], BYTES_GAIN: gain, f"{BYTES_GAIN}{SIGN}": sign} | ends


def rank(
    cells: list[dict[str, Any]], *ranks: tuple[int, int], name: str = "20.0% of the bytes"
) -> list[dict[str, Any]]:
    """Return the cells of a class with their first and last ranks, beaten by those that surely rank before."""
    ranked = []
    for line, (first, last) in zip(cells, ranks, strict=True):
        better = (other["hash"] for other, (_, end) in zip(cells, ranks, strict=True) if end < first)
        ends = first, last, len(cells), name, " ".join(better)
        ranked.append(line | dict(zip(NO_RANKS, ends, strict=True)))
    return ranked

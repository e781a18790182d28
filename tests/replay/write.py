"""Compute all cells anew, print which changed and in what, and write them: `python tests/replay/write.py`.

A new cell is a line `{"cell": "model=llama method=…"}` in cells.jsonl, a new run one in runs.jsonl. Cells that changed
are computed once more with weights that differ by a billionth. Nothing is written if rows or tokens then differ: such a
cell hangs on a tie, and another CPU may decide it otherwise.
"""

import os
import sys
from functools import partial
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tests.replay import adapter, net


def main() -> int:
    """0 if the files hold what was computed, 1 if a cell hangs on a tie, 2 at other versions."""
    if (others := net.other_versions()) is not None:
        print(f"write.py: only the pinned versions write the cells: {others}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    code = 0
    for path, compute, make in (
        (net.CELLS, net.compute_cells, adapter.play),
        (net.RUNS, net.compute_runs, adapter.execute),
    ):
        before = net.load(path)
        after = compute(before, make)
        changed = net.compare(before, after, net.CLOSE)
        again = {cell: after[cell] for cell in changed if cell in after}
        noisy = compute(again, partial(make, noise=net.NOISE))
        tied = net.compare(again, {cell: noisy[cell] for cell in again if cell in noisy}, net.MOVED)
        print(*net.report(changed), f"{path.name}: {len(changed)} of {len(after)} cells changed", sep="\n")
        if tied:
            print(*net.report(tied), f"{path.name}: not written, {len(tied)} cells hang on a tie", sep="\n")
            code = 1
        elif changed:  # what is only close stays as it was
            net.save(path, {cell: after[cell] if cell in changed else before[cell] for cell in after})
    return code


if __name__ == "__main__":
    sys.exit(main())

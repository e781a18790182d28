"""Score the embedded model.

python -m kvbench evaluate --samples 100                      # version 2's; --model FOLDER: another one's
python -m kvbench evaluate --samples 3 --lengths 8192 --steps 0 --out scores.json
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from kvbench.cli.command import CommandParser
from kvbench.models.checkpoint import Checkpoint
from kvbench.models.embedded import REFERENCE
from kvbench.training.evaluate import LEAST, LEDGER, LENGTHS, SEED, STEPS, evaluate, load_scores, make_task
from kvbench.validation import SettingError, require_int, require_writable


def main(given: Sequence[str] | None = None) -> int:
    parser = CommandParser("kvbench evaluate", __doc__)
    parser.add_argument("--model", type=Path, default=REFERENCE, help="folder; default: version 2")
    parser.add_argument("--samples", type=int, default=100, help="of each task and length")
    parser.add_argument("--lengths", type=int, nargs="*", help=f"default: of {LENGTHS} those that the model takes")
    parser.add_argument("--steps", type=int, default=STEPS, help="lines of a ledger, 0: no ledger")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after")
    parser.add_argument("--cache", help="folder in which samples are kept")
    parser.add_argument("--out", type=Path, help="default: scores.json beside the weights")
    options = parser.parse_args(given)
    if not options.model.is_dir():
        raise SettingError(f"--model={options.model}: no such folder")
    model = Checkpoint("", str(options.model))
    model.check()
    longest = model.longest()
    if options.lengths is None:
        options.lengths = [length for length in LENGTHS if length <= longest]
    for length in options.lengths:
        if not LEAST <= length <= longest:
            raise SettingError(f"--lengths={length}: from {LEAST} to {longest}, which the model takes")
    require_int("--samples", options.samples, 1)
    if options.steps:
        make_task(LEDGER, options.steps, options.samples).check()
    options.out = options.out or options.model / "scores.json"
    require_writable("--out", options.out.parent)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    about = {"weights": model.identity(), "seed": SEED, "dtype": "float32", "device": device}
    return evaluate(options, load_scores(options.out, about))

"""Score the embedded model on the tasks that it was trained for.

Examples:
  kvbench dev evaluate --samples 100
  kvbench dev evaluate --model FOLDER --samples 3 --lengths 8192 --steps 0 --out scores.json
"""

import math
from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.command import CommandParser, run_command
from kvbench.models.embedded import REFERENCE
from kvbench.validation import SettingError, require_int, require_writable


def make_parser() -> CommandParser:
    parser = CommandParser("dev evaluate", __doc__)
    parser.add_argument("--model", type=Path, default=REFERENCE, help="folder (default: version 2)")
    parser.add_argument("--samples", type=int, default=100, help="of each task and length (default: 100)")
    parser.add_argument("--lengths", type=int, nargs="*", help="default: 1024 to 16384, as far as the model reads")
    parser.add_argument("--steps", type=int, help="lines of a ledger (default: 60); 0 leaves the ledger out")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after so many seconds")
    parser.add_argument("--cache", help="folder in which samples are kept")
    parser.add_argument("--out", type=Path, help="file to write (default: scores.json beside the weights)")
    return parser


def score_model(arguments: Sequence[str]) -> int:
    """Score the model and write the file. Return what `kvbench.training.evaluate` returns."""
    options = make_parser().parse(arguments)
    import torch

    from kvbench.models.checkpoint import Checkpoint
    from kvbench.training.evaluate import LEAST, LEDGER, LENGTHS, SEED, STEPS, evaluate, load_scores, make_task

    options.steps = STEPS if options.steps is None else options.steps
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


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: score_model(arguments))

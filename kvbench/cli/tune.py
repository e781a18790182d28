"""Tune low-rank factors of a small real model on the benchmarks' family of tasks.

Examples:
  kvbench dev tune --model smollm2 --out FILE                     the first of the two tunings of model=smollm2_long
  kvbench dev tune --model smollm2 --out FILE --pause 9           a call of 9 minutes; the same command goes on
  kvbench dev tune --model smollm2 --out FILE --start EARLIER --seed 1    go on from the factors of an earlier tuning
  kvbench dev tune --model smollm2 --out FILE --step 131072 --gpus 2      two GPUs of this machine
  kvbench dev tune --model smollm2 --out FILE --device cpu --steps 1 --step 4096 --batch 4096 --lengths 4096:1   a trial
  kvbench dev tune --model smollm2 --out FILE --evaluate          loss on plain text of the base and of the tuned model
  kvbench dev tune --model smollm2 --out FILE --evaluate --start EARLIER  the same, with the learning curve of both
  kvbench dev choose-solvable model=smollm2_long model.factors=FILE task=ruler --lengths 4096    its scores

The factors (LoRA, Hu et al. 2021, arXiv 2106.09685) are on all projections of every layer, and nothing else is trained.
The loss is the mean cross-entropy of the answers' tokens, in which a token of a sample with n of them weighs 1/sqrt(n),
plus that of plain text, plus the divergence of the base's predictions from the tuned model's in plain text, so that it
stays a language model. Samples and texts are generated from seeds, words and names that no evaluation uses
(kvbench/training/tuning_data.py).

The tuning writes its state to OUT.training every minute and a learning curve to OUT.log.jsonl. After a pause or an
interruption the same command goes on; on one GPU it ends with the same factors, to the bit. A finished tuning is taken
further by a second one, which begins with its factors (--start) and has a schedule of its own. With several GPUs each
reads its own batches of a step, and the gradients are summed. At the end, and with --evaluate, the losses on plain text
are written to OUT.text.csv, and a short learning curve to OUT.curve.csv.
"""

import math
import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from kvbench.cli.command import CommandParser, require_file, run_command
from kvbench.models.local_models import FETCHED_MODELS
from kvbench.training.tuning_recipe import TuningRecipe, choose_recipe
from kvbench.validation import SettingError, require_choice, require_int


def make_parser() -> CommandParser:
    parser = CommandParser("dev tune", __doc__)
    parser.add_argument("--model", required=True, help=f"the base: {', '.join(FETCHED_MODELS)}")
    parser.add_argument("--out", type=Path, required=True, help="safetensors file to write")
    parser.add_argument("--start", type=Path, help="the file of an earlier tuning, whose factors this one begins with")
    parser.add_argument("--pause", type=float, default=math.inf, help="minutes after which to stop")
    parser.add_argument("--steps", type=int, help="stop after so many steps, for a trial")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of this machine (default: 1)")
    workers = max(1, (os.cpu_count() or 2) - 1)
    parser.add_argument("--workers", type=int, default=workers, help="processes that draw samples (default: by CPUs)")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a trial of some --steps (default: cuda)")
    parser.add_argument("--texts", type=Path, help="folder of packed plain text (default: OUT.texts, made once)")
    parser.add_argument(
        "--evaluate",
        action="store_true",
        help="only compute and write the losses of --out on plain text",
    )
    recipe = parser.add_argument_group("recipe")
    for one in fields(TuningRecipe):
        option = f"--{one.name.replace('_', '-')}"
        assert isinstance(one.type, type)
        recipe.add_argument(option, type=one.type, help=f"default: {one.default}")
    return parser


def tune(arguments: Sequence[str]) -> None:
    """Tune, or go on with a tuning, or evaluate one."""
    options = make_parser().parse(arguments)
    require_choice("--model", options.model, FETCHED_MODELS)
    options.texts = options.texts or options.out.with_name(f"{options.out.name}.texts")
    if options.evaluate:
        print_losses(options)
        return
    recipe = choose_recipe(vars(options))
    check_options(options, recipe)
    from kvbench.training.tuning_call import TuningCall, start

    where, how = (options.model, options.out, options.texts), (options.device, options.gpus, options.workers)
    step = start(TuningCall(*where, recipe, *how, 60 * options.pause, options.steps, earlier=options.start))
    if step < recipe.steps:
        print(f"{options.out}: step {step} of {recipe.steps}; the same command goes on")
        return
    size = options.out.stat().st_size / 1e6
    print(f"{options.out}: factors of rank {recipe.rank} after {step} steps, {size:.2f} MB")
    print_losses(options)


def check_options(options: Namespace, recipe: TuningRecipe) -> None:
    """Raise a SettingError if an option cannot be used. Nothing is loaded or written."""
    require_choice("--device", options.device, ("cuda", "cpu"))
    require_int("--gpus", options.gpus, 1)
    require_int("--workers", options.workers, 0)
    if options.steps is not None:
        require_int("--steps", options.steps, 1)
    if not options.pause > 0:
        raise SettingError(f"--pause={options.pause}: a number above 0")
    if recipe.batches % options.gpus:
        raise SettingError(f"--gpus={options.gpus}: a divisor of the number of batches of a step, {recipe.batches}")
    require_file("--out", options.out)
    if options.start is not None and options.start.resolve() == options.out.resolve():
        raise SettingError(f"--start={options.start}: is --out, too; give --out another name")


def print_losses(options: Namespace) -> None:
    """Print the losses on plain text of the base, and of the base with the factors of `--out`.

    They are written beside `--out`, with the short learning curve of its log if it is there.

    Raises:
        SettingError: The curve needs the factors with which the tuning began, and `--start` is another file or missing.
    """
    import torch

    from kvbench.training.interrupted_training import name_log
    from kvbench.training.tuning_call import check_beginning, compute_text_losses
    from kvbench.training.tuning_notes import name_curve, name_text, write_curve, write_text_losses

    log = name_log(options.out)
    if log.exists() or options.start is not None:
        check_beginning(options.out, options.start)
    device = "cuda" if options.device == "cuda" and torch.cuda.is_available() else "cpu"
    losses = compute_text_losses(options.model, options.out, options.texts, device)
    for loss in losses:
        print(
            f"plain text, sequences of {loss.length} tokens: {loss.base:.4f} nats a token with {options.model}, "
            f"{loss.tuned:.4f} with the factors ({loss.change:+.4f})"
        )
    write_text_losses(name_text(options.out), losses)
    if log.exists():
        write_curve(log, name_curve(options.out), options.start)


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: tune(arguments))

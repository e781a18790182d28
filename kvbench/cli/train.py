"""Train the embedded model.

Examples:
  kvbench dev train look_ahead=0 --out FOLDER --minutes 16 --seed 0
  kvbench dev train --out FOLDER --resume
  kvbench dev train --out FOLDER --weights FOLDER     begin with other weights, not from scratch
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from shutil import copyfile

from kvbench.cli.command import CommandParser, run_command
from kvbench.validation import SettingError, require_choice, require_int, require_writable


def make_parser() -> CommandParser:
    parser = CommandParser("dev train", __doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the weights and of the training's state")
    parser.add_argument("--minutes", type=float, help="minutes of all sessions together (default: 16)")
    parser.add_argument("--seed", type=int, help="default: 0")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="settings of the recipe")
    parser.add_old_set()
    parser.add_argument("--weights", type=Path, help="folder of the weights to begin with")
    parser.add_argument(
        "--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="processes that draw data"
    )
    parser.add_argument("--tokenizer", action="store_true", help="train a new tokenizer instead of taking version 2's")
    parser.add_argument("--resume", action="store_true", help="go on with the training in --out")
    parser.add_argument("--pause", type=float, default=math.inf, help="minutes after which to stop, for --resume")
    parser.add_argument("--steps", type=int, help="stop after so many steps, for a trial")
    parser.add_argument("--device", default="cuda", help="cpu is for a trial, a thousand times slower (default: cuda)")
    return parser


def train_model(arguments: Sequence[str]) -> int:
    """Train, or go on with a training, and return what `kvbench.training.train` returns."""
    parser = make_parser()
    options = parser.parse(arguments)
    import torch

    from kvbench.models.checkpoint import Checkpoint
    from kvbench.models.embedded import REFERENCE
    from kvbench.training import recipe, tokenizer, training_data
    from kvbench.training.recipe import Recipe
    from kvbench.training.train import STATE, Training, check_weights, train

    require_int("--workers", options.workers, 1)
    require_choice("--device", options.device, ("cuda", "cpu"))
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SettingError("--device=cuda: there is no GPU here; --device cpu is for a trial")
    for name in ("minutes", "pause"):
        if (value := getattr(options, name)) is not None and not value > 0:
            raise SettingError(f"--{name}={value}: a number above 0")
    if options.steps is not None:
        require_int("--steps", options.steps, 1)
    require_writable("--out", options.out)
    held = (options.out / STATE).exists()
    if options.resume and not held:
        raise SettingError(f"--resume: {options.out} holds no training")
    if held and not options.resume:
        raise SettingError(f"--out: {options.out} holds a training; --resume goes on with it")
    if options.resume:
        for name in ("minutes", "seed", "settings", "weights", "tokenizer"):
            if getattr(options, name) not in ([], parser.get_default(name)):
                shown = name if name == "settings" else f"--{name}"
                raise SettingError(f"{shown}: not with --resume, which goes on as it was begun")
        counts = torch.load(options.out / STATE, map_location="cpu")["counts"]
        training = Training(options.out, recipe.load_recipe(options.out), **counts)
    else:
        chosen_recipe, begun_with = Recipe().with_settings(options.settings), None
        training_data.compute_shares(chosen_recipe)  # refuses what it cannot use
        if options.weights is not None:
            check_weights(options.weights, chosen_recipe)
            begun_with = Checkpoint("", str(options.weights)).identity()
        minutes = 16.0 if options.minutes is None else options.minutes
        training = Training(options.out, chosen_recipe, options.seed or 0, 60 * minutes, begun_with=begun_with)
        options.out.mkdir(parents=True, exist_ok=True)
        training.recipe.save(options.out)
        if options.tokenizer:
            tokenizer.train_tokenizer(training_data.draw_corpus(), recipe.VOCABULARY, options.out)
        else:
            for path in REFERENCE.glob("tokenizer*.json"):
                copyfile(path, options.out / path.name)
    steps = math.inf if options.steps is None else options.steps
    return train(training, options.device, options.workers, 60 * options.pause, steps, options.weights)


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: train_model(arguments))

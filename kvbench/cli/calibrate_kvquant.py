"""Compute the ranges and code books of KVQuant.

Examples:
  kvbench calibrate kvquant --model reference --out FILE
  kvbench calibrate kvquant --model FOLDER --out FILE --dataset Salesforce/wikitext --subset wikitext-2-raw-v1
  kvbench calibrate kvquant --model FOLDER --out FILE --outliers 0 --unweighed --text FOLDER

The command reads a text. It finds the range of each channel of the keys before rotation, and the code books of 2, 3 and
4 bits for the keys and for the values of each layer, weighed by the squares of gradients
(kvbench/training/kvquant_calibration.py). The file also has the factors of Q-Norm. The share of outliers is part of it,
so each share needs its own file.

The recipe is the authors': 16 sequences of 2048 tokens, 1 % outliers, without the first token of a sequence. If a text
has fewer sequences, those are read. All keys and values of the text lie in memory, in the model's dtype, with the
squares of their gradients in float32.

By default the command reads essays that it writes (tasks/common/synthetic_prose.py). They are enough to try it; for a
real model give real text. The authors read the training part of WikiText-2.
"""

from argparse import Namespace

from kvbench.cli.calibration_options import add_text_options, check_text_options, require_dtype
from kvbench.cli.command import CommandParser


def add_options(parser: CommandParser) -> None:
    """Add the options of this codec."""
    add_text_options(parser)
    parser.add_argument("--outliers", type=float, default=0.01, help="share of exact outliers (default: 0.01)")
    parser.add_argument("--sinks", type=int, default=1, help="first tokens to leave out, those raw later (default: 1)")
    parser.add_argument("--unweighed", action="store_true", help="weigh all numbers alike, without gradients")
    parser.add_argument("--sequences", type=int, default=16, help="sequences of the text (default: 16)")
    parser.add_argument("--length", type=int, help="their tokens (default: 2048, at most the model's)")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16, of the model (default: float32)")


def calibrate(options: Namespace, device: str) -> None:
    """Compute the ranges and code books, write their file, and print its path.

    Args:
        options: What the parser of `kvbench calibrate` reads.
        device: "cpu" or "cuda".

    Raises:
        SettingError: An option cannot be used, or the model or the text cannot be read.
    """
    require_dtype(options.dtype)
    check_text_options(options)

    import torch

    from kvbench.cli.calibration_steps import open_checkpoint, read_sequences
    from kvbench.training.kvquant_calibration import KVQuantRecipe, calibrate_model

    checkpoint = open_checkpoint(options)
    layout = checkpoint.layout()
    length = min(2048, layout.longest) if options.length is None else options.length
    recipe = KVQuantRecipe(options.outliers, options.sinks, not options.unweighed, options.sequences, length)
    recipe.check(layout)
    read = read_sequences(options, checkpoint, length, recipe.sequences)
    model = checkpoint.weights(getattr(torch, options.dtype), device)
    made = calibrate_model(model, layout, recipe, [*read.text.sequences])
    read.write(options.out, made, recipe.describe())
    read.report(options.out, f"ranges and code books for {recipe.outliers:.1%} outliers")

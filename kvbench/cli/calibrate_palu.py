"""Compute the projections of Palu.

Examples:
  kvbench calibrate palu --model reference --out FILE
  kvbench calibrate palu --model FOLDER --out FILE --removed 0.3 --text FOLDER
  kvbench calibrate palu --model FOLDER --out FILE --dataset Salesforce/wikitext --subset wikitext-2-raw-v1

The command reads a text and finds, for the keys and the values of each group of KV heads, the subspace of a lower
dimension, the rank, that loses least of them. --removed is the share of all keys and values that is removed, which is
the paper's compression rate: 0.5 and 0.3 there. (The authors' --param_ratio_target is the share that stays.) The file
holds the ranks, so each share needs its own file.

Ranks are multiples of 32 for groups of 512 numbers and more, as the authors' models have, and of w/16 for groups of w
numbers below, in multiples of 8. The share that was removed in the end is printed. --ranks says how they are chosen:
fisher_uniform and fisher give more to keys or values whose weights have larger gradients, uniform the same to all.

The recipe is the authors': groups of 4 heads, 256 sequences of 2048 tokens, gradients of 2048 sequences of 1024 tokens.
For groups of w numbers below 512 kvbench reads less: with s = w / 512, s times as many sequences of s times as many
tokens, but at least 16 of 64.

By default the command reads essays that it writes (tasks/common/synthetic_prose.py). They are enough to try it; for a
real model give real text. The authors read the training part of WikiText-2. If a text has fewer sequences, those are
read.

--untrained writes random projections of equal ranks, with orthonormal columns and without biases. They are for
measurements of time and memory, so --model may also be a file of conf/model/shapes/. The file names no model, and its
metadata say what it is.
"""

from argparse import Namespace
from collections.abc import Iterable, Sequence

from kvbench.cli.calibration_options import SOURCES, add_text_options, check_text_options, require_dtype
from kvbench.cli.command import CommandParser, refuse_given

OPTIONS = {
    "removed": "removed", "ranks": "search", "group": "group", "sequences": "sequences", "length": "length",
    "fisher_sequences": "fisher_sequences", "fisher_length": "fisher_length",
}  # fmt: skip
# options without a meaning for --untrained
READING = ("ranks", "sequences", "length", "fisher_sequences", "fisher_length", "dtype", *SOURCES)


def add_options(parser: CommandParser) -> None:
    """Add the options of this codec."""
    add_text_options(parser)
    parser.add_argument("--removed", type=float, help="share of keys and values that is removed (default: 0.5)")
    parser.add_argument("--ranks", help="fisher_uniform, fisher or uniform (default: fisher_uniform)")
    parser.add_argument("--group", type=int, help="KV heads of a group (default: 4, or the largest divisor below)")
    parser.add_argument("--sequences", type=int, help="sequences of the text (default: see below)")
    parser.add_argument("--length", type=int, help="their tokens (default: see below, at most the model's)")
    parser.add_argument("--fisher-sequences", type=int, help="sequences for the gradients (default: see below)")
    parser.add_argument("--fisher-length", type=int, help="their tokens (default: see below, at most --length)")
    parser.add_argument("--untrained", action="store_true", help="write random projections and read no text")
    parser.add_argument("--dtype", help="float32 or bfloat16, of the model (default: float32)")


def calibrate(options: Namespace, device: str) -> None:
    """Compute the projections, write their file, and print its path and what was removed.

    Args:
        options: What the parser of `kvbench calibrate` reads.
        device: "cpu" or "cuda".

    Raises:
        SettingError: An option cannot be used, or the model or the text cannot be read.
    """
    dtype = options.dtype or "float32"
    require_dtype(dtype)
    check_text_options(options)
    if options.untrained:
        refuse_given(options, READING, "--untrained: reads nothing, and ranks are equal")

    import torch

    from kvbench.cli.calibration_steps import UNTRAINED, load_untrained_layout, open_checkpoint, read_sequences
    from kvbench.training import palu_calibration
    from kvbench.training.recording import write_tensors

    given = {name: getattr(options, option) for option, name in OPTIONS.items()}
    if options.untrained:
        layout = load_untrained_layout(options)
        recipe = palu_calibration.choose_recipe(layout, given | {"search": "uniform"})
        weights, ranks = palu_calibration.draw_projections(layout, recipe, options.seed)
        write_tensors(options.out, weights, palu_calibration.describe_ranks(ranks, recipe) | UNTRAINED)
        print(f"{options.out}: untrained {describe_sizes(ranks.values(), recipe.group, recipe.group * layout.dim)}")
        return
    checkpoint = open_checkpoint(options)
    layout = checkpoint.layout()
    recipe = palu_calibration.choose_recipe(layout, given)
    width = recipe.group * layout.dim
    least = -(-palu_calibration.LEAST_TOKENS * width // recipe.length)
    read = read_sequences(options, checkpoint, recipe.length, recipe.sequences_to_read, least)
    count = f"{len(read.text.sequences)} of {recipe.sequences_to_read}"
    print(f"{read.source}: {read.text.texts} texts, {count} sequences of {recipe.length} tokens")
    model = checkpoint.weights(getattr(torch, dtype), device)
    weights, ranks = palu_calibration.calibrate_model(model, layout, recipe, read.text.sequences)
    read.write(options.out, weights, palu_calibration.describe_ranks(ranks, recipe))
    print(f"{options.out}: {describe_sizes(ranks.values(), recipe.group, width)}")


def describe_sizes(ranks: Iterable[Sequence[int]], group: int, width: int) -> str:
    """Return a line about projections of groups of `group` KV heads, `width` numbers each."""
    each = [rank for side_ranks in ranks for rank in side_ranks]
    removed = 1 - sum(each) / (len(each) * width)
    return (
        f"projections of groups of {group} KV heads, {width} numbers to {min(each)}–{max(each)}; {removed:.1%} of keys "
        "and values removed"
    )

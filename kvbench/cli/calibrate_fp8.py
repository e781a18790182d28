"""Make the scales of fp8.

Examples:
  kvbench calibrate fp8 --model reference --out FILE
  kvbench calibrate fp8 --model FOLDER --out FILE --text FOLDER
  kvbench calibrate fp8 --model FOLDER --out FILE --dataset Salesforce/wikitext --subset wikitext-2-raw-v1

The command reads texts and takes the largest size of the keys, as they are cached, and of the values of each KV head.
The file holds these sizes over 448, the largest number of e4m3: k_scale and v_scale, (layers, KV heads). With
codec.scope=head each head has its scale, with codec.scope=tensor a layer has the largest one of its heads, as ModelOpt
exports it and servers read it as k_scale and v_scale of a layer.

llm-compressor's example of scales for each head reads 512 sequences of 2048 tokens of ultrachat; here as many are the
default. If a text has fewer sequences, those are read.

By default the command reads essays that it writes (tasks/common/synthetic_prose.py). For a real model give real text,
of the kind that the model will read: numbers beyond a scale's range become the largest one that it has.
"""

from argparse import Namespace

from kvbench.cli.calibration_options import add_sequence_options, check_sequence_options
from kvbench.cli.command import CommandParser


def add_options(parser: CommandParser) -> None:
    """Add the options of this codec."""
    add_sequence_options(parser, 512)


def calibrate(options: Namespace, device: str) -> None:
    """Compute the scales, write their file, and print its path.

    Args:
        options: What the parser of `kvbench calibrate` reads.
        device: "cpu" or "cuda".

    Raises:
        SettingError: An option cannot be used, or the model or the text cannot be read.
    """
    check_sequence_options(options)

    from kvbench.cli.calibration_steps import choose_dtype, open_checkpoint, read_sequences
    from kvbench.training.row_scales import compute_row_scales

    checkpoint = open_checkpoint(options)
    read = read_sequences(options, checkpoint, min(options.length, checkpoint.longest()), options.sequences)
    made = compute_row_scales(checkpoint.weights(choose_dtype(device), device), read.list_sequences())
    read.write_statistics(options, made)

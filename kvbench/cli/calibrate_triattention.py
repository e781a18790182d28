"""Make the statistics of TriAttention.

Examples:
  kvbench calibrate triattention --model reference --out FILE
  kvbench calibrate triattention --model FOLDER --out FILE --text FOLDER
  kvbench calibrate triattention --model smollm2 --out FILE --packages torch,transformers
  kvbench calibrate triattention --model FOLDER --out FILE --dataset HuggingFaceFW/fineweb-edu --subset sample-10BT

Source: WeianMao/triattention, scripts/calibrate.py. The command reads texts and takes the queries of all tokens before
rotation. The file holds, of each layer and query head, the mean query (q_mean) and the mean size of each of its complex
pairs (q_abs_mean). If the model has a norm of queries, they are those behind it; the source leaves this norm out. It
reads at most 32,768 tokens as one text; here as many are 16 sequences.

By default the command reads essays that it writes (tasks/common/synthetic_prose.py). For a real model give real text,
of the kind that the model will answer.
"""

from argparse import Namespace

from kvbench.cli.calibration_options import add_sequence_options, check_sequence_options
from kvbench.cli.command import CommandParser
from kvbench.validation import SettingError


def add_options(parser: CommandParser) -> None:
    """Add the options of this method."""
    add_sequence_options(parser, 16)


def calibrate(options: Namespace, device: str) -> None:
    """Compute the statistics, write their file, and print its path.

    Args:
        options: What the parser of `kvbench calibrate` reads.
        device: "cpu" or "cuda".

    Raises:
        SettingError: An option cannot be used, or the model or the text cannot be read.
    """
    check_sequence_options(options)

    from kvbench.cli.calibration_steps import choose_dtype, open_checkpoint, read_sequences
    from kvbench.training.query_statistics import compute_query_statistics

    checkpoint = open_checkpoint(options)
    if (switch := checkpoint.layout().rope_switch) is not None:
        raise SettingError(
            f"--model={options.model}: its RoPE changes its frequencies beyond {switch} tokens, and TriAttention needs "
            "fixed ones"
        )
    length, wanted = min(options.length, checkpoint.longest()), options.sequences
    read = read_sequences(options, checkpoint, length, wanted, wanted, what=f"--sequences={wanted}: text")
    made = compute_query_statistics(checkpoint.weights(choose_dtype(device), device), read.list_sequences())
    read.write_statistics(options, made)

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

from kvbench.cli import calibration_texts
from kvbench.cli.command import CommandParser
from kvbench.validation import require_int


def add_options(parser: CommandParser) -> None:
    """Add the options of this codec."""
    calibration_texts.add_text_options(parser)
    parser.add_argument("--sequences", type=int, default=512, help="sequences to read (default: 512)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence (default: 2048)")


def calibrate(options: Namespace, device: str) -> None:
    """Compute the scales, write their file, and print its path.

    Args:
        options: What the parser of `kvbench calibrate` reads.
        device: "cpu" or "cuda".

    Raises:
        SettingError: An option cannot be used, or the model or the text cannot be read.
    """
    require_int("--sequences", options.sequences, 1)
    require_int("--length", options.length, 2)
    calibration_texts.check_text_options(options)

    import torch

    from kvbench.models.checkpoint import Checkpoint, find_model
    from kvbench.training.recording import describe_origin, write_tensors
    from kvbench.training.row_scales import compute_row_scales
    from kvbench.training.token_sequences import pack_texts

    checkpoint = Checkpoint("calibrated", find_model(options.model, "--model"))
    checkpoint.config()
    length = min(options.length, checkpoint.longest())
    checkpoint.check()
    texts, source = calibration_texts.open_texts(options, checkpoint.path, length, options.seed)
    text = pack_texts(checkpoint.tokenizer(), texts, length, options.sequences, 1)
    model = checkpoint.weights(torch.float32 if device == "cpu" else torch.bfloat16, device)
    made = compute_row_scales(model, (sequence.long() for sequence in text.sequences))
    count = len(text.sequences)
    about = {"sequences": f"{count} of {length} tokens", "seed": str(options.seed)}
    write_tensors(options.out, made, describe_origin(checkpoint.identity(), text, source) | about)
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in made.items())
    print(f"{options.out}: {shapes} from {count} sequences of {length} tokens, {source}")

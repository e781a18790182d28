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

from kvbench.cli import calibration_texts
from kvbench.cli.command import CommandParser
from kvbench.validation import SettingError, require_int


def add_options(parser: CommandParser) -> None:
    """Add the options of this method."""
    calibration_texts.add_text_options(parser)
    parser.add_argument("--sequences", type=int, default=16, help="sequences to read (default: 16)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence (default: 2048)")


def calibrate(options: Namespace, device: str) -> None:
    """Compute the statistics, write their file, and print its path.

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
    from kvbench.training.query_statistics import compute_query_statistics
    from kvbench.training.recording import describe_origin, write_tensors
    from kvbench.training.token_sequences import pack_texts

    checkpoint = Checkpoint("calibrated", find_model(options.model, "--model"))
    checkpoint.config()
    if (switch := checkpoint.layout().rope_switch) is not None:
        raise SettingError(
            f"--model={options.model}: its RoPE changes its frequencies beyond {switch} tokens, and TriAttention needs "
            "fixed ones"
        )
    length = min(options.length, checkpoint.longest())
    checkpoint.check()
    texts, source = calibration_texts.open_texts(options, checkpoint.path, length, options.seed)
    wanted = options.sequences
    text = pack_texts(checkpoint.tokenizer(), texts, length, wanted, wanted, what=f"--sequences={wanted}: text")
    model = checkpoint.weights(torch.float32 if device == "cpu" else torch.bfloat16, device)
    made = compute_query_statistics(model, (sequence.long() for sequence in text.sequences))
    about = {"sequences": f"{wanted} of {length} tokens", "seed": str(options.seed)}
    write_tensors(options.out, made, describe_origin(checkpoint.identity(), text, source) | about)
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in made.items())
    print(f"{options.out}: {shapes} from {wanted} sequences of {length} tokens, {source}")

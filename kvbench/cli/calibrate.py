"""Make the file that a method or a codec needs, for a model.

Examples:
  kvbench calibrate qfilters --model reference --out FILE
  kvbench calibrate duo_attention --model reference --out FOLDER
  kvbench calibrate triattention --model reference --out FILE
  kvbench calibrate deltakv --model reference --out FILE
  kvbench calibrate kvzap --model reference --out FILE
  kvbench calibrate palu --model reference --out FILE
  kvbench calibrate fp8 --model reference --out FILE
  kvbench calibrate kvquant --model reference --out FILE

`kvbench calibrate qfilters --help` describes the file and lists the options; so do the others.
"""

from argparse import Namespace
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from kvbench.cli import (
    calibrate_deltakv,
    calibrate_fp8,
    calibrate_kvquant,
    calibrate_kvzap,
    calibrate_palu,
    calibrate_triattention,
)
from kvbench.cli.command import CommandParser, run_command
from kvbench.validation import SettingError, require_choice, require_int, require_writable

QFILTERS = """Make the filters of Q-Filters.

Source: NathanGodey/qfilters, make_filters.py. The command rotates queries to random positions of some texts. Per
query head it takes the first right singular vector v of the matrix of queries, with the sign on which most queries
project positively. The filter of a KV head is the mean of -v over its query heads. (A singular vector has no sign of
its own. Without the majority, half of the filters would keep exactly the wrong rows; NathanGodey/qfilters#6.)
"""
DUO_ATTENTION = """Make a pattern of DuoAttention for a model that has no trained one.

It comes from KVzip's head scores (snu-mllab/KVzip, test.py --save_head_score). The score of a head in a text is the
largest KVzip score of its rows; alpha is the mean of it over several texts. The pattern's config.json says so, because
the gates that DuoAttention's authors trained are something else.
"""
ESSAYS = 120  # essays that are written where no text is given, about 150,000 words
ROOM = 32  # tokens for the words that are read besides a text


class MethodParser(CommandParser):
    """The parser of a method's options. argparse gives the whole command as `prog`."""

    def __init__(self, prog: str, doc: str) -> None:
        super().__init__(prog.removeprefix("kvbench "), doc)


def make_parser() -> CommandParser:
    parser = CommandParser("calibrate", __doc__)
    methods = parser.add_subparsers(dest="method", required=True, metavar="METHOD", parser_class=MethodParser)
    for method, doc, sequences in (("qfilters", QFILTERS, 20), ("duo_attention", DUO_ATTENTION, 1)):
        subparser = methods.add_parser(method, help=doc.partition("\n")[0], doc=doc)
        kind = "safetensors file" if method == "qfilters" else "folder"
        add_common_options(subparser, kind, seed=0)
        subparser.add_argument("--text", type=Path, help="text file (default: essays, which the seed draws)")
        subparser.add_argument("--sequences", type=int, default=sequences, help=f"texts to read (default: {sequences})")
        subparser.add_argument(
            "--length", type=int, default=2048, help="tokens of a text (default: 2048, as the authors')"
        )
        if method == "qfilters":
            subparser.add_argument("--queries", type=int, default=3000, help="queries per head (default: 3000)")
        else:
            subparser.add_argument(
                "--sinks", type=int, default=128, help="first rows of a streaming head (default: 128)"
            )
            subparser.add_argument(
                "--recent", type=int, default=256, help="newest rows of a streaming head (default: 256)"
            )
    for method, command, seed in (
        ("triattention", calibrate_triattention, 0),
        ("deltakv", calibrate_deltakv, 42),
        ("kvzap", calibrate_kvzap, 42),
        ("palu", calibrate_palu, 42),
        ("fp8", calibrate_fp8, 0),
        ("kvquant", calibrate_kvquant, 42),
    ):
        doc = command.__doc__ or ""
        subparser = methods.add_parser(method, help=doc.partition("\n")[0], doc=doc)
        add_common_options(subparser, "safetensors file", seed)
        command.add_options(subparser)
    return parser


def add_common_options(parser: CommandParser, kind: str, seed: int) -> None:
    """Add the options of all methods."""
    parser.add_argument("--model", required=True, help="reference, a local folder or a hub id")
    parser.add_argument("--out", required=True, type=Path, help=f"{kind} to write")
    parser.add_argument("--seed", type=int, default=seed, help=f"default: {seed}")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    return make_parser().parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: calibrate(parse_arguments(arguments)))


def calibrate(options: Namespace) -> None:
    """Make the file or folder, and print its path.

    Args:
        options: What `make_parser` reads.

    Raises:
        SettingError: An option cannot be used, or the model or the text cannot be read.
    """
    check_out(options)
    device = choose_device(options.device)
    work = {"qfilters": calibrate_heads, "duo_attention": calibrate_heads, "kvzap": calibrate_kvzap.calibrate}
    work |= {"triattention": calibrate_triattention.calibrate, "deltakv": calibrate_deltakv.calibrate}
    work |= {"palu": calibrate_palu.calibrate, "fp8": calibrate_fp8.calibrate}
    work["kvquant"] = calibrate_kvquant.calibrate
    work[options.method](options, device)


def check_out(options: Namespace) -> None:
    """Raise a SettingError if the output cannot be there, or something is there that took time to make."""
    pattern = options.method == "duo_attention"
    if pattern and options.out.is_file():
        raise SettingError(f"--out={options.out}: a folder, and there is a file")
    if any(parent.is_file() for parent in options.out.parents) or (not pattern and options.out.is_dir()):
        raise SettingError(f"--out={options.out}: no {'folder' if pattern else 'file'} can be there")
    require_writable("--out", options.out.parent)
    made = options.out / "full_attention_heads.tsv" if pattern else options.out
    if made.exists() and (options.method != "deltakv" or options.untrained):  # DeltaKV's training may go on
        raise SettingError(f"--out={options.out}: there is a file; delete it or give another name")


def choose_device(asked: str | None) -> str:
    """Return the device; SettingError if there is none of that kind."""
    import torch

    device = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    require_choice("--device", device, ("cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        raise SettingError("--device=cuda: there is no CUDA device here")
    return device


def calibrate_heads(options: Namespace, device: str) -> None:
    """Make the filters of Q-Filters or the pattern of DuoAttention, and print its path.

    Args:
        options: What `make_parser` reads.
        device: "cpu" or "cuda".

    Raises:
        SettingError: An option cannot be used, or the model or the text cannot be read.
    """
    from kvbench.cli.calibration_steps import choose_dtype, open_checkpoint
    from kvbench.models.chat_template import make_prompt_encoder
    from kvbench.training.head_patterns import compute_head_scores, write_pattern
    from kvbench.training.query_filters import compute_query_filters, split_text
    from kvbench.training.recording import write_tensors
    from kvbench.training.token_sequences import write_essays

    try:
        pattern = options.method == "duo_attention"
        least = {"sequences": 1, "length": 2} | ({"sinks": 0, "recent": 1} if pattern else {"queries": 1})
        for name, number in least.items():
            require_int(f"--{name}", getattr(options, name), number)
        checkpoint = open_checkpoint(options)
        longest = checkpoint.longest()
        length = min(options.length, longest // 2 - ROOM if pattern else longest)  # a text is read twice
        if options.text is None:
            text = "\n\n".join(islice(write_essays(options.seed), ESSAYS))
        else:
            text = options.text.read_text(encoding="utf-8")
        tokenizer = checkpoint.tokenizer()
        pieces = split_text(tokenizer, text, options.sequences, length)
        model = checkpoint.weights(choose_dtype(device), device)
        if pattern:
            made = compute_head_scores(model, pieces, make_prompt_encoder(tokenizer), len(tokenizer("").input_ids))
            source = f"KVzip head scores of {checkpoint.identity()}, {len(pieces)} texts of {length} tokens"
            write_pattern(made, options.out, options.sinks, options.recent, source)
        else:
            made = compute_query_filters(model, pieces, options.queries, options.seed)
            write_tensors(options.out, {"q_filters": made}, {"model": checkpoint.identity()})
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(str(error)) from None
    kind = "pattern" if pattern else "q_filters"
    print(f"{options.out}: {kind} {tuple(made.shape)} from {len(pieces)} texts of {length} tokens")

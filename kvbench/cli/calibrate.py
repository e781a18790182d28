"""Make the file that a method needs, for a model.

    python -m kvbench calibrate qfilters --model reference --out FILE
    python -m kvbench calibrate duo_attention --model reference --out FOLDER

qfilters (NathanGodey/qfilters, make_filters.py): rotated queries at random places of some texts; per query head the
first right singular vector v of the matrix of its queries, its sign set so that most of them project on it
positively; filter = mean of -v over the query heads of a KV head. (A singular vector has no sign of its own: without
the majority, half of the filters would keep exactly the wrong rows; NathanGodey/qfilters#6.)

duo_attention: a pattern for a model that has no trained one, by KVzip's head scores (snu-mllab/KVzip, test.py
--save_head_score): α of a head is the largest of its rows' KVzip scores over a text, the mean of it over several texts.
The pattern's config.json says so; the trained gates of DuoAttention's authors are something else.
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvbench.cli.command import CommandParser, run_command
from kvbench.models.chat_template import make_prompt_encoder
from kvbench.models.checkpoint import Checkpoint, find_model
from kvbench.tasks.common import synthetic_prose
from kvbench.training.head_patterns import compute_head_scores, write_pattern
from kvbench.training.query_filters import compute_query_filters, split_text
from kvbench.validation import SettingError, require_choice, require_int

ROOM = 32  # tokens for what is read about a text beside the text


def parse_arguments(argv: Sequence[str] | None) -> Namespace:
    parser = CommandParser("kvbench calibrate", "Make the file that a method needs.")
    parser.add_argument("method", choices=["qfilters", "duo_attention"])
    parser.add_argument("--model", required=True, help="reference, reference_v1, a local folder or a hub id")
    parser.add_argument("--out", required=True, type=Path, help="what to write: a safetensors file, or a folder")
    parser.add_argument("--text", type=Path, help="text file; default: the essays of tasks/common/synthetic_prose.py")
    parser.add_argument("--sequences", type=int, help="texts read (official: 20 for qfilters, 1 for duo_attention)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a text (official: 2048)")
    parser.add_argument("--queries", type=int, default=3000, help="queries sampled per head (official: about 3000)")
    parser.add_argument("--sinks", type=int, default=128, help="first rows of a streaming head (duo_attention)")
    parser.add_argument("--recent", type=int, default=256, help="newest rows of a streaming head (duo_attention)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 2 and one line for a setting that cannot be used."""
    return run_command(lambda: calibrate(parse_arguments(argv)))


def calibrate(options: Namespace) -> None:
    """Make the file or folder that is asked for."""
    try:
        pattern = options.method == "duo_attention"
        sequences = options.sequences if options.sequences is not None else 1 if pattern else 20
        require_int("--sequences", sequences, 1)
        for name, least in (("length", 2), ("queries", 1), ("sinks", 0), ("recent", 1)):
            require_int(f"--{name}", getattr(options, name), least)
        if pattern and options.out.is_file():
            raise SettingError(f"--out={options.out}: a folder, and there is a file")
        if any(own.is_file() for own in options.out.parents) or (not pattern and options.out.is_dir()):
            raise SettingError(f"--out={options.out}: no {'folder' if pattern else 'file'} can be there")
        require_choice("--device", options.device, ("cpu", "cuda"))
        if options.device == "cuda" and not torch.cuda.is_available():
            raise SettingError("--device=cuda: there is no CUDA device here")
        checkpoint = Checkpoint("calibrated", find_model(options.model))
        checkpoint.config()
        longest = checkpoint.longest()
        length = min(options.length, longest // 2 - ROOM if pattern else longest)  # a text is read twice
        text = (
            " ".join(synthetic_prose.write_words())
            if options.text is None
            else options.text.read_text(encoding="utf-8")
        )
        tokenizer = checkpoint.tokenizer()
        pieces = split_text(tokenizer, text, sequences, length)
        dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
        model = checkpoint.weights(dtype, options.device)
        if pattern:
            made = compute_head_scores(model, pieces, make_prompt_encoder(tokenizer), len(tokenizer("").input_ids))
            source = f"KVzip head scores of {checkpoint.identity()}, {len(pieces)} texts of {length} tokens"
            write_pattern(made, options.out, options.sinks, options.recent, source)
        else:
            made = compute_query_filters(model, pieces, options.queries, options.seed)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            save_file({"q_filters": made.contiguous()}, str(options.out), {"model": checkpoint.identity()})
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(str(error)) from None
    kind = "pattern" if pattern else "q_filters"
    print(f"{options.out}: {kind} {tuple(made.shape)} from {len(pieces)} texts of {length} tokens")

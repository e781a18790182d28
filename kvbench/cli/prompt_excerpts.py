"""Build the texts of prompts around their targets again. `kvbench results report` starts this command.

Example:
  echo '{"run": "results/runs/3f9a…", "uids": ["niah_single_1/512/0"]}' | kvbench dev prompt-excerpts

It reads requests from standard input, one JSON object a line, and prints an answer of one line for each.
"""

import json
import sys
from collections.abc import Sequence

from kvbench.cli.command import CommandParser, run_command


def make_parser() -> CommandParser:
    return CommandParser("dev prompt-excerpts", __doc__)


def answer_requests(arguments: Sequence[str]) -> None:
    """Answer the requests on standard input."""
    make_parser().parse(arguments)
    from kvbench.runs.prompt_excerpts import answer_request

    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print must not stand among the answers
    try:
        for line in sys.stdin:
            print(json.dumps(answer_request(json.loads(line))), file=answers, flush=True)
    finally:
        sys.stdout = answers


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: answer_requests(arguments))

"""Serve the report page, which follows runs as they go.

python -m kvbench dashboard [results] [--port N]
"""

import os
from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.command import CommandParser, run_command
from kvbench.report.dashboard import PORT, Server


def serve(arguments: Sequence[str]) -> None:
    """Until Ctrl-C."""
    parser = CommandParser("kvbench dashboard", __doc__)
    parser.add_argument("results", nargs="?", default="results", type=Path)
    parser.add_argument("--port", type=int, default=PORT)
    given = parser.parse_args(arguments)
    with Server(given.results, given.port) as server:
        os.nice(10)  # what runs comes first
        try:
            print(f"{server.address}  (Ctrl-C ends it)", flush=True)
            server.board.progress()
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: serve(arguments))

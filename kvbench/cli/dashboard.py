"""Serve the report page in a browser and update it while runs go on.

Examples:
  kvbench results dashboard
  kvbench results dashboard --port 9000
"""

import os
from collections.abc import Sequence

from kvbench.cli.command import CommandParser, require_extra, run_command
from kvbench.stops import waiting


def make_parser() -> CommandParser:
    parser = CommandParser("results dashboard", __doc__)
    parser.add_results()
    parser.add_argument("--port", type=int, help="port on 127.0.0.1 (default: 8765)")
    return parser


def serve(arguments: Sequence[str]) -> None:
    """Serve the page until Ctrl-C."""
    given = make_parser().parse(arguments)
    require_extra("report", "altair", "vl_convert")
    from kvbench.report.dashboard import PORT, Server

    with Server(given.results, PORT if given.port is None else given.port) as server:
        os.nice(10)  # runs go first
        try:
            print(f"{server.address}  (Ctrl-C ends it)", flush=True)
            with waiting():
                server.board.progress()
                server.serve_forever()
        except KeyboardInterrupt:
            print()


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: serve(arguments))

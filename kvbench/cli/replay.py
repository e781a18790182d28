"""Run records of a store again and compare them. `check results` and `check bundle` start this with --replay.

Examples:
  kvbench dev replay --records 10 --seed 1

With --stranger, somebody else wrote the results: the process closes its network and limits its memory first, and only
numbers and listed texts of the runs' settings count (kvbench.runs.stranger_settings).
"""

import logging
from argparse import Namespace
from collections.abc import Sequence

from kvbench.cli.command import CommandParser, move_results, run_command
from kvbench.runs import isolation
from kvbench.validation import SettingError


def make_parser() -> CommandParser:
    parser = CommandParser("dev replay", __doc__)
    parser.add_results(old=False)
    parser.add_argument("--records", type=int, required=True, help="how many records to draw")
    parser.add_argument("--seed", type=int, required=True, help="seed that draws them")
    parser.add_argument("--stranger", action="store_true", help="somebody else wrote the results")
    parser.add_argument("--agree", type=float, default=0.9, help="with --stranger: share that agrees in every run")
    parser.add_argument("--together", action="store_true", help="with --stranger: --agree is a share of all records")
    parser.add_argument(
        "settings", nargs="*", metavar="SETTING=VALUE", help="with --stranger: settings that differ here"
    )
    return parser


def replay_records(arguments: Sequence[str]) -> int:
    """Print what running the records again gives. Return 1 if a record is damaged."""
    options = make_parser().parse(arguments)
    for word in [text for text in options.settings if "=" not in text]:
        move_results(options, word)
        options.settings.remove(word)
    logging.getLogger("hydra").addHandler(logging.NullHandler())  # the reason repeats what hydra logs
    if options.stranger:
        replay_strangers(options)
        return 0
    from kvbench.runs.replay import replay
    from kvbench.store.audit import draw_records

    replayed = replay(options.results, draw_records(options.results, options.records, options.seed)[0])
    for line in replayed.lines():
        print(line)
    return 1 if replayed.damaged else 0


def replay_strangers(options: Namespace) -> None:
    """Print what running records of somebody else again gives.

    Raises:
        SettingError: A record gives something else under the same conditions, too few records of a run agree, or the
            runs need a GPU.
    """
    network = isolation.close_network()  # before a library starts a thread
    from kvbench.config.compose import parse_override
    from kvbench.runs.stranger_settings import get
    from kvbench.store.audit import draw_records
    from kvbench.store.run_folder import read_run_value

    drawn = draw_records(options.results, options.records, options.seed)[0]
    devices = {get(read_run_value(options.results / "runs" / name), "device", "type") for name in dict(drawn)}
    parsed = map(parse_override, options.settings)
    given = {override.key_or_group: override.value() for override in parsed}
    devices = {given.get("device", device) for device in devices}
    memory = isolation.limit_memory(devices == {"cpu"})
    print(f"replay: {network}, {memory}; files of this user can be read", flush=True)
    from kvbench.runs.devices import choose_device
    from kvbench.runs.replay import replay

    if "cuda" in devices:
        choose_device("cuda")  # raises once, and not for each run, if there is no GPU
    replayed = replay(options.results, drawn, given)
    for line in replayed.lines():
        print(line)
    if replayed.damaged:
        raise SettingError(f"{replayed.damaged} records give something else when executed again")
    if replayed.impossible == len(drawn) > 0:
        raise SettingError(f"none of {len(drawn)} drawn records could be executed again; the lines above say why")
    if weak := replayed.find_weak(options.agree, options.together):
        more = f", and {len(weak) - 1} more runs" if weak[1:] else ""
        raise SettingError(f"{weak[0]}, less than --agree={options.agree:.0%}{more}")


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: replay_records(arguments))

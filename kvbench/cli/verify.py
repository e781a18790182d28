"""Check a bundle: its checksums, and whether every number of its table follows from its records.

Examples:
  kvbench verify table3.zip
  kvbench verify table3.zip --digest 5b1c6f0e2a9d4477
  kvbench verify table3.zip --replay 1% model.path=/data/Llama-3.1-8B-Instruct

With --replay, the command also executes records again, drawn at random, and compares answers, scores and rows held.
A bundle contains no local paths, so settings after its name say where models and data sets are on this machine. Only
classes that conf/ names here are executed, whatever the bundle says.

The exit code is 2 if anything is wrong, and one line says what. Answers that differ where the machine, the versions or
the code differ too are counted, and are not wrong.
"""

from argparse import Namespace
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from secrets import randbelow
from tempfile import TemporaryDirectory
from typing import Any

from kvbench.cli.command import CommandParser, find_width, is_styled, run_command
from kvbench.validation import SettingError

LEAST = 16  # digits of a digest that are enough


def make_parser() -> CommandParser:
    parser = CommandParser("verify", __doc__)
    parser.add_argument("bundle", type=Path, help="the file that kvbench bundle wrote")
    parser.add_argument("--digest", help="the digest that was published, or its first characters")
    parser.add_argument("--replay", metavar="N | SHARE", help="execute N records, or a share such as 1%%, again")
    parser.add_argument("--seed", type=int, help="draw the same records as an earlier call, which printed its seed")
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help="settings that differ on this machine")
    return parser


def print_verdict(arguments: Sequence[str]) -> None:
    """Print the table that the records give.

    Raises:
        SettingError: Something is wrong with the bundle, or an argument cannot be used.
    """
    options = make_parser().parse_intermixed_args(arguments)
    if options.digest is not None and len(options.digest) < LEAST:
        raise SettingError(f"--digest={options.digest}: at least {LEAST} digits of the SHA-256 that was published")
    if options.replay is None and (options.settings or options.seed is not None):
        raise SettingError("settings and --seed: only with --replay, which executes records again")
    amount = None if options.replay is None else parse_amount(options.replay)
    names = {text: read_name(text) for text in options.settings}
    from kvbench.analysis.bundle import verify_bundle
    from kvbench.analysis.score_matrix_format import format_text

    found = verify_bundle(options.bundle)
    if options.digest is not None and not found.digest.startswith(options.digest.lower()):
        raise SettingError(f"--digest={options.digest}: the bundle has {found.digest}")
    for text, name in names.items():
        if not found.has_setting(name):
            raise SettingError(f"{text}: no run of the bundle has this setting")
    count = ceil(round(amount * found.records, 6)) if isinstance(amount, float) else amount
    if count is not None and count > found.records:
        raise SettingError(f"--replay={options.replay}: the bundle has {found.records} records")
    print(format_text(found.blocks, find_width(), styled=is_styled()))
    print(f"{found.records} records of {found.runs} runs give every number of the table.  sha256 {found.digest}")
    if count is not None:
        replay_records(found, count, options)


def parse_amount(text: str) -> int | float:
    """Return the amount of records that `--replay` names: an int for a number, a float for a share of all.

    Raises:
        SettingError: It is neither a whole number nor a share.
    """
    number = text.removesuffix("%")
    try:
        if number == text and text.isdecimal() and int(text) > 0:
            return int(text)
        if number != text and 0 < float(number) <= 100:
            return float(number) / 100
    except ValueError:
        pass
    raise SettingError(f"--replay={text}: a whole number of records from 1 on, or a share such as 1%")


def read_name(text: str) -> str:
    """Return the name of the setting that an argument such as "task.path=/data" gives.

    Raises:
        SettingError: Hydra cannot read it.
    """
    from kvbench.config.catalogue import translate_errors
    from kvbench.config.compose import parse_override

    with translate_errors():
        return parse_override(text).key_or_group


def replay_records(found: Any, count: int, options: Namespace) -> None:
    """Execute records again, and print how many agree.

    Args:
        found: The `kvbench.analysis.bundle.VerifiedBundle`.
        count: How many records to draw.
        options: The command's options.

    Raises:
        SettingError: A record gives something else under the same conditions, or none could be executed.
    """
    from kvbench.runs.replay import replay
    from kvbench.store.audit import draw_records

    seed = randbelow(1 << 31) if options.seed is None else options.seed
    print(f"replay: {count} of {found.records} records, drawn with --seed {seed}", flush=True)
    with TemporaryDirectory() as folder:
        found.unpack(Path(folder))
        counts = replay(Path(folder), draw_records(Path(folder), count, seed)[0], options.settings, from_stranger=True)
    for line in counts.lines():
        print(line)
    if counts.damaged:
        raise SettingError(f"bundle={options.bundle}: {counts.damaged} records give something else when executed again")
    if counts.impossible == count:
        raise SettingError(f"bundle={options.bundle}: none of the {count} records could be executed again")


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: print_verdict(arguments))

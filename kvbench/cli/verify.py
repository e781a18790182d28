"""Check a bundle: its checksums, and whether every number of its table follows from its records.

Examples:
  kvbench check bundle table3.zip
  kvbench check bundle table3.zip --digest 5b1c6f0e2a9d4477
  kvbench check bundle table3.zip --replay 1% model.path=/data/Llama-3.1-8B-Instruct

With --replay, the command also executes records again, drawn at random, and compares answers, scores and rows held. The
exit code is 2 if less than 90 % of a run's records agree (--agree), whatever machine the bundle names, or if a record
differs under the same conditions.

A bundle of drawn answers (results bundle --draw) has no table of scores and few answers of each run, so its 90 % are
those of all executed answers together. If SHA256SUMS beside a bundle names it, its checksum must fit.

What a GPU answered can be executed on a CPU with device=cpu: the command then says how many answers, scores and rows
agree.

Nothing of a bundle names a file, a class or a text that conf/ does not know: settings after the bundle's name say where
models and data are on this machine. Records are executed in a process without network, where the system allows it.

The exit code is 2 if anything is wrong, and one line says what.
"""

import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from secrets import randbelow
from tempfile import TemporaryDirectory
from typing import Any

from kvbench.cli.command import CommandParser, find_width, is_styled, run_command
from kvbench.config.paths import make_environment
from kvbench.validation import SettingError

LEAST = 16  # digits of a digest that are enough


def make_parser() -> CommandParser:
    parser = CommandParser("check bundle", __doc__)
    parser.add_argument("bundle", type=Path, help="the file that kvbench results bundle wrote")
    parser.add_argument("--digest", help="the digest that was published, or its first characters")
    parser.add_argument("--replay", metavar="N | SHARE", help="execute N records, or a share such as 1%%, again")
    parser.add_argument("--agree", metavar="SHARE", help="with --replay: share that must agree in every run (90%%)")
    parser.add_argument("--seed", type=int, help="draw the same records as an earlier call, which printed its seed")
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help="settings that differ on this machine")
    return parser


def print_verdict(arguments: Sequence[str]) -> int:
    """Print the table that the records give. Return the exit code.

    Raises:
        SettingError: Something is wrong with the bundle, or an argument cannot be used.
    """
    options = make_parser().parse(arguments)
    if options.digest is not None and len(options.digest) < LEAST:
        raise SettingError(f"--digest={options.digest}: at least {LEAST} digits of the SHA-256 that was published")
    if options.replay is None and (options.settings or options.seed is not None or options.agree is not None):
        raise SettingError("settings, --seed and --agree: only with --replay, which executes records again")
    amount = None if options.replay is None else parse_amount(options.replay)
    agree = 0.9 if options.agree is None else parse_share(options.agree)
    names = {text: read_name(text) for text in options.settings}
    from kvbench.analysis.bundle import verify_bundle
    from kvbench.analysis.drawn_answers import describe_drawn
    from kvbench.analysis.score_matrix_format import format_text
    from kvbench.store.checksums import CHECKSUMS, read_checksums

    bundle = verify_bundle(options.bundle)
    if options.digest is not None and not bundle.digest.startswith(options.digest.lower()):
        raise SettingError(f"--digest={options.digest}: the bundle has {bundle.digest}")
    published = read_checksums(options.bundle.parent).get(options.bundle.name)
    if published not in (None, bundle.digest):
        raise SettingError(f"bundle={options.bundle}: {CHECKSUMS} beside it has another checksum; get both files again")
    known = set().union(*map(find_settings, bundle.values)) if names else set()
    for text, name in names.items():
        if name not in known:
            raise SettingError(f"{text}: no run of the bundle has this setting")
    count = ceil(round(amount * bundle.records, 6)) if isinstance(amount, float) else amount
    if count is not None and count > bundle.records:
        raise SettingError(f"--replay={options.replay}: the bundle has {bundle.records} records")
    if bundle.drawn is None:
        print(format_text(bundle.blocks, find_width(), styled=is_styled()))
        about = f"{bundle.records} records of {bundle.runs} runs give every number of the table."
    else:
        about = f"{describe_drawn(bundle.drawn, bundle.records, bundle.runs)}. All checksums fit."
    print(f"{about}  sha256 {bundle.digest}")
    return 0 if count is None else replay_records(bundle, count, agree, options)


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


def parse_share(text: str) -> float:
    """Return the share that `--agree` names, such as 90% or 0.9.

    Raises:
        SettingError: It is no share.
    """
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise SettingError(f"--agree={text}: a share from 0% to 100%")
    return share


def find_settings(value: Mapping[str, Any]) -> set[str]:
    """Return the names of settings that can be given for a run, none if conf/ here has no such method or task."""
    from kvbench.runs.stranger_settings import list_settings

    try:
        return list_settings(value)
    except SettingError:
        return set()


def replay_records(bundle: Any, count: int, agree: float, options: Namespace) -> int:
    """Execute records again in another process, which prints how many agree. Return its exit code.

    Args:
        bundle: A `kvbench.analysis.bundle.VerifiedBundle`.
        count: How many records to draw.
        agree: The share of a run's records that must agree.
        options: The command's options.

    Raises:
        SettingError: The process was ended from outside, for example because memory did not suffice.
    """
    seed = randbelow(1 << 31) if options.seed is None else options.seed
    print(f"replay: {count} of {bundle.records} records, drawn with --seed {seed}", flush=True)
    with TemporaryDirectory() as folder:
        bundle.unpack(Path(folder))
        drawn = ["--records", str(count), "--seed", str(seed), "--agree", str(agree)]
        drawn += [] if bundle.drawn is None else ["--together"]
        command = [sys.executable, "-P", "-m", "kvbench", "dev", "replay", "--results", folder, "--stranger", *drawn]
        code = subprocess.run([*command, *options.settings], env=make_environment()).returncode
    if code < 0:
        raise SettingError(f"bundle={options.bundle}: signal {-code} ended the process that executed its records")
    return code


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: print_verdict(arguments))

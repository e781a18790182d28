"""The options that say on what text a command of `kvbench calibrate` trains, and the text."""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from kvbench.cli.command import CommandParser


def add_text_options(parser: CommandParser) -> None:
    """Add the options."""
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--text", type=Path, help="text file, or folder of .txt, .md and .rst files (default: essays)")
    text.add_argument("--dataset", help=".parquet, .jsonl, .json or .csv file, folder of such files, or hub id")
    parser.add_argument("--column", default="text", help="column of the data set with the texts (default: text)")
    parser.add_argument("--subset", help="configuration of a data set of the hub")
    parser.add_argument("--split", default="train", help="split of a data set of the hub (default: train)")
    parser.add_argument("--revision", default="main", help="revision of a data set of the hub (default: main)")


def open_texts(options: Namespace, seed: int) -> tuple[Iterator[str], str]:
    """Return the texts and a name of what is read. Without an option these are essays without end.

    Args:
        options: The parsed options.
        seed: Seed of the essays.

    Raises:
        SettingError: There is no such text. Some errors come only when the texts are read.
    """
    from kvbench.training import token_sequences

    if options.text is not None:
        return token_sequences.read_text_files(options.text), f"text {options.text.name}"
    if options.dataset is not None:
        local = Path(options.dataset).expanduser()
        rows = token_sequences.read_dataset(
            options.dataset, options.column, options.subset, options.split, options.revision
        )
        return rows, f"data set {local.name if local.exists() else options.dataset}"
    return token_sequences.write_essays(seed), "essays of kvbench"

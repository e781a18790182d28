"""The options that calibrations share, and their checks.

They say which texts are read (files, a data set, documentation of packages, or samples), how many of them, and in which
dtype the model reads.
"""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from kvbench.cli.command import CommandParser
from kvbench.validation import EMBEDDED_MODELS, SettingError, require_choice, require_int

SOURCES = ("text", "dataset", "packages", "samples")  # options that exclude each other; without one: essays
DTYPES = ("float32", "bfloat16")  # of the model


def add_text_options(parser: CommandParser) -> None:
    """Add the options."""
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--text", type=Path, help="text file, or folder of .txt, .md and .rst files (default: essays)")
    text.add_argument("--dataset", help=".parquet, .jsonl, .json or .csv file, folder of such files, or hub id")
    text.add_argument("--packages", help="docstrings of these installed packages, such as torch,numpy")
    text.add_argument("--samples", action="store_true", default=None, help="samples as the embedded model trained on")
    parser.add_argument("--column", default="text", help="column of the data set with the texts (default: text)")
    parser.add_argument("--subset", help="configuration of a data set of the hub")
    parser.add_argument("--split", default="train", help="split of a data set of the hub (default: train)")
    parser.add_argument("--revision", default="main", help="revision of a data set of the hub (default: main)")


def check_text_options(options: Namespace) -> None:
    """Raise a SettingError if the options do not fit the model. No text is read."""
    if options.samples and options.model not in EMBEDDED_MODELS:
        raise SettingError(f"--samples: for --model={'|'.join(EMBEDDED_MODELS)}, and this is --model={options.model}")


def add_sequence_options(parser: CommandParser, sequences: int) -> None:
    """Add the options of texts, and how many sequences of them are read, by default `sequences`."""
    add_text_options(parser)
    parser.add_argument("--sequences", type=int, default=sequences, help=f"sequences to read (default: {sequences})")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence (default: 2048)")


def check_sequence_options(options: Namespace) -> None:
    """Raise a SettingError if these options cannot be used. No text is read."""
    require_int("--sequences", options.sequences, 1)
    require_int("--length", options.length, 2)
    check_text_options(options)


def require_dtype(name: str) -> None:
    """Raise a SettingError if a dtype of the model cannot be chosen."""
    require_choice("--dtype", name, DTYPES)


def open_texts(options: Namespace, model: str, length: int, seed: int) -> tuple[Iterator[str], str]:
    """Return the texts that the options name, and a description of their source for metadata.

    Args:
        options: What the parser reads.
        model: Folder of the model, for --samples.
        length: Tokens of the longest sample, for --samples.
        seed: Seed of essays, of samples, and of the order of docstrings.

    Raises:
        SettingError: There are no such texts. Files are read when the iterator comes to them, so it can raise too.
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
    if options.packages is not None:
        names = options.packages.split(",")
        versions = token_sequences.find_packages(names)
        return token_sequences.read_docstrings(names, seed), f"docstrings of {', '.join(versions)}"
    if options.samples:
        return token_sequences.write_samples(Path(model), length, seed), "samples as the embedded model trained on"
    return token_sequences.write_essays(seed), "essays of kvbench"

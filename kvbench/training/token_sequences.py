"""Read or generate texts, and pack their tokens into sequences of equal length."""

import ast
import hashlib
import importlib.util
import random
import warnings
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvbench.tasks.common.dataset_rows import Row, read_hub_rows, read_rows
from kvbench.tasks.common.synthetic_prose import write_essay
from kvbench.training.recipe import Recipe
from kvbench.training.training_data import SampleMaker, load_tokenizer
from kvbench.validation import SettingError

TEXTS = (".txt", ".md", ".rst")
ROWS = (".parquet", ".jsonl", ".json", ".csv")


@dataclass(frozen=True)
class PackedText:
    """Sequences of tokens."""

    sequences: Tensor
    """Token ids, (n, length), int32."""
    digest: str
    """Hash of the texts, in the order in which they were read."""
    texts: int
    """Number of texts."""


def write_essays(seed: int) -> Iterator[str]:
    """Write essays without end, as tasks/common/synthetic_prose.py does, from a seed that no evaluation uses."""
    rng = random.Random(f"kvbench calibration/{seed}")
    while True:
        yield " ".join(write_essay(rng, rng.randint(50, 90)))


def write_samples(folder: Path, length: int, seed: int) -> Iterator[str]:
    """Write samples without end as those on which the embedded model was trained, with `<eos>` after each answer.

    Args:
        folder: The embedded model, for its tokenizer.
        length: Tokens of the longest sample.
        seed: Part of a seed that neither the training nor an evaluation uses.
    """
    tokenizer = load_tokenizer(folder)
    maker = SampleMaker(f"calibration/{seed}", tokenizer, Recipe())
    while True:
        ids = maker.sample(length).ids
        yield tokenizer.decode(ids[1:-1], skip_special_tokens=False)  # pack_texts adds the first and the last token


def read_text_files(path: Path, setting: str = "--text") -> Iterator[str]:
    """Yield the text of a file, or of all .txt, .md and .rst files below a folder in the order of their paths.

    Args:
        path: The file or the folder.
        setting: The setting that messages name.

    Raises:
        SettingError: A file cannot be read, or there is none.
    """
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in TEXTS and file.is_file())
    if not files:
        raise SettingError(f"{setting}={path}: no file there ends with {', '.join(TEXTS)}")
    for file in files:
        try:
            yield file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise SettingError(f"{setting}={path}: {file.name} is not UTF-8") from None
        except OSError as error:
            raise SettingError(f"{setting}={path}: {file.name} cannot be read ({error.strerror})") from None


def find_packages(names: Sequence[str]) -> list[str]:
    """Return "name version" of installed packages.

    Raises:
        SettingError: A name is none of an importable package, or has no folder of sources.
    """
    versions = []
    for name in names:
        if not find_sources(name):
            raise SettingError(f"--packages={','.join(names)}: there is no installed package {name!r} with sources")
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(name)
    return versions


def find_sources(package: str) -> list[Path]:
    """Return the Python files of an installed package, which is not imported; [] if there is none."""
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    folders = spec.submodule_search_locations if spec else None
    return sorted(file for folder in folders or () for file in Path(folder).rglob("*.py"))


def read_docstrings(packages: Sequence[str], seed: int) -> Iterator[str]:
    """Yield the docstrings of every file of some packages as one text per file, in a random order."""
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    files = [file for package in packages for file in find_sources(package)]
    random.Random(f"kvbench calibration/{seed}").shuffle(files)
    for file in files:
        try:
            with warnings.catch_warnings(action="ignore"):  # their strings may have invalid escapes
                tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):  # some packages hold files for other versions of Python, for tests
            continue
        docstrings = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
        if text := "\n\n".join(filter(None, docstrings)):
            yield text


def read_dataset(name: str, column: str, subset: str | None, split: str, revision: str) -> Iterator[str]:
    """Yield the texts of a data set.

    Args:
        name: A .parquet, .jsonl, .json or .csv file, a folder of such files, or an id of the hub.
        column: The column with the texts.
        subset: The configuration of a data set of the hub; None for its only one.
        split: The split of a data set of the hub.
        revision: The revision of a data set of the hub.

    Raises:
        SettingError: There is no such data set, or a row has no such text.
    """
    for where, row in find_rows(name, subset, split, revision):
        if not isinstance(row.get(column), str):
            listed = ", ".join(map(str, row))
            raise SettingError(f"--column={column}: {where} has no text there; its columns are {listed}")
        yield row[column]


def find_rows(name: str, subset: str | None, split: str, revision: str) -> Iterator[tuple[str, Row]]:
    """Yield (where, row) of a data set."""
    path = Path(name).expanduser()
    if not path.exists():
        if name[:1] in "/.~" or path.suffix in ROWS:
            raise SettingError(f"--dataset={name}: no such file or folder")
        yield from read_hub_rows("--dataset", name, revision, subset, split)
        return
    files = sorted(file for file in path.rglob("*") if file.suffix in ROWS) if path.is_dir() else [path]
    if not files:
        raise SettingError(f"--dataset={name}: no file there ends with {', '.join(ROWS)}")
    for file in files:
        yield from read_rows("--dataset", file)


def pack_texts(
    tokenizer: Any,
    texts: Iterator[str],
    length: int,
    wanted: int,
    least: int,
    *,
    between: str | None = None,
    what: str = "training text",
) -> PackedText:
    """Join all texts, and cut the tokens into sequences. A rest that fills no sequence is dropped.

    Args:
        tokenizer: A transformers tokenizer. A special token that it does not have is left out.
        texts: The texts. They are read until there are enough.
        length: Tokens of a sequence.
        wanted: Largest number of sequences.
        least: Smallest number of sequences.
        between: What stands between two texts. With None each text stands between the special tokens bos and eos.
        what: What the texts are, for messages.

    Raises:
        SettingError: The texts are too short.
    """
    before, after = ([] if token is None else [token] for token in (tokenizer.bos_token_id, tokenizer.eos_token_id))
    if between is not None:
        before, after = [], tokenizer(between, add_special_tokens=False).input_ids
    tokens, digest, count = array("i"), hashlib.sha256(), 0
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
        tokens.extend([*before, *tokenizer(text, add_special_tokens=False, verbose=False).input_ids, *after])
        count += 1
        if len(tokens) >= wanted * length:
            break
    if len(tokens) < least * length:
        raise SettingError(f"{what} too short: {len(tokens)} tokens, at least {least * length}")
    sequences = min(wanted, len(tokens) // length)
    ids = torch.frombuffer(tokens, dtype=torch.int32, count=sequences * length).view(sequences, length)
    return PackedText(ids, digest.hexdigest()[:16], count)

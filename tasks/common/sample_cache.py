"""Keep samples on disk, in a file that is named after the hash of everything that made them.

The first line of the file is the SHA-256 of the others, each of which is a sample as JSON.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvbench.atomic import replace_file
from kvbench.interfaces.task import Sample
from kvbench.threads import map_in_threads


def read_or_make(path: Path | None, prefix: str, count: int, make: Callable[[int], Sample]) -> Iterator[Sample]:
    """Yield samples 0 to count - 1: from the file as far as it reaches, then newly made ones.

    New samples are added to the file when the caller stops, so a larger count extends it. While the caller uses one,
    threads make the next few. A file that was changed is not used: stderr names it, and its samples are made anew.

    Args:
        path: The file; None to keep nothing.
        prefix: The uid of sample `index` is ``prefix/index``.
        count: Number of samples.
        make: Makes the sample of an index. Several threads may call it at once.
    """
    kept = _read(path, prefix) if path else []
    samples = list(kept)
    try:
        yield from kept[:count]
        for sample in map_in_threads(make, range(len(kept), count)):
            samples.append(sample)
            yield sample
    finally:
        if path and len(samples) > len(kept):
            _write(path, samples)


def hash_parts(*parts: str) -> str:
    """Hash several texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def hash_tokenizer(tokenizer: Any) -> str:
    """Hash what a tokenizer does.

    The hash is that of the serialised backend, without the padding and truncation that an earlier call may have set. A
    tokenizer without a backend is hashed by its vocabulary.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return hash_parts(json.dumps(tokenizer.get_vocab(), sort_keys=True))
    return hash_parts(json.dumps(json.loads(backend.to_str()) | {"padding": None, "truncation": None}))


def _read(path: Path, prefix: str) -> list[Sample]:
    """Read the samples of the file up to the first line that is not the expected one; none if it was changed."""
    samples: list[Sample] = []
    if path.is_file():
        said, _, content = path.read_bytes().partition(b"\n")
        if said != hashlib.sha256(content).hexdigest().encode():
            print(f"kvbench: {path}: has another checksum than its content; its samples are made anew", file=sys.stderr)
            return []
        for line in content.splitlines():
            try:
                stored: dict[str, Any] = dict(json.loads(line))
                fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()}
                sample = Sample(**fields)
            except (ValueError, TypeError, KeyError):
                break
            if sample.uid != f"{prefix}/{len(samples)}":
                break
            samples.append(sample)
    return samples


def _write(path: Path, samples: list[Sample]) -> None:
    """Write the whole file at once: readers see the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps(asdict(sample)) + "\n" for sample in samples).encode()
    with replace_file(path) as draft:
        draft.write_bytes(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)

"""Rows of a study that are committed, bundles of drawn answers beside them, and what must hold for both.

results/measured/<machine>/<part>.zip is drawn from the runs whose rows <part>.parquet holds, and SHA256SUMS has the
checksums of both.
"""

import csv
import hashlib
import io
import json
from pathlib import Path

import pandas

from kvbench.analysis.bundle import TABLE, VerifiedBundle, verify_bundle
from kvbench.analysis.drawn_answers import NUMBERS
from kvbench.analysis.result_lines import ROWS
from kvbench.store.checksums import CHECKSUMS, read_checksums
from tests.support.bundles import unpacked
from tests.support.repository import ROOT

MEASURED = ROOT / "results" / "measured"
SMALL = 1_000_000  # bytes of all bundles


def list_bundles(folder: Path) -> list[Path]:
    """The bundles below a folder of results."""
    return sorted(folder.rglob("*.zip"))


def check_bundles(folder: Path) -> list[VerifiedBundle]:
    """Checks the bundles and the checksums of published files below a folder, and returns the bundles."""
    paths = list_bundles(folder)
    assert sum(path.stat().st_size for path in paths) <= SMALL
    published = [*paths, *folder.rglob(f"*{ROWS}")]
    for place in sorted({path.parent for path in [*published, *folder.rglob(CHECKSUMS)]}):
        listed = read_checksums(place)
        assert {path.name for path in published if path.parent == place} <= listed.keys(), place
        for name, digest in listed.items():
            assert hashlib.sha256((place / name).read_bytes()).hexdigest() == digest, place / name
    for path in paths:
        compare_rows(path)
    return [verify_bundle(path) for path in paths]


def compare_rows(path: Path) -> None:
    """Compares the answers of a bundle with the published rows beside it."""
    answers = list(csv.DictReader(io.StringIO(unpacked(path)[TABLE].decode())))
    names = ["run", "uid", "subtask", "prompt_hash", *NUMBERS]
    rows = pandas.read_parquet(path.with_suffix(".parquet"), columns=names).set_index(["run", "uid"]).sort_index()
    for answer in answers:
        row = rows.loc[(answer["hash"], answer["uid"])]
        assert (row.subtask, row.prompt_hash) == (answer["subtask"], answer["prompt_hash"]), (path, answer)
        for name in NUMBERS:
            assert float(answer[name] or "nan") == row[name] or (answer[name] == "" and pandas.isna(row[name])), (
                path,
                name,
                answer,
            )


def is_embedded(path: Path) -> bool:
    """Whether all runs of a bundle are of the embedded model."""
    runs = [json.loads(content) for name, content in unpacked(path).items() if name.endswith("run.json")]
    return all(run["value"]["model"]["name"] == "reference" for run in runs)

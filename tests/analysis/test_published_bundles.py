"""The bundles that are committed beside a study are whole, and their answers are those of its published rows."""

import csv
import io

import pandas
import pytest

from kvbench.analysis.bundle import TABLE, write_drawn_bundle
from kvbench.store.checksums import CHECKSUMS, write_checksum
from tests.support.bundles import unpacked
from tests.support.made_up_runs import write_run
from tests.support.published_bundles import MEASURED, check_bundles, list_bundles
from tests.support.report_store import make_records


@pytest.fixture
def published(tmp_path):
    """A folder as results/measured: a bundle of drawn answers, rows and checksums."""
    for budget in (0.1, 0.2):
        write_run(tmp_path, make_records(budget, 60, count=2), budget=budget)
    place = tmp_path / "measured" / "nvidia-h200"
    write_drawn_bundle(tmp_path, {}, place / "bytes.zip", 4, 0)
    write_checksum(place / "bytes.zip")
    answers = list(csv.DictReader(io.StringIO(unpacked(place / "bytes.zip")[TABLE].decode())))
    rows = pandas.DataFrame(answers).rename(columns={"hash": "run"})
    numbers = ["score", "resident_bytes", "full_bytes", "rows_held", "rows_attended", "tokens_out"]
    rows.astype(dict.fromkeys(numbers, float)).to_parquet(place / "bytes.parquet")
    write_checksum(place / "bytes.parquet")
    return place


def test_committed_bundles_are_whole_and_agree_with_the_published_rows():
    assert len(check_bundles(MEASURED)) == len(list_bundles(MEASURED))


def test_a_bundle_and_its_rows_agree(published):
    [verified] = check_bundles(published.parent)
    assert verified.records == 4


@pytest.mark.parametrize("change", ["number", "checksum", "lacking", "bundle", "rows"])
def test_what_does_not_agree_is_found(published, change):
    if change == "number":
        rows = pandas.read_parquet(published / "bytes.parquet")
        rows.loc[2, "resident_bytes"] += 1
        rows.to_parquet(published / "bytes.parquet")
        write_checksum(published / "bytes.parquet")
    elif change == "checksum":
        (published / CHECKSUMS).write_text(f"{'0' * 64}  bytes.zip\n")
    elif change == "lacking":
        rows = pandas.read_parquet(published / "bytes.parquet")
        rows.drop(index=1).to_parquet(published / "bytes.parquet")
        write_checksum(published / "bytes.parquet")
    else:
        unlisted = f"bytes.{'zip' if change == 'bundle' else 'parquet'}"
        listed = (published / CHECKSUMS).read_text().splitlines()
        (published / CHECKSUMS).write_text("".join(f"{line}\n" for line in listed if not line.endswith(unlisted)))
    with pytest.raises((AssertionError, KeyError)):
        check_bundles(published.parent)

"""`kvbench results compare` says what two runs have in common and what only one of them has."""

import pytest

from kvbench.analysis.run_comparison import compare_runs
from kvbench.validation import SettingError
from tests.support.made_up_runs import write_run
from tests.support.report_store import make_records


def test_what_differs_and_what_is_left_out_is_said(tmp_path):
    records = make_records(1.0, 100, count=4)
    worse = {uid: record | {"score": 0.0 if uid == "niah/1" else record["score"]} for uid, record in records.items()}
    failed = {uid: record | {"error": "x" if uid == "niah/2" else None} for uid, record in worse.items()}
    runs = [
        write_run(tmp_path, own, method={"name": name})
        for name, own in (
            ("full", records), ("snapkv", worse), ("tova", failed), ("sink", {"niah/1": worse["niah/1"]}),
            ("other", {"new": records["niah/0"] | {"uid": "new"}}),
        )
    ]  # fmt: skip
    full, snapkv, tova, sink, other = runs

    def compare(one, second) -> str:
        return " ".join(compare_runs(one, second).to_text(100).split())

    text = compare(full, snapkv)
    assert text.startswith(f"A: {full.hash} (full) B: {snapkv.hash} (snapkv)") and "method.name full snapkv" in text
    assert "lost: niah/1 100 → 0" in text and "gained: none" in text
    assert "they are left out" not in text and "failed" not in text
    assert "gained: niah/1 0 → 100" in compare(snapkv, full)
    assert "Only A has 11 samples, only B 0; they are left out." in compare(full, sink)
    assert "Only A has 0 samples, only B 11; they are left out." in compare(sink, full)
    assert "1 sample failed in A or B and is left out." in compare(full, tova)
    with pytest.raises(SettingError, match=f"run={other.hash}: no sample that {full.hash} answered, too"):
        compare_runs(full, other)

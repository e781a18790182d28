"""Names of runs."""

import pytest

from kvbench.analysis.run_labels import describe_protocol, group_series
from kvbench.store.runs import StoredRun
from tests.support.made_up_runs import write_run


@pytest.mark.parametrize("length, expected", [(2048, ["length 2048"]), (None, [])])
def test_a_length_is_named_if_the_task_has_one(length, expected, tmp_path):
    run = write_run(tmp_path, {}, task={"name": "scbench", "length": length})
    assert describe_protocol(run, [run]) == expected


def test_a_method_over_others_is_named_by_them(tmp_path):
    def write(threshold: float, **base: object) -> StoredRun:
        method = {"name": "dms_threshold", "budget_setting": "threshold", "threshold": threshold, "base": base}
        return write_run(tmp_path, {}, method=method, budget=None)

    keydiff = {"name": "keydiff", "anchor": "mean"}
    runs = [write(own, **keydiff, recent=0) for own in (-0.7, -0.8)] + [write(-4, name="kvzap", path="x", recent=0)]
    assert sorted(label for label, _, _ in group_series(runs)) == [
        "dms_threshold · base=keydiff",
        "dms_threshold · base=kvzap",
    ]
    runs.append(write(-0.7, **keydiff, recent=4))
    assert sorted(label for label, _, _ in group_series(runs)) == [
        "dms_threshold · base=keydiff · base.recent=0",
        "dms_threshold · base=keydiff · base.recent=4",
        "dms_threshold · base=kvzap",
    ]

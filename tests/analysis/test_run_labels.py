"""Names of runs."""

import pytest

from kvbench.analysis.budget_series import list_subtasks
from kvbench.analysis.closing_table import draft_run_table, finish_tables
from kvbench.analysis.run_comparison import compare_runs
from kvbench.analysis.run_labels import describe_protocol, group_series, label_cache, name_presets
from kvbench.config.catalogue import load_settings
from kvbench.store.runs import StoredRun
from tests.support.made_up_runs import write_run
from tests.support.report_store import make_records


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


def test_presets_with_the_same_settings_are_all_named(tmp_path):
    """CentroidKV's kvpress SnapKV is not shown as the official code's alone. Twins of the default need no name."""
    method = load_settings("method", "snapkv", {"preset": "kvpress"})
    run = write_run(tmp_path, {}, method=method, allocator=load_settings("allocator", "pyramid", {"preset": "kvpress"}))
    assert label_cache(run.value) == "snapkv official_code/kvpress · pyramid kvpress"
    [table] = finish_tables([draft_run_table(run.value, {}, {})])
    assert table.heading["settings"] == "snapkv official_code/kvpress; pyramid kvpress"
    usual = load_settings("method", "expected_attention", {"preset": "kvpress"})
    assert label_cache(run.value | {"method": usual}) == "expected_attention · pyramid kvpress"


@pytest.mark.parametrize(
    ("group", "name", "changed", "text"),
    [
        ("method", "tova", {"decoding": False}, "decoding=false"),
        ("method", "centroidkv", {"decoding": False}, "decoding=false"),  # which no preset of it chooses
        ("codec", "kivi", {"preset": "bits4", "residual": 32}, "bits4 residual=32"),  # not the default, which has 2
        ("codec", "turboquant", {"preset": "paper4", "raw_layers": 2}, "paper4 raw_layers=2"),
        ("codec", "int4", {"group": 32}, "group=32"),
        ("codec", "palu", {"path": "file", "bits": 4}, None),  # named beside its file
        ("method", "criticalkv", {"base_args": {"window": 16}}, None),  # named with the method inside
    ],
)
def test_settings_of_no_preset_are_named_with_the_nearest_one(group, name, changed, text):
    assert name_presets(group, load_settings(group, name, changed)) == text


def test_what_is_unknown_or_decides_how_much_is_cut_is_not_named(tmp_path):
    dms = load_settings("method", "dms_threshold", {"threshold": -0.5})
    assert name_presets("method", {name: value for name, value in dms.items() if name != "base"}) is None
    assert name_presets("method", {"name": "snapkv", "window": 16}) is None  # a run of an older version
    assert name_presets("method", {"name": "of another checkout", "window": 16}) is None
    run = write_run(tmp_path, {}, budget_of="seen")
    assert label_cache(run.value) == "snapkv · budget_of=seen"


def test_subtasks_are_sorted_by_their_numbers(tmp_path):
    """In the closing table, the comparison of two runs, and the choices of `subtask=`."""
    names = [f"phonebook_{size}" for size in (100, 478, 1233)]
    first = next(iter(make_records(1.0, 100).values()))
    own = {f"{name}/0": first | {"uid": f"{name}/0", "subtask": name, "index": 0} for name in names[::-1]}
    full = write_run(tmp_path, own, method={"name": "full"})
    run = write_run(tmp_path, own, method={"name": "snapkv"}, budget=0.1)
    [table] = finish_tables([draft_run_table(run.value, full.records, run.records)])
    assert [row.subtask for row in table.rows][: len(names)] == names
    assert list(compare_runs(full, run).subtasks) == list_subtasks([full, run]) == names

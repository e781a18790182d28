"""The record of a sample: its fields are written down, and nothing else is written."""

import ast
import json
from dataclasses import fields
from math import inf

import pytest

import kvbench
from kvbench.analysis.score_matrix import build_blocks
from kvbench.cli import record_schema
from kvbench.store import audit, record
from kvbench.store.record import ANSWERED, FIELD_TYPES, SINCE, VERSION, Record, find_problems, is_of_type, read_version
from kvbench.store.run_folder import RunFolder, read_run_value
from kvbench.store.runs import load_runs
from tests.support.made_up_runs import write_run
from tests.support.repository import ROOT

OLD = ROOT / "tests" / "stores" / "0.1"
FAILED = {
    "uid": "a/0", "index": 0, "subtask": "a", "group": "a/0", "prompt_hash": "0" * 16, "target_hash": "1" * 16,
    "target": ["x"],
    "asked": "?", "tokens_in": 9, "tokens_context": 7, "budget": 0.5, "meta": {"depth": 3}, "conversation": None,
    "turn": 0, "output": "", "stop": "error", "error": "out_of_memory", "score": None, "answer": None, "also": {},
    "seconds": 1.5,
}  # fmt: skip
EXAMPLES = {int: 1, float: 2.5, str: "s", int | None: None, str | None: "s", float | None: 3.0, int | float: 0.5}


def answered(**changed: object) -> dict:
    """All that a record without an error needs."""
    held_by = {own.name: own.metadata["held_by"] for own in fields(Record)}
    found = {own.name: EXAMPLES[own.type] for own in fields(Record) if own.type in EXAMPLES and own.name != "version"}
    found = {name: value for name, value in found.items() if held_by[name] in (record.ALWAYS, record.TEXT, ANSWERED)}
    found |= {name: FAILED[name] for name in ("prompt_hash", "target_hash")} | {"survived": "64"}
    return FAILED | found | {"given_up": {"sinks": 0}, "evidence": [1, 2], "error": None} | changed


def old_records() -> dict[str, dict]:
    """The records of the old store by run and sample, as the lines say them."""
    return {
        f"{file.parent.name} {own['uid']}": own
        for file in OLD.glob("runs/*/records*.jsonl")
        for own in map(json.loads, file.read_text().splitlines())
    }


def test_a_record_is_what_it_was_made_of_and_its_version():
    for found in (FAILED, answered()):
        made = Record(**found).to_json()
        assert made == found | {"version": VERSION} and read_version(made) == VERSION and find_problems(made) == []
        assert json.loads(json.dumps(made)) == made


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"rows_hold": 1.0}, "unexpected keyword argument 'rows_hold'"),
        ({"rows_held": "many"}, "record of 'a/0': rows_held is 'many', expected float"),
        ({"rows_held": True}, "rows_held is True, expected float"),
        ({"tokens_in": 1.0}, "tokens_in is 1.0, expected int"),
        ({"quota": "all"}, "quota is 'all', expected int or null"),
        ({"target": "x"}, "target is 'x', expected list of str"),
        ({"evidence": [1, "2"]}, "evidence is [1, '2'], expected list of int"),
        ({"given_up": {"sinks": None}}, "given_up is {'sinks': None}, expected dict of int"),
        ({"meta": None}, "meta is None, expected dict of any value"),
        ({"score": 300.0}, "score is 300.0, expected float or null, from 0 to 100"),
        ({"resident_bytes": -5}, "resident_bytes is -5, expected int, from 0"),
        ({"seconds": 10**400}, "expected float, from 0"),
        ({"budget": 0}, "budget is 0, expected int or float or null, above 0"),
        ({"evidence": [1, 64]}, "evidence is [1, 64], expected list of int, from 0 to 63"),
        ({"also": {"rouge": "9"}}, "also is {'rouge': '9'}, expected dict of float or bool or null"),
        ({"prompt_hash": "p"}, "prompt_hash is 'p', expected a text like [0-9a-f]{16}"),
        ({"survived": "6"}, "survived is '6', expected a text like"),
        ({"output": None, "stop": 3}, "output is None, expected str; stop is 3, expected str"),
        ({"rows_held": record.ABSENT}, "rows_held is missing"),
        ({"asked": record.ABSENT}, "asked is missing"),
        ({"uid": record.ABSENT, "error": "out_of_memory"}, "uid is missing"),
    ],
)
def test_a_slip_in_a_record_is_an_error(changed, said):
    found = answered()
    found["uid"] = "a/0"
    with pytest.raises(TypeError) as error:
        Record(**found | changed)
    assert said in str(error.value)


@pytest.mark.parametrize("changed", [{"score": inf}, {"also": {"rouge": inf}}, {"meta": {"depth": [0, {"a": inf}]}}])
def test_infinity_becomes_null_when_it_is_written_and_is_damage_when_it_is_read(changed):
    made = Record(**answered(**changed)).to_json()
    assert find_problems(json.loads(json.dumps(made).replace("Infinity", "null"))) == []
    [said] = find_problems(json.loads(json.dumps(made).replace("Infinity", "1e999")))
    assert "expected " in said and said.endswith((", from 0 to 100", ", finite"))


def test_each_field_says_what_it_is():
    for own in fields(Record):
        about = own.metadata
        assert about["meaning"].endswith(".") and "|" not in about["meaning"] and own.type is FIELD_TYPES[own.name]
        assert not is_of_type(object(), own.type) and SINCE[own.name] in record.VERSIONS
    assert VERSION == max(record.VERSIONS) >= max(SINCE.values())


def test_the_committed_table_of_fields_is_the_one_that_is_written(capsys):
    record_schema.main([])
    assert (ROOT / "docs" / "records.md").read_text() == capsys.readouterr().out
    assert "docs/records.md" in (ROOT / "README.md").read_text()


def test_who_reads_a_record_asks_for_fields_that_it_has():
    """Every `record["…"]` and `record.get("…")` of kvbench."""
    asked = set()
    sources = (path.read_text() for path in (ROOT / "kvbench").rglob("*.py"))
    for source in (own for own in sources if "record[" in own or "record.get(" in own):
        for node in ast.walk(ast.parse(source)):
            match node:
                case ast.Subscript(value=ast.Name("record"), slice=ast.Constant(name)):
                    asked.add(name)
                case ast.Call(func=ast.Attribute(ast.Name("record"), "get"), args=[ast.Constant(name), *_]):
                    asked.add(name)
    assert len(asked) > 15 and asked <= FIELD_TYPES.keys()


def test_old_records_are_read_as_they_are():
    lines = old_records()
    assert len(lines) == 8
    for folder in (OLD / "runs").iterdir():
        for uid, found in RunFolder(OLD / "runs", read_run_value(folder)).records().items():
            assert found == lines[f"{folder.name} {uid}"] and read_version(found) == 1
    frame = kvbench.load(OLD).records()
    assert "version" not in frame
    for _, row in frame.iterrows():
        found = lines[f"{row['run']} {row['uid']}"]
        assert all(row[name] == value for name, value in found.items() if isinstance(value, str | float | bool))
        assert row["meta.units"] == found["meta"]["units"]


def test_both_old_stores_are_read_by_all(capsys):
    """Version 1 of the record, and version 3, before lines had checksums."""
    for store, count in ((OLD, 8), (OLD.with_name("0.2"), 4)):
        runs = load_runs(store)
        assert sum(len(run.records) for run in runs) == count and all(run.finished for run in runs)
        assert len(kvbench.load(store).records()) == count == len(audit.draw_records(store, count, 0)[0])
        assert all(state.endswith("finished") and not wrong for _, state, wrong in audit.audit_runs(store))
        assert all(RunFolder(store / "runs", run.value).finished for run in runs)
        assert build_blocks([run for run in runs if not run.full], runs)[0]
    assert capsys.readouterr().err == ""


def test_old_records_hold_what_the_table_says():
    for found in old_records().values():
        assert find_problems(found) == [] == find_problems(found | {"version": 2})
        assert find_problems(found | {"version": VERSION}) == [
            "weights_bytes is missing",
            "decoded_together is missing",
        ]


def test_a_later_versions_record_keeps_its_fields(tmp_path):
    later = Record(**answered(uid="a/1")).to_json() | {"version": VERSION + 1, "warmth": {"of": 3}, "tint": "blue"}
    run = write_run(tmp_path, {"a/0": Record(**answered(uid="a/0")).to_json(), "a/1": later})
    assert RunFolder(tmp_path / "runs", run.value).records()["a/1"] == later
    frame = kvbench.load(tmp_path).records(["uid", "version", "tint"]).set_index("uid")
    assert list(frame.loc["a/1"]) == [VERSION + 1, "blue"] and frame["version"]["a/0"] == VERSION
    assert [wrong for _, _, wrong in audit.audit_runs(tmp_path)] == [[]]

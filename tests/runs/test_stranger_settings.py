"""What of a stranger's run counts when it is executed: listed values, and nothing that leads to files or to code."""

from collections.abc import Mapping

import pytest
import yaml

from kvbench.config import catalogue
from kvbench.config.compose import compose_config, list_choices, to_dict
from kvbench.config.paths import CONF
from kvbench.config.provenance import content_hash
from kvbench.runs.checks import CACHE
from kvbench.runs.replay import rebuild_run
from kvbench.runs.stranger_settings import GIVEN, GROUPS, MOST, OWN_FILES, TEXTS, compose_run, find_local, list_settings
from kvbench.store.run_folder import RunFolder
from kvbench.validation import SettingError
from tests.support.selection import choose_quick


def describe(*overrides: str, **changed: object) -> dict:
    """The identity of a run of these settings, as far as it can be composed without files; `changed`: parts of it."""
    config = compose_config(overrides)
    parts = {
        group: catalogue.complete(group, catalogue.read_settings(group, config[group])) for group in (*CACHE, "task")
    }
    value = {group: catalogue.identity_settings(parts[group]) for group in CACHE}
    value |= {"task": catalogue.task_identity(parts["task"]), "model": {"name": config.model.name}}
    value |= {name: config[name] for name in ("budget", "budget_of", "block_size", "question", "seed")}
    value |= {"sampling": {"temperature": 0.0, "top_p": 1.0}, "device": {"type": "cpu", "dtype": "float32"}}
    for name, own in changed.items():
        group, _, key = name.partition("__")
        value[group] = value[group] | {key: own} if key else own
    return value


def test_every_setting_that_may_be_a_text_is_classified():
    """A new setting that could name a file or code stands in one of the two lists before the tests pass."""
    top = yaml.safe_load((CONF / "config.yaml").read_text())
    found = {name for name, own in top.items() if is_open(own, top)} - {"defaults", "hydra", "sweep", *GROUPS}
    for group in GROUPS:
        parts = [yaml.safe_load(path.read_text()) for path in (CONF / group).glob("*.yaml")]
        parts += [top.get(group, {}), *(own for part in parts for own in part.get("presets", {}).values() if own)]
        found |= {f"{group}.{name}" for part in parts for name, own in part.items() if is_open(own, top)}
        found -= {f"{group}.{own}" for own in ("_target_", "name", "preset", "presets", "defaults", "_style_")}
    assert found == TEXTS.keys() | GIVEN and not TEXTS.keys() & GIVEN


def is_open(value: object, top: Mapping[str, object]) -> bool:
    """Whether a value of conf/ is a text, a list, a mapping or null, so that another text could stand in its place."""
    if isinstance(value, str) and ".presets." in value:
        return False  # the presets hold the values
    if isinstance(value, str) and value[2:-1] in top:
        value = top[value[2:-1]]
    return not isinstance(value, bool | int | float)


@pytest.mark.parametrize("group", choose_quick(GROUPS, "allocator", "codec", "task"))
def test_runs_of_conf_are_composed_again(group):
    """The identity alone gives every setting of every choice, also those inside a base."""
    for name in list_choices(group):
        overrides = [f"{group}={name}"]
        value = describe(*overrides)
        config = compose_run(value, {})
        for own in (*CACHE, "task"):
            assert value[own]["name"] == config[own].name


@pytest.mark.parametrize(
    "overrides",
    [
        ["method=dms_threshold", "method.base=criticalkv", "method.base_args={base:knorm}", "budget=null"],
        ["method=snapkv", "method.preset=kvpress", "task=niah", "task.preset=pyramidkv"],
        ["task=phonebook", "task.sizes={start: 30, stop: 40, steps: 2}", "task.size_of=tokens"],
        ["task=ruler", "task.subtasks=[ruler_vt,ruler_cwe]", "limit=3", "codec=kivi", "codec.bits=4"],
    ],
    ids=lambda own: own[0],
)
def test_listed_values_and_numbers_count(overrides):
    value = describe(*overrides)
    assert compose_run(value, {}).task.name == value["task"]["name"]  # raises unless all settings are the identity's


@pytest.mark.parametrize(
    "changed, line",
    [
        ({"method__name": "os.system"}, "method=os.system: conf/ has no such method on this machine"),
        ({"method___target_": "os.system"}, "method._target_=os.system: a text that is not taken from a bundle"),
        ({"method__preset": "nosuch"}, "method.preset=nosuch: a text that is not taken"),
        ({"method__base": {"name": "x", "_target_": "y"}}, "method.base=x: conf/ has no such method"),
        ({"method__base": {"name": "knorm", "_target_": "os.system"}}, "method.base_args._target_=os.system: a text"),
        ({"method__pooling": "${oc.env:HOME}"}, "method.pooling=${oc.env:HOME}: a text that is not taken"),
        ({"method__window": 10**12}, f"method.window=1000000000000: more than {MOST} is not taken"),
        ({"method__window": 1e400}, f"method.window=inf: more than {MOST} is not taken"),
        ({"method__window": [[1]]}, "method.window: is nested"),
        ({"method__nosuch": 1}, "method.nosuch: snapkv has no such setting on this machine"),
        ({"method__path": "0123"}, "method.path: leads to files, data or code, so nothing of a bundle counts; give"),
        ({"task__haystack_path": "/etc/passwd"}, "task.haystack_path: leads to files"),
        ({"task__subtasks": ["niah_single_1", "../x"]}, "task.subtasks=../x: a text that is not taken from a bundle"),
        ({"task__samples": 10**6}, "task.samples=1000000: more than 10000"),
        ({"task__length": {"a": 1}}, "task.length: a mapping or a list that is not taken"),
        ({"task__subtasks": ["all"] * 20_000}, "task.subtasks: a mapping or a list that is not taken"),
        ({"task__system": "Obey"}, "task.system: leads to files, data or code"),
        ({"question": "x\ny"}, "question=x\\ny: a text that is not taken from a bundle; give question=… here"),
        ({"device": {"type": "meta"}}, "device=meta: a text that is not taken"),
        ({"model": {"name": "reference", "thinking": "no"}}, "model.thinking=no: a text"),
        ({"model": {"name": "random_int4", "weights": "int5"}}, "model.weights=int5: a text"),
        ({"task": 5}, "task=null: conf/ has no such task"),
        ({"method__window": 31}, None),
    ],
    ids=lambda own: next(iter(own)) if isinstance(own, dict) else "",
)
def test_what_does_not_count_is_one_line(changed, line):
    value = describe("method=snapkv", **changed)
    if line is None:
        assert compose_run(value, {}).method.window == 31
        return
    with pytest.raises(SettingError) as caught:
        compose_run(value, {})
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_what_is_given_counts_and_must_be_what_it_was():
    value = describe("task=math500", task__prompt="Solve {problem}")
    with pytest.raises(SettingError, match="^task.prompt=Solve .*give task.prompt=… here$"):
        compose_run(value, {})
    assert compose_run(value, {"task.prompt": "Solve {problem}"}).task.prompt == "Solve {problem}"
    with pytest.raises(SettingError, match="^task.prompt: not what it was then$"):
        compose_run(value, {"task.prompt": "{problem}"})


def test_a_setting_that_the_identity_leaves_out_differs():
    """A setting that no identity has, and a default that is another one today, are found before anything is built."""
    value = describe("method=snapkv")
    del value["method"]["window"]
    with pytest.raises(SettingError, match=r"^method\.window: not what it was then$"):
        compose_run(value, {})


ATTACK = """task: attack
dataset_path: json
output_type: generate_until
doc_to_text: !function evil.go
"""


def test_a_folder_of_tasks_of_a_stranger_is_never_read(tmp_path):
    """lm-eval executes the functions that a YAML file names. A bundle's settings named the file's folder."""
    mark = tmp_path / "executed"
    (tmp_path / "attack.yaml").write_text(ATTACK)
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w')\ndef go(doc): return ''\n")
    settings = to_dict(compose_config(["task=lm_eval", f"task.include_path={tmp_path}", "task.tasks=[attack]"]))
    value = describe("task=lm_eval", task__tasks=["attack"])
    folder = RunFolder(tmp_path / "runs", value)
    with folder.open({"settings": settings}):
        pass
    for given in ({}, find_local(settings)):
        with pytest.raises(SettingError, match=r"^task\.tasks=attack: a text that is not taken from a bundle"):
            rebuild_run(folder, "attack/0", given)
    assert not mark.exists()


def test_only_paths_to_models_and_data_of_this_machine_are_kept(tmp_path):
    settings = {
        "model": {"path": str(tmp_path)},
        "task": {"path": "hub", "qa_path": "/nowhere", "include_path": str(tmp_path), "cache": str(tmp_path)},
    }
    assert find_local(settings) == {"model.path": str(tmp_path), "task.path": "hub"}
    assert find_local(None) == {}


def test_a_hash_of_a_file_of_kvbench_stands_for_this_file():
    [file] = OWN_FILES.glob("*_deltakv.safetensors")
    assert compose_run(describe("codec=delta", codec__path=content_hash(file)), {}).codec.path == str(file)
    with pytest.raises(SettingError, match=r"^codec\.path: leads to files"):
        compose_run(describe("codec=delta", codec__path="0123"), {})


def test_settings_of_a_base_can_be_given():
    value = describe("method=criticalkv", method__base={"name": "kvzap", "path": "0123", "recent": 0})
    assert {"method.base_args.path", "model.path", "task.haystack_path", "seed"} <= list_settings(value)
    with pytest.raises(SettingError, match=r"^method\.base_args\.path: leads to files"):
        compose_run(value, {})


def test_the_format_of_the_weights_is_part_of_a_models_name():
    value = describe("method=snapkv", model={"name": "llama31_8b_int4", "weights": "int4"})
    model = compose_run(value, {}).model
    assert (model.name, model.weights) == ("llama31_8b", "int4")

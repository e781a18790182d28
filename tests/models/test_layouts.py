"""The layout of a local model is kept in the cache folder, named by all that it depends on."""

import json

import pytest

from kvbench.models import configuration, layouts
from kvbench.models.checkpoint import Checkpoint
from kvbench.models.configuration import load_configuration, load_layout, read_config_layout
from kvbench.models.layouts import is_tested
from kvbench.models.random_weights import RandomCheckpoint
from kvbench.validation import SettingError
from tests.support.families import configure


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setattr(configuration, "CACHE", tmp_path / "cache")
    return tmp_path / "cache" / "layouts"


def test_a_layout_is_read_from_the_configuration_once(checkpoint, kept, monkeypatch):
    expected = read_config_layout(load_configuration(str(checkpoint)))
    assert load_layout(str(checkpoint)) == expected
    monkeypatch.setattr(configuration, "load_configuration", None)  # nobody asks for it again
    assert load_layout(str(checkpoint)) == expected == Checkpoint("tiny", str(checkpoint)).layout()
    assert len(list(kept.iterdir())) == 1


def test_another_configuration_another_transformers_and_damage_are_read_again(checkpoint, kept, tmp_path, monkeypatch):
    expected = load_layout(str(checkpoint))
    settings = json.loads((checkpoint / "config.json").read_text())
    own = tmp_path / "own" / "config.json"
    own.parent.mkdir()
    own.write_text(json.dumps(settings | {"num_hidden_layers": settings["num_hidden_layers"] + 1}))
    assert load_layout(str(own.parent)).layers == expected.layers + 1
    [first] = [file for file in kept.iterdir() if json.loads(file.read_text())["layers"] == expected.layers]
    first.write_text("{")
    assert load_layout(str(checkpoint)) == expected and json.loads(first.read_text())["layers"] == expected.layers
    monkeypatch.setattr(configuration, "find_installed_version", lambda package: "other")
    assert load_layout(str(checkpoint)) == expected and len(list(kept.iterdir())) == 3


def test_a_cache_folder_that_cannot_be_written_costs_time_alone(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(configuration, "CACHE", tmp_path / "file")
    assert load_layout(str(checkpoint)) == read_config_layout(load_configuration(str(checkpoint)))


def test_sliding_layers_and_refusals_survive(kept, tmp_path):
    gemma = RandomCheckpoint.like("gemma3_12b", 0)
    assert gemma.layout() == gemma.layout() == read_config_layout(gemma.config()) and gemma.layout().sliding
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    for _ in range(2):
        with pytest.raises(SettingError, match="architecture gpt2 is not supported"):
            load_layout(str(tmp_path))


def test_a_type_counts_as_tested_from_a_version_on(monkeypatch):
    config = configure("nemotron")
    for version, tested in {"5.5.4": False, "5.16.1": False, "5.17.0": True, "5.23.0.dev0": True, "6.0": True}.items():
        monkeypatch.setattr(layouts, "find_installed_version", lambda name, version=version: version)
        layouts.read_version.cache_clear()
        assert is_tested(config) == tested
    layouts.read_version.cache_clear()

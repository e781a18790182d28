"""Presets: each says where its values come from, and does something else than its siblings."""

import math
import re
from itertools import combinations

import pytest
import torch
import yaml

import kvbench
from kvbench.config.catalogue import CONF, build, describe_part, find_preset, list_choices, load_settings
from kvbench.report.method_pages import read_docstring
from tests.support.method_files import make_tiny_method_args
from tests.support.tiny_models import BUILD, MADE, ids, make_fresh, tiny

GROUPS = ("method", "allocator", "codec")
FILES = [(group, name) for group in GROUPS for name in list_choices(group)]


def presets(group: str, name: str) -> list[str]:
    return list(yaml.safe_load((CONF / group / f"{name}.yaml").read_text()).get("presets", {}))


@pytest.mark.parametrize("group, name", FILES)
def test_each_names_its_source(group, name):
    """A comment behind each preset; the docstring of the module or the top of the file where there are none."""
    text = (CONF / group / f"{name}.yaml").read_text()
    lines = text.splitlines()
    assert lines[0].startswith("# ") or read_docstring(yaml.safe_load(text)["_target_"])
    for preset in presets(group, name):
        (line,) = (line for line in lines if re.match(rf"  {preset}: ", line))
        assert len(line.partition("#")[2].strip()) > 10, line


def test_the_published_taus():
    """τ1, τ2 with 1024 rows per layer and with 128; any other size: 1, 1."""
    published = {
        "llama31_8b": ((1.6, 0.4), (1.6, 0.6)),
        "mistral_7b_v03": ((0.8, 0.5), (1.0, 0.8)),
        "qwen25_7b": ((1.5, 0.6), (0.4, 0.6)),
        "llama2_7b": ((1.9, 1.8), (0.9, 2.3)),
        "llama2_13b": ((0.5, 0.4), (1.8, 2.0)),
    }
    expected = {f"{model}_{size}": pair[i] for model, pair in published.items() for i, size in enumerate((1024, 128))}
    expected |= {"paper": (1.0, 1.0), "one_allocation": (1.0, 1.0), "ffy0": (1.6, 0.6)}
    found = {preset: load_settings("allocator", "cake", {"preset": preset}) for preset in presets("allocator", "cake")}
    assert {preset: (own["tau1"], own["tau2"]) for preset, own in found.items()} == expected
    assert {own["window"] for own in found.values()} == {32}
    assert [preset for preset, own in found.items() if not own["cascade"]] == ["one_allocation"]


def test_taus_of_a_model_and_size_give_other_shares():
    """Four layers' entropies and variances, 1024 rows each on average."""
    shown = [(900.0, 0.02), (2000.0, 0.3), (1500.0, 0.01), (400.0, 0.05)]
    found = {}
    for preset in presets("allocator", "cake"):
        own = build("allocator", load_settings("allocator", "cake", {"preset": preset}))
        preferences = tuple(math.log(entropy) / own.tau1 + math.log(variance) / own.tau2 for entropy, variance in shown)
        found[preset] = own.share(1024, 4, preferences, (8000,) * 4)
        assert sum(found[preset]) == 4096
    assert found.pop("ffy0") == found["llama31_8b_128"]  # the same τ
    assert found.pop("one_allocation") == found["paper"]
    assert len(set(found.values())) == len(found)


def test_one_allocation_holds_everything_until_the_last_layer():
    peaks = []
    for preset in ("paper", "one_allocation"):
        held = kvbench.prefill(tiny("llama"), ids(300), "cake", 40, None, "cake", allocator_args={"preset": preset})
        peaks.append(held.contexts[0].memory.peak)
    assert peaks[0] < 0.8 * peaks[1]


def logits(name: str, model: str, preset: str, budget: int, **args) -> torch.Tensor:
    """After a prompt and six more tokens, one by one."""
    args = make_tiny_method_args(name, model) | {"preset": preset} | args
    held = kvbench.prefill(tiny(model), ids(120), name, budget, method_args=args)
    return torch.cat([held.extend(token) for token in ids(6, seed=1).split(1, dim=1)], 1)


@pytest.mark.parametrize(
    ("group", "name", "changed", "preset"),
    [
        ("method", "kvzip", {}, None),
        ("method", "kvzip", {"preset": "plus"}, "plus"),
        ("method", "kvzip", {"preset": "plus", "postfix": 9}, "plus"),
        ("method", "kvzip", {"chunk": 1999}, None),
        ("method", "random", {}, None),
        ("codec", "kivi", {"preset": "bits4"}, "bits4"),
    ],
)
def test_the_settings_of_a_run_tell_its_preset(group, name, changed, preset):
    """Only what the presets say differs between them; the default one needs no name."""
    assert find_preset(group, load_settings(group, name, changed)) == preset
    assert find_preset("method", {"name": "of another checkout"}) is None


@pytest.mark.parametrize(
    ("group", "name", "changed", "text"),
    [
        ("method", "snapkv", {}, "snapkv"),
        ("method", "snapkv", {"window": 16, "decoding": True}, "snapkv, decoding true, window 16"),
        ("codec", "kivi", {"preset": "bits4"}, "kivi bits4"),
        ("codec", "kivi", {"preset": "bits4", "group": 16}, "kivi bits4, group 16"),
        ("codec", "palu", {"path": "file", "bits": 4}, "palu, bits 4"),
        ("codec", "fp8", {"preset": "row", "rounding": "cut"}, "fp8 row, rounding cut"),
        ("codec", "int8", {"preset": "sglang"}, "int8 sglang"),
        ("codec", "int4", {"preset": "vllm"}, "int4 vllm"),
        ("codec", "int4", {"group": 32, "rounding": "written"}, "int4, group 32, rounding written"),
        ("method", "criticalkv", {"base_args": {"window": 16}}, "criticalkv, base (snapkv, window 16)"),
    ],
)
def test_a_table_names_the_settings_that_are_not_the_usual_ones(group, name, changed, text):
    assert describe_part(group, load_settings(group, name, changed)) == text
    assert describe_part(group, {"name": "of another checkout", "window": 16}) == "of another checkout"


def test_a_setting_that_a_file_no_longer_has_is_named():
    assert (
        describe_part("method", load_settings("method", "snapkv") | {"gone": [1], "window": 32.0}) == "snapkv, gone [1]"
    )


def test_omnikv_presets_differ(monkeypatch):
    """Published filters stand in proportion to a model's depth; of twelve layers at 0, 3 and 6."""
    monkeypatch.setitem(BUILD, "deep", deepened)
    monkeypatch.setitem(MADE, "deep", make_fresh("deep"))
    found = {preset: logits("omnikv", "deep", preset, 12) for preset in presets("method", "omnikv")}
    assert set(found) == {"paper", "code_default", "uniform", "exp", "reference"}
    for one, other in combinations(found, 2):
        assert (found[one] - found[other]).abs().max() > 1e-3, (one, other)


def deepened() -> torch.nn.Module:
    config = type(tiny("llama").config)(**tiny("llama").config.to_dict() | {"num_hidden_layers": 12})
    return type(tiny("llama"))(config)


def test_pyramidkv_is_snapkv_by_its_own_settings_and_shares():
    """Window, kernel and pooling of its scripts, the group's mean before pooling; the allocator's window is the
    method's.
    """
    method = load_settings("method", "snapkv", {"preset": "pyramidkv"})
    allocator = load_settings("allocator", "pyramid")
    assert (method["window"], method["kernel"], method["pooling"], method["group"]) == (8, 7, "max", "before")
    assert method["window"] == allocator["window"]
    held = kvbench.prefill(tiny("llama"), ids(300), "snapkv", 40, None, "pyramid", method_args={"preset": "pyramidkv"})
    counts = [len(held.places(layer, 0)) for layer in range(3)]
    assert sum(counts) == 120 and counts == sorted(counts, reverse=True) and counts[0] > counts[2]
